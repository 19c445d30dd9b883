"""File stem -> option: walks a family's package and registers each file's one variant as a typed Hydra node."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import typing
from types import ModuleType
from typing import Any

from hydra.core.config_store import ConfigStore


def variants(package: str, base: type) -> dict[str, type]:
    """{file stem: its variant} of a family's package, e.g. ("moe_rl.routers", Router).

    Raises TypeError for a file that does not define exactly one concrete subclass of `base`, naming the file.
    """
    found = {}
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        if module.name != "base":
            found[module.name] = variant_in(importlib.import_module(f"{package}.{module.name}"), base)
    return found


def variant_in(module: ModuleType, base: type) -> type:
    """The one concrete subclass of `base` that `module` defines."""
    own = [
        thing
        for thing in vars(module).values()
        if inspect.isclass(thing) and thing.__module__ == module.__name__
        and issubclass(thing, base) and not inspect.isabstract(thing)
    ]  # fmt: skip
    if len(own) != 1:
        names = ", ".join(kind.__name__ for kind in own) or "none"
        raise TypeError(f"{module.__file__} must define exactly one {base.__name__}, it defines {names}")
    return own[0]


def node(variant: type) -> Any:
    """A Hydra node for a dataclass: its fields with their types and defaults, and `_target_`."""
    hints = typing.get_type_hints(variant)
    fields: list[Any] = [("_target_", str, f"{variant.__module__}.{variant.__qualname__}")]
    for field in dataclasses.fields(variant):
        made = field.default_factory
        default = dataclasses.field(default_factory=made) if made is not dataclasses.MISSING else field.default
        fields.append((field.name, hints[field.name], "???" if default is dataclasses.MISSING else default))
    return dataclasses.make_dataclass(variant.__name__, fields)  # not frozen: omegaconf would make it read-only


def register(group: str, package: str, base: type) -> None:
    """Make every variant of a family an option of the Hydra group."""
    for stem, variant in variants(package, base).items():
        ConfigStore.instance().store(group=group, name=stem, node=node(variant), provider="moe_rl")
