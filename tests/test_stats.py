"""Statistics against numbers worked by hand and against scipy."""

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from moe_rl import stats

VALUES = [0.71, 0.78, 0.69, 0.74, 0.80]


def test_t_interval_of_1_2_3_is_2_plus_minus_4_303_over_root_3():
    estimate = stats.mean_interval([1, 2, 3])
    assert estimate.value == 2
    assert estimate.high - 2 == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    assert 2 - estimate.low == pytest.approx(estimate.high - 2)


def test_t_interval_is_scipys():
    estimate = stats.mean_interval(VALUES)
    low, high = scipy_stats.t.interval(0.95, 4, np.mean(VALUES), scipy_stats.sem(VALUES))
    assert (estimate.low, estimate.high) == pytest.approx((low, high))


def test_one_run_has_a_mean_and_no_interval():
    estimate = stats.mean_interval([0.5])
    assert (estimate.value, estimate.n) == (0.5, 1)
    assert math.isnan(estimate.low)
    assert math.isnan(estimate.high)
    assert "no interval" in str(estimate)


def test_nothing_and_nan_are_refused():
    with pytest.raises(stats.StatsError, match="at least 1 runs, got 0"):
        stats.mean_interval([])
    with pytest.raises(stats.StatsError, match="1 values that are not finite"):
        stats.mean_interval([1, float("nan")])


def test_pairing_uses_common_seeds_only_and_matches_scipy():
    a, b = {0: 1.0, 1: 2.0, 2: 4.0, 9: 100.0}, {2: 3.0, 1: 1.5, 0: 0.8, 7: -50.0}
    estimate = stats.mean_interval(stats.paired(a, b))
    assert estimate.n == 3
    reference = scipy_stats.ttest_rel([1, 2, 4], [0.8, 1.5, 3]).confidence_interval()
    assert (estimate.low, estimate.high) == pytest.approx((reference.low, reference.high))
    with pytest.raises(stats.StatsError, match="no common seed"):
        stats.paired({0: 1.0}, {1: 1.0})


def test_no_claim_below_five_runs_however_clear_the_numbers():
    clear = [10.0, 10.1, 9.9, 10.0]
    for claim in (stats.sign_flip_p, stats.t_test_p):
        with pytest.raises(stats.StatsError, match="too few seeds for a significance claim: 4"):
            claim(clear)
        claim([*clear, 10.2])


def test_sign_flip_of_five_equal_signs_is_2_of_32():
    assert stats.sign_flip_p([1, 2, 3, 4, 5]) == 2 / 32
    assert stats.sign_flip_p([-1, -2, -3, -4, -5]) == 2 / 32
    assert stats.sign_flip_p([0.0] * 5) == 1
    # |sum| = 13 is reached by flipping nothing or the 1 alone, and by the mirror images of both sums of at least 13
    assert stats.sign_flip_p([-1, 2, 3, 4, 5]) == 4 / 32


def test_sign_flip_is_scipys_exact_permutation_test():
    differences = np.random.default_rng(0).normal(0.4, 1, 9)
    reference = scipy_stats.permutation_test(
        (differences,), np.mean, permutation_type="samples", n_resamples=np.inf, alternative="two-sided"
    )
    assert stats.sign_flip_p(differences) == pytest.approx(reference.pvalue)
    with pytest.raises(stats.StatsError, match="above 20"):
        stats.sign_flip_p(np.ones(21))


def test_t_test_is_scipys():
    assert stats.t_test_p(VALUES) == pytest.approx(scipy_stats.ttest_1samp(VALUES, 0).pvalue)
    assert stats.t_test_p([1.0] * 5) == 0
    assert stats.t_test_p([0.0] * 5) == 1


