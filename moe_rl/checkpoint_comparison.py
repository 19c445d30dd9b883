"""Two checkpoints, the same text: what changed in the routing. One model in memory at a time.

old ──▶ routing ──▶ old.traces.parquet ─┐
                                        ├──▶ numbers.parquet ──▶ layers.csv, figures, the printed table
new ──▶ routing ──▶ new.traces.parquet ─┘
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from moe_rl import comparison_figures, comparison_numbers
from moe_rl.comparison_settings import Comparison, ComparisonError
from moe_rl.comparison_texts import read_texts, require_same, token_ids
from moe_rl.models.build import Checkpoint
from moe_rl.models.families import find_routers
from moe_rl.noise_floor import noise_floor
from moe_rl.policy import routing_of
from moe_rl.provenance import provenance
from moe_rl.recording import record
from moe_rl.records import RoutingError
from moe_rl.routing_metrics import router_entropy
from moe_rl.traces import TraceHeader, TraceWriter, read_header

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclasses.dataclass(frozen=True)
class Measured:
    """noise: rows of `noise_floor`. entropy_L: nats, where asked for."""

    noise: list[dict[str, Any]]
    entropy_L: Tensor | None


def compare_checkpoints(settings: Comparison) -> pd.DataFrame:
    """Measure, write everything to `settings.out`, and return the table by layer.

    Writes old.traces.parquet, new.traces.parquet, numbers.parquet (tidy), layers.csv, comparison.json and figures as
    png and svg. The folder appears when all is done. ComparisonError or RoutingError for what cannot be compared.
    """
    out = Path(settings.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ComparisonError(f"{out} exists already; set out=<a new folder>, or delete it")
    checkpoints = {name: settings.checkpoint(name) for name in ("old", "new")}
    tokenizers = {name: load_tokenizer(name, checkpoint) for name, checkpoint in checkpoints.items()}
    require_same(tokenizers["old"], tokenizers["new"])
    texts = read_texts(settings.text, settings.sequences)
    sequences = token_ids(tokenizers["old"], texts, settings.max_tokens)
    if sequences != token_ids(tokenizers["new"], texts, settings.max_tokens):
        raise ComparisonError("the tokenizers of old and new split this text differently; compare checkpoints of one")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise ComparisonError(f"cannot write {out}: {error.strerror}; set out=<a folder>") from error
    try:
        table = _compare(settings, checkpoints, sequences, folder)
        folder.chmod(out.parent.stat().st_mode & 0o777)
        os.rename(folder, out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return table


def _compare(
    settings: Comparison, checkpoints: dict[str, Checkpoint], sequences: list[list[int]], folder: Path
) -> pd.DataFrame:
    paths = {name: folder / f"{name}.traces.parquet" for name in checkpoints}
    measured: dict[str, Measured] = {}
    for name, checkpoint in checkpoints.items():
        reference = read_header(paths["old"]) if measured else None
        measured[name] = measure(name, checkpoint, settings, sequences, paths[name], reference)
    entropy = {name: each.entropy_L for name, each in measured.items() if each.entropy_L is not None}
    noise = measured["old"].noise
    table = comparison_numbers.numbers(paths["old"], paths["new"], noise, entropy, settings.min_occurrences)
    table.to_parquet(folder / "numbers.parquet", compression="zstd", index=False)
    header = read_header(paths["old"])
    layers = comparison_numbers.by_layer(table, header.layer_names, header.top_k, header.num_experts)
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
    comparison_figures.draw_all(table, facts, folder)
    return layers


# ------------------------------------------------------------------------------------------------------------ measuring
def load_tokenizer(name: str, checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    """The tokenizer alone: what is missing or does not fit shows before any weights are read."""
    from transformers import AutoTokenizer

    path = Path(checkpoint.path).expanduser()
    if not path.is_dir() and (checkpoint.path.startswith(("/", ".", "~")) or checkpoint.path.count("/") != 1):
        raise ComparisonError(f"{name}: there is no folder {checkpoint.path!r}; give a checkpoint's folder or a hub id")
    source = str(path) if path.is_dir() else checkpoint.path
    try:
        return AutoTokenizer.from_pretrained(source, revision=checkpoint.revision, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ComparisonError(f"{name}: cannot load the tokenizer of {checkpoint.path!r}: {reason}") from error


def measure(
    name: str,
    checkpoint: Checkpoint,
    settings: Comparison,
    sequences: list[list[int]],
    path: Path,
    reference: TraceHeader | None,
) -> Measured:
    """Write the routing of one checkpoint on all sequences to `path`; the model is gone afterwards.

    reference: what the other checkpoint's file says. The noise floor is measured where there is none yet.
    ComparisonError for a dense model, one of another architecture, and texts that are too long for it.
    """
    try:
        model, _ = checkpoint.build(seed=0)
    except ValueError as error:
        raise ComparisonError(f"{name}: {str(error).replace('model.path', name)}") from error
    try:
        header = describe(name, model)
        if reference is not None:
            require_same_architecture(reference, header)
        longest, limit = max(map(len, sequences)), getattr(model.config.get_text_config(), "max_position_embeddings", 0)
        if limit and longest > limit:
            raise ComparisonError(f"{name} was made for {limit} tokens, a text has {longest}; set max_tokens={limit}")
        model.to(settings.device)
        writer = TraceWriter(path, header.layer_names, header.num_experts, header.top_k, header.model_class)
        entropy_L = torch.zeros(len(header.layer_names), dtype=torch.float64)
        with writer, torch.no_grad():
            for first in range(0, len(sequences), settings.batch_size):
                tokens_BS, attention_BS = left_padded(sequences[first : first + settings.batch_size], settings.device)
                with record(model, router_logits=settings.router_logits, source=name) as recorder:
                    routing_of(model, tokens_BS, attention_BS)
                trace = recorder.trace
                numbers = range(first, first + len(tokens_BS))
                writer.add(trace, attention_BS, step=0, sequences=numbers, tokens_BS=tokens_BS)
                if trace.router_logits_BSLE is not None:
                    logits_NLE = trace.router_logits_BSLE[trace.valid_BS]
                    entropy_L += router_entropy(logits_NLE).cpu() * len(logits_NLE)
        noise = []
        if reference is None:
            noise = noise_floor(model, *left_padded(sequences[: settings.noise_sequences], settings.device))
        tokens = sum(map(len, sequences))
        return Measured(noise, entropy_L / tokens if settings.router_logits else None)
    finally:
        del model
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def describe(name: str, model: PreTrainedModel) -> TraceHeader:
    """The model's routers, as a trace file names them. ComparisonError for a dense model."""
    sites = find_routers(model)
    if not sites:
        raise ComparisonError(f"{name}: {type(model).__name__} is dense, it routes nothing; compare MoE checkpoints")
    experts = max(site.num_experts for site in sites)
    return TraceHeader(tuple(site.name for site in sites), experts, sites[0].top_k, "", type(model).__name__)


