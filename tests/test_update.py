"""The update: ratios that start at exactly 1, parts that add up, replay that happens, numbers by hand."""

import contextlib
import copy
import dataclasses
import math

import pytest
import torch
from models import FAMILIES, random_trace_like, sets_differ, tiny, tokens

from moe_rl import record, replay
from moe_rl.arm import Arm
from moe_rl.benchmarks.loop import experiment
from moe_rl.drift import compare
from moe_rl.engines.hf import Hf
from moe_rl.foresight import ranked_scores
from moe_rl.mini_batches import mini_batches, split_rows
from moe_rl.models.families import find_routers
from moe_rl.models.tokenizer import character_tokenizer
from moe_rl.old_pass import note_view, old_pass
from moe_rl.optim import Optim
from moe_rl.policy import make_deterministic, response_logprobs, routing_of
from moe_rl.policy_losses.base import PolicyLoss
from moe_rl.policy_losses.grpo import Grpo
from moe_rl.policy_losses.gspo import Gspo
from moe_rl.records import LossOutput, Rollouts
from moe_rl.router_pressure import NO_PRESSURE, RouterPressure
from moe_rl.routers.balanced import Balanced
from moe_rl.routers.base import install
from moe_rl.routers.learned_prior import LearnedPrior
from moe_rl.routers.predictive import Predictive
from moe_rl.routing_trace import RoutingError, RoutingTrace
from moe_rl.tasks.reverse import Reverse
from moe_rl.update import clip_columns, ratio_columns, take_update

# Columns of settings that have something to say there.
SOMETIMES = {"value_loss", "explained_variance", "replay_kept", "balance_loss", "router_kl", "reference_kl"}
SOMETIMES |= {"foreseen", "foreseen_by_native"}


def grpo(replay="none", **changes):
    return Arm(policy_loss=Grpo(), replay=replay, **changes)


ARMS = {"grpo": grpo(), "grpo_routing_replay": grpo("old_policy"), "grpo_r3": grpo("rollout")}
ARMS |= {"gspo": Arm(policy_loss=Gspo()), "gspo_routing_replay": Arm(policy_loss=Gspo(), replay="old_policy")}
ARMS |= {"grpo_shuffled_replay": grpo("shuffled")}


