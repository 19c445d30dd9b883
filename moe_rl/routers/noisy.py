"""A router that explores."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from moe_rl.routers.base import Router, first_draw, log_scores, next_draw


@dataclasses.dataclass(frozen=True, kw_only=True)
class Noisy(Router):
    """Each expert's log score is moved by Gumbel noise, the same for all tokens until it is drawn again.

        expert_ids = topk(log-scores + scale * gumbel)        gumbel = -log(-log(uniform)), one a layer and expert

    At scale 1 a token's first choice is, over draws, a sample from its softmax. Gates are the family's own.
    The catch: noise of a token's own, as in the sources, cannot be used here: no pass would repeat another's choice.
    A draw is a jump in routing. Set `every` to the step's `updates`, and it falls between steps, where sampling and
    training still agree; drawn within a step it makes later mini-batches off-policy.
    Source: noise on the choice: arXiv 1701.06538 eq. 4 (there Gaussian, learned); Gumbel top-k: arXiv 1903.06059.
    """

    scale: float = 0.1
    every: int = 4

    def __post_init__(self) -> None:
        if self.scale < 0 or self.every < 1:
            raise ValueError(f"scale is {self.scale} and every is {self.every}; set them to 0 or more and 1 or more")

    def attach(self, router: Any, num_experts: int, top_k: int) -> None:
        router.register_buffer("gumbel", -(-first_draw(router, num_experts).log()).log())

    def select(self, scores_NE: Tensor, top_k: int, router: Any) -> Tensor:
        return (log_scores(scores_NE) + self.scale * router.gumbel).topk(top_k, dim=-1).indices

    def after_update(self, router: Any) -> None:
        uniform = next_draw(router, len(router.gumbel), self.every)
        if uniform is not None:
            router.gumbel.copy_(-(-uniform.log()).log())
