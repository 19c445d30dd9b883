"""What all figures share: one style, one page layout, one way to save. How an arm looks: _looks.py."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from PIL import Image

from moe_rl import summary
from moe_rl.figures import _looks
from moe_rl.store import DONE, Study

FORMATS = ("png", "svg", "pdf")
NARROW = 4.1  # inches: the most that a panel is wide where blocks stand beside each other
TALL = 1.7  # times its width: what the panels of a page may be high before blocks stand beside each other
WIDE = 21.0  # inches: the most that a block's panels take beside each other
TITLE = 36  # letters in a line of a panel's title
COLORS = 128  # of a png: enough for lines and colour maps, and a third of the bytes
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


class FigureError(RuntimeError):
    """A figure that cannot be drawn as asked; the message says what to do."""


# --------------------------------------------------------------------------------------------------------------- page
def page(rows: int, columns: int, width: float = 4.1, height: float = 3.3, **subplots: Any) -> tuple[Figure, Any]:
    """A figure with rows x columns panels and its [rows, columns] axes; sizes in inches a panel."""
    figure = Figure(figsize=(max(7.2, columns * width), rows * height + 0.4), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **subplots)


def blocks(
    count: int, rows: int, columns: int, width: float = 4.1, height: float = 3.3, *, sharex: str = "", sharey: str = ""
) -> tuple[Figure, Any]:
    """A page of `count` blocks, one a knob setting, of rows x columns panels; returns its [count, rows, columns] axes.

    Blocks stand below each other, and beside each other where the page would be taller than TALL times its width; one
    that would be wider than WIDE, with a column an arm say, is broken into lines.
    sharex, sharey: 'row' for one range in each row of a block, 'all' for one in all panels, '' for a range each.
    """
    lines = math.ceil(columns * width / WIDE)
    line, across = -(-columns // lines), 1  # panels in a line of a block, blocks beside each other
    while across < count and lines == 1 and -(-count // across) * rows * height > TALL * across * line * width:
        across += 1
    down = -(-count * lines // across)
    figure, grid = page(down * rows, across * line, width if across == 1 else min(width, NARROW), height)
    panels = grid.reshape(down, rows, across, line).swapaxes(1, 2).reshape(-1, lines, rows, line)
    panels = panels.swapaxes(1, 2).reshape(-1, rows, lines * line)
    for spare in (*panels[count:].flat, *panels[:count, :, columns:].flat):
        spare.remove()
    panels = panels[:count, :, :columns]
    for how, share in ((sharex, Axes.sharex), (sharey, Axes.sharey)):
        for row in panels.reshape(count * rows, columns) if how else ():
            first = panels[0, 0, 0] if how == "all" else row[0]
            for panel in row:
                if panel is not first:
                    share(panel, first)
    if sharey:
        for panel in panels[:, :, np.arange(columns) % line > 0].flat:
            panel.tick_params(labelleft=False)
    return figure, panels


def finish(figure: Figure, study: Study, title: str, explanation: str, handles: Sequence[Any] = ()) -> Figure:
    """Title above, legend under it, and at the foot: how to read it, seeds, model, and every run that went wrong."""
    for panel in figure.axes:  # the second line of a broken block has the y label of the first
        place = panel.get_subplotspec()
        if place is not None and place.is_first_col() and not panel.get_ylabel():
            labels = (other.get_ylabel() for other in panel.get_shared_y_axes().get_siblings(panel))
            panel.set_ylabel(next(filter(None, labels), ""))
    width, height = figure.get_size_inches()
    notes = [f"Study {study.folder.name}; {model_text(study)}. {explanation}"]
    told = summary.incidents(study)
    if told:
        shown = told if len(told) <= 12 else [*told[:12], f"and {len(told) - 12} more, see summary.csv"]
        notes.append("Runs not finished: " + "; ".join(shown) + ".")
    text = "\n".join(line for note in notes for line in textwrap.wrap(note, int(width * 12.4)))
    # The layout engine keeps room for a supxlabel, and not for free text.
    figure.supxlabel(text, x=0.012, ha="left", fontsize=10.5, color="#333333", linespacing=1.25)
    lines = textwrap.wrap(title, int(width * 9))
    widest = max((len(str(handle.get_label())) for handle in handles), default=1)
    columns = min(len(handles), max(1, int(width / (0.85 + 0.095 * widest)))) or 1
    # It cannot stack a title and an outside legend: both stand in a strip of their own, above its rectangle.
    title_height, legend_height = 0.1 + 0.26 * len(lines), 0.05 + 0.25 * math.ceil(len(handles) / columns)
    strip = title_height + (legend_height if handles else 0)
    height += strip + 0.22 * text.count("\n")
    figure.set_size_inches(width, height)
    figure.suptitle("\n".join(lines), fontsize=15, y=1 - 0.08 / height).set_in_layout(False)
    if handles:
        figure.legend(
            handles=by_row(handles, columns),
            loc="upper center",
            ncols=columns,
            handlelength=3.4,
            bbox_to_anchor=(0, 0, 1, 1 - title_height / height),
            borderaxespad=0.0,
        ).set_in_layout(False)
    figure.set_layout_engine(ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.08, rect=(0, 0, 1, 1 - strip / height)))
    return figure


def by_row(handles: Sequence[Any], columns: int) -> list[Any]:
    """In the order in which a legend of so many columns reads row by row: matplotlib fills column by column."""
    return [handle for column in range(columns) for handle in handles[column::columns]]


def side_by_side(study: Study) -> Study:
    """The study as figures show it: where every arm has one setting, its own, they stand together as one setting.

    Each arm's setting is then in the column `own` of runs, and told beside its name.
    """
    settings = {arm: set(study.runs[study.runs["arm"] == arm]["knobs"]) for arm in summary.arms_of(study)}
    if any(len(own) > 1 for own in settings.values()) or len(set.union(*settings.values())) < 2:
        return study
    tables = {name: getattr(study, name).assign(knobs="own") for name in ("steps", "updates", "drift")}
    return dataclasses.replace(study, runs=study.runs.assign(own=study.runs["knobs"], knobs="own"), **tables)


def named(study: Study, arm: str, knobs: Sequence[str]) -> str:
    """'arm (n = 3)', or 'arm, lr=0.1 (n = 3)' where every arm has a setting of its own."""
    runs = study.runs
    own = summary.knob_label(runs[runs["arm"] == arm]["own"].iloc[0], set(runs["own"])) if "own" in runs else ""
    return f"{arm}, {own} ({counts(study, arm, knobs)})" if own else f"{arm} ({counts(study, arm, knobs)})"


def models_of(study: Study) -> list[tuple[int, int, int]]:
    """The different (L, K, E) of the study's models; L = 0 is dense."""
    runs = study.runs.reindex(columns=["num_layers", "top_k", "num_experts"]).dropna().astype(int).drop_duplicates()
    return sorted(runs.itertuples(index=False, name=None))


