"""Other shapes of routing: stored records as a batch or a table, and other systems' arrays [tokens, layers, K].

The arrays of vLLM, SGLang or verl say neither which layers nor which rows they hold. The rules here: layers are named
by the caller, rows that the system did not have are declared, and whatever does not add up is an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from moe_rl.routing_trace import RoutingError, RoutingTrace
from moe_rl.store.traces import SequenceTrace, TraceError

FILLERS = {"none": None, "zeros": 0, "minus_one": -1}
CONFLICTS = ("raise", "earlier", "later")


# ------------------------------------------------------------------------------------------------------ stored records
def padded(records: Iterable[SequenceTrace], attention_BS: Tensor | None = None) -> RoutingTrace:
    """Records of one pass as a batch: on the real columns of `attention_BS`, else from column 0, padded on the right.

    RoutingError for no records, records of different passes, updates or models, and lengths that do not fit the mask.
    """
    records = list(records)
    kinds = {(record.header.layer_names, record.header.num_experts, record.source, record.update) for record in records}
    if len(kinds) != 1:
        passes = sorted({(record.source, record.update) for record in records})
        raise RoutingError(f"{len(records)} records of passes {passes} make no batch; choose one source and update")
    ids = [record.expert_ids_TLK for record in records]
    valid_BS, ids_BSLK = _placed(ids, [record.valid_T for record in records], attention_BS)
    return RoutingTrace.from_ids(ids_BSLK, valid_BS, *kinds.pop())


def to_pandas(records: Iterable[SequenceTrace]) -> pd.DataFrame:
    """One row per token, layer and slot: step, update, pass, sequence, position, token_id, layer, slot, expert.

    position counts the sequence's real tokens and layer the MoE layers, both from 0. expert is missing (NA) where the
    routing is unknown, token_id where no tokens were written. TraceError for anything but such records.
    """
    if isinstance(records, (str, Path)):
        raise TraceError(f"to_pandas takes the rows of a file: to_pandas(read_traces({str(records)!r}))")
    columns = ["step", "update", "pass", "sequence", "position", "token_id", "layer", "slot", "expert"]
    frames = [pd.DataFrame(columns=columns)] if not (records := list(records)) else []
    for record in records:
        position, layer, slot = (axis.ravel() for axis in np.indices(record.expert_ids_TLK.shape))
        expert = pd.array(record.expert_ids_TLK.ravel(), dtype="Int16")
        expert[~record.valid_T[position]] = pd.NA
        tokens = record.token_ids_T
        token_id = pd.array([pd.NA] * len(position) if tokens is None else tokens[position], dtype="Int64")
        values = (record.step, record.update, record.source, record.sequence, position, token_id, layer, slot, expert)
        frames.append(pd.DataFrame(dict(zip(columns, values, strict=True))))
    return pd.concat(frames, ignore_index=True)


def _placed(
    ids: Sequence[np.ndarray], valid: Sequence[np.ndarray], attention_BS: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(valid_BS, ids_BSLK int64) of sequences [T, L, K] and [T], on the real columns of a mask, else from column 0."""
    lengths = torch.tensor([len(part) for part in valid])
    if attention_BS is None:
        attention_BS = torch.arange(int(lengths.max())) < lengths[:, None]
    real_BS = attention_BS.bool().cpu()
    if real_BS.sum(1).tolist() != lengths.tolist():
        raise RoutingError(f"sequences of {lengths.tolist()} tokens do not fit a mask of {real_BS.sum(1).tolist()}")
    valid_BS = torch.zeros_like(real_BS)
    valid_BS[real_BS] = torch.from_numpy(np.concatenate(valid))
    ids_BSLK = torch.zeros(*real_BS.shape, *ids[0].shape[1:], dtype=torch.int64)
    ids_BSLK[real_BS] = torch.from_numpy(np.concatenate(ids).astype(np.int64))
    return valid_BS, ids_BSLK


