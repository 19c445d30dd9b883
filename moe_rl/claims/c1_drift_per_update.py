"""About ten percent of the activated experts change with every update."""

from collections.abc import Mapping

from moe_rl.claims._effects import Numbers, level_of, model_note, numbers_of
from moe_rl.claims.base import NOT_TESTABLE, Claim, Effect, Finding, Judgement, finding, in_band
from moe_rl.stats import CLAIM_RUNS
from moe_rl.store import Study
from moe_rl.summary import arms_of

LOW, HIGH = 0.05, 0.20
MEASURES = {
    "slot_change": "slot change by one update",
    "late_slot_change": "slot change by one update, second half of the run",
    "batch_slot_change": "slot change by a whole batch of M updates",
    "set_change": "set change by one update",
    "any_layer_change": "any-layer change by one update",
}
CLAIM = Claim(
    id="C1",
    title="About ten percent of the experts change with every update",
    said="After each gradient update, about 10 % of the experts that the policy activates for the same rollouts "
    "differ from those that it activated before (Qwen3-30B-A3B: 48 layers, K = 8 of E = 128).",
    source="arXiv 2507.18071, section 5.3",
    studies=("drift_per_update",),
    measure="slot change: 1 - |old & new| / K, mean over tokens and layers, replay off, on this step's rollouts, by "
    "one update; mean over the updates of a run.",
    rule="GRPO at its best setting, if its reward rises there (interval of final minus start above 0). Supported: "
    f"the mean lies in [{LOW:g}, {HIGH:g}] and its interval is no wider than that. Not supported: the interval lies "
    "outside. Otherwise not testable.",
    figures=("drift_by_update", "deviation_histogram", "drift_by_layer", "changed_layers"),
)


def judge(studies: Mapping[str, Study]) -> Finding:
    study = studies["drift_per_update"]
    numbers = numbers_of(study)
    best = {arm: numbers.best_setting(arm) for arm in arms_of(study)}
    effects = [
        level_of(f"{arm}: {told}", numbers.of(name, arm=arm, knobs=knobs), numbers.at(knobs), tested=False)
        for arm, knobs in best.items()
        if knobs is not None
        for name, told in MEASURES.items()
    ]
    effects += _at_other_rates(studies)
    return finding(_verdict(numbers, best.get("grpo")), effects, [model_note(study)])


def _at_other_rates(studies: Mapping[str, Study]) -> list[Effect]:
    """Drift depends on the learning rate: what a study over it says, for the reader."""
    if "drift_vs_lr" not in studies:
        return []
    numbers = numbers_of(studies["drift_vs_lr"])
    places = [(arm, knobs) for arm in arms_of(numbers.study) for knobs in numbers.settings(arm)]
    what = MEASURES["slot_change"]
    return [
        level_of(f"{arm}: {what}", numbers.of("slot_change", arm=arm, knobs=k), numbers.at(k), tested=False)
        for arm, k in places
    ]


def _verdict(numbers: Numbers, knobs: str | None) -> Judgement:
    if knobs is None:
        return Judgement(NOT_TESTABLE, "arm grpo has no run with a result")
    of_grpo, at = {"arm": "grpo", "knobs": knobs}, numbers.at(knobs)
    drift = level_of("GRPO's slot change by one update", numbers.of("slot_change", **of_grpo), at, tested=False)
    gain = level_of("GRPO's final minus start", numbers.of("gain", **of_grpo), at, tested=False)
    if gain.estimate.n >= CLAIM_RUNS and not gain.estimate.low > 0:
        return Judgement(NOT_TESTABLE, f"{gain.name} is {gain.estimate}: drift is asked for where the policy learns")
    return in_band(drift, LOW, HIGH)
