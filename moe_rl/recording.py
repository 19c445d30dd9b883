"""record(): the routing of any supported transformers model, as it happens.

    with record(model) as recorder:
        model(input_ids, attention_mask=attention_mask)      # or model.generate(...)
    trace = recorder.trace

Positions are columns of the batch: a decode step that continues a cache of n columns writes column n.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from moe_rl.forwards import Call, ForwardWatch, in_backward
from moe_rl.records import RoutingError, RoutingTrace, id_dtype
from moe_rl.selection import Selection, around


@dataclasses.dataclass
class _Pass:
    """Forwards that belong to the same sequences: a prefill and the steps that continue its cache."""

    cache: weakref.ref[Any] | None
    covered: int
    calls: list[tuple[Call, Tensor, Tensor | None]]


class Recorder(ForwardWatch):
    """What `record` yields. Read `trace` (or `traces`, one a pass) inside or after the block."""

    def __init__(self, model: nn.Module, router_logits: bool, source: str, update: int):
        super().__init__(model)
        self.router_logits, self.source, self.update = router_logits, source, update
        self.num_experts = self.sites[0].num_experts
        self.layer_names: tuple[str, ...] = ()
        self.passes: list[_Pass] = []
        for site in self.sites:
            if router_logits and not site.ids_in_output:
                raise RoutingError(f"{type(site.module).__name__} returns no router logits; record without them")

    def install(self) -> None:
        super().install()
        for layer in range(len(self.sites)):
            self._watch(layer)

    def _watch(self, layer: int) -> None:
        site = self.sites[layer]

        def keep(ids: Tensor, logits: Tensor | None) -> None:
            if self.call is not None:
                self.check_rows(layer, ids.numel() // site.top_k, self.call.batch, self.call.width)
                self.ran(layer, ids.detach(), logits.detach() if logits is not None else None)
            elif not in_backward():  # a recomputation in backward is not a new decision
                raise self.outside(layer)

        if site.ids_in_output:

            def after(module: nn.Module, args: Any, output: Any) -> None:
                if module is site.module:
                    keep(output[2], output[0] if self.router_logits else None)

            self.undo.append(site.module.register_forward_hook(after).remove)
            return

        chosen: list[Tensor] = []

        def enter() -> Selection:
            chosen.clear()

            def choose(scores: Tensor, live: Callable[[], Tensor]) -> Tensor:
                chosen.append(live())
                return chosen[0]

            return Selection(site, choose)

        self.undo.extend(around(site, enter, lambda selection, output: keep(chosen[0], None)))

    def begin(self, call: Call) -> None:
        last = self.passes[-1] if self.passes else None
        same_cache = (
            last is not None and last.cache is not None and call.cache is not None and last.cache() is call.cache
        )
        if last is not None and same_cache and call.past > 0:
            if call.batch != last.calls[-1][0].batch:
                raise RoutingError(
                    f"the batch changed from {last.calls[-1][0].batch} to {call.batch} rows within one cache; "
                    "record each batch in its own block"
                )
            if call.past > last.covered:
                raise RoutingError(
                    f"the cache holds {call.past} columns, {last.covered} were recorded; "
                    "record all forwards of a sequence in one block"
                )
            return
        self.passes.append(_Pass(None, 0, []))
        self._follow(call.cache)

    def _follow(self, cache: Any) -> None:
        """Let later forwards with this cache continue the present pass."""
        if cache is not None and self.passes[-1].cache is None:
            self.passes[-1].cache = weakref.ref(cache)
            self._refuse_beams(cache)

    def _refuse_beams(self, cache: Any) -> None:
        def refuse(*args: Any, **kwargs: Any) -> None:
            raise RoutingError(
                "beam search reorders the rows of the cache, so recorded routing would belong to other sequences; "
                "sample with num_beams=1"
            )

        cache.reorder_cache = refuse
        self.undo.append(lambda: cache.__dict__.pop("reorder_cache", None))

    def end(self, call: Call) -> None:
        last = self.passes[-1]
        self._follow(call.cache)
        names = tuple(call.ids)
        self.layer_names = self.layer_names or names
        if names != self.layer_names:
            raise RoutingError(
                f"the routers of {type(self.model).__name__} ran in another order or number than in the first forward: "
                f"{', '.join(names)}; record forwards of one kind"
            )
        ids_LNK = self._stack(call.ids, self.sites[0].top_k).to(id_dtype(self.num_experts))
        logits_LNE = self._stack(call.logits, self.num_experts) if self.router_logits else None
        call.ids, call.logits = {}, {}
        last.calls.append((call, ids_LNK, logits_LNE))
        last.covered = call.past + call.width  # less than before if the cache was cropped: the columns behind are void

    def _stack(self, of_run: dict[str, Tensor], width: int) -> Tensor:
        return torch.stack([tensor.reshape(-1, width) for tensor in of_run.values()])

    @property
    def traces(self) -> list[RoutingTrace]:
        """One trace a pass, in the order in which they began."""
        passes = [p for p in self.passes if p.calls]
        if not passes:
            raise RoutingError("nothing was recorded: no forward of the model ran in the block")
        return [self._assemble(p) for p in passes]

    @property
    def trace(self) -> RoutingTrace:
        """The recorded routing; several passes of equal width (micro-batches) are joined along the batch."""
        traces = self.traces
        widths = [trace.valid_BS.shape[1] for trace in traces]
        if len(set(widths)) > 1:
            raise RoutingError(f"{len(traces)} passes of different widths {widths} were recorded; read recorder.traces")
        return RoutingTrace.cat(traces)

    def _assemble(self, one: _Pass) -> RoutingTrace:
        ids_LNK = one.calls[0][1]
        B, L, K = one.calls[0][0].batch, len(self.layer_names), ids_LNK.shape[2]
        ids = ids_LNK.new_zeros(B, one.covered, L, K)
        valid = torch.zeros(B, one.covered, dtype=torch.bool, device=ids.device)
        logits = None
        for call, ids_LNK, logits_LNE in one.calls:
            columns = slice(call.past, min(call.past + call.width, one.covered))
            keep = columns.stop - columns.start
            if keep <= 0:
                continue
            ids[:, columns] = ids_LNK.view(L, B, call.width, K).permute(1, 2, 0, 3)[:, :keep]
            valid[:, columns] = True if call.valid_BS is None else call.valid_BS[:, :keep].to(valid.device)
            if logits_LNE is not None:
                logits = logits_LNE.new_zeros(B, one.covered, L, self.num_experts) if logits is None else logits
                logits[:, columns] = logits_LNE.view(L, B, call.width, -1).permute(1, 2, 0, 3)[:, :keep]
        return RoutingTrace(ids, valid, self.layer_names, self.num_experts, self.source, self.update, logits)


@contextlib.contextmanager
def record(model: nn.Module, *, router_logits: bool = False, source: str = "", update: int = 0) -> Iterator[Recorder]:
    """Record the expert ids that every router of `model` uses while the block runs.

    Works through forward, `generate` (sampling, left padding, chunked prefill) and activation checkpointing, and inside
    `replay`, where it sees the ids that were executed. Columns that a pre-filled cache already held are invalid. A
    looped model has a layer entry for each run of a router in a forward, the second one named `<router>@2`.
    Costs K bytes a token and layer (two from 257 experts up), and 4 E more with `router_logits`.

    Raises RoutingError for dense models, families in `families.REFUSED`, beam search, and routers that did not fire.
    """
    recorder = Recorder(model, router_logits, source, update)
    try:
        recorder.install()
        yield recorder
    finally:
        recorder.remove()
