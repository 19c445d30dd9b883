"""Trace files of a run: the routing of some rollouts before and after every update of every n-th step.

with step_traces(folder, model, rollouts, step, every, sequences) as keep:
    keep("old", 0)
    for number in range(1, updates + 1):
        ...
        keep("new", number)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from transformers import PreTrainedModel

from moe_rl.models.families import require_routers
from moe_rl.policy import routing_of
from moe_rl.records import Rollouts, RoutingTrace
from moe_rl.traces import TraceWriter


@contextlib.contextmanager
def step_traces(
    folder: str | Path, model: PreTrainedModel, rollouts: Rollouts, step: int, every: int, sequences: int
) -> Iterator[Callable[[str, int], None]]:
    """Yields keep(source, update), which writes the model's present routing of some rollouts.

    They go to folder/traces/step_<step>.parquet, the sampler's own routing first where it was recorded, and with their
    place in the step's rollouts as number. Every `every`-th step, `sequences` rollouts spread over all; either 0: keep
    does nothing. Each call of keep costs one forward of these rollouts; no replay may be in force.
    """
    if not every or not sequences or step % every:
        yield lambda source, update: None
        return
    rows = torch.linspace(0, len(rollouts) - 1, min(sequences, len(rollouts))).long()
    chosen = rollouts[rows.to(rollouts.tokens_BS.device)]
    sites = require_routers(model)
    path = Path(folder) / "traces" / f"step_{step:05d}.parquet"
    names = [site.name for site in sites]
    experts = max(site.num_experts for site in sites)
    with TraceWriter(path, names, experts, sites[0].top_k, type(model).__name__) as writer:

        def write(trace: RoutingTrace) -> None:
            writer.add(trace, chosen.attention_BS, step=step, sequences=rows.tolist(), tokens_BS=chosen.tokens_BS)

        def keep(source: str, update: int) -> None:
            write(routing_of(model, chosen.tokens_BS, chosen.attention_BS, source, update))

        if chosen.routing is not None:
            write(chosen.routing)
        yield keep
