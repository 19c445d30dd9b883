"""Routing on disk and in other systems' shapes: trace files written and read, batches, tables, foreign arrays."""

from moe_rl.store.traces import SequenceTrace, TraceError, TraceHeader, read_header, read_traces
from moe_rl.traces.files import TraceWriter
from moe_rl.traces.layouts import from_layout, merge_turns, padded, to_pandas

__all__ = [
    "SequenceTrace", "TraceError", "TraceHeader", "TraceWriter", "from_layout", "merge_turns", "padded", "read_header",
    "read_traces", "to_pandas",
]  # fmt: skip