def model_text(study: Study) -> str:
    """The models in words: 'L = 12 MoE layers, K = 2 of E = 32 experts'."""
    told = [f"L = {n} MoE layers, K = {k} of E = {e} experts" if n else "dense model" for n, k, e in models_of(study)]
    return "model unknown" if not told else " and ".join(told) if len(told) < 4 else f"{len(told)} models"


def short_model(study: Study) -> str:
    """For a title: ' (L = 12, K = 2, E = 32)', nothing when the study has several models."""
    models = models_of(study)
    return " (L = {}, K = {}, E = {})".format(*models[0]) if len(models) == 1 else ""


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
    return f"n = {between(done)}" + (f", {diverged} diverged" if diverged else "")


def between(numbers: Iterable[int]) -> str:
    """'700', or '650 to 700' where they differ."""
    known = [int(number) for number in numbers]
    return f"{min(known)}" if min(known) == max(known) else f"{min(known)} to {max(known)}"


def panel_title(study: Study, arm: str, knobs: str) -> str:
    """'arm (n = 3)' with the knob setting below it when the study has several."""
    return titled(named(study, arm, [knobs]), summary.knob_label(knobs, summary.knobs_of(study)))


def titled(text: str, label: str) -> str:
    """A panel's title with its knob setting, '' for none, on lines of its own, broken after commas."""
    lines = [text]
    for pair in label.split(", ") if label else []:
        if len(lines) > 1 and len(lines[-1]) + len(pair) + 2 <= TITLE:
            lines[-1] += f", {pair}"
        else:
            lines.append(pair)
    return "\n".join(lines)


def arm_handles(study: Study) -> list[Line2D]:
    """Legend entries, one an arm, with the number of seeds."""
    knobs, handles = summary.knobs_of(study), []
    for arm in summary.arms_of(study):
        look, label = _looks.look(arm), named(study, arm, knobs)
        handles.append(Line2D([], [], label=label, linewidth=2.4, markersize=7, **look.as_line))
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


def at_step_ends(study: Study, rows: pd.DataFrame, arm: str, knobs: str) -> pd.DataFrame:
    """An arm's rows at a setting with `updates` = step · M, whatever update of the step they are of."""
    return rows.assign(updates=rows["step"].astype(int) * fact(study, arm, knobs, "updates_per_step"))


def measured(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """The rows in which a quantity was measured that is not measured at every step, or not in every family."""
    return table[table[column].map(lambda value: isinstance(value, list) or value == value)].copy()


# ------------------------------------------------------------------------------------------------------------- saving
def freeze(figure: Figure) -> None:
    """Lay the figure out once and for all: every further pass of the layout engine would move things by a hair.

    Without any engine, so that saving draws the figure once and not twice.
    """
    engine = figure.get_layout_engine()
    if engine is not None:
        with matplotlib.rc_context(STYLE):
            engine.execute(figure)
            figure.set_layout_engine(None)


def save(figure: Figure, folder: Path, name: str, formats: Iterable[str]) -> list[Path]:
    """Write folder/name.<format>, the format one of FORMATS; equal figures give equal bytes."""
    paths = []
    freeze(figure)
    folder.mkdir(parents=True, exist_ok=True)
    for kind in formats:
        path = folder / f"{name}.{kind}"
        with matplotlib.rc_context(STYLE):
            figure.savefig(path, format=kind, metadata=METADATA[kind])
        if kind == "png":
            with Image.open(path) as picture:
                picture.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE).save(path, optimize=True)
        paths.append(path)
    return paths
