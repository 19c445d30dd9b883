"""Two checkpoints, the same text: what changed in the routing. One model in memory at a time.

old ──▶ routing ──▶ old.traces.parquet ─┐
                                        ├──▶ numbers.parquet ──▶ layers.csv, figures, the printed table
new ──▶ routing ──▶ new.traces.parquet ─┘
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from moe_rl.comparison import figures
from moe_rl.comparison.measuring import load_tokenizer, measure
from moe_rl.comparison.numbers import by_layer, tidy_table
from moe_rl.comparison.settings import Comparison, ComparisonError, help_text
from moe_rl.comparison.texts import read_texts, require_same, token_ids
from moe_rl.provenance import provenance
from moe_rl.routing_trace import RoutingError
from moe_rl.store import StoreError
from moe_rl.traces import read_header

__all__ = ["Comparison", "ComparisonError", "compare_checkpoints", "main"]


def compare_checkpoints(settings: Comparison) -> pd.DataFrame:
    """Measure, write everything to `settings.out`, and return the table by layer.

    Writes old.traces.parquet, new.traces.parquet, numbers.parquet (tidy), layers.csv, comparison.json and figures as
    png and svg. The folder appears when all is done. ComparisonError or RoutingError for what cannot be compared.
    """
    out = Path(settings.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ComparisonError(f"{out} exists already; set out=<a new folder>, or delete it")
    old, new = (load_tokenizer(name, settings.checkpoint(name)) for name in ("old", "new"))
    require_same(old, new)
    texts = read_texts(settings.text, settings.sequences)
    sequences = token_ids(old, texts, settings.max_tokens)
    if sequences != token_ids(new, texts, settings.max_tokens):
        raise ComparisonError("the tokenizers of old and new split this text differently; compare checkpoints of one")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise ComparisonError(f"cannot write {out}: {error.strerror}; set out=<a folder>") from error
    try:
        layers = _compare(settings, sequences, folder)
        folder.chmod(out.parent.stat().st_mode & 0o777)
        os.rename(folder, out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return layers


def _compare(settings: Comparison, sequences: list[list[int]], folder: Path) -> pd.DataFrame:
    old, new = (folder / f"{name}.traces.parquet" for name in ("old", "new"))
    noise, entropy_old = measure("old", settings, sequences, old, None)
    header = read_header(old)
    _, entropy_new = measure("new", settings, sequences, new, header)
    entropy = {} if entropy_old is None or entropy_new is None else {"old": entropy_old, "new": entropy_new}
    table = tidy_table(old, new, noise, entropy, settings.min_occurrences)
    table.to_parquet(folder / "numbers.parquet", compression="zstd", index=False)
    layers = by_layer(table, header)
    layers.to_csv(folder / "layers.csv", index=False)
    facts = {
        **dataclasses.asdict(settings),
        "model_class": header.model_class,
        "num_layers": len(header.layer_names),
        "top_k": header.top_k,
        "num_experts": header.num_experts,
        "texts": len(sequences),
        "tokens": sum(map(len, sequences)),
        **provenance(),
    }
    (folder / "comparison.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
    figures.draw_all(table, layers, facts, folder)
    return layers


# ------------------------------------------------------------------------------------------------------- command line
def main(arguments: Sequence[str]) -> int:
    """0, or 2 with one line on stderr for what the user can put right."""
    if {"-h", "--help"} & set(arguments):
        print(help_text())
        return 0
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        settings = Comparison.parse(arguments)
        layers = compare_checkpoints(settings)
    except (ComparisonError, RoutingError, StoreError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print_layers(layers, Console())
    for path in sorted(Path(settings.out).iterdir()):
        print(path)
    return 0


def print_layers(layers: pd.DataFrame, console: Console) -> None:
    """The table by layer, and the mean over layers."""
    shown = {"slot change": "slot_change", "noise": "noise_slot_change", "set change": "set_change"}
    shown |= {"noise ": "noise_set_change", "MaxVio": "max_violation", "dead": "dead_experts"}
    if "router_entropy_old" in layers:
        shown["entropy"] = "router_entropy"
    table = Table("layer", title=f"old to new; two unrelated routers: slot change {layers['unrelated'].iloc[0]:.1%}")
    for title in shown:
        table.add_column(title, justify="right")

    def cell(row: Any, column: str) -> str:
        if column in row:
            return f"{row[column]:.2%}"
        digits = 0 if column == "dead_experts" else 2
        return " > ".join(f"{row[f'{column}_{of}']:.{digits}f}" for of in ("old", "new"))

    for _, row in layers.iterrows():
        table.add_row(str(row["layer"] + 1), *(cell(row, column) for column in shown.values()))
    table.add_section()
    means = layers.mean(numeric_only=True)
    table.add_row("mean", *(cell(means, column) for column in shown.values()))
    console.print(table)
