"""Clip bounds from recorded log ratios: where the share that they clip is known."""

import math

import pytest
from test_knob_figures import write_run

from moe_rl import store
from moe_rl.calibration import clip_bounds

LEVELS = [0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99]
EVEN = [0.2 * (level - 0.5) for level in LEVELS]  # log ratios evenly spread from -.1 to .1: straight between quantiles


def study(tmp_path, quantiles, **more):
    rows = [
        {"step": 1, "update": number, "log_s_q": values, "log_w_q": [3 * x for x in values]}
        for number, values in enumerate(quantiles, start=1)
    ]
    write_run(tmp_path, updates=rows, **more)
    return store.read_study(tmp_path / "s")


def test_bounds_are_where_the_wanted_share_lies_outside(tmp_path):
    """Twice the share is outside of both bounds together, half of which has the advantage that a bound counts for."""
    low, high = clip_bounds(study(tmp_path, [EVEN]), "gspo", 0.1)
    assert low == pytest.approx(1 - math.exp(-0.08), abs=1e-9)  # 10 % of the log ratios are below -.08
    assert high == pytest.approx(math.exp(0.08) - 1, abs=1e-9)
    low, high = clip_bounds(store.read_study(tmp_path / "s"), "gspo", 0.1, "token")
    assert low == pytest.approx(1 - math.exp(-0.24), abs=1e-9)


def test_updates_without_a_ratio_count_and_skewed_ratios_have_bounds_apart(tmp_path):
    """Half of the updates are first ones: the others must clip twice the share. All log ratios lie .05 lower."""
    low, high = clip_bounds(study(tmp_path, [[0.0] * 7, [x - 0.05 for x in EVEN]]), "gspo", 0.1)
    assert low == pytest.approx(1 - math.exp(-0.11), abs=1e-9)  # 20 % below -.11
    assert high == pytest.approx(math.exp(0.01) - 1, abs=1e-9)  # 20 % above .01


def test_what_cannot_be_told_is_refused(tmp_path):
    with pytest.raises(store.StoreError, match=r"target is 0\.4; the recorded quantiles tell 0\.01 to 0\.25"):
        clip_bounds(study(tmp_path, [EVEN]), "gspo", 0.4)
    with pytest.raises(store.StoreError, match="no arm sapo; it has gspo"):
        clip_bounds(store.read_study(tmp_path / "s"), "sapo", 0.1)
    two = study(tmp_path, [EVEN], knobs={"optim.lr": 1.0})
    with pytest.raises(store.StoreError, match=r"gspo ran at default and at optim\.lr=1\.0; choose one"):
        clip_bounds(two, "gspo", 0.1)
    assert clip_bounds(two, "gspo", 0.1, knobs="default")[0] == pytest.approx(1 - math.exp(-0.08), abs=1e-9)
