"""What a claim is, and the few rules by which data give a verdict.

"Not supported" takes data that exclude an effect of relevant size: where an interval reaches both 0 and such an effect,
the verdict is "not testable at this scale", and says how small an effect could have been seen.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from moe_rl import stats

SUPPORTED = "supported here"
NOT_SUPPORTED = "not supported here"
NOT_TESTABLE = "not testable at this scale"
NOT_RUN = "not run"  # none of its studies is there: nothing is said of what could be tested
VERDICTS = (SUPPORTED, NOT_SUPPORTED, NOT_TESTABLE, NOT_RUN)
RELEVANT = 0.05  # of the reward, whose range is 0 to 1: what counts as a difference between two methods
LEVEL = 0.05  # of p after Holm

Values = Mapping[int, float]  # seed -> number


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claim under test: what was said and where, the studies that bear on it, what is measured, and the rule.

    figures: names of the figures that show it. contested: what others say against it, with the source.
    """

    id: str
    title: str
    said: str
    source: str
    studies: tuple[str, ...]
    measure: str
    rule: str
    figures: tuple[str, ...] = ()
    contested: str = ""


@dataclasses.dataclass(frozen=True)
class Effect:
    """A measured number with its 95 % interval over seeds.

    at: study and setting. p, sign_flip_p: of "it is 0", by the t test and exactly by sign flips, after Holm over the
    tests that decide the claim, or over those that are shown besides; NaN where nothing is tested or below 5 seeds.
    """

    what: str
    estimate: stats.Estimate
    at: str = ""
    p: float = math.nan
    sign_flip_p: float = math.nan

    @property
    def name(self) -> str:
        return f"{self.what} ({self.at})" if self.at else self.what

    @property
    def half_width(self) -> float:
        """The least difference that these data could have told from 0, about."""
        return (self.estimate.high - self.estimate.low) / 2


@dataclasses.dataclass(frozen=True)
class Judgement:
    """A verdict and the sentence that gives its numbers."""

    verdict: str
    because: str


@dataclasses.dataclass(frozen=True)
class Finding:
    """What the data say on a claim. notes: what a reader has to know besides."""

    verdict: str
    because: str
    effects: tuple[Effect, ...] = ()
    notes: tuple[str, ...] = ()


def finding(judgement: Judgement, effects: Sequence[Effect] = (), notes: Sequence[str] = ()) -> Finding:
    return Finding(judgement.verdict, judgement.because, tuple(effects), tuple(notes))


def not_run(*studies: str) -> Finding:
    told = f"study {studies[0]} has" if len(studies) == 1 else f"studies {' and '.join(studies)} have"
    return Finding(NOT_RUN, f"{told} not been run")


# ----------------------------------------------------------------------------------------------------------- the rules
def above_zero(effect: Effect, relevant: float = RELEVANT) -> Judgement:
    """Supported: interval above 0 and p < .05. Not: interval ends below `relevant`. Else it cannot be told."""
    e = effect.estimate
    if e.n < stats.CLAIM_RUNS:
        return too_few(effect)
    told = f"{effect.name} is {e}{_p(effect)}"
    if e.low > 0 and effect.p < LEVEL:
        return Judgement(SUPPORTED, told)
    if e.high < relevant:
        other_way = ": the other way round" if e.high < 0 else f": {relevant:g} or more is excluded"
        return Judgement(NOT_SUPPORTED, told + other_way)
    why = "p is not below .05 after Holm" if e.low > 0 else f"less than {effect.half_width:.2g} cannot be seen"
    return Judgement(NOT_TESTABLE, f"{told}: {why} with these seeds")


def no_worse(effect: Effect) -> Judgement:
    """Supported: interval above -RELEVANT. Not: below that, or below 0 with p < .05. Else it cannot be told."""
    e = effect.estimate
    if e.n < stats.CLAIM_RUNS:
        return too_few(effect)
    told, worse = f"{effect.name} is {e}{_p(effect)}", e.high < 0 and effect.p < LEVEL
    if e.low > -RELEVANT:
        but = "worse, but " if worse else ""
        return Judgement(SUPPORTED, f"{told}: {but}a loss of {RELEVANT:g} or more is excluded")
    if e.high < -RELEVANT or worse:
        return Judgement(NOT_SUPPORTED, told)
    return Judgement(NOT_TESTABLE, f"{told}: neither a loss of {RELEVANT:g} nor no loss is excluded")


def in_band(effect: Effect, low: float, high: float) -> Judgement:
    """Supported: mean in [low, high], interval no wider than it. Not: interval outside. Else it cannot be told."""
    e = effect.estimate
    if e.n < stats.CLAIM_RUNS:
        return too_few(effect)
    told = f"{effect.name} is {e}"
    band = f"[{low:.3g}, {high:.3g}]"
    if e.high < low or e.low > high:
        return Judgement(NOT_SUPPORTED, f"{told}, outside {band}")
    if effect.half_width > (high - low) / 2:
        return Judgement(NOT_TESTABLE, f"{told}: an interval wider than {band}")
    if not low <= e.value <= high:
        return Judgement(NOT_TESTABLE, f"{told}: outside {band}, but its interval reaches into it")
    return Judgement(SUPPORTED, f"{told}, inside {band}")


def too_few(effect: Effect) -> Judgement:
    n = effect.estimate.n
    told = f"has {n} of at least {stats.CLAIM_RUNS} seeds" if n else "cannot be had: no runs have both sides"
    return Judgement(NOT_TESTABLE, f"{effect.name} {told}")


def all_of(*judgements: Judgement) -> Judgement:
    """Every part has to hold: one that fails decides, else one that cannot be told."""
    verdicts = [judgement.verdict for judgement in judgements]
    verdict = next((v for v in (NOT_SUPPORTED, NOT_TESTABLE) if v in verdicts), SUPPORTED)
    return Judgement(verdict, "; ".join(judgement.because for judgement in judgements))


def any_of(judgements: Sequence[Judgement], where: str) -> Judgement:
    """One place is enough to support it; to refute it, all have to. where: what the places are, in the plural."""
    if not judgements:
        return Judgement(NOT_TESTABLE, f"there are no {where} that could show it")
    verdicts = [judgement.verdict for judgement in judgements]
    verdict = next((v for v in (SUPPORTED, NOT_TESTABLE) if v in verdicts), NOT_SUPPORTED)
    told = [judgement.because for judgement in judgements if judgement.verdict == verdict]
    if verdict == SUPPORTED:
        return Judgement(verdict, told[0])
    more = f"; and {len(told) - 2} more" if len(told) > 2 else ""
    return Judgement(verdict, f"at none of {len(judgements)} {where}: " + "; ".join(told[:2]) + more)


def _p(effect: Effect) -> str:
    return "" if math.isnan(effect.p) else f", p = {effect.p:.2g}"
