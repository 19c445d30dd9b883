"""REINFORCE: the plain policy gradient."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch

from moe_rl.policy_losses.base import PolicyLoss, masked_sum
from moe_rl.records import LossOutput, PolicyBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reinforce(PolicyLoss):
    """The log probability of a sequence is raised in proportion to its advantage; with leave-one-out advantages: RLOO.

        loss = - mean_i A_i sum_t logprobs_it

    The catch: it knows no old policy, so from the second mini-batch of a step on it is biased, and nothing bounds it.
    Source: Williams 1992; RLOO: arXiv 2402.14740, its leave-one-out estimator.
    """

    ratio: ClassVar = "none"
    reduction: ClassVar = "token_sum"
    surrogate: ClassVar = True
    advantage: ClassVar = "group_mean"

    def __call__(self, batch: PolicyBatch) -> LossOutput:
        gain_BT = batch.advantages_BT * batch.logprobs_BT
        return LossOutput(-masked_sum(gain_BT, batch.mask_BT) / batch.num_sequences, torch.zeros_like(batch.mask_BT))

    @classmethod
    def name(cls, advantage: str) -> str:
        return "rloo" if advantage == "leave_one_out" else super().name(advantage)
