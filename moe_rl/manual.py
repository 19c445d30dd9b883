"""What --help says: the docstrings of the variants and the comments of the configs, put together."""

from __future__ import annotations

import difflib
import importlib
import inspect
import itertools
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from textwrap import fill, indent
from typing import Any

import yaml
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

from moe_rl import emulation
from moe_rl.advantage import ADVANTAGES
from moe_rl.arm import OLD_LOGPROBS, REPLAYS
from moe_rl.config import PARTS, SETTINGS, config_folder
from moe_rl.corrections import CORRECTIONS
from moe_rl.models import build
from moe_rl.models.configs import FAMILIES
from moe_rl.optim import SCHEDULES, TRAINS
from moe_rl.preference_model import REWARDS
from moe_rl.reference import ESTIMATORS
from moe_rl.store import flatten
from moe_rl.tasks.base import REWARD_KINDS

CHOICES: dict[str, Collection[str]] = {
    "reward": REWARDS,
    "arm.advantage": ADVANTAGES,
    "arm.replay": REPLAYS,
    "arm.old_logprobs": OLD_LOGPROBS,
    "arm.correction": CORRECTIONS,
    "arm.kl_estimator": ESTIMATORS,
    "model.family": FAMILIES,
    "model.dtype": build.DTYPES,
    "task.reward_kind": REWARD_KINDS,
    "engine.dtype": emulation.DTYPES,
    "optim.schedule": SCHEDULES,
    "optim.trains": TRAINS,
}


def manual(topic: str, loader: ConfigLoader, config: DictConfig) -> str:
    """The page of a group, or of all of them where topic is ''. config: as composed, whose values are shown.

    ValueError for a topic that is no group.
    """
    groups = {group: options_of(group, loader) for group in loader.list_groups("") if group != "hydra"}
    groups = {group: names for group, names in sorted(groups.items()) if names}
    if topic and topic not in groups:
        raise ValueError(f"{topic!r} is no group; choose one of {', '.join(groups)}")
    meanings = comments()
    if not topic:
        lines = ["== Groups and their options; --help <group> says more =="]
        for group, names in groups.items():
            lines += [_titled(group, meanings), indent(fill(", ".join(names), 114), "    ")]
        return "\n".join([*lines, "", "== Settings and their values ==", *_settings(config, meanings)])
    lines = [_titled(topic, meanings), ""]
    width = max(map(len, groups[topic])) + 2
    lines += [f"  {name:{width}}{meaning_of(topic, name, loader)}".rstrip() for name in groups[topic]]
    node = config.get(topic)
    if node is not None:
        kind = _kind(node)
        lines += ["", f"== Settings of {kind.__name__} ==", inspect.getdoc(kind) or "", ""]
        lines += _settings(OmegaConf.create({topic: node}), meanings, explained=True)
    return "\n".join(lines)


def options_of(group: str, loader: ConfigLoader) -> list[str]:
    """What a user can choose in a group."""
    return sorted(set(loader.get_group_options(group)) - PARTS)


def comments() -> dict[str, str]:
    """{setting or group: what the comment on its line of conf/config.yaml says}."""
    text = Path(config_folder(), "config.yaml").read_text(encoding="utf-8")
    return dict(re.findall(r"^(?:  - )?(\w+): .*?# (.*)$", text, re.M))


def meaning_of(group: str, option: str, loader: ConfigLoader) -> str:
    """One line: the comment at the head of its file; else what its class says, or the file of an arm's loss."""
    folders = [Path(source.path) for source in loader.get_sources() if source.scheme() == "file"]
    paths = [path for folder in folders if (path := folder / group / f"{option}.yaml").exists()]
    if not paths:
        return _first_sentence(_kind(ConfigStore.instance().load(f"{group}/{option}.yaml").node))
    text = paths[0].read_text(encoding="utf-8")
    head = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    told = " ".join(line.lstrip("# ") for line in head if "@package" not in line)
    if not told and group in (*SETTINGS, "launch"):
        return _first_sentence(_kind(ConfigStore.instance().load(f"{group}/schema.yaml").node))
    if told or group != "arm":
        return told
    values = yaml.safe_load(text) or {}
    parts = [entry for entry in values.pop("defaults", []) if isinstance(entry, dict)]
    losses = [loss for part in parts for key, loss in part.items() if key == "/policy_loss@policy_loss"]
    said = [_first_sentence(importlib.import_module(f"moe_rl.policy_losses.{loss}")) for loss in losses]
    if target := (values.get("policy_loss") or {}).get("_target_"):
        said.append(_of_ones_own(target))
    departs = [f"{key}={value}" for key, value in values.items() if key != "policy_loss" and value != "none"]
    return " ".join([*said, ", ".join(departs)])


