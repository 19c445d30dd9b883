"""GSPO clips about a hundred times more tokens than GRPO, and still learns better."""

from __future__ import annotations

import math
from collections.abc import Mapping

from moe_rl.claims._effects import Numbers, contrast, level_of, numbers_of, with_holm
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
    in_band,
)
from moe_rl.stats import CLAIM_RUNS, Estimate
from moe_rl.store import Study

LOW, HIGH = 30, 300
PAPER = {"low": 3e-4, "high": 4e-4}
CLAIM = Claim(
    id="C5",
    title="GSPO clips a hundred times more tokens, and learns better",
    said="GSPO clips a share of tokens that is two orders of magnitude larger than GRPO's (0.15 against 0.0013), and "
    "still trains more efficiently.",
    source="arXiv 2507.18071, section 5.2 and figure 2",
    studies=("clipping",),
    measure="ratio of the shares of clipped tokens, mean over updates, gspo over grpo, geometric mean over seeds, "
    "paired; final reward, gspo minus grpo, paired. A token counts as clipped when its sequence is. GSPO at the "
    "paper's bounds.",
    rule=f"Supported: the mean ratio lies in [{LOW}, {HIGH}], its interval in logarithms is no wider than that, and "
    "the difference in reward lies above 0 with p < .05. Not supported: the ratio's interval lies outside, or that of "
    f"the difference ends below {RELEVANT:g}. Otherwise not testable.",
    figures=("clip_fraction", "reward"),
)


def judge(studies: Mapping[str, Study]) -> Finding:
    numbers = numbers_of(studies["clipping"], low="arm.policy_loss.clip_low", high="arm.policy_loss.clip_high")
    plain, paper = numbers.best_setting("grpo"), numbers.best_setting("gspo", **PAPER)
    if plain is None or paper is None:
        return Finding(NOT_TESTABLE, "study clipping lacks runs of grpo, or of gspo at the paper's bounds")
    settings = [paper, *(knobs for knobs in numbers.settings("gspo") if knobs != paper)]
    reward, *others = (_reward(numbers, knobs, plain) for knobs in settings)
    logs = [_log_ratio(numbers, knobs, plain) for knobs in settings]
    ratios = [_as_ratio(log) for log in logs]
    shares = [
        level_of(
            f"{arm}: share of tokens clipped",
            numbers.of("clip_frac", arm=arm, knobs=k),
            numbers.at(k),
            tested=False,
        )
        for arm, k in [("grpo", plain), *(("gspo", knobs) for knobs in settings)]
    ]
    clipped = in_band(logs[0], math.log10(LOW), math.log10(HIGH))
    if logs[0].estimate.n >= CLAIM_RUNS:
        told = f"{ratios[0].name} is {ratios[0].estimate}, asked for are {LOW} to {HIGH}"
        clipped = Judgement(clipped.verdict, told)
    effects = [*ratios, reward, *with_holm(others), *shares]
    notes = ["The paper's bounds were made for responses of thousands of tokens."]
    return finding(all_of(clipped, above_zero(reward)), effects, notes)


def _log_ratio(numbers: Numbers, knobs: str, plain: str) -> Effect:
    """log10 of clipped tokens, gspo over grpo; seeds in which one clips nothing have no logarithm."""
    gspo, grpo = (
        {seed: math.log10(share) for seed, share in numbers.of("clip_frac", arm=arm, knobs=k).items() if share > 0}
        for arm, k in (("gspo", knobs), ("grpo", plain))
    )
    return contrast("ratio of clipped tokens, gspo over grpo", gspo, grpo, numbers.at(knobs, plain))


def _as_ratio(log: Effect) -> Effect:
    e = log.estimate
    return Effect(log.what, Estimate(10**e.value, 10**e.low, 10**e.high, e.n), log.at)


def _reward(numbers: Numbers, knobs: str, plain: str) -> Effect:
    gspo, grpo = numbers.of("outcome", arm="gspo", knobs=knobs), numbers.of("outcome", arm="grpo", knobs=plain)
    return contrast("final reward, gspo minus grpo", gspo, grpo, numbers.at(knobs, plain))
