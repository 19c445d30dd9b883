"""GSPO-token: GSPO's ratio, written per token so that advantages may differ within a sequence."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch

from moe_rl.policy_losses.base import ClippedLoss, sequence_log_ratio, sequence_mean
from moe_rl.records import LossOutput, PolicyBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class GspoToken(ClippedLoss):
    """A token's ratio has the sequence's value and the token's own gradient.

        s_it = stopgrad(s_i) exp(logprobs - stopgrad(logprobs))
        loss = - mean_i mean_t min(s_it A_i, clip(s_it, 1 - clip_low, 1 + clip_high) A_i)

    The catch: with one advantage a sequence it equals GSPO in value, clip condition and gradient.
    Source: arXiv 2507.18071 eq. 13-14.
    """

    ratio: ClassVar = "sequence"
    reduction: ClassVar = "sequence_mean"

    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def __call__(self, batch: PolicyBatch) -> LossOutput:
        own_gradient_BT = torch.where(batch.mask_BT, batch.logprobs_BT - batch.logprobs_BT.detach(), 0.0)
        log_ratio_BT = sequence_log_ratio(batch).detach()[:, None] + own_gradient_BT
        gain_BT, clipped_BT = self.clip(log_ratio_BT, batch.advantages_BT)
        loss = -sequence_mean(gain_BT, batch.mask_BT).sum() / batch.num_sequences
        return LossOutput(loss, clipped_BT & batch.mask_BT)
