"""Sort digits: '3140592=' -> '0123459'."""

from __future__ import annotations

import dataclasses
import random

from moe_rl.tasks.base import Task, at_least_one


@dataclasses.dataclass(frozen=True, kw_only=True)
class SortDigits(Task):
    """Write the digits of the prompt in ascending order.

    Prompt '3140592=', answer '0123459'. Harder with `length`, the number of digits.
    """

    length: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(length=self.length)

    @property
    def alphabet(self) -> str:
        return "0123456789"

    def draw(self, rng: random.Random) -> tuple[str, str]:
        digits = rng.choices(self.alphabet, k=self.length)
        return "".join(digits) + "=", "".join(sorted(digits))
