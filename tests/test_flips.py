"""The flip decomposition: laws, then numbers worked by hand."""

import dataclasses
import math

import pytest
import torch
from models import FAMILIES as TINY_FAMILIES
from models import tiny
from test_drift_meter import nudge, rollouts

from moe_rl.drift.flips import flip_terms, replay_gap, split_ratio
from moe_rl.policy import response_logprobs
from moe_rl.recording import record
from moe_rl.replaying import replay


@torch.no_grad()
def view(model, ours):
    with record(model) as recorder:
        logprobs, _ = response_logprobs(model, ours)
    return recorder.trace, logprobs


def with_changed_column(trace, column):
    """Other experts in layer 1, in one column of every sequence."""
    ids = trace.expert_ids_BSLK.clone()
    ids[:, column, 1] = (ids[:, column, 1] + 2) % trace.num_experts
    return dataclasses.replace(trace, expert_ids_BSLK=ids)


def test_the_terms_by_hand():
    old = torch.tensor([[-1.0, -2.0], [-3.0, 7.0]])
    new = torch.tensor([[-1.1, -2.0], [-2.5, -9.0]])
    replayed = torch.tensor([[-1.0, -2.0], [-2.6, 4.0]])
    layers, mask = torch.tensor([[1, 0], [2, 3]]), torch.tensor([[True, True], [True, False]])
    columns = split_ratio(old, new, replayed, layers, mask, num_layers=3)
    # flip terms -.1, 0, .1; weight terms 0, 0, .4; log w -.1, 0, .5; the last token is padding
    assert columns["flip_rms"] == pytest.approx(math.sqrt(0.02 / 3), rel=1e-6)
    assert columns["weight_rms"] == pytest.approx(math.sqrt(0.16 / 3), rel=1e-6)
    assert columns["log_w_rms"] == pytest.approx(math.sqrt(0.26 / 3), rel=1e-6)
    assert columns["log_w_flipped"] == pytest.approx(0.3, rel=1e-6)
    assert columns["log_w_unflipped"] == 0
    assert columns["log_w_by_changed_layers"] == pytest.approx([0, 0.1, 0.5, math.nan], nan_ok=True, rel=1e-6)


def test_the_replay_gap_by_hand():
    """Rewards 1 and 0, .5 from their mean. Weights with own routing exp(.3) and exp(-.2), with the old one's exp(.1)
    and exp(.4); the second sequence's last token is padding."""
    old = torch.tensor([[-1.0, -2.0], [-3.0, 7.0]], dtype=torch.float64)
    new = old + torch.tensor([[0.1, 0.2], [-0.2, 99.0]])
    replayed = old + torch.tensor([[0.3, -0.2], [0.4, 5.0]])
    mask = torch.tensor([[True, True], [True, False]])
    gap = replay_gap(torch.tensor([1.0, 0.0]), old, new, replayed, mask)
    expected = (0.5 * (math.exp(0.3) - math.exp(0.1)) - 0.5 * (math.exp(-0.2) - math.exp(0.4))) / 2
    assert gap == pytest.approx(expected, abs=1e-8)


def test_the_replay_gap_is_the_difference_of_expected_rewards():
    """Over all answers that the old policy could give, weighted by its probabilities: the exact difference."""
    generator = torch.Generator().manual_seed(0)
    old, new, replayed = (torch.randn(9, generator=generator, dtype=torch.float64).log_softmax(-1) for _ in range(3))
    rewards = torch.rand(9, generator=generator, dtype=torch.float64)
    counts = (old.exp() * 200_000).round().long()  # as often as it would be sampled
    rows = torch.arange(9).repeat_interleave(counts)
    gap = replay_gap(rewards[rows], *(x[rows, None] for x in (old, new, replayed)), torch.ones(len(rows), 1).bool())
    assert gap == pytest.approx(float((rewards * (new.exp() - replayed.exp())).sum()), abs=1e-4)


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_the_terms_of_each_token_add_up_to_log_w(family):
    model, ours = tiny(family), rollouts()
    old_routing, old = view(model, ours)
    nudge(model, 1, 0.02)
    new_routing, new = view(model, ours)
    with torch.no_grad(), replay(model, old_routing):
        replayed, _ = response_logprobs(model, ours)
    columns = flip_terms(model, ours, (old_routing, old), (new_routing, new))
    flips, weights = new - replayed, replayed - old
    assert torch.allclose(flips + weights, new - old, atol=1e-6)
    for name, term in (("flip_rms", flips), ("weight_rms", weights), ("log_w_rms", new - old)):
        assert columns[name] == pytest.approx(float(term.square().mean().sqrt()), rel=1e-4)
        assert columns[name] > 0


def test_without_flips_the_flip_term_is_exactly_0():
    """The last norm, after all layers, changes probabilities and no routing."""
    model, ours = tiny(), rollouts()
    old = view(model, ours)
    with torch.no_grad():
        model.model.norm.weight.mul_(1.3)
    columns = flip_terms(model, ours, old, view(model, ours))
    assert columns["flip_rms"] == 0
    assert columns["weight_rms"] == columns["log_w_rms"] > 0
    assert math.isnan(columns["log_w_flipped"])
    assert columns["log_w_by_changed_layers"][0] == columns["log_w_unflipped"] > 0


def test_where_nothing_but_the_choice_changes_the_weight_term_is_exactly_0():
    """DeepSeek-V3's bias decides which experts are chosen, and not how they are weighted."""
    model, ours = tiny("deepseek_v3"), rollouts()
    old = view(model, ours)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(0)))
    columns = flip_terms(model, ours, old, view(model, ours))
    assert columns["weight_rms"] == 0
    assert columns["flip_rms"] == columns["log_w_rms"] > 0
    assert columns["log_w_flipped"] > 0


def test_a_tokens_flips_are_those_of_the_position_that_predicts_it():
    model, ours = tiny(), rollouts()  # 4 response tokens in columns 7 to 10
    routing, old = view(model, ours)
    nudge(model, 1, 0.001)
    _, new = view(model, ours)
    size = (new - old).abs().double()
    for column, place in {6: 0, 9: 3}.items():
        columns = flip_terms(model, ours, (routing, old), (with_changed_column(routing, column), new))
        others = [i for i in range(4) if i != place]
        assert columns["log_w_flipped"] == pytest.approx(float(size[:, place].mean()))
        assert columns["log_w_unflipped"] == pytest.approx(float(size[:, others].mean()))
    last = flip_terms(model, ours, (routing, old), (with_changed_column(routing, 10), new))
    assert math.isnan(last["log_w_flipped"])  # the last token predicts nothing
