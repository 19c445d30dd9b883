"""Trace files: routing on disk, as parquet, one row per sequence and pass, over the sequence's own real tokens.

    with TraceWriter("traces.parquet", trace.layer_names, trace.num_experts, trace.top_k) as writer:
        writer.add(trace, attention_BS, step=3)
    for record in read_traces("traces.parquet", step=3, source="new"):
        record.expert_ids_TLK

What a file is made of, and reading it: store/traces.py.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from moe_rl.provenance import versions
from moe_rl.routing_trace import RoutingTrace, id_dtype
from moe_rl.store.traces import FORMAT, HEADER, HEADER_CRC, SCHEMA, VERSION, TraceError, TraceHeader, chain, row_crc

ROW_GROUP_BYTES = 8 * 2**20  # what a writer holds in memory


class TraceWriter:
    """Writes one trace file; memory does not grow with its length. A context manager.

    The file gets its name when the block ends well: until then it is a hidden temporary file beside it, which an
    exception removes. Router logits are not written. TraceError when `path` exists already.
    """

    def __init__(
        self, path: str | Path, layer_names: Sequence[str], num_experts: int, top_k: int, model_class: str = ""
    ):
        self.path = Path(path)
        dtype = str(id_dtype(num_experts)).removeprefix("torch.")
        self.header = TraceHeader(tuple(layer_names), num_experts, top_k, dtype, model_class, versions())
        self.rows: list[dict[str, Any]] = []
        self.held = self.count = self.index_crc = 0
        if self.path.exists():
            raise TraceError(f"{self.path} exists; delete it or choose another name")
        self.temporary = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(self.temporary, "xb")  # noqa: SIM115 (closed in __exit__)
        except OSError as error:
            raise TraceError(f"cannot write {self.path}: {error.strerror}; choose another place") from error
        # No arrow schema: it would repeat the parquet one, and a second copy can contradict the first.
        self.writer = pq.ParquetWriter(
            self.file, SCHEMA, compression="zstd", use_dictionary=["pass"], write_statistics=False, store_schema=False,
            write_page_checksum=True,
        )  # fmt: skip

    def add(
        self,
        trace: RoutingTrace,
        attention_BS: Tensor,
        *,
        step: int,
        sequences: Sequence[int] | None = None,
        tokens_BS: Tensor | None = None,
    ) -> None:
        """One row for each sequence of `trace`: its real tokens by `attention_BS`, known or not.

        sequences: their numbers within the step, default 0, 1, ... Update and pass are the trace's own. RoutingError
        for a trace of another model, an impossible row (see RoutingTrace.check), or shapes that disagree.
        """
        B = len(attention_BS)
        kinds = [(x.top_k, x.num_experts, x.layer_names) for x in (self.header, trace)]
        if kinds[0] != kinds[1]:
            file, given = (f"{K} of {E} experts in {len(names)} layers ({names[0]}, ...)" for K, E, names in kinds)
            raise TraceError(f"{self.path} holds {file}, the trace {given}; write each model to a file of its own")
        trace = trace.aligned_to(attention_BS.to(trace.valid_BS.device))
        trace.check()
        numbers = range(B) if sequences is None else sequences
        if len(numbers) != B or (tokens_BS is not None and tokens_BS.shape != attention_BS.shape):
            raise TraceError(
                f"a trace of {B} sequences came with {len(numbers)} sequence numbers and tokens of shape "
                f"{None if tokens_BS is None else tuple(tokens_BS.shape)}; give one number and one row each"
            )
        ids_BSLK = trace.expert_ids_BSLK.masked_fill(~trace.valid_BS[:, :, None, None], 0).cpu().numpy()
        valid_BS, real_BS = trace.valid_BS.cpu().numpy(), attention_BS.bool().cpu().numpy()
        tokens = None if tokens_BS is None else tokens_BS.cpu().numpy()
        for row, (sequence, real) in enumerate(zip(numbers, real_BS, strict=True)):
            self._append(
                {
                    "step": step,
                    "update": trace.update,
                    "pass": trace.source,
                    "sequence": sequence,
                    "expert_ids": np.ascontiguousarray(ids_BSLK[row][real], self.header.numpy_dtype).tobytes(),
                    "valid": valid_BS[row][real].astype(np.uint8).tobytes(),
                    "token_ids": None if tokens is None else tokens[row][real].astype(np.int32),
                }
            )

    def _append(self, row: dict[str, Any]) -> None:
        row["crc32"] = row_crc(row)
        self.rows.append(row)
        self.index_crc = chain(self.index_crc, row)
        self.count += 1
        self.held += len(row["expert_ids"]) + 5 * len(row["valid"])
        if self.held >= ROW_GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self.rows:
            self.writer.write_table(pa.Table.from_pylist(self.rows, schema=SCHEMA))
        self.rows, self.held = [], 0

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._flush() if kind is None else self.rows.clear()
            facts = dataclasses.asdict(self.header) | {"rows": self.count, "index_crc32": self.index_crc}
            text = json.dumps(facts).encode()
            about = {VERSION: str(FORMAT), HEADER: text, HEADER_CRC: str(zlib.crc32(text))}
            self.writer.add_key_value_metadata(about)
            self.writer.close()
            self.file.flush()
            os.fsync(self.file.fileno())
            if kind is None:
                os.replace(self.temporary, self.path)
        finally:
            self.file.close()
            self.temporary.unlink(missing_ok=True)
