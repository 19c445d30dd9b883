"""The settings as Hydra has them: their types, how an experiment is built of them, and what makes two runs the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.utils import instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from moe_rl import discovery
from moe_rl.arm import Arm
from moe_rl.cold_start import ColdStart
from moe_rl.corrections import Correction
from moe_rl.critic import CriticSettings
from moe_rl.drift.meter import DriftSettings
from moe_rl.engines.base import Engine
from moe_rl.experiment import ConfigError, Experiment, Launch, check, settings_of
from moe_rl.loggers.base import Logger
from moe_rl.models.build import Checkpoint, Tiny
from moe_rl.optim import Optim
from moe_rl.policy_losses.base import PolicyLoss
from moe_rl.preference_model import Preferences
from moe_rl.reference import ReferenceKl
from moe_rl.routers.base import Router
from moe_rl.tasks.base import Task

PARTS = {"schema", "tiny", "from_checkpoint"}  # what options are made of, none themselves
ASIDE = ("launch", "logger")  # groups that no result depends on
KINDS: dict[str, Any] = {  # what a group makes, where there is a choice of classes
    "model": Tiny | Checkpoint,
    "router": Router,
    "task": Task,
    "engine": Engine,
}
SETTINGS = {
    "optim": Optim,
    "drift": DriftSettings,
    "cold_start": ColdStart,
    "preference_model": Preferences,
    "critic": CriticSettings,
}


@dataclasses.dataclass
class ArmSettings:
    """What an arm is made of, see moe_rl.arm. correction and its numbers: see moe_rl.corrections. kl, kl_estimator:
    coefficient and estimator of a KL to the reference policy, see moe_rl.reference."""

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
    store.store(group="arm", name="schema", node=ArmSettings)
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
    known = {field.name for field in dataclasses.fields(Config)}
    for key in sorted(set(config) - known):
        raise ConfigError(f"{key} was added and is no setting; leave it out (--help shows every setting)")
    for key in sorted(known - {"lr_of_arm"}):
        if key not in config or OmegaConf.is_missing(config, key):
            raise ConfigError(f"{key} was taken out and is needed; leave out ~{key}")
    values = {str(key): value for key, value in config.items() if key not in ("arm", "lr_of_arm", *ASIDE)}
    for group, kind in {**KINDS, **SETTINGS}.items():
        values[group] = _instantiate(group, config[group], kind)
    experiment = Experiment(
        **values,
        arm=_build_arm(config.arm),
        launch=Launch(**{str(key): value for key, value in config.launch.items()}),
        logger=None if config.logger is None else _instantiate("logger", config.logger, Logger),
    )
    check(experiment)
    return experiment


def _build_arm(node: DictConfig) -> Arm:
    policy_loss = _instantiate("arm.policy_loss", node.policy_loss, PolicyLoss)
    with settings_of("arm"):
        numbers = {name: node[f"correction_{name}"] for name in ("cap", "low", "high")}
        return Arm(
            policy_loss=policy_loss,
            advantage=node.advantage,
            replay=node.replay,
            replay_threshold=node.replay_threshold,
            old_logprobs=node.old_logprobs,
            correction=Correction(kind=node.correction, **numbers),
            kl=ReferenceKl(coefficient=node.kl, estimator=node.kl_estimator),
        )


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
    if experiment.arm.label not in rates:
        raise ConfigError(
            f"lr_of_arm has no rate for {experiment.arm.label}; add +lr_of_arm.{experiment.arm.label}=<lr>"
        )
    config.optim.lr = rates[experiment.arm.label]
    return build(config)


def _instantiate(name: str, node: DictConfig, kind: Any) -> Any:
    try:
        made = instantiate(node, _convert_="all")
    except Exception as error:  # Hydra wraps what the variant says; the cause is the message for the user
        cause = error.__cause__ or error
        raise ConfigError(f"{name}: {' '.join(str(cause).split())[:300]}") from error
    if not isinstance(made, kind):
        said = "null" if made is None else type(made).__name__
        wanted = getattr(kind, "__name__", str(kind))
        raise ConfigError(f"{name}: {said} is no {wanted}; choose an option of {name}, or point _target_ to a {wanted}")
    return made


# ------------------------------------------------------------------------------------------------------------- identity
def identity(config: DictConfig) -> dict[str, Any]:
    """What makes a run this run: the resolved config without where and how it was launched and mirrored."""
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items() if key not in ASIDE}


def knobs(config: DictConfig, overrides: Iterable[str]) -> dict[str, Any]:
    """The settings that a launch varied, arm, seed and study apart: {key: resolved value}. They name a run's folder.

    overrides: what Hydra was given for this run, `key=value` each. A chosen option (`router=binned`) keeps its name.
    A default that is given counts: a sweep over router=native,binned names both, and a folder's name follows from what
    was typed alone, whatever a default has become since.
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
