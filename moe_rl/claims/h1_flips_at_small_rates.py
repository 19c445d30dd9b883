"""Routing flips dominate the token ratios at small learning rates."""

from __future__ import annotations

import math
from collections.abc import Mapping

from moe_rl.claims._effects import Numbers, contrast, level_of, model_note, numbers_of, slope_by_seed, with_holm
from moe_rl.claims.base import Claim, Effect, Finding, above_zero, all_of, finding
from moe_rl.store import Study
from moe_rl.summary import arms_of

RELEVANT_SLOPE, RELEVANT_LOG = 0.1, math.log10(1.25)
CLAIM = Claim(
    id="H1",
    title="Flips dominate at small learning rates",
    said="An expectation of this lab, noted before its study was run: the part of the token log ratio that comes "
    "from changed weights grows like the learning rate, the part from flipped experts more slowly, so that flips "
    "dominate at small rates. There, if anywhere, Routing Replay should matter.",
    source="this repository",
    studies=("drift_vs_lr",),
    measure="log w = flip term [log pi_new(own routing) - log pi_new(old routing)] + weight term [log pi_new(old "
    "routing) - log pi_old]; root mean squares over response tokens; exponents against the learning rate for each "
    "seed; log10 of flip over weight at the smallest rate.",
    rule="GRPO (or the only arm). Supported: the weight term's exponent is larger than the flip term's, and flips "
    "exceed weights at the smallest rate, both with p < .05 (Holm over both). Not supported: the interval of the "
    f"difference of exponents ends below {RELEVANT_SLOPE:g}, or flips exceed weights at the smallest rate by less than "
    "a factor 1.25 (interval). Otherwise not testable.",
    figures=("flips_over_lr", "drift_and_ratio"),
)


def judge(studies: Mapping[str, Study]) -> Finding:
    numbers = numbers_of(studies["drift_vs_lr"], lr="optim.lr")
    arms = arms_of(numbers.study)
    arm = "grpo" if "grpo" in arms else arms[0]
    flips, weights = (slope_by_seed(numbers, arm, "lr", name) for name in ("flip_rms", "weight_rms"))
    slower = contrast(f"{arm}: exponent of the weight term minus that of the flip term", weights, flips, "drift_vs_lr")
    rates = sorted(set(numbers.table["lr"]))
    smallest, *ratios = (_ratio(numbers, arm, lr) for lr in rates)
    slower, smallest = with_holm([slower, smallest])
    levels = [
        level_of(f"{arm}: exponent of the {told} term against the learning rate", slopes, tested=False)
        for told, slopes in (("flip", flips), ("weight", weights))
    ]
    verdict = all_of(above_zero(slower, RELEVANT_SLOPE), above_zero(smallest, RELEVANT_LOG))
    return finding(verdict, [*levels, slower, smallest, *with_holm(ratios)], [model_note(numbers.study)])


def _ratio(numbers: Numbers, arm: str, lr: float) -> Effect:
    flip, weight = (numbers.of(name, arm=arm, lr=lr) for name in ("flip_rms", "weight_rms"))
    flips, weights = ({seed: math.log10(value) for seed, value in term.items() if value > 0} for term in (flip, weight))
    return contrast(f"{arm}: log10 of flip term over weight term", flips, weights, f"drift_vs_lr, lr={lr:g}")
