"""Bars on a log axis over runs, with every run shown: what the figures with bars share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes

from moe_rl import stats, summary
from moe_rl.figures._looks import Look
from moe_rl.figures.base import fact, finished
from moe_rl.store import Study

Array = npt.NDArray[np.float64]
Group = tuple[Array, Array]  # a value a run: finished runs, diverged runs

MANY = 5  # arms whose names fit beside each other
SPANS = {"previous": "by one update", "old": "over a batch of M updates"}
READ_BARS = (
    "Bars: mean over finished seeds. Lines: 95 % t interval over seeds, cut at the axis. Points: single seeds "
    "(X: diverged, up to there, in no mean). 0: exactly zero."
)


def spanned(study: Study, drift: pd.DataFrame, arm: str, knobs: str, span: str) -> pd.DataFrame:
    """Rows of an arm compared with the previous update (every update), or with the batch's start (after all M)."""
    rows = drift[(drift["arm"] == arm) & (drift["knobs"] == knobs) & (drift["reference"] == span)]
    return rows if span == "previous" else rows[rows["update"] == fact(study, arm, knobs, "updates_per_step")]


def run_lists(study: Study, rows: pd.DataFrame, arm: str, knobs: str, column: str) -> list[Group]:
    """For every position of a list column: its mean over each run's rows."""
    means = {
        int(seed): np.mean(np.array(part[column].to_list(), dtype=float), axis=0) for seed, part in rows.groupby("seed")
    }
    good = [means[seed] for seed in finished(study, arm, knobs) if seed in means]
    bad = [means[seed] for seed in summary.runs_in(study, arm, knobs, ["diverged"]) if seed in means]
    length = len(next(iter(means.values()))) if means else 0
    return [(np.array([run[i] for run in good]), np.array([run[i] for run in bad])) for i in range(length)]


def run_values(measures: pd.DataFrame, arm: str, knobs: str, column: str) -> Group:
    """A number of `summary.run_measures` for each run of an arm that has it."""
    rows = measures[(measures["arm"] == arm) & (measures["knobs"] == knobs)].dropna(subset=[column])
    good, bad = (rows[rows["state"] == state][column].to_numpy(dtype=float) for state in ("finished", "diverged"))
    return good, bad


def by_state(study: Study, rows: pd.DataFrame, arm: str, knobs: str, column: str, power: int = 1) -> Group:
    """The mean over each run's rows that have a value, finished runs and diverged ones apart.

    With power 2 it is the root mean square.
    """
    values = rows[column].astype(float) ** power
    means = values.dropna().groupby(rows["seed"]).mean() ** (1 / power)
    good, bad = (
        np.array([means[seed] for seed in summary.runs_in(study, arm, knobs, [state]) if seed in means], dtype=float)
        for state in ("finished", "diverged")
    )
    return good, bad


def log_floor(groups: Iterable[Group]) -> float:
    """Where a log axis starts: a power of ten at least a factor 2 below every positive value."""
    values = np.concatenate([np.zeros(0), *(part for group in groups for part in group)])
    positive = values[values > 0]
    return float(10 ** np.floor(np.log10(positive.min() / 2))) if len(positive) else 1e-4


def draw_bar(axes: Axes, place: float, width: float, look: Look, group: Group, floor: float) -> None:
    """A bar with interval and points; zeros sit on the axis' foot under a written 0."""
    good, bad = group
    if len(good):
        mean = stats.mean_interval(good)
        axes.bar(place, mean.value, width, color=look.color, alpha=0.75, edgecolor="black", linewidth=0.8, zorder=2)
        if mean.n > 1 and mean.high > floor:
            axes.vlines(place, max(mean.low, floor), mean.high, color="black", linewidth=2, zorder=3)
    for values, marker in ((good, look.marker), (bad, "X")):
        offsets = (np.arange(len(values)) - (len(values) - 1) / 2) * width / max(4, len(values) + 1)
        axes.scatter(
            place + offsets,
            np.maximum(values, floor),
            s=26 if width > 0.3 else 10,
            marker=marker,
            color="white",
            edgecolor="black",
            linewidth=0.9,
            zorder=4,
            clip_on=False,
        )
    if len(good) + len(bad) and not (np.concatenate([good, bad]) > 0).all():
        axes.annotate("0", (place, floor), (0, 7), textcoords="offset points", ha="center", zorder=5)


def arm_axis(axes: Axes, arms: Sequence[str]) -> None:
    """The x axis of one bar an arm: many names are slanted, they do not fit beside each other."""
    many = len(arms) > MANY
    axes.set_xlim(-0.6, len(arms) - 0.4)
    axes.set_xticks(range(len(arms)), arms if many else [two_lines(arm) for arm in arms])
    if many:
        axes.tick_params(axis="x", labelrotation=35)
        for label in axes.get_xticklabels():
            label.set_horizontalalignment("right")
    axes.set_xlabel("arm")
    axes.grid(False, axis="x")


def two_lines(name: str) -> str:
    """A long arm name broken at the underscore nearest its middle."""
    breaks = [i for i, letter in enumerate(name) if letter == "_"]
    if len(name) < 12 or not breaks:
        return name
    at = min(breaks, key=lambda i: abs(i - len(name) / 2))
    return f"{name[:at]}\n{name[at:]}"


def hide_unused(axes: Any, used: int) -> None:
    """Empty panels at the end of a wrapped grid."""
    for panel in axes.flat[used:]:
        panel.set_visible(False)
