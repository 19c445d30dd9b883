"""The experiment's settings: their types, their checks, and what makes two runs the same run."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.utils import instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from moe_rl import discovery
from moe_rl.advantage import ADVANTAGES
from moe_rl.cold_start import ColdStart
from moe_rl.corrections import NO_CORRECTION, Correction
from moe_rl.critic import NO_CRITIC, CriticSettings
from moe_rl.drift_meter import DriftSettings
from moe_rl.engines.base import Engine
from moe_rl.loggers.base import Logger
from moe_rl.models.build import Checkpoint, Tiny
from moe_rl.optim import Optim
from moe_rl.policy_losses.base import PolicyLoss
from moe_rl.preference_model import NO_PREFERENCES, REWARDS, Preferences
from moe_rl.reference import NO_KL, ReferenceKl
from moe_rl.routers.base import Router, changes_routing, moves_by_itself
from moe_rl.tasks.base import Task
from moe_rl.update import KEEPS, OLD_LOGPROBS, REPLAYS

SUFFIXES = {
    "none": "",
    "old_policy": "_routing_replay",
    "rollout": "_r3",
    "shuffled": "_shuffled_replay",
    "thresholded": "_thresholded_replay",
    "sticky": "_sticky_replay",
}


PARTS = {"schema", "tiny", "from_checkpoint"}  # what options are made of, none themselves
ASIDE = ("launch", "logger")  # groups that no result depends on
SETTINGS = {
    "optim": Optim,
    "drift": DriftSettings,
    "cold_start": ColdStart,
    "preference_model": Preferences,
    "critic": CriticSettings,
}


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
class Arm:
    """A compared method: a policy loss, its advantages, what its training forwards replay, and how it treats an engine
    that samples from another distribution than the trainer's (old_logprobs: one of OLD_LOGPROBS; correction and its
    numbers: see moe_rl.corrections). replay_threshold: of replay=thresholded|sticky, see moe_rl.keeping. kl,
    kl_estimator: coefficient and estimator of a KL to the reference policy, see moe_rl.reference."""

    policy_loss: Any = "???"
    advantage: str = "group_std"
    replay: str = "none"
    replay_threshold: float = 0.0
    old_logprobs: str = "recompute"
    correction: str = "none"
    correction_cap: float = 2.0
    correction_low: float = 0.5
    correction_high: float = 5.0
    kl: float = 0.0
    kl_estimator: str = "k3"


@dataclasses.dataclass
class Config:
    """The whole configuration. Groups (model, router, task, engine, arm) hold one variant each."""

    study_name: str = "playground"
    seed: int = 0
    steps: int = 60
    prompts: int = 32
    completions: int = 8
    updates: int = 4
    micro_batch: int = 0
    activation_checkpointing: bool = False
    dynamic_sampling: int = 0
    overlong_buffer: int = 0
    reward: str = "verifier"
    eval_prompts: int = 128
    eval_every: int = 5
    lr_of_arm: dict[str, float] = dataclasses.field(default_factory=dict)
    arm: Any = "???"
    model: Any = "???"
    router: Any = "???"
    task: Any = "???"
    engine: Any = "???"
    optim: Any = "???"
    drift: Any = "???"
    cold_start: Any = "???"
    preference_model: Any = "???"
    critic: Any = "???"
    launch: Any = "???"
    logger: Any = None


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
    policy_loss: PolicyLoss
    advantage: str
    replay: str
    model: Tiny | Checkpoint
    router: Router
    task: Task
    engine: Engine
    optim: Optim
    drift: DriftSettings
    cold_start: ColdStart
    launch: Launch
    replay_threshold: float = 0.0
    old_logprobs: str = "recompute"
    correction: Correction = NO_CORRECTION
    kl: ReferenceKl = NO_KL
    dynamic_sampling: int = 0
    overlong_buffer: int = 0
    reward: str = "verifier"
    preference_model: Preferences = NO_PREFERENCES
    critic: CriticSettings = NO_CRITIC
    logger: Logger | None = None

    @property
    def label(self) -> str:
        """The arm's name in results: what runs, not what it was called."""
        engine = "_engine_logprobs" if self.old_logprobs == "engine" else ""
        correction = "" if self.correction.kind == "none" else f"_{self.correction.kind}"
        kl = "_kl" if self.kl.on else ""
        return self.policy_loss.name(self.advantage) + SUFFIXES[self.replay] + engine + correction + kl


