"""Figures of two compared checkpoints, drawn from the tables of `numbers`. Imports no torch."""

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
from moe_rl.figures._maps import draw_map
from moe_rl.store import Study

Array = npt.NDArray[np.float64]
LOOKS: dict[str, Any] = {
    "old": {"color": "#D39A16", "linestyle": (0, (5, 1.6)), "marker": "s"},
    "new": {"color": "#004488", "linestyle": "-", "marker": "o"},
    "change": {"color": "#004488", "linestyle": "-", "marker": "o"},
    "noise": {"color": "#777777", "linestyle": (0, (1.2, 1.2)), "marker": "v"},
    "unrelated": {"color": "black", "linestyle": (0, (7, 2)), "marker": ""},
}
BAR: dict[str, Any] = {"color": "#004488", "alpha": 0.75, "edgecolor": "black"}
LAYER = "MoE layer (1 = nearest the input)"
MAPS = 4  # layers of which the co-activation is shown


def draw_all(table: pd.DataFrame, layers: pd.DataFrame, facts: Mapping[str, Any], folder: Path) -> None:
    """Write drift, load and co_activation as png and svg.

    table, layers: the tidy table and the one by layer. facts: as in comparison.json.
    """
    with matplotlib.rc_context(base.STYLE):
        figures = {
            "drift": drift(table, layers, facts),
            "load": load(table, layers, facts),
            "co_activation": co_activation(table, facts),
        }
    for name, figure in figures.items():
        base.save(figure, folder, name, ("png", "svg"))


def drift(table: pd.DataFrame, layers: pd.DataFrame, facts: Mapping[str, Any]) -> Figure:
    """What changed, beside the noise floor and two unrelated routers."""
    figure, axes = base.page(2, 2, width=5.0, height=3.4)
    K, E = facts["top_k"], facts["num_experts"]
    unrelated = {"slot_change": 1 - K / E, "set_change": 1 - 1 / math.comb(E, K)}
    for panel, (metric, baseline) in zip(axes[0], unrelated.items(), strict=True):
        lines = {"noise": layers[f"noise_{metric}"].to_numpy(), "change": layers[metric].to_numpy()}
        floor = log_floor([(lines["change"], lines["noise"])])
        panel.axhline(baseline, color="black", linestyle=LOOKS["unrelated"]["linestyle"], linewidth=1.5)
        for of, values in lines.items():
            _log_line(panel, values, floor, LOOKS[of])
        panel.set_yscale("log")
        panel.set_ylim(floor * 0.75, 1.5)
        _layer_axis(panel, layers)
    axes[0, 0].set(title="slot change", ylabel="share of expert slots")
    axes[0, 1].set(title="set change: any expert differs", ylabel="share of tokens")
    first = layers["first_changed"]
    axes[1, 0].bar(layers["layer"] + 1, first, **BAR)
    none = f"first changed layer (no layer changed: {max(0.0, 1 - first.sum()):.1%})"
    axes[1, 0].set(title=none, ylabel="share of tokens")
    _layer_axis(axes[1, 0], layers)
    _deviation(axes[1, 1], table[table["metric"].eq("deviation") & table["of"].eq("change")])
    text = (
        "Noise floor: the same old checkpoint computed otherwise (other batch size, more padding, decoding with a "
        "cache, other expert kernels), the largest at each layer. Unrelated routers: "
        f"1 - K/E = {unrelated['slot_change']:.3f} of slots. Hollow marks on the foot of a log axis: exactly 0."
    )
    labels = {"change": "old to new", "noise": "noise floor", "unrelated": "two unrelated routers"}
    return _finish(figure, facts, "Routing of the same tokens by two checkpoints", text, labels)


def load(table: pd.DataFrame, layers: pd.DataFrame, facts: Mapping[str, Any]) -> Figure:
    """How evenly each checkpoint uses its experts."""
    figure, axes = base.page(2, 2, width=5.0, height=3.4)
    for panel, metric in zip(axes[0], ("max_violation", "dead_experts"), strict=True):
        for of in ("old", "new"):
            panel.plot(layers["layer"] + 1, layers[f"{metric}_{of}"], linewidth=2.2, markersize=6, **LOOKS[of])
        _layer_axis(panel, layers)
        panel.set_ylim(bottom=0)
    axes[0, 0].set(title="MaxVio: largest over mean load, minus 1", ylabel="MaxVio")
    axes[0, 1].set(title="dead experts: chosen by no token", ylabel="experts")
    axes[0, 1].yaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    loads = table[table["metric"] == "load"]
    grids = {of: _grid(loads[loads["of"] == of], "layer", "expert") for of in ("old", "new")}
    grids = {of: grid / grid.mean(1, keepdims=True) for of, grid in grids.items()}
    top = max(float(grid.max()) for grid in grids.values())
    for panel, (of, grid) in zip(axes[1], grids.items(), strict=True):
        mesh = draw_map(panel, grid, top, first_row=1, ticks=7)
        panel.set(title=f"load of {of}", xlabel="expert", ylabel="MoE layer" if of == "old" else "")
    figure.colorbar(mesh, ax=axes[1], label="load / mean load", aspect=25, pad=0.015)
    text = f"MaxVio is 0 for an even load and at most E/K - 1 = {facts['num_experts'] / facts['top_k'] - 1:.3g}."
    title = "Expert load of two checkpoints on the same tokens"
    return _finish(figure, facts, title, text, {"old": "old", "new": "new"})


