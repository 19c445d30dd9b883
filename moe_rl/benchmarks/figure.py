"""The figure of `experiments/bench.py scaling`, from its rows alone."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter, NullLocator

from moe_rl.figures._looks import Look
from moe_rl.figures.base import FORMATS, STYLE, FigureError, page, save

LOOKS = {
    "cycle": Look("#000000", "-", "o"),
    "rollout": Look("#BB5566", (0, (5, 1.6)), "s"),
    "old pass": Look("#D39A16", (0, (1.2, 1.2)), "v"),
    "updates": Look("#004488", (0, (6, 1.5, 1.2, 1.5)), "^"),
    "drift": Look("#44AA99", (0, (7, 2)), "D"),
    "plain forward": Look("#555555", "-", "P"),
    "recorded forward": Look("#882255", (0, (3, 1.2)), "x"),
    "replayed forward": Look("#117733", (0, (1.2, 2.4)), "*"),
}
LINE: Any = {"linewidth": 2, "markersize": 6.5}
LABELS = {
    "sequences": "sequences a step",
    "tokens": "tokens a response",
    "layers": "layers",
    "experts": "experts of a layer, K fixed",
    "updates": "updates a step, M",
}


def draw(rows: Sequence[dict[str, Any]]) -> Figure:
    """A panel a factor: CPU seconds of each part, medians, both axes logarithmic; dotted lines have slope 1."""
    factors = list(dict.fromkeys(row["factor"] for row in rows if "factor" in row))
    if not factors:
        raise FigureError("these rows have no factor; draw what `bench.py scaling --json` wrote")
    with matplotlib.rc_context(STYLE):
        figure, axes = page(-(-(len(factors) + 1) // 3), 3, width=4.4, height=3.9, sharey=True)
        for axis, factor in zip(axes.flat, factors, strict=False):
            _panel(axis, factor, [row for row in rows if row.get("factor") == factor])
        for axis in axes[:, 0]:
            axis.set_ylabel("CPU seconds")
        for axis in axes.flat[len(factors) :]:
            axis.set_axis_off()
        shown = [part for part in LOOKS if any(row["mode"] == part for row in rows)]
        handles = [Line2D([], [], label=part, **LINE, **LOOKS[part].as_line) for part in shown]
        handles.append(Line2D([], [], color="#888888", linestyle=":", label="slope 1: cost is proportional"))
        axes.flat[len(factors)].legend(handles=handles, loc="center left", handlelength=3.6, fontsize=12)
    return figure


def _panel(axis: Any, factor: str, rows: list[dict[str, Any]]) -> None:
    points = [row for row in rows if "value" in row]
    values = sorted({row["value"] for row in points})
    slopes = {row["mode"]: row["slope"] for row in rows if "slope" in row}
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    for part, slope in slopes.items():
        seconds = {row["value"]: row["cpu_s"] for row in points if row["mode"] == part}
        axis.plot(
            values, [seconds[value] for value in values], label=f"{part} {slope:.2f}", **LINE, **LOOKS[part].as_line
        )
    lowest, highest = min(row["cpu_s"] for row in points), max(row["cpu_s"] for row in points)
    for start in (lowest, (lowest * highest) ** 0.5):
        axis.plot(values, [start * value / values[0] for value in values], color="#888888", linestyle=":", zorder=1)
    axis.set_xticks(values, [str(value) for value in values])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_minor_formatter(NullFormatter())
    told = "exponents: " + ", ".join(f"{part.removesuffix(' forward')} {slope:.2f}" for part, slope in slopes.items())
    axis.set_xlabel(LABELS.get(factor, factor) + "\n" + textwrap.fill(told, 50), fontsize=11)


def write(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw `rows` into `path`, in the format that its suffix names. FigureError for rows of something else."""
    save(draw(rows), path.parent, path.stem, [format_of(path)])


def format_of(path: Path) -> str:
    """FigureError for a suffix that names none."""
    kind = path.suffix.removeprefix(".")
    if kind not in FORMATS:
        raise FigureError(f"no figure format {kind!r} of {path}; choose from {', '.join(FORMATS)}")
    return kind
