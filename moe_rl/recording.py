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
from moe_rl.routing_trace import RoutingError, RoutingTrace, id_dtype
from moe_rl.selection import Selection, around


@dataclasses.dataclass
class _Pass:
    """Forwards that belong to the same sequences: a prefill and the steps that continue its cache."""

    cache: weakref.ref[Any] | None
    covered: int
    calls: list[tuple[Call, Tensor, dict[str, Tensor]]]


class Recorder(ForwardWatch):
    """What `record` yields. Read `trace` (or `traces`, one a pass) inside or after the block."""

    def __init__(self, model: nn.Module, asked: frozenset[str], source: str, update: int):
        super().__init__(model)
        self.asked, self.source, self.update = asked, source, update
        self.num_experts = self.sites[0].num_experts
        self.layer_names: tuple[str, ...] = ()
        self.passes: list[_Pass] = []
        for site in self.sites:
            for name in asked & {"router_logits", "gates"}:
                if not site.ids_in_output:
                    raise RoutingError(f"{type(site.module).__name__} returns no {name}; record without them")

    def install(self) -> None:
        super().install()
        for layer in range(len(self.sites)):
            self._watch(layer)

    def _watch(self, layer: int) -> None:
        site = self.sites[layer]

        selected: list[tuple[Tensor, Tensor]] = []  # (live ids, margins) of the router that runs

        def keep(ids: Tensor, output: Any) -> None:
            if self.call is not None:
                self.check_rows(layer, ids.numel() // site.top_k, self.call.batch, self.call.width)
                extras = {"router_logits": output[0], "gates": output[1]} if site.ids_in_output else {}
                if selected:
                    extras["margins"] = selected[-1][1]
                self.ran(layer, ids.detach(), {name: extras[name].detach() for name in self.asked})
            elif not in_backward():  # a recomputation in backward is not a new decision
                raise self.outside(layer)

        def enter() -> Selection:
            selected.clear()

            def choose(scores: Tensor, live: Callable[[], Tensor]) -> Tensor:
                ids = live()
                selected.append((ids, margins(scores, site.top_k) if "margins" in self.asked else ids))
                return ids

            return Selection(site, choose)

        def leave(selection: Selection | None, output: Any) -> None:
            if not site.ids_in_output:
                keep(selected[-1][0], output)

        def after(module: nn.Module, args: Any, output: Any) -> None:  # after variants have set their gates
            if module is site.module:
                keep(output[2], output)

        if not site.ids_in_output or "margins" in self.asked:
            self.undo.extend(around(site, enter, leave))
        if site.ids_in_output:
            self.undo.append(site.module.register_forward_hook(after).remove)

    def begin(self, call: Call) -> None:
        last = self.passes[-1] if self.passes else None
        same_cache = (
            last is not None and last.cache is not None and call.cache is not None and last.cache() is call.cache
        )
        if last is not None and same_cache and call.past > 0:
            if call.batch != last.calls[-1][0].batch:
                raise RoutingError(
                    f"the batch changed from {last.calls[-1][0].batch} to {call.batch} rows within one cache, so it is "
                    "not known which recorded row each goes on from; record each batch in its own block. An engine "
                    "reads a prompt once for all its completions: let it record, by sample(..., record_routing=True)"
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
        widths = {"router_logits": self.num_experts, "gates": self.sites[0].top_k, "margins": 1}
        extras = {name: self._stack(values, widths[name]) for name, values in call.extras.items()}
        call.ids, call.extras = {}, {}
        last.calls.append((call, ids_LNK, extras))
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
        B, L = one.calls[0][0].batch, len(self.layer_names)
        valid = torch.zeros(B, one.covered, dtype=torch.bool, device=one.calls[0][1].device)
        whole: dict[str, Tensor] = {}
        for call, ids_LNK, extras in one.calls:
            columns = slice(call.past, min(call.past + call.width, one.covered))
            keep = columns.stop - columns.start
            if keep <= 0:
                continue
            valid[:, columns] = True if call.valid_BS is None else call.valid_BS[:, :keep].to(valid.device)
            for name, values_LNX in {"ids": ids_LNK, **extras}.items():
                if name not in whole:
                    whole[name] = values_LNX.new_zeros(B, one.covered, L, values_LNX.shape[2])
                whole[name][:, columns] = values_LNX.view(L, B, call.width, -1).permute(1, 2, 0, 3)[:, :keep]
        ids = whole.pop("ids")
        return RoutingTrace(ids, valid, self.layer_names, self.num_experts, self.source, self.update, whole)


def margins(scores_NE: Tensor, top_k: int) -> Tensor:
    """s_(K) - s_(K+1) [N, 1]: how far the last chosen expert leads the first that was not; inf when all are chosen."""
    best = scores_NE.detach().topk(min(top_k + 1, scores_NE.shape[-1]), dim=-1).values
    if best.shape[-1] == top_k:
        return torch.full_like(best[:, :1], float("inf"))
    return best[:, top_k - 1 : top_k] - best[:, top_k:]


@contextlib.contextmanager
def record(
    model: nn.Module,
    *,
    router_logits: bool = False,
    gates: bool = False,
    margins: bool = False,
    source: str = "",
    update: int = 0,
) -> Iterator[Recorder]:
    """Record the expert ids that every router of `model` uses while the block runs.

    Works through forward, `generate` (sampling, left padding, chunked prefill) and activation checkpointing, and inside
    `replay`, where it sees the ids that were executed. Columns that a pre-filled cache already held are invalid. A
    looped model has a layer entry for each run of a router in a forward, the second one named `<router>@2`.
    Costs K bytes a token and layer (twice that from 257 experts up). On request, in bytes more (fp32): `router_logits`
    as the router returns them (4 E), `gates` (4 K), `margins` s_(K) - s_(K+1) of the scores it ranks (4).

    Raises RoutingError for dense models, families in `families.REFUSED`, beam search, and routers that did not fire.
    """
    asked = {"router_logits": router_logits, "gates": gates, "margins": margins}
    recorder = Recorder(model, frozenset(name for name in asked if asked[name]), source, update)
    try:
        recorder.install()
        yield recorder
    finally:
        recorder.remove()
