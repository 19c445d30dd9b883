"""The policy update: the old policy's view of the rollouts, then one optimizer step on each mini-batch."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moe_rl.corrections import NO_CORRECTION, Correction, router_shift, tails
from moe_rl.foresight import ranked_scores, teach
from moe_rl.keeping import keep_likely, keep_unless_outdone
from moe_rl.policy import response_logprobs, routing_of
from moe_rl.policy_losses.base import PolicyLoss
from moe_rl.recording import record
from moe_rl.records import PolicyBatch, Rollouts, RoutingTrace
from moe_rl.reference import NO_KL, ReferenceKl, acting_as
from moe_rl.replaying import replay
from moe_rl.router_pressure import NO_PRESSURE, RouterPressure, router_outputs
from moe_rl.routers.base import NATIVE, Router, learns
from moe_rl.store import QUANTILES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

REPLAYS = {
    "none": "every policy routes by itself",
    "old_policy": "training forwards use the experts of the old-logprob pass (Routing Replay, R2)",
    "rollout": "training and old-logprob forwards use the experts of the sampling pass (R3, arXiv 2510.11370)",
    "shuffled": "as old_policy, but with the experts of another sequence of the mini-batch (a placebo)",
    "thresholded": "as old_policy, without experts whose live score fell below a share of the weakest live choice's",
    "sticky": "as old_policy, without experts that the live choice in their place leads by more than a margin",
}
KEEPS = {"thresholded": keep_likely, "sticky": keep_unless_outdone}  # the modes that have a threshold

OLD_LOGPROBS = {
    "recompute": "ratios are taken against the trainer's own log probabilities of the old policy",
    "engine": "ratios are taken against the log probabilities that the engine sampled with",
}


@dataclasses.dataclass(frozen=True)
class MiniBatch:
    """The rows of one update, cut into micro-batches, with what the old policy said about them.

    Log probabilities are those of forwards of the very same micro-batches, so that the first update's ratios are
    exactly 1 and not 1 up to the rounding of another batch shape. Until somebody has looked, `recomputed` is empty.

    from_engine: whether ratios are taken against the engine's log probabilities. recomputed: the old policy's own.
    routing: what training forwards replay, None where they route live. live_routing: the old policy's, where recorded.
    router_logits: the old policy's [B, S, L, E], where asked for. scores: what its routers ranked [N, E], one a router,
    where a router variant learns from it. reference: the reference policy's log probabilities, empty without one.
    """

    parts: list[Rollouts]
    advantages: list[Tensor]
    from_engine: bool = False
    recomputed: list[Tensor] = dataclasses.field(default_factory=list)
    entropies: list[Tensor] = dataclasses.field(default_factory=list)
    routing: list[RoutingTrace | None] = dataclasses.field(default_factory=list)
    live_routing: list[RoutingTrace | None] = dataclasses.field(default_factory=list)
    router_logits: list[Tensor | None] = dataclasses.field(default_factory=list)
    scores: list[list[Tensor]] = dataclasses.field(default_factory=list)
    reference: list[Tensor] = dataclasses.field(default_factory=list)

    @property
    def old_logprobs(self) -> list[Tensor]:
        """What ratios are taken against, of each part."""
        return [part.rollout_logprobs_BT for part in self.parts] if self.from_engine else self.recomputed

    def note(
        self,
        logprobs_BT: Tensor,
        entropy_BT: Tensor,
        routing: RoutingTrace | None = None,
        live_routing: RoutingTrace | None = None,
        router_logits: Tensor | None = None,
    ) -> None:
        """Add what the old policy says about the next part."""
        self.recomputed.append(logprobs_BT.detach())
        self.entropies.append(entropy_BT)
        self.routing.append(routing)
        self.live_routing.append(live_routing)
        self.router_logits.append(router_logits)


def split_rows(count: int, updates: int, seed: int) -> list[Tensor]:
    """Row numbers of each of `updates` mini-batches: a random partition of `count` rows, a function of `seed`."""
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randperm(count, generator=generator).chunk(updates))


def old_pass(
    model: PreTrainedModel,
    rollouts: Rollouts,
    advantages: Tensor,
    rows: list[Tensor],
    micro_batch: int,
    replayed: str,
    old_logprobs: str = "recompute",
    keep_logits: bool = False,
    reference: Mapping[str, Tensor] | None = None,
    router: Router = NATIVE,
) -> list[MiniBatch]:
    """The rollouts in mini-batches and micro-batches, with the old policy's log probabilities, entropies and routing.

    advantages: [B], or [B, T] from a critic. micro_batch: sequences a forward, 0 for a whole mini-batch. replayed: one
    of REPLAYS. old_logprobs: one of OLD_LOGPROBS. keep_logits: see `look`. The first mini-batch needs no pass where its
    own training forwards, which are still the old policy's, say the same: where they route live and nothing is to be
    recorded. `take_update` notes it.
    reference: weights of the reference policy, whose log probabilities are noted too; it routes live. router: the
    installed variant; one that learns is shown the change of scores from the second mini-batch on.
    """
    batches = []
    for rows_of_update in rows:
        parts = rows_of_update.split(micro_batch or len(rows_of_update))
        cut = [rollouts[part] for part in parts], [advantages[part] for part in parts]
        batches.append(MiniBatch(*cut, from_engine=old_logprobs == "engine"))
    tells_itself = replayed in ("none", "old_policy") and rollouts.routing is None and not keep_logits
    for batch in batches[1:] if tells_itself else batches:
        look(model, batch, replayed, keep_logits, keep_scores=learns(router) and batch is not batches[0])
    if reference is not None:
        with torch.no_grad(), acting_as(model, reference):
            for batch in batches:
                batch.reference.extend(response_logprobs(model, part)[0] for part in batch.parts)
    return batches


@torch.no_grad()
def look(
    model: PreTrainedModel, batch: MiniBatch, replayed: str, keep_logits: bool = False, keep_scores: bool = False
) -> None:
    """Note in `batch` what the model, which is still the old policy, says about it.

    Recorded is the old policy's own routing, if it is replayed or to be compared with the sampler's, its router logits
    if keep_logits, and what a variant was asked to choose by if keep_scores (4 L E bytes a token each).
    """
    for part, forced in zip(batch.parts, forced_routing(model, batch.parts, replayed), strict=True):
        with contextlib.ExitStack() as stack:
            recorder = None
            if forced is not None:
                stack.enter_context(replay(model, forced))
            if keep_logits or (forced is None and (replayed != "none" or part.routing is not None)):
                recorder = stack.enter_context(record(model, router_logits=keep_logits, source="old"))
            if keep_scores:
                batch.scores.append(stack.enter_context(ranked_scores(model)))
            said = response_logprobs(model, part)
        recorded = recorder.trace if recorder is not None else None
        logits = recorded.extras["router_logits"] if recorded and keep_logits else None
        live = dataclasses.replace(recorded, extras={}) if recorded and forced is None else None
        batch.note(*said, None if replayed == "none" else forced or live, live, logits)


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
        return [others[rows] for rows in torch.arange(len(others.valid_BS)).split([len(part) for part in parts])]
    return [None] * len(parts)


def require_routing(rollouts: Rollouts) -> RoutingTrace:
    if rollouts.routing is None:
        raise ValueError("replay=rollout needs rollouts with routing, these have none; sample with record_routing=True")
    return rollouts.routing


def take_update(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    schedule: Any,
    batch: MiniBatch,
    loss: PolicyLoss,
    replayed: str,
    max_grad_norm: float,
    correction: Correction = NO_CORRECTION,
    threshold: float = 0.0,
    pressure: RouterPressure = NO_PRESSURE,
    kl: ReferenceKl = NO_KL,
    router: Router = NATIVE,
) -> dict[str, Any]:
    """One optimizer step on one mini-batch, accumulated over its micro-batches. Returns columns of the table `updates`.

    threshold: of the modes in KEEPS, see moe_rl.keeping; 0 replays all. A loss or gradient that is not finite leaves
    the weights as they were. If nobody has looked at the mini-batch yet, the model is still the old policy: its log
    probabilities are noted, its routing is live.
    """
    first = not batch.recomputed
    keep = functools.partial(KEEPS[replayed], threshold=threshold) if threshold else None
    num_sequences = sum(int(part.response_BT.any(1).sum()) for part in batch.parts)
    num_tokens = sum(int(part.response_BT.sum()) for part in batch.parts)
    num_real = sum(int(part.attention_BS.sum()) for part in batch.parts)
    log_ratios, clipped, kept, total = [], [], [], 0.0
    extras: dict[str, float] = collections.defaultdict(float)
    optimizer.zero_grad(set_to_none=True)
    for number, (part, advantages) in enumerate(zip(batch.parts, batch.advantages, strict=True)):
        replays = replayed != "none" and not first
        with replay(model, batch.routing[number], keep) if replays else contextlib.nullcontext() as replaying:
            watched = pressure.on or correction.needs_routers
            with contextlib.ExitStack() as stack:
                seen = stack.enter_context(router_outputs(model)) if watched else []
                scores = stack.enter_context(ranked_scores(model)) if batch.scores else []
                logprobs_BT, entropy_BT = response_logprobs(model, part)
            share = int(part.attention_BS.sum()) / num_real
            if batch.scores:
                for name, value in teach(model, router, batch.scores[number], scores, part.attention_BS).items():
                    extras[name] += share * value
            if first:
                batch.note(logprobs_BT, entropy_BT)
            old_BT, recomputed_BT = batch.old_logprobs[number], batch.recomputed[number]
            shift_BT = predicting_shift(seen, batch, number) if correction.needs_routers else None
            logprobs_BT = correction.apply(
                logprobs_BT, recomputed_BT, part.rollout_logprobs_BT, part.response_BT, shift_BT
            )
            output = loss(PolicyBatch(logprobs_BT, old_BT, part.response_BT, advantages, num_sequences, num_tokens))
            objective = output.loss
            if kl.on:
                reference_BT = batch.reference[number] if batch.reference else None
                term = kl(logprobs_BT, old_BT, reference_BT, part.response_BT, num_tokens)
                objective = objective + kl.coefficient * term
                extras["reference_kl"] += float(term.detach())
            if pressure.on:
                extra, values = pressure(seen, part.attention_BS, batch.router_logits[number])
                objective = objective + share * extra
                for name, value in values.items():
                    extras[name] += share * value
            objective.backward()
        total += float(output.loss.detach())
        if replaying is not None:
            kept += replaying.kept
        log_ratios.append((logprobs_BT.detach() - old_BT, part.response_BT))
        clipped.append(output.clipped_BT)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    grad_norm = float(nn.utils.clip_grad_norm_(trained, max_grad_norm or math.inf))
    lr = optimizer.param_groups[0]["lr"]
    if math.isfinite(total) and math.isfinite(grad_norm):
        optimizer.step()
        schedule.step()
    row = {"loss": total, "grad_norm": grad_norm, "lr": lr, **extras}
    if kept:
        used, replayed_slots = (sum(int(count) for count in counts) for counts in zip(*kept, strict=True))
        row["replay_kept"] = used / replayed_slots
    return row | clip_columns(clipped, num_sequences, num_tokens) | ratio_columns(log_ratios)


def predicting_shift(seen: list[tuple[Tensor, Tensor]], batch: MiniBatch, number: int) -> Tensor:
    """Router shift ratio [B, T] of a part, at the positions that predict its response tokens; see `router_shift`."""
    part, old_logits_BSLE = batch.parts[number], batch.router_logits[number]
    old = batch.routing[number] or batch.live_routing[number]
    if old_logits_BSLE is None or old is None:
        raise ValueError("arm.correction=rspo needs the router logits of the old pass; call old_pass with keep_logits")
    T = part.response_BT.shape[1]
    return router_shift(old_logits_BSLE, [logits for logits, _ in seen], old.expert_ids_BSLK)[:, -T - 1 : -1]


def clip_columns(clipped: list[Tensor], num_sequences: int, num_tokens: int) -> dict[str, float]:
    """Share of tokens, and of sequences with one or more tokens, whose gradient was clipped away."""
    return {
        "clip_frac": sum(int(part.sum()) for part in clipped) / num_tokens,
        "clip_frac_sequences": sum(int(part.any(1).sum()) for part in clipped) / num_sequences,
    }


def ratio_columns(log_ratios: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """Spread of the log ratios, the same for every loss. log_ratios: (log w_BT, mask_BT) of each micro-batch.

    log s is the mean of log w over a sequence; k3, f2, f5 and ess are those of w, see `tails`.
    """
    log_w_N = torch.cat([log_w_BT[mask_BT] for log_w_BT, mask_BT in log_ratios])
    log_s_B = torch.cat([log_w_BT.sum(1) / mask_BT.sum(1) for log_w_BT, mask_BT in log_ratios])
    log_s_B = log_s_B[torch.cat([mask_BT.any(1) for _, mask_BT in log_ratios])]
    return {
        **_spread("log_w", log_w_N),
        **_spread("log_s", log_s_B),
        **tails(log_w_N),
    }


def _spread(name: str, values_N: Tensor) -> dict[str, Any]:
    values_N = values_N.double()
    quantiles = torch.quantile(values_N, torch.tensor(QUANTILES, dtype=torch.float64, device=values_N.device))
    return {f"{name}_sd": float(values_N.std(correction=0)), f"{name}_q": quantiles.tolist()}


def make_deterministic(model: nn.Module) -> None:
    """Put the model in eval mode, so that dropout and router jitter cannot make old and new policy differ.

    Under activation checkpointing the layers themselves must be in training mode for it to happen; their parts stay in
    eval mode. Gradients flow in either mode.
    """
    model.eval()
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True
