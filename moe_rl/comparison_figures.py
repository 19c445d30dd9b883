"""Figures of two compared checkpoints, drawn from the tidy table of comparison_numbers. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from moe_rl.figures import base
from moe_rl.figures._bars import log_floor
from moe_rl.store import Study

Array = npt.NDArray[np.float64]
LOOKS: dict[str, Any] = {
    "old": {"color": "#D39A16", "linestyle": (0, (5, 1.6)), "marker": "s"},
    "new": {"color": "#004488", "linestyle": "-", "marker": "o"},
    "change": {"color": "#004488", "linestyle": "-", "marker": "o"},
    "noise": {"color": "#777777", "linestyle": (0, (1.2, 1.2)), "marker": "v"},
    "unrelated": {"color": "black", "linestyle": (0, (7, 2)), "marker": ""},
}
LAYER = "MoE layer (1 = nearest the input)"
MAPS = 4  # layers of which the co-activation is shown


def draw_all(table: pd.DataFrame, facts: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write drift, load and co_activation as png and svg; facts as in comparison.json."""
    paths = []
    for name, draw in {"drift": drift, "load": load, "co_activation": co_activation}.items():
        with matplotlib.rc_context(base.STYLE):
            figure = draw(table, facts)
        paths += base.save(figure, folder, name, ("png", "svg"))
    return paths


def drift(table: pd.DataFrame, facts: Mapping[str, Any]) -> Figure:
    """What changed, beside the noise floor and two unrelated routers."""
    figure, axes = base.page(2, 2, width=5.0, height=3.4)
    K, E = facts["top_k"], facts["num_experts"]
    unrelated = {"slot_change": 1 - K / E, "set_change": 1 - 1 / math.comb(E, K)}
    for panel, (metric, baseline) in zip(axes[0], unrelated.items(), strict=True):
        change = _values(table, "change", metric)
        noise = _noise(table, metric)
        floor = log_floor([(np.concatenate([change, noise]), np.zeros(0))])
        panel.axhline(baseline, color="black", linestyle=LOOKS["unrelated"]["linestyle"], linewidth=1.5)
        for of, values in (("noise", noise), ("change", change)):
            _log_line(panel, values, floor, LOOKS[of])
        panel.set_yscale("log")
        panel.set_ylim(floor * 0.75, 1.5)
        panel.set_ylabel("share of expert slots" if metric == "slot_change" else "share of tokens")
        panel.set_title("slot change" if metric == "slot_change" else "set change: any expert differs")
        _layer_axis(panel, len(change))
    first = _values(table, "change", "first_changed")
    axes[1, 0].bar(np.arange(1, len(first) + 1), first, color=LOOKS["change"]["color"], alpha=0.75, edgecolor="black")
    axes[1, 0].set_title(f"first changed layer (no layer changed: {max(0.0, 1 - first.sum()):.1%})")
    axes[1, 0].set_ylabel("share of tokens")
    _layer_axis(axes[1, 0], len(first))
    _deviation(axes[1, 1], table)
    text = (
        "Noise floor: the same old checkpoint computed otherwise (other batch size, more padding, decoding with a "
        "cache, other expert kernels), the largest at each layer. Unrelated routers: "
        f"1 - K/E = {unrelated['slot_change']:.3f} of slots. Hollow marks on the foot of a log axis: exactly 0."
    )
    handles = [
        Line2D([], [], label=label, linewidth=2.4, markersize=7, **LOOKS[of])
        for of, label in (("change", "old to new"), ("noise", "noise floor"), ("unrelated", "two unrelated routers"))
    ]
    return _finish(figure, facts, "Routing of the same tokens by two checkpoints", text, handles)


def load(table: pd.DataFrame, facts: Mapping[str, Any]) -> Figure:
    """How evenly each checkpoint uses its experts."""
    figure, axes = base.page(2, 2, width=5.0, height=3.4)
    for of in ("old", "new"):
        for panel, metric in zip(axes[0], ("max_violation", "dead_experts"), strict=True):
            values = _values(table, of, metric)
            panel.plot(np.arange(1, len(values) + 1), values, linewidth=2.2, markersize=6, **LOOKS[of])
            _layer_axis(panel, len(values))
    for panel in axes[0]:
        panel.set_ylim(bottom=0)
    axes[0, 0].set_title("MaxVio: largest over mean load, minus 1")
    axes[0, 0].set_ylabel("MaxVio")
    axes[0, 1].set_title("dead experts: chosen by no token")
    axes[0, 1].set_ylabel("experts")
    axes[0, 1].yaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    maps = {of: _grid(table[(table["of"] == of) & (table["metric"] == "load")], "layer", "expert") for of in LOOKS}
    maps = {of: grid / grid.mean(1, keepdims=True) for of, grid in maps.items() if grid.size}
    top = max(float(grid.max()) for grid in maps.values())
    for panel, (of, grid) in zip(axes[1], maps.items(), strict=True):
        L, E = grid.shape
        mesh = panel.pcolormesh(
            np.arange(E + 1) - 0.5, np.arange(L + 1) + 0.5, grid, cmap="viridis", vmin=0, vmax=top, rasterized=True
        )
        panel.set_title(f"load of {of}")
        panel.set_xlabel("expert")
        panel.set_ylabel("MoE layer" if of == "old" else "")
        panel.grid(False)
        panel.yaxis.set_major_locator(MaxNLocator(7, integer=True, min_n_ticks=1))
        panel.xaxis.set_major_locator(MaxNLocator(7, integer=True))
    figure.colorbar(mesh, ax=axes[1], label="load / mean load", aspect=25, pad=0.015)
    text = f"MaxVio is 0 for an even load and at most E/K - 1 = {facts['num_experts'] / facts['top_k'] - 1:.3g}."
    handles = [Line2D([], [], label=of, linewidth=2.4, markersize=7, **LOOKS[of]) for of in ("old", "new")]
    return _finish(figure, facts, "Expert load of two checkpoints on the same tokens", text, handles)


