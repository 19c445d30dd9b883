"""PPO: clipped token ratios, and advantages from a learned critic."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from moe_rl.policy_losses.base import ClippedLoss, masked_sum, token_log_ratio
from moe_rl.records import LossOutput, PolicyBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ppo(ClippedLoss):
    """Every token has an importance ratio and an advantage of its own.

        w_it = exp(logprobs - old_logprobs)
        loss = - mean_it min(w_it A_it, clip(w_it, 1 - clip_low, 1 + clip_high) A_it)

    The catch: A_it comes from a second model, moe_rl.critic, which costs about as much as the policy and must learn
    first. With one advantage a sequence this is DAPO's loss at other bounds.
    Source: arXiv 1707.06347 eq. 7; bounds from its section 6.1.
    """

    ratio: ClassVar = "token"
    reduction: ClassVar = "token_mean"
    advantage: ClassVar = "gae"

    def __call__(self, batch: PolicyBatch) -> LossOutput:
        gain_BT, clipped_BT = self.clip(token_log_ratio(batch), batch.advantages_BT)
        loss = -masked_sum(gain_BT, batch.mask_BT) / batch.num_tokens
        return LossOutput(loss, clipped_BT & batch.mask_BT)
