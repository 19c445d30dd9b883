"""Two trace files of the same tokens -> tidy numbers: drift, load, co-activation, specialisation, noise floor.

Columns of the table: metric, of (old, new, change, or noise/<check>), layer (MoE layers from 0), expert, other (a
second expert), token_id, changed (experts or layers), value. A column that does not apply is missing (NA).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from moe_rl import expert_pairs
from moe_rl.drift import compare
from moe_rl.drift import routing_metrics as metrics
from moe_rl.routing_trace import RoutingError, RoutingTrace
from moe_rl.traces import SequenceTrace, TraceHeader, padded, read_header, read_traces

COLUMNS = ("metric", "of", "layer", "expert", "other", "token_id", "changed", "value")
LEGEND = {
    "slot_change": "per layer: share of expert slots that changed",
    "set_change": "per layer: share of tokens whose expert set changed",
    "first_changed": "per layer: share of tokens whose first changed layer it is",
    "deviation": "share of (token, layer) pairs with 0, 1, ... K changed experts",
    "changed_layers": "share of tokens with 0, 1, ... L changed layers",
    "tokens_compared": "tokens that drift and noise floor are over",
    "any_layer_change": "share of tokens with a changed set in some layer",
    "saturation": "per layer: share of the old checkpoint's experts that the new one chooses too",
    "load": "per layer and expert: tokens",
    "max_violation": "per layer: largest load over mean load, minus 1",
    "dead_experts": "per layer: experts that no token chose",
    "co_activation": "per layer and pair: share of the expert's tokens that chose the other expert too",
    "specialisation": "per layer and expert: mean share over the frequent token ids that it got",
    "vocabulary": "per layer and expert: its most specialised token ids, share of their occurrences that it got",
    "router_entropy": "per layer: mean entropy of the router's softmax, nats",
}
CHUNK = 32  # sequences that are compared at a time
FAVOURITES = 10  # token ids kept for each expert in `vocabulary`
DRIFT = {  # columns of the table `drift` that are kept, and what their values are numbered by
    "slot_change": ("layer",),
    "set_change": ("layer",),
    "first_changed": ("layer",),
    "deviation": ("changed",),
    "changed_layers": ("changed",),
    "any_layer_change": (),
    "n": (),
}


def tidy_table(
    old: Path, new: Path, noise: list[dict[str, Any]], entropy: dict[str, Tensor], min_occurrences: int
) -> pd.DataFrame:
    """The tidy table of two trace files with token ids.

    noise: rows of `noise_floor`. entropy: of old and new, [L], where router logits were asked for. min_occurrences:
    token ids that occur less often say nothing about specialisation. RoutingError when the files' tokens differ.
    """
    frequent_U = _frequent(old, min_occurrences)
    tallies = {of: Tally(read_header(path), frequent_U) for of, path in (("old", old), ("new", new))}
    drifts = []
    for chunk in _chunks(old, new):
        pair = zip(tallies.values(), zip(*chunk, strict=True), strict=True)
        drifts.append(compare(*(tally.add(records) for tally, records in pair)).row())
    change = pooled(drifts)
    parts = [*_drift_parts("change", change), _part("saturation", "change", 1 - change["slot_change"], "layer")]
    for row in noise:
        parts += _drift_parts(f"noise/{row['check']}", row)
    for of, tally in tallies.items():
        parts += tally.parts(of)
    parts += [_part("router_entropy", of, entropy_L, "layer") for of, entropy_L in entropy.items()]
    table = pd.concat(parts, ignore_index=True).reindex(columns=list(COLUMNS))
    return table.astype(dict.fromkeys(COLUMNS[2:-1], "Int64"))


def _chunks(old: Path, new: Path) -> Iterator[list[tuple[SequenceTrace, SequenceTrace]]]:
    """The same sequences of both files, a few at a time."""
    held: list[tuple[SequenceTrace, SequenceTrace]] = []
    for one, other in zip(read_traces(old), read_traces(new), strict=True):
        tokens, others = one.token_ids_T, other.token_ids_T
        if tokens is None or others is None or not np.array_equal(tokens, others):
            raise RoutingError(f"sequences {one.sequence} of {old} and {other.sequence} of {new} differ in tokens")
        held.append((one, other))
        if len(held) == CHUNK:
            yield held
            held = []
    if held:
        yield held


def _frequent(path: Path, min_occurrences: int) -> Tensor:
    """Token ids that occur often enough, sorted."""
    counts = Counter[int]()
    for record in read_traces(path):
        counts.update([] if record.token_ids_T is None else record.token_ids_T.tolist())
    return torch.tensor(sorted(token for token, count in counts.items() if count >= min_occurrences), dtype=torch.int64)


def pooled(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Several comparisons as one: every share weighted by the tokens compared (by_position apart, it is left out)."""
    total = sum(row["n"] for row in rows)
    shares = DRIFT.keys() - {"n"}
    return {"n": total} | {key: sum(np.asarray(row[key]) * row["n"] for row in rows) / total for key in shares}


