"""The policy update: one optimizer step on each mini-batch."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moe_rl.arm import Arm
from moe_rl.corrections import router_shift, tails
from moe_rl.foresight import ranked_scores, teach
from moe_rl.mini_batches import MicroBatch, OldView
from moe_rl.policy import response_logprobs
from moe_rl.policy_losses.base import PolicyLoss
from moe_rl.records import LossOutput, PolicyBatch, Rollouts
from moe_rl.replaying import replay
from moe_rl.router_pressure import NO_PRESSURE, RouterPressure, router_outputs
from moe_rl.routers.base import NATIVE, Router, counted
from moe_rl.store import QUANTILES

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def take_update(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    schedule: Any,
    batch: Sequence[MicroBatch],
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
    sizes = Sizes.of(batch)
    loss, log_ratios, clipped, kept = 0.0, [], [], []
    columns: dict[str, float] = collections.defaultdict(float)
    optimizer.zero_grad(set_to_none=True)
    for part in batch:
        rollouts, old = part.rollouts, part.old
        forced = replay(model, old.routing, arm.keep) if old and arm.replay != "none" else contextlib.nullcontext()
        with forced as replaying:
            with contextlib.ExitStack() as stack:
                stack.enter_context(torch.set_grad_enabled(part.trained))
                stack.enter_context(counted(model, rollouts.attention_BS))
                watched = pressure.on or arm.correction.needs_routers
                seen = stack.enter_context(router_outputs(model)) if watched else []
                scores = stack.enter_context(ranked_scores(model)) if old and old.scores else []
                logprobs_BT, entropy_BT = response_logprobs(model, rollouts)
            if old is None:
                part.old = old = OldView(logprobs_BT.detach(), entropy_BT)
            if not part.trained:
                logprobs_BT.requires_grad_()
            total, output, log_w_BT, told = objective(part, old, logprobs_BT, seen, arm, pressure, sizes)
            if old.scores:
                share, learned = sizes.share(rollouts), teach(model, router, old.scores, scores, rollouts.attention_BS)
                told |= {name: share * value for name, value in learned.items()}
            if part.trained:
                total.backward()
            else:
                require_no_gradient(total, logprobs_BT, arm.policy_loss)
        loss += float(output.loss.detach())
        log_ratios.append((log_w_BT, rollouts.response_BT))
        clipped.append(output.clipped_BT)
        kept += replaying.kept if replaying is not None else []
        for name, value in told.items():
            columns[name] += value
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    grad_norm = float(nn.utils.clip_grad_norm_(trained, max_grad_norm or math.inf))
    lr = optimizer.param_groups[0]["lr"]
    if math.isfinite(loss) and math.isfinite(grad_norm):
        optimizer.step()
        schedule.step()
    row = {"loss": loss, "grad_norm": grad_norm, "lr": lr, **columns}
    if kept:
        used, replayed_slots = (sum(int(count) for count in counts) for counts in zip(*kept, strict=True))
        row["replay_kept"] = used / replayed_slots
    return row | clip_columns(clipped, sizes.sequences, sizes.tokens) | ratio_columns(log_ratios)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of a whole mini-batch: sequences with a response, response tokens, and real tokens, prompts included."""

    sequences: int
    tokens: int
    real: int

    @classmethod
    def of(cls, batch: Sequence[MicroBatch]) -> Sizes:
        parts = [part.rollouts for part in batch]
        return cls(
            sum(int(part.response_BT.any(1).sum()) for part in parts),
            sum(int(part.response_BT.sum()) for part in parts),
            sum(int(part.attention_BS.sum()) for part in parts),
        )

    def share(self, part: Rollouts) -> float:
        """A micro-batch's share of the real tokens."""
        return int(part.attention_BS.sum()) / self.real


def objective(
    part: MicroBatch,
    old: OldView,
    logprobs_BT: Tensor,
    seen: list[tuple[Tensor, Tensor]],
    arm: Arm,
    pressure: RouterPressure,
    sizes: Sizes,
) -> tuple[Tensor, LossOutput, Tensor, dict[str, float]]:
    """What a micro-batch adds to the objective of its mini-batch: policy loss, KL to the reference, router pressure.

    logprobs_BT: under the new policy. seen: what its routers gave out, where they are watched. Returns the scalar to
    differentiate, what the policy loss said, log w [B, T] without gradient, and columns to be summed.
    """
    correction, kl = arm.correction, arm.kl
    rollouts, mask_BT = part.rollouts, part.rollouts.response_BT
    shift_BT = predicting_shift(seen, rollouts, old) if correction.needs_routers else None
    logprobs_BT = correction.apply(logprobs_BT, old.logprobs_BT, rollouts.rollout_logprobs_BT, mask_BT, shift_BT)
    old_BT = rollouts.rollout_logprobs_BT if arm.old_logprobs == "engine" else old.logprobs_BT
    output = arm.policy_loss(PolicyBatch(logprobs_BT, old_BT, mask_BT, part.advantages, sizes.sequences, sizes.tokens))
    total, columns = output.loss, {}
    if kl.on:
        term = kl(logprobs_BT, old_BT, part.reference_BT, mask_BT, sizes.tokens)
        total = total + kl.coefficient * term
        columns["reference_kl"] = float(term.detach())
    if pressure.on:
        share = sizes.share(rollouts)
        extra, values = pressure(seen, rollouts.attention_BS, old.router_logits)
        total = total + share * extra
        columns |= {name: share * value for name, value in values.items()}
    return total, output, logprobs_BT.detach() - old_BT, columns


def require_no_gradient(total: Tensor, logprobs_BT: Tensor, policy_loss: PolicyLoss) -> None:
    """ValueError for a policy loss that wants to move sequences which have no advantage, and so had no backward."""
    (gradient_BT,) = torch.autograd.grad(total, logprobs_BT)
    if 0 < float(gradient_BT.abs().sum()) < math.inf:
        raise ValueError(
            f"{type(policy_loss).__name__} gives a gradient to sequences without advantage, which the contract of "
            "PolicyLoss forbids; a divergence from another policy belongs in arm.kl"
        )


def predicting_shift(seen: list[tuple[Tensor, Tensor]], rollouts: Rollouts, old: OldView) -> Tensor:
    """Router shift ratio [B, T] at the positions that predict the response tokens; see `router_shift`."""
    routing = old.routing or old.live_routing
    if old.router_logits is None or routing is None:
        raise ValueError("arm.correction=rspo needs the router logits of the old pass; give old_pass the same arm")
    T = rollouts.response_BT.shape[1]
    return router_shift(old.router_logits, [logits for logits, _ in seen], routing.expert_ids_BSLK)[:, -T - 1 : -1]


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
