"""The critic: a learned value of every prefix, from which each token gets an advantage of its own (arm.advantage=gae).

It is a second model of the policy's kind that starts from the policy after the cold start, with a scalar head. It
routes live, whatever the arm replays, and is trained on the policy's own mini-batches.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from moe_rl.mini_batches import MicroBatch
from moe_rl.records import NotFiniteError, Rollouts
from moe_rl.scalar_model import ScalarModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # AdamW's state of a parameter


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriticSettings:
    """Generalised advantage estimation, and the optimizer of the critic that it takes.

        delta_t = r_t + gamma V_t+1 - V_t       r_t: the reward at the last token, else 0;  V_t: value before token t
        A_t     = sum_l (gamma lam)^l delta_t+l       R_t = A_t + V_t
        loss of the critic = mean over the mini-batch's tokens of (V_t - R_t)^2 / 2

    The policy gets A whitened over the step's response tokens: minus their mean, over their standard deviation. lr:
    constant learning rate of AdamW; gradients are clipped as the policy's are. The catch: values are not clipped, and
    the first steps' advantages are those of an untrained critic.
    Source: arXiv 1506.02438 eq. 11-16; on language models: arXiv 2203.02155 section 3.5 with its appendix C.
    """

    lr: float = 1e-3
    gamma: float = 1.0
    lam: float = 0.95

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ValueError(f"critic.lr is {self.lr}; set it above 0")
        for name in ("gamma", "lam"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"critic.{name} is {getattr(self, name)}; it lies in [0, 1]")


def gae(rewards_B: Tensor, values_BT: Tensor, mask_BT: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """(advantages, returns) of each response token, [B, T], 0 elsewhere; see CriticSettings.

    A sequence's response tokens are its first ones, without gaps; the reward comes with the last. Takes a matrix of
    T x T.
    """
    T = mask_BT.shape[1]
    steps_T = torch.arange(T, device=mask_BT.device)
    last_BT = mask_BT & (steps_T == mask_BT.sum(1, keepdim=True) - 1)
    values_BT = torch.where(mask_BT, values_BT, 0.0)
    next_BT = torch.cat([values_BT[:, 1:], torch.zeros_like(values_BT[:, :1])], 1)
    deltas_BT = torch.where(mask_BT, last_BT * rewards_B[:, None] + gamma * next_BT - values_BT, 0.0)
    ahead_TT = steps_T - steps_T[:, None]
    discounts_TT = ((gamma * lam) ** ahead_TT.clamp(min=0).to(values_BT.dtype)).triu()
    advantages_BT = torch.where(mask_BT, deltas_BT @ discounts_TT.T, 0.0)
    return advantages_BT, advantages_BT + values_BT


def whitened(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Minus the mean and over the standard deviation of the masked values; 0 elsewhere, and where all are equal."""
    values_N = values_BT[mask_BT]
    spread = values_N.std(correction=0)
    # Not > 0: of values that are not finite nothing must be left that looks like no advantage.
    return torch.where(mask_BT & (spread != 0), (values_BT - values_N.mean()) / spread, 0.0)


class Critic(ScalarModel):
    """V of every prefix of a response, and its optimizer. It takes `model` over."""

    def __init__(self, model: PreTrainedModel, settings: CriticSettings):
        super().__init__(model)
        self.settings = settings
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=settings.lr, weight_decay=0.0, fused=True)

    def values(self, rollouts: Rollouts) -> Tensor:
        """V of the prefix that each response token was sampled after, [B, T], with gradient."""
        T = rollouts.response_BT.shape[1]
        return self.scores(rollouts.tokens_BS, rollouts.attention_BS)[:, -T - 1 : -1]

    @torch.no_grad()
    def assess(self, rollouts: Rollouts, micro_batch: int) -> tuple[Tensor, Tensor]:
        """(whitened advantages, returns) of a step's rollouts, [B, T]. micro_batch: sequences a forward, 0: all."""
        rows = torch.arange(len(rollouts)).split(micro_batch or len(rollouts))
        values_BT = torch.cat([self.values(rollouts[part]) for part in rows])
        mask_BT, rewards_B = rollouts.response_BT, rollouts.training_rewards_B.float()
        advantages_BT, returns_BT = gae(rewards_B, values_BT, mask_BT, self.settings.gamma, self.settings.lam)
        return whitened(advantages_BT, mask_BT), returns_BT

    def learn(self, batch: Sequence[MicroBatch], max_grad_norm: float) -> dict[str, float]:
        """One step towards the returns of a mini-batch. Gives columns of the table `updates`.

        NotFiniteError where loss or gradient are not finite: the policy's advantages could no longer be believed.
        """
        self.optimizer.zero_grad(set_to_none=True)
        num_tokens = sum(int(part.rollouts.response_BT.sum()) for part in batch)
        errors, targets, total = [], [], 0.0
        for part in batch:
            mask_BT = part.rollouts.response_BT
            returns_N = part.returns_BT[mask_BT]  # type: ignore[index]  # a critic's mini-batches have them
            errors_N = self.values(part.rollouts)[mask_BT] - returns_N
            loss = errors_N.square().sum() / 2 / num_tokens
            loss.backward()
            total += float(loss.detach())
            errors.append(errors_N.detach())
            targets.append(returns_N)
        norm = float(nn.utils.clip_grad_norm_(self.parameters(), max_grad_norm or math.inf))
        if not (math.isfinite(total) and math.isfinite(norm)):
            raise NotFiniteError(f"the critic's loss is {total}, its gradient norm {norm}")
        self.optimizer.step()
        missed, spread = (float(torch.cat(values).var(correction=0)) for values in (errors, targets))
        return {"value_loss": total, "explained_variance": 1 - missed / spread if spread else math.nan}

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint has to keep: weights and moments."""
        moments = {
            f"{moment}.{name}": self.optimizer.state[parameter][moment]
            for name, parameter in self.named_parameters()
            if parameter in self.optimizer.state
            for moment in MOMENTS
        }
        return {f"weight.{name}": parameter.detach() for name, parameter in self.named_parameters()} | moments

    @torch.no_grad()
    def resume(self, state: dict[str, Tensor]) -> None:
        """Take over what `state` gave."""
        for name, parameter in self.named_parameters():
            parameter.copy_(state[f"weight.{name}"])
            if f"step.{name}" in state:
                own = {moment: state[f"{moment}.{name}"].to(parameter.device) for moment in MOMENTS}
                self.optimizer.state[parameter] = own