def require_same_architecture(old: TraceHeader, new: TraceHeader) -> None:
    """ComparisonError unless both have the same class, layers, K and E: their experts would not be the same things."""
    told = [
        f"{h.model_class}: {len(h.layer_names)} MoE layers from {h.layer_names[0]}, K = {h.top_k}, E = {h.num_experts}"
        for h in (old, new)
    ]
    if told[0] != told[1] or old.layer_names != new.layer_names:
        raise ComparisonError(f"old is {told[0]}, new is {told[1]}; compare checkpoints of one architecture")


def left_padded(sequences: list[list[int]], device: str) -> tuple[Tensor, Tensor]:
    """(tokens_BS, attention_BS); padding is token 0, which is never looked at."""
    width = max(map(len, sequences))
    tokens_BS = torch.tensor([[0] * (width - len(s)) + s for s in sequences], device=device)
    attention_BS = torch.tensor([[False] * (width - len(s)) + [True] * len(s) for s in sequences], device=device)
    return tokens_BS, attention_BS


# ------------------------------------------------------------------------------------------------------------- printing
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


def main(arguments: Sequence[str]) -> int:
    """0, or 2 with one line on stderr for what the user can put right."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        settings = Comparison.parse(arguments)
        layers = compare_checkpoints(settings)
    except (ComparisonError, RoutingError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2
    print_layers(layers, Console())
    for path in sorted(Path(settings.out).iterdir()):
        print(path)
    return 0
