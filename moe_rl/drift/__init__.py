"""How routing differs between two policies on the same tokens, and what is measured of it in a run."""

from moe_rl.drift.sets import Drift, compare

__all__ = ["Drift", "compare"]
