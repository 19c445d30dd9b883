"""Every rule gives each of its three verdicts, from data alone."""

import math

import numpy as np
import pytest
from claim_studies import write_arm
from scipy import stats as scipy_stats

from moe_rl import claims, figures, measures
from moe_rl.claims import NOT_RUN, NOT_SUPPORTED, NOT_TESTABLE, SUPPORTED, base
from moe_rl.claims._effects import contrast, level_of, with_holm
from moe_rl.stats import Estimate
from moe_rl.store import read_study


def finding(tmp_path, name, *studies):
    return claims.judge(name, {study: read_study(tmp_path / study) for study in studies})[1]


def values_of(found, start):
    return {effect.name: effect.estimate.value for effect in found.effects if effect.what.startswith(start)}


# ----------------------------------------------------------------------------------------------------------- the rules
def effect(value, half, n=5, p=math.nan):
    return base.Effect("it", Estimate(value, value - half, value + half, n), p=p)


@pytest.mark.parametrize(
    ("value", "half", "n", "p", "verdict"),
    [
        (0.10, 0.06, 5, 0.01, SUPPORTED),
        (0.10, 0.06, 5, 0.06, NOT_TESTABLE),  # Holm took it away, and 0.05 would not have been seen
        (0.00, 0.04, 5, 1.00, NOT_SUPPORTED),  # 0.05 is excluded
        (0.02, 0.04, 5, 0.20, NOT_TESTABLE),  # it is not
        (0.06, 0.04, 5, 0.08, NOT_TESTABLE),  # known well, and there: but not after Holm
        (-0.20, 0.10, 5, 0.01, NOT_SUPPORTED),  # the other way round
        (0.00, 0.00, 5, 1.0, NOT_SUPPORTED),  # the same runs
        (0.10, 0.06, 4, math.nan, NOT_TESTABLE),
        (math.nan, math.nan, 0, math.nan, NOT_TESTABLE),
    ],
)
def test_above_zero(value, half, n, p, verdict):
    assert base.above_zero(effect(value, half, n, p)).verdict == verdict


@pytest.mark.parametrize(
    ("value", "half", "n", "p", "verdict"),
    [
        (0.00, 0.04, 5, 1.0, SUPPORTED),
        (0.10, 0.12, 5, 0.1, SUPPORTED),
        (0.00, 0.06, 5, 1.0, NOT_TESTABLE),
        (-0.06, 0.05, 5, 0.01, NOT_SUPPORTED),
        (-0.06, 0.05, 5, 0.20, NOT_TESTABLE),
        (-0.20, 0.10, 5, 0.20, NOT_SUPPORTED),  # a loss of 0.05 or more is certain enough
        (0.10, 0.02, 3, math.nan, NOT_TESTABLE),
    ],
)
def test_no_worse(value, half, n, p, verdict):
    assert base.no_worse(effect(value, half, n, p)).verdict == verdict


@pytest.mark.parametrize(
    ("value", "half", "n", "verdict"),
    [
        (0.10, 0.02, 5, SUPPORTED),
        (0.06, 0.02, 5, SUPPORTED),
        (0.02, 0.02, 5, NOT_SUPPORTED),
        (0.30, 0.05, 5, NOT_SUPPORTED),
        (0.04, 0.02, 5, NOT_TESTABLE),  # outside, but not for sure
        (0.10, 0.09, 5, NOT_TESTABLE),  # wider than the band
        (0.10, 0.01, 4, NOT_TESTABLE),
    ],
)
def test_in_band(value, half, n, verdict):
    assert base.in_band(effect(value, half, n), 0.05, 0.20).verdict == verdict


def test_parts_and_places_combine():
    yes, no, open_ = (base.Judgement(verdict, verdict) for verdict in (SUPPORTED, NOT_SUPPORTED, NOT_TESTABLE))
    assert base.all_of(yes, yes).verdict == SUPPORTED
    assert base.all_of(yes, open_).verdict == NOT_TESTABLE
    assert base.all_of(open_, no).verdict == NOT_SUPPORTED
    assert base.any_of([no, open_, yes], "places").verdict == SUPPORTED
    assert base.any_of([no, open_], "places").verdict == NOT_TESTABLE
    assert base.any_of([no, no], "places").verdict == NOT_SUPPORTED
    assert base.any_of([], "places").verdict == NOT_TESTABLE


