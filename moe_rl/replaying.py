"""replay(): recorded routing forced on a model, with everything but the choice of experts computed live.

    with replay(model, trace):
        loss(model(input_ids, attention_mask=attention_mask)).backward()

Undone at the end of the block, after an exception too; touches nothing but the model that it is given.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from moe_rl.forwards import Call, ForwardWatch, in_backward
from moe_rl.routing_trace import RoutingError, RoutingTrace, refuse_shifted
from moe_rl.selection import Selection, around

Keep = Callable[[Tensor, Tensor, Tensor], Tensor]


class Replay(ForwardWatch):
    """What `replay` yields. `switch_to(trace)` sets the trace that the following forwards replay.

    kept: with a rule `keep`, (replayed experts that were used, replayed experts) of each router's run so far.
    """

    def __init__(self, model: nn.Module, keep: Keep | None):
        super().__init__(model)
        self.keep = keep
        self.kept: list[tuple[Tensor, Tensor]] = []
        self.trace: RoutingTrace | None = None
        self.plan: _Plan | None = None
        self.pending: list[weakref.ref[_Checkpointed]] = []
        self.closed = False

    def switch_to(self, trace: RoutingTrace) -> None:
        """Replay `trace` from the next forward on; recomputations of earlier forwards keep their own trace."""
        names = tuple(site.name for site in self.sites)
        # A trace lists layers as they ran, and those of a looped model several times.
        if {name.partition("@")[0] for name in trace.layer_names} != set(names):
            raise RoutingError(
                f"the trace has {trace.num_layers} layers ({', '.join(trace.layer_names[:2])}, ...), "
                f"the model {len(names)} ({', '.join(names[:2])}, ...); they must be the same"
            )
        if trace.top_k != self.sites[0].top_k or trace.num_experts != self.sites[0].num_experts:
            raise RoutingError(
                f"the trace chooses {trace.top_k} of {trace.num_experts} experts, "
                f"the model {self.sites[0].top_k} of {self.sites[0].num_experts}"
            )
        trace.check()
        self.trace = trace

    def begin(self, call: Call) -> None:
        if self.trace is None:
            raise RoutingError("a forward ran in the replay block before switch_to(trace)")
        self.plan = _Plan.of(self.trace, call)

    def end(self, call: Call) -> None:
        assert self.plan is not None
        missing = [name for name in self.plan.layer_names if name not in call.ids]
        self.plan = None
        if missing:
            raise RoutingError(
                f"the trace has routing for {', '.join(missing)}, which did not run in this forward; "
                "replay a trace of the same loops"
            )

    def _force(self, layer: int) -> None:
        site = self.sites[layer]

        def enter() -> Selection:
            plan = self.plan
            if plan is None:
                if in_backward():
                    raise RoutingError(
                        f"{site.name} is recomputed by an activation checkpointing that replay does not know; "
                        "use model.activation_checkpointing_enable()"
                    )
                raise self.outside(layer)
            return Selection(site, self._choice(layer, plan), plan.valid_N)

        def leave(selection: Selection | None, output: Any) -> None:
            if self.call is not None:
                self.ran(layer, output)

        self.undo.extend(around(site, enter, leave))

    def _choice(self, layer: int, plan: _Plan) -> Callable[[Tensor, Callable[[], Tensor]], Tensor]:
        entry = self.sites[layer].entry(plan.runs[layer])
        plan.runs[layer] += 1
        if entry not in plan.layer_names:
            raise RoutingError(f"{entry} ran, but the trace has no routing for it; replay a trace of the same loops")
        ids_NK = plan.ids_LNK[plan.layer_names.index(entry)]

        def choose(scores_NE: Tensor, live: Callable[[], Tensor]) -> Tensor:
            self.check_rows(layer, len(scores_NE), plan.batch, plan.width)
            replayed_NK, live_NK = ids_NK.to(scores_NE.device, torch.int64), live()
            if self.keep is not None:
                replayed_NK = self.keep(replayed_NK, live_NK, scores_NE.detach())
                used_NK = (replayed_NK[:, :, None] == ids_NK.to(scores_NE.device)[:, None, :]).any(-1)
                valid_N1 = plan.valid_N[:, None]
                self.kept.append(((used_NK & valid_N1).sum(), valid_N1.expand_as(used_NK).sum()))
            return torch.where(plan.valid_N[:, None], replayed_NK, live_NK)

        return choose

    def install(self) -> None:
        super().install()
        for layer in range(len(self.sites)):
            self._force(layer)
        for module in self.model.modules():
            original = vars(module).get("_gradient_checkpointing_func")
            if original is not None:
                module._gradient_checkpointing_func = self._remember_plan(original)  # type: ignore[assignment]
                self.undo.append(functools.partial(setattr, module, "_gradient_checkpointing_func", original))

    def _remember_plan(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        def checkpoint_with_plan(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self.plan is None:  # another model that carries this attribute, a deepcopy for instance
                return checkpoint(function, *args, **kwargs)
            bound = _Checkpointed(self, self.plan, function)
            self.pending.append(weakref.ref(bound))
            return checkpoint(bound, *args, **kwargs)

        return checkpoint_with_plan

    def close(self) -> None:
        """Called at the regular end of the block."""
        if self.served == 0:
            raise RoutingError("replay was asked for, but no forward of the model ran in the block")
        if self._backward_to_come():
            gc.collect()
            if self._backward_to_come():
                raise RoutingError(
                    "the replay block ends while a backward with activation checkpointing is still to come; "
                    "call backward inside the block"
                )

    def _backward_to_come(self) -> bool:
        alive = (reference() for reference in self.pending)
        return any(bound is not None and bound.runs < 2 for bound in alive)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The forced ids of one forward: ids_LNK, and valid_N where they are known.

    runs: how often each router has run so far, which says whose turn is next in a looped model.
    """

    ids_LNK: Tensor
    valid_N: Tensor
    layer_names: tuple[str, ...]
    batch: int
    width: int
    runs: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)

    @classmethod
    def of(cls, trace: RoutingTrace, call: Call) -> _Plan:
        B, S = trace.valid_BS.shape
        if call.batch != B or call.past + call.width > S:
            raise RoutingError(
                f"a forward of {call.batch} sequences up to column {call.past + call.width} does not fit "
                f"a trace of {B} sequences x {S} columns; "
                "select its rows with trace[rows] and widen it with trace.aligned_to(mask)"
            )
        columns = slice(call.past, call.past + call.width)
        if call.past == 0:
            known_BS = trace.valid_BS
            real_BS = known_BS.new_ones(B, call.width) if call.valid_BS is None else call.valid_BS.to(known_BS.device)
            refuse_shifted(known_BS, real_BS)
        ids_LNK = trace.expert_ids_BSLK[:, columns].permute(2, 0, 1, 3).reshape(trace.num_layers, -1, trace.top_k)
        valid_N = trace.valid_BS[:, columns].reshape(-1)
        return cls(ids_LNK, valid_N, trace.layer_names, call.batch, call.width)


