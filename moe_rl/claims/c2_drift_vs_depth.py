"""Deeper models drift more."""

from collections.abc import Mapping

from moe_rl.claims._effects import level_of, model_note, numbers_of, slope_by_seed, with_holm
from moe_rl.claims.base import Claim, Finding, above_zero, finding
from moe_rl.store import Study
from moe_rl.summary import arms_of

RELEVANT_SLOPE = 0.1  # 12 times the depth, 1.3 times the drift
CLAIM = Claim(
    id="C2",
    title="Deeper models drift more",
    said="Expert-activation volatility becomes more serious the deeper the MoE model is.",
    source="arXiv 2507.18071, section 5.3",
    studies=("drift_vs_depth",),
    measure="exponent b of slot change by one update ~ layers^b, fitted for each seed over its depths. Slot change "
    "is a mean over layers; any-layer change grows with depth by itself and does not count.",
    rule="GRPO (or the only arm). Supported: the interval of b lies above 0, with p < .05. Not supported: it ends "
    f"below {RELEVANT_SLOPE:g}. Otherwise not testable.",
    figures=("against_knob", "drift_by_layer"),
)


def judge(studies: Mapping[str, Study]) -> Finding:
    study = studies["drift_vs_depth"]
    numbers = numbers_of(study, layers="model.layers")
    arms = arms_of(study)
    subject, *others = (
        level_of(
            f"{arm}: exponent of slot change against layers",
            slope_by_seed(numbers, arm, "layers", "slot_change"),
            study.folder.name,
        )
        for arm in sorted(arms, key=lambda arm: arm != "grpo")
    )
    levels = [
        level_of(f"{arm}: {told}", numbers.of(name, arm=arm, knobs=knobs), numbers.at(knobs), tested=False)
        for arm in arms
        for name, told in (("slot_change", "slot change"), ("any_layer_change", "any-layer change"))
        for knobs in numbers.settings(arm)
    ]
    effects = [subject, *with_holm(others), *levels]
    return finding(above_zero(subject, RELEVANT_SLOPE), effects, [model_note(study)])