def co_activation(table: pd.DataFrame, facts: Mapping[str, Any]) -> Figure:
    """Which experts are chosen together, in a few layers."""
    L, E, K = facts["num_layers"], facts["num_experts"], facts["top_k"]
    layers = sorted({round(place) for place in np.linspace(0, L - 1, min(MAPS, L))})
    pairs = table[(table["metric"] == "co_activation") & table["layer"].isin(layers)]
    top = float(pairs["value"].max()) or 1
    figure, axes = base.page(2, len(layers), width=3.6, height=3.0, sharex=True, sharey=True)
    for row, of in enumerate(("old", "new")):
        for panel, layer in zip(axes[row], layers, strict=True):
            grid = _grid(pairs[(pairs["of"] == of) & (pairs["layer"] == layer)], "expert", "other", E)
            mesh = draw_map(panel, grid, top, first_row=0, ticks=5)
            panel.set_facecolor("#dddddd")
            panel.set(title=f"{of}, layer {layer + 1}", xlabel="other expert j" if row else "")
        axes[row, 0].set_ylabel("expert i")
    axes[0, 0].invert_yaxis()
    figure.colorbar(mesh, ax=axes, label="share of expert i's tokens that also chose j", aspect=30, pad=0.015)
    independent = f"{(K - 1) / (E - 1):.3f}" if E > 1 else "nothing"
    text = (
        "All pairs of a token's experts, whatever their rank. Experts of equal load that are chosen independently "
        f"share (K - 1)/(E - 1) = {independent} of their tokens. Grey: the diagonal, and experts without tokens."
    )
    return _finish(figure, facts, "Co-activation of experts", text, {})


# ------------------------------------------------------------------------------------------------------------- pieces
def _grid(part: pd.DataFrame, rows: str, columns: str, size: int = 0) -> Array:
    """The values as a matrix, nan where there is none; square of `size` if given."""
    grid = part.pivot(index=rows, columns=columns, values="value")
    if size:
        grid = grid.reindex(index=range(size), columns=range(size))
    return grid.to_numpy(dtype=float)


def _log_line(axes: Axes, values: Array, floor: float, look: dict[str, Any]) -> None:
    """A line on a log axis; zeros are hollow marks on its foot."""
    places, shown = np.arange(1, len(values) + 1), np.where(values > 0, values, floor)
    axes.plot(places, shown, linewidth=2.2, markersize=6, zorder=3, **look)
    zeros, hollow = values == 0, look | {"linestyle": "", "markerfacecolor": "white"}
    axes.plot(places[zeros], shown[zeros], markersize=6, zorder=4, **hollow)


def _deviation(axes: Axes, part: pd.DataFrame) -> None:
    shares = part.sort_values("changed")["value"].to_numpy(dtype=float)
    floor = log_floor([(shares, np.zeros(0))])
    axes.bar(np.arange(len(shares)), shares, **BAR)
    for place in np.flatnonzero(shares == 0):
        axes.annotate("0", (place, floor), (0, 3), textcoords="offset points", ha="center")
    axes.set_yscale("log")
    axes.set_ylim(floor, 1.5)
    changed = f"experts that changed (of K = {len(shares) - 1})"
    axes.set(title="changed experts of a token and layer", xlabel=changed, ylabel="share of tokens and layers")
    axes.xaxis.set_major_locator(MaxNLocator(9, integer=True))


def _layer_axis(axes: Axes, layers: pd.DataFrame) -> None:
    axes.set(xlabel=LAYER, xlim=(0.5, len(layers) + 0.5))
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))


def _finish(figure: Figure, facts: Mapping[str, Any], title: str, text: str, labels: Mapping[str, str]) -> Figure:
    """The page of a study's figures, for a study of one finished run; labels: legend entries by their looks."""
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
    handles = [Line2D([], [], label=label, linewidth=2.4, markersize=7, **LOOKS[of]) for of, label in labels.items()]
    return base.finish(figure, study, title, about + text, handles)