def test_holm_by_hand():
    # sorted .005 .01 .03 .04 -> times 4 3 2 1 = .02 .03 .06 .04 -> running maximum .02 .03 .06 .06
    by_hand = [0.03, 0.06, 0.06, 0.02]
    assert stats.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx(by_hand)
    untested = stats.holm([0.01, math.nan, 0.04, 0.03, math.nan, 0.005])
    assert untested == pytest.approx([0.03, math.nan, 0.06, 0.06, math.nan, 0.02], nan_ok=True)
    assert stats.holm([0.9, 0.8]) == [1.0, 1.0]
    assert stats.holm([]) == []
    with pytest.raises(stats.StatsError, match="outside"):
        stats.holm([1.01])


def test_each_test_is_left_out_where_it_says_nothing():
    five = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert stats.both_tests(five) == (stats.t_test_p(five), stats.sign_flip_p(five))
    assert [math.isnan(p) for p in stats.both_tests(five[:4])] == [True, True]
    assert [math.isnan(p) for p in stats.both_tests(np.arange(21.0))] == [False, True]


@pytest.mark.parametrize("n", [1, 3, 4, 7, 10, 13])
def test_iqm_is_the_trimmed_mean(n):
    values = np.random.default_rng(n).normal(size=n)
    assert stats.iqm(values) == pytest.approx(scipy_stats.trim_mean(values, 0.25))


def test_bootstrap_starts_at_ten_runs_and_repeats_with_its_generator():
    runs = np.random.default_rng(0).normal(1, 0.1, (2, 10))
    tasks = {"sort": runs[0], "sums": runs[1]}
    one = stats.iqm_bootstrap(tasks, np.random.default_rng(7), 2000)
    assert one == stats.iqm_bootstrap(tasks, np.random.default_rng(7), 2000)
    assert one.low < one.value < one.high
    with pytest.raises(stats.StatsError, match="bootstrap of sums takes at least 10 runs, got 9"):
        stats.iqm_bootstrap({"sort": runs[0], "sums": runs[1][:9]}, np.random.default_rng(7))


def test_bootstrap_is_stratified():
    """Two tasks without spread: drawn within each task nothing can vary; drawn across tasks it would."""
    estimate = stats.iqm_bootstrap({"low": np.zeros(10), "high": np.ones(10)}, np.random.default_rng(0), 500)
    assert (estimate.low, estimate.value, estimate.high) == (0.5, 0.5, 0.5)


def test_bootstrap_agrees_with_scipy_on_one_task():
    values = np.random.default_rng(3).normal(size=20)
    ours = stats.iqm_bootstrap({"only": values}, np.random.default_rng(0), 20_000)
    reference = scipy_stats.bootstrap(
        (values,),
        lambda x, axis: scipy_stats.trim_mean(x, 0.25, axis=axis),
        n_resamples=20_000,
        method="percentile",
        rng=np.random.default_rng(1),
    ).confidence_interval
    assert (ours.low, ours.high) == pytest.approx((reference.low, reference.high), abs=0.02)


def test_log_log_slope_recovers_a_power_law_and_scipys_interval():
    exact = stats.log_log_slope([1, 2, 4], [3, 12, 48])
    assert exact.slope.value == pytest.approx(2)
    assert math.exp(exact.intercept) == pytest.approx(3)
    assert (exact.slope.low, exact.slope.high) == pytest.approx((2, 2))
    x = np.array([1e-6, 3e-6, 1e-5, 3e-5, 1e-4])
    y = np.array([0.08, 0.3, 0.8, 2.5, 5.9])
    ours, reference = stats.log_log_slope(x, y).slope, scipy_stats.linregress(np.log(x), np.log(y))
    half = scipy_stats.t.ppf(0.975, 3) * reference.stderr
    assert (ours.value, ours.low, ours.high) == pytest.approx(
        (reference.slope, reference.slope - half, reference.slope + half)
    )


def test_log_log_slope_refuses_what_it_cannot_fit():
    refused = [
        ([1, 2], [1, 2], "3 runs"),
        ([1, 2, 3], [1, 0, 2], "positive"),
        ([2, 2, 2], [1, 2, 3], "two different"),
        ([1, 2, 3], [1, 2], "3 x values and 2"),
    ]
    for x, y, reason in refused:
        with pytest.raises(stats.StatsError, match=reason):
            stats.log_log_slope(x, y)
