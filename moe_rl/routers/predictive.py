"""A router that looks ahead."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from moe_rl.routers.base import Router, log_scores


@dataclasses.dataclass(frozen=True, kw_only=True)
class Predictive(Router):
    """Experts are chosen by what the router is predicted to think of the token after some updates, not by what it does.

        x = (log scores, centred over experts; 1)        expert_ids = topk(log scores + x @ predictor)
        predictor = (sum x' x + ridge * its mean diagonal)^-1 sum x' change        change: of log scores, centred

    Sums run over the tokens of training forwards, from a step's second update on, against the old policy's scores of
    the same tokens; they fade by `memory` an update. It starts as the family's own choice. Meant to be replayed: with
    arm=grpo_r3 or grpo_routing_replay the experts of the rollout, those foreseen, are the ones that are trained.
    The catch: one prediction serves all updates of a step, so it goes too far for the first and not far enough for the
    last of them. `foreseen` against `foreseen_by_native` in the table `updates` says, by update, what it is worth.
    Source: PR2, arXiv 2606.00395 eq. 4-8. There the predictor reads the router's input and takes gradient steps on
    KL(new || predicted), which needs a learning rate; here it reads the router's scores, and least squares need none.
    """

    memory: float = 0.9
    ridge: float = 0.01

    def __post_init__(self) -> None:
        if not 0 <= self.memory <= 1 or self.ridge <= 0:
            raise ValueError(f"memory is {self.memory} and ridge is {self.ridge}; memory lies in [0, 1], ridge above 0")

    def attach(self, router: Any, num_experts: int, top_k: int) -> None:
        device = next(router.parameters()).device
        router.register_buffer("predictor", torch.zeros(num_experts + 1, num_experts, device=device))
        router.register_buffer("seen_xx", torch.zeros(num_experts + 1, num_experts + 1, device=device))
        router.register_buffer("seen_xy", torch.zeros(num_experts + 1, num_experts, device=device))

    def select(self, scores_NE: Tensor, top_k: int, router: Any) -> Tensor:
        log_NE = log_scores(scores_NE)
        x_NX = _features(_centred(log_NE, log_NE.isfinite()))
        return (log_NE + x_NX @ router.predictor).topk(top_k, dim=-1).indices

    def learn(self, old_scores_NE: Tensor, scores_NE: Tensor, router: Any) -> None:
        old_NE, new_NE = log_scores(old_scores_NE), log_scores(scores_NE)
        known_NE = old_NE.isfinite() & new_NE.isfinite()  # -inf: outside the token's expert groups
        old_NE, new_NE = _centred(old_NE, known_NE), _centred(new_NE, known_NE)
        x_NX = _features(old_NE)
        router.seen_xx += x_NX.T @ x_NX
        router.seen_xy += x_NX.T @ (new_NE - old_NE)

    def after_update(self, router: Any) -> None:
        xx, xy = router.seen_xx.double(), router.seen_xy.double()
        shrink = self.ridge * xx.diagonal().mean() + 1e-12  # before the first lesson all is 0
        router.predictor.copy_(torch.linalg.solve(xx + shrink * torch.eye(len(xx), device=xx.device), xy))
        router.seen_xx *= self.memory
        router.seen_xy *= self.memory


def _centred(log_NE: Tensor, known_NE: Tensor) -> Tensor:
    """Minus their mean over known experts, 0 at the others."""
    log_NE = log_NE.where(known_NE, 0.0)
    return (log_NE - log_NE.sum(-1, keepdim=True) / known_NE.sum(-1, keepdim=True).clamp(min=1)).where(known_NE, 0.0)


def _features(centred_NE: Tensor) -> Tensor:
    return torch.cat([centred_NE, torch.ones_like(centred_NE[:, :1])], dim=-1)
