"""What a cycle costs: moe_rl's loop against TRL's GRPOTrainer on the same model, task and shapes.

A cycle samples one batch of rollouts and takes M optimizer steps on it. Used by `experiments/bench.py cycle`; needs the
extra `trl`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from moe_rl.benchmarks.loop import Cycles, bare_experiment
from moe_rl.benchmarks.turns import one_thread, paired
from moe_rl.experiment import Experiment
from moe_rl.tasks.base import Example

SIZES = {
    "tiny": {"layers": 2, "hidden_size": 16, "experts": 4, "top_k": 2, "expert_size": 8},
    "small": {"layers": 4, "hidden_size": 64, "experts": 16, "top_k": 4, "expert_size": 64},
    "large": {"layers": 8, "hidden_size": 128, "experts": 16, "top_k": 4, "expert_size": 128},
}
PARTS = ("generate", "old_logprobs", "updates", "drift")
PROMPT, VOCABULARY = 6, 51  # tokens of a prompt of the task, such as 3+4+8=; of the character tokenizer
MATRIX = 768  # side of the matrix product whose rate is the limit: large enough for the kernel to reach its best


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cycle:
    """The shapes of `cycle`. size: some of SIZES, with commas between. tokens: of every response. updates: M.

    idle: shares of the prompts, with commas between, whose completions are all rewarded alike.
    cycles: that are timed, of each side; one more before them is dropped. trl_experts: the expert kernel of TRL's side,
    by default transformers' own; moe_rl's is that of conf/.
    """

    size: str = "small,large"
    idle: str = "0,0.5"
    prompts: int = 32
    completions: int = 8
    tokens: int = 24
    updates: int = 4
    cycles: int = 8
    trl_experts: str = "grouped_mm"

    def __post_init__(self) -> None:
        for name in self.size.split(","):
            if name not in SIZES:
                raise ValueError(f"size is {self.size!r}; choose from {', '.join(SIZES)}, with commas between")
        for share in self.idle.split(","):
            try:
                possible = 0 <= float(share) <= 1
            except ValueError:
                possible = False
            if not possible:
                raise ValueError(f"idle is {self.idle!r}; give shares from 0 to 1, with commas between")
        for field in dataclasses.fields(self):
            if field.type == "int" and getattr(self, field.name) < 1:
                raise ValueError(f"{field.name} is {getattr(self, field.name)}; set it to 1 or more")
        if self.prompts * self.completions % self.updates:
            raise ValueError(
                f"{self.prompts} prompts x {self.completions} completions do not divide into {self.updates} updates"
            )

    @property
    def sequences(self) -> int:
        return self.prompts * self.completions

    def cases(self) -> Iterator[tuple[str, Cycle]]:
        """What is measured one after the other: a name, and settings with one size and one share."""
        for size, idle in itertools.product(self.size.split(","), self.idle.split(",")):
            name = f"{size}, {float(idle):.0%} idle" if float(idle) else size
            yield f"cycle {name}", dataclasses.replace(self, size=size, idle=idle)


def cycle(settings: Cycle) -> list[dict[str, Any]]:
    """Rows of CPU seconds a cycle (`process_time` of one thread) of TRL's GRPOTrainer and of moe_rl's loop.

    Both do GRPO on the same Qwen3-MoE from the same weights, on the same task, with AdamW, without activation
    checkpointing, KL or checkpoints; responses have `tokens` tokens each. moe_rl runs at the defaults of conf/, with
    drift measured after each update. The two take turns, a cycle each, in one process. Rewards are graded, so that
    every group has advantages, but for a share of idle ones: TRL trains on these too, moe_rl does not.
    cpu_s: median over cycles; least_s; *_s: medians of its parts. ratio: of the medians to TRL's; paired_ratio: the
    median over cycles of the ratio to TRL's cycle before it, paired_low to paired_high its 95 % interval.
    peak_mb: the most memory that a process of its own took for one cycle, over_mb: above its libraries and the model;
    memory_ratio: of the peaks.
    limit_share: the operations that the method needs, 2 a multiply-add (sampling and M updates; attention in full
    squares), as a share of what a product of square fp32 matrices manages in as many CPU seconds, at limit_gflops.
    """
    rows = []
    for name, case in settings.cases():
        memory = {side: _in_child(_memory, side, case) for side in ("trl", "moe_rl")}
        with one_thread():
            seconds, parameters, limit = _take_turns(case)
        needed = 2 * multiply_adds(case)
        for side, laps in seconds.items():
            totals = [sum(lap.values()) for lap in laps]
            others = [sum(lap.values()) for lap in seconds["trl"]]
            median = statistics.median(totals)
            row: dict[str, Any] = {"what": name, "mode": side, "parameters": parameters, "cpu_s": median}
            row |= {"least_s": min(totals)}
            row |= {f"{part}_s": statistics.median(lap[part] for lap in laps) for part in PARTS}
            row |= {"tokens_per_s": case.sequences * case.tokens / median}
            row |= {"ratio": median / statistics.median(others), **paired(totals, others)}
            row |= memory[side] | {"memory_ratio": memory[side]["peak_mb"] / memory["trl"]["peak_mb"]}
            row |= {"gflop": needed / 1e9, "limit_gflops": limit / 1e9, "limit_share": needed / median / limit}
            rows.append(row)
    return rows


def _take_turns(settings: Cycle) -> tuple[dict[str, list[dict[str, float]]], int, float]:
    """CPU seconds by part of each timed cycle of both sides; the parameters; the limit in operations a CPU second."""
    e = experiment(settings, settings.cycles + 1)
    ours, limits = Cycles(e), []
    laps: dict[str, list[dict[str, float]]] = {"trl": [], "moe_rl": []}

    def after_cycle(lap: dict[str, float]) -> None:
        laps["trl"].append(lap)
        laps["moe_rl"].append(ours.cycle())
        limits.append(matrix_rate())

    with ours:
        parameters = _train_trl(e, settings, after_cycle)
    return {side: of_side[1:] for side, of_side in laps.items()}, parameters, max(limits)


def matrix_rate() -> float:
    """Operations (2 a multiply-add) a CPU second of a product of two square fp32 matrices."""
    one, other = torch.rand(MATRIX, MATRIX), torch.rand(MATRIX, MATRIX)
    start = time.process_time()
    one @ other
    return 2 * MATRIX**3 / (time.process_time() - start)


def multiply_adds(settings: Cycle) -> float:
    """What a cycle needs at least: sampling, which says the old log probabilities, and M updates.

    A backward is two forwards; sequences without advantage have none.
    """
    size, B, T, S = settings.size, settings.sequences, settings.tokens, PROMPT + settings.tokens
    sampling = forward(size, PROMPT, PROMPT, 1) + sum(forward(size, 1, keys, 1) for keys in range(PROMPT + 1, S))
    return B * sampling + (3 - 2 * float(settings.idle)) * B * forward(size, S, S, T + 1)


def forward(size: str, queries: int, keys: int, scored: int) -> int:
    """Multiply-adds of one sequence's forward: new tokens, how many each attends to, how many have logits computed."""
    L, H, E, K, F = (SIZES[size][name] for name in ("layers", "hidden_size", "experts", "top_k", "expert_size"))
    return queries * L * (4 * H * H + 2 * keys * H + H * E + 3 * K * H * F) + scored * H * VOCABULARY


