"""Thresholded replay: which replayed experts stay, what replaces the others, and its two ends."""

import pytest
import torch
from models import FAMILIES, random_trace_like, sets_differ, tiny
from test_update import advantages, distance, rollouts, weights

from moe_rl import record, replay
from moe_rl.optim import Optim
from moe_rl.policy import response_logprobs, routing_of
from moe_rl.policy_losses.grpo import Grpo
from moe_rl.replaying import keep_likely
from moe_rl.update import make_deterministic, old_pass, split_rows, take_update

P = torch.tensor([[0.4, 0.3, 0.2, 0.06, 0.04]])
LIVE = torch.tensor([[0, 1, 2]])  # the weakest live choice has 0.2


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
def test_which_experts_stay_by_hand(replayed, threshold, expected):
    got = keep_likely(torch.tensor([replayed]), LIVE, P, threshold)
    assert got.tolist() == [expected]
    # Logits give the same: their softmax is P. -inf is an expert that may not be chosen.
    assert keep_likely(torch.tensor([replayed]), LIVE, P.log(), threshold).tolist() == [expected]


def test_rows_are_told_apart_one_by_one():
    """A token's choice must not depend on its batch."""
    replayed = torch.tensor([[2, 3, 4]] * 2)
    got = keep_likely(replayed, LIVE.expand(2, -1), torch.cat([P, P.log() - 3]), 0.25)
    assert got.tolist() == [[2, 3, 0]] * 2
    forbidden = torch.tensor([[0.4, 0.3, 0.2, 0.1, -torch.inf]])
    assert keep_likely(replayed[:1], LIVE, forbidden, 0.25).tolist() == [[2, 3, 0]]


@pytest.mark.parametrize("family", FAMILIES)
def test_threshold_0_is_replay_and_a_high_one_is_live_routing(family):
    model, data = tiny(family), rollouts()
    own = routing_of(model, data.tokens_BS, data.attention_BS)
    foreign = random_trace_like(own)
    outcome = {}
    for threshold in (None, 0.0, 0.5, 1.0, 1e9):
        with replay(model, foreign, threshold or 0.0) as replaying, record(model) as recorder, torch.no_grad():
            outcome[threshold] = response_logprobs(model, data)[0], recorder.trace, replaying.kept
    assert torch.equal(outcome[None][0], outcome[0.0][0])
    assert outcome[0.0][2] == []
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


def train(threshold, checkpointing=False, micro_batch=0, arm="thresholded", lr=1e-2):
    model, data = tiny(), rollouts()
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    make_deterministic(model)
    batches = old_pass(model, data, advantages(), split_rows(8, 2, 0), micro_batch, arm)
    optimizer, schedule = Optim(lr=lr).build(model, 2)
    rows = [take_update(model, optimizer, schedule, batch, Grpo(), arm, 1.0, threshold=threshold) for batch in batches]
    return model, rows


def test_training_at_threshold_0_is_replay_bit_for_bit_and_between_0_and_1_something_else():
    replayed, expected = train(0.0, arm="old_policy")
    model, rows = train(0.0)
    assert rows == expected
    assert distance(weights(model), weights(replayed)) == 0.0
    other, rows = train(0.9)
    assert rows[0]["log_w_sd"] == 0.0
    assert rows[0]["replay_kept"] == 1.0
    assert 0.5 < rows[1]["replay_kept"] < 1.0
    assert distance(weights(other), weights(replayed)) > 0.0


def test_activation_checkpointing_and_micro_batches_change_nothing_of_it():
    plain, rows = train(0.9)
    checkpointed, same = train(0.9, checkpointing=True)
    assert rows == same
    assert distance(weights(plain), weights(checkpointed)) == 0.0
    for row, cut in zip(rows, train(0.9, micro_batch=1)[1], strict=True):
        assert row["replay_kept"] == pytest.approx(cut["replay_kept"], abs=0.02)
