"""What a comparison of two checkpoints is told, as `key=value` words."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from moe_rl.models.build import Checkpoint

USAGE = "python experiments/compare_checkpoints.py old=<folder or hub id> new=<...> text=<.txt|.jsonl|name of a task>"


def help_text() -> str:
    """What --help says."""
    options = (f"{field.name}={field.default}" for field in dataclasses.fields(Comparison))
    return "\n".join([USAGE, "", inspect.getdoc(Comparison) or "", "", *options])


class ComparisonError(ValueError):
    """A comparison that cannot be made as asked; the message says what to do."""


@contextlib.contextmanager
def refusing(prefix: str = "") -> Iterator[None]:
    """Turn what somebody else refuses with a ValueError into a ComparisonError."""
    try:
        yield
    except ValueError as error:
        raise ComparisonError(f"{prefix}{error}") from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """What is compared, and how.

    text: see texts.read_texts. sequences: texts used at most. max_tokens: of each text. batch_size, noise_sequences:
    sequences a forward, and for the noise floor. min_occurrences: rarer token ids are left out of the vocabulary
    specialisation. router_logits: also measure the routers' entropy. out: a new folder.
    """

    old: str = ""
    new: str = ""
    text: str = ""
    out: str = "results/comparison"
    old_revision: str = "main"
    new_revision: str = "main"
    dtype: str = "bfloat16"  # float32 or bfloat16
    device: str = "cpu"
    experts_implementation: str = "grouped_mm"  # grouped_mm or eager
    sequences: int = 256
    max_tokens: int = 512
    batch_size: int = 8
    noise_sequences: int = 8
    min_occurrences: int = 8
    router_logits: bool = False

    def __post_init__(self) -> None:
        for name in ("old", "new", "text"):
            if not getattr(self, name):
                raise ComparisonError(f"{name} is not set; usage: {USAGE}")
        for name in ("sequences", "max_tokens", "batch_size", "noise_sequences", "min_occurrences"):
            if getattr(self, name) < 1:
                raise ComparisonError(f"{name} is {getattr(self, name)}; set it to 1 or more")
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise ComparisonError(f"device is {self.device!r}, but no GPU can be used here; set device=cpu")

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> Comparison:
        """From `key=value` words. ComparisonError for an unknown key or a value of the wrong kind."""
        kinds: dict[str, Any] = {field.name: type(field.default) for field in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for word in arguments:
            name, equals, text = word.partition("=")
            if name not in kinds or not equals:
                options = ", ".join(f"{kind}=" for kind in kinds)
                raise ComparisonError(f"cannot use {word!r}; options are {options}; usage: {USAGE}")
            if kinds[name] is bool and text not in ("true", "false"):
                raise ComparisonError(f"{name} is {text!r}; set it to true or false")
            if kinds[name] is int and not text.isdecimal():
                raise ComparisonError(f"{name} is {text!r}; set it to a whole number")
            values[name] = text == "true" if kinds[name] is bool else kinds[name](text)
        return cls(**values)

    def checkpoint(self, name: str) -> Checkpoint:
        """`old` or `new`. ComparisonError for settings that no checkpoint can have."""
        path, revision = getattr(self, name), getattr(self, f"{name}_revision")
        implementation = self.experts_implementation
        with refusing():
            return Checkpoint(path=path, revision=revision, dtype=self.dtype, experts_implementation=implementation)
