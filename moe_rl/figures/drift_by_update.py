"""Slot change against gradient updates, one line per mini-batch index u, one panel per arm.

Slot change = 1 - mean over tokens and layers of |E_old ∩ E_new| / K, on this step's rollouts, replay off. Against the
policy before the batch it accumulates over u = 1..M; against the previous update it is the headline number.
"""

from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from moe_rl import summary
from moe_rl.figures import _curves, base
from moe_rl.store import Study

DASHED = (0, (4, 1.5))


def draw(study: Study) -> Figure | None:
    """A block a knob setting. Columns: arms."""
    drift = study.drift[study.drift["tokens"] == "rollout"].copy()
    if drift.empty:
        return None
    drift["share"] = [float(np.mean(layers)) for layers in drift["slot_change"]]
    arms, knobs = summary.arms_of(study), summary.knobs_of(study)
    indices = sorted(int(u) for u in drift["update"].unique())
    figure, axes = base.blocks(len(knobs), 1, len(arms), sharex="row", sharey="all")
    for row, setting in enumerate(knobs):
        for column, arm in enumerate(arms):
            rows = base.rows_of(study, drift, arm, setting)
            _panel(axes[row, 0, column], study, arm, setting, rows, indices)
            axes[row, 0, column].set_ylabel("slot change (share of expert slots)" if column == 0 else "")
    _curves.fit_to_lines(axes.flat)
    for panel in axes.flat:
        panel.set_ylim(bottom=0)
    for column, arm in enumerate(arms):
        for row, setting in enumerate(knobs):
            _baseline(axes[row, 0, column], study, arm, setting)
    handles = [Line2D([], [], color=_color(u, indices), linewidth=2.2, label=f"u = {u}") for u in indices]
    handles.append(Line2D([], [], color="black", linestyle=DASHED, linewidth=2.4, label="one update"))
    text = (
        "Slot change on the step's rollouts, replay off, mean over tokens, layers and seeds. u = 1, 2, ...: after u "
        "updates, since the start of the batch; one update: since the previous update, mean over u. "
        f"{_curves.BANDS}. After a divergence (dotted line): finished seeds only."
    )
    title = "Slot change over the gradient updates of a batch" + base.short_model(study)
    return base.finish(figure, study, title, text + summary.noise_text(study), handles)


def _color(u: int, indices: list[int]) -> str:
    """Light to dark with u: the order can be read in grey."""
    return to_hex(matplotlib.colormaps["viridis_r"](0.15 + 0.75 * indices.index(u) / max(1, len(indices) - 1)))


def _panel(axes: Axes, study: Study, arm: str, knobs: str, rows: pd.DataFrame, indices: list[int]) -> None:
    old, previous = rows[rows["reference"] == "old"], rows[rows["reference"] == "previous"]
    per_step = base.fact(study, arm, knobs, "updates_per_step")
    ends = []
    for u in indices:
        ends.append(_lines(axes, study, arm, knobs, old[old["update"] == u], "updates", _color(u, indices)))
    previous = previous.assign(middle=previous["step"].astype(int) * per_step - (per_step - 1) / 2)
    ends.append(_lines(axes, study, arm, knobs, previous, "middle", "black", DASHED))
    if any(ends):
        axes.axvline(max(ends), color="#333333", linestyle=":", linewidth=1.5)
    axes.set_title(base.panel_title(study, arm, knobs))
    axes.set_xlabel("gradient updates")


def _lines(
    axes: Axes, study: Study, arm: str, knobs: str, rows: pd.DataFrame, x: str, color: str, style: Any = "-"
) -> float:
    """Draw a mean line; returns where the first run diverged, 0 if none did."""
    whole, rest = _curves.mean_parts(_curves.curves(rows, x, "share"), study, arm, knobs)
    for part, width in ((whole, 2.2), (rest, 1.3)):
        marker = "o" if len(part) == 1 else ""  # a line of one point cannot be seen
        axes.plot(part.index, part["mean"], color=color, linestyle=style, linewidth=width, marker=marker)
        _curves.draw_band(axes, part["low"], part["high"], color, 0.14)
    return float(whole.index.max()) if len(whole) and summary.runs_in(study, arm, knobs, ["diverged"]) else 0.0


def _baseline(axes: Axes, study: Study, arm: str, knobs: str) -> None:
    """Two unrelated routers share K/E of their slots by chance: 1 - K/E is where slot change ends."""
    k, e = base.fact(study, arm, knobs, "top_k"), base.fact(study, arm, knobs, "num_experts")
    if not e:
        return
    chance, top = 1 - k / e, axes.get_ylim()[1]
    if chance <= top:
        axes.axhline(chance, color="#777777", linewidth=1.5, linestyle="-.")
    where = "dash-dotted" if chance <= top else "above this axis"
    axes.text(
        0.98,
        0.97,
        f"unrelated routers: 1 - K/E = {chance:.2f}\n({where})",
        transform=axes.transAxes,
        ha="right",
        va="top",
        fontsize=10.5,
        color="#444444",
    )
