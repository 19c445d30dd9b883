"""SAPO: a smooth gate instead of a clip."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch

from moe_rl.policy_losses.base import PolicyLoss, sequence_mean, token_log_ratio
from moe_rl.records import LossOutput, PolicyBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sapo(PolicyLoss):
    """A token's gradient fades as its ratio leaves 1, faster for a negative advantage.

        w_it = exp(logprobs - old_logprobs);  tau_i = tau_positive if A_i > 0 else tau_negative
        loss = - mean_i mean_t 4 / tau_i sigmoid(tau_i (w_it - 1)) A_i

    The catch: at ratio 1 its gradient is that of the policy, its value -2 A / tau: a loss of 0 means nothing.
    Source: arXiv 2511.20347, its objective and its gate; temperatures as there.
    """

    ratio: ClassVar = "token"
    reduction: ClassVar = "sequence_mean"
    surrogate: ClassVar = True

    tau_positive: float = 1.0
    tau_negative: float = 1.05

    def __post_init__(self) -> None:
        if not (0 < self.tau_positive < math.inf and 0 < self.tau_negative < math.inf):
            raise ValueError(f"tau_positive {self.tau_positive} and tau_negative {self.tau_negative} must be above 0")

    def __call__(self, batch: PolicyBatch) -> LossOutput:
        advantages_BT, log_ratio_BT = batch.advantages_BT, token_log_ratio(batch)
        tau_BT = torch.full_like(advantages_BT, self.tau_negative).masked_fill(advantages_BT > 0, self.tau_positive)
        # Where the gate is flat to the last bit the ratio stops: it might overflow, and its gradient be 0 * inf.
        ratio_BT = torch.minimum(log_ratio_BT, torch.log1p(100 / tau_BT)).exp()
        gate_BT = torch.sigmoid(tau_BT * (ratio_BT - 1))
        loss = -sequence_mean(4 / tau_BT * gate_BT * advantages_BT, batch.mask_BT).sum() / batch.num_sequences
        flat_BT = gate_BT.detach() * (1 - gate_BT.detach()) == 0
        return LossOutput(loss, flat_BT & batch.mask_BT)
