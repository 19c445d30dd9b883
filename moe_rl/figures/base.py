"""The look that all figures share: one style per arm, one page layout, one way to save."""

from __future__ import annotations

import hashlib
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from moe_rl import stats, summary
from moe_rl.store import DONE, Study

FORMATS = ("png", "svg", "pdf")
STYLE: Any = {  # rcParams
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.labelsize": 13,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 13,
    "figure.dpi": 100,
    "font.family": "DejaVu Sans",
    "font.size": 12,
    "grid.alpha": 0.25,
    "legend.fontsize": 12,
    "legend.frameon": False,
    "pdf.fonttype": 42,
    "savefig.dpi": 150,
    "svg.fonttype": "path",
    "svg.hashsalt": "moe_rl",
    "xtick.labelsize": 11.5,
    "ytick.labelsize": 11.5,
}
METADATA: dict[str, dict[str, Any]] = {  # nothing that changes between two savings of the same figure
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
CURVES = (
    "Thin: single seeds (X: diverged, |: failed or cut off). Thick: mean over runs with a result, up to where the "
    "first one diverges. Bands: 95 % t interval over seeds, cut at the axis."
)


class FigureError(RuntimeError):
    """A figure that cannot be drawn as asked; the message says what to do."""


# --------------------------------------------------------------------------------------------------- one look per arm
class Look(NamedTuple):
    """Colour, line style and marker of an arm. Any one of the three is enough to tell the known arms apart."""

    color: str
    line: Any
    marker: str


# Red, yellow and blue of Paul Tol's high-contrast scheme, the yellow darkened for thin lines: safe for colour-blind
# readers, and three clearly different greys in print.
KNOWN = {
    "grpo": Look("#BB5566", "-", "o"),
    "grpo_routing_replay": Look("#D39A16", (0, (5, 1.6)), "s"),
    "gspo": Look("#004488", (0, (6, 1.5, 1.2, 1.5)), "^"),
}
SPARE_COLORS = ("#117733", "#882255", "#44AA99", "#332288", "#999933", "#AA4499", "#555555")
SPARE_LINES = ((0, (1.2, 1.2)), (0, (3, 1.2)), (0, (7, 2)), (0, (5, 1.2, 1.2, 1.2, 1.2, 1.2)))
SPARE_MARKERS = ("D", "v", "P", "X", "<", ">", "p", "h")


def look(arm: str) -> Look:
    """An arm's look. It depends on the name alone, so an arm looks the same in every figure of every study."""
    if arm in KNOWN:
        return KNOWN[arm]
    digest = hashlib.sha256(arm.encode()).digest()
    return Look(
        SPARE_COLORS[digest[0] % len(SPARE_COLORS)],
        SPARE_LINES[digest[1] % len(SPARE_LINES)],
        SPARE_MARKERS[digest[2] % len(SPARE_MARKERS)],
    )


# --------------------------------------------------------------------------------------------------------------- page
def page(rows: int, columns: int, width: float = 4.1, height: float = 3.3, **subplots: Any) -> tuple[Figure, Any]:
    """A figure with rows x columns panels and its [rows, columns] axes; sizes in inches a panel."""
    engine = ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.08)
    figure = Figure(figsize=(max(7.2, columns * width), rows * height + 1.7), layout=engine)
    return figure, figure.subplots(rows, columns, squeeze=False, **subplots)


def finish(figure: Figure, study: Study, title: str, explanation: str, handles: Sequence[Any] = ()) -> Figure:
    """Title above, legend under it, and at the foot: how to read it, seeds, model, and every run that went wrong."""
    wide = int(figure.get_figwidth() * 12.2)
    notes = [f"Study {study.folder.name}; {model_text(study)}. {explanation}"]
    told = summary.incidents(study)
    if told:
        shown = told if len(told) <= 12 else [*told[:12], f"and {len(told) - 12} more, see summary.csv"]
        notes.append("Runs not finished: " + "; ".join(shown) + ".")
    text = "\n".join(line for note in notes for line in textwrap.wrap(note, wide))
    # The layout engine keeps room for a supxlabel, and not for free text.
    figure.supxlabel(text, x=0.012, ha="left", fontsize=10.5, color="#333333", linespacing=1.25)
    lines = textwrap.wrap(title, int(figure.get_figwidth() * 9))
    figure.suptitle("\n".join(lines), fontsize=15)
    if handles:
        widest = max(len(str(handle.get_label())) for handle in handles)
        columns = min(len(handles), max(1, int(figure.get_figwidth() / (0.85 + 0.095 * widest))))
        below = 1 - (0.12 + 0.25 * len(lines)) / figure.get_figheight()  # an outside legend would cover the title
        figure.legend(handles=list(handles), loc="outside upper center", ncols=columns, handlelength=3.4,
                      bbox_to_anchor=(0, 0, 1, below), borderaxespad=0.2)
    return figure


