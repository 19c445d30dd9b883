"""A router with a load-balancing bias instead of an auxiliary loss."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from moe_rl.routers.base import Router


@dataclasses.dataclass(frozen=True, kw_only=True)
class Balanced(Router):
    """Overloaded experts are made less likely to be chosen, idle ones more, without touching the gates.

        expert_ids = topk(scores + bias)
        after each update: bias += speed * sign(mean load - load)       load: real tokens trained on since the last one

    The catch: the bias moves the routing even where the weights stand still.
    Source: arXiv 2408.15664 section 3.
    """

    speed: float = 0.001

    def __post_init__(self) -> None:
        if self.speed < 0:
            raise ValueError(f"speed is {self.speed}; set it to 0 or more")

    def attach(self, router: Any, num_experts: int, top_k: int) -> None:
        device = next(router.parameters()).device
        router.register_buffer("balance_bias", torch.zeros(num_experts, device=device))
        router.register_buffer("balance_load", torch.zeros(num_experts, device=device))

    def select(self, scores_NE: Tensor, top_k: int, router: Any) -> Tensor:
        return (scores_NE.detach() + router.balance_bias).topk(top_k, dim=-1).indices

    def count(self, expert_ids_NK: Tensor, router: Any) -> None:
        load: Tensor = router.balance_load
        load.add_(torch.bincount(expert_ids_NK.flatten(), minlength=len(load)))

    def after_update(self, router: Any) -> None:
        load: Tensor = router.balance_load
        router.balance_bias.add_(torch.sign(load.mean() - load), alpha=self.speed)
        load.zero_()
