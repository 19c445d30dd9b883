"""Reverse a word: 'abcd=' -> 'dcba'."""

from __future__ import annotations

import dataclasses
import random
import string

from moe_rl.tasks.base import Task, at_least_one


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reverse(Task):
    """Write the letters of the prompt backwards.

    Prompt 'abcd=', answer 'dcba'. Harder with `min_length` and `max_length`, the bounds of a uniform number of letters.
    """

    min_length: int = 3
    max_length: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(min_length=self.min_length)
        if self.max_length < self.min_length:
            raise ValueError(
                f"max_length is {self.max_length}, below min_length {self.min_length}; raise the one or lower the other"
            )

    @property
    def alphabet(self) -> str:
        return string.ascii_lowercase

    def draw(self, rng: random.Random) -> tuple[str, str]:
        word = "".join(rng.choices(self.alphabet, k=rng.randint(self.min_length, self.max_length)))
        return word + "=", word[::-1]
