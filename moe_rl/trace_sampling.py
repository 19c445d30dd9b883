"""Trace files of a run: the routing of some rollouts before and after every update of a step."""

from __future__ import annotations

from pathlib import Path

from moe_rl.drift import TokenSet
from moe_rl.traces import TraceWriter


def write_step(folder: Path, step: int, tokens: TokenSet, model_class: str) -> None:
    """Write what the drift meter saw of `tokens` in a step to folder/traces/step_<step>.parquet."""
    first = tokens.history[0]
    path = folder / "traces" / f"step_{step:05d}.parquet"
    with TraceWriter(path, first.layer_names, first.num_experts, first.top_k, model_class) as writer:
        for trace in tokens.history:
            writer.add(trace, tokens.attention_BS, step=step, sequences=tokens.rows, tokens_BS=tokens.tokens_BS)
