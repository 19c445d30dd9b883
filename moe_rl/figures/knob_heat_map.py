"""Final reward, and slot change by one update, over the two numbers that the study varies, one panel per arm.

In each cell the mean over finished seeds, and how many of the runs collapsed, diverged or did not finish.
"""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure

from moe_rl import stats, summary
from moe_rl.figures import _knobs, base
from moe_rl.measures import run_numbers
from moe_rl.store import Study

MEASURES = {
    "final_reward": ("final reward", "mean reward"),
    "slot_change": ("slot change", "share of slots, one update"),
}


def draw(study: Study) -> Figure | None:
    """Rows: the two measures, for every combination of other knobs. Columns: arms. One colour scale a measure."""
    keys = _knobs.numeric_knobs(study)
    if len(keys) != 2:
        return None
    runs, arms = _placed(study, keys), summary.arms_of(study)
    shared, measures = sorted(set(runs["shared"])), [name for name in MEASURES if runs[name].notna().any()]
    width, height = 1.3 + 0.95 * runs["across"].nunique(), 1.1 + 0.72 * runs["up"].nunique()
    figure, axes = base.page(
        len(shared) * len(measures), len(arms), width=max(3.4, width), height=max(2.4, height), sharey=True
    )
    for row, (rest, name) in enumerate((rest, name) for rest in shared for name in measures):
        highest, lowest = runs[name].max(), 0.0 if name == "slot_change" else runs[name].min()
        for column, arm in enumerate(arms):
            here, panel = runs[(runs["arm"] == arm) & (runs["shared"] == rest)], axes[row, column]
            mesh = _panel(panel, here, runs, name, (lowest, highest))
            panel.set_title(base.titled(arm, summary.knob_label(rest, shared)))
            panel.set_xlabel(keys[1])
            panel.set_ylabel(keys[0] if column == 0 else "")
        figure.colorbar(mesh, ax=axes[row], label=MEASURES[name][1], aspect=20, pad=0.015)
    n = base.between(runs.groupby(["arm", "knobs"])["seed"].count())
    text = (
        f"Cells: mean over finished runs ± half of the 95 % t interval over seeds, of n = {n} runs started; below, how "
        "many of them collapsed (ended below half of their own best reward), diverged or are unfinished. Grey: no "
        "finished run."
    )
    title = " and ".join(MEASURES[name][0] for name in measures).capitalize() + f" over {keys[0]} and {keys[1]}"
    return base.finish(figure, study, title + base.short_model(study), text + summary.noise_text(study))


def _placed(study: Study, keys: list[str]) -> pd.DataFrame:
    """`run_numbers` with each run's place: up and across, and the setting of the other knobs."""
    runs = run_numbers(study)
    pairs = [summary.knob_pairs(setting) for setting in runs["knobs"]]
    up, across = keys
    shared = [",".join(f"{key}={value}" for key, value in each.items() if key not in keys) for each in pairs]
    return runs.assign(
        up=[float(each[up]) for each in pairs], across=[float(each[across]) for each in pairs], shared=shared
    )


def _panel(axes: Axes, runs: pd.DataFrame, everything: pd.DataFrame, name: str, span: tuple[float, float]) -> QuadMesh:
    ups, acrosses = (sorted(set(everything[axis])) for axis in ("up", "across"))
    cells = np.full((len(ups), len(acrosses)), np.nan)
    texts = {}
    for (up, across), part in runs.groupby(["up", "across"]):
        place = ups.index(up), acrosses.index(across)
        values = part[part["state"] == "finished"][name].dropna().to_numpy(dtype=float)
        texts[place] = _told(part, values)
        if len(values):
            cells[place] = values.mean()
    axes.grid(False)
    axes.set_facecolor("#DDDDDD")
    edges = np.arange(len(acrosses) + 1) - 0.5, np.arange(len(ups) + 1) - 0.5
    mesh = axes.pcolormesh(*edges, cells, cmap="viridis", vmin=span[0], vmax=span[1] or 1e-9, edgecolor="white")
    for (row, column), told in texts.items():
        dark = cells[row, column] < 0.45 * span[0] + 0.55 * span[1]  # not where the cell is grey
        axes.text(column, row, told, ha="center", va="center", fontsize=9.5, color="white" if dark else "black")
    axes.set_xticks(range(len(acrosses)), [_knobs.number(value) for value in acrosses])
    axes.set_yticks(range(len(ups)), [_knobs.number(value) for value in ups])
    return mesh


def _told(runs: pd.DataFrame, values: np.ndarray) -> str:
    lines = []
    if len(values):
        mean = stats.mean_interval(values)
        lines.append(f"{mean.value:.3g}" + (f"\n± {(mean.high - mean.low) / 2:.1g}" if mean.n > 1 else ""))
    states = runs["state"]
    for word, count in (
        ("collapsed", int(runs["collapsed"].sum())),
        ("diverged", int((states == "diverged").sum())),
        ("unfinished", int((~states.isin(["finished", "diverged"])).sum())),
    ):
        if count:
            lines.append(f"{count}/{len(runs)} {word}")
    return "\n".join(lines)
