"""GSPO: one clipped, length-normalised ratio per sequence."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from moe_rl.policy_losses.base import ClippedLoss, sequence_log_ratio
from moe_rl.records import LossOutput, PolicyBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gspo(ClippedLoss):
    """All tokens of a sequence share one importance ratio: the geometric mean of their own.

        s_i  = exp(1/|y_i| sum_t log w_it)
        loss = - mean_i min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i)

    The catch: log s_i spreads like 1/sqrt(|y_i|), so bounds that suit long responses clip nearly all short ones.
    Source: arXiv 2507.18071 eq. 5-7; bounds from its section 5, for responses of thousands of tokens.
    """

    ratio: ClassVar = "sequence"
    reduction: ClassVar = "sequence_mean"
    token_advantages: ClassVar = False

    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def __call__(self, batch: PolicyBatch) -> LossOutput:
        gain_B, clipped_B = self.clip(sequence_log_ratio(batch), batch.advantages_B)
        loss = -(gain_B * batch.mask_BT.any(1)).sum() / batch.num_sequences
        return LossOutput(loss, clipped_B[:, None] & batch.mask_BT)
