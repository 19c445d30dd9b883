"""MiniRL: REINFORCE with the importance ratio as a weight and a PPO mask."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from moe_rl.policy_losses.base import ClippedLoss, masked_sum, token_log_ratio
from moe_rl.records import LossOutput, PolicyBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Minirl(ClippedLoss):
    """Tokens that went too far in their own direction are masked, all others weighted, and none is divided by a length.

        w_it = exp(logprobs - old_logprobs)
        M_it = 0 where A_i > 0 and w_it > 1 + clip_high, or A_i < 0 and w_it < 1 - clip_low; else 1
        loss = - mean_i sum_t M_it stopgrad(w_it) A_i logprobs_it

    The catch: its gradient is Dr. GRPO's with length 1. The paper's weight is pi_new / mu, cut at 5, with mu the
        sampling engine; here it is w, the same when the engine computes as the trainer does.
    Source: arXiv 2512.01374, the MiniRL objective; bounds as there.
    """

    ratio: ClassVar = "token"
    reduction: ClassVar = "token_sum"
    surrogate: ClassVar = True
    advantage: ClassVar = "group_mean"

    clip_low: float = 0.2
    clip_high: float = 0.27

    def __call__(self, batch: PolicyBatch) -> LossOutput:
        gain_BT, clipped_BT = self.clip(token_log_ratio(batch).detach(), batch.advantages_BT)
        weight_BT = gain_BT.masked_fill(clipped_BT, 0.0)  # w A
        loss = -masked_sum(weight_BT * batch.logprobs_BT, batch.mask_BT) / batch.num_sequences
        return LossOutput(loss, clipped_BT & batch.mask_BT)
