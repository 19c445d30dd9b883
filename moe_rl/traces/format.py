"""What a trace file is made of: columns, metadata and checksums.

Columns: step, update, pass (rollout, old, new), sequence, expert_ids (bytes of [T, L, K], little-endian), valid (T
bytes of 0 or 1), token_ids (T integers, or none), crc32 (over the row). The file's metadata names the format, L, K, E,
the layers, the id dtype, the model class and the library versions, and holds the number of rows and a checksum over
them: a damaged file is an error, never another number. T is the number of real tokens of a sequence.
"""

from __future__ import annotations

import dataclasses
import struct
import zlib
from typing import Any

import numpy as np
import pyarrow as pa

from moe_rl.routing_trace import RoutingError

FORMAT = 1
HEADER, HEADER_CRC, VERSION = b"moe_rl.trace", b"moe_rl.trace.crc32", b"moe_rl.trace.format"
INDEX = ("step", "update", "pass", "sequence", "crc32")
COLUMNS = {
    "step": pa.int32(),
    "update": pa.int32(),
    "pass": pa.string(),
    "sequence": pa.int64(),
    "expert_ids": pa.binary(),
    "valid": pa.binary(),
    "token_ids": pa.list_(pa.int32()),
    "crc32": pa.uint32(),
}
SCHEMA = pa.schema([pa.field(name, kind, nullable=name == "token_ids") for name, kind in COLUMNS.items()])


class TraceError(RoutingError):
    """A trace file that cannot be written or read; the message names the file and says what to do."""


@dataclasses.dataclass(frozen=True)
class TraceHeader:
    """What all rows of a file share. id_dtype: uint8 (up to 256 experts) or int16, little-endian on disk."""

    layer_names: tuple[str, ...]
    num_experts: int
    top_k: int
    id_dtype: str
    model_class: str = ""
    versions: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return np.dtype({"uint8": "u1", "int16": "<i2"}[self.id_dtype])


@dataclasses.dataclass(frozen=True)
class SequenceTrace:
    """The routing of one sequence in one pass.

    expert_ids_TLK: meaningless where valid_T is False. token_ids_T: None when they were not written.
    """

    header: TraceHeader
    step: int
    update: int
    source: str
    sequence: int
    expert_ids_TLK: np.ndarray
    valid_T: np.ndarray
    token_ids_T: np.ndarray | None


def row_crc(row: dict[str, Any]) -> int:
    """CRC-32 over everything that a row says."""
    tokens = row["token_ids"]
    numbers = (row["step"], row["update"], row["sequence"], len(row["valid"]), tokens is None)
    crc = zlib.crc32(struct.pack("<iiqi?", *numbers))
    for part in (row["pass"].encode(), row["expert_ids"], row["valid"]):
        crc = zlib.crc32(part, crc)
    return crc if tokens is None else zlib.crc32(np.asarray(tokens, "<i4").tobytes(), crc)


def chain(crc: int, row: dict[str, Any]) -> int:
    """The checksum over the file's index, one row further: a lost, added or moved row shows."""
    return zlib.crc32("|".join(str(row[name]) for name in INDEX).encode(), crc)
