"""Statistics for few seeds: intervals, paired differences, exact tests. numpy and scipy only.

Below CLAIM_RUNS seeds nothing here gives a p value or a verdict; below BOOTSTRAP_RUNS nothing bootstraps. Values that
are not finite are refused: a run that diverged is counted and reported, never averaged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import stdtr, stdtrit

CLAIM_RUNS = 5
BOOTSTRAP_RUNS = 10
EXACT_LIMIT = 20
LEVEL = 0.95  # of every interval
TOO_FEW = "too few seeds for a significance claim"

Numbers = Sequence[float] | npt.NDArray[np.float64]


class StatsError(ValueError):
    """A statistic that these data cannot carry; the message says how many runs it takes."""


@dataclass(frozen=True)
class Estimate:
    """A value with its interval, in the unit of the data. low and high are NaN when n < 2: one run has no spread."""

    value: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        if self.n < 2:
            return f"{self.value:.3g} (n = {self.n}, no interval)"
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}] (n = {self.n})"


def _finite(values: Numbers, least: int, what: str) -> npt.NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64).ravel()
    if len(array) < least:
        raise StatsError(f"{what} takes at least {least} runs, got {len(array)}; add seeds")
    if not np.isfinite(array).all():
        broken = int((~np.isfinite(array)).sum())
        raise StatsError(f"{what} got {broken} values that are not finite; report those runs apart")
    return array


def mean_interval(values: Numbers) -> Estimate:
    """Mean and Student t interval: m ± t_{n-1, (1+LEVEL)/2} · sd / sqrt(n), sd with n - 1. Unit: that of the values.

    Errors: StatsError without values or with one that is not finite. Source: Student 1908; any text book.
    """
    array = _finite(values, 1, "a mean")
    mean, low, high = mean_intervals(array[None])[0]
    return Estimate(float(mean), float(low), float(high), len(array))


def mean_intervals(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """`mean_interval` of every row of [points, runs] at once: [points, 3] of mean, low, high. Errors: as there."""
    points, n = values.shape
    _finite(values, min(1, points), "a mean")
    mean = values.mean(axis=1)
    if n == 1:
        return np.stack([mean, *np.full((2, points), np.nan)], axis=1)
    half = stdtrit(n - 1, (1 + LEVEL) / 2) * values.std(axis=1, ddof=1) / np.sqrt(n)
    return np.stack([mean, mean - half, mean + half], axis=1)


def paired(a: Mapping[int, float], b: Mapping[int, float]) -> npt.NDArray[np.float64]:
    """a - b for the seeds that both arms have, in the order of the seeds. Unit: that of the values.

    Pairing by seed removes what both arms share: prompts, start and sampling stream. Errors: StatsError when they
    share none.
    """
    seeds = sorted(a.keys() & b.keys())
    if not seeds:
        raise StatsError(f"no common seed: {sorted(a)} and {sorted(b)}; run both arms with the same seeds")
    return _finite([a[seed] - b[seed] for seed in seeds], 1, "a paired difference")


def sign_flip_p(differences: Numbers) -> float:
    """Exact two-sided p: share of the 2^n sign patterns with |mean| at least the observed one. No unit.

    Exact under "each difference is symmetric about 0"; the smallest possible value is 2 / 2^n: .0625 for 5 seeds,
    .03125 for 6. Errors: StatsError below 5 differences, or above 20 (use the t interval). Source: Fisher 1935, §21.
    """
    if len(differences) < CLAIM_RUNS:
        raise StatsError(f"{TOO_FEW}: {len(differences)} of at least {CLAIM_RUNS}")
    array = _finite(differences, CLAIM_RUNS, "a sign-flip test")
    if len(array) > EXACT_LIMIT:
        raise StatsError(f"{len(array)} differences; above {EXACT_LIMIT} use the t interval")
    totals = np.zeros(1)
    for value in array:
        totals = np.concatenate([totals + value, totals - value])
    observed = abs(array.sum())
    return float(np.mean(np.abs(totals) >= observed - 1e-12 * np.abs(array).sum()))


def t_test_p(differences: Numbers) -> float:
    """Two-sided p of the paired t test: 2 · F_{n-1}(-|m| / (sd / sqrt(n))). No unit; 1 when all differences are 0.

    Errors: StatsError below 5 differences.
    """
    if len(differences) < CLAIM_RUNS:
        raise StatsError(f"{TOO_FEW}: {len(differences)} of at least {CLAIM_RUNS}")
    array = _finite(differences, CLAIM_RUNS, "a t test")
    error = array.std(ddof=1) / np.sqrt(len(array))
    if error == 0:
        return 1.0 if array.mean() == 0 else 0.0
    return float(2 * stdtr(len(array) - 1, -abs(array.mean()) / error))


def both_tests(differences: Numbers) -> tuple[float, float]:
    """(t_test_p, sign_flip_p), each NaN for fewer or more differences than it takes."""
    n = len(differences)
    return (
        t_test_p(differences) if n >= CLAIM_RUNS else math.nan,
        sign_flip_p(differences) if CLAIM_RUNS <= n <= EXACT_LIMIT else math.nan,
    )


def holm(p_values: Numbers) -> list[float]:
    """Holm's step-down adjusted p, in the order given: running maximum of (m - rank) · p in rising order, at most 1.

    NaN, where nothing was tested, stays NaN and does not count towards m. Controls the chance of any false claim over
    all pairs. Errors: StatsError for a p outside [0, 1]. Source: Holm 1979, Scand. J. Statist. 6, 65-70.
    """
    raw = np.asarray(p_values, dtype=np.float64)
    if ((raw < 0) | (raw > 1)).any():
        raise StatsError(f"p values {p_values} reach outside [0, 1]")
    rising = raw.argsort()  # NaN last
    steps = np.minimum(1.0, (np.isfinite(raw).sum() - np.arange(len(raw))) * raw[rising])
    adjusted = np.empty_like(raw)
    adjusted[rising] = np.maximum.accumulate(steps)
    return [float(p) for p in adjusted]


def iqm(values: Numbers) -> float:
    """Interquartile mean: the mean after floor(n/4) values are cut from each end. Unit: that of the values.

    Errors: StatsError without values. Source: Agarwal et al. 2021, arXiv 2108.13264 (scipy.stats.trim_mean at .25).
    """
    array = np.sort(_finite(values, 1, "an interquartile mean"))
    cut = len(array) // 4
    return float(array[cut : len(array) - cut].mean())


def iqm_bootstrap(
    runs_by_task: Mapping[str, Numbers], generator: np.random.Generator, resamples: int = 10_000
) -> Estimate:
    """IQM over all runs of all tasks with a stratified percentile bootstrap: runs are redrawn within each task.

    Unit: that of the values (normalise tasks first). n is the smallest number of runs of a task. Errors: StatsError
    below 10 runs in any task: over 3 runs such an interval covers 78 % where it says 95 %, over 5 runs 82 %.
    Source: Agarwal et al. 2021, arXiv 2108.13264, section 4.
    """
    if not runs_by_task:
        raise StatsError("a bootstrap takes at least one task")
    tasks = [_finite(values, BOOTSTRAP_RUNS, f"a bootstrap of {task}") for task, values in runs_by_task.items()]
    drawn = [runs[generator.integers(0, len(runs), (resamples, len(runs)))] for runs in tasks]
    pooled = np.sort(np.concatenate(drawn, axis=1), axis=1)
    cut = pooled.shape[1] // 4
    means = pooled[:, cut : pooled.shape[1] - cut].mean(axis=1)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(iqm(np.concatenate(tasks)), float(low), float(high), min(len(runs) for runs in tasks))


@dataclass(frozen=True)
class PowerLaw:
    """y = exp(intercept) · x^slope.value, with the slope's interval."""

    slope: Estimate
    intercept: float


def log_log_slope(x: Numbers, y: Numbers) -> PowerLaw:
    """Exponent b of y = a·x^b: least squares on logs, t interval with n - 2 degrees of freedom. No unit.

    Errors: StatsError below 3 points, for unequal lengths, for values that are not positive, for a constant x.
    """
    if len(x) != len(y):
        raise StatsError(f"{len(x)} x values and {len(y)} y values")
    a, b = _finite(x, 3, "a slope"), _finite(y, 3, "a slope")
    if (a <= 0).any() or (b <= 0).any():
        raise StatsError("a log-log slope takes positive values; report zeros apart")
    u, v = np.log(a), np.log(b)
    spread = float(((u - u.mean()) ** 2).sum())
    if spread == 0:
        raise StatsError("a slope takes at least two different x values")
    slope = float(((u - u.mean()) * (v - v.mean())).sum() / spread)
    intercept = float(v.mean() - slope * u.mean())
    residual = float(((v - intercept - slope * u) ** 2).sum())
    half = float(stdtrit(len(u) - 2, (1 + LEVEL) / 2) * np.sqrt(residual / (len(u) - 2) / spread))
    return PowerLaw(Estimate(slope, slope - half, slope + half, len(u)), intercept)
