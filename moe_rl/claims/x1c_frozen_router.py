"""Freezing the router is enough, replay is not needed."""

from __future__ import annotations

from collections.abc import Mapping

from moe_rl.claims._effects import contrast, level_of, model_note, nothing_to_cure, numbers_of, with_holm
from moe_rl.claims.base import NOT_TESTABLE, RELEVANT, Claim, Finding, above_zero, all_of, finding, no_worse
from moe_rl.store import Study

CLAIM = Claim(
    id="X1c",
    title="Freezing the router is enough",
    said="GRPO on an MoE model trains stably without Routing Replay as long as the router's weights are frozen.",
    source="a remedy in use, named beside routing replay in arXiv 2510.23027v1, section 1",
    contested="A frozen router still moves its choices, because the hidden states that it scores move. Replay fixes "
    "the choice itself (arXiv 2507.18071, section 5.3).",
    studies=("controls",),
    measure="final reward (diverged: 0), GRPO with frozen router minus GRPO + Routing Replay with all weights "
    "trained, paired by seed, each at its best setting at the same M; slot change of each.",
    rule=f"Supported: the gain with frozen router lies above 0 with p < .05 and a loss of {RELEVANT:g} against replay "
    f"is excluded. Not supported: the interval of the gain ends below {RELEVANT:g}, or the frozen router lies below "
    f"replay with p < .05, a loss of {RELEVANT:g} not being excluded. Otherwise not testable. Holm over these two.",
    figures=("reward", "drift_by_update"),
)
TRAINED = {"no_router": "frozen router", "router": "router alone", "experts": "experts alone", "all": "all weights"}


def judge(studies: Mapping[str, Study]) -> Finding:
    numbers = numbers_of(studies["controls"], updates="updates", trains="optim.trains")
    stalest = max(numbers.table["updates"])
    replay = numbers.at_best("outcome", "grpo_routing_replay", trains="all", updates=stalest)
    outcomes = {trains: numbers.at_best("outcome", "grpo", trains=trains, updates=stalest) for trains in TRAINED}
    gains = numbers.at_best("gain", "grpo", trains="no_router", updates=stalest)
    gain = level_of("the gain with frozen router", gains)
    against = contrast("final reward, frozen router minus replay", outcomes["no_router"], replay)
    if not against.estimate.n:
        return Finding(
            NOT_TESTABLE, "study controls lacks grpo with frozen router, or grpo_routing_replay, on the same seeds"
        )
    others = [
        contrast(f"final reward, {told} minus all weights", outcomes[trains], outcomes["all"])
        for trains, told in TRAINED.items()
        if trains != "all" and outcomes[trains]
    ]
    gain, against = with_holm([gain, against])
    slots = [
        level_of(f"slot change by one update, {told}", values, tested=False)
        for trains, told in TRAINED.items()
        if (values := numbers.at_best("slot_change", "grpo", trains=trains, updates=stalest))
    ]
    notes = [f"All at M={stalest}. {model_note(numbers.study)}"]
    notes += nothing_to_cure(numbers, updates=stalest, trains="all")
    verdict = all_of(above_zero(gain), no_worse(against))
    return finding(verdict, [gain, against, *with_holm(others), *slots], notes)
