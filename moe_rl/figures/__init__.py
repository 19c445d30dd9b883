"""Figures of a study: one file a figure. The file's stem is its name, its docstring's first sentence its caption.

A new figure is a new file here with `draw(study) -> Figure | None`; None says that the study has no such data.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType

import matplotlib
from matplotlib.figure import Figure

from moe_rl import summary
from moe_rl.figures.base import FORMATS, STYLE, FigureError, save, side_by_side
from moe_rl.store import Study, read_study

__all__ = ["FORMATS", "FigureError", "caption", "draw", "draw_all", "names"]


def names() -> list[str]:
    """All figures, by walking this package; `base` and files whose name starts with _ are what they share."""
    found = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(name for name in found if name != "base" and not name.startswith("_"))


def _module(name: str) -> ModuleType:
    if name not in names():
        raise FigureError(f"no figure {name!r}; there are {', '.join(names())}")
    return importlib.import_module(f"{__name__}.{name}")


def caption(name: str) -> str:
    """The first sentence of a figure's docstring, on one line."""
    text = " ".join((_module(name).__doc__ or "").split())
    if not text:
        raise FigureError(f"moe_rl/figures/{name}.py has no docstring; its first sentence is the caption")
    return re.split(r"(?<=\.)\s+(?=[A-Z])", text)[0]


def draw(name: str, study: Study) -> Figure | None:
    """One figure in the shared style, or None when the study has no such data."""
    with matplotlib.rc_context(STYLE):
        figure: Figure | None = _module(name).draw(side_by_side(study))
    return figure


def draw_all(
    folder: str | Path, only: Sequence[str] = (), formats: Iterable[str] = ("png", "svg")
) -> tuple[Study, list[Path]]:
    """Draw a study's figures into <folder>/figures/ and write <folder>/summary.csv; returns the study and the paths.

    `only` names the figures to draw. A figure without data is not drawn, and an older picture of it is deleted.
    Errors: StoreError for a folder without runs, FigureError for an unknown name or format.
    """
    chosen, formats = list(only) or names(), list(formats)
    for name in chosen:
        _module(name)
    for kind in set(formats) - set(FORMATS):
        raise FigureError(f"no figure format {kind!r}; choose from {', '.join(FORMATS)}")
    study = read_study(folder)
    summary.summary_table(study).to_csv(study.folder / "summary.csv", index=False)
    written = [study.folder / "summary.csv"]
    for name in chosen:
        figure = draw(name, study)
        if figure is None:
            for kind in FORMATS:
                (study.folder / "figures" / f"{name}.{kind}").unlink(missing_ok=True)
        else:
            written += save(figure, study.folder / "figures", name, formats)
    return study, written
