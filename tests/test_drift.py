"""Drift by hand, and a meter that measures what it says."""

import dataclasses
import math

import pytest
import torch
from models import random_trace_like, tiny, tokens

from moe_rl.drift import DriftMeter, DriftSettings, compare
from moe_rl.models.families import find_routers
from moe_rl.policy import routing_of
from moe_rl.records import Rollouts, RoutingError, RoutingTrace
from moe_rl.replaying import replay


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


# ---------------------------------------------------------------------------------------------------------------- meter
PROBE = tokens(3, 7)


def rollouts(batch=6, width=11, T=4):
    ids, mask = tokens(batch, width)
    response = torch.ones(batch, T, dtype=torch.bool)
    zeros = torch.zeros(batch)
    return Rollouts(
        ids, mask.bool(), response, torch.arange(batch), torch.zeros(batch, T), zeros, zeros.bool(), zeros.bool()
    )


def nudge(model, seed, scale=0.05):
    """A hand-made update of all weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))


def by_key(rows):
    return {(row["tokens"], row["reference"]): row for row in rows}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_a_weight_change_every_drift_is_exactly_0(dtype):
    model = tiny(dtype=dtype, experts=32, top_k=4, layers=4)
    meter = DriftMeter(model, DriftSettings(rollouts=13, probe=3), PROBE)
    seen = 0
    for step in (1, 2):
        meter.begin_step(step, rollouts(16, 24 + step))  # another width each step, as sampling gives
        for update in (1, 2):
            for row in meter.after_update(step, update):
                seen += 1
                assert row["n"] > 15
                assert not any(row["slot_change"]), row
                assert row["any_layer_change"] == 0
    assert seen == 2 * 2 * 5


def test_a_token_set_is_always_forwarded_in_the_same_shape():
    """Another batch shape can change routing in low precision, which would be read as drift."""
    model, shapes = tiny(), []
    model.register_forward_pre_hook(
        lambda m, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    meter = DriftMeter(model, DriftSettings(rollouts=4, probe=3), PROBE)
    for step in (1, 2):
        meter.begin_step(step, rollouts())
        meter.after_update(step, 1)
    assert shapes == [(3, 7), *[(4, 11), (4, 11), (3, 7)] * 2]


def test_references_are_the_policies_that_they_are_called():
    model, ours = tiny(), rollouts()
    chosen = torch.linspace(0, 5, 4).long()
    text = {"rollout": (ours.tokens_BS[chosen], ours.attention_BS[chosen]), "probe": PROBE}
    policies = []

    def remember():
        policies.append({name: routing_of(model, ids, mask.bool()) for name, (ids, mask) in text.items()})

    meter = DriftMeter(model, DriftSettings(rollouts=4, probe=3), PROBE)
    remember()
    for step in (1, 2):
        meter.begin_step(step, ours)
        for update in (1, 2):
            nudge(model, 10 * step + update)
            rows = by_key(meter.after_update(step, update))
            remember()
            # policies: 0 start, 1 and 2 after the updates of step 1, 3 and 4 after those of step 2
            last = len(policies) - 1
            expected = {"old": 2 * (step - 1), "previous": last - 1, "start": 0}
            assert set(rows) == {
                *(("rollout", name) for name in ("old", "previous")),
                *(("probe", name) for name in expected),
            }
            for (name, reference), row in rows.items():
                drift = compare(policies[expected[reference]][name], policies[last][name]).row()
                assert (row["step"], row["update"]) == (step, update)
                assert row["any_layer_change"] > 0
                for field, value in drift.items():
                    assert row[field] == pytest.approx(value, nan_ok=True, abs=1e-12), (name, reference, field)


def test_skipped_steps_do_not_leave_old_references_behind():
    model, ours = tiny(), rollouts()
    meter = DriftMeter(model, DriftSettings(every=2, rollouts=4, probe=3), PROBE)
    start = routing_of(model, PROBE[0], PROBE[1].bool())
    measured = {}
    for step in (1, 2, 3, 4):
        before = routing_of(model, PROBE[0], PROBE[1].bool())
        meter.begin_step(step, ours)
        nudge(model, step)
        measured[step] = by_key(meter.after_update(step, 1))
        after = routing_of(model, PROBE[0], PROBE[1].bool())
        for reference, trace in (("old", before), ("previous", before), ("start", start)):
            if measured[step]:
                expected = compare(trace, after).row()["slot_change"]
                assert measured[step]["probe", reference]["slot_change"] == pytest.approx(expected)
    assert [step for step, rows in measured.items() if rows] == [2, 4]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"rollouts": 0}, {"probe"}),
        ({"probe": 0}, {"rollout"}),
        ({"rollouts": 0, "probe": 0}, set()),
        ({"every": 0}, set()),
    ],
)
def test_a_token_set_of_size_0_is_not_measured(settings, expected):
    model = tiny()
    meter = DriftMeter(model, DriftSettings(**{"rollouts": 4, "probe": 3} | settings), PROBE)
    meter.begin_step(1, rollouts())
    nudge(model, 0)
    assert {row["tokens"] for row in meter.after_update(1, 1)} == expected


def test_more_sequences_than_there_are_means_all_of_them():
    model = tiny()
    meter = DriftMeter(model, DriftSettings(rollouts=100, probe=100), PROBE)
    meter.begin_step(1, rollouts())
    rows = by_key(meter.after_update(1, 1))
    assert rows["rollout", "old"]["n"] == int(rollouts().attention_BS.sum())
    assert rows["probe", "old"]["n"] == int(PROBE[1].sum())


def test_padding_is_not_counted_as_tokens():
    meter = DriftMeter(tiny(), DriftSettings(rollouts=2, probe=3), PROBE)
    meter.begin_step(1, rollouts())
    rows = by_key(meter.after_update(1, 1))
    assert rows["rollout", "old"]["n"] == int(rollouts().attention_BS[[0, 5]].sum())


def test_measuring_leaves_the_model_its_gradients_and_its_randomness_alone():
    model = tiny()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state = torch.get_rng_state()
    meter = DriftMeter(model, DriftSettings(), PROBE)
    meter.begin_step(1, rollouts())
    meter.after_update(1, 1)
    assert all((parameter.grad == 1).all() for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_drift_is_above_0_although_training_forwards_are_replayed():
    model, ours = tiny(), rollouts()
    old = routing_of(model, ours.tokens_BS, ours.attention_BS)
    meter = DriftMeter(model, DriftSettings(rollouts=6, probe=3), PROBE)
    meter.begin_step(1, ours)
    with replay(model, old):
        routing = model(input_ids=ours.tokens_BS, attention_mask=ours.attention_BS.long(), use_cache=False)
        routing.logits.sum().backward()
    with torch.no_grad():
        for site in find_routers(model):
            site.module.weight.add_(0.1 * site.module.weight.grad.sign())
    rows = by_key(meter.after_update(1, 1))
    assert all(row["any_layer_change"] > 0 for row in rows.values())


@pytest.mark.parametrize("name", ["rollouts", "probe", "every"])
def test_negative_settings_are_refused(name):
    with pytest.raises(ValueError, match=rf"drift\.{name} is -1"):
        DriftSettings(**{name: -1})
