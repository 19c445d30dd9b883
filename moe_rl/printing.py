"""A study's summary as text: the table, how the arms differ, and what went wrong. No torch."""

from __future__ import annotations

import sys
from typing import IO

import numpy as np
import pandas as pd

from moe_rl import contrasts, stats, summary
from moe_rl.store import Study

INTERQUARTILE = "interquartile mean [95 %]"


def _cell(value: float, digits: int = 3) -> str:
    return "-" if not np.isfinite(value) else f"{value:.{digits}g}"


def summary_rows(table: pd.DataFrame) -> list[list[str]]:
    """The summary as text, header first; the columns that a reader needs side by side."""
    measure = table["measure"].iloc[0].replace("_", " ")
    rows = [
        [
            "arm",
            "knobs",
            "seeds",
            "finished",
            "diverged",
            "failed",
            "collapsed",
            f"final {measure} [95 %]",
            *([INTERQUARTILE] if table["iqm"].notna().any() else []),
            "slot change / update",
            "noise floor",
            "tokens clipped",
            "CPU s",
        ]
    ]
    for row in table.to_dict("records"):
        final = str(stats.Estimate(row["final_reward"], row["final_low"], row["final_high"], row["finished"]))
        counts = [str(row[key]) for key in ("seeds", "finished", "diverged", "failed", "collapsed")]
        numbers = [_cell(row[name]) for name in ("slot_change", "noise_floor")]
        numbers += [_cell(row["clip_frac"], 2), _cell(row["cpu_s"])]
        knobs = summary.knob_label(row["knobs"], table["knobs"]) or "-"
        iqm = stats.Estimate(row["iqm"], row["iqm_low"], row["iqm_high"], row["finished"])
        middle = ["" if np.isnan(iqm.value) else str(iqm)] if INTERQUARTILE in rows[0] else []
        rows.append([row["arm"], knobs, *counts, final if row["finished"] else "-", *middle, *numbers])
    return rows


def print_summary(study: Study, file: IO[str] | None = None) -> None:
    """Print the summary, the paired differences and what went wrong; a table on a terminal, plain text elsewhere."""
    out = file or sys.stdout
    rows = summary_rows(summary.summary_table(study))
    if out.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(*rows[0], title=f"study {study.folder.name}")
        for row in rows[1:]:
            table.add_row(*row)
        Console(file=out).print(table)
    else:
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        for row in rows:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip(), file=out)
    for row in [
        *contrasts.comparison_table(study).to_dict("records"),
        *contrasts.setting_table(study).to_dict("records"),
    ]:
        difference = stats.Estimate(row["difference"], row["low"], row["high"], row["n"])
        p = "" if np.isnan(row["p"]) else f", p = {row['p']:.2g} (paired t, Holm)"
        print(f"{contrasts.pair_label(study, row)}: {difference}{p}; {row['claim']}", file=out)
    for told in summary.incidents(study):
        print(f"note: {told}", file=out)
    print("Means are over finished runs; diverged and failed runs are counted, not averaged.", file=out)