def model_text(study: Study) -> str:
    """The models' L, K and E: 'L = 12 MoE layers, K = 2 of E = 32 experts'."""
    runs = study.runs.reindex(columns=["num_layers", "top_k", "num_experts"]).dropna().astype(int).drop_duplicates()
    told = [f"L = {layers} MoE layers, K = {k} of E = {e} experts" if layers else "dense model"
            for layers, k, e in runs.itertuples(index=False)]
    return "model unknown" if not told else " and ".join(sorted(told)) if len(told) < 4 else f"{len(told)} models"


def fact(study: Study, arm: str, knobs: str, name: str) -> int:
    """A whole number of run.json, the same in all runs of this arm and setting; 0 when no run has it.

    Errors: FigureError when the runs disagree.
    """
    runs = study.runs[(study.runs["arm"] == arm) & (study.runs["knobs"] == knobs)]
    values = set(runs[name].dropna().astype(int)) if name in runs else set()
    if len(values) > 1:
        raise FigureError(f"{name} is {sorted(values)} within {arm}/{knobs}; seeds of one setting must share it")
    return values.pop() if values else 0


def counts(study: Study, arm: str, knobs: Sequence[str]) -> str:
    """'n = 3' or 'n = 3, 1 diverged': runs with a result at these settings (a range when the settings differ)."""
    done = [len(averaged(study, arm, setting)) for setting in knobs]
    diverged = sum(len(summary.runs_in(study, arm, setting, ["diverged"])) for setting in knobs)
    n = f"{min(done)}" if min(done) == max(done) else f"{min(done)} to {max(done)}"
    return f"n = {n}" + (f", {diverged} diverged" if diverged else "")


def panel_title(study: Study, arm: str, knobs: str) -> str:
    """'arm (n = 3)' with the knob setting on a second line when the study has several."""
    label = summary.knob_label(knobs, summary.knobs_of(study))
    return f"{arm} ({counts(study, arm, [knobs])})" + (f"\n{label}" if label else "")


def arm_handles(study: Study) -> list[Line2D]:
    """Legend entries, one an arm, with the number of seeds."""
    knobs, handles = summary.knobs_of(study), []
    for arm in summary.arms_of(study):
        style, label = look(arm), f"{arm} ({counts(study, arm, knobs)})"
        handles.append(Line2D([], [], color=style.color, linestyle=style.line, marker=style.marker, label=label,
                              linewidth=2.4, markersize=7))
    return handles


def finished(study: Study, arm: str, knobs: str) -> list[int]:
    """Seeds whose run finished: what bars and mean lines after a divergence are over."""
    return summary.runs_in(study, arm, knobs, ["finished"])


def averaged(study: Study, arm: str, knobs: str) -> list[int]:
    """Seeds whose run ended with a result, finished or diverged: a mean line over them ends where one diverges."""
    return summary.runs_in(study, arm, knobs, DONE)


def rows_of(study: Study, table: pd.DataFrame, arm: str, knobs: str) -> pd.DataFrame:
    """An arm's rows at a setting, with a column `updates`: gradient updates since the start.

    (step - 1) · M + update where the table has a row an update, step · M where it has a row a step.
    """
    rows = table[(table["arm"] == arm) & (table["knobs"] == knobs)].copy()
    per_step = fact(study, arm, knobs, "updates_per_step")
    if len(rows) and not per_step:
        raise FigureError(f"run.json of {arm}/{knobs} lacks updates_per_step (M); run it again")
    steps = rows["step"].astype(int)
    rows["updates"] = (steps - 1) * per_step + rows["update"].astype(int) if "update" in rows else steps * per_step
    return rows


