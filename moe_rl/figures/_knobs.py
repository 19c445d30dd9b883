"""Studies that vary numbers: what the figures over a knob share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.ticker import NullLocator

from moe_rl import stats, summary
from moe_rl.figures._bars import Array
from moe_rl.figures._curves import BAND_RUNS
from moe_rl.figures._looks import Look
from moe_rl.store import Study

READ_LINES = (
    f"Lines: mean over finished seeds; vertical: 95 % t interval over seeds, from {BAND_RUNS} seeds up, cut at the "
    "axis; points: single seeds (X: diverged, in no mean)."
)


class Scale(NamedTuple):
    """The settings of a study that differ in one number only: (value, setting) in rising order, and what they share."""

    shared: str
    points: list[tuple[float, str]]


def numeric_knobs(study: Study) -> list[str]:
    """The knobs of which every setting of the study has a number, and not all the same one."""
    pairs = [summary.knob_pairs(knobs) for knobs in summary.knobs_of(study)]
    keys = set.intersection(*(set(each) for each in pairs)) if pairs else set()
    return sorted(
        key
        for key in keys
        if len({each[key] for each in pairs}) > 1 and all(summary.is_number(each[key]) for each in pairs)
    )


def scales(study: Study, key: str) -> list[Scale]:
    """The study's settings along `key`, one scale for each combination of the other knobs that vary."""
    everywhere = summary.knobs_of(study)
    found: dict[str, list[tuple[float, str]]] = {}
    for setting in everywhere:
        pairs = summary.knob_pairs(setting)
        value = float(pairs.pop(key))
        found.setdefault(",".join(f"{name}={text}" for name, text in pairs.items()), []).append((value, setting))
    return [Scale(summary.knob_label(rest, found), sorted(points)) for rest, points in found.items()]


def short(key: str) -> str:
    """'optim.lr' -> 'lr'."""
    return key.rpartition(".")[2]


def set_scale(axes: Axes, key: str, values: Sequence[float]) -> None:
    """The x axis of a knob: logarithmic when its values span a factor of 8, marked at the values themselves."""
    if min(values) > 0 and max(values) >= 8 * min(values):
        axes.set_xscale("log")
    axes.set_xticks(list(values), [number(value) for value in values], rotation=45 if len(values) > 6 else 0)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(key)


def number(value: float) -> str:
    """A knob's value as a tick label: '0.05', '3e-4'."""
    text = f"{value:.0e}" if 0 < abs(value) < 1e-2 and float(f"{value:.0e}") == value else f"{value:g}"
    return text.replace("e-0", "e-").replace("e+0", "e")


def drawn_span(panels: Iterable[Axes]) -> tuple[float, float]:
    """The least and the greatest y of the points on some panels; (0, 0) without any."""
    groups = [group for axes in panels for group in axes.collections if isinstance(group, PathCollection)]
    values = np.concatenate([np.zeros(0), *(np.asarray(group.get_offsets())[:, 1] for group in groups)])
    return (float(values.min()), float(values.max())) if len(values) else (0.0, 0.0)


def fit_y(axes: Axes, from_zero: bool = True) -> None:
    """The y axis for what is drawn on it as points: logarithmic when they are positive and span a factor of 20."""
    low, high = drawn_span([axes])
    if low > 0 and high > 20 * low:
        axes.set_yscale("log")
        axes.set_ylim(low / 2, high * 2)
    elif from_zero:
        axes.set_ylim(0, 1.1 * high or 1e-3)
    else:
        margin = 0.15 * (high - low) or 0.1
        axes.set_ylim(low - margin, high + margin)


def draw_line(axes: Axes, look: Look, found: Sequence[tuple[float, Array, Array]], **how: Any) -> None:
    """A line through the means at (x, finished runs, diverged runs), with t intervals and every run as a point.

    The y axis is fitted to the points: an interval over few runs can be wider than all else, and is cut.
    """
    means = [(x, stats.mean_interval(good)) for x, good, _ in found if len(good)]
    style: dict[str, Any] = {"color": look.color, "linestyle": look.line, "linewidth": 2.2, "zorder": 3} | how
    axes.plot([x for x, _ in means], [mean.value for _, mean in means], marker=look.marker, markersize=7, **style)
    for x, mean in means:
        if mean.n >= BAND_RUNS:
            axes.vlines(x, mean.low, mean.high, color=style["color"], linewidth=1.6, alpha=0.8, zorder=2)
    for x, good, bad in found:
        for values, marker in ((good, "o"), (bad, "X")):
            axes.scatter(
                np.full(len(values), x),
                values,
                s=14 if marker == "o" else 60,
                marker=marker,
                facecolor="white" if marker == "o" else style["color"],
                edgecolor=style["color"],
                linewidth=0.9,
                zorder=4,
            )
