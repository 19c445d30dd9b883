"""Other shapes of routing: stored records as a batch or a table, and other systems' arrays [tokens, layers, K].

The arrays of vLLM, SGLang or verl say neither which layers nor which rows they hold. The rules here: layers are named
by the caller, rows that the system did not have are declared, and whatever does not add up is an error.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from moe_rl.records import RoutingError, RoutingTrace, id_dtype
from moe_rl.trace_format import SequenceTrace

MISSING = ("none", "zeros", "minus_one")
CONFLICTS = ("raise", "earlier", "later")


def padded(records: Iterable[SequenceTrace], attention_BS: Tensor | None = None) -> RoutingTrace:
    """Records of one pass as a batch: on the real columns of `attention_BS`, else from column 0, padded on the right.

    RoutingError for no records, records of different passes, updates or models, and lengths that do not fit the mask.
    """
    records = list(records)
    kinds = {(record.header.layer_names, record.header.num_experts, record.source, record.update) for record in records}
    if len(kinds) != 1:
        passes = sorted({(record.source, record.update) for record in records})
        raise RoutingError(f"{len(records)} records of passes {passes} make no batch; choose one source and update")
    lengths = torch.tensor([len(record.valid_T) for record in records])
    if attention_BS is None:
        attention_BS = torch.arange(int(lengths.max())) < lengths[:, None]
    real_BS = attention_BS.bool().cpu()
    if real_BS.sum(1).tolist() != lengths.tolist():
        raise RoutingError(f"records of {lengths.tolist()} tokens do not fit a mask of {real_BS.sum(1).tolist()}")
    header = records[0].header
    ids = torch.zeros(*real_BS.shape, len(header.layer_names), header.top_k, dtype=id_dtype(header.num_experts))
    valid_BS = torch.zeros_like(real_BS)
    ids[real_BS] = torch.from_numpy(np.concatenate([record.expert_ids_TLK for record in records])).to(ids.dtype)
    valid_BS[real_BS] = torch.from_numpy(np.concatenate([record.valid_T for record in records]))
    source, update = records[0].source, records[0].update
    return RoutingTrace(ids, valid_BS, header.layer_names, header.num_experts, source, update)


def to_pandas(records: Iterable[SequenceTrace]) -> pd.DataFrame:
    """One row per token, layer and slot: step, update, pass, sequence, position, token_id, layer, slot, expert.

    position counts the sequence's real tokens and layer the MoE layers, both from 0. expert is missing (NA) where the
    routing is unknown, token_id where no tokens were written.
    """
    frames = []
    for record in records:
        T, L, K = record.expert_ids_TLK.shape
        position, layer, slot = (axis.ravel() for axis in np.indices((T, L, K)))
        expert = pd.array(record.expert_ids_TLK.ravel(), dtype="Int16")
        expert[~record.valid_T[position]] = pd.NA
        tokens = record.token_ids_T
        frame = {
            "step": record.step,
            "update": record.update,
            "pass": record.source,
            "sequence": record.sequence,
            "position": position,
            "token_id": pd.array([pd.NA] * (T * L * K) if tokens is None else tokens[position], dtype="Int64"),
            "layer": layer,
            "slot": slot,
            "expert": expert,
        }
        frames.append(pd.DataFrame(frame))
    columns = ["step", "update", "pass", "sequence", "position", "token_id", "layer", "slot", "expert"]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=columns)


def from_layout(
    arrays: Any,
    token_counts: Sequence[int],
    layer_names: Sequence[str],
    num_experts: int,
    *,
    num_decoder_layers: int | None = None,
    missing: str = "none",
    valid: Sequence[Any] | None = None,
    attention_BS: Tensor | None = None,
    source: str = "rollout",
    update: int = 0,
) -> RoutingTrace:
    """A trace from what another system recorded; from column 0, or on the real columns of `attention_BS`.

    arrays: one [rows, layers, K] a sequence, or a single one with the sequences behind each other. A sequence of n
        tokens (`token_counts`: prompt and response) has n rows, or n - 1: the last sampled token was never fed back,
        so its row is unknown.
    layer_names: the MoE layers as the model names its routers (`RoutingTrace.layer_names`). Arrays have either these
        layers, or all `num_decoder_layers`: then the number in a layer's name says which slot is its own.
    missing: what stands in rows that the system did not have. none: there are no such rows; minus_one: -1 throughout;
        zeros: 0 throughout, which only K > 1 can tell from a choice.
    valid: one [rows] a sequence, or a single one: True where the routing is known. K = 1 needs it, or minus_one.

    RoutingError for another number of rows or layers, for known rows that name an expert twice or one that does not
    exist, and for rows of which only some layers are missing.
    """
    if missing not in MISSING:
        raise RoutingError(f"missing is {missing!r}; choose one of {', '.join(MISSING)}")
    parts = _sequences(arrays, token_counts, "arrays")
    known = [np.ones(len(part), bool) for part in parts]
    if valid is not None:
        known = [part.astype(bool) for part in _sequences(valid, token_counts, "valid")]
    top_k = parts[0].shape[-1]
    if top_k == 1 and valid is None and missing != "minus_one":
        raise RoutingError(
            "with K = 1 a row of zeros may be a choice of expert 0; say with valid= which rows are known"
        )
    slots = _slots(layer_names, parts[0].shape[1], num_decoder_layers)
    width = max(token_counts) if attention_BS is None else attention_BS.shape[1]
    counts = torch.tensor(list(token_counts))
    real_BS = torch.arange(width) < counts[:, None] if attention_BS is None else attention_BS.bool().cpu()
    if real_BS.sum(1).tolist() != counts.tolist():
        raise RoutingError(f"sequences of {counts.tolist()} tokens do not fit a mask of {real_BS.sum(1).tolist()}")
    ids_BSLK = torch.zeros(len(parts), width, len(slots), top_k, dtype=torch.int64)
    valid_BS = torch.zeros_like(real_BS)
    for row, (part, part_known, count) in enumerate(zip(parts, known, token_counts, strict=True)):
        if len(part) not in (count, count - 1) or len(part_known) != len(part):
            raise RoutingError(
                f"sequence {row} has {count} tokens, {len(part)} rows of routing and {len(part_known)} of validity; "
                f"{count} or {count - 1} belong together"
            )
        ids_TLK = part[:, slots].astype(np.int64)
        columns = real_BS[row].nonzero().flatten()[: len(part)]
        ids_BSLK[row, columns] = torch.from_numpy(ids_TLK)
        valid_BS[row, columns] = torch.from_numpy(part_known & ~_missing_rows(ids_TLK, part_known, missing, row))
    return RoutingTrace.from_ids(ids_BSLK, valid_BS, layer_names, num_experts, source, update)


def _sequences(arrays: Any, token_counts: Sequence[int], name: str) -> list[np.ndarray]:
    """One array a sequence. A single array is cut by the token counts, all in full or all one row short."""
    if isinstance(arrays, (list, tuple)) and len(arrays) and np.ndim(arrays[0]) in (1, 3):
        parts = [np.asarray(array) for array in arrays]
    else:
        whole = np.asarray(arrays)
        short = sum(token_counts) - len(whole)
        if whole.ndim not in (1, 3) or short not in (0, len(token_counts)):
            raise RoutingError(
                f"{name} of shape {whole.shape} cannot be cut into sequences of {list(token_counts)} tokens; "
                "give a list of [rows, layers, K], one a sequence"
            )
        ends = np.cumsum([count - (short > 0) for count in token_counts])
        parts = np.split(whole, ends[:-1])
    if len(parts) != len(token_counts) or len({part.shape[1:] for part in parts}) != 1:
        raise RoutingError(
            f"{name}: {len(parts)} sequences of shapes {sorted({part.shape[1:] for part in parts})} [layers, K] came "
            f"with {len(token_counts)} token counts; all must have the same layers and K"
        )
    for part in parts:
        if part.dtype.kind not in "iub":
            raise RoutingError(f"{name} has dtype {part.dtype}; expert ids are integers")
    return parts


def _slots(layer_names: Sequence[str], width: int, num_decoder_layers: int | None) -> list[int]:
    """Which slot of the layer axis belongs to each named layer."""
    if width == len(layer_names):
        return list(range(width))
    if width != num_decoder_layers:
        raise RoutingError(
            f"the array has {width} layers, the model {len(layer_names)} MoE layers of "
            f"{num_decoder_layers or 'an unknown number of'} decoder layers; one of the two must match"
        )
    slots = []
    for name in layer_names:
        numbers = [int(part) for part in re.split(r"\.", name) if part.isdigit()]
        if len(numbers) != 1 or numbers[0] >= width:
            raise RoutingError(f"{name!r} does not say which of {width} decoder layers it is; pass MoE layers only")
        slots += numbers
    if len(set(slots)) != len(slots):
        raise RoutingError(f"layers {', '.join(layer_names)} name a decoder layer twice; pass MoE layers only")
    return slots


def _missing_rows(ids_TLK: np.ndarray, known_T: np.ndarray, missing: str, sequence: int) -> np.ndarray:
    """[T]: rows that hold the filler in every layer. RoutingError where a known row holds it in some layers only."""
    if missing == "none" or (missing == "zeros" and ids_TLK.shape[2] == 1):
        return np.zeros(len(ids_TLK), bool)
    filled_TL = (ids_TLK == (0 if missing == "zeros" else -1)).all(-1)
    partly = filled_TL.any(1) & ~filled_TL.all(1) & known_T
    if partly.any():
        raise RoutingError(
            f"sequence {sequence}, row {int(partly.argmax())}: routing is missing in some layers and there in others; "
            "mark the row invalid with valid="
        )
    return filled_TL.all(1)


def merge_turns(turns: Sequence[RoutingTrace], conflict: str = "raise") -> RoutingTrace:
    """The trace of a conversation from those of its turns: each turn's prompt is all that came before it.

    Column s is the same token in every turn (same padding on the left). A row that one turn does not know, such as the
    last token it sampled, comes from a later turn's prefill. Where two turns know a row and chose other experts:
    conflict = raise, or keep the earlier or the later turn's (in bf16, prefill and decoding do disagree at times).
    """
    if conflict not in CONFLICTS:
        raise RoutingError(f"conflict is {conflict!r}; choose one of {', '.join(CONFLICTS)}")
    width = max(turn.valid_BS.shape[1] for turn in turns)
    everywhere = torch.ones(len(turns[0].valid_BS), width, dtype=torch.bool, device=turns[0].valid_BS.device)
    merged = turns[0].aligned_to(everywhere)
    for number, turn in enumerate(turns[1:], start=2):
        if (turn.layer_names, turn.num_experts, turn.top_k) != (merged.layer_names, merged.num_experts, merged.top_k):
            raise RoutingError(f"turn {number} is of another model than the turns before it")
        turn = turn.aligned_to(everywhere)
        both_BS = merged.valid_BS & turn.valid_BS
        sets = [trace.expert_ids_BSLK.long().sort(-1).values for trace in (merged, turn)]
        differ_BS = both_BS & (sets[0] != sets[1]).flatten(2).any(-1)
        if conflict == "raise" and differ_BS.any():
            sequence, column = differ_BS.nonzero()[0].tolist()
            raise RoutingError(
                f"turn {number} knows other experts than an earlier turn at {int(differ_BS.sum())} tokens, first in "
                f"sequence {sequence}, column {column}; were they the same tokens? set conflict to keep one"
            )
        take_BS = turn.valid_BS & ~merged.valid_BS
        if conflict == "later":
            take_BS = take_BS | differ_BS
        ids = torch.where(take_BS[:, :, None, None], turn.expert_ids_BSLK, merged.expert_ids_BSLK)
        valid_BS = merged.valid_BS | turn.valid_BS
        merged = dataclasses.replace(merged, expert_ids_BSLK=ids, valid_BS=valid_BS, router_logits_BSLE=None)
    return dataclasses.replace(merged, router_logits_BSLE=None)