def test_effects_are_paired_and_holm_counts_the_tested_ones():
    a, b = {0: 0.5, 1: 0.6, 2: 0.8, 3: 0.7, 4: 0.6, 9: 5.0}, {0: 0.4, 1: 0.55, 2: 0.6, 3: 0.65, 4: 0.5, 8: -5.0}
    differs = contrast("d", a, b)
    raw = scipy_stats.ttest_rel(list(a.values())[:5], list(b.values())[:5]).pvalue
    assert (differs.estimate.n, differs.estimate.value) == (5, pytest.approx(0.1))
    few, level = level_of("few", {0: 0.1, 1: 0.2}), level_of("level", a, tested=False)
    adjusted = with_holm([differs, few, level, contrast("null", a, a)])
    assert adjusted[0].p == pytest.approx(2 * raw)
    assert adjusted[0].sign_flip_p == pytest.approx(2 * 2 / 2**5)
    assert [math.isnan(one.p) for one in adjusted] == [False, True, True, False]
    assert adjusted[3].p == 1.0


# ---------------------------------------------------------------------------------------------------------- the claims
def test_all_claims_are_found_and_told_completely():
    told = [claim for claim, _ in claims.judge_all({})]
    assert [claim.id for claim in told] == [*(f"C{i}" for i in range(1, 10)), "H1", "X1a", "X1b", "X1c"]
    for claim in told:
        assert all((claim.title, claim.said, claim.source, claim.measure, claim.rule, claim.studies))
        assert "Supported" in claim.rule
        assert "Not supported" in claim.rule
        assert bool(claim.contested) == claim.id.startswith(("X1a", "X1b", "X1c"))
        assert set("%'±") & set(claim.title) == set(), "a heading's anchor is made from it"
        assert claim.figures
        assert set(claim.figures) <= set(figures.names())


def test_a_study_that_was_not_run_is_named():
    for claim, found in claims.judge_all({}):
        assert found.verdict == NOT_RUN
        assert all(study in found.because for study in claim.studies)


def test_below_five_seeds_no_claim_is_judged(tmp_path):
    write_arm(tmp_path, "drift_per_update", "grpo", 0.9, seeds=range(4))
    found = finding(tmp_path, "c1_drift_per_update", "drift_per_update")
    assert found.verdict == NOT_TESTABLE
    assert "4 of at least 5 seeds" in found.because


@pytest.mark.parametrize(
    ("slot_change", "final", "verdict"),
    [(0.11, 0.8, SUPPORTED), (0.02, 0.8, NOT_SUPPORTED), (0.11, 0.2, NOT_TESTABLE)],
)
def test_c1_drift_where_the_policy_learns(tmp_path, slot_change, final, verdict):
    write_arm(tmp_path, "drift_per_update", "grpo", final, slot_change=slot_change)
    found = finding(tmp_path, "c1_drift_per_update", "drift_per_update")
    assert found.verdict == verdict
    assert values_of(found, "grpo: slot change by one update")[
        "grpo: slot change by one update (drift_per_update)"
    ] == (pytest.approx(slot_change, rel=0.02))
    assert "K/E = 0.0625" in found.notes[0]
    assert "L = 8" in found.notes[0]


@pytest.mark.parametrize(
    ("drift", "verdict"),
    [
        (lambda layers: 0.01 * layers**0.5, SUPPORTED),
        (lambda layers: 0.01, NOT_SUPPORTED),
        (lambda layers: 0.05 / layers, NOT_SUPPORTED),
        (lambda layers: [], NOT_TESTABLE),
    ],
)
def test_c2_exponent_of_drift_against_depth(tmp_path, drift, verdict):
    for layers in (4, 8, 16):
        change = drift(layers)
        numbers = {"slot_change": change} if change else {"layers": 0}
        write_arm(tmp_path, "drift_vs_depth", "grpo", 0.8, knobs={"model.layers": layers}, **numbers)
    found = finding(tmp_path, "c2_drift_vs_depth", "drift_vs_depth")
    assert found.verdict == verdict
    if verdict == SUPPORTED:
        (slope,) = values_of(found, "grpo: exponent").values()
        assert slope == pytest.approx(0.5)


