"""A router with a learned preference for each expert."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from moe_rl.routers.base import Router, log_scores


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnedPrior(Router):
    """Each expert has a learned offset that counts in its choice and in its gate.

        expert_ids = topk(log-scores + prior)        gates = softmax(logits[expert_ids] + prior[expert_ids])

    The catch: gates always sum to 1, and the offsets learn only through the gates.
    """

    start: float = 0.0  # every offset at first

    def attach(self, router: Any, num_experts: int, top_k: int) -> None:
        weight = next(router.parameters())
        router.prior = nn.Parameter(torch.full((num_experts,), self.start, device=weight.device))

    def select(self, scores_NE: Tensor, top_k: int, router: Any) -> Tensor:
        return (log_scores(scores_NE) + router.prior.detach()).topk(top_k, dim=-1).indices

    def gate(self, logits_NE: Tensor, expert_ids_NK: Tensor, router: Any) -> Tensor:
        return (logits_NE.float().gather(-1, expert_ids_NK) + router.prior[expert_ids_NK]).softmax(-1)