def rollouts(model=None, batch=8, width=13, T=6, routing=False):
    """Left-padded random sequences with responses of 1 to T tokens."""
    ids, mask = tokens(batch, width)
    mask = mask.clone().bool()
    response = torch.arange(T) < torch.arange(batch)[:, None] % T + 1
    mask[:, -T:] = response
    trace = None
    if routing:
        trace = random_trace_like(routing_of(model, ids, mask))
        known = mask.clone()
        known[:, -1] = False
        trace = dataclasses.replace(trace.aligned_to(known), source="rollout")
    rewards = torch.linspace(0, 1, batch)
    false = torch.zeros(batch, dtype=torch.bool)
    logprobs = torch.zeros(batch, T)
    return Rollouts(ids, mask, response, torch.arange(batch) // 4, logprobs, rewards, false, false, trace)


def sampled(model):
    """Eight rollouts that the engine sampled from the model, with prompts of different lengths."""
    task = Reverse()
    return Hf(max_new_tokens=12).sample(model, character_tokenizer(), task, task.examples("train", 4, 0), 2, 0)


def advantages(batch=8):
    return torch.linspace(-1.5, 1.5, batch)


def seen_by_old(model, data, advantages, rows, arm, micro_batch=0, **settings):
    """The mini-batches of `rows` after the old policy's pass."""
    batches = mini_batches(data, advantages, rows, micro_batch=micro_batch)
    old_pass(model, batches, arm, **settings)
    return batches


def train(model, arm, updates=2, micro_batch=0, lr=1e-3, data=None):
    """The rows of `updates` updates on one batch of rollouts, each after a pass of its own of the old policy."""
    method = ARMS[arm]
    data = data or rollouts(model, routing=method.replay == "rollout")
    rows = split_rows(len(data), updates, 0)
    batches = seen_by_old(model, data, advantages(len(data)), rows, method, micro_batch=micro_batch)
    if batches[0][0].old is None:
        note_view(model, batches[0], method.replay)
    optim = Optim(lr=lr)
    optimizer, schedule = optim.build(model, updates)
    return [
        take_update(model, optimizer, schedule, batch, method, max_grad_norm=optim.max_grad_norm) for batch in batches
    ]


def weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def distance(one, other):
    """Largest relative distance of two sets of weights."""
    return max(float((one[name] - other[name]).norm() / one[name].norm()) for name in one)


# --------------------------------------------------------------------------------------------------------- law 1 and E9
@pytest.mark.parametrize(("micro_batch", "checkpointing"), [(0, False), (3, False), (3, True)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arm", ARMS)
def test_law_1_ratios_are_exactly_1_on_the_first_mini_batch_and_e9_not_on_the_second(
    arm, dtype, micro_batch, checkpointing
):
    model = tiny(dtype=dtype)
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    make_deterministic(model)
    first, second = train(model, arm, 2, micro_batch, lr=1e-2)
    assert first["log_w_q"] == [0.0] * 7
    assert (first["log_w_sd"], first["log_s_sd"], first["k3"]) == (0.0, 0.0, 0.0)
    assert (first["clip_frac"], first["clip_frac_sequences"]) == (0.0, 0.0)
    assert first["grad_norm"] > 1e-2
    assert second["log_w_sd"] > 1e-3
    assert second["k3"] > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_law_1_holds_for_every_family(family):
    model = tiny(family)
    for arm in ("grpo_routing_replay", "gspo", "grpo_r3"):
        first, second = train(copy.deepcopy(model), arm)
        assert (first["log_w_sd"], first["log_w_q"]) == (0.0, [0.0] * 7)
        assert second["log_w_sd"] > 0


@pytest.mark.parametrize("checkpointing", [False, True])
def test_e12_dropout_and_jitter_in_the_config_do_not_move_the_ratio(checkpointing):
    model = tiny("mixtral", layers=2)
    for module in model.modules():
        if hasattr(module, "jitter_noise"):
            module.jitter_noise = 0.3
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    model.train()
    assert train(copy.deepcopy(model), "grpo")[0]["log_w_sd"] > 1e-3, "without the remedy there is something to remedy"
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
        ran = []
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: ran.append(torch.is_grad_enabled()))
    make_deterministic(model)
    for arm in ("grpo", "grpo_routing_replay"):
        assert train(model, arm)[0]["log_w_sd"] == 0.0
    if checkpointing:
        assert sum(ran) == 2 * 2 * 2, "each training forward is computed again in backward"


# ------------------------------------------------------------------------------------------------------ the same result
@pytest.mark.parametrize("arm", ARMS)
def test_micro_batches_and_activation_checkpointing_change_results_by_rounding_only(arm):
    """Plain SGD, for Adam makes rounding of a gradient near 0 a step of full size."""
    start, results = tiny(), {}
    method = ARMS[arm]
    for micro_batch, checkpointing in ((0, False), (3, False), (1, False), (0, True), (2, True)):
        model = copy.deepcopy(start)
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        make_deterministic(model)
        data = rollouts(model, routing=method.replay == "rollout")
        batches = seen_by_old(model, data, advantages(), split_rows(8, 2, 0), method, micro_batch=micro_batch)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        rows = [take_update(model, optimizer, schedule, batch, method, max_grad_norm=1.0) for batch in batches]
        results[micro_batch, checkpointing] = weights(model), rows
    expected, expected_rows = results[0, False]
    assert distance(expected, weights(start)) > 1e-3
    for key, (got, rows) in results.items():
        assert distance(expected, got) < 2e-6, key
        for row, expected_row in zip(rows, expected_rows, strict=True):
            for column in ("loss", "grad_norm", "clip_frac", "clip_frac_sequences"):
                assert row[column] == pytest.approx(expected_row[column], rel=1e-5, abs=1e-6), (key, column)
            assert row["log_w_q"] == pytest.approx(expected_row["log_w_q"], abs=1e-5)
    assert distance(expected, results[0, True][0]) == 0.0  # recomputation repeats the very same arithmetic


def test_a_sequence_without_response_counts_in_no_micro_batch():
    model, data = tiny(), rollouts()
    response = data.response_BT.clone()
    response[3] = False
    attention = data.attention_BS.clone()
    attention[3, -6:] = False
    data = dataclasses.replace(data, response_BT=response, attention_BS=attention)
    kept = torch.tensor([0, 1, 2, 4, 5, 6, 7])
    norms = {}
    for name, rows in (("all", torch.arange(8)), ("kept", kept)):
        for micro_batch in (0, 2):
            twin = copy.deepcopy(model)
            batch = seen_by_old(twin, data, advantages(), [rows], grpo(), micro_batch=micro_batch)[0]
            optimizer, schedule = Optim().build(twin, 1)
            row = take_update(twin, optimizer, schedule, batch, grpo(), max_grad_norm=1.0)
            norms[name, micro_batch] = (row["loss"], row["grad_norm"], row["log_w_sd"])
    for got in norms.values():
        assert got == pytest.approx(norms["kept", 0], rel=1e-5)


def test_gradients_of_earlier_updates_do_not_add_to_an_update():
    clean, stale = tiny(), tiny()
    for parameter in stale.parameters():
        parameter.grad = torch.ones_like(parameter)
    rows = [train(model, "grpo") for model in (clean, stale)]
    assert rows[0] == rows[1]
    assert distance(weights(clean), weights(stale)) == 0.0


def test_law_4_sequences_without_advantage_change_nothing():
    model, data = tiny(), rollouts()
    before = weights(model)
    for loss in (Grpo(), Gspo()):
        batch = seen_by_old(model, data, torch.zeros(8), [torch.arange(8)], grpo())[0]
        optimizer, schedule = Optim().build(model, 1)
        row = take_update(model, optimizer, schedule, batch, Arm(policy_loss=loss), max_grad_norm=1.0)
        assert (row["loss"], row["grad_norm"]) == (0.0, 0.0)
    assert distance(before, weights(model)) == 0.0


# ------------------------------------------------------------------------------------------ sequences without advantage
IDLE = [0, 2, 3, 7]  # of eight rows


def idle_advantages():
    return advantages().index_fill(0, torch.tensor(IDLE), 0.0)


@pytest.mark.parametrize("micro_batch", [0, 2])
@pytest.mark.parametrize("arm", ARMS)
def test_without_a_backward_of_sequences_without_advantage_results_are_the_same_up_to_rounding(arm, micro_batch):
    start, method, rows = tiny(), ARMS[arm], split_rows(8, 2, 0)
    told, after = {}, {}
    for train_all in (True, False):
        model = copy.deepcopy(start)
        data = rollouts(model, routing=method.replay == "rollout")
        batches = mini_batches(data, idle_advantages(), rows, micro_batch=micro_batch, train_all=train_all)
        trained = [part.advantages for batch in batches for part in batch if part.trained]
        assert sum(len(some) for some in trained) == (8 if train_all else 4)
        assert train_all or all((some != 0).all() for some in trained)
        old_pass(model, batches, method)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        forwards = []
        hook = model.register_forward_hook(lambda *_, seen=forwards: seen.append(torch.is_grad_enabled()))
        told[train_all] = [take_update(model, optimizer, schedule, batch, method) for batch in batches]
        hook.remove()
        assert all(forwards) == train_all
        assert sum(forwards) == len(trained)
        after[train_all] = weights(model)
    assert distance(after[True], weights(start)) > 1e-3
    assert distance(after[True], after[False]) < 2e-6
    assert told[False][0]["log_w_q"] == [0.0] * 7
    for all_row, row in zip(told[True], told[False], strict=True):
        assert row.keys() == all_row.keys()
        for column, value in all_row.items():
            assert row[column] == pytest.approx(value, rel=1e-4, abs=1e-5), column


def test_a_mini_batch_without_any_advantage_is_trained_for_momentum_moves_the_weights():
    start, after = tiny(), {}
    for train_all in (True, False):
        model, data = copy.deepcopy(start), rollouts()
        optimizer, schedule = Optim().build(model, 2)
        for some in (advantages(), torch.zeros(8)):
            (batch,) = mini_batches(data, some, [torch.arange(8)], train_all=train_all)
            before = weights(model)
            take_update(model, optimizer, schedule, batch, grpo())
        assert distance(before, weights(model)) > 1e-6
        after[train_all] = weights(model)
    assert distance(after[True], after[False]) == 0.0


def test_tokens_with_advantages_of_their_own_make_their_sequence_one_that_is_trained():
    some_BT = torch.zeros(8, 6)
    some_BT[5, 2] = 1.0
    (batch,) = mini_batches(rollouts(), some_BT, [torch.arange(8)], train_all=False)
    assert [(len(part), part.trained) for part in batch] == [(1, True), (7, False)]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_router_that_counts_its_load_counts_sequences_without_advantage_once_too(checkpointing):
    loads = {}
    for train_all in (True, False):
        model, variant = tiny(), Balanced(speed=0.0)
        install(model, variant)
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        make_deterministic(model)
        data = rollouts()
        (batch,) = mini_batches(data, idle_advantages(), [torch.arange(8)], train_all=train_all)
        optimizer, schedule = Optim().build(model, 1)
        take_update(model, optimizer, schedule, batch, grpo(), router=variant)
        loads[train_all] = [site.module.balance_load.tolist() for site in find_routers(model)]
        assert {sum(load) for load in loads[train_all]} == {2 * int(data.attention_BS.sum())}
    assert loads[True] == loads[False]


class Pulling(PolicyLoss):
    """A loss that moves every sequence, advantage or not."""

    def __call__(self, batch):
        return LossOutput(batch.logprobs_BT.square().sum(), torch.zeros_like(batch.mask_BT))


def test_a_loss_that_trains_sequences_without_advantage_is_refused_instead_of_cut():
    model, data = tiny(), rollouts()
    (batch,) = mini_batches(data, idle_advantages(), [torch.arange(8)], train_all=False)
    optimizer, schedule = Optim().build(model, 1)
    before = weights(model)
    with pytest.raises(ValueError, match="Pulling gives a gradient to sequences without advantage"):
        take_update(model, optimizer, schedule, batch, Arm(policy_loss=Pulling()))
    assert distance(before, weights(model)) == 0.0


@pytest.mark.parametrize(
    ("setting", "all_of_them"),
    [
        ("arm=gspo", False),
        ("arm=grpo_r3", False),
        ("router=learned_prior", False),
        ("arm.correction=tis", False),
        ("arm=grpo_kl", True),
        ("optim.balance_loss=0.01", True),
        ("optim.router_kl=1", True),
        ("router=balanced", False),
        ("router=predictive", False),
    ],
)
def test_what_else_learns_from_a_sequence_has_all_of_them_trained(setting, all_of_them):
    assert experiment([setting]).train_all == all_of_them


# --------------------------------------------------------------------------------------------------------- the old pass
def test_split_rows_is_a_partition_and_a_function_of_the_seed():
    parts = split_rows(24, 4, 7)
    assert [len(part) for part in parts] == [6] * 4
    assert torch.cat(parts).sort().values.tolist() == list(range(24))
    assert torch.cat(parts).tolist() != list(range(24))
    state = torch.get_rng_state()
    assert all(torch.equal(a, b) for a, b in zip(parts, split_rows(24, 4, 7), strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(parts[0], split_rows(24, 4, 8)[0])


@pytest.mark.parametrize("micro_batch", [0, 3])
def test_rows_advantages_and_routing_stay_together_in_the_seen_by_old(micro_batch):
    model = tiny()
    data, A = rollouts(model, routing=True), advantages()
    rows = split_rows(8, 2, 3)
    for replayed in ("none", "old_policy", "rollout"):
        batches = seen_by_old(model, data, A, rows, grpo(replayed), micro_batch=micro_batch)
        assert [len(batch) for batch in batches] == ([1, 1] if micro_batch == 0 else [2, 2])
        for batch, wanted in zip(batches, rows, strict=True):
            assert torch.equal(torch.cat([part.advantages for part in batch]), A[wanted])
            tokens_N = torch.cat([part.rollouts.tokens_BS[part.rollouts.attention_BS] for part in batch])
            assert torch.equal(tokens_N, data.tokens_BS[wanted][data.attention_BS[wanted]])
            traces = [part.old.routing for part in batch]
            if replayed == "none":
                assert set(traces) == {None}
                continue
            expected = data.routing if replayed == "rollout" else routing_of(model, data.tokens_BS, data.attention_BS)
            assert {trace.source for trace in traces} == {"old" if replayed == "old_policy" else "rollout"}
            routing = torch.cat([trace.expert_ids_BSLK[trace.valid_BS] for trace in traces])
            assert torch.equal(routing, expected.expert_ids_BSLK[wanted][expected.valid_BS[wanted]])


@pytest.mark.parametrize(("micro_batch", "checkpointing"), [(0, False), (3, False), (3, True)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arm", ["grpo", "grpo_routing_replay", "gspo", "gspo_routing_replay"])
def test_the_first_mini_batchs_own_forwards_say_bit_for_bit_what_a_pass_of_the_old_policy_would(
    arm, dtype, micro_batch, checkpointing
):
    start, ends = tiny(dtype=dtype), {}
    method = ARMS[arm]
    for looks in (True, False):
        model = copy.deepcopy(start)
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        make_deterministic(model)
        optimizer, schedule = Optim(lr=1e-2).build(model, 2)
        batches = seen_by_old(model, rollouts(), advantages(), split_rows(8, 2, 0), method, micro_batch=micro_batch)
        assert all(part.old is None for part in batches[0])
        assert not any(part.old is None for part in batches[1])
        if looks:
            note_view(model, batches[0], method.replay)
        rows = [take_update(model, optimizer, schedule, batch, method, max_grad_norm=1.0) for batch in batches]
        ends[looks] = rows, batches[0], weights(model)
    (rows, batch, end), (other_rows, other_batch, other_end) = ends.values()
    assert rows == other_rows
    assert distance(end, other_end) == 0.0
    for part, other_part in zip(batch, other_batch, strict=True):
        for name in ("logprobs_BT", "entropy_BT"):
            one, other = getattr(part.old, name), getattr(other_part.old, name)
            assert torch.equal(one, other)
            assert not other.requires_grad


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exact_samplers_log_probabilities_are_those_of_a_pass_of_the_old_policy_up_to_rounding(family):
    """Left padding, early ends and all; so updates that take either end in the same place."""
    start, ends = tiny(family), {}
    data = sampled(start)
    for exact in (False, True):
        model = copy.deepcopy(start)
        forwards = []
        handle = model.register_forward_hook(lambda *_, seen=forwards: seen.append(1))
        batches = seen_by_old(model, data, advantages(), split_rows(8, 4, 0), grpo(), exact=exact)
        handle.remove()
        assert len(forwards) == (0 if exact else 3)
        assert batches[0][0].old is None
        old = [part.old.logprobs_BT[part.rollouts.response_BT] for batch in batches[1:] for part in batch]
        optimizer, schedule = Optim(lr=1e-2).build(model, 4)
        rows = [take_update(model, optimizer, schedule, batch, grpo(), max_grad_norm=1.0) for batch in batches]
        ends[exact] = torch.cat(old), rows, weights(model)
    (pass_N, rows, end), (told_N, other_rows, other_end) = ends.values()
    assert pass_N.abs().max() > 1
    torch.testing.assert_close(told_N, pass_N, atol=1e-5, rtol=0)
    assert distance(end, other_end) < 1e-3 < distance(weights(start), end)
    assert other_rows[0]["log_w_sd"] == 0.0  # the first mini-batch still notes its own forward
    for one, other in zip(rows[1:], other_rows[1:], strict=True):
        assert other["log_w_sd"] == pytest.approx(one["log_w_sd"], rel=1e-3)


def test_an_exact_sampler_does_not_speak_for_an_old_policy_of_which_more_is_wanted():
    model = tiny()
    data = sampled(model)
    rows = split_rows(8, 2, 0)
    for method, pressure in (
        (grpo("old_policy"), NO_PRESSURE),
        (grpo("shuffled"), NO_PRESSURE),
        (grpo(), RouterPressure(router_kl=1.0)),
    ):
        batches = seen_by_old(model, data, advantages(), rows, method, exact=True, pressure=pressure)
        assert not any(part.old.sampled for part in batches[1])
    install(model, Predictive())
    batches = seen_by_old(model, data, advantages(), split_rows(8, 2, 0), grpo(), exact=True, router=Predictive())
    assert all(part.old.scores for part in batches[1])
    with pytest.raises(ValueError, match="has to give rollout_entropy_BT"):
        seen_by_old(model, rollouts(), advantages(), split_rows(8, 2, 0), grpo(), exact=True)


def test_with_one_update_the_old_policy_is_not_asked_at_all():
    model, data = tiny(), rollouts()
    forwards = []
    model.register_forward_hook(lambda *_: forwards.append(1))
    for replayed in ("none", "old_policy"):
        (batch,) = seen_by_old(model, data, advantages(), [torch.arange(8)], grpo(replayed), micro_batch=3)
        assert not forwards
        assert all(part.old is None for part in batch)


def test_the_old_policy_is_asked_first_where_the_first_mini_batch_cannot_tell():
    model = tiny()
    sampled = rollouts(model, routing=True)
    for data, replayed, pressure in (
        (sampled, "rollout", NO_PRESSURE),
        (sampled, "none", NO_PRESSURE),  # the engine's routing is compared with the old policy's own
        (sampled, "old_policy", NO_PRESSURE),
        (rollouts(), "shuffled", NO_PRESSURE),  # the old policy uses the wrong experts too
        (rollouts(), "thresholded", NO_PRESSURE),
        (rollouts(), "sticky", NO_PRESSURE),
        (rollouts(), "none", RouterPressure(router_kl=1.0)),  # wants the old policy's logits
    ):
        batches = seen_by_old(model, data, advantages(), split_rows(8, 2, 0), grpo(replayed), pressure=pressure)
        assert all(part.old is not None for batch in batches for part in batch), replayed


def test_with_the_engines_log_probabilities_ratios_are_taken_against_those_from_the_first_mini_batch_on():
    model = tiny()
    data = rollouts()
    data = dataclasses.replace(data, rollout_logprobs_BT=torch.where(data.response_BT, -1.5, 0.0))
    with torch.no_grad():
        natural, _ = response_logprobs(model, data)
    arm = grpo(old_logprobs="engine")
    (batch,) = seen_by_old(model, data, advantages(), [torch.arange(8)], arm)
    optimizer, schedule = Optim().build(model, 1)
    row = take_update(model, optimizer, schedule, batch, arm, max_grad_norm=1.0)
    log_w = (natural + 1.5)[data.response_BT]
    assert row["log_w_sd"] == pytest.approx(float(log_w.double().std(correction=0)), rel=1e-6)
    assert torch.equal(batch[0].old.logprobs_BT, natural)


def test_old_logprobs_are_those_of_the_experts_that_training_will_use():
    model = tiny()
    data = rollouts(model, routing=True)
    rows = [torch.arange(8)]
    natural, _ = response_logprobs(model, data)
    modes = ("none", "old_policy", "rollout")
    old = {name: seen_by_old(model, data, advantages(), rows, grpo(name))[0][0].old.logprobs_BT for name in modes}
    assert torch.equal(old["none"], natural)
    assert torch.equal(old["old_policy"], natural)  # recording is only looking
    assert (old["rollout"] - natural).abs().max() > 1e-2  # a foreign engine's experts
    assert not old["none"].requires_grad


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("arm", ["grpo_routing_replay", "grpo_r3", "grpo_shuffled_replay"])
def test_every_training_forward_uses_the_old_experts_while_the_policy_itself_drifts(arm, checkpointing):
    model = tiny()
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    make_deterministic(model)
    method = ARMS[arm]
    data = rollouts(model, routing=method.replay == "rollout")
    batches = seen_by_old(model, data, advantages(), split_rows(8, 4, 0), method, micro_batch=1)
    if batches[0][0].old is None:
        note_view(model, batches[0], method.replay)
    before = routing_of(model, data.tokens_BS, data.attention_BS)
    optimizer, schedule = Optim(lr=1e-2).build(model, 4)
    drift = []
    for batch in batches:
        with record(model) as recorder:
            take_update(model, optimizer, schedule, batch, method, max_grad_norm=1.0)
        assert len(recorder.traces) == len(batch) == 2
        for used, wanted in zip(recorder.traces, (part.old.routing for part in batch), strict=True):
            assert wanted.valid_BS.any()
            assert not sets_differ(used, wanted)[wanted.valid_BS].any()
        drift.append(compare(before, routing_of(model, data.tokens_BS, data.attention_BS)).slot_change)
    assert all(change > 0 for change in drift), drift


def test_without_replay_training_forwards_do_not_use_the_old_experts():
    model, data = tiny(), rollouts()
    batches = seen_by_old(model, data, advantages(), split_rows(8, 2, 0), grpo("old_policy"))
    optimizer, schedule = Optim(lr=1e-2).build(model, 2)
    take_update(model, optimizer, schedule, batches[0], grpo(), max_grad_norm=1.0)
    with record(model) as recorder:
        take_update(model, optimizer, schedule, batches[1], grpo(), max_grad_norm=1.0)
    wanted = batches[1][0].old.routing
    assert sets_differ(recorder.trace, wanted)[wanted.valid_BS].any()


def test_replay_keeps_ratios_nearer_to_1_where_flips_dominate():
    spread = {}
    for arm in ("grpo", "grpo_routing_replay"):
        model = tiny(experts=32, top_k=2, layers=4, expert_size=32)
        spread[arm] = train(model, arm, lr=1e-4, data=rollouts(batch=16))[1]["log_w_sd"]
    assert spread["grpo_routing_replay"] < spread["grpo"]


@pytest.mark.parametrize("micro_batch", [0, 1, 3])
def test_shuffled_replay_forces_the_experts_of_the_neighbour_in_the_mini_batch(micro_batch):
    """Whatever the micro-batches: they change memory only."""
    model, data = tiny(), rollouts()
    rows = split_rows(8, 2, 3)
    own = routing_of(model, data.tokens_BS, data.attention_BS)
    natural, _ = response_logprobs(model, data)
    for batch, of_update in zip(
        seen_by_old(model, data, advantages(), rows, grpo("shuffled"), micro_batch=micro_batch), rows, strict=True
    ):
        got = RoutingTrace.cat([part.old.routing for part in batch])
        real = [real_S.nonzero().flatten() for part in batch for real_S in part.rollouts.attention_BS]
        for place, (row, mine) in enumerate(zip(of_update.tolist(), real, strict=True)):
            other = of_update[place - 1].item()
            theirs = own.valid_BS[other].nonzero().flatten()
            both = min(len(mine), len(theirs))
            assert len(mine) == int(own.valid_BS[row].sum())
            assert got.valid_BS[place].nonzero().flatten().tolist() == mine[:both].tolist()
            assert torch.equal(got.expert_ids_BSLK[place, mine[:both]], own.expert_ids_BSLK[other, theirs[:both]])
        old_N = torch.cat([part.old.logprobs_BT[part.rollouts.response_BT] for part in batch])
        natural_N = natural[of_update][data.response_BT[of_update]]
        assert (old_N - natural_N).abs().max() > 1e-2, "the old policy uses the wrong experts too"


def test_shuffled_replay_of_a_single_sequence_is_refused():
    with pytest.raises(RoutingError, match="1 sequence has no neighbours"):
        seen_by_old(tiny(), rollouts(), advantages(), split_rows(8, 8, 0), grpo("shuffled"))


def test_replaying_rollouts_without_routing_is_refused():
    model = tiny()
    with pytest.raises(ValueError, match="replay=rollout needs rollouts with routing"):
        seen_by_old(model, rollouts(), advantages(), [torch.arange(8)], grpo("rollout"))


def test_b14_replay_without_an_old_pass_that_recorded_is_refused():
    model, data = tiny(), rollouts()
    batch = seen_by_old(model, data, advantages(), split_rows(8, 2, 0), grpo())[1]
    optimizer, schedule = Optim().build(model, 1)
    with pytest.raises(RoutingError, match="before switch_to"):
        take_update(model, optimizer, schedule, batch, grpo("old_policy"), max_grad_norm=1.0)
    with pytest.raises(RoutingError, match="no MoE layers"):
        seen_by_old(tiny("dense"), data, advantages(), split_rows(8, 2, 0), grpo("old_policy"))


@pytest.mark.parametrize("arm", ["grpo", "gspo"])
def test_a_dense_model_trains_too(arm):
    model = tiny("dense")
    before = weights(model)
    first, second = train(model, arm)
    assert first["log_w_sd"] == 0.0
    assert second["log_w_sd"] > 0
    assert distance(before, weights(model)) > 0


def test_training_leaves_no_hooks_and_no_randomness_behind():
    model = tiny()
    state = torch.get_rng_state()
    train(model, "grpo_routing_replay")
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


# ----------------------------------------------------------------------------------------------------------- not finite
@dataclasses.dataclass(frozen=True, kw_only=True)
class Spoilt(PolicyLoss):
    """A loss whose value or gradient is `what`."""

    what: float
    gradient_only: bool = False

    def __call__(self, batch):
        factor = self.what if not self.gradient_only else 1.0
        loss = batch.logprobs_BT.sum() * factor
        if self.gradient_only:
            batch.logprobs_BT.register_hook(lambda grad: grad * self.what)
        return LossOutput(loss, torch.zeros_like(batch.mask_BT))


@pytest.mark.parametrize("gradient_only", [False, True])
@pytest.mark.parametrize("what", [math.nan, math.inf])
def test_a_loss_or_gradient_that_is_not_finite_leaves_weights_optimizer_and_schedule_as_they_were(what, gradient_only):
    model, data = tiny(), rollouts()
    batches = seen_by_old(model, data, advantages(), split_rows(8, 2, 0), grpo())
    optimizer, schedule = Optim(schedule="linear").build(model, 10)
    take_update(model, optimizer, schedule, batches[0], grpo(), max_grad_norm=1.0)
    before, state, lr = weights(model), copy.deepcopy(optimizer.state_dict()), schedule.get_last_lr()
    row = take_update(
        model,
        optimizer,
        schedule,
        batches[1],
        Arm(policy_loss=Spoilt(what=what, gradient_only=gradient_only)),
        max_grad_norm=1,
    )
    assert not (math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"]))
    assert distance(before, weights(model)) == 0.0
    assert schedule.get_last_lr() == lr
    for number, entry in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, state["state"][number][name]) for name, value in entry.items())


# -------------------------------------------------------------------------------------------------------------- numbers
def test_clip_columns_by_hand():
    one = torch.tensor([[True, True, False], [False, False, False]])
    other = torch.tensor([[False, True]])
    assert clip_columns([one, other], 4, 8) == {"clip_frac": 3 / 8, "clip_frac_sequences": 2 / 4}


def test_ratio_columns_by_hand():
    one = torch.tensor([[0.1, -0.1, 77.0], [0.2, 77.0, 77.0]]), torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    other = torch.tensor([[0.4, 0.0], [77.0, 77.0]]), torch.tensor([[1, 1], [0, 0]]).bool()
    one[0][~one[1]] = 0.0  # as response_logprobs leaves padding
    other[0][~other[1]] = 0.0
    columns = ratio_columns([one, other])
    log_w, log_s = [0.1, -0.1, 0.2, 0.4, 0.0], [0.0, 0.2, 0.2]
    assert columns["log_w_sd"] == pytest.approx((sum((x - 0.12) ** 2 for x in log_w) / 5) ** 0.5)
    assert columns["log_s_sd"] == pytest.approx((sum((x - 0.4 / 3) ** 2 for x in log_s) / 3) ** 0.5)
    assert columns["k3"] == pytest.approx(sum(math.exp(x) - 1 - x for x in log_w) / 5, abs=1e-6)
    assert (columns["f2"], columns["f5"]) == (0.0, 0.0)
    w = [math.exp(x) for x in log_w]
    assert columns["ess"] == pytest.approx(sum(w) ** 2 / (5 * sum(x * x for x in w)))
    # sorted -.1 0 .1 .2 .4; the quantile q lies at place 4 q, between neighbours in proportion
    assert columns["log_w_q"] == pytest.approx([-0.096, -0.08, 0.0, 0.1, 0.2, 0.36, 0.392])
    assert columns["log_s_q"] == pytest.approx([0.004, 0.02, 0.1, 0.2, 0.2, 0.2, 0.2])


@pytest.mark.parametrize(("replayed", "micro_batch"), [("none", 0), ("old_policy", 3), ("rollout", 0)])
@pytest.mark.parametrize("train_all", [True, False])
def test_a_router_that_learns_is_shown_the_old_scores_and_the_present_ones_of_the_same_real_tokens(
    replayed, micro_batch, train_all
):
    model, variant = tiny(), Predictive()
    install(model, variant)
    make_deterministic(model)
    data = rollouts(model, routing=replayed == "rollout")
    batches = mini_batches(data, idle_advantages(), split_rows(8, 2, 0), micro_batch=micro_batch, train_all=train_all)
    old_pass(model, batches, grpo(replayed), router=variant)
    assert all(part.old is None or not part.old.scores for part in batches[0])
    optimizer, schedule = Optim(lr=1e-2).build(model, 2)

    def scores():
        of_part = []
        for part in batches[1]:
            forced = replay(model, part.old.routing) if part.old.routing is not None else contextlib.nullcontext()
            with torch.no_grad(), forced, ranked_scores(model) as seen:
                response_logprobs(model, part.rollouts)
            of_part.append(seen)
        real = [part.rollouts.attention_BS.flatten() for part in batches[1]]
        return [torch.cat([part[layer][rows] for part, rows in zip(of_part, real, strict=True)]) for layer in range(3)]

    old = scores()
    told = [take_update(model, optimizer, schedule, batches[0], grpo(replayed), router=variant)]
    new = scores()
    told += [take_update(model, optimizer, schedule, batches[1], grpo(replayed), router=variant)]
    kept = []
    for site, old_NE, new_NE in zip(find_routers(model), old, new, strict=True):
        assert (new_NE - old_NE).abs().max() > 1e-3
        expected = tiny(layers=1).model.layers[0].mlp.gate
        variant.attach(expected, 8, 2)
        variant.learn(old_NE, new_NE, expected)
        for name in ("seen_xx", "seen_xy"):
            wanted, got = getattr(expected, name), getattr(site.module, name)
            assert torch.allclose(got, wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max())
        both = [x.topk(2).indices for x in (old_NE, new_NE)]
        kept.append((both[0][:, :, None] == both[1][:, None, :]).any(-1).float().mean().item())
    assert "foreseen" not in told[0]
    assert told[1]["foreseen"] == told[1]["foreseen_by_native"] == pytest.approx(sum(kept) / 3, abs=1e-6)


def test_columns_of_an_update_are_those_that_the_store_knows():
    from moe_rl.store import LEGEND

    (row,) = train(tiny(), "gspo", 1)
    assert row.keys() | {"step", "update"} | SOMETIMES == LEGEND["updates"].keys()
    assert not row.keys() & SOMETIMES


# ------------------------------------------------------------------------------------------------------------ optimizer
@pytest.mark.parametrize(
    "wrong",
    [
        *({"lr": value} for value in (0.0, -1.0, math.nan, math.inf)),
        *({name: value} for name in ("weight_decay", "eps", "max_grad_norm") for value in (-0.1, math.nan)),
        *({name: value} for name in ("beta1", "beta2") for value in (1.0, -0.1, math.nan)),
        {"warmup_updates": -1},
        {"schedule": "off"},
        {"trains": "half"},
        {"router_lr": 0.0},
        {"router_lr": 2.0, "trains": "no_router"},
    ],
    ids=str,
)
def test_optimizer_settings_that_cannot_work_are_refused_by_name(wrong):
    with pytest.raises(ValueError, match=rf"optim\.{next(iter(wrong))} is"):
        Optim(**wrong)


def rates(optim, updates):
    optimizer, schedule = optim.build(torch.nn.Linear(1, 1), updates)
    seen = []
    for _ in range(updates + 1):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return seen


def test_schedules_by_hand():
    assert rates(Optim(lr=0.1), 4) == pytest.approx([0.1] * 5)
    assert rates(Optim(lr=0.1, schedule="linear"), 4) == pytest.approx([0.1, 0.075, 0.05, 0.025, 0.0])
    cosine = [0.05 * (1 + math.cos(math.pi * x / 4)) for x in range(5)]
    assert rates(Optim(lr=0.1, schedule="cosine"), 4) == pytest.approx(cosine)
    for schedule in ("constant", "linear", "cosine"):
        got = rates(Optim(lr=0.1, schedule=schedule, warmup_updates=2), 6)
        after = {"constant": [1] * 5, "linear": [1, 0.75, 0.5, 0.25, 0], "cosine": [x / 0.1 for x in cosine]}[schedule]
        assert got == pytest.approx([0.05, 0.1, *(0.1 * x for x in after)])
        assert rates(Optim(lr=0.1, schedule=schedule, warmup_updates=9), 3) == pytest.approx(
            [x / 90 for x in (1, 2, 3, 4)]
        )


def test_gradients_are_scaled_down_to_the_norm_and_0_leaves_them():
    steps = {}
    for limit in (0.0, 1e-3, 1e6):
        model, data = tiny(), rollouts()
        batch = seen_by_old(model, data, advantages(), [torch.arange(8)], grpo())[0]
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        row = take_update(model, optimizer, schedule, batch, grpo(), max_grad_norm=limit)
        total = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
        steps[limit] = row["grad_norm"], total
    assert steps[0.0] == steps[1e6]
    assert steps[0.0][0] == pytest.approx(steps[0.0][1], rel=1e-5)
    assert steps[1e-3][0] == pytest.approx(steps[0.0][0])
    assert steps[1e-3][1] == pytest.approx(1e-3, rel=1e-3)


# ---------------------------------------------------------------------------------------------------- what is trained
def kind_of(name):
    """router, experts or rest, by the names of the families at hand."""
    if ".gate." in name or ".router." in name:
        return "router"
    return "experts" if ".experts." in name else "rest"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("trains", "moving"),
    [
        ("all", {"router", "experts", "rest"}),
        ("no_router", {"experts", "rest"}),
        ("router", {"router"}),
        ("experts", {"experts"}),
    ],
)
def test_weights_that_are_not_trained_stay_bit_identical_and_the_others_move(family, trains, moving):
    model, data = tiny(family), rollouts()
    before = weights(model)
    batches = seen_by_old(model, data, advantages(), split_rows(8, 2, 0), grpo())
    optimizer, schedule = Optim(lr=1e-2, weight_decay=0.1, trains=trains).build(model, 2)
    for batch in batches:
        row = take_update(model, optimizer, schedule, batch, grpo())
        trained = [p.grad.flatten() for n, p in model.named_parameters() if kind_of(n) in moving and p.grad is not None]
        assert row["grad_norm"] == pytest.approx(torch.cat(trained).norm().item(), rel=1e-5)
    changed = {kind: [] for kind in ("router", "experts", "rest")}
    for name, parameter in model.named_parameters():
        changed[kind_of(name)].append(not torch.equal(parameter, before[name]))
    for kind, moved in changed.items():
        assert moved, kind
        assert any(moved) == (kind in moving), kind
        assert all(moved) == (kind in moving), kind


def test_routers_learn_at_their_multiple_of_the_rate_and_follow_the_schedule():
    model = tiny()
    optimizer, schedule = Optim(lr=0.1, router_lr=3.0, schedule="linear").build(model, 4)
    optimizer.step()
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.075, 0.225])
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    kinds = [{kind_of(names[id(p)]) for p in group["params"]} for group in optimizer.param_groups]
    assert kinds == [{"experts", "rest"}, {"router"}]
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(names)


def test_weights_of_a_variant_are_the_routers_and_what_was_frozen_stays_frozen():
    model = tiny(layers=2)
    install(model, LearnedPrior())
    model.lm_head.weight.requires_grad_(False)
    optimizer, _ = Optim(trains="router").build(model, 1)
    assert len(optimizer.param_groups[0]["params"]) == 4  # a weight and a prior each
    Optim(trains="experts").build(twin := tiny(layers=2), 1)
    assert {kind_of(name) for name, p in twin.named_parameters() if p.requires_grad} == {"experts"}
    rest = tiny(layers=2)
    rest.lm_head.weight.requires_grad_(False)
    optimizer, _ = Optim(trains="no_router").build(rest, 1)
    assert not any(p is rest.lm_head.weight for group in optimizer.param_groups for p in group["params"])


def test_a_dense_model_has_no_routers_to_train():
    for wrong in ({"trains": "router"}, {"trains": "no_router"}, {"router_lr": 2.0}):
        with pytest.raises(RoutingError, match="has no MoE layers"):
            Optim(**wrong).build(tiny("dense"), 1)


def test_make_deterministic_puts_all_but_checkpointed_layers_in_eval_mode():
    model = tiny().train()
    make_deterministic(model)
    assert not any(module.training for module in model.modules())
    model.activation_checkpointing_enable({"use_reentrant": False})
    make_deterministic(model)
    training = {type(module).__name__ for module in model.modules() if module.training}
    assert training == {"Qwen3MoeDecoderLayer", "Qwen3MoeModel"}
