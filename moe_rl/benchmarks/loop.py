"""moe_rl's side of the benchmarks: runs that are timed, a cycle at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from moe_rl import cli, loop
from moe_rl.config import build, config_folder
from moe_rl.engines.hf import Hf
from moe_rl.experiment import Experiment
from moe_rl.journal import Journal
from moe_rl.store import open_run
from moe_rl.tasks.base import Example
from moe_rl.tasks.chain_sum import ChainSum


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedLength(Hf):
    """`Hf` with responses of exactly max_new_tokens tokens."""

    def _settings(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, completions: int
    ) -> GenerationConfig:
        settings = super()._settings(model, tokenizer, completions)
        settings.min_new_tokens = self.max_new_tokens
        return settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Graded(ChainSum):
    """Chain sums of which even random completions are rewarded unequally: by their share of digits.

    idle: share of the prompts whose completions are all rewarded alike, with 0, so that they have no advantage.
    """

    idle: float = 0.0

    def reward(self, example: Example, completion: str) -> float:
        if random.Random(example.prompt).random() < self.idle:
            return 0.0
        return sum(character.isdigit() for character in completion) / max(len(completion), 1)


def experiment(overrides: Sequence[str]) -> Experiment:
    """The settings of conf/ with `overrides`, as on the command line. ConfigError for what cannot work."""
    cli.settings.register()
    with initialize_config_dir(config_folder(), version_base="1.3"):
        return build(compose("config", overrides=list(overrides)))


def bare_experiment(overrides: Sequence[str], tokens: int, idle: float = 0.0) -> Experiment:
    """`experiment` on `Graded`, responses of `tokens` tokens, without evaluation, cold start and checkpoints."""
    own = ["eval_prompts=0", "cold_start.steps=0", "launch.checkpoint_every=0", f"engine.max_new_tokens={tokens}"]
    e = experiment([*own, *overrides])
    return dataclasses.replace(e, engine=FixedLength(max_new_tokens=tokens), task=Graded(idle=idle))


class Cycles:
    """A run of the loop, a cycle at a time. A with-block, in which its tables lie in a temporary folder.

    folder: the run's own, in the block.
    """

    def __init__(self, e: Experiment):
        self.e = e

    def __enter__(self) -> Cycles:
        self.stack = contextlib.ExitStack()
        home = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.folder = home / "run"
        writer = self.stack.enter_context(open_run(self.folder, {}))
        assert writer is not None
        self.steps = loop.train(self.e, Journal(self.e.steps, writer), str(home / "cache"))
        next(self.steps)
        return self

    def __exit__(self, *error: Any) -> None:
        self.steps.close()
        self.stack.close()

    def cycle(self) -> dict[str, float]:
        """Take one step. CPU seconds by part; what belongs to none, writing tables mostly, counts as updates."""
        start = time.process_time()
        row = next(self.steps)
        total = time.process_time() - start
        named = {"generate": row["rollout_s"], "old_logprobs": row["old_pass_s"], "drift": row["drift_s"]}
        return named | {"updates": total - sum(named.values())}
