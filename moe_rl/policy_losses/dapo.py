"""DAPO: GRPO with a higher upper bound and one mean over all tokens."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from moe_rl.policy_losses.base import ClippedLoss, masked_sum, token_log_ratio
from moe_rl.records import LossOutput, PolicyBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dapo(ClippedLoss):
    """Every token weighs the same, whatever the length of its sequence, and unlikely tokens have room to grow.

        w_it = exp(logprobs - old_logprobs)
        loss = - mean_it min(w_it A_i, clip(w_it, 1 - clip_low, 1 + clip_high) A_i)

    The catch: this is its loss alone; dynamic sampling and overlong reward shaping happen outside of a loss.
    Source: arXiv 2503.14476 eq. 8-12; bounds from its section 4.1.
    """

    ratio: ClassVar = "token"
    reduction: ClassVar = "token_mean"

    clip_low: float = 0.2
    clip_high: float = 0.28

    def __call__(self, batch: PolicyBatch) -> LossOutput:
        gain_BT, clipped_BT = self.clip(token_log_ratio(batch), batch.advantages_BT)
        loss = -masked_sum(gain_BT, batch.mask_BT) / batch.num_tokens
        return LossOutput(loss, clipped_BT & batch.mask_BT)
