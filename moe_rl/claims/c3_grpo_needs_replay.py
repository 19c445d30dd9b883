"""GRPO fails to converge on MoE models without Routing Replay, and converges with it."""

from __future__ import annotations

from collections.abc import Mapping

from moe_rl.claims._effects import COMPARISONS, Numbers, contrast, frontier_effects, level_of, numbers_of, with_holm
from moe_rl.claims.base import (
    NOT_SUPPORTED,
    NOT_TESTABLE,
    RELEVANT,
    SUPPORTED,
    Claim,
    Effect,
    Finding,
    Judgement,
    above_zero,
    any_of,
    finding,
    too_few,
)
from moe_rl.contrasts import settings_to_compare
from moe_rl.stats import CLAIM_RUNS
from moe_rl.store import Study

PLAIN, REPLAY, PLACEBO = "grpo", "grpo_routing_replay", "grpo_shuffled_replay"
CLAIM = Claim(
    id="C3",
    title="GRPO needs Routing Replay to converge",
    said="Expert-activation volatility prevents the RL training of MoE models with GRPO from converging properly; "
    "with Routing Replay it converges.",
    source="arXiv 2507.18071, section 5.3 and figure 3",
    studies=COMPARISONS,
    measure="share of failing runs, and final reward paired by seed, replay minus plain. A run fails when it "
    "diverged, collapsed (final reward below half of its own best) or ended below its start; diverged runs count "
    "with reward 0.",
    rule="At every setting that both arms share. Supported: at some setting most GRPO runs fail, most runs with "
    "replay do not, and the difference lies above 0 with p < .05 (Holm over settings), unless the placebo of study "
    "controls, the routing of another sequence, helps as well. Not supported: most GRPO runs converge at every "
    "setting, with a gain over the start at one of them; or at every setting at which most GRPO runs fail, the "
    f"interval of the difference ends below {RELEVANT:g}, or GRPO with replay ends below its start, too (interval). "
    "Otherwise not testable.",
    figures=("reward", "knob_heat_map"),
)


def judge(studies: Mapping[str, Study]) -> Finding:
    places = [
        (numbers, one, other)
        for name in CLAIM.studies
        if name in studies
        for numbers in [numbers_of(studies[name], lr="optim.lr", updates="updates")]
        for one, other in settings_to_compare(studies[name], PLAIN, REPLAY)
    ]
    effects = with_holm([_difference(*place) for place in places])
    judged = [(*place, effect) for place, effect in zip(places, effects, strict=True)]
    enough = [place for place in judged if place[3].estimate.n >= CLAIM_RUNS]
    if not enough:
        verdict = too_few(effects[0]) if effects else Judgement(NOT_TESTABLE, f"{PLAIN} and {REPLAY} share no setting")
    else:
        verdict = _verdict(enough)
    placebo = _placebo(studies)
    if verdict.verdict == SUPPORTED and any(above_zero(effect).verdict == SUPPORTED for effect in placebo):
        verdict = Judgement(NOT_SUPPORTED, f"{verdict.because}; but the routing of another sequence helps as well")
    counts = [_counts(*place) for place in judged]
    return finding(verdict, [*effects, *frontier_effects(studies), *placebo], counts)


def _difference(numbers: Numbers, one: str, other: str) -> Effect:
    plain, replay = numbers.of("outcome", arm=PLAIN, knobs=one), numbers.of("outcome", arm=REPLAY, knobs=other)
    return contrast("final reward, replay minus plain", replay, plain, numbers.at(one, other))


def _failing(numbers: Numbers, arm: str, knobs: str) -> tuple[int, int]:
    fails = numbers.of("failing", arm=arm, knobs=knobs)
    return int(sum(fails.values())), len(fails)


def _verdict(enough: list[tuple[Numbers, str, str, Effect]]) -> Judgement:
    failing = [place for place in enough if _mostly_fails(place[0], PLAIN, place[1])]
    if not failing:
        gains = [level_of("the gain of GRPO", n.of("gain", arm=PLAIN, knobs=one), n.at(one)) for n, one, _, _ in enough]
        learns = [gain for gain in gains if gain.estimate.low > 0]
        where = "the one setting" if len(enough) == 1 else f"each of {len(enough)} settings"
        told = f"most runs of GRPO without replay converge at {where} with enough seeds"
        if learns:
            best = max(learns, key=lambda gain: gain.estimate.value)
            return Judgement(NOT_SUPPORTED, f"{told}; its gain at {best.at} is {best.estimate}")
        return Judgement(NOT_TESTABLE, f"{told}, but its reward rises at none of them")
    return any_of([_at_one(*place) for place in failing], "settings at which most GRPO runs fail")


def _mostly_fails(numbers: Numbers, arm: str, knobs: str) -> bool:
    failed, n = _failing(numbers, arm, knobs)
    return failed > n / 2


def _at_one(numbers: Numbers, one: str, other: str, effect: Effect) -> Judgement:
    """Where most GRPO runs fail: does replay cure them?"""
    better = above_zero(effect)
    gain = level_of("the gain with replay", numbers.of("gain", arm=REPLAY, knobs=other)).estimate
    if gain.high < 0:
        return Judgement(NOT_SUPPORTED, f"{better.because}; with replay, final minus start is {gain}")
    if better.verdict == SUPPORTED and _mostly_fails(numbers, REPLAY, other):
        return Judgement(NOT_TESTABLE, f"{better.because}; but most runs with replay fail, too")
    return better


def _counts(numbers: Numbers, one: str, other: str, effect: Effect) -> str:
    told = [
        "{} of {} {} runs".format(*_failing(numbers, arm, knobs), arm) for arm, knobs in ((PLAIN, one), (REPLAY, other))
    ]
    return f"Failing at {numbers.at(one, other)}: {' and '.join(told)}."


def _placebo(studies: Mapping[str, Study]) -> list[Effect]:
    """What replaying the routing of another sequence does to GRPO, all weights trained."""
    if "controls" not in studies:
        return []
    numbers = numbers_of(studies["controls"], trains="optim.trains")
    a, b = (numbers.at_best("outcome", arm, trains="all") for arm in (PLACEBO, PLAIN))
    if not a or not b:
        return []
    return with_holm([contrast(f"placebo: final reward, {PLACEBO} minus {PLAIN}", a, b, "controls")])