def experiment(settings: Cycle, cycles: int) -> Experiment:
    """The run that is timed: the defaults of conf/, without evaluation, cold start and checkpoints."""
    overrides = [f"model.{name}={value}" for name, value in SIZES[settings.size].items()]
    overrides += [f"{name}={getattr(settings, name)}" for name in ("prompts", "completions", "updates")]
    return bare_experiment([*overrides, f"steps={cycles}", "arm=grpo"], settings.tokens, float(settings.idle))


# ---------------------------------------------------------------------------------------------------------- TRL's side
def _train_trl(e: Experiment, settings: Cycle, after_cycle: Callable[[dict[str, float]], None]) -> int:
    """Train with TRL for e.steps cycles. after_cycle: is told each one's CPU seconds by part; its own do not count.

    Returns the number of parameters. ImportError for another TRL than the extra's.
    """
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig

    from moe_rl.integrations.trl import GRPOTrainer  # from there, for it refuses another TRL

    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # TRL calls it by old names
    clock = _Clock()

    class Timed(GRPOTrainer):
        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            with clock.part("generate"):
                return super()._generate(*args, **kwargs)

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            with clock.part("old_logprobs"):
                return super()._generate_and_score_completions(inputs)

    class Turns(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            clock.lap()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % settings.updates == 0:
                after_cycle(clock.lap())
                clock.lap()

    def reward(completions: list[str], prompt_text: list[str], answer: list[str], **columns: Any) -> list[float]:
        examples = [Example("", prompt, right) for prompt, right in zip(prompt_text, answer, strict=True)]
        return [e.task.reward(example, text) for example, text in zip(examples, completions, strict=True)]

    examples = e.task.examples("train", e.prompts * e.steps, e.seed)
    model, tokenizer = e.model.build(e.seed)
    model.set_experts_implementation(settings.trl_experts)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Timed(
            model=model,
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=folder, use_cpu=True, seed=e.seed, bf16=False, report_to="none", save_strategy="no",
                logging_steps=1, disable_tqdm=True, max_steps=e.steps * e.updates,
                learning_rate=e.optim.lr, lr_scheduler_type="constant", weight_decay=e.optim.weight_decay,
                max_grad_norm=e.optim.max_grad_norm, activation_checkpointing=False,
                per_device_train_batch_size=settings.sequences // e.updates, gradient_accumulation_steps=1,
                steps_per_generation=e.updates, num_iterations=1, num_generations=e.completions,
                max_completion_length=settings.tokens, generation_kwargs={"min_new_tokens": settings.tokens},
                temperature=1.0, beta=0.0, loss_type="grpo", epsilon=0.2, epsilon_high=0.27, router_aux_loss_coef=0.0,
            ),
            train_dataset=Dataset.from_dict(
                {"prompt": [x.prompt for x in examples], "prompt_text": [x.prompt for x in examples],
                 "answer": [x.answer for x in examples]}
            ),
            processing_class=tokenizer,
            callbacks=[Turns()],
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return sum(parameter.numel() for parameter in model.parameters())


class _Clock:
    """CPU seconds since the last lap, by part; inner parts do not count towards outer ones, the rest is updates."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.running, self.since = "updates", time.process_time()

    def _switch(self, part: str) -> str:
        now, before = time.process_time(), self.running
        self.seconds[before] += now - self.since
        self.running, self.since = part, now
        return before

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        before = self._switch(name)
        try:
            yield
        finally:
            self._switch(before)

    def lap(self) -> dict[str, float]:
        self._switch(self.running)
        lap, self.seconds = self.seconds, dict.fromkeys(PARTS, 0.0)
        return lap


# -------------------------------------------------------------------------------------------------------------- memory
def _in_child(function: Callable[..., dict[str, float]], *args: Any) -> dict[str, float]:
    """`function` in a process of its own, forked from one that has imported torch and this module, and no more."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(1, mp_context=processes) as pool:
        return pool.submit(function, *args).result()


def _memory(side: str, settings: Cycle) -> dict[str, float]:
    """Megabytes that one side takes for one cycle: the peak, and what of it is above its libraries and the model."""
    torch.set_num_threads(1)
    e = experiment(settings, cycles=1)
    if side == "trl":
        importlib.import_module("moe_rl.integrations.trl")
    e.model.build(e.seed)
    before = _peak()
    if side == "trl":
        _train_trl(e, settings, lambda lap: None)
    else:
        with Cycles(e) as ours:
            ours.cycle()
    return {"peak_mb": _peak(), "over_mb": _peak() - before}


def _peak() -> float:
    """Peak resident memory of this process, in megabytes (10^6 bytes)."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
