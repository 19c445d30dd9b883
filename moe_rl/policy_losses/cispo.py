"""CISPO: the importance ratio is a bounded weight, and no token loses its gradient."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch

from moe_rl.policy_losses.base import PolicyLoss, masked_sum, token_log_ratio
from moe_rl.records import LossOutput, PolicyBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cispo(PolicyLoss):
    """A ratio above its bound is cut to the bound; the token goes on learning with that weight.

        w_it = exp(logprobs - old_logprobs)
        loss = - mean_it stopgrad(min(w_it, 1 + clip_high)) A_i logprobs_it

    The catch: nothing stops a token from moving on in the direction it took, and clip_frac is 0 by construction.
    Source: arXiv 2506.13585 eq. 4-5 without a lower bound, as there; it gives no clip_high, 5 is in wide use.
    """

    ratio: ClassVar = "token"
    reduction: ClassVar = "token_mean"
    surrogate: ClassVar = True

    clip_high: float = 5.0

    def __post_init__(self) -> None:
        if not 0 <= self.clip_high < math.inf:
            raise ValueError(f"clip_high is {self.clip_high}; the weight is at most 1 + clip_high, set it to 0 or more")

    def __call__(self, batch: PolicyBatch) -> LossOutput:
        weight_BT = token_log_ratio(batch).detach().clamp(max=math.log1p(self.clip_high)).exp()
        gain_BT = weight_BT * batch.advantages_BT * batch.logprobs_BT
        return LossOutput(-masked_sum(gain_BT, batch.mask_BT) / batch.num_tokens, torch.zeros_like(batch.mask_BT))
