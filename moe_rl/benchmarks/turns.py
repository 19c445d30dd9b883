"""What benchmarks share: one thread, ratios of what took turns, the comparison with an earlier run."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from typing import Any

import torch
from scipy.stats import binom

TOLERANCE = 0.1  # of a ratio: medians over turns move by some percent from run to run on a busy machine
TURNS = ("repeats", "cycles")  # settings that change nothing but the noise


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def paired(mine: list[float], base: list[float]) -> dict[str, float]:
    """The median over turns of mine / base and its 95 % interval, which no noise that hits both alike can move.

    With fewer than 6 turns the interval is their whole range, and covers less.
    """
    ratios = sorted(one / other for one, other in zip(mine, base, strict=True))
    low = int(binom.ppf(0.025, len(ratios), 0.5))  # order statistics that bracket the median, whatever the noise
    return {
        "paired_ratio": statistics.median(ratios),
        "paired_low": ratios[max(low - 1, 0)],
        "paired_high": ratios[min(len(ratios) - low, len(ratios) - 1)],
    }


def check_baseline(settings: dict[str, Any], baseline: dict[str, Any]) -> None:
    """ValueError for a baseline ({settings, rows} of an earlier run) of other settings."""
    for name in sorted(settings.keys() | baseline["settings"].keys()):
        here, there = settings.get(name), baseline["settings"].get(name)
        if name not in TURNS and here != there:
            raise ValueError(f"{name} is {here} here and {there} in the baseline; measure both at the same settings")


def regressions(rows: list[dict[str, Any]], baseline: dict[str, Any]) -> list[str]:
    """What became worse than in `baseline`: ratios more than TOLERANCE above its.

    Absolute times are not compared, they are the machine's. Rows and ratios that the baseline lacks are new.
    """
    before = {(row["what"], row["mode"]): row for row in baseline["rows"]}
    worse = []
    for row in rows:
        for name in ("paired_ratio", "memory_ratio"):
            was = before.get((row["what"], row["mode"]), {}).get(name)
            if was is not None and row[name] > was * (1 + TOLERANCE):
                worse.append(f"{row['what']}, {row['mode']}: {name} {row[name]:.3f}, was {was:.3f}")
    return worse