def side_by_side(tmp_path, name="side_by_side", **finals):
    for arm, final in finals.items():
        how = final if isinstance(final, dict) else {"final": final}
        write_arm(tmp_path, name, arm, **how)


@pytest.mark.parametrize(
    ("plain", "replay", "verdict"),
    [
        (0.1, 0.8, SUPPORTED),
        ({"final": 0.7, "diverged": True}, 0.8, SUPPORTED),
        ({"final": 0.42, "best": 0.95}, 0.9, SUPPORTED),  # collapsed
        (0.8, 0.8, NOT_SUPPORTED),  # GRPO converges
        (0.1, 0.12, NOT_SUPPORTED),  # replay fails, too
        (0.38, {"final": 0.41, "spread": 12}, NOT_TESTABLE),
        ({"final": 0.4, "spread": 0.1}, 0.8, NOT_TESTABLE),  # most GRPO runs do not fail, but they learn nothing
    ],
)
def test_c3_does_replay_cure_grpo(tmp_path, plain, replay, verdict):
    side_by_side(tmp_path, grpo=plain, grpo_routing_replay=replay)
    assert finding(tmp_path, "c3_grpo_needs_replay", "side_by_side").verdict == verdict


def test_c3_is_not_supported_by_an_effect_that_the_placebo_has_too(tmp_path):
    side_by_side(tmp_path, grpo=0.1, grpo_routing_replay=0.8)
    side_by_side(tmp_path, "controls", grpo=0.1, grpo_shuffled_replay=0.5)
    found = finding(tmp_path, "c3_grpo_needs_replay", "side_by_side", "controls")
    assert found.verdict == NOT_SUPPORTED
    assert "another sequence helps" in found.because


def test_c3_reads_the_frontier_and_tells_the_largest_rate_that_each_arm_survives(tmp_path):
    for lr, plain, replay in ((1e-3, 0.8, 0.8), (2e-3, 0.1, 0.7), (4e-3, 0.05, 0.05)):
        side_by_side(
            tmp_path,
            "stability_frontier",
            grpo={"final": plain, "knobs": {"optim.lr": lr}},
            grpo_routing_replay={"final": replay, "knobs": {"optim.lr": lr}},
        )
    found = finding(tmp_path, "c3_grpo_needs_replay", "stability_frontier")
    assert found.verdict == SUPPORTED
    assert "lr=0.002" in found.because
    survived = values_of(found, "grpo")
    assert survived["grpo: largest learning rate survived (stability_frontier, M=4)"] == pytest.approx(1e-3)
    assert survived["grpo_routing_replay: largest learning rate survived (stability_frontier, M=4)"] == pytest.approx(
        2e-3
    )
    (doublings,) = values_of(found, "doublings").values()
    assert doublings == pytest.approx(1.0)
    assert any("5 of 5 grpo runs and 0 of 5 grpo_routing_replay runs" in note for note in found.notes)


@pytest.mark.parametrize(
    ("gspo", "replay", "verdict"),
    [
        (0.8, 0.8, SUPPORTED),
        (0.6, 0.8, NOT_SUPPORTED),  # converges, but worse than with replay
        (0.3, 0.3, NOT_SUPPORTED),  # does not converge
        ({"final": 0.8, "spread": 8}, 0.8, NOT_TESTABLE),
    ],
)
def test_c4_does_gspo_converge_as_well_as_arms_with_replay(tmp_path, gspo, replay, verdict):
    side_by_side(tmp_path, gspo=gspo, grpo_routing_replay=replay)
    assert finding(tmp_path, "c4_gspo_without_replay", "side_by_side").verdict == verdict


