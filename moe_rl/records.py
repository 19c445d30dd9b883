"""The dataclasses that travel through the pipeline, and the legend of shapes.

Suffixes of tensor names: B sequences · S columns of a sequence: prompt (padded on the left), then response (padded on
the right) · T response columns · L MoE layers · E experts of a layer · K experts chosen per token · N tokens, flat ·
V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from moe_rl.routing_trace import RoutingTrace


class NotFiniteError(RuntimeError):
    """The policy has come to numbers that are not finite: the run has diverged."""


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """Sampled completions. Row order: the G completions of prompt 0, of prompt 1, ...

    tokens_BS, attention_BS: prompts and responses, and True on their real tokens, the end-of-sequence token included.
    response_BT: True on response tokens. The last T of the S columns are the response.
    group_ids_B: index of the prompt. rollout_logprobs_BT: log mu of each response token, nats; 0 elsewhere.
    rewards_B, exact_B: reward in [0, 1]; whether the completion is exactly right. truncated_B: hit the length limit.
    routing: from the sampling passes, if the engine recorded it. rollout_entropy_BT: of the distributions that the
    tokens were drawn from, nats, if the engine says it. shaped_rewards_B: what training rewards instead of rewards_B,
    where it is something else.
    """

    tokens_BS: Tensor
    attention_BS: Tensor
    response_BT: Tensor
    group_ids_B: Tensor
    rollout_logprobs_BT: Tensor
    rewards_B: Tensor
    exact_B: Tensor
    truncated_B: Tensor
    routing: RoutingTrace | None = None
    rollout_entropy_BT: Tensor | None = None
    shaped_rewards_B: Tensor | None = None

    @property
    def training_rewards_B(self) -> Tensor:  # noqa: N802 (the shape's suffix)
        """What advantages are made of."""
        return self.rewards_B if self.shaped_rewards_B is None else self.shaped_rewards_B

    def __len__(self) -> int:
        return len(self.tokens_BS)

    def trimmed(self) -> Rollouts:
        """Without the columns that are padding in every row; a column of prompt and one of response stay."""
        S, T = self.attention_BS.shape[1], self.response_BT.shape[1]
        left = min(int((~self.attention_BS.any(0)).cumprod(0).sum()), S - T - 1)
        right = min(int((~self.response_BT.any(0)).flip(0).cumprod(0).sum()), T - 1)

        columns_S, columns_T = slice(left, S - right), slice(T - right)
        entropy_BT, routing = self.rollout_entropy_BT, self.routing
        return dataclasses.replace(
            self,
            tokens_BS=self.tokens_BS[:, columns_S],
            attention_BS=self.attention_BS[:, columns_S],
            response_BT=self.response_BT[:, columns_T],
            rollout_logprobs_BT=self.rollout_logprobs_BT[:, columns_T],
            rollout_entropy_BT=None if entropy_BT is None else entropy_BT[:, columns_T],
            routing=None if routing is None else routing.columns(columns_S),
        )

    def __getitem__(self, rows: Tensor | slice) -> Rollouts:
        """Some of the rollouts; every field follows, the routing too."""
        fields: dict[str, Any] = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        chosen: dict[str, Any] = {name: None if value is None else value[rows] for name, value in fields.items()}
        return Rollouts(**chosen)


@dataclasses.dataclass(frozen=True)
class PolicyBatch:
    """What a policy loss sees.

    logprobs_BT: of the response tokens under the new policy, nats, with gradient. old_logprobs_BT: under the old one.
    mask_BT: True on response tokens. advantages: one a sequence [B], or from a critic one a token [B, T].
    num_sequences, num_tokens: sequences with a response and response tokens of the whole mini-batch, of which this
        batch may be a part: a loss divides by these, so that micro-batches add up to the mini-batch.
    """

    logprobs_BT: Tensor
    old_logprobs_BT: Tensor
    mask_BT: Tensor
    advantages: Tensor
    num_sequences: int
    num_tokens: int

    @property
    def advantages_BT(self) -> Tensor:  # noqa: N802 (the shape's suffix)
        """The advantage of each token."""
        return self.advantages if self.advantages.dim() == 2 else self.advantages[:, None].expand(self.mask_BT.shape)

    @property
    def advantages_B(self) -> Tensor:  # noqa: N802
        """The advantage of each sequence; ValueError where its tokens have different ones."""
        if self.advantages.dim() == 2:
            raise ValueError("the loss takes one advantage a sequence and a critic gives one a token; choose another")
        return self.advantages

    @classmethod
    def whole(cls, logprobs_BT: Tensor, old_logprobs_BT: Tensor, mask_BT: Tensor, advantages: Tensor) -> PolicyBatch:
        """A batch that is a mini-batch of its own."""
        mask_BT = mask_BT.bool()
        return cls(logprobs_BT, old_logprobs_BT, mask_BT, advantages, int(mask_BT.any(1).sum()), int(mask_BT.sum()))


@dataclasses.dataclass(frozen=True)
class LossOutput:
    """loss: scalar. clipped_BT: True on response tokens whose gradient was clipped away."""

    loss: Tensor
    clipped_BT: Tensor
