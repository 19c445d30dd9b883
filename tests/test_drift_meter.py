"""The meter measures what it says, on the tokens and against the policies that it says."""

import math

import pytest
import torch
from families import FAMILIES
from models import tiny, tokens

from moe_rl.drift import compare
from moe_rl.drift.meter import DriftMeter, DriftSettings
from moe_rl.drift.routing_metrics import dead_experts, known, load, max_violation, router_entropy
from moe_rl.drift.soft import soft_drift
from moe_rl.models.families import find_routers
from moe_rl.policy import routing_of
from moe_rl.records import Rollouts
from moe_rl.replaying import replay
from moe_rl.store import LEGEND

SOFT = {"kl", "js", "router_shift", "margin", "margin_flipped", "margin_kept"}
STATE = {"router_entropy", "max_violation", "dead_experts"}
FLIPS = {
    "replay_gap",
    "flip_rms",
    "weight_rms",
    "log_w_rms",
    "log_w_flipped",
    "log_w_unflipped",
    "log_w_by_changed_layers",
}
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


@pytest.mark.parametrize("settings", [{}, {"soft_every": 1, "flips_every": 1}])
def test_measuring_leaves_the_model_its_gradients_and_its_randomness_alone(settings):
    model = tiny()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state = torch.get_rng_state()
    meter = DriftMeter(model, DriftSettings(**settings), PROBE)
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


@pytest.mark.parametrize("name", ["rollouts", "probe", "every", "trace_every", "soft_every", "flips_every"])
def test_negative_settings_are_refused(name):
    with pytest.raises(ValueError, match=rf"drift\.{name} is -1"):
        DriftSettings(**{name: -1})


def test_flips_without_tokens_are_refused():
    with pytest.raises(ValueError, match=r"drift\.flips_every is 2, drift\.rollouts 0"):
        DriftSettings(rollouts=0, flips_every=2)


# ------------------------------------------------------------------------------------------- what costs more, on demand
def test_soft_drift_and_flips_are_measured_at_the_steps_that_were_asked_for_and_nowhere_else():
    model, ours = tiny(), rollouts()
    meter = DriftMeter(model, DriftSettings(rollouts=4, probe=3, soft_every=2, flips_every=3), PROBE)
    for step in range(1, 7):
        meter.begin_step(step, ours)
        for update in (1, 2):
            nudge(model, 10 * step + update, 0.01)
            for key, row in by_key(meter.after_update(step, update)).items():
                assert row.keys() <= LEGEND["drift"].keys()
                assert (row.keys() & (SOFT | STATE) == SOFT | STATE) == (step % 2 == 0), (step, key)
                assert (row.keys() & FLIPS == FLIPS) == (step % 3 == 0 and key == ("rollout", "old")), (step, key)
                assert bool(row.keys() & FLIPS) == (row.keys() & FLIPS == FLIPS)
                assert bool(row.keys() & (SOFT | STATE)) == (step % 2 == 0)


