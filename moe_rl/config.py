"""The settings as Hydra has them: their types, how an experiment is built of them, and what makes two runs the same."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.utils import instantiate
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf, open_dict

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

    policy_loss: Any = MISSING
    advantage: str = Arm.advantage
    replay: str = Arm.replay
    replay_threshold: float = Arm.replay_threshold
    old_logprobs: str = Arm.old_logprobs
    correction: str = Correction.kind
    correction_cap: float = Correction.cap
    correction_low: float = Correction.low
    correction_high: float = Correction.high
    kl: float = ReferenceKl.coefficient
    kl_estimator: str = ReferenceKl.estimator


@dataclasses.dataclass
class Config:
    """The whole configuration: its types, whose values are in conf/config.yaml. Groups hold one variant each."""

    study_name: str = MISSING
    seed: int = MISSING
    steps: int = MISSING
    prompts: int = MISSING
    completions: int = MISSING
    updates: int = MISSING
    micro_batch: int = MISSING
    activation_checkpointing: bool = MISSING
    dynamic_sampling: int = MISSING
    overlong_buffer: int = MISSING
    reward: str = MISSING
    eval_prompts: int = MISSING
    eval_every: int = MISSING
    lr_of_arm: dict[str, float] = dataclasses.field(default_factory=dict)
    arm: Any = MISSING
    model: Any = MISSING
    router: Any = MISSING
    task: Any = MISSING
    engine: Any = MISSING
    optim: Any = MISSING
    drift: Any = MISSING
    cold_start: Any = MISSING
    preference_model: Any = MISSING
    critic: Any = MISSING
    launch: Any = MISSING
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
    for group, fields_of in (("arm", ArmSettings), ("launch", Launch)):
        _refuse_others(group, config[group], {field.name for field in dataclasses.fields(fields_of)})
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


def _refuse_others(group: str, node: Any, known: set[str]) -> None:
    """ConfigError for settings that a group does not have, and for those that its file lacks."""
    found = set(map(str, node)) if isinstance(node, DictConfig) else set()
    for key in sorted(found - known):
        raise ConfigError(f"{group}.{key} was added and is no setting; leave it out (--help {group} shows all)")
    if known - found:
        raise ConfigError(f"{group} lacks {min(known - found)}; a file of {group} begins: defaults: [schema, _self_]")


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
    if any(re.match(r"\+*optim(\.lr=|=.*\blr\s*:)", override) for override in overrides):
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
