"""The contract of a policy loss, and the ratios that most of them share."""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar, Literal

import torch
from torch import Tensor

from moe_rl.records import LossOutput, PolicyBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyLoss(abc.ABC):
    """A policy loss. Fields of a subclass are its hyper-parameters.

    A loss owns the level of its ratio (token or sequence) and its reduction. It must give exactly the policy gradient
    -A grad log pi, so reduced, where new and old policy agree, and nothing for sequences without tokens or advantage:
    these have no backward, see moe_rl.mini_batches.

    What a subclass states about itself, and its tests hold it to:
    ratio: whose importance ratio weighs a token's gradient: its own, its whole sequence's, or none.
    reduction: sequence_mean: mean over sequences of the mean over a sequence's tokens; token_mean: mean over all
        tokens; token_sum: mean over sequences of the sum over a sequence's tokens, divided by a constant.
    token_advantages: whether the tokens of a sequence may have advantages of their own, as a critic gives them.
    surrogate: True where only the gradient is that of the policy; the value is then not minus the gain.
    advantage: the advantage of its source, a key of moe_rl.advantage.ADVANTAGES. Arms choose it.
    """

    ratio: ClassVar[Literal["token", "sequence", "none"]]
    reduction: ClassVar[Literal["sequence_mean", "token_mean", "token_sum"]]
    token_advantages: ClassVar[bool] = True
    surrogate: ClassVar[bool] = False
    advantage: ClassVar[str] = "group_std"

    @abc.abstractmethod
    def __call__(self, batch: PolicyBatch) -> LossOutput: ...

    @classmethod
    def name(cls, advantage: str) -> str:
        """What the loss with this advantage is called in results: its file's stem, and the advantage if not its own."""
        stem = cls.__module__.rpartition(".")[2]
        return stem if advantage == cls.advantage else f"{stem}_{advantage}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClippedLoss(PolicyLoss):
    """A policy loss whose ratio is clipped to [1 - clip_low, 1 + clip_high]."""

    clip_low: float = 0.2
    clip_high: float = 0.2

    def __post_init__(self) -> None:
        if not (0 <= self.clip_low <= 1 and self.clip_high >= 0):
            raise ValueError(
                f"clip bounds low {self.clip_low} and high {self.clip_high} are impossible; "
                "the ratio is kept in [1 - clip_low, 1 + clip_high]"
            )

    def clip(self, log_ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """(min(ratio A, clip(ratio) A), where that has no gradient); advantages broadcast to the log ratios."""
        ratio = log_ratio.exp()
        clipped = torch.where(advantages > 0, ratio > 1 + self.clip_high, ratio < 1 - self.clip_low)
        bound = torch.where(advantages > 0, advantages * (1 + self.clip_high), advantages * (1 - self.clip_low))
        # Taken out before exp: the gradient of a clipped ratio that overflows would be 0 * inf.
        return torch.where(clipped, bound, log_ratio.masked_fill(clipped, 0.0).exp() * advantages), clipped


def token_log_ratio(batch: PolicyBatch) -> Tensor:
    """log w_BT = logprobs - old_logprobs on response tokens; 0 elsewhere, and 0 where there is no advantage.

    The second zero keeps an overflowing ratio that cannot contribute from turning into 0 * inf.
    """
    counts_BT = batch.mask_BT & (batch.advantages_BT != 0)
    return torch.where(counts_BT, batch.logprobs_BT - batch.old_logprobs_BT, 0.0)


def sequence_log_ratio(batch: PolicyBatch) -> Tensor:
    """log s_B = mean of log w over a sequence's response tokens; 0 for sequences without tokens or advantage."""
    counts_BT = batch.mask_BT & (batch.advantages_BT != 0).any(1, keepdim=True)
    log_w_BT = torch.where(counts_BT, batch.logprobs_BT - batch.old_logprobs_BT, 0.0)
    return sequence_mean(log_w_BT, batch.mask_BT)


def sequence_mean(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Mean over each sequence's response tokens, shape [B]; 0 for a sequence without any."""
    lengths_B = mask_BT.sum(1).clamp(min=1)
    return torch.where(mask_BT, values_BT, 0.0).sum(1) / lengths_B


def masked_sum(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Sum over all response tokens, a scalar; what stands elsewhere, even nan, does not matter."""
    return torch.where(mask_BT, values_BT, 0.0).sum()
