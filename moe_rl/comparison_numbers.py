"""Two trace files of the same tokens -> tidy numbers: drift, load, co-activation, specialisation, noise floor.

Columns of the table: metric, of (old, new, change, or noise/<check>), layer (MoE layers from 0), expert, other (a
second expert), token_id, changed (experts or layers), value. A column that does not apply is missing (NA).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from moe_rl import routing_metrics as metrics
from moe_rl.drift import compare
from moe_rl.records import RoutingError
from moe_rl.trace_layouts import padded
from moe_rl.traces import SequenceTrace, read_traces

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
PER_LAYER = ("slot_change", "set_change", "first_changed")


def numbers(
    old: str | Path,
    new: str | Path,
    noise: list[dict[str, Any]],
    entropy: dict[str, Tensor],
    min_occurrences: int,
) -> pd.DataFrame:
    """The tidy table of two trace files with token ids.

    noise: rows of `noise_floor`. entropy: of old and new, [L], where router logits were asked for. min_occurrences:
    token ids that occur less often say nothing about specialisation. RoutingError when the files' tokens differ.
    """
    frequent = _frequent(old, min_occurrences)
    drifts, tallies = [], {}
    for of, chunk in ((of, chunk) for pair in _pairs(old, new) for of, chunk in pair.items()):
        header = chunk[0].header
        if of not in tallies:
            tallies[of] = Tally(len(header.layer_names), header.num_experts, frequent)
        tallies[of].add(chunk)
        if of == "old":
            before = padded(chunk)
        else:
            drifts.append(compare(before, padded(chunk)).row())
    parts = list(_drift_parts("change", pooled(drifts)))
    for row in noise:
        parts += _drift_parts(f"noise/{row['check']}", row)
    for of, tally in tallies.items():
        parts += tally.parts(of)
    for of, entropy_L in entropy.items():
        parts.append(_part("router_entropy", of, entropy_L, "layer"))
    table = pd.concat(parts, ignore_index=True).reindex(columns=list(COLUMNS))
    return table.astype(dict.fromkeys(("layer", "expert", "other", "token_id", "changed"), "Int64"))


def _pairs(old: str | Path, new: str | Path) -> Iterator[dict[str, list[SequenceTrace]]]:
    """The same sequences of both files, a chunk at a time."""
    held: dict[str, list[SequenceTrace]] = {"old": [], "new": []}
    for one, other in zip(read_traces(old), read_traces(new), strict=True):
        tokens = [record.token_ids_T for record in (one, other)]
        if tokens[0] is None or tokens[1] is None or not np.array_equal(tokens[0], tokens[1]):
            raise RoutingError(
                f"sequence {one.sequence} of {old} and {other.sequence} of {new} are not the same tokens"
            )
        held["old"].append(one)
        held["new"].append(other)
        if len(held["old"]) == CHUNK:
            yield held
            held = {"old": [], "new": []}
    if held["old"]:
        yield held


def _frequent(path: str | Path, min_occurrences: int) -> Tensor:
    """Token ids that occur often enough, sorted."""
    counts: dict[int, int] = {}
    for record in read_traces(path):
        if record.token_ids_T is not None:
            for token, count in zip(*np.unique(record.token_ids_T, return_counts=True), strict=True):
                counts[int(token)] = counts.get(int(token), 0) + int(count)
    return torch.tensor(sorted(token for token, count in counts.items() if count >= min_occurrences), dtype=torch.int64)


def pooled(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Several comparisons as one: every share weighted by the tokens compared (by_position apart, it is left out)."""
    total = sum(row["n"] for row in rows)
    keys = [key for key in rows[0] if key not in ("n", "by_position")]
    return {"n": total} | {key: sum(np.asarray(row[key]) * row["n"] for row in rows) / total for key in keys}


