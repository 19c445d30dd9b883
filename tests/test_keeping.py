"""Replay that lets go, thresholded and sticky: which replayed experts stay, what replaces the others, and both ends."""

import functools
import math

import pytest
import torch
from models import FAMILIES, random_trace_like, sets_differ, tiny
from test_update import advantages, distance, grpo, rollouts, seen_by_old, weights

from moe_rl import record, replay
from moe_rl.arm import KEEPS
from moe_rl.keeping import keep_likely, keep_unless_outdone
from moe_rl.mini_batches import split_rows
from moe_rl.optim import Optim
from moe_rl.policy import make_deterministic, response_logprobs, routing_of
from moe_rl.update import take_update

P = torch.tensor([[0.4, 0.3, 0.2, 0.06, 0.04]])
LIVE = torch.tensor([[0, 1, 2]])  # the weakest live choice has 0.2
RULES = pytest.mark.parametrize("rule", KEEPS.values(), ids=KEEPS)
MODES = pytest.mark.parametrize("mode", KEEPS)


@pytest.mark.parametrize(
    ("replayed", "threshold", "expected"),
    [
        ([2, 3, 4], 0.0, [2, 3, 4]),
        ([2, 3, 4], 0.19, [2, 3, 4]),  # 0.04 is just enough
        ([2, 3, 4], 0.25, [2, 3, 0]),  # 4 gives way to the best live choice
        ([3, 2, 4], 0.5, [0, 2, 1]),  # 3 and 4 give way to the two best
        ([3, 0, 4], 0.5, [1, 0, 2]),  # 0 is in the set already
        ([4, 3, 1], 1.0, [0, 2, 1]),
        ([0, 1, 2], 1.0, [0, 1, 2]),
        ([1, 3, 0], 1e9, [0, 1, 2]),
    ],
)
def test_which_experts_stay_while_they_are_likely_by_hand(replayed, threshold, expected):
    got = keep_likely(torch.tensor([replayed]), LIVE, P, threshold)
    assert got.tolist() == [expected]
    # Logits give the same: their softmax is P. -inf is an expert that may not be chosen.
    assert keep_likely(torch.tensor([replayed]), LIVE, P.log(), threshold).tolist() == [expected]


@pytest.mark.parametrize(
    ("replayed", "threshold", "expected"),
    [
        ([2, 3, 4], 0.0, [2, 3, 4]),
        ([2, 3, 4], 0.09, [2, 3, 4]),  # the best newcomer counts 0.036, and 4 has 0.04
        ([2, 3, 4], 0.11, [2, 3, 0]),  # 0.044: takes the place of 4; the next, 0.033, not that of 3
        ([2, 3, 4], 0.19, [2, 3, 0]),  # keep_likely keeps all three: 0.057 for the next
        ([2, 3, 4], 0.21, [2, 0, 1]),  # 0.063
        ([3, 0, 4], 0.14, [3, 0, 1]),  # newcomers 1 and 2 count 0.042 and 0.028
        ([3, 0, 4], 0.29, [3, 0, 1]),  # 0.087 and 0.058: 3 stays
        ([3, 0, 4], 0.31, [1, 0, 2]),  # 0.062
        ([4, 3, 1], 1.0, [0, 2, 1]),
        ([0, 1, 2], 1.0, [0, 1, 2]),
        ([1, 3, 0], 1e9, [1, 2, 0]),
    ],
)
def test_which_experts_stay_until_they_are_outdone_by_hand(replayed, threshold, expected):
    got = keep_unless_outdone(torch.tensor([replayed]), LIVE, P, threshold)
    assert got.tolist() == [expected]
    assert keep_unless_outdone(torch.tensor([replayed]), LIVE, P.log(), threshold).tolist() == [expected]


def test_an_expert_that_is_replayed_and_live_stays_though_the_live_choice_is_not_the_best_scores():
    """A router variant's choice: it takes 3 and 4 where 0 leads."""
    got = keep_unless_outdone(torch.tensor([[4, 0]]), torch.tensor([[3, 4]]), P, 0.9)
    assert got.tolist() == [[4, 0]]  # 3 counts 0.054, more than 4, but less than 0


@pytest.mark.parametrize("K", [1, 2, 4])
def test_sticky_is_a_top_k_of_scores_with_a_margin_for_the_replayed(K):
    generator = torch.Generator().manual_seed(K)
    p = torch.rand(500, 8, generator=generator).softmax(-1)
    replayed, live = torch.rand(500, 8, generator=generator).topk(K).indices, p.topk(K).indices
    for threshold in (0.5, 0.8, 0.95):
        margin = torch.zeros_like(p).scatter(-1, replayed, -math.log(threshold))
        expected = (p.log() + margin).topk(K).indices
        got = keep_unless_outdone(replayed, live, p, threshold)
        assert torch.equal(got.sort(-1).values, expected.sort(-1).values)
        likely = keep_likely(replayed, live, p, threshold)
        assert torch.equal(likely.sort(-1).values, got.sort(-1).values) == (K == 1)
    assert (got != replayed).any()


