"""A router that cannot tell near ties apart."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from moe_rl.routers.base import Router


@dataclasses.dataclass(frozen=True, kw_only=True)
class Binned(Router):
    """Scores are ranked after rounding, so small changes of near ties leave the choice as it was.

        expert_ids = stable top-k of floor(scores / width)        ties go to the lower id

    The catch: scores still flip where they cross a bin's edge, and ties favour experts with low ids.
    """

    width: float = 0.01  # of the family's own scores: probabilities for most, logits for GPT-OSS

    def __post_init__(self) -> None:
        if self.width <= 0:
            raise ValueError(f"width is {self.width}; bins need a width above 0")

    def select(self, scores_NE: Tensor, top_k: int, router: Any) -> Tensor:
        bins_NE = (scores_NE.detach().float() / self.width).floor()
        return bins_NE.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