def co_activation(table: pd.DataFrame, facts: Mapping[str, Any]) -> Figure:
    """Which experts are chosen together, in a few layers."""
    L, E, K = facts["num_layers"], facts["num_experts"], facts["top_k"]
    layers = sorted({round(place) for place in np.linspace(0, L - 1, min(MAPS, L))})
    part = table[(table["metric"] == "co_activation") & table["layer"].isin(layers)]
    top = float(part["value"].max())
    figure, axes = base.page(2, len(layers), width=3.6, height=3.0, sharex=True, sharey=True)
    colors = matplotlib.colormaps["viridis"].with_extremes(bad="#dddddd")
    edges = np.arange(E + 1) - 0.5
    for row, of in enumerate(("old", "new")):
        for column, layer in enumerate(layers):
            panel = axes[row, column]
            grid = _grid(part[(part["of"] == of) & (part["layer"] == layer)], "expert", "other", E)
            mesh = panel.pcolormesh(
                edges, edges, np.ma.masked_invalid(grid), cmap=colors, vmin=0, vmax=top or 1, rasterized=True
            )
            panel.set_facecolor("#dddddd")
            panel.set_title(f"{of}, layer {layer + 1}")
            panel.set_xlabel("other expert j" if row else "")
            panel.set_ylabel("expert i" if column == 0 else "")
            panel.grid(False)
            panel.invert_yaxis() if (row, column) == (0, 0) else None
            for axis in (panel.xaxis, panel.yaxis):
                axis.set_major_locator(MaxNLocator(5, integer=True))
    figure.colorbar(mesh, ax=axes, label="share of expert i's tokens that also chose j", aspect=30, pad=0.015)
    independent = f"{(K - 1) / (E - 1):.3f}" if E > 1 else "nothing"
    text = (
        "All pairs of a token's experts, whatever their rank. Experts of equal load that are chosen independently "
        f"share (K - 1)/(E - 1) = {independent} of their tokens. Grey: the diagonal, and experts without tokens."
    )
    return _finish(figure, facts, "Co-activation of experts", text)


# ------------------------------------------------------------------------------------------------------------- pieces
def _values(table: pd.DataFrame, of: str, metric: str) -> Array:
    """One number a layer."""
    part = table[(table["of"] == of) & (table["metric"] == metric)].sort_values("layer")
    return part["value"].to_numpy(dtype=float)


def _noise(table: pd.DataFrame, metric: str) -> Array:
    part = table[table["of"].str.startswith("noise/") & (table["metric"] == metric)]
    return part.groupby("layer")["value"].max().to_numpy(dtype=float)


def _grid(part: pd.DataFrame, rows: str, columns: str, size: int = 0) -> Array:
    """The values as a matrix, nan where there is none; square of `size` if given."""
    grid = part.pivot(index=rows, columns=columns, values="value")
    if size:
        grid = grid.reindex(index=range(size), columns=range(size))
    return grid.to_numpy(dtype=float)


def _log_line(axes: Axes, values: Array, floor: float, look: dict[str, Any]) -> None:
    """A line on a log axis; zeros are hollow marks on its foot."""
    places = np.arange(1, len(values) + 1)
    axes.plot(places, np.where(values > 0, values, floor), linewidth=2.2, markersize=6, zorder=3, **look)
    zeros = values == 0
    axes.plot(
        places[zeros],
        np.full(zeros.sum(), floor),
        linestyle="",
        marker=look["marker"],
        markersize=6,
        markeredgecolor=look["color"],
        markerfacecolor="white",
        zorder=4,
    )


def _deviation(axes: Axes, table: pd.DataFrame) -> None:
    part = table[(table["of"] == "change") & (table["metric"] == "deviation")].sort_values("changed")
    shares = part["value"].to_numpy(dtype=float)
    floor = log_floor([(shares, np.zeros(0))])
    axes.bar(np.arange(len(shares)), shares, color=LOOKS["change"]["color"], alpha=0.75, edgecolor="black")
    for place in np.flatnonzero(shares == 0):
        axes.annotate("0", (place, floor), (0, 3), textcoords="offset points", ha="center")
    axes.set_yscale("log")
    axes.set_ylim(floor, 1.5)
    axes.set_title("changed experts of a token and layer")
    axes.set_xlabel(f"experts that changed (of K = {len(shares) - 1})")
    axes.set_ylabel("share of tokens and layers")
    axes.xaxis.set_major_locator(MaxNLocator(9, integer=True))


def _layer_axis(axes: Axes, layers: int) -> None:
    axes.set_xlabel(LAYER)
    axes.set_xlim(0.5, layers + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))


def _finish(figure: Figure, facts: Mapping[str, Any], title: str, text: str, handles: Any = ()) -> Figure:
    """The page of a study's figures, for a study of one finished run."""
    names = {of: Path(facts[of]).name + ("" if facts[f"{of}_revision"] == "main" else f" {facts[f'{of}_revision']}")
             for of in ("old", "new")}  # fmt: skip
    run = {"arm": "comparison", "knobs": "default", "seed": 0, "state": "finished"}
    run |= {key: facts[key] for key in ("num_layers", "top_k", "num_experts")}
    none = pd.DataFrame()
    study = Study(Path(facts["out"]), pd.DataFrame([run]), none, none, none)
    about = (
        f"Old: {names['old']}; new: {names['new']}; {facts['tokens']} tokens of {facts['texts']} texts "
        f"({Path(facts['text']).name}), {facts['dtype']}. "
    )
    return base.finish(figure, study, title, about + text, handles)
