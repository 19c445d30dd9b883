"""What a person sees while runs go on: a live table on a terminal, plain lines in a log."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from moe_rl.store import DONE, StoreError, read_status, state_of
from moe_rl.summary import knob_label

LINES_PER_RUN = 5


def time_left(status: dict[str, Any]) -> float:
    """Seconds that a run still needs at its pace so far; nan before its first step."""
    step, steps = status.get("step", 0), status.get("steps", 0)
    return status["wall_s"] / step * (steps - step) if step and steps else float("nan")


def clock(seconds: float) -> str:
    return "" if seconds != seconds else f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def counted(runs: int, done: int) -> str:
    """How many runs a sweep has, and how many of them are there already."""
    return f"{runs} run{'' if runs == 1 else 's'}" + (f", {done} finished before" if done else "")


class Board:
    """The runs of a sweep, read from their folders."""

    def __init__(self, folders: list[Path], shown: bool):
        self.folders, self.shown = folders, shown
        self.console = Console()
        self.live = Live(console=self.console, auto_refresh=False) if shown and self.console.is_terminal else None
        self.said: dict[Path, tuple[str, int]] = {}
        self.began = time.monotonic()

    def __enter__(self) -> Board:
        if self.live:
            self.live.start()
        elif self.shown:
            done = sum(state_of(folder) in DONE for folder in self.folders)
            self.console.print(counted(len(self.folders), done), highlight=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.refresh()
        if self.live:
            self.live.stop()

    def refresh(self) -> None:
        """Show the present state."""
        if self.shown:
            rows = {folder: status_of(folder) for folder in self.folders}
            if self.live:
                self.live.update(table_of(rows, f"{clock(time.monotonic() - self.began)} elapsed"), refresh=True)
            else:
                self._lines(rows)

    def _lines(self, rows: dict[Path, dict[str, Any]]) -> None:
        names = names_of(rows)
        for folder, status in rows.items():
            state, step, steps = status["state"], status.get("step", 0), status.get("steps", 0)
            part = step * LINES_PER_RUN // steps if steps else 0
            if state != "missing" and steps and self.said.get(folder) != (state, part):
                self.said[folder] = (state, part)
                number, reward, drift, left = cells(status)
                parts = [f"{names[folder]}: {state}", f"step {number}", reward and f"reward {reward}"]
                parts += [drift and f"slot change {drift}", left and f"{left} left"]
                self.console.print(", ".join(part for part in parts if part), highlight=False, soft_wrap=True)


def status_of(folder: Path) -> dict[str, Any]:
    """status.json of a run with its state as it is now; `damaged` if it cannot be read."""
    try:
        return {**read_status(folder), "state": state_of(folder)}
    except StoreError:
        return {"state": "damaged"}


def table_of(rows: dict[Path, dict[str, Any]], title: str) -> Table:
    """The runs that were begun, one a line, with the reason of those that went wrong."""
    names, done = names_of(rows), sum(status["state"] in DONE for status in rows.values())
    table = Table(title=f"{done} of {len(rows)} runs done, {title}")
    for name in ("run", "state", "step", "reward", "slot change", "time left", "reason"):
        table.add_column(name, justify="left" if name in ("run", "state", "reason") else "right")
    for folder, status in rows.items():
        if status["state"] != "missing":
            table.add_row(names[folder], status["state"], *cells(status), str(status.get("reason", "")))
    return table


def names_of(folders: Iterable[Path]) -> dict[Path, str]:
    """What to call each run among these: its arm, the settings that not all of them share, its seed."""
    parts = {folder: folder.parts[-3:] for folder in folders}
    everywhere = {knobs for _, knobs, _ in parts.values()}
    labels = {knobs: knob_label(knobs, everywhere) for knobs in everywhere}
    return {
        folder: " ".join(filter(None, [arm, labels[knobs], seed.replace("_", " ")]))
        for folder, (arm, knobs, seed) in parts.items()
    }


def cells(status: dict[str, Any]) -> tuple[str, str, str, str]:
    """step, reward, slot change and time left of a run, as text."""

    def number(key: str, digits: str) -> str:
        value = status.get(key)
        return format(float(value), digits) if value is not None else ""

    left = clock(time_left(status)) if status["state"] == "running" else ""
    return (
        f"{status.get('step', 0)}/{status.get('steps', '?')}",
        number("reward", ".3f"),
        number("slot_change", ".2%"),
        left,
    )
