"""The old policy's view of the rollouts, before a step's first update."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_rl.arm import Arm
from moe_rl.foresight import ranked_scores
from moe_rl.mini_batches import MicroBatch, OldView
from moe_rl.policy import response_logprobs, routing_of
from moe_rl.recording import record
from moe_rl.records import Rollouts
from moe_rl.reference import acting_as
from moe_rl.replaying import replay
from moe_rl.router_pressure import NO_PRESSURE, RouterPressure
from moe_rl.routers.base import NATIVE, Router, learns
from moe_rl.routing_trace import RoutingTrace

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def old_pass(
    model: PreTrainedModel,
    batches: Sequence[Sequence[MicroBatch]],
    arm: Arm,
    *,
    pressure: RouterPressure = NO_PRESSURE,
    exact: bool = False,
    reference: Mapping[str, Tensor] | None = None,
    router: Router = NATIVE,
) -> None:
    """Note in the mini-batches of a step what the old policy says: log probabilities, entropies, routing.

    pressure: its router_kl needs the router logits too, as a correction by router shift does. exact: the rollouts were
    sampled from this very model, in fp32. reference: weights of the reference policy, whose log probabilities are noted
    too; it routes live. router: the installed variant; one that learns is shown the change of scores from the second
    mini-batch on.
    A forward is left out where something else says the same, and nothing is to be recorded or forced. In the first
    mini-batch these are its own training forwards, which are still the old policy's: `take_update` notes them, bit for
    bit what a pass would give. In the others it is an exact sampler, up to the rounding of another batch shape.
    """
    keep_logits = pressure.router_kl > 0 or arm.correction.needs_routers
    recorded = any(part.rollouts.routing is not None for batch in batches for part in batch)
    tells_itself = arm.replay in ("none", "old_policy") and not recorded and not keep_logits
    sampler_tells = exact and tells_itself and arm.replay == "none" and not learns(router)
    for batch in batches[1:] if tells_itself else batches:
        if sampler_tells:
            for part in batch:
                part.old = as_sampled(part.rollouts)
        else:
            note_view(model, batch, arm.replay, keep_logits, keep_scores=learns(router) and batch is not batches[0])
    if reference is not None:
        with torch.no_grad(), acting_as(model, reference):
            for part in itertools.chain(*batches):
                part.reference_BT, _ = response_logprobs(model, part.rollouts)


def as_sampled(rollouts: Rollouts) -> OldView:
    """The old policy's view in the words of an exact sampler."""
    if rollouts.rollout_entropy_BT is None:
        raise ValueError(
            "an engine that is exact has to give rollout_entropy_BT too; the old policy is not asked again"
        )
    return OldView(rollouts.rollout_logprobs_BT, rollouts.rollout_entropy_BT, sampled=True)


@torch.no_grad()
def note_view(
    model: PreTrainedModel,
    batch: Sequence[MicroBatch],
    replayed: str,
    keep_logits: bool = False,
    keep_scores: bool = False,
) -> None:
    """Note in a mini-batch what the model, which is still the old policy, says about it.

    Recorded is the old policy's own routing, if it is replayed or to be compared with the sampler's, its router logits
    if keep_logits, and what a variant was asked to choose by if keep_scores (4 L E bytes a token each).
    """
    rollouts = [part.rollouts for part in batch]
    for part, forced in zip(batch, forced_routing(model, rollouts, replayed), strict=True):
        with contextlib.ExitStack() as stack:
            recorder = None
            if forced is not None:
                stack.enter_context(replay(model, forced))
            if keep_logits or (forced is None and (replayed != "none" or part.rollouts.routing is not None)):
                recorder = stack.enter_context(record(model, router_logits=keep_logits, source="old"))
            scores = stack.enter_context(ranked_scores(model)) if keep_scores else []
            logprobs_BT, entropy_BT = response_logprobs(model, part.rollouts)
        recorded = recorder.trace if recorder is not None else None
        logits = recorded.extras["router_logits"] if recorded and keep_logits else None
        live = dataclasses.replace(recorded, extras={}) if recorded and forced is None else None
        routing = None if replayed == "none" else forced or live
        part.old = OldView(logprobs_BT, entropy_BT, routing, live, logits, scores)


def forced_routing(model: PreTrainedModel, parts: list[Rollouts], replayed: str) -> list[RoutingTrace | None]:
    """What the old policy's own forwards replay, of each part of a mini-batch; None where they route live.

    The placebo forces its wrong experts on the old policy too: so it shares with replay that old and new policy use the
    same experts, and differs from it only in whose experts these are.
    """
    if replayed == "rollout":
        return [require_routing(part) for part in parts]
    if replayed == "shuffled":
        own = [routing_of(model, part.tokens_BS, part.attention_BS, "old") for part in parts]
        others = RoutingTrace.cat(own).of_neighbours()
        rows_of_parts = torch.arange(len(others.valid_BS)).split([len(part) for part in parts])
        pairs = zip(rows_of_parts, parts, strict=True)
        return [others[rows].aligned_to(part.attention_BS) for rows, part in pairs]
    return [None] * len(parts)


def require_routing(rollouts: Rollouts) -> RoutingTrace:
    if rollouts.routing is None:
        raise ValueError("replay=rollout needs rollouts with routing, these have none; sample with record_routing=True")
    return rollouts.routing
