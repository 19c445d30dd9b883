"""A router whose gates are sharper or flatter than its family's."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from moe_rl.routers.base import Router


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tempered(Router):
    """The model's own choice, mixed with a softmax at a temperature.

        gates = softmax(logits[expert_ids] / temperature)

    The catch: gates always sum to 1, also in families that do not normalise theirs.
    """

    temperature: float = 2.0

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError(f"temperature is {self.temperature}; set it above 0")

    def gate(self, logits_NE: Tensor, expert_ids_NK: Tensor, router: Any) -> Tensor:
        return (logits_NE.float().gather(-1, expert_ids_NK) / self.temperature).softmax(-1)
