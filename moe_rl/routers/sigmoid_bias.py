"""A router with sigmoid gates and a load-balancing bias."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from moe_rl.routers.balanced import Balanced


@dataclasses.dataclass(frozen=True, kw_only=True)
class SigmoidBias(Balanced):
    """As `balanced`, and gates in which experts do not compete: each is scored by a sigmoid.

        expert_ids = topk(scores + bias)        gates = sigmoid(logits[expert_ids]) / sum of these
        after each update: bias += speed * sign(mean load - load)

    The catch: the bias is added to the scores that the family ranks, which are sigmoids in DeepSeek-V3 and softmax
    probabilities in most others: there the order is the same but a unit of bias weighs more. With one expert a token
    the gate is always 1 and the router learns nothing.
    Source: arXiv 2408.15664 section 3; gates normalised as in DeepSeek-V3, arXiv 2412.19437 eq. 13-16.
    """

    def gate(self, logits_NE: Tensor, expert_ids_NK: Tensor, router: Any) -> Tensor:
        gates_NK = logits_NE.float().gather(-1, expert_ids_NK).sigmoid()
        return gates_NK / gates_NK.sum(-1, keepdim=True)