class Tally:
    """What one checkpoint's routing adds up to: counts, chunk by chunk."""

    def __init__(self, layers: int, experts: int, frequent_U: Tensor):
        self.experts, self.frequent_U = experts, frequent_U
        self.load_LE = torch.zeros(layers, experts, dtype=torch.int64)
        self.pairs_LEE = torch.zeros(layers, experts, experts, dtype=torch.float64)
        self.vocabulary_LUE = torch.zeros(layers, len(frequent_U), experts, dtype=torch.int64)
        self.occurrences_U = torch.zeros(len(frequent_U), dtype=torch.int64)

    def add(self, chunk: list[SequenceTrace]) -> None:
        ids_NLK = metrics.known(padded(chunk))
        tokens_N = torch.cat([torch.from_numpy(r.token_ids_T[r.valid_T]) for r in chunk if r.token_ids_T is not None])
        self.load_LE += metrics.load(ids_NLK, self.experts)
        self.pairs_LEE += metrics.pair_counts(ids_NLK, self.experts)
        often_N = torch.isin(tokens_N, self.frequent_U)
        found_U, counts_LUE, occurrences_U = metrics.vocabulary_counts(
            ids_NLK[often_N], tokens_N[often_N], self.experts
        )
        place_U = torch.searchsorted(self.frequent_U, found_U)
        self.vocabulary_LUE[:, place_U] += counts_LUE
        self.occurrences_U[place_U] += occurrences_U

    def parts(self, of: str) -> list[pd.DataFrame]:
        shares_LUE = metrics.vocabulary_specialisation(self.vocabulary_LUE, self.occurrences_U)
        pairs = _part("co_activation", of, metrics.co_activation(self.pairs_LEE), "layer", "expert", "other")
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


def _drift_parts(of: str, row: dict[str, Any]) -> Iterator[pd.DataFrame]:
    for metric in PER_LAYER:
        yield _part(metric, of, row[metric], "layer")
    yield _part("deviation", of, row["deviation"], "changed")
    yield _part("changed_layers", of, row["changed_layers"], "changed")
    yield _part("any_layer_change", of, [row["any_layer_change"]])
    yield _part("tokens_compared", of, [row["n"]])
    if of == "change":
        yield _part("saturation", of, 1 - np.asarray(row["slot_change"]), "layer")


def _part(metric: str, of: str, values: Any, *axes: str) -> pd.DataFrame:
    """Rows of the table, one a value; `axes` name the columns that hold its indices."""
    array = np.asarray(values, dtype=float)
    places = dict(zip(axes, (axis.ravel() for axis in np.indices(array.shape)), strict=False))
    return pd.DataFrame({"metric": metric, "of": of, **places, "value": array.ravel()})


def by_layer(table: pd.DataFrame, layer_names: tuple[str, ...], top_k: int, num_experts: int) -> pd.DataFrame:
    """One row per MoE layer: every metric that has one number a layer, the noise floor beside the drift.

    noise_*: the largest of the checks. unrelated: slot change of two unrelated routers, 1 - K / E.
    """
    rows = pd.DataFrame({"layer": range(len(layer_names)), "name": layer_names})
    change = table[table["of"] == "change"]
    for metric in (*PER_LAYER, "saturation"):
        rows[metric] = _per_layer(change, metric)
    noise = table[table["of"].str.startswith("noise/")]
    for metric in PER_LAYER[:2]:
        rows[f"noise_{metric}"] = _per_layer(noise, metric)
    rows["unrelated"] = 1 - top_k / num_experts
    for metric in ("max_violation", "dead_experts", "specialisation", "router_entropy"):
        for of in ("old", "new"):
            part = table[(table["of"] == of) & (table["metric"] == metric)]
            if len(part):
                rows[f"{metric}_{of}"] = part.groupby("layer")["value"].mean().to_numpy()
    return rows


def _per_layer(table: pd.DataFrame, metric: str) -> np.ndarray:
    return table[table["metric"] == metric].groupby("layer")["value"].max().to_numpy(dtype=float)