def test_c4_needs_an_arm_with_replay(tmp_path):
    side_by_side(tmp_path, gspo=0.8)
    assert finding(tmp_path, "c4_gspo_without_replay", "side_by_side").verdict == NOT_TESTABLE


@pytest.mark.parametrize(
    ("clipped", "gspo", "verdict"),
    [
        (0.2, 0.8, SUPPORTED),
        (0.01, 0.8, NOT_SUPPORTED),  # five times as many
        (0.2, 0.6, NOT_SUPPORTED),  # learns as GRPO does
        (0.2, {"final": 0.65, "spread": 12}, NOT_TESTABLE),
        (0.0, 0.8, NOT_TESTABLE),  # nothing clipped, no ratio
    ],
)
def test_c5_clipping(tmp_path, clipped, gspo, verdict):
    paper = {"arm.policy_loss.clip_low": 3e-4, "arm.policy_loss.clip_high": 4e-4}
    how = gspo if isinstance(gspo, dict) else {"final": gspo}
    write_arm(tmp_path, "clipping", "grpo", 0.6, clip_frac=0.002)
    write_arm(tmp_path, "clipping", "gspo", knobs=paper, clip_frac=clipped, **how)
    wider = {"arm.policy_loss.clip_low": 3e-2, "arm.policy_loss.clip_high": 4e-2}
    write_arm(tmp_path, "clipping", "gspo", 0.95, knobs=wider, clip_frac=0.004)
    found = finding(tmp_path, "c5_clipping", "clipping")
    assert found.verdict == verdict
    if clipped == 0.2:
        paper_ratio, wide_ratio = values_of(found, "ratio of").values()
        assert (paper_ratio, wide_ratio) == pytest.approx((100, 2))


@pytest.mark.parametrize(
    ("gspo", "verdict"),
    [
        ({"final": 0.8}, SUPPORTED),
        ({"final": 0.6}, NOT_SUPPORTED),
        (
            {"final": 0.8, "cpu_s": 4.0},
            NOT_SUPPORTED,
        ),  # at equal queries alone: a quarter of the way for the same CPU time
        ({"final": 0.7, "spread": 12}, NOT_TESTABLE),
    ],
)
def test_c6_at_equal_queries_and_equal_compute(tmp_path, gspo, verdict):
    side_by_side(tmp_path, gspo=gspo, grpo_routing_replay=0.6)
    found = finding(tmp_path, "c6_efficiency", "side_by_side")
    assert found.verdict == verdict
    if "cpu_s" in gspo:
        at_equal = values_of(found, "reward at equal")
        assert at_equal["reward at equal queries, gspo minus grpo_routing_replay (side_by_side)"] == pytest.approx(0.2)
        half_way = at_equal["reward at equal CPU seconds of training, gspo minus grpo_routing_replay (side_by_side)"]
        assert half_way == pytest.approx(0.4 + 0.4 / 4 - 0.6, abs=0.01)


@pytest.mark.parametrize(
    ("engine", "gap", "verdict"),
    [
        (0.8, True, SUPPORTED),
        (0.6, True, NOT_SUPPORTED),
        ({"final": 0.8, "spread": 8}, True, NOT_TESTABLE),
        (0.8, False, NOT_TESTABLE),  # one precision: nothing to tolerate
    ],
)
def test_c7_likelihoods_of_the_engine(tmp_path, engine, gap, verdict):
    knobs = {"engine.dtype": "bfloat16" if gap else "float32"}
    how = engine if isinstance(engine, dict) else {"final": engine}
    write_arm(tmp_path, "engine_likelihoods", "gspo", 0.8, knobs=knobs)
    write_arm(tmp_path, "engine_likelihoods", "gspo_engine_logprobs", knobs=knobs, **how)
    assert finding(tmp_path, "c7_engine_likelihoods", "engine_likelihoods").verdict == verdict


