"""Follows the forwards of one model: where each stands in its sequences, and whether every router ran."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from moe_rl.models.families import require_routers
from moe_rl.routing_trace import RoutingError


@dataclasses.dataclass
class Call:
    """One forward of the model: `past` columns lie in the cache, T new ones are computed."""

    batch: int
    past: int
    width: int
    valid_BS: Tensor | None
    cache: Any
    ids: dict[str, Tensor] = dataclasses.field(default_factory=dict)  # of each run of a router, in order
    extras: dict[str, dict[str, Tensor]] = dataclasses.field(default_factory=dict)  # what else was asked for, likewise


def read_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    tokens = next((x for x in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args[:1]) if x is not None), None)
    if tokens is None:
        raise RoutingError("a forward without input_ids or inputs_embeds cannot be placed in a trace")
    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    past = int(cache.get_seq_length()) if cache is not None else 0
    batch, width = tokens.shape[:2]
    mask = kwargs.get("attention_mask")
    if mask is None:
        return Call(batch, past, width, None, cache)
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        raise RoutingError(
            "routing needs a two-dimensional attention mask [B, T]: only that says which tokens are real"
        )
    return Call(batch, past, width, mask[:, past : past + width].bool(), cache)


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class ForwardWatch:
    """Follows the forwards of one model: which call runs, and which routers ran in it how often."""

    def __init__(self, model: nn.Module):
        self.model, self.sites = model, require_routers(model)
        self.call: Call | None = None
        self.undo: list[Callable[[], Any]] = []
        self.served = 0
        self.thread = threading.get_ident()

    def begin(self, call: Call) -> None: ...

    def end(self, call: Call) -> None: ...

    def install(self) -> None:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if module is self.model:
                if threading.get_ident() != self.thread:
                    raise RoutingError(
                        "a forward ran in another thread than the record or replay block was opened in, where it could "
                        "mix with that thread's forwards; open the block where the forwards run, one thread a model"
                    )
                self.call = None
                call = read_call(args, kwargs)
                self.begin(call)
                self.call = call

        before.watch = self  # type: ignore[attr-defined]

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if module is not self.model or self.call is None or threading.get_ident() != self.thread:
                return
            call, self.call = self.call, None
            if output is not None:  # None: the forward raised
                missing = [site.name for site in self.sites if site.name not in call.ids]
                if missing:
                    raise RoutingError(
                        f"{len(missing)} of {len(self.sites)} routers fired 0 times in a forward ({missing[0]}, ...): "
                        "a fused kernel or a skipped layer bypasses them (use_kernels?), so their routing is unknown"
                    )
                self.served += 1
                if call.cache is None:  # a model that was given no cache may have made one
                    call.cache = output.get("cache") if isinstance(output, dict) else None
                self.end(call)

        self.undo.append(self.model.register_forward_pre_hook(before, with_kwargs=True, prepend=True).remove)
        self.undo.append(self.model.register_forward_hook(after, always_call=True).remove)

    def ran(self, layer: int, ids: Tensor, extras: dict[str, Tensor] | None = None) -> None:
        """Note that a router ran in the present call; in a looped model each of its runs has an entry of its own."""
        assert self.call is not None
        site, turn = self.sites[layer], 0
        while site.entry(turn) in self.call.ids:
            turn += 1
        self.call.ids[site.entry(turn)] = ids
        for name, values in (extras or {}).items():
            self.call.extras.setdefault(name, {})[site.entry(turn)] = values

    def check_rows(self, layer: int, rows: int, batch: int, width: int) -> None:
        """Raise unless the router saw every token: of some, nobody could say which."""
        if rows != batch * width:
            raise RoutingError(
                f"{self.sites[layer].name} of {type(self.model).__name__} routed {rows} tokens in a forward of "
                f"{batch} x {width}, so they have no positions; pass text only (no images, no separate decoder input)"
            )

    def outside(self, layer: int) -> RoutingError:
        return RoutingError(
            f"{self.sites[layer].name} ran outside a forward of the given {type(self.model).__name__}; "
            "pass the model that you call (not its parent, its child or a compiled forward)"
        )

    def remove(self) -> None:
        while self.undo:
            self.undo.pop()()
