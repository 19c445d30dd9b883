"""The experiment: the settings of a run as objects, checked against each other."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from moe_rl.arm import Arm
from moe_rl.cold_start import ColdStart
from moe_rl.critic import CriticSettings
from moe_rl.drift.meter import DriftSettings
from moe_rl.engines.base import Engine
from moe_rl.loggers.base import Logger
from moe_rl.models.build import Checkpoint, Tiny
from moe_rl.optim import Optim
from moe_rl.preference_model import REWARDS, Preferences
from moe_rl.routers.base import Router, changes_routing, moves_by_itself
from moe_rl.tasks.base import Task


class ConfigError(ValueError):
    """Settings that cannot be run; the message says what to change."""


@contextlib.contextmanager
def settings_of(group: str) -> Iterator[None]:
    """Turn a ValueError from a group's own object into a ConfigError that names the group."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{group}: {error}") from error


@dataclasses.dataclass
class Launch:
    """Where and how, which no result depends on.

    jobs: runs at once. threads: of each run. progress: show it. checkpoint_every: steps between checkpoints, 0: none.
    keep_policy: save the trained model, its router variant and the tokenizer to policy/ in the run's folder.
    """

    results_dir: str = "results"
    jobs: int = 2
    threads: int = 1
    device: str = "cpu"
    progress: bool = True
    checkpoint_every: int = 1
    keep_policy: bool = False


@dataclasses.dataclass(frozen=True)
class Experiment:
    """The settings as objects: what the loop reads."""

    study_name: str
    seed: int
    steps: int
    prompts: int
    completions: int
    updates: int
    micro_batch: int
    activation_checkpointing: bool
    eval_prompts: int
    eval_every: int
    arm: Arm
    model: Tiny | Checkpoint
    router: Router
    task: Task
    engine: Engine
    optim: Optim
    drift: DriftSettings
    cold_start: ColdStart
    launch: Launch
    dynamic_sampling: int = 0
    overlong_buffer: int = 0
    reward: str = "verifier"
    preference_model: Preferences = dataclasses.field(default_factory=Preferences)
    critic: CriticSettings = dataclasses.field(default_factory=CriticSettings)
    logger: Logger | None = None

    @property
    def train_all(self) -> bool:
        """Whether sequences without advantage are trained on too: what else is asked of the policy learns from them."""
        return self.arm.kl.on or self.optim.pressure.on


def check(e: Experiment) -> None:
    """ConfigError, in one line, for settings that cannot work together."""
    for name in ("steps", "prompts", "completions", "updates"):
        if getattr(e, name) < 1:
            raise ConfigError(f"{name} is {getattr(e, name)}; set it to 1 or more")
    for name in ("seed", "micro_batch", "dynamic_sampling", "overlong_buffer", "eval_prompts", "eval_every"):
        if getattr(e, name) < 0:
            raise ConfigError(f"{name} is {getattr(e, name)}; set it to 0 or more")
    if e.completions < 2 and not e.arm.has_critic:
        raise ConfigError(f"completions is {e.completions}; a group-relative advantage needs 2 or more a prompt")
    if e.dynamic_sampling and e.arm.has_critic:
        raise ConfigError(
            f"dynamic_sampling is {e.dynamic_sampling}, and replaces groups of equal rewards, from which only a "
            "group-relative advantage learns nothing; with arm.advantage=gae set dynamic_sampling=0"
        )
    sequences = e.prompts * e.completions
    if sequences % e.updates:
        raise ConfigError(
            f"{e.prompts} prompts x {e.completions} completions = {sequences} sequences do not divide into "
            f"{e.updates} updates; change prompts, completions or updates"
        )
    if e.overlong_buffer > e.engine.max_new_tokens:
        raise ConfigError(
            f"overlong_buffer is {e.overlong_buffer} and responses have at most {e.engine.max_new_tokens} tokens; "
            "lower overlong_buffer or raise engine.max_new_tokens"
        )
    if e.reward not in REWARDS:
        raise ConfigError(f"reward is {e.reward!r}; choose one of {', '.join(REWARDS)}")
    if e.arm.replay == "shuffled" and sequences == e.updates:
        raise ConfigError(
            f"arm.replay=shuffled exchanges the sequences of a mini-batch, and {sequences} sequences in {e.updates} "
            "updates have one each; lower updates"
        )
    if e.optim.trains in ("no_router", "experts") and moves_by_itself(e.router):
        raise ConfigError(
            f"optim.trains={e.optim.trains} freezes the router, which {type(e.router).__name__} moves after every "
            "update; choose another router or optim.trains=all"
        )
    if e.launch.checkpoint_every < 0:
        raise ConfigError(f"launch.checkpoint_every is {e.launch.checkpoint_every}; set it to 0 or more")
    if e.launch.jobs < 1 or e.launch.threads < 1:
        raise ConfigError(f"launch.jobs is {e.launch.jobs} and launch.threads {e.launch.threads}; both are 1 or more")
    if getattr(e.model, "family", "") == "dense":
        refuse_without_routers(e)


def refuse_without_routers(e: Experiment, because: str = "") -> None:
    """ConfigError, which begins with `because`, for a setting that makes no sense on a model without MoE layers."""
    for value, default, name in (
        (e.arm.replay, "none", "arm.replay"),
        (e.arm.correction.kind if e.arm.correction.needs_routers else "none", "none", "arm.correction"),
        (e.engine.router_noise, 0, "engine.router_noise"),
    ):
        if value != default:
            raise ConfigError(f"{because}{name}={value} needs MoE layers; a dense model runs with {name}={default}")
    if changes_routing(e.router):
        raise ConfigError(f"{because}a router variant needs MoE layers; a dense model runs with router=native")
    if e.optim.needs_routers:
        raise ConfigError(
            f"{because}optim.trains, router_lr, balance_loss and router_kl need MoE layers; a dense model runs with "
            "optim.trains=all optim.router_lr=1 optim.balance_loss=0 optim.router_kl=0"
        )