@pytest.mark.parametrize(
    ("spread", "verdict"),
    [
        (lambda length: 0.1 * length**-0.5, SUPPORTED),
        (lambda length: 0.1, SUPPORTED),
        (lambda length: 0.1 / length, NOT_SUPPORTED),  # the sum stays as it is
        (lambda length: 0.1 * length**0.3, NOT_SUPPORTED),  # the sequence ratio grows
        (lambda length: 0.0, NOT_TESTABLE),
    ],
)
def test_c8_spread_against_length(tmp_path, spread, verdict):
    for length in (4, 8, 16):
        write_arm(
            tmp_path,
            "ratio_vs_length",
            "grpo",
            0.8,
            knobs={"task.length": length},
            length=length,
            log_s_sd=spread(length),
        )
    found = finding(tmp_path, "c8_ratio_variance", "ratio_vs_length")
    assert found.verdict == verdict
    if spread(4) == pytest.approx(0.05):
        assert values_of(found, "grpo: exponent of the spread of the summed")[
            "grpo: exponent of the spread of the summed log ratio against length (ratio_vs_length)"
        ] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("moe", "dense", "verdict"),
    [
        ((0.3, 0.8), (0.7, 0.8), SUPPORTED),
        ((0.3, 0.8), (0.3, 0.8), NOT_SUPPORTED),  # dense as well
        ((0.8, 0.8), (0.8, 0.8), NOT_SUPPORTED),
        ((0.5, 0.6), (0.6, 0.66), NOT_TESTABLE),
    ],
)
def test_c9_dense_twin(tmp_path, moe, dense, verdict):
    spread = 8 if verdict == NOT_TESTABLE else 1
    for family, pair in (("qwen3_moe", moe), ("dense", dense)):
        for arm, final in zip(("grpo", "gspo"), pair, strict=True):
            wobble = spread if arm == "gspo" and family == "dense" else 1
            write_arm(tmp_path, "dense_twin", arm, final, knobs={"model.family": family}, spread=wobble)
    assert finding(tmp_path, "c9_token_ratios_and_moe", "dense_twin").verdict == verdict


@pytest.mark.parametrize(
    ("flip", "verdict"),
    [
        (lambda lr: 2 * lr**0.5, SUPPORTED),  # 0.063 against 0.01 at the smallest rate
        (lambda lr: 0.5 * lr, NOT_SUPPORTED),
        (lambda lr: 0.1 * lr**0.5, NOT_SUPPORTED),  # slower, but never larger
        (lambda lr: 0.0, NOT_TESTABLE),
    ],
)
def test_h1_flips_and_weights(tmp_path, flip, verdict):
    for lr in (1e-3, 4e-3, 1.6e-2):
        write_arm(tmp_path, "drift_vs_lr", "grpo", 0.6, knobs={"optim.lr": lr}, flip=flip(lr), weight=10 * lr)
    assert finding(tmp_path, "h1_flips_at_small_rates", "drift_vs_lr").verdict == verdict


@pytest.mark.parametrize(
    ("gspo", "replayed", "verdict"),
    [(0.8, 0.8, SUPPORTED), (0.6, 0.8, NOT_SUPPORTED), ({"final": 0.8, "spread": 8}, 0.8, NOT_TESTABLE)],
)
def test_x1a_staleness(tmp_path, gspo, replayed, verdict):
    how = gspo if isinstance(gspo, dict) else {"final": gspo}
    for updates in (1, 16):
        stale = updates == 16
        write_arm(tmp_path, "staleness", "gspo", knobs={"updates": updates}, **(how if stale else {"final": 0.8}))
        write_arm(tmp_path, "staleness", "gspo_routing_replay", replayed if stale else 0.8, knobs={"updates": updates})
    found = finding(tmp_path, "x1a_staleness", "staleness")
    assert found.verdict == verdict
    assert any(effect.at == "staleness, M=1" for effect in found.effects)


