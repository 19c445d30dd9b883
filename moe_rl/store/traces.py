"""Trace files read, and what they are made of: columns, metadata and checksums. traces/files.py writes them.

Columns: step, update, pass (rollout, old, new), sequence, expert_ids (bytes of [T, L, K], little-endian), valid (T
bytes of 0 or 1), token_ids (T integers, or none), crc32 (over the row). The file's metadata names the format, L, K, E,
the layers, the id dtype, the model class and the library versions, and holds the number of rows and a checksum over
them: a damaged file is an error, never another number. T is the number of real tokens of a sequence.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from moe_rl.store.files import StoreError

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


class TraceError(StoreError):
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


# ------------------------------------------------------------------------------------------------------------- reading
def read_header(path: str | Path) -> TraceHeader:
    """What the file says about all its rows. TraceError as in `read_traces`."""
    with _opened(path) as file:
        return _header(path, file)[0]


def read_traces(
    path: str | Path,
    step: int | None = None,
    sequence: int | None = None,
    source: str | None = None,
    update: int | None = None,
) -> Iterator[SequenceTrace]:
    """The file's rows in the order of writing, those that match; memory does not grow with the file's length.

    Raises TraceError, naming the file, for one that is missing, damaged, cut off, or written by a newer version.
    """
    wanted = {"step": step, "update": update, "pass": source, "sequence": sequence}

    def matches(row: dict[str, Any]) -> bool:
        return all(value is None or row[name] == value for name, value in wanted.items())

    with _opened(path) as file:  # the whole index is found sound before the first row is given out
        header, expected = _header(path, file)
        crc = count = 0
        groups = []
        for group in range(file.num_row_groups):
            index = file.read_row_group(group, columns=list(INDEX)).to_pylist()
            for row in index:
                crc, count = chain(crc, row), count + 1
            groups += [group] if any(map(matches, index)) else []
        if (count, crc) != expected:
            raise TraceError(
                f"{path} is damaged: its {count} rows do not match the checksum over {expected[0]}; write it again"
            )

    def rows() -> Iterator[SequenceTrace]:
        with _opened(path) as file:
            for group in groups:
                yield from (_record(path, header, r) for r in file.read_row_group(group).to_pylist() if matches(r))

    return rows()


@contextlib.contextmanager
def _opened(path: str | Path) -> Iterator[pq.ParquetFile]:
    if not Path(path).is_file():
        raise TraceError(f"there is no trace file {path}")
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            yield file
    except (TraceError, GeneratorExit):
        raise
    except Exception as error:  # damaged bytes raise nearly anything in the parquet library
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise TraceError(f"{path} is damaged, cut off or no trace file ({reason}); write it again") from error


def _header(path: str | Path, file: pq.ParquetFile) -> tuple[TraceHeader, tuple[int, int]]:
    """The header, and (rows, checksum of the index), as the metadata say."""
    about = file.metadata.metadata or {}
    if VERSION not in about:
        raise TraceError(f"{path} is a parquet file, but no trace file, or it is damaged")
    if int(about[VERSION]) != FORMAT:
        raise TraceError(f"{path} has trace format {int(about[VERSION])}, this version reads {FORMAT}; update moe_rl")
    if zlib.crc32(about[HEADER]) != int(about[HEADER_CRC]):
        raise TraceError(f"{path} is damaged: its metadata do not match their checksum; write it again")
    facts = json.loads(about[HEADER])
    facts["layer_names"] = tuple(facts["layer_names"])
    expected = facts.pop("rows"), facts.pop("index_crc32")
    return TraceHeader(**facts), expected


def _record(path: str | Path, header: TraceHeader, row: dict[str, Any]) -> SequenceTrace:
    shape = (len(row["valid"]), len(header.layer_names), header.top_k)
    if row_crc(row) != row["crc32"] or len(row["expert_ids"]) != np.prod(shape) * header.numpy_dtype.itemsize:
        raise TraceError(f"{path} is damaged at step {row['step']}, sequence {row['sequence']}; write it again")
    return SequenceTrace(
        header,
        row["step"],
        row["update"],
        row["pass"],
        row["sequence"],
        np.frombuffer(row["expert_ids"], header.numpy_dtype).reshape(shape),
        np.frombuffer(row["valid"], np.uint8).astype(bool),
        None if row["token_ids"] is None else np.array(row["token_ids"], dtype=np.int64),
    )
