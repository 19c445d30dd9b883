"""What a cycle and the instrument cost against the size of things; used by `experiments/bench.py scaling`."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch

from moe_rl.benchmarks.instrument import Instrument, full_forward
from moe_rl.benchmarks.loop import Cycles, bare_experiment
from moe_rl.benchmarks.turns import one_thread, paired
from moe_rl.experiment import Experiment
from moe_rl.stats import log_log_slope

COMPLETIONS = 4  # a prompt
BASE = "base"
FACTORS = ("sequences", "tokens", "layers", "experts", "updates")
PARTS = {"rollout": "rollout_s", "old pass": "old_pass_s", "updates": "update_s", "drift": "drift_s"}
FORWARDS = {"plain": "plain forward", "record": "recorded forward", "replay": "replayed forward"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaling:
    """The base of `scaling`, from which one setting at a time is doubled `doublings` times.

    sequences: of a step, 4 to a prompt. tokens: of every response. updates: M.
    A forward of the instrument has sequences x tokens. repeats: cycles of each setting, in turn, that are timed.
    """

    sequences: int = 64
    tokens: int = 16
    layers: int = 2
    experts: int = 8
    updates: int = 2
    top_k: int = 2
    hidden_size: int = 64
    expert_size: int = 64
    doublings: int = 3
    repeats: int = 7

    def __post_init__(self) -> None:
        least = {"updates": 2, "doublings": 2, "sequences": COMPLETIONS}
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < least.get(field.name, 1):
                needed = least.get(field.name, 1)
                raise ValueError(f"{field.name} is {getattr(self, field.name)}; set it to {needed} or more")
        if self.sequences % (self.updates * 2**self.doublings) or self.sequences % COMPLETIONS:
            raise ValueError(
                f"{self.sequences} sequences do not divide into {COMPLETIONS} completions a prompt and up to "
                f"{self.updates * 2**self.doublings} updates; change sequences, updates or doublings"
            )


def scaling(settings: Scaling) -> list[dict[str, Any]]:
    """CPU seconds of the parts of a cycle, and of the instrument's forwards, against size; and fitted exponents.

    Rows of a part at a value of a factor: cpu_s, the median over the repeats (`process_time` of one thread), least_s,
    and for the instrument's forwards paired_ratio to the plain one. Rows `slope of`: the exponent b of cpu_s = a x^b
    over the values, with its 95 % interval over these few points, and last_doubling, the same between the last two.
    A cycle is one of arm grpo at the defaults of conf/, without evaluation and checkpoints; cycle is the sum of its
    parts.

    Where cost is not proportional to size. Small forwards are bound by a fixed cost an operation, so a rollout, which
    decodes one token a sequence at a time, hardly grows with sequences until there are hundreds; updates come close to
    1 there. The old pass is next to nothing, for an exact sampler speaks for the old policy. In tokens a rollout is a
    little above 1, for each new token attends to more; what forwards whole sequences stays below 1, for their prompts
    do not grow. Drift is measured on drift.rollouts sequences, however many a step has, and on a probe that does not
    grow with responses. In layers, what is outside them stays: drawing tokens, rewards, embedding and output head.
    Experts at fixed K add columns to the router, and a fixed cost for each expert that is chosen: about x^0.15. Updates
    cut the same sequences into more and smaller forwards; drift, measured after each update, is proportional to M.
    """
    turns: dict[tuple[str, int], list[dict[str, float]]] = {point: [] for point in points(settings)}
    with one_thread(), contextlib.ExitStack() as stack:
        measures = {point: stack.enter_context(_measuring(e)) for point, e in experiments(settings).items()}
        for turn in range(settings.repeats + 1):  # the first one pays for allocations and caches
            first = turn * len(turns) // (settings.repeats + 1)
            for point in [*turns][first:] + [*turns][:first]:
                turns[point].append(measures[point]())
    rows = []
    for factor in FACTORS:
        values = values_of(settings, factor)
        laps = {value: turns[_point(settings, factor, value)][1:] for value in values}
        for part in laps[values[0]][0]:
            if factor == "updates" and part in FORWARDS.values():
                continue  # a forward knows nothing of updates
            of_part = [_row(factor, value, part, laps[value]) for value in values]
            rows += [*of_part, _slope(factor, part, values, [row["cpu_s"] for row in of_part])]
    return rows


def values_of(settings: Scaling, factor: str) -> list[int]:
    return [getattr(settings, factor) * 2**doubling for doubling in range(settings.doublings + 1)]


def _point(settings: Scaling, factor: str, value: int) -> tuple[str, int]:
    """What a measurement goes by: all factors share the base."""
    return (factor, value) if value != getattr(settings, factor) else (BASE, 0)


def points(settings: Scaling) -> list[tuple[str, int]]:
    """Every setting that is measured: (factor, value), the base once."""
    every = [_point(settings, factor, value) for factor in FACTORS for value in values_of(settings, factor)]
    return list(dict.fromkeys(every))


def experiments(settings: Scaling) -> dict[tuple[str, int], Experiment]:
    """The run of each point."""
    sizes = {name: getattr(settings, name) for name in ("layers", "experts", "top_k", "hidden_size", "expert_size")}
    overrides = [*(f"model.{name}={size}" for name, size in sizes.items()), "arm=grpo"]
    overrides += [f"prompts={settings.sequences // COMPLETIONS}", f"completions={COMPLETIONS}"]
    overrides += [f"updates={settings.updates}", f"steps={settings.repeats + 1}"]
    base = bare_experiment(overrides, settings.tokens)
    model: Any = base.model
    change: dict[str, Callable[[int], dict[str, Any]]] = {
        BASE: lambda _: {},
        "sequences": lambda value: {"prompts": value // COMPLETIONS},
        "tokens": lambda value: {"engine": dataclasses.replace(base.engine, max_new_tokens=value)},
        "layers": lambda value: {"model": dataclasses.replace(model, layers=value)},
        "experts": lambda value: {"model": dataclasses.replace(model, experts=value)},
        "updates": lambda value: {"updates": value},
    }
    return {(factor, value): dataclasses.replace(base, **change[factor](value)) for factor, value in points(settings)}


@contextlib.contextmanager
def _measuring(e: Experiment) -> Iterator[Callable[[], dict[str, float]]]:
    """A function that takes one cycle and the instrument's forwards, and returns the CPU seconds of each part."""
    model, _ = e.model.build(seed=0)
    shape = Instrument(sequences=e.prompts * e.completions, tokens=e.engine.max_new_tokens)
    forwards, _ = full_forward(model, shape)

    def measure() -> dict[str, float]:
        row = next(cycles.steps)
        laps = {part: row[column] for part, column in PARTS.items()}
        with torch.inference_mode():
            return laps | {"cycle": sum(laps.values())} | {told: forwards[mode]() for mode, told in FORWARDS.items()}

    with Cycles(e) as cycles:
        yield measure


def _row(factor: str, value: int, part: str, laps: list[dict[str, float]]) -> dict[str, Any]:
    mine = [lap[part] for lap in laps]
    row: dict[str, Any] = {"what": f"{factor} {value}", "mode": part, "factor": factor, "value": value}
    row |= {"cpu_s": statistics.median(mine), "least_s": min(mine)}
    return row | (paired(mine, [lap[FORWARDS["plain"]] for lap in laps]) if part in FORWARDS.values() else {})


def _slope(factor: str, part: str, values: list[int], seconds: list[float]) -> dict[str, Any]:
    slope = log_log_slope(values, seconds).slope
    row: dict[str, Any] = {"what": f"slope of {factor}", "mode": part, "factor": factor, "slope": slope.value}
    return row | {"low": slope.low, "high": slope.high, "last_doubling": math.log2(seconds[-1] / seconds[-2])}
