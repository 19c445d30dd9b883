"""A router some of whose experts are unavailable."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from moe_rl.routers.base import Router, first_draw, next_draw


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertDropout(Router):
    """In each layer a random share of the experts is not chosen until the next draw, by any token.

        dropped = the round(share * E) experts with the lowest draws        expert_ids = topk(scores of the others)

    Where fewer than K others are left, the best of the dropped fill up. Evaluation sees the draw of its moment.
    The catch: a draw is a jump in routing, larger than any update's. Set `every` to the step's `updates`, and it falls
    between steps, where sampling and training still agree; drawn within a step it makes later mini-batches off-policy.
    Source: none; a stress test of this lab: what does a method make of routing that is moved by hand?
    """

    share: float = 0.1
    every: int = 4

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1 or self.every < 1:
            raise ValueError(
                f"share is {self.share} and every is {self.every}; share lies in [0, 1), every is 1 or more"
            )

    def attach(self, router: Any, num_experts: int, top_k: int) -> None:
        router.register_buffer("draw", first_draw(router, num_experts))

    def select(self, scores_NE: Tensor, top_k: int, router: Any) -> Tensor:
        rank_E = router.draw.argsort().argsort()
        dropped_E = rank_E < round(self.share * len(rank_E))
        # Far below every score but above -inf, which marks experts outside a token's groups; float64 keeps the order.
        return (scores_NE.detach().double() - 1e6 * dropped_E).topk(top_k, dim=-1).indices

    def after_update(self, router: Any) -> None:
        draw = next_draw(router, len(router.draw), self.every)
        if draw is not None:
            router.draw.copy_(draw)