@RULES
def test_rows_are_told_apart_one_by_one(rule):
    """A token's choice must not depend on its batch."""
    replayed = torch.tensor([[2, 3, 4]] * 2)
    got = rule(replayed, LIVE.expand(2, -1), torch.cat([P, P.log() - 3]), 0.15)
    assert torch.equal(got[:1], got[1:])
    forbidden = torch.tensor([[0.4, 0.3, 0.2, 0.1, -torch.inf]])
    assert rule(replayed[:1], LIVE, forbidden, 0.2).tolist() == [[2, 3, 0]]


@RULES
@pytest.mark.parametrize("family", FAMILIES)
def test_threshold_0_is_replay_and_a_high_one_is_live_routing(family, rule):
    model, data = tiny(family), rollouts()
    own = routing_of(model, data.tokens_BS, data.attention_BS)
    foreign = random_trace_like(own)
    outcome = {}
    for threshold in (None, 0.0, 0.5, 1.0, 1e9):
        keep = None if threshold is None else functools.partial(rule, threshold=threshold)
        with replay(model, foreign, keep) as replaying, record(model) as recorder, torch.no_grad():
            outcome[threshold] = response_logprobs(model, data)[0], recorder.trace, replaying.kept
    assert torch.equal(outcome[None][0], outcome[0.0][0])
    assert outcome[None][2] == []
    assert all(used == replayed for used, replayed in outcome[0.0][2])
    live, _ = response_logprobs(model, data)
    for threshold in (1.0, 1e9):
        assert not sets_differ(outcome[threshold][1], own)[own.valid_BS].any()
        assert torch.allclose(outcome[threshold][0], live, atol=1e-6)
    used = [sum(int(one) for one, _ in outcome[t][2]) / sum(int(all_) for _, all_ in outcome[t][2]) for t in (0.5, 1.0)]
    assert 1 > used[0] > used[1] > 0
    middle = outcome[0.5][1]
    middle.check()
    assert sets_differ(middle, own)[own.valid_BS].any()
    assert sets_differ(middle, foreign)[own.valid_BS].any()
    # What is counted is what is in both sets, on real tokens of all layers.
    both = (middle.expert_ids_BSLK[..., None] == foreign.expert_ids_BSLK[..., None, :]).any(-1)[own.valid_BS]
    assert used[0] == pytest.approx(both.float().mean().item())


def train(threshold, checkpointing=False, micro_batch=0, mode="thresholded", lr=1e-2, **sizes):
    model, data = tiny(**sizes), rollouts()
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    make_deterministic(model)
    batches = seen_by_old(model, data, advantages(), split_rows(8, 2, 0), grpo(mode), micro_batch=micro_batch)
    optimizer, schedule = Optim(lr=lr).build(model, 2)
    rows = [
        take_update(model, optimizer, schedule, batch, grpo(mode, replay_threshold=threshold), max_grad_norm=1.0)
        for batch in batches
    ]
    return model, rows


@MODES
def test_training_at_threshold_0_is_replay_bit_for_bit_and_between_0_and_1_something_else(mode):
    replayed, expected = train(0.0, mode="old_policy")
    model, rows = train(0.0, mode=mode)
    assert rows == expected
    assert distance(weights(model), weights(replayed)) == 0.0
    other, rows = train(0.9, mode=mode)
    assert rows[0]["log_w_sd"] == 0.0
    assert rows[0]["replay_kept"] == 1.0
    assert 0.5 < rows[1]["replay_kept"] < 1.0
    assert distance(weights(other), weights(replayed)) > 0.0


def test_sticky_keeps_less_than_thresholded_at_the_same_number():
    model, data = tiny(experts=16, top_k=4), rollouts()
    foreign = random_trace_like(routing_of(model, data.tokens_BS, data.attention_BS))
    kept = []
    for rule in (keep_unless_outdone, keep_likely):
        with replay(model, foreign, functools.partial(rule, threshold=0.5)) as replaying, torch.no_grad():
            response_logprobs(model, data)
        kept.append(sum(int(used) for used, _ in replaying.kept))
    assert 0 < kept[0] < kept[1]
    rows = {mode: train(0.8, mode=mode, lr=3e-2, experts=16, top_k=4)[1] for mode in KEEPS}
    assert rows["sticky"][1]["replay_kept"] < rows["thresholded"][1]["replay_kept"]


@MODES
def test_activation_checkpointing_and_micro_batches_change_nothing_of_it(mode):
    plain, rows = train(0.9, mode=mode)
    checkpointed, same = train(0.9, checkpointing=True, mode=mode)
    assert rows == same
    assert distance(weights(plain), weights(checkpointed)) == 0.0
    for row, cut in zip(rows, train(0.9, micro_batch=1, mode=mode)[1], strict=True):
        assert row["replay_kept"] == pytest.approx(cut["replay_kept"], abs=0.02)