class Tally:
    """What one checkpoint's routing adds up to: counts, chunk by chunk."""

    def __init__(self, header: TraceHeader, frequent_U: Tensor):
        L, E, U = len(header.layer_names), header.num_experts, len(frequent_U)
        self.experts, self.frequent_U = E, frequent_U
        self.load_LE = torch.zeros(L, E, dtype=torch.int64)
        self.pairs_LEE = np.zeros((L, E, E))
        self.vocabulary_LUE = torch.zeros(L, U, E, dtype=torch.int64)
        self.occurrences_U = torch.zeros(U, dtype=torch.int64)

    def add(self, records: Sequence[SequenceTrace]) -> RoutingTrace:
        """Count these sequences; returns their routing as a batch."""
        trace = padded(records)
        ids_NLK = metrics.known(trace)
        tokens_N = torch.cat([torch.from_numpy(r.token_ids_T[r.valid_T]) for r in records if r.token_ids_T is not None])
        self.load_LE += metrics.load(ids_NLK, self.experts)
        self.pairs_LEE += expert_pairs.pair_counts(ids_NLK.numpy(), self.experts)
        often_N = torch.isin(tokens_N, self.frequent_U)
        found_U, counts_LUE, occurrences_U = metrics.vocabulary_counts(
            ids_NLK[often_N], tokens_N[often_N], self.experts
        )
        place_U = torch.searchsorted(self.frequent_U, found_U)
        self.vocabulary_LUE[:, place_U] += counts_LUE
        self.occurrences_U[place_U] += occurrences_U
        return trace

    def parts(self, of: str) -> list[pd.DataFrame]:
        shares_LUE = metrics.vocabulary_specialisation(self.vocabulary_LUE, self.occurrences_U)
        pairs = _part("co_activation", of, expert_pairs.co_activation(self.pairs_LEE), "layer", "expert", "other")
        return [
            _part("load", of, self.load_LE, "layer", "expert"),
            _part("max_violation", of, metrics.max_violation(self.load_LE), "layer"),
            _part("dead_experts", of, metrics.dead_experts(self.load_LE), "layer"),
            pairs[pairs["expert"] != pairs["other"]],
            _part("specialisation", of, metrics.mean_specialisation(shares_LUE), "layer", "expert"),
            self._favourites(of, shares_LUE),
        ]

    def _favourites(self, of: str, shares_LUE: Tensor) -> pd.DataFrame:
        """The token ids of which each expert gets the largest share."""
        best = shares_LUE.topk(min(FAVOURITES, len(self.frequent_U)), dim=1)
        part = _part("vocabulary", of, best.values, "layer", "rank", "expert")
        part["token_id"] = self.frequent_U[best.indices].flatten().numpy()
        return part[part["value"] > 0].drop(columns="rank")


def _drift_parts(of: str, row: dict[str, Any]) -> list[pd.DataFrame]:
    return [_part("tokens_compared" if name == "n" else name, of, row[name], *axes) for name, axes in DRIFT.items()]


def _part(metric: str, of: str, values: Any, *axes: str) -> pd.DataFrame:
    """Rows of the table, one a value; `axes` name the columns that hold its indices."""
    array = np.asarray(values, dtype=float)
    places = dict(zip(axes, map(np.ravel, np.indices(array.shape)), strict=True))
    return pd.DataFrame({"metric": metric, "of": of, **places, "value": array.ravel()})


def by_layer(table: pd.DataFrame, header: TraceHeader) -> pd.DataFrame:
    """One row per MoE layer: every metric that has one number a layer, the noise floor beside the drift.

    noise_*: the largest of the checks. unrelated: slot change of two unrelated routers, 1 - K / E.
    """
    rows = pd.DataFrame({"layer": range(len(header.layer_names)), "name": header.layer_names})

    def column(of: str, metric: str, way: str) -> Any:
        return table[table["of"].str.startswith(of) & (table["metric"] == metric)].groupby("layer")["value"].agg(way)

    for metric in ("slot_change", "set_change", "first_changed", "saturation"):
        rows[metric] = column("change", metric, "max")
    for metric in ("slot_change", "set_change"):
        rows[f"noise_{metric}"] = column("noise/", metric, "max")
    rows["unrelated"] = 1 - header.top_k / header.num_experts
    for metric in ("max_violation", "dead_experts", "specialisation", "router_entropy"):
        for of in ("old", "new"):
            if len(values := column(of, metric, "mean")):
                rows[f"{metric}_{of}"] = values
    return rows