def config_folder() -> str:
    """The folder of YAML values: inside an installed package, or beside it in a checkout."""
    inside = Path(__file__).parent / "conf"
    return str(inside if inside.is_dir() else Path(__file__).parent.parent / "conf")


def register() -> None:
    """Make all kinds known to Hydra as typed nodes. Idempotent."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    for group, kind in SETTINGS.items():
        store.store(group=group, name="schema", node=discovery.node(kind))
    store.store(group="arm", name="schema", node=Arm)
    store.store(group="launch", name="schema", node=Launch)
    for name, kind in {"tiny": Tiny, "from_checkpoint": Checkpoint}.items():
        store.store(group="model", name=name, node=discovery.node(kind))
    discovery.register("policy_loss", "moe_rl.policy_losses", PolicyLoss)
    discovery.register("router", "moe_rl.routers", Router)
    discovery.register("task", "moe_rl.tasks", Task)
    discovery.register("engine", "moe_rl.engines", Engine)
    discovery.register("logger", "moe_rl.loggers", Logger)


# -------------------------------------------------------------------------------------------------------------- objects
def build(config: DictConfig) -> Experiment:
    """Settings as objects, checked. ConfigError with one line for values that cannot work."""
    values = {str(key): value for key, value in config.items() if key not in ("arm", "lr_of_arm", *ASIDE)}
    for group in ("model", "router", "task", "engine", *SETTINGS):
        values[group] = _instantiate(group, config[group])
    with settings_of("arm"):
        numbers = {name: config.arm[f"correction_{name}"] for name in ("cap", "low", "high")}
        correction = Correction(kind=config.arm.correction, **numbers)
        kl = ReferenceKl(coefficient=config.arm.kl, estimator=config.arm.kl_estimator)
    experiment = Experiment(
        **values,
        policy_loss=_instantiate("arm.policy_loss", config.arm.policy_loss),
        advantage=config.arm.advantage,
        replay=config.arm.replay,
        replay_threshold=config.arm.replay_threshold,
        old_logprobs=config.arm.old_logprobs,
        correction=correction,
        kl=kl,
        launch=Launch(**{str(key): value for key, value in config.launch.items()}),
        logger=None if config.logger is None else _instantiate("logger", config.logger),
    )
    _check(experiment)
    return experiment


def settle(config: DictConfig, overrides: Iterable[str]) -> Experiment:
    """`build`, after the arm got its own learning rate where the study gives each arm one: lr_of_arm, by label.

    Changes `config`. overrides: what Hydra was given for this run. ConfigError also for an arm without a rate.
    """
    experiment, rates = build(config), dict(config.get("lr_of_arm", {}))
    with open_dict(config):  # left out by ~lr_of_arm, it is as if no study had given it
        config.lr_of_arm = {}
    if not rates:
        return experiment
    if any(override.partition("=")[0].lstrip("+") == "optim.lr" for override in overrides):
        raise ConfigError(
            "optim.lr is given and the study gives each arm its own; leave it out, or drop theirs by '~lr_of_arm'"
        )
    if experiment.label not in rates:
        raise ConfigError(f"lr_of_arm has no rate for {experiment.label}; add +lr_of_arm.{experiment.label}=<lr>")
    config.optim.lr = rates[experiment.label]
    return build(config)


def _instantiate(name: str, node: DictConfig) -> Any:
    try:
        return instantiate(node, _convert_="all")
    except Exception as error:  # Hydra wraps what the variant says; the cause is the message for the user
        cause = error.__cause__ or error
        raise ConfigError(f"{name}: {str(cause).splitlines()[0]}") from error


def _check(e: Experiment) -> None:
    for name in ("steps", "prompts", "updates"):
        if getattr(e, name) < 1:
            raise ConfigError(f"{name} is {getattr(e, name)}; set it to 1 or more")
    for name in ("seed", "micro_batch", "dynamic_sampling", "overlong_buffer", "eval_prompts", "eval_every"):
        if getattr(e, name) < 0:
            raise ConfigError(f"{name} is {getattr(e, name)}; set it to 0 or more")
    if e.completions < 2:
        raise ConfigError(f"completions is {e.completions}; a group-relative advantage needs 2 or more a prompt")
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
    if e.advantage not in ADVANTAGES:
        raise ConfigError(f"arm.advantage is {e.advantage!r}; choose one of {', '.join(ADVANTAGES)}")
    if e.advantage == "gae" and not e.policy_loss.token_advantages:
        raise ConfigError(
            f"arm.advantage=gae gives each token an advantage of its own, {type(e.policy_loss).__name__} takes one a "
            f"sequence; choose {type(e.policy_loss).advantage}, or a loss such as ppo or gspo_token"
        )
    if e.policy_loss.advantage == "gae" and e.advantage != "gae":
        raise ConfigError(
            f"{type(e.policy_loss).__name__} takes its advantages from a critic and arm.advantage={e.advantage} has "
            "none; set arm.advantage=gae, or choose dapo, the same loss without a critic"
        )
    if e.replay not in REPLAYS:
        raise ConfigError(f"arm.replay is {e.replay!r}; choose one of {', '.join(REPLAYS)}")
    if not 0 <= e.replay_threshold < math.inf:
        raise ConfigError(f"arm.replay_threshold is {e.replay_threshold}; set it to 0 or more")
    if e.replay_threshold and e.replay not in KEEPS:
        raise ConfigError(
            f"arm.replay_threshold is {e.replay_threshold} and arm.replay={e.replay} has none; choose "
            f"{' or '.join(KEEPS)}"
        )
    if e.old_logprobs not in OLD_LOGPROBS:
        raise ConfigError(f"arm.old_logprobs is {e.old_logprobs!r}; choose one of {', '.join(OLD_LOGPROBS)}")
    if e.old_logprobs == "engine" and e.correction.kind not in ("none", "rspo"):
        raise ConfigError(
            f"arm.correction={e.correction.kind} weighs the trainer's old policy against the engine, and with "
            "arm.old_logprobs=engine that is the engine itself; set arm.old_logprobs=recompute or arm.correction=none"
        )
    if e.replay == "shuffled" and sequences == e.updates:
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
        if e.replay != "none":
            raise ConfigError(f"arm.replay={e.replay} needs MoE layers; a dense model runs with arm.replay=none")
        if e.correction.needs_routers:
            raise ConfigError(
                f"arm.correction={e.correction.kind} needs MoE layers; a dense model runs with arm.correction=none"
            )
        if changes_routing(e.router):
            raise ConfigError("a router variant needs MoE layers; a dense model runs with router=native")
        if e.engine.router_noise:
            raise ConfigError(
                f"engine.router_noise={e.engine.router_noise} needs MoE layers; a dense model runs with "
                "engine.router_noise=0"
            )
        if e.optim.needs_routers:
            raise ConfigError(
                "optim.trains, router_lr, balance_loss and router_kl need MoE layers; a dense model runs with "
                "optim.trains=all optim.router_lr=1 optim.balance_loss=0 optim.router_kl=0"
            )


# ------------------------------------------------------------------------------------------------------------- identity
def identity(config: DictConfig) -> dict[str, Any]:
    """What makes a run this run: the resolved config without where and how it was launched and mirrored."""
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items() if key not in ASIDE}


def knobs(config: DictConfig, overrides: Iterable[str]) -> dict[str, Any]:
    """The settings that a launch varied, arm, seed and study apart: {key: resolved value}. They name a run's folder.

    overrides: what Hydra was given for this run, `key=value` each. A chosen option (`router=binned`) keeps its name.
    """
    varied = {}
    for override in overrides:
        key, _, text = override.partition("=")
        key = key.lstrip("+~")
        if key in ("arm", "seed", "study", "study_name") or key.startswith((*ASIDE, "hydra", "lr_of_arm")):
            continue
        value = OmegaConf.select(config, key)
        varied[key] = text if value is None or isinstance(value, (DictConfig, ListConfig)) else value
    return varied
