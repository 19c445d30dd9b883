"""Add up a chain of numbers: '3+41+8=' -> '52'."""

from __future__ import annotations

import dataclasses
import random

from moe_rl.tasks.base import Task, at_least_one


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChainSum(Task):
    """Write the sum of the prompt's numbers.

    Prompt '3+41+8=', answer '52'. Harder with `terms`, how many numbers, and `digits`, the most digits of each.
    """

    terms: int = 3
    digits: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(terms=self.terms, digits=self.digits)

    @property
    def alphabet(self) -> str:
        return "0123456789"

    def draw(self, rng: random.Random) -> tuple[str, str]:
        numbers = [rng.randrange(10**self.digits) for _ in range(self.terms)]
        return "+".join(map(str, numbers)) + "=", str(sum(numbers))
