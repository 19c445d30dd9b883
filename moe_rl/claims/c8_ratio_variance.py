"""Token ratios accumulate variance with the length of a response, the sequence ratio does not."""

from __future__ import annotations

from collections.abc import Mapping

from moe_rl.claims._effects import level_of, numbers_of, slope_by_seed, with_holm
from moe_rl.claims.base import (
    NOT_SUPPORTED,
    NOT_TESTABLE,
    SUPPORTED,
    Claim,
    Effect,
    Finding,
    Judgement,
    above_zero,
    all_of,
    finding,
    too_few,
)
from moe_rl.stats import CLAIM_RUNS
from moe_rl.store import Study
from moe_rl.summary import arms_of

GROWS = 0.1
CLAIM = Claim(
    id="C8",
    title="Token ratios accumulate variance with length",
    said="Token-level importance ratios add noise that accumulates over long responses; the sequence ratio, "
    "normalised by length, stays in one range whatever the length.",
    source="arXiv 2507.18071, sections 3 and 4.1",
    studies=("ratio_vs_length",),
    measure="exponents, fitted for each seed over its response lengths |y|, of the spread of a sequence's summed log "
    "ratio (|y| times the standard deviation of log s) and of the spread of log s itself, root mean square over "
    "updates 2 to M. Independent tokens would give 1/2 and -1/2, equal ones 1 and 0.",
    rule="In every arm with 5 seeds. Supported: the sum's exponent lies above 0 with p < .05 (Holm over arms), and "
    f"the interval of the sequence ratio's ends below {GROWS:g}. Not supported: the interval of the sum's ends below "
    f"{GROWS:g}, or that of the sequence ratio's begins above. Otherwise not testable.",
    figures=("against_knob", "ratio_bands"),
)


def judge(studies: Mapping[str, Study]) -> Finding:
    numbers = numbers_of(studies["ratio_vs_length"])
    sums = numbers.table["log_s_sd"] * numbers.table["response_length"]
    numbers.table["log_w_sum_sd"] = sums
    columns = {"log_w_sum_sd": "the summed log ratio", "log_s_sd": "log s", "log_w_sd": "log w of a token"}
    slopes = {
        (arm, name): level_of(
            f"{arm}: exponent of the spread of {told} against length",
            slope_by_seed(numbers, arm, "response_length", name),
            numbers.study.folder.name,
        )
        for arm in arms_of(numbers.study)
        for name, told in columns.items()
    }
    for name in columns:
        places = [(arm, name) for arm in arms_of(numbers.study)]
        slopes |= dict(zip(places, with_holm([slopes[place] for place in places]), strict=True))
    parts = [
        part
        for arm in arms_of(numbers.study)
        if slopes[arm, "log_s_sd"].estimate.n >= CLAIM_RUNS
        for part in (above_zero(slopes[arm, "log_w_sum_sd"], GROWS), _does_not_grow(slopes[arm, "log_s_sd"]))
    ]
    return finding(all_of(*parts) if parts else too_few(next(iter(slopes.values()))), list(slopes.values()))


def _does_not_grow(effect: Effect) -> Judgement:
    e = effect.estimate
    verdict = SUPPORTED if e.high < GROWS else NOT_SUPPORTED if e.low > GROWS else NOT_TESTABLE
    return Judgement(verdict, f"{effect.name} is {e}")
