"""The noise floor: how much routing differs when nothing but the way of computing changes. Weights and tokens stay."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from moe_rl.drift.sets import compare
from moe_rl.policy import positions, routing_of
from moe_rl.recording import record
from moe_rl.routing_trace import RoutingTrace

MORE_PADDING = 8  # columns


@torch.no_grad()
def noise_floor(
    model: PreTrainedModel, tokens_BS: Tensor, attention_BS: Tensor, decoded: int = 32
) -> list[dict[str, Any]]:
    """Rows like the table `drift`, with a column `check`: one plain forward against the same tokens computed otherwise.

    batch_size: one sequence at a time (a single one: twice in one batch). left_padding: 8 columns more. decode: the
    last `decoded` columns one by one with a cache; only these are compared. experts_implementation: eager instead of
    grouped_mm, or the reverse; without a row where the class offers no choice. All on real tokens, which are first
    moved to the right of their rows. In float32 next to nothing differs; in bfloat16 near ties flip.

    Leaves the model as it was. The caller sees to it that no replay is in force.
    """
    tokens_BS, attention_BS = _moved_right(tokens_BS, attention_BS.bool())
    with _evaluating(model):
        plain = routing_of(model, tokens_BS, attention_BS)
        rows = {
            "batch_size": compare(plain, _other_batch_size(model, tokens_BS, attention_BS)).row(),
            "left_padding": compare(plain, _more_padding(model, tokens_BS, attention_BS)).row(),
            "decode": compare(plain, _decoded(model, tokens_BS, attention_BS, decoded)).row(),
        }
        if model._can_set_experts_implementation():
            with _other_experts_implementation(model):
                rows["experts_implementation"] = compare(plain, routing_of(model, tokens_BS, attention_BS)).row()
    return [{"check": check, **row} for check, row in rows.items()]


def _moved_right(tokens_BS: Tensor, attention_BS: Tensor) -> tuple[Tensor, Tensor]:
    """The same sequences, padded on the left only and no wider than the longest."""
    order_BS = attention_BS.int().sort(dim=1, stable=True).indices
    width = max(1, int(attention_BS.sum(1).max()))
    return tokens_BS.gather(1, order_BS)[:, -width:], attention_BS.gather(1, order_BS)[:, -width:]


def _other_batch_size(model: PreTrainedModel, tokens_BS: Tensor, attention_BS: Tensor) -> RoutingTrace:
    if len(tokens_BS) == 1:
        return routing_of(model, tokens_BS.repeat(2, 1), attention_BS.repeat(2, 1))[:1]
    return RoutingTrace.cat(
        [routing_of(model, tokens_BS[row : row + 1], attention_BS[row : row + 1]) for row in range(len(tokens_BS))]
    )


def _more_padding(model: PreTrainedModel, tokens_BS: Tensor, attention_BS: Tensor) -> RoutingTrace:
    more = (MORE_PADDING, 0)
    pad = torch.nn.functional.pad
    trace = routing_of(model, pad(tokens_BS, more), pad(attention_BS, more))
    return RoutingTrace(
        trace.expert_ids_BSLK[:, MORE_PADDING:],
        trace.valid_BS[:, MORE_PADDING:],
        trace.layer_names,
        trace.num_experts,
    )


def _decoded(model: PreTrainedModel, tokens_BS: Tensor, attention_BS: Tensor, decoded: int) -> RoutingTrace:
    """Valid on the columns that were computed one at a time."""
    width = tokens_BS.shape[1]
    prefill = max(0, width - decoded)
    cache, position_ids = DynamicCache(config=model.config), positions(attention_BS)
    edges = [0, *range(max(1, prefill), width + 1)]
    with record(model) as recorder:
        for first, last in itertools.pairwise(edges):
            model(
                input_ids=tokens_BS[:, first:last],
                attention_mask=attention_BS[:, :last].long(),
                position_ids=position_ids[:, first:last],
                cache=cache,
                use_cache=True,
                logits_to_keep=1,
            )
    one_by_one_BS = attention_BS.clone()
    one_by_one_BS[:, :prefill] = False
    trace = recorder.trace
    return dataclasses.replace(trace, valid_BS=trace.valid_BS & one_by_one_BS)


@contextlib.contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Eval mode: router jitter and dropout would be measured as noise."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def _other_experts_implementation(model: PreTrainedModel) -> Iterator[None]:
    own = model.get_experts_implementation()
    try:
        model.set_experts_implementation("grouped_mm" if own[""] == "eager" else "eager")
        yield
    finally:
        model.set_experts_implementation(own)
