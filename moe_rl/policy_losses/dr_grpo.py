"""Dr. GRPO: GRPO without its two normalisations, by the length of a response and by the spread of rewards."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from moe_rl.policy_losses.base import ClippedLoss, masked_sum, token_log_ratio
from moe_rl.records import LossOutput, PolicyBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrGrpo(ClippedLoss):
    """A sequence's tokens are summed and divided by a constant, so that a long answer is not held less to account.

        w_it = exp(logprobs - old_logprobs)
        loss = - mean_i 1/length sum_t min(w_it A_i, clip(w_it, 1 - clip_low, 1 + clip_high) A_i)

    length: the constant; arms set it to the most tokens that a response may have.
    The catch: only half of it is in the loss; the other half is the advantage r - mean r, which the arm chooses.
    Source: arXiv 2503.20783 section 3, Dr. GRPO; the constant from its listing.
    """

    ratio: ClassVar = "token"
    reduction: ClassVar = "token_sum"
    advantage: ClassVar = "group_mean"

    length: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.length < math.inf:
            raise ValueError(f"length is {self.length}; sums over tokens are divided by it, set it above 0")

    def __call__(self, batch: PolicyBatch) -> LossOutput:
        gain_BT, clipped_BT = self.clip(token_log_ratio(batch), batch.advantages_BT)
        loss = -masked_sum(gain_BT, batch.mask_BT) / (self.length * batch.num_sequences)
        return LossOutput(loss, clipped_BT & batch.mask_BT)