def test_soft_drift_is_measured_against_the_policies_that_it_names():
    model, ours, asked = tiny(), rollouts(), {"router_logits": True, "margins": True}
    meter = DriftMeter(model, DriftSettings(rollouts=6, probe=3, soft_every=2), PROBE)
    text = {"rollout": (ours.tokens_BS, ours.attention_BS), "probe": (PROBE[0], PROBE[1].bool())}
    policies = []

    def remember():
        policies.append({name: routing_of(model, ids, mask, **asked) for name, (ids, mask) in text.items()})

    remember()
    for step in (1, 2):
        meter.begin_step(step, ours)
        for update in (1, 2):
            nudge(model, 10 * step + update)
            rows = by_key(meter.after_update(step, update))
            remember()
    for (name, reference), row in rows.items():
        old, new = policies[{"start": 0, "old": 2, "previous": 3}[reference]][name], policies[4][name]
        load_LE = load(known(new), 8)
        expected = soft_drift(old, new) | {
            "max_violation": max_violation(load_LE).tolist(),
            "dead_experts": dead_experts(load_LE).tolist(),
            "router_entropy": router_entropy(new.extras["router_logits"][new.valid_BS]).tolist(),
        }
        assert expected.keys() == SOFT | STATE
        for column, value in expected.items():
            assert row[column] == pytest.approx(value, nan_ok=True, rel=1e-5), (name, reference, column)
        assert min(row["kl"]) > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_a_weight_change_soft_drift_and_every_term_of_the_ratio_are_exactly_0(dtype):
    model = tiny(dtype=dtype, experts=32, top_k=4, layers=4)
    meter = DriftMeter(model, DriftSettings(rollouts=13, probe=3, soft_every=1, flips_every=1), PROBE)
    seen = 0
    for step in (1, 2):
        meter.begin_step(step, rollouts(16, 24 + step))
        for update in (1, 2):
            rows = by_key(meter.after_update(step, update))
            flips = rows["rollout", "old"]
            assert (flips["flip_rms"], flips["weight_rms"], flips["log_w_rms"], flips["log_w_unflipped"]) == (
                0,
                0,
                0,
                0,
            )
            assert math.isnan(flips["log_w_flipped"])
            for row in rows.values():
                seen += 1
                assert row["kl"] == row["js"] == [0.0] * 4
                assert row["router_shift"] == 1.0
                assert row["margin"] == row["margin_kept"]
    assert seen == 2 * 2 * 5


def test_the_flip_decomposition_costs_one_forward_an_update():
    model, widths = tiny(), []
    model.register_forward_pre_hook(lambda m, args, kwargs: widths.append(len(kwargs["input_ids"])), with_kwargs=True)
    meter = DriftMeter(model, DriftSettings(rollouts=4, probe=0, flips_every=2), PROBE)
    for step in (1, 2):
        meter.begin_step(step, rollouts())
        for update in (1, 2):
            meter.after_update(step, update)
    assert widths == [4] * (3 + 5)


def test_a_resumed_meter_measures_the_same_soft_drift():
    """As the loop does: a meter built at whatever weights; these and the start's routing come from the checkpoint."""
    model, ours, settings = tiny(), rollouts(), DriftSettings(rollouts=4, probe=3, soft_every=2)
    meter = DriftMeter(model, settings, PROBE)
    for step in (1, 2):
        if step == 2:
            weights = {name: weight.clone() for name, weight in model.state_dict().items()}
        meter.begin_step(step, ours)
        nudge(model, step)
        whole = meter.after_update(step, 1)
    again = tiny(seed=5)
    resumed = DriftMeter(again, settings, PROBE)
    again.load_state_dict(weights)
    resumed.resume(meter.state())
    resumed.begin_step(2, ours)
    nudge(again, 2)
    assert repr(resumed.after_update(2, 1)) == repr(whole)  # nan is not equal to itself


@pytest.mark.parametrize("name", ["jetmoe", "llama4", "dbrx", "zaya", "longcat_flash", "inkling2_loop", "deepseek_v2"])
def test_a_family_is_measured_as_far_as_its_routers_tell(name):
    """Routers that return no logits leave divergences and entropy out; margins, load and flips need none."""
    model = next(family for family in FAMILIES if family.name == name and family.quick).build()
    tells = all(site.ids_in_output for site in find_routers(model))
    assert tells == (name in ("longcat_flash", "inkling2_loop", "deepseek_v2"))
    settings = DriftSettings(rollouts=4, probe=3, soft_every=1, flips_every=1)
    meter = DriftMeter(model, settings, PROBE)
    meter.begin_step(1, rollouts())
    nudge(model, 0, 0.02)
    for key, row in by_key(meter.after_update(1, 1)).items():
        wanted = (SOFT | STATE) - (set() if tells else {"kl", "js", "router_shift", "router_entropy"})
        assert row.keys() & (SOFT | STATE) == wanted
        assert (row.keys() >= FLIPS) == (key == ("rollout", "old"))
        assert all(math.isfinite(value) for value in row["margin"])
        if tells:
            assert min(row["kl"]) > 0
            assert 0 < row["router_shift"] < 1
