"""GRPO: a clipped ratio per token."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from moe_rl.policy_losses.base import ClippedLoss, sequence_mean, token_log_ratio
from moe_rl.records import LossOutput, PolicyBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grpo(ClippedLoss):
    """Every token is weighted by its own importance ratio.

        w_it = exp(logprobs - old_logprobs)
        loss = - mean_i mean_t min(w_it A_i, clip(w_it, 1 - clip_low, 1 + clip_high) A_i)

    The catch: on an MoE a token's ratio jumps when its experts change, though its sequence hardly does.
    Source: arXiv 2402.03300 eq. 3 without the KL term; bounds as in arXiv 2507.18071 section 5.
    """

    ratio: ClassVar = "token"
    reduction: ClassVar = "sequence_mean"

    clip_low: float = 0.2
    clip_high: float = 0.27

    def __call__(self, batch: PolicyBatch) -> LossOutput:
        gain_BT, clipped_BT = self.clip(token_log_ratio(batch), batch.advantages_BT)
        loss = -sequence_mean(gain_BT, batch.mask_BT).sum() / batch.num_sequences
        return LossOutput(loss, clipped_BT & batch.mask_BT)
