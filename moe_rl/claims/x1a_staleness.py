"""GSPO needs no Routing Replay, however stale the rollouts."""

from __future__ import annotations

from collections.abc import Mapping

from moe_rl.claims._effects import Numbers, contrast, level_of, numbers_of, with_holm
from moe_rl.claims.base import NOT_TESTABLE, RELEVANT, Claim, Effect, Finding, above_zero, all_of, finding, no_worse
from moe_rl.store import Study

PAIRS = (("gspo", "gspo_routing_replay"), ("gspo", "grpo_routing_replay"), ("grpo", "grpo_routing_replay"))
CLAIM = Claim(
    id="X1a",
    title="GSPO needs no replay at high staleness",
    said="GSPO trains MoE models stably without Routing Replay, rollouts being split into several updates.",
    source="arXiv 2507.18071, section 5.3",
    contested="Others find that the staler the rollouts are, the more replay of the routing is needed to train "
    "stably (arXiv 2512.01374, whose sequence of updates a batch goes from 1 to 8).",
    studies=("staleness",),
    measure="final reward (diverged: 0), without minus with replay, paired by seed, at each number of updates M that "
    "a batch of rollouts is split into, each arm at its best setting for that M.",
    rule="At the largest M. Supported: GSPO's gain over the start lies above 0 with p < .05, and against GSPO with "
    f"replay a loss of {RELEVANT:g} is excluded. Not supported: the interval of the gain ends below {RELEVANT:g}, or "
    f"GSPO lies below GSPO with replay with p < .05, a loss of {RELEVANT:g} not being excluded. Otherwise not "
    "testable. Holm over these two.",
    figures=("reward", "knob_heat_map"),
)


def judge(studies: Mapping[str, Study]) -> Finding:
    numbers = numbers_of(studies["staleness"], updates="updates")
    stalest = max(numbers.table["updates"])
    gain = level_of("the gain of gspo", numbers.at_best("gain", "gspo", updates=stalest), f"staleness, M={stalest}")
    pairs = {(p, m): _pair(numbers, *p, m) for m in sorted(set(numbers.table["updates"])) for p in PAIRS}
    gain, against = with_holm([gain, pairs.pop((PAIRS[0], stalest))])
    shown = with_holm([effect for effect in pairs.values() if effect.estimate.n])
    if not against.estimate.n:
        return Finding(NOT_TESTABLE, f"no seed has gspo and gspo_routing_replay at M={stalest}", (gain, *shown))
    return finding(all_of(above_zero(gain), no_worse(against)), [gain, against, *shown])


def _pair(numbers: Numbers, plain: str, replayed: str, updates: int) -> Effect:
    a, b = (numbers.at_best("outcome", arm, updates=updates) for arm in (plain, replayed))
    return contrast(f"final reward, {plain} minus {replayed}", a, b, f"staleness, M={updates}")
