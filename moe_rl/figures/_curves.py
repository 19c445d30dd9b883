"""Curves of runs: thin lines that stop where a run diverges, means that say over which runs they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from moe_rl import stats, summary
from moe_rl.figures._looks import Look, look
from moe_rl.figures.base import averaged, finished
from moe_rl.store import Study

BAND_RUNS = 3
CROWD = 20  # runs in a panel; with more, single seeds and bands fade so that means can be read
BANDS = f"Bands: 95 % t interval over seeds, from {BAND_RUNS} seeds up"
READ_CURVES = (
    "Thin: single seeds (X: diverged, |: failed or cut off). Thick: mean over runs with a result, up to where the "
    f"first one diverges. {BANDS}, cut at the axis."
)


def curves(frame: pd.DataFrame, x: str, y: str, sparse: bool = False) -> dict[int, pd.Series]:
    """Seed -> y against x, mean over rows of equal x, cut before its first value that is not finite: lines stop there.

    With `sparse`, absent values (a quantity not measured at every step) are skipped first.
    """
    found: dict[int, pd.Series] = {}
    for seed, rows in frame.groupby("seed"):
        values = pd.Series(rows[y].to_numpy(dtype=float), index=rows[x].to_numpy()).sort_index()
        if not values.index.is_unique:
            grouped = values.groupby(level=0)
            values = grouped.mean().where(grouped.count() == grouped.size())
        values = values.dropna() if sparse else values
        broken = np.flatnonzero(~np.isfinite(values.to_numpy(dtype=float)))
        values = values.iloc[: broken[0]] if len(broken) else values
        if len(values):
            found[int(seed)] = values
    return found


def mean_curve(by_seed: dict[int, pd.Series], seeds: Iterable[int]) -> pd.DataFrame:
    """Mean and t interval over `seeds` at every x that all of them reached: columns mean, low, high; index x.

    Below BAND_RUNS seeds low and high are NaN: a band over two (12.7 standard errors) would hide the lines it is about.
    """
    chosen = [by_seed[seed] for seed in seeds if seed in by_seed]
    if not chosen:
        return pd.DataFrame(columns=["mean", "low", "high"], dtype=float)
    together = pd.concat(chosen, axis=1, join="inner").sort_index()
    found = stats.mean_intervals(together.to_numpy(dtype=float))
    if len(chosen) < BAND_RUNS:
        found[:, 1:] = np.nan
    return pd.DataFrame(found, index=together.index, columns=["mean", "low", "high"])


def mean_parts(by_seed: dict[int, pd.Series], study: Study, arm: str, knobs: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The mean over all runs up to the first divergence, and after it the mean over the runs that finished."""
    whole = mean_curve(by_seed, averaged(study, arm, knobs))
    rest = mean_curve(by_seed, finished(study, arm, knobs))
    return whole, rest[rest.index > whole.index.max()] if len(whole) else rest


def draw_arm(
    axes: Axes, study: Study, arm: str, knobs: str, by_seed: dict[int, pd.Series], style: Look | None = None
) -> None:
    """Thin line a seed (X where it diverged, | where it stopped unfinished), thick mean with its band."""
    style, good = style or look(arm), set(finished(study, arm, knobs))
    strength = min(1.0, (CROWD / max(1, (study.runs["knobs"] == knobs).sum())) ** 0.5)
    diverged = set(summary.runs_in(study, arm, knobs, ["diverged"]))
    for seed, values in by_seed.items():
        axes.plot(values.index, values, color=style.color, linewidth=0.8, alpha=0.5 * strength, zorder=2)
        if seed not in good:
            mark: dict[str, Any] = {"marker": "|", "markersize": 15, "markeredgewidth": 2.5}
            if seed in diverged:
                mark = {"marker": "X", "markersize": 11, "markeredgecolor": "black"}
            axes.plot(values.index[-1], values.iloc[-1], color=style.color, zorder=5, **mark)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    mean = mean_curve(by_seed, averaged(study, arm, knobs))
    if len(mean):
        every = max(1, len(mean) // 7)
        marks = (sum(arm.encode()) % every, every)  # arms mark different points
        axes.plot(
            mean.index,
            mean["mean"],
            linewidth=2.4,
            zorder=4,
            markersize=6.5,
            markevery=marks,
            **style.as_line,
        )
        draw_band(axes, mean["low"], mean["high"], style.color, 0.13 * strength)


def draw_band(axes: Axes, low: pd.Series, high: pd.Series, color: str, alpha: float) -> None:
    """Shaded from low to high; at a single x, where an area has no width, a broad vertical line."""
    if len(low) == 1:
        axes.vlines(low.index, low, high, color=color, alpha=alpha, linewidth=12, zorder=1)
    else:
        axes.fill_between(low.index, low, high, color=color, alpha=alpha, linewidth=0, zorder=1)


def fit_to_lines(panels: Iterable[Axes]) -> None:
    """One y range for `panels`, from their lines: an interval over two or three seeds can be wider than all else."""
    together = list(panels)
    lines = [
        np.asarray(line.get_ydata(), dtype=float)
        for axes in together
        for line in axes.lines
        if line.get_transform().contains_branch_seperately(axes.transData)[1]
    ]  # not the vertical marks
    values = np.concatenate([*lines, np.zeros(0)])
    values = values[np.isfinite(values)]
    if len(values):
        margin = 0.2 * (values.max() - values.min()) or 0.1 * abs(values.max()) or 0.1
        for axes in together:
            axes.set_ylim(values.min() - margin, values.max() + margin)
