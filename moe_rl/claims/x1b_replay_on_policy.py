"""Routing Replay hurts where training is on-policy."""

from __future__ import annotations

from collections.abc import Mapping

from moe_rl.claims._effects import Numbers, contrast, numbers_of, with_holm
from moe_rl.claims.base import NOT_TESTABLE, RELEVANT, Claim, Effect, Finding, above_zero, any_of, finding
from moe_rl.store import Study

PAIRS = (("grpo", "grpo_routing_replay"), ("grpo", "grpo_r3"), ("gspo", "gspo_routing_replay"))
CLAIM = Claim(
    id="X1b",
    title="Replay hurts when on-policy",
    said="Where every batch of rollouts is used for one update, the plain policy gradient is the most stable, and "
    "replaying the routing, which biases it, does worse.",
    source="arXiv 2512.01374, abstract and experiments with on-policy training",
    contested="The makers of Routing Replay state no such cost, and in one engine it cannot exist for the old "
    "policy's routing: with M = 1, it replays the very experts that the model chooses. Routing of another engine "
    "(R3, arXiv 2510.11370) can differ, and is said there to stabilise training.",
    studies=("staleness", "controls"),
    measure="final reward (diverged: 0), without minus with replay, paired by seed, at M = 1, each arm at its best "
    "setting.",
    rule="Over all pairs of an arm without and with replay at M = 1. Supported: one difference lies above 0 with p < "
    f".05 (Holm over pairs). Not supported: the interval of every one ends below {RELEVANT:g}. Otherwise not testable.",
    figures=("reward",),
)


def judge(studies: Mapping[str, Study]) -> Finding:
    every = [numbers_of(studies[name], updates="updates") for name in CLAIM.studies if name in studies]
    pairs = [_pair(numbers, *pair) for numbers in every for pair in PAIRS]
    effects = with_holm([effect for effect in pairs if effect.estimate.n])
    if not effects:
        return Finding(NOT_TESTABLE, "no seed has an arm with and without replay at M = 1")
    return finding(any_of([above_zero(effect) for effect in effects], "pairs of arms at M = 1"), effects)


def _pair(numbers: Numbers, plain: str, replayed: str) -> Effect:
    a, b = (numbers.at_best("outcome", arm, updates=1) for arm in (plain, replayed))
    return contrast(f"final reward, {plain} minus {replayed}", a, b, f"{numbers.study.folder.name}, M=1")
