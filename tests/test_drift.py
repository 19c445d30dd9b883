"""Drift by hand."""

import dataclasses
import math

import pytest
import torch
from models import random_trace_like

from moe_rl.drift import compare
from moe_rl.routing_trace import RoutingError, RoutingTrace


def trace(rows, valid, experts=6):
    """rows: [B][S][L] -> K ids."""
    ids, valid = torch.tensor(rows), torch.tensor(valid).bool()
    return RoutingTrace.from_ids(ids, valid, [f"layer{i}" for i in range(ids.shape[2])], experts)


# Two sequences of 3 columns, 2 layers, K = 2. Column 0 of sequence 1 is padding.
OLD = [
    [[[0, 1], [2, 3]], [[0, 1], [2, 3]], [[4, 5], [0, 1]]],
    [[[0, 1], [0, 1]], [[2, 1], [5, 4]], [[3, 0], [1, 2]]],
]
NEW = [
    [[[1, 0], [2, 3]], [[0, 2], [2, 3]], [[4, 5], [2, 3]]],
    [[[4, 5], [4, 5]], [[1, 3], [4, 0]], [[0, 3], [2, 1]]],
]
VALID = [[1, 1, 1], [0, 1, 1]]
#   token          layer 0        layer 1      changed layers   first
#   seq 0 col 0    0 (reordered)  0            0                -
#   seq 0 col 1    1              0            1                0
#   seq 0 col 2    0              2            1                1
#   seq 1 col 1    1 (2 -> 3)     1 (5 -> 0)   2                0
#   seq 1 col 2    0 (reordered)  0            0                -


def test_every_field_by_hand():
    drift = compare(trace(OLD, VALID), trace(NEW, VALID))
    assert drift.n == 5
    assert drift.slot_change_L.tolist() == pytest.approx([2 / 10, 3 / 10])
    assert drift.slot_change == pytest.approx(0.25)
    assert drift.set_change_L.tolist() == pytest.approx([2 / 5, 2 / 5])
    assert drift.deviation_K1.tolist() == pytest.approx([6 / 10, 3 / 10, 1 / 10])
    assert drift.changed_layers_L1.tolist() == pytest.approx([2 / 5, 2 / 5, 1 / 5])
    assert drift.any_layer_change == pytest.approx(3 / 5)
    assert drift.first_changed_L.tolist() == pytest.approx([2 / 5, 1 / 5])
    # of 3 real tokens the first, second and third lie in tenths 0, 3 and 6; of 2 in tenths 0 and 5
    by_position = drift.by_position.tolist()
    assert [i for i, value in enumerate(by_position) if not math.isnan(value)] == [0, 3, 5, 6]
    assert by_position[0] == pytest.approx((0 + 0.5) / 2)
    assert by_position[3] == pytest.approx(0.25)
    assert by_position[5] == pytest.approx(0.0)
    assert by_position[6] == pytest.approx(0.5)


def test_a_row_of_the_table_holds_every_field():
    row = compare(trace(OLD, VALID), trace(NEW, VALID)).row()
    assert row["n"] == 5
    assert row["deviation"] == pytest.approx([0.6, 0.3, 0.1])
    assert {len(row[name]) for name in ("slot_change", "set_change", "first_changed")} == {2}
    assert len(row["deviation"]) == len(row["changed_layers"]) == 3
    assert len(row["by_position"]) == 10


def big_trace(seed=0, B=20, S=50, L=3, K=4, E=16):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(B, S, L, E, generator=generator).topk(K, -1).indices
    valid = torch.rand(B, S, generator=generator) < 0.8
    return RoutingTrace.from_ids(ids, valid, [f"layer{i}" for i in range(L)], E)


