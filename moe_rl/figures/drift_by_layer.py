"""Slot change by one gradient update, by MoE layer and step, one panel per arm.

Mean over the step's updates, tokens of the step's rollouts and seeds; replay off.
"""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from moe_rl import summary
from moe_rl.figures import base
from moe_rl.store import Study


def draw(study: Study) -> Figure | None:
    """A block a knob setting. Columns: arms. One colour scale for all."""
    drift = study.drift[(study.drift["tokens"] == "rollout") & (study.drift["reference"] == "previous")]
    if drift.empty:
        return None
    arms, knobs = summary.arms_of(study), summary.knobs_of(study)
    maps = {(arm, setting): _map(study, drift, arm, setting) for arm in arms for setting in knobs}
    top = max((float(part.to_numpy().max()) for part, _ in maps.values() if part.size), default=0.0) or 1e-9
    figure, axes = base.blocks(len(knobs), 1, len(arms), sharex="row")
    mesh = None
    for row, setting in enumerate(knobs):
        for column, arm in enumerate(arms):
            mesh = _panel(axes[row, 0, column], *maps[arm, setting], top) or mesh
            axes[row, 0, column].set_title(base.panel_title(study, arm, setting))
            axes[row, 0, column].set_xlabel("step (rollout batches)")
            first = axes[row, 0, column].get_subplotspec().is_first_col()
            axes[row, 0, column].set_ylabel("MoE layer (1 = nearest the input)" if first or column == 0 else "")
    if mesh is not None:
        figure.colorbar(mesh, ax=axes, label="slot change by one update\n(share of expert slots)", aspect=25, pad=0.015)
    text = (
        "Mean over the step's updates, tokens and seeds; 0 is nothing changed, two unrelated routers differ in "
        f"{_chance(study)} of their slots. Averages over few seeds carry the spread shown in drift_by_update. "
        "After a divergence (dashed line): finished seeds only."
    )
    title = "Slot change by one gradient update, layer by layer" + base.short_model(study)
    return base.finish(figure, study, title, text + summary.noise_text(study))


def _map(study: Study, drift: pd.DataFrame, arm: str, knobs: str) -> tuple[pd.DataFrame, float]:
    """(steps x layers), and the step after which a seed is gone (0: none is)."""
    rows = drift[(drift["arm"] == arm) & (drift["knobs"] == knobs)]
    by_seed = {
        int(seed): pd.DataFrame(part["slot_change"].to_list(), index=part["step"].astype(int)).groupby(level=0).mean()
        for seed, part in rows.groupby("seed")
    }

    def mean(seeds: list[int]) -> pd.DataFrame:
        maps = [by_seed[seed] for seed in seeds if seed in by_seed]
        return sum(maps[1:], maps[0]).dropna() / len(maps) if maps else pd.DataFrame()

    whole, rest = mean(base.averaged(study, arm, knobs)), mean(base.finished(study, arm, knobs))
    after = rest[rest.index > whole.index.max()] if len(whole) else rest
    return pd.concat([whole, after]), float(whole.index.max()) if len(after) and len(whole) else 0.0


def _panel(axes: Axes, shares: pd.DataFrame, end: float, top: float) -> QuadMesh | None:
    axes.grid(False)
    if shares.empty:
        axes.text(0.5, 0.5, "no run with a result", transform=axes.transAxes, ha="center")
        axes.set_yticks([])
        return None
    steps = shares.index.to_numpy(dtype=float)
    middles = (steps[1:] + steps[:-1]) / 2
    gaps = np.diff(steps) if len(steps) > 1 else np.ones(1)
    edges = np.concatenate([[steps[0] - gaps[0] / 2], middles, [steps[-1] + gaps[-1] / 2]])
    layers = np.arange(shares.shape[1] + 1) + 0.5
    mesh = axes.pcolormesh(edges, layers, shares.to_numpy().T, cmap="viridis", vmin=0, vmax=top, rasterized=True)
    if end:
        axes.axvline(end + 0.5, color="white", linestyle="--", linewidth=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(7, integer=True))
    return mesh


def _chance(study: Study) -> str:
    runs = study.runs.reindex(columns=["top_k", "num_experts"]).dropna().drop_duplicates()
    values = sorted({f"{1 - k / e:.2f}" for k, e in runs.itertuples(index=False) if e})
    return "1 - K/E = " + " or ".join(values)