class _Checkpointed:
    """The function that activation checkpointing runs twice; the second time, in backward, under its own plan."""

    def __init__(self, replay: Replay, plan: _Plan, function: Callable[..., Any]):
        self.replay, self.plan, self.function, self.runs = replay, plan, function, 0
        self.runs_before = plan.runs.copy()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.runs += 1
        if self.runs == 1:
            return self.function(*args, **kwargs)
        if self.replay.closed:
            raise RoutingError(
                "backward reached a checkpointed layer after the replay block had ended; call backward inside the block"
            )
        call, plan = self.replay.call, self.replay.plan
        self.replay.call = None
        self.replay.plan = dataclasses.replace(self.plan, runs=self.runs_before.copy())
        try:
            return self.function(*args, **kwargs)
        finally:
            self.replay.call, self.replay.plan = call, plan


@contextlib.contextmanager
def replay(model: nn.Module, trace: RoutingTrace | None = None, keep: Keep | None = None) -> Iterator[Replay]:
    """Force the experts of `trace` in every forward of `model` while the block runs.

    Only the choice is forced: gates are computed from the live router logits over the forced experts by the model's own
    code, and the router keeps its gradient. Tokens that the trace does not know route live. Replaying a model's own
    routing at the same weights leaves its outputs bit-identical.

    With several micro-batches before one backward, call `switch_to(trace)` on the yielded object before each forward.
    Backward belongs inside the block when activation checkpointing is on; leaving earlier raises.

    keep: what becomes of the replayed ids [N, K] at a router, keep(replayed_NK, live_NK, scores_NE), such as a rule of
    moe_rl.keeping with its threshold; None forces them all.

    Raises RoutingError when the trace does not fit the model or the batch, names an expert twice in a row, or was never
    used, and for what `record` refuses.
    """
    watches = (getattr(hook, "watch", None) for hook in model._forward_pre_hooks.values())
    if any(isinstance(watch, Replay) and watch.model is model for watch in watches):
        raise RoutingError("this model is already being replayed; use switch_to(trace) on the running block")
    replaying = Replay(model, keep)
    if trace is not None:
        replaying.switch_to(trace)
    try:
        replaying.install()
        yield replaying
        replaying.close()
    finally:
        replaying.closed = True
        replaying.remove()