def test_identical_routing_has_no_drift_and_disjoint_routing_all_of_it():
    one = big_trace()
    same = compare(one, one)
    assert (same.slot_change, same.any_layer_change) == (0.0, 0.0)
    assert same.deviation_K1.tolist() == [1, 0, 0, 0, 0]
    ids = torch.arange(4).expand(2, 3, 2, 4)
    low, high = (RoutingTrace.from_ids(x, torch.ones(2, 3).bool(), ["a", "b"], 8) for x in (ids, ids + 4))
    other = compare(low, high)
    assert (other.slot_change, other.any_layer_change) == (1.0, 1.0)
    assert other.set_change_L.tolist() == [1, 1]
    assert other.deviation_K1.tolist() == [0, 0, 0, 0, 1]
    assert other.changed_layers_L1.tolist() == [0, 0, 1]
    assert other.first_changed_L.tolist() == [1, 0]


def test_the_order_of_experts_within_a_row_does_not_matter():
    one = big_trace()
    order = torch.tensor([2, 0, 3, 1])
    shuffled = dataclasses.replace(one, expert_ids_BSLK=one.expert_ids_BSLK[..., order])
    assert compare(one, shuffled).slot_change == 0.0
    other = big_trace(1)
    assert compare(shuffled, other).row() == compare(one, other).row()


def test_unrelated_routers_overlap_in_k_of_e_experts():
    one = big_trace(0)
    other = random_trace_like(one, seed=5)
    drift = compare(one, other)
    error = (0.25 * 0.75 / (drift.n * 3 * 4)) ** 0.5
    assert 1 - drift.slot_change == pytest.approx(4 / 16, abs=4 * error)


def test_drift_is_symmetric():
    one, other = big_trace(0), big_trace(1)
    assert compare(one, other).slot_change == compare(other, one).slot_change


def test_only_tokens_that_both_traces_know_count():
    old, new = trace(OLD, VALID), trace(NEW, [[1, 1, 0], [1, 1, 1]])
    drift = compare(old, new)
    assert drift.n == 4  # neither the padding nor what the new trace does not know
    assert drift.slot_change_L.tolist() == pytest.approx([2 / 8, 1 / 8])
    garbage = dataclasses.replace(
        old, expert_ids_BSLK=old.expert_ids_BSLK.masked_fill(~old.valid_BS[:, :, None, None], 77)
    )
    assert compare(garbage, new).deviation_K1.tolist() == drift.deviation_K1.tolist()


def test_position_counts_real_tokens_and_not_columns():
    ids = torch.tensor([0, 1]).expand(1, 20, 1, 2).clone()
    changed = ids.clone()
    changed[0, 10, 0] = torch.tensor([2, 3])  # the first real token
    changed[0, 19, 0, 0] = 3  # the last
    valid = torch.arange(20)[None] >= 10
    drift = compare(*(RoutingTrace.from_ids(x, valid, ["a"], 4) for x in (ids, changed)))
    assert drift.by_position.tolist() == [1, 0, 0, 0, 0, 0, 0, 0, 0, 0.5]


def test_no_common_tokens_give_nan_and_no_crash():
    drift = compare(trace(OLD, VALID), trace(NEW, [[0, 0, 0], [1, 0, 0]]))
    assert drift.n == 0
    row = drift.row()
    for name, value in row.items():
        if name != "n":
            assert all(math.isnan(x) for x in (value if isinstance(value, list) else [value])), name
    assert math.isnan(drift.slot_change)


def test_traces_that_do_not_match_are_refused():
    old = trace(OLD, VALID)
    narrower = RoutingTrace(old.expert_ids_BSLK[:, :2], old.valid_BS[:, :2], old.layer_names, 6)
    for other in (old[:1], narrower, dataclasses.replace(old, layer_names=("layer0", "layer9"))):
        with pytest.raises(RoutingError, match="cannot be compared"):
            compare(old, other)


def test_ids_above_127_are_compared_as_they_are():
    names, valid = ["a"], torch.ones(1, 1).bool()
    one = RoutingTrace.from_ids(torch.tensor([[[[255, 0]]]]), valid, names, 256)
    other = RoutingTrace.from_ids(torch.tensor([[[[255, 127]]]]), valid, names, 256)
    assert compare(one, other).slot_change == 0.5
    wide = [RoutingTrace.from_ids(torch.tensor([[[[300, x]]]]), valid, names, 512) for x in (44, 511)]  # 300 - 256 = 44
    assert compare(*wide).slot_change == 0.5