@pytest.mark.parametrize(
    ("replayed", "updates", "verdict"),
    [
        (0.6, 1, SUPPORTED),
        (0.8, 1, NOT_SUPPORTED),  # the same runs
        ({"final": 0.78, "spread": 12}, 1, NOT_TESTABLE),
        (0.6, 2, NOT_TESTABLE),  # nothing on-policy was run
    ],
)
def test_x1b_replay_on_policy(tmp_path, replayed, updates, verdict):
    how = replayed if isinstance(replayed, dict) else {"final": replayed}
    write_arm(tmp_path, "controls", "grpo", 0.8, knobs={"updates": updates})
    write_arm(tmp_path, "controls", "grpo_routing_replay", knobs={"updates": updates}, **how)
    assert finding(tmp_path, "x1b_replay_on_policy", "controls").verdict == verdict


@pytest.mark.parametrize(
    ("frozen", "verdict"),
    [(0.8, SUPPORTED), (0.5, NOT_SUPPORTED), (0.2, NOT_SUPPORTED), ({"final": 0.8, "spread": 8}, NOT_TESTABLE)],
)
def test_x1c_frozen_router(tmp_path, frozen, verdict):
    how = frozen if isinstance(frozen, dict) else {"final": frozen}
    write_arm(tmp_path, "controls", "grpo_routing_replay", 0.8, knobs={"optim.trains": "all"})
    write_arm(tmp_path, "controls", "grpo", 0.3, knobs={"optim.trains": "all"})
    write_arm(tmp_path, "controls", "grpo", knobs={"optim.trains": "no_router"}, slot_change=0.01, **how)
    found = finding(tmp_path, "x1c_frozen_router", "controls")
    assert found.verdict == verdict
    assert len(values_of(found, "slot change by one update")) == 2


# ------------------------------------------------------------------------------------------------------------ measures
def test_numbers_of_a_run(tmp_path):
    write_arm(tmp_path, "s", "grpo", 0.2, best=0.7, seeds=[2], slot_change=0.1, log_s_sd=0.02)
    write_arm(tmp_path, "s", "gspo", 0.7, diverged=True, seeds=[2])
    grpo, gspo = measures.run_numbers(read_study(tmp_path / "s")).to_dict("records")
    factor = 1 + 4 * 0.006
    assert grpo["start"] == 0.4
    assert grpo["best"] == 0.7
    assert grpo["outcome"] == pytest.approx(0.202)
    assert grpo["gain"] == pytest.approx(-0.198)
    assert grpo["failing"] == 1
    assert grpo["slot_change"] == pytest.approx(0.1 * factor)
    assert grpo["log_s_sd"] == pytest.approx(0.02 * factor)  # not halved by the first update, whose ratios are all 1
    assert (grpo["queries"], grpo["tokens"], grpo["train_cpu_s"]) == (320, 3200, pytest.approx(5.0))
    assert (gspo["outcome"], gspo["failing"]) == (0.0, 1)
    assert np.isnan(gspo["final_reward"])


def test_reward_at_the_compute_of_the_cheapest_run(tmp_path):
    write_arm(tmp_path, "s", "grpo", 0.9, seeds=[2], cpu_s=2.0)
    write_arm(tmp_path, "s", "gspo", 0.9, seeds=[2], cpu_s=1.0)
    study = read_study(tmp_path / "s")
    numbers = measures.run_numbers(study)
    reached = measures.reward_at_equal(study, numbers, "train_cpu_s").to_list()
    final = 0.902
    assert reached == pytest.approx([0.4 + (final - 0.4) / 2, final])  # 5 CPU seconds are half of what grpo had
    assert measures.reward_at_equal(study, numbers, "queries").to_list() == pytest.approx([final, final])


def test_largest_surviving_rate_ends_at_the_first_failure(tmp_path):
    for lr, final in ((1e-3, 0.8), (2e-3, 0.1), (4e-3, 0.8)):
        write_arm(tmp_path, "s", "grpo", final, knobs={"optim.lr": lr}, seeds=[0])
        write_arm(tmp_path, "s", "gspo", 0.1, knobs={"optim.lr": lr}, seeds=[0])
    study = read_study(tmp_path / "s")
    table = measures.largest_surviving(measures.run_numbers(study), study.setting("optim.lr"))
    assert table[["arm", "largest", "tried"]].to_numpy().tolist() == [["grpo", 1e-3, 4e-3], ["gspo", 0.0, 4e-3]]
