"""What DAPO adds to a step beside its loss: groups that teach nothing are replaced, long responses lose reward."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_rl.records import Rollouts
from moe_rl.routing_trace import RoutingTrace


def overlong_penalty(response_BT: Tensor, limit: int, buffer: int) -> Tensor:
    """What is added to the reward of a response of |y| tokens, [B]: 0 up to limit - buffer, then linearly down to -1.

    min(0, (limit - buffer - |y|) / buffer)        DAPO, arXiv 2503.14476 eq. 13
    """
    return ((limit - buffer - response_BT.sum(1)) / buffer).clamp(max=0.0)


def equal_groups(rewards_B: Tensor, completions: int) -> Tensor:
    """Whether the rewards of a group are all equal, [groups]. Rows: the completions of prompt 0, of prompt 1, ..."""
    rewards_PG = rewards_B.view(-1, completions)
    return (rewards_PG == rewards_PG[:, :1]).all(1)


def replace_equal_groups(rollouts: Rollouts, fresh: Rollouts, completions: int, pad: int) -> Rollouts:
    """The rollouts, their groups of equal training rewards replaced by groups of `fresh` that are not, while there are.

    Group ids and the number of groups stay. pad: token id for the columns that one of both lacks.
    """
    stale = equal_groups(rollouts.training_rewards_B, completions).nonzero().flatten()
    useful = (~equal_groups(fresh.training_rewards_B, completions)).nonzero().flatten()
    count = min(len(stale), len(useful))
    if count == 0:
        return rollouts
    rows_PG = torch.arange(len(rollouts) + len(fresh), device=rollouts.tokens_BS.device).view(-1, completions)
    groups = len(rollouts) // completions
    rows_PG[stale[:count]] = rows_PG[groups + useful[:count]]
    chosen = join([rollouts, fresh], pad)[rows_PG[:groups].flatten()]
    return dataclasses.replace(chosen, group_ids_B=rollouts.group_ids_B)


def join(parts: Sequence[Rollouts], pad: int) -> Rollouts:
    """Rollouts of different widths as one: prompts padded on the left, responses on the right. Group ids do not change.

    Routing in new columns is unknown.
    """
    T = max(part.response_BT.shape[1] for part in parts)
    P = max(part.tokens_BS.shape[1] - part.response_BT.shape[1] for part in parts)

    def widen(part: Rollouts) -> Rollouts:
        right = T - part.response_BT.shape[1]
        left = P + T - part.tokens_BS.shape[1] - right
        routing = part.routing
        if routing is not None:
            routing = dataclasses.replace(
                routing,
                expert_ids_BSLK=F.pad(routing.expert_ids_BSLK, (0, 0, 0, 0, left, right)),
                valid_BS=F.pad(routing.valid_BS, (left, right)),
                extras={},
            )
        return dataclasses.replace(
            part,
            tokens_BS=F.pad(part.tokens_BS, (left, right), value=pad),
            attention_BS=F.pad(part.attention_BS, (left, right)),
            response_BT=F.pad(part.response_BT, (0, right)),
            rollout_logprobs_BT=F.pad(part.rollout_logprobs_BT, (0, right)),
            rollout_entropy_BT=None if part.rollout_entropy_BT is None else F.pad(part.rollout_entropy_BT, (0, right)),
            routing=routing,
        )

    wide = [widen(part) for part in parts]
    joined: dict[str, Any] = {}
    for field in dataclasses.fields(Rollouts):
        values = [getattr(part, field.name) for part in wide]
        if values[0] is not None:
            joined[field.name] = torch.cat(values) if field.name != "routing" else RoutingTrace.cat(values)
    return Rollouts(**joined)
