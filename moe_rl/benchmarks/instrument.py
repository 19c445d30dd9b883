"""What the instrument costs: recording and replaying against the plain model, in CPU time and memory."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from moe_rl.benchmarks.turns import one_thread, paired
from moe_rl.models.build import Tiny
from moe_rl.recording import record
from moe_rl.replaying import replay
from moe_rl.routing_trace import RoutingTrace

MODES = ("plain", "record", "replay", "output_router_logits")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instrument:
    """The model and the batches of `instrument`. Random weights: routing costs the same as in a trained model.

    A full forward has `sequences` x `tokens`; a decode step one new token for each of `decode_batch` sequences behind
    `prompt` tokens, averaged over `decode_steps` steps. Each mode is measured `repeats` times, in turn.
    """

    layers: int = 12
    experts: int = 32
    top_k: int = 4
    hidden_size: int = 128
    expert_size: int = 64
    sequences: int = 32
    tokens: int = 64
    decode_batch: int = 64
    prompt: int = 16
    decode_steps: int = 8
    repeats: int = 25

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"{field.name} is {getattr(self, field.name)}; set it to 1 or more")


def instrument(settings: Instrument) -> list[dict[str, Any]]:
    """Rows of CPU seconds a pass (`process_time` of one thread, least of the repeats) and their ratio to plain.

    On a machine with other load even the least of the repeats is noisy: `paired_ratio` is the median over the turns of
    each pass against the plain one of its turn, `paired_low` to `paired_high` its 95 % interval.
    A full forward includes entering and leaving the block and, for record, building the trace; a decode step does not:
    there the block spans the whole generation. Then rows of bytes of the full forward's trace: by the formula
    B S (L K w + 1), w bytes an id and one for validity, and as stored.
    """
    model, _ = Tiny(
        layers=settings.layers,
        experts=settings.experts,
        top_k=settings.top_k,
        hidden_size=settings.hidden_size,
        expert_size=settings.expert_size,
        max_positions=settings.prompt + settings.decode_steps + settings.tokens,
    ).build(seed=0)
    with one_thread(), torch.inference_mode():
        full, trace = full_forward(model, settings)
        decode = _decode(model, settings)
        rows = [
            *_compare("full forward", full, settings.repeats),
            *_compare("decode step", decode, settings.repeats, settings.decode_steps),
        ]
    rows += [_memory_row("trace", trace), _memory_row("trace with router logits", _with_logits(model, settings))]
    return rows


def _compare(what: str, passes: dict[str, Callable[[], float]], repeats: int, units: int = 1) -> list[dict[str, Any]]:
    """CPU seconds of each pass, which returns its own, taken in turn (each first once) so that noise hits all alike."""
    for measure in passes.values():  # the first run of each pays for allocations and caches
        measure()
    seconds: dict[str, list[float]] = {mode: [] for mode in passes}
    for turn in range(repeats):
        order = list(passes)[turn % len(passes) :] + list(passes)[: turn % len(passes)]
        for mode in order:
            seconds[mode].append(passes[mode]() / units)
    rows: list[dict[str, Any]] = []
    for mode, mine in seconds.items():
        row = {"what": what, "mode": mode, "cpu_s": min(mine), "ratio": min(mine) / min(seconds["plain"])}
        rows.append(row | paired(mine, seconds["plain"]))
    return rows


def _tokens(batch: int, width: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 40, (batch, width), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def full_forward(model: Any, settings: Instrument) -> tuple[dict[str, Callable[[], float]], RoutingTrace]:
    """mode -> a function that does one full forward and returns its CPU seconds; and the trace that is replayed."""
    inputs = _tokens(settings.sequences, settings.tokens)
    with record(model) as recorder:
        model(**inputs, use_cache=False)
    trace = recorder.trace

    def timed(run: Callable[[], Any]) -> Callable[[], float]:
        def measure() -> float:
            start = time.process_time()
            run()
            return time.process_time() - start

        return measure

    def recorded() -> RoutingTrace:
        with record(model) as recorder:
            model(**inputs, use_cache=False)
        return recorder.trace

    def replayed() -> None:
        with replay(model, trace):
            model(**inputs, use_cache=False)

    runs = (
        lambda: model(**inputs, use_cache=False),
        recorded,
        replayed,
        lambda: model(**inputs, use_cache=False, output_router_logits=True),
    )
    return {mode: timed(run) for mode, run in zip(MODES, runs, strict=True)}, trace


def _decode(model: Any, settings: Instrument) -> dict[str, Callable[[], float]]:
    width = settings.prompt + settings.decode_steps
    ids = _tokens(settings.decode_batch, width)["input_ids"]
    with record(model) as recorder:
        model(input_ids=ids, use_cache=False)
    trace = recorder.trace

    def timed(block: Callable[[], Any], **options: Any) -> Callable[[], float]:
        def measure() -> float:
            cache = DynamicCache(config=model.config)
            with block():
                # No masks: with one, transformers' router logits fail in a decode step.
                model(input_ids=ids[:, : settings.prompt], cache=cache)
                start = time.process_time()
                for column in range(settings.prompt, width):
                    model(input_ids=ids[:, column : column + 1], cache=cache, **options)
                return time.process_time() - start

        return measure

    return {
        "plain": timed(contextlib.nullcontext),
        "record": timed(lambda: record(model)),
        "replay": timed(lambda: replay(model, trace)),
        "output_router_logits": timed(contextlib.nullcontext, output_router_logits=True),
    }


def _with_logits(model: Any, settings: Instrument) -> RoutingTrace:
    with torch.inference_mode(), record(model, router_logits=True) as recorder:
        model(**_tokens(settings.sequences, settings.tokens), use_cache=False)
    return recorder.trace


def _memory_row(what: str, trace: RoutingTrace) -> dict[str, Any]:
    B, S, L, K = trace.expert_ids_BSLK.shape
    formula = B * S * (L * K * trace.expert_ids_BSLK.element_size() + 1)
    tensors = [trace.expert_ids_BSLK, trace.valid_BS]
    if "router_logits" in trace.extras:
        formula += B * S * L * trace.num_experts * trace.extras["router_logits"].element_size()
        tensors.append(trace.extras["router_logits"])
    stored = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    return {"what": what, "mode": f"{B} x {S} tokens", "bytes": stored, "formula_bytes": formula}
