"""Expert-activation drift: how much the routing of the same tokens changed between two policies."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from moe_rl.policy import routing_of
from moe_rl.records import Rollouts, RoutingError, RoutingTrace
from moe_rl.traces import TraceWriter

POSITION_BINS = 10


@dataclasses.dataclass(frozen=True)
class Drift:
    """One comparison of routing. E_l(t) is the set of experts of token t in layer l, o = |E_old & E_new|.

    n: tokens compared. slot_change_L: 1 - mean_t o / K. set_change_L: mean_t [E_old != E_new].
    deviation_K1: share of (token, layer) pairs with 0..K changed experts. changed_layers_L1: share of tokens with 0..L
    changed layers. any_layer_change: share of tokens with one or more. first_changed_L: share of tokens whose first
    changed layer it is. by_position: slot change by tenth of a sequence's real tokens. No unit, all in [0, 1].
    Without tokens every value is nan.
    """

    n: int
    slot_change_L: Tensor
    set_change_L: Tensor
    deviation_K1: Tensor
    changed_layers_L1: Tensor
    any_layer_change: float
    first_changed_L: Tensor
    by_position: Tensor

    @property
    def slot_change(self) -> float:
        """The headline: share of activated experts that changed, over all layers."""
        return float(self.slot_change_L.mean())

    def row(self) -> dict[str, Any]:
        """As columns of the table `drift`."""
        return {
            "n": self.n,
            "slot_change": self.slot_change_L.tolist(),
            "set_change": self.set_change_L.tolist(),
            "deviation": self.deviation_K1.tolist(),
            "changed_layers": self.changed_layers_L1.tolist(),
            "any_layer_change": self.any_layer_change,
            "first_changed": self.first_changed_L.tolist(),
            "by_position": self.by_position.tolist(),
        }


def compare(old: RoutingTrace, new: RoutingTrace) -> Drift:
    """The drift from `old` to `new`, two traces of the same sequences, on the tokens that both know.

    Compares sets: the order of equal experts does not count. Raises RoutingError for traces that do not match.
    """
    if old.layer_names != new.layer_names or old.expert_ids_BSLK.shape != new.expert_ids_BSLK.shape:
        raise RoutingError(
            f"traces of {tuple(old.expert_ids_BSLK.shape)} and {tuple(new.expert_ids_BSLK.shape)} [B, S, L, K] "
            "cannot be compared; record both on the same tokens of the same architecture"
        )
    both_BS = old.valid_BS & new.valid_BS
    changed_NL = changed_experts(old.expert_ids_BSLK[both_BS], new.expert_ids_BSLK[both_BS])
    N, L = changed_NL.shape
    K = old.top_k
    layers_N = (changed_NL > 0).sum(1)
    first_N = torch.where(layers_N > 0, (changed_NL > 0).int().argmax(1), L)
    place = both_BS.cumsum(1) - 1
    bin_N = (place * POSITION_BINS // both_BS.sum(1, keepdim=True).clamp(min=1))[both_BS]
    slots_N = changed_NL.double().mean(1) / K
    in_bin = torch.bincount(bin_N, minlength=POSITION_BINS)
    return Drift(
        n=N,
        slot_change_L=changed_NL.double().mean(0) / K,
        set_change_L=(changed_NL > 0).double().mean(0),
        deviation_K1=torch.bincount(changed_NL.flatten(), minlength=K + 1) / (N * L or float("nan")),
        changed_layers_L1=torch.bincount(layers_N, minlength=L + 1) / (N or float("nan")),
        any_layer_change=float((layers_N > 0).double().mean()),
        first_changed_L=torch.bincount(first_N, minlength=L + 1)[:L] / (N or float("nan")),
        by_position=torch.bincount(bin_N, weights=slots_N, minlength=POSITION_BINS) / in_bin,
    )


def changed_experts(old_NLK: Tensor, new_NLK: Tensor) -> Tensor:
    """|E_old minus E_new| of each token and layer, int64 [N, L]. Rows hold distinct ids."""
    kept_NLK = (old_NLK[..., :, None] == new_NLK[..., None, :]).any(-1)
    return old_NLK.shape[-1] - kept_NLK.sum(-1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DriftSettings:
    """What is measured after each update.

    rollouts, probe: sequences of this step's rollouts, and of fixed text, that are forwarded again. every: measure
    after every n-th step's updates; 0 never. trace_every: write the rollouts' routing of every n-th
    step, if it is measured, to traces/; 0 never.
    """

    rollouts: int = 12
    probe: int = 12
    every: int = 1
    trace_every: int = 0

    def __post_init__(self) -> None:
        for name in ("rollouts", "probe", "every", "trace_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"drift.{name} is {getattr(self, name)}; set it to 0 or more")


@dataclasses.dataclass(frozen=True)
class TokenSet:
    """The same tokens, looked at again and again: their routing under each reference policy.

    rows: which of the step's rollouts, or of the probe, they are. history: the routing before the step's first update
    and after each.
    """

    name: str
    tokens_BS: Tensor
    attention_BS: Tensor
    rows: list[int]
    references: dict[str, RoutingTrace] = dataclasses.field(default_factory=dict)
    history: list[RoutingTrace] = dataclasses.field(default_factory=list)


class DriftMeter:
    """Forwards fixed tokens after each update, replay off, and compares their routing with earlier policies'.

    Two token sets: `rollout`, some of this step's sequences, against `old` (the policy that sampled them) and
    `previous` (before this update); `probe`, fixed text that is the same for every arm, against these and `start`.
    """

    def __init__(self, model: PreTrainedModel, settings: DriftSettings, probe: tuple[Tensor, Tensor]):
        self.model, self.settings = model, settings
        self.sets: list[TokenSet] = []
        self.changes: list[float] = []
        self.probe: TokenSet | None = None
        if settings.probe and settings.every:
            tokens, attention = probe[0][: settings.probe], probe[1][: settings.probe]
            self.probe = TokenSet("probe", tokens, attention, list(range(len(tokens))))
            (start,) = self._routing([self.probe], "start", 0)
            self.probe.references.update(start=start, previous=start)

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint has to keep: the probe's routing at the start of the run."""
        if self.probe is None:
            return {}
        start = self.probe.references["start"]
        return {"expert_ids": start.expert_ids_BSLK, **start.extras}

    def resume(self, state: dict[str, Tensor]) -> None:
        """The model was moved to a later state of its run: take `start` from the checkpoint, measure the present."""
        if self.probe is not None:
            start = self.probe.references["start"]
            kept = {name: tensor.to(start.expert_ids_BSLK.device) for name, tensor in state.items()}
            ids = kept.pop("expert_ids")
            self.probe.references["start"] = dataclasses.replace(start, expert_ids_BSLK=ids, extras=kept)
            (self.probe.references["previous"],) = self._routing([self.probe], "new", 0)

    def begin_step(self, step: int, rollouts: Rollouts) -> None:
        """Note the routing of the old policy, before the step's first update."""
        self.sets, self.changes = [], []
        if not self.settings.every or step % self.settings.every:
            return
        if self.settings.rollouts:
            count = min(self.settings.rollouts, len(rollouts))
            rows = torch.linspace(0, len(rollouts) - 1, count).long()
            self.sets.append(TokenSet("rollout", rollouts.tokens_BS[rows], rollouts.attention_BS[rows], rows.tolist()))
        if self.probe is not None:
            self.sets.append(self.probe)
        # The probe was measured after the last update, unless that step was skipped.
        stale = [tokens for tokens in self.sets if tokens is not self.probe or self.settings.every > 1]
        for tokens, old in zip(stale, self._routing(stale, "old", 0), strict=True):
            tokens.references["previous"] = old
        for tokens in self.sets:
            tokens.references["old"] = tokens.references["previous"]
            tokens.history[:] = [tokens.references["old"]]

    def after_update(self, step: int, update: int) -> list[dict[str, Any]]:
        """Rows of the table `drift`: each token set against each of its references."""
        rows = []
        for tokens, new in zip(self.sets, self._routing(self.sets, "new", update), strict=True):
            for reference, trace in tokens.references.items():
                drift = compare(trace, new)
                row = {"step": step, "update": update, "tokens": tokens.name, "reference": reference}
                rows.append(row | drift.row())
                if tokens is not self.probe and reference == "previous":
                    self.changes.append(drift.slot_change)
            tokens.references["previous"] = new
            tokens.history.append(new)
        return rows

    @property
    def slot_change(self) -> float | None:
        """Slot change of the rollouts in one update, mean over this step's updates so far; None if not measured."""
        return sum(self.changes) / len(self.changes) if self.changes else None

    def write_traces(self, folder: Path, step: int) -> None:
        """Write the rollouts' routing in this step to traces/step_<step>.parquet, if `trace_every` names the step."""
        if not self.settings.trace_every or step % self.settings.trace_every:
            return
        for tokens in self.sets:
            if tokens is not self.probe:
                old = tokens.history[0]
                path, kind = folder / "traces" / f"step_{step:05d}.parquet", type(self.model).__name__
                with TraceWriter(path, old.layer_names, old.num_experts, old.top_k, kind) as writer:
                    for trace in tokens.history:
                        writer.add(
                            trace, tokens.attention_BS, step=step, sequences=tokens.rows, tokens_BS=tokens.tokens_BS
                        )

    def _routing(self, sets: list[TokenSet], source: str, update: int) -> list[RoutingTrace]:
        """The present routing of each token set.

        One forward a set, always of the same shape: in low precision another batch shape alone changes some routing.
        """
        return [routing_of(self.model, x.tokens_BS, x.attention_BS, source, update) for x in sets]