# ------------------------------------------------------------------------------------------------------------- curves
def curves(frame: pd.DataFrame, x: str, y: str, sparse: bool = False) -> dict[int, pd.Series]:
    """Seed -> y against x, mean over rows of equal x, cut before its first value that is not finite: lines stop there.

    With `sparse`, absent values (a quantity not measured at every step) are skipped first.
    """
    found: dict[int, pd.Series] = {}
    for seed, rows in frame.groupby("seed"):
        values = rows.groupby(x)[y].agg(lambda column: column.astype(float).mean(skipna=False)).sort_index()
        values = values.dropna() if sparse else values
        broken = np.flatnonzero(~np.isfinite(values.to_numpy(dtype=float)))
        values = values.iloc[: broken[0]] if len(broken) else values
        if len(values):
            found[int(seed)] = values
    return found


def mean_curve(by_seed: dict[int, pd.Series], seeds: Iterable[int]) -> pd.DataFrame:
    """Mean and t interval over `seeds` at every x that all of them reached: columns mean, low, high; index x."""
    chosen = [by_seed[seed] for seed in seeds if seed in by_seed]
    if not chosen:
        return pd.DataFrame(columns=["mean", "low", "high"], dtype=float)
    together = pd.concat(chosen, axis=1, join="inner").sort_index()
    rows = [stats.mean_interval(row) for row in together.to_numpy(dtype=float)]
    return pd.DataFrame([(e.value, e.low, e.high) for e in rows], index=together.index, columns=["mean", "low", "high"])


def mean_parts(by_seed: dict[int, pd.Series], study: Study, arm: str, knobs: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The mean over all runs up to the first divergence, and after it the mean over the runs that finished."""
    whole = mean_curve(by_seed, averaged(study, arm, knobs))
    rest = mean_curve(by_seed, finished(study, arm, knobs))
    return whole, rest[rest.index > whole.index.max()] if len(whole) else rest


def draw_arm(axes: Axes, study: Study, arm: str, knobs: str, by_seed: dict[int, pd.Series]) -> None:
    """Thin line a seed (X where it diverged, | where it stopped unfinished), thick mean with its band."""
    style, good = look(arm), set(finished(study, arm, knobs))
    diverged = set(summary.runs_in(study, arm, knobs, ["diverged"]))
    for seed, values in by_seed.items():
        axes.plot(values.index, values, color=style.color, linewidth=0.8, alpha=0.5, zorder=2)
        if seed not in good:
            mark: dict[str, Any] = {"marker": "|", "markersize": 15, "markeredgewidth": 2.5}
            if seed in diverged:
                mark = {"marker": "X", "markersize": 11, "markeredgecolor": "black"}
            axes.plot(values.index[-1], values.iloc[-1], color=style.color, zorder=5, **mark)
    mean = mean_curve(by_seed, averaged(study, arm, knobs))
    if len(mean):
        every = max(1, len(mean) // 7)
        marks = (sum(arm.encode()) % every, every)  # arms mark different points
        axes.plot(mean.index, mean["mean"], color=style.color, linestyle=style.line, linewidth=2.4, zorder=4,
                  marker=style.marker, markersize=6.5, markevery=marks)
        axes.fill_between(mean.index, mean["low"], mean["high"], color=style.color, alpha=0.13, linewidth=0, zorder=1)


def fit_to_lines(panels: Iterable[Axes], least: float | None = None) -> None:
    """One y range for `panels`, from their lines: an interval over two or three seeds can be wider than all else."""
    together = list(panels)
    lines = [np.asarray(line.get_ydata(), dtype=float) for axes in together for line in axes.lines
             if line.get_transform().contains_branch_seperately(axes.transData)[1]]  # not the vertical marks
    values = np.concatenate([*lines, np.zeros(0)])
    values = values[np.isfinite(values)]
    if len(values):
        margin = 0.2 * (values.max() - values.min()) or 0.1 * abs(values.max()) or 0.1
        low = values.min() - margin
        for axes in together:
            axes.set_ylim(low if least is None else max(low, least), values.max() + margin)


# ------------------------------------------------------------------------------------------------------------- saving
def save(figure: Figure, folder: Path, name: str, formats: Iterable[str]) -> list[Path]:
    """Write folder/name.<format>; equal figures give equal bytes. Errors: FigureError for a format not in FORMATS."""
    paths = []
    folder.mkdir(parents=True, exist_ok=True)
    for kind in formats:
        if kind not in FORMATS:
            raise FigureError(f"no figure format {kind!r}; choose from {', '.join(FORMATS)}")
        path = folder / f"{name}.{kind}"
        with matplotlib.rc_context(STYLE):
            figure.savefig(path, format=kind, metadata=METADATA[kind])
        paths.append(path)
    return paths