def nearest(name: str) -> list[str]:
    """What may have been meant by a name that nothing has: a setting of the group that its first part looks like, else
    what ends like it, else what looks most like it."""
    known = list(known_settings())
    place, _, setting = name.rpartition(".")
    alike = [other for other in known if other.rpartition(".")[2] == setting]
    group = _alike(place, {other.rpartition(".")[0] for other in known} - {""})
    if not group:
        return alike or _alike(name, known)
    here = [other.rpartition(".")[2] for other in known if other.rpartition(".")[0] == group[0]]
    meant = [f"{group[0]}.{found}" for found in _alike(setting, here)]
    return meant or alike or [one for one in group if one != place]


def _alike(name: str, names: Collection[str]) -> list[str]:
    """The one name that looks most like this, if any does."""
    return difflib.get_close_matches(name, sorted(names), 1, cutoff=0.7)


def known_settings() -> dict[str, list[str]]:
    """{dotted name of a setting of some option, or group: the options that have it}, in the order of the config."""
    store = ConfigStore.instance()
    known: dict[str, list[str]] = {str(name): [] for name in store.load("schema.yaml").node}
    for group in [name for name in [*known, "policy_loss"] if name in store.list("")]:
        place = "arm.policy_loss" if group == "policy_loss" else group
        for file in store.list(group):
            for field in store.load(f"{group}/{file}").node:
                if field != "_target_":
                    known.setdefault(f"{place}.{field}", []).append(file.removesuffix(".yaml"))
    return known


def _of_ones_own(target: str) -> str:
    """What the class of a dotted name says, or that there is none: help is there for what does not work yet, too."""
    try:
        return _first_sentence(get_class(target))
    except Exception as error:  # whatever a file of one's own raises, as Hydra passes it on
        return f"{target}, which cannot be imported: {' '.join(str(error.__cause__ or error).split())}"


def _kind(node: DictConfig) -> Any:
    """The class of a group's settings, which has their meaning in its docstring."""
    return get_class(node._target_) if "_target_" in node else OmegaConf.get_type(node)


def _titled(group: str, meanings: Mapping[str, str]) -> str:
    return f"{group}: {meanings[group]}" if group in meanings else group


def _settings(config: DictConfig, meanings: Mapping[str, str], explained: bool = False) -> list[str]:
    """The settings as one types them, a line each, with what is known of them; explained: a line for each choice."""
    plain: Any = OmegaConf.to_container(config)
    lines = []
    for name, value in flatten(plain).items():
        if name.endswith("_target_"):
            continue
        typed = f"{name}={'null' if value is None else str(value).lower() if isinstance(value, bool) else value}"
        choices = CHOICES.get(name, ())
        said = dict(choices) if explained and isinstance(choices, Mapping) and _are_texts(choices) else {}
        told = "; ".join(filter(None, [", ".join(() if said else choices), meanings.get(name)]))
        lines.append(f"{typed:<34}  # {told}" if told else typed)
        lines += [f"    {choice:14} {text}" for choice, text in said.items()]
    return lines


def _are_texts(choices: Mapping[str, Any]) -> bool:
    return all(isinstance(text, str) for text in choices.values())


def _first_sentence(thing: Any) -> str:
    return re.split(r"(?<=[^ .]{3}\.)\s", " ".join((inspect.getdoc(thing) or "").split()))[0]
