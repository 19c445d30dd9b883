"""A step's rollouts in mini-batches, one for each update, and these in micro-batches, one for each training forward."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from moe_rl.records import Rollouts
from moe_rl.routing_trace import RoutingTrace


@dataclasses.dataclass(frozen=True)
class OldView:
    """What the old policy says about a micro-batch.

    logprobs_BT, entropy_BT: of its response tokens, nats. routing: what training forwards replay, None where they route
    live. live_routing: its own, where recorded. router_logits: [B, S, L, E], where asked for. scores: what its routers
    ranked [N, E], one a router, where a router variant learns from it. sampled: the sampler spoke for it.
    """

    logprobs_BT: Tensor
    entropy_BT: Tensor
    routing: RoutingTrace | None = None
    live_routing: RoutingTrace | None = None
    router_logits: Tensor | None = None
    scores: list[Tensor] = dataclasses.field(default_factory=list)
    sampled: bool = False


@dataclasses.dataclass
class MicroBatch:
    """The sequences of one training forward: some of a mini-batch, or all. A mini-batch is a list of these.

    advantages: [B], or [B, T] from a critic, which learns returns_BT. old: None until somebody has looked. In the first
    mini-batch its log probabilities are those of a forward of the very same sequences, so that the first update's
    ratios are exactly 1 and not 1 up to rounding. reference_BT: the reference policy's log probabilities, nats.
    trained: False where no sequence has an advantage, so that a forward without gradient says all there is to say.
    """

    rollouts: Rollouts
    advantages: Tensor
    returns_BT: Tensor | None = None
    old: OldView | None = None
    reference_BT: Tensor | None = None
    trained: bool = True

    def __len__(self) -> int:
        return len(self.rollouts)


def split_rows(count: int, updates: int, seed: int) -> list[Tensor]:
    """Row numbers of each of `updates` mini-batches: a random partition of `count` rows, a function of `seed`."""
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randperm(count, generator=generator).chunk(updates))


def shortest_first(rows: list[Tensor], rollouts: Rollouts) -> list[Tensor]:
    """The rows of each mini-batch by number of tokens, so that those of a micro-batch are of similar length."""
    lengths_B = rollouts.attention_BS.sum(1).cpu()
    return [mine[lengths_B[mine].argsort(stable=True)] for mine in rows]


def mini_batches(
    rollouts: Rollouts,
    advantages: Tensor,
    rows: list[Tensor],
    *,
    returns_BT: Tensor | None = None,
    micro_batch: int = 0,
    train_all: bool = True,
) -> list[list[MicroBatch]]:
    """The rollouts of each mini-batch's rows, `micro_batch` sequences a forward, 0 for all of them.

    advantages: [B], or [B, T] from a critic, with its returns_BT. Columns that are padding in all sequences of a
    forward are left out. train_all: False where nothing but the policy loss trains: then sequences without advantage,
    to which it gives no gradient, have forwards of their own, without backward. A mini-batch of nothing else is trained
    whole, for to an optimizer with momentum a gradient of zero is not the same as none.
    """
    idle_B = (advantages == 0).view(len(rollouts), -1).all(1).cpu() & (not train_all)

    def batch(mine: Tensor) -> list[MicroBatch]:
        idle = idle_B[mine]
        if idle.all():
            return forwards(mine, True)
        return forwards(mine[~idle], True) + forwards(mine[idle], False)

    def forwards(mine: Tensor, trained: bool) -> list[MicroBatch]:
        return [forward(part, trained) for part in mine.split(micro_batch or len(mine))] if len(mine) else []

    def forward(mine: Tensor, trained: bool) -> MicroBatch:
        part = rollouts[mine].trimmed()
        T = part.response_BT.shape[1]
        of_part = advantages[mine] if advantages.dim() == 1 else advantages[mine, :T]
        returns = None if returns_BT is None else returns_BT[mine, :T]
        return MicroBatch(part, of_part, returns, trained=trained)

    return [batch(mine) for mine in rows]