# ------------------------------------------------------------------------------------------------------ foreign arrays
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
    if missing not in FILLERS:
        raise RoutingError(f"missing is {missing!r}; choose one of {', '.join(FILLERS)}")
    parts = _sequences(arrays, token_counts, "arrays")
    known = [np.ones(len(part), bool) for part in parts]
    if valid is not None:
        known = [part.astype(bool) for part in _sequences(valid, token_counts, "valid")]
    _, width, top_k = parts[0].shape
    if top_k == 1 and valid is None and missing != "minus_one":
        raise RoutingError("with K = 1 a row of zeros may be a choice of expert 0; say with valid= which rows count")
    filler = None if missing == "zeros" and top_k == 1 else FILLERS[missing]
    slots = _slots(layer_names, width, num_decoder_layers)
    ids, trusted = [], []
    for number, (part, known_T, count) in enumerate(zip(parts, known, token_counts, strict=True)):
        short = count - len(part)
        if short not in (0, 1) or len(known_T) != len(part):
            raise RoutingError(
                f"sequence {number} has {count} tokens, {len(part)} rows of routing and {len(known_T)} of validity; "
                f"{count} or {count - 1} belong together"
            )
        ids_TLK = part[:, slots].astype(np.int64)
        ids.append(np.pad(ids_TLK, [(0, short), (0, 0), (0, 0)]))
        trusted.append(np.pad(known_T & ~_missing_rows(ids_TLK, known_T, filler, number), (0, short)))
    valid_BS, ids_BSLK = _placed(ids, trusted, attention_BS)
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
        parts = np.split(whole, np.cumsum([count - (short > 0) for count in token_counts])[:-1])
    shapes = sorted({part.shape[1:] for part in parts})
    if len(parts) != len(token_counts) or len(shapes) != 1:
        raise RoutingError(
            f"{name}: {len(parts)} parts of shapes {shapes} [layers, K] came with {len(token_counts)} token counts; "
            "all must have the same layers and K"
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
        numbers = [int(part) for part in name.split(".") if part.isdigit()]
        if len(numbers) != 1 or numbers[0] >= width:
            raise RoutingError(f"{name!r} does not say which of {width} decoder layers it is; pass MoE layers only")
        slots += numbers
    if len(set(slots)) != len(slots):
        raise RoutingError(f"layers {', '.join(layer_names)} name a decoder layer twice; pass MoE layers only")
    return slots


def _missing_rows(ids_TLK: np.ndarray, known_T: np.ndarray, filler: int | None, sequence: int) -> np.ndarray:
    """[T]: rows that hold the filler in every layer. RoutingError where a known row holds it in some layers only."""
    filled_TL = (ids_TLK == filler).all(-1) if filler is not None else np.zeros(ids_TLK.shape[:2], bool)
    filled_T = np.all(filled_TL, axis=1)
    partly_T = filled_TL.any(1) & ~filled_T & known_T
    if partly_T.any():
        raise RoutingError(
            f"sequence {sequence}, row {int(partly_T.argmax())}: routing is missing in some layers and not in others; "
            "mark the row invalid with valid="
        )
    return filled_T


def merge_turns(turns: Sequence[RoutingTrace], conflict: str = "raise") -> RoutingTrace:
    """The trace of a conversation from those of its turns: each turn's prompt is all that came before it.

    Column s is the same token in every turn (same padding on the left). A row that one turn does not know, such as the
    last token it sampled, comes from a later turn's prefill. Where two turns know a row and chose other experts:
    conflict = raise, or keep the earlier or the later turn's (in bf16, prefill and decoding do disagree at times).
    """
    if conflict not in CONFLICTS:
        raise RoutingError(f"conflict is {conflict!r}; choose one of {', '.join(CONFLICTS)}")
    width = max(turn.valid_BS.shape[1] for turn in turns)
    everywhere_BS = turns[0].valid_BS.new_ones(len(turns[0].valid_BS), width)
    merged = dataclasses.replace(turns[0].aligned_to(everywhere_BS), extras={})
    for number, turn in enumerate(turns[1:], start=2):
        if (turn.layer_names, turn.num_experts, turn.top_k) != (merged.layer_names, merged.num_experts, merged.top_k):
            raise RoutingError(f"turn {number} is of another model than the turns before it")
        turn = turn.aligned_to(everywhere_BS)
        before, after = (trace.expert_ids_BSLK.long().sort(-1).values for trace in (merged, turn))
        differ_BS = merged.valid_BS & turn.valid_BS & (before != after).flatten(2).any(-1)
        if conflict == "raise" and differ_BS.any():
            sequence, column = differ_BS.nonzero()[0].tolist()
            raise RoutingError(
                f"turn {number} knows other experts than an earlier turn at {int(differ_BS.sum())} tokens, first in "
                f"sequence {sequence}, column {column}; were they the same tokens? set conflict to keep one"
            )
        take_BS = turn.valid_BS & ~merged.valid_BS | (differ_BS if conflict == "later" else False)
        ids = torch.where(take_BS[:, :, None, None], turn.expert_ids_BSLK, merged.expert_ids_BSLK)
        merged = dataclasses.replace(merged, expert_ids_BSLK=ids, valid_BS=merged.valid_BS | turn.valid_BS)
    return merged
