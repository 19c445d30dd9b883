"""moe_rl: what happens to a Mixture-of-Experts model's routing while it is trained with reinforcement learning.

The instrument alone, on any supported transformers model:

    from moe_rl import record, replay

    with record(model) as recorder:
        model(input_ids, attention_mask=attention_mask)
    with replay(model, recorder.trace):
        model(input_ids, attention_mask=attention_mask).logits.sum().backward()
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
__all__ = ["RoutingTrace", "record", "replay"]

_HOMES = {"record": "moe_rl.recording", "replay": "moe_rl.replaying", "RoutingTrace": "moe_rl.routing_trace"}


def __getattr__(name: str) -> Any:  # lazily: figures and the store import no torch
    if name not in _HOMES:
        raise AttributeError(f"module 'moe_rl' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
