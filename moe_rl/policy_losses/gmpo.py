"""GMPO: the geometric mean of ratios that are clipped token by token."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch

from moe_rl.policy_losses.base import PolicyLoss, sequence_mean, token_log_ratio
from moe_rl.records import LossOutput, PolicyBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gmpo(PolicyLoss):
    """Outliers are clipped one by one before they are averaged into the one ratio of their sequence.

        log w_it = logprobs - old_logprobs, at most clip_high where A_i > 0, at least -clip_low where A_i < 0
        loss = - mean_i exp(1/|y_i| sum_t log w_it) A_i

    The catch: the bounds are of log w, so 0.4 means ratios from 0.67 to 1.49.
    Source: arXiv 2507.20673, its objective and pseudocode; bounds (exp(-0.4), exp(0.4)) as there.
    """

    ratio: ClassVar = "sequence"
    reduction: ClassVar = "sequence_mean"
    token_advantages: ClassVar = False

    clip_low: float = 0.4
    clip_high: float = 0.4

    def __post_init__(self) -> None:
        if not (0 <= self.clip_low < math.inf and 0 <= self.clip_high < math.inf):
            raise ValueError(
                f"clip bounds low {self.clip_low} and high {self.clip_high} are impossible; "
                "the log ratio is kept in [-clip_low, clip_high]"
            )

    def __call__(self, batch: PolicyBatch) -> LossOutput:
        positive_B1, log_ratio_BT = (batch.advantages_B > 0)[:, None], token_log_ratio(batch)
        clipped_BT = torch.where(positive_B1, log_ratio_BT > self.clip_high, log_ratio_BT < -self.clip_low)
        kept_BT = torch.where(
            positive_B1, log_ratio_BT.clamp(max=self.clip_high), log_ratio_BT.clamp(min=-self.clip_low)
        )
        gain_B = sequence_mean(kept_BT, batch.mask_BT).exp() * batch.advantages_B
        loss = -(gain_B * batch.mask_BT.any(1)).sum() / batch.num_sequences
        return LossOutput(loss, clipped_BT & batch.mask_BT)
