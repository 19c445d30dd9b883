"""GSPO converges on MoE models without Routing Replay."""

from __future__ import annotations

from collections.abc import Mapping

from moe_rl.claims._effects import (
    COMPARISONS,
    Numbers,
    contrast,
    first_with_seeds,
    frontier_effects,
    level_of,
    nothing_to_cure,
    with_holm,
)
from moe_rl.claims.base import (
    NOT_TESTABLE,
    RELEVANT,
    Claim,
    Effect,
    Finding,
    Judgement,
    above_zero,
    all_of,
    finding,
    no_worse,
)
from moe_rl.store import Study

ARM, REPLAYED = "gspo", ("grpo_routing_replay", "gspo_routing_replay")
CLAIM = Claim(
    id="C4",
    title="GSPO converges without Routing Replay",
    said="GSPO does not depend on Routing Replay and converges normally without it.",
    source="arXiv 2507.18071, section 5.3",
    studies=COMPARISONS,
    measure="gain: final reward minus the reward before the first update, diverged runs with reward 0; and final "
    "reward against arms with replay, each arm at its best setting, paired by seed.",
    rule="GSPO at its best setting, in the first of these studies in which it has 5 seeds. Supported: the gain lies "
    f"above 0 with p < .05, and against each arm with replay that was run a loss of {RELEVANT:g} is excluded. Not "
    f"supported: the interval of the gain ends below {RELEVANT:g}, or GSPO lies below an arm with replay with p < .05, "
    f"a loss of {RELEVANT:g} not being excluded. Otherwise not testable. Holm over these tests.",
    figures=("reward", "final_reward", "knob_heat_map"),
)


def judge(studies: Mapping[str, Study]) -> Finding:
    numbers = first_with_seeds(studies, CLAIM.studies, ARM)
    best = numbers.best_setting(ARM)
    if best is None:
        return Finding(NOT_TESTABLE, f"arm {ARM} has no run with a result in study {numbers.study.folder.name}")
    gain, *losses = with_holm([_gain(numbers, best), *_losses(numbers, best)])
    return finding(_verdict(gain, losses), [gain, *losses, *frontier_effects(studies)], nothing_to_cure(numbers))


def _gain(numbers: Numbers, knobs: str) -> Effect:
    return level_of(f"the gain of {ARM}", numbers.of("gain", arm=ARM, knobs=knobs), numbers.at(knobs))


def _losses(numbers: Numbers, best: str) -> list[Effect]:
    own = numbers.of("outcome", arm=ARM, knobs=best)
    others = {arm: numbers.best_setting(arm) for arm in REPLAYED}
    return [
        contrast(f"final reward, {ARM} minus {arm}", own, numbers.of("outcome", arm=arm, knobs=k), numbers.at(best, k))
        for arm, k in others.items()
        if k is not None
    ]


def _verdict(gain: Effect, losses: list[Effect]) -> Judgement:
    if not losses:
        none = Judgement(NOT_TESTABLE, f"neither {' nor '.join(REPLAYED)} was run beside it")
        return all_of(above_zero(gain), none)
    return all_of(above_zero(gain), *(no_worse(loss) for loss in losses))
