"""Drift in the loop: what is measured after each update, on which tokens, against which earlier policies."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_rl.drift.flips import flip_terms
from moe_rl.drift.sets import compare
from moe_rl.drift.soft import router_state, soft_drift
from moe_rl.models.families import find_routers
from moe_rl.policy import response_logprobs, routing_of
from moe_rl.recording import record
from moe_rl.records import Rollouts
from moe_rl.routing_trace import RoutingTrace
from moe_rl.store import write_errors
from moe_rl.traces import TraceWriter

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class DriftSettings:
    """What is measured after each update.

    rollouts, probe: sequences of this step's rollouts, and of fixed text, that are forwarded again. every: measure
    after every n-th step's updates; 0 never. Of the steps that are measured, every n-th, 0 never: trace_every writes
    the rollouts' routing to traces/; soft_every adds soft drift, margins and load (moe_rl/drift/soft.py); flips_every
    adds the flip decomposition of the rollouts (moe_rl/drift/flips.py), at one replayed forward an update.
    """

    rollouts: int = 12
    probe: int = 12
    every: int = 1
    trace_every: int = 0
    soft_every: int = 0
    flips_every: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 0:
                raise ValueError(f"drift.{field.name} is {getattr(self, field.name)}; set it to 0 or more")
        if self.flips_every and not self.rollouts:
            raise ValueError(
                f"drift.flips_every is {self.flips_every}, drift.rollouts 0: there are no tokens to split the ratio of;"
                " set drift.rollouts to 1 or more"
            )


@dataclasses.dataclass(frozen=True)
class View:
    """What one policy says about a token set, replay off: its routing and, if asked for, response log probabilities."""

    routing: RoutingTrace
    logprobs_BT: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class TokenSet:
    """The same tokens, looked at again and again.

    rows: which of the step's rollouts, or of the probe, they are. responses: the rollouts themselves, if their log
    probabilities are wanted. references: the views of earlier policies. history: the routing before the step's first
    update and after each.
    """

    name: str
    tokens_BS: Tensor
    attention_BS: Tensor
    rows: list[int]
    responses: Rollouts | None = None
    references: dict[str, View] = dataclasses.field(default_factory=dict)
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
        self.soft = bool(settings.soft_every)  # whether this step's soft drift is measured; the start always counts
        self.probe: TokenSet | None = None
        if settings.probe and settings.every:
            tokens, attention = probe[0][: settings.probe], probe[1][: settings.probe]
            self.probe = TokenSet("probe", tokens, attention, list(range(len(tokens))))
            start = self._view(self.probe, "start", 0)
            self.probe.references.update(start=start, previous=start)

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint has to keep: the probe's routing at the start of the run."""
        if self.probe is None:
            return {}
        start = self.probe.references["start"].routing
        return {"expert_ids": start.expert_ids_BSLK, **start.extras}

    def resume(self, state: dict[str, Tensor]) -> None:
        """The model was moved to a later state of its run: take `start` from the checkpoint, measure the present."""
        if self.probe is not None:
            start = self.probe.references["start"].routing
            kept = {name: tensor.to(start.expert_ids_BSLK.device) for name, tensor in state.items()}
            ids = kept.pop("expert_ids")
            self.probe.references["start"] = View(dataclasses.replace(start, expert_ids_BSLK=ids, extras=kept))
            self.probe.references["previous"] = self._view(self.probe, "new", 0)

    def begin_step(self, step: int, rollouts: Rollouts) -> None:
        """Note the routing of the old policy, before the step's first update."""
        self.sets, self.changes = [], []
        if not _due(self.settings.every, step):
            return
        self.soft = _due(self.settings.soft_every, step)
        if self.settings.rollouts:
            self.sets.append(self._rollout_set(rollouts, _due(self.settings.flips_every, step)))
        if self.probe is not None:
            self.sets.append(self.probe)
        for tokens in self.sets:
            # The probe was measured after the last update, unless that step was skipped or looked at less.
            if tokens is not self.probe or self.settings.every > 1 or self.soft:
                tokens.references["previous"] = self._view(tokens, "old", 0)
            tokens.references["old"] = tokens.references["previous"]
            tokens.history[:] = [tokens.references["old"].routing]

    def _rollout_set(self, rollouts: Rollouts, flips: bool) -> TokenSet:
        rows = torch.linspace(0, len(rollouts) - 1, min(self.settings.rollouts, len(rollouts))).long()
        some = rollouts[rows]
        return TokenSet("rollout", some.tokens_BS, some.attention_BS, rows.tolist(), some if flips else None)

    def after_update(self, step: int, update: int) -> list[dict[str, Any]]:
        """Rows of the table `drift`: each token set against each of its references."""
        rows = []
        for tokens in self.sets:
            new = self._view(tokens, "new", update)
            for reference, old in tokens.references.items():
                drift = compare(old.routing, new.routing)
                row = {"step": step, "update": update, "tokens": tokens.name, "reference": reference, **drift.row()}
                if self.soft:
                    row |= soft_drift(old.routing, new.routing) | router_state(new.routing)
                if reference == "old":
                    row |= self._flips(tokens, old, new)
                rows.append(row)
                if tokens is not self.probe and reference == "previous":
                    self.changes.append(drift.slot_change)
            tokens.references["previous"] = new
            tokens.history.append(new.routing)
        return rows

    def _flips(self, tokens: TokenSet, old: View, new: View) -> dict[str, Any]:
        if tokens.responses is None or old.logprobs_BT is None or new.logprobs_BT is None:
            return {}
        one, other = (old.routing, old.logprobs_BT), (new.routing, new.logprobs_BT)
        return flip_terms(self.model, tokens.responses, one, other)

    @property
    def slot_change(self) -> float | None:
        """Slot change of the rollouts in one update, mean over this step's updates so far; None if not measured."""
        return sum(self.changes) / len(self.changes) if self.changes else None

    def write_traces(self, folder: Path, step: int) -> None:
        """Write the rollouts' routing in this step to traces/step_<step>.parquet, if `trace_every` names the step."""
        if not _due(self.settings.trace_every, step):
            return
        for tokens in self.sets:
            if tokens is not self.probe:
                old = tokens.history[0]
                path, kind = folder / "traces" / f"step_{step:05d}.parquet", type(self.model).__name__
                with write_errors(path), TraceWriter(path, old.layer_names, old.num_experts, old.top_k, kind) as writer:
                    for trace in tokens.history:
                        writer.add(
                            trace, tokens.attention_BS, step=step, sequences=tokens.rows, tokens_BS=tokens.tokens_BS
                        )

    @torch.no_grad()
    def _view(self, tokens: TokenSet, source: str, update: int) -> View:
        """The present policy's view of a token set.

        One forward a set, always of the same shape: in low precision another batch shape alone changes some routing.
        """
        asked = {"margins": self.soft, "router_logits": self.soft and self._returns_logits()}
        if tokens.responses is None:
            return View(routing_of(self.model, tokens.tokens_BS, tokens.attention_BS, source, update, **asked))
        with record(self.model, source=source, update=update, **asked) as recorder:
            logprobs_BT, _ = response_logprobs(self.model, tokens.responses)
        return View(recorder.trace, logprobs_BT)

    def _returns_logits(self) -> bool:
        return all(site.ids_in_output for site in find_routers(self.model))


def _due(every: int, step: int) -> bool:
    """Whether `step` is an n-th step; 0 never."""
    return bool(every) and step % every == 0
