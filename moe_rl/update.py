"""The policy update: one optimizer step on each mini-batch."""

from __future__ import annotations

import collections
import contextlib
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moe_rl.arm import Arm
from moe_rl.corrections import router_shift, tails
from moe_rl.foresight import ranked_scores, teach
from moe_rl.old_pass import MiniBatch
from moe_rl.policy import response_logprobs
from moe_rl.records import PolicyBatch
from moe_rl.replaying import replay
from moe_rl.router_pressure import NO_PRESSURE, RouterPressure, router_outputs
from moe_rl.routers.base import NATIVE, Router
from moe_rl.store import QUANTILES

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def take_update(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    schedule: Any,
    batch: MiniBatch,
    arm: Arm,
    *,
    max_grad_norm: float = 0.0,
    pressure: RouterPressure = NO_PRESSURE,
    router: Router = NATIVE,
) -> dict[str, Any]:
    """One optimizer step on one mini-batch, accumulated over its micro-batches. Returns columns of the table `updates`.

    max_grad_norm: 0 for none. A loss or gradient that is not finite leaves the weights as they were. If nobody has
    looked at the mini-batch yet, the model is still the old policy: its log probabilities are noted, its routing is
    live.
    """
    first = not batch.recomputed
    correction, kl = arm.correction, arm.kl
    num_sequences = sum(int(part.response_BT.any(1).sum()) for part in batch.parts)
    num_tokens = sum(int(part.response_BT.sum()) for part in batch.parts)
    num_real = sum(int(part.attention_BS.sum()) for part in batch.parts)
    log_ratios, clipped, kept, total = [], [], [], 0.0
    extras: dict[str, float] = collections.defaultdict(float)
    optimizer.zero_grad(set_to_none=True)
    for number, (part, advantages) in enumerate(zip(batch.parts, batch.advantages, strict=True)):
        replays = arm.replay != "none" and not first
        with replay(model, batch.routing[number], arm.keep) if replays else contextlib.nullcontext() as replaying:
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
            output = arm.policy_loss(
                PolicyBatch(logprobs_BT, old_BT, part.response_BT, advantages, num_sequences, num_tokens)
            )
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
        raise ValueError("arm.correction=rspo needs the router logits of the old pass; give old_pass the same arm")
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
