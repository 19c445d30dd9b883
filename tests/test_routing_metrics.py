"""Routing metrics against numbers worked by hand."""

import math

import pytest
import torch
from models import random_trace_like, tiny, tokens

from moe_rl.drift import routing_metrics as metrics
from moe_rl.policy import routing_of
from moe_rl.routing_trace import RoutingTrace

# Four tokens, two layers, K = 2 of E = 4.
IDS_NLK = torch.tensor([[[0, 1], [2, 3]], [[0, 2], [2, 3]], [[1, 0], [3, 2]], [[3, 0], [2, 1]]])


def test_load_counts_tokens_and_max_violation_is_relative_to_the_mean():
    load_LE = metrics.load(IDS_NLK, 4)
    assert load_LE.tolist() == [[4, 2, 1, 1], [0, 1, 4, 3]]
    assert metrics.max_violation(load_LE).tolist() == [1.0, 1.0]  # 4 / 2 - 1
    assert metrics.dead_experts(load_LE).tolist() == [0, 1]


def test_max_violation_of_uniform_load_is_0_and_of_one_set_for_all_the_worst():
    uniform = metrics.load(torch.tensor([[[0, 1]], [[2, 3]]]), 4)
    assert metrics.max_violation(uniform).tolist() == [0.0]
    assert metrics.max_violation(metrics.load(torch.tensor([[[2, 3]]] * 5), 4)).tolist() == [1.0]


def test_padding_is_not_counted_as_load():
    """Case D2: four real tokens spread evenly, four pad tokens on expert 0."""
    ids = torch.tensor([0, 1, 2, 3, 0, 0, 0, 0]).view(1, 8, 1, 1)
    valid = torch.tensor([[True] * 4 + [False] * 4])
    trace = RoutingTrace(ids.to(torch.uint8), valid, ("layers.0.gate",), 4)
    load_LE = metrics.load(metrics.known(trace), 4)
    assert load_LE.tolist() == [[1, 1, 1, 1]]
    assert metrics.max_violation(load_LE).tolist() == [0.0]


def test_more_left_padding_changes_no_metric():
    model = tiny()
    ids, mask = tokens(3, 8)
    plain = routing_of(model, ids, mask)
    wide = routing_of(model, *(torch.nn.functional.pad(tensor, (5, 0)) for tensor in (ids, mask)))
    assert torch.equal(metrics.load(metrics.known(plain), 8), metrics.load(metrics.known(wide), 8))


def test_vocabulary_specialisation_by_hand():
    tokens_N = torch.tensor([7, 9, 7, 9])
    token_ids_U, counts_LUE, occurrences_U = metrics.vocabulary_counts(IDS_NLK, tokens_N, 4)
    assert token_ids_U.tolist() == [7, 9]
    assert occurrences_U.tolist() == [2, 2]
    shares_LUE = metrics.vocabulary_specialisation(counts_LUE, occurrences_U)
    assert shares_LUE[0].tolist() == [[1, 1, 0, 0], [1, 0, 0.5, 0.5]]
    assert torch.equal(shares_LUE.sum(-1), torch.full((2, 2), 2.0, dtype=torch.float64))  # K
    mean_LE = metrics.mean_specialisation(shares_LUE)
    assert mean_LE[0].tolist() == [1, 1, 0.5, 0.5]
    assert mean_LE[1].isnan().tolist() == [True, False, False, False]


def test_saturation_is_the_mean_overlap_whatever_the_order():
    other = IDS_NLK.flip(-1).clone()
    assert metrics.saturation(IDS_NLK, other).tolist() == [1.0, 1.0]
    other[0, 0] = torch.tensor([2, 3])  # nothing of {0, 1} is left
    other[1, 1] = torch.tensor([0, 3])  # one of {2, 3} is left
    assert metrics.saturation(IDS_NLK, other).tolist() == [0.75, 0.875]


def test_saturation_of_unrelated_routers_is_top_k_over_experts():
    shape = (1, 20_000, 1, 2)
    trace = RoutingTrace(torch.zeros(shape, dtype=torch.uint8), torch.ones(shape[:2], dtype=torch.bool), ("a",), 8)
    one, other = (metrics.known(random_trace_like(trace, seed)) for seed in (1, 2))
    assert float(metrics.saturation(one, other)) == pytest.approx(2 / 8, abs=0.01)


def test_router_entropy_is_the_log_of_the_experts_when_undecided_and_0_when_certain():
    logits = torch.tensor([[[0.0] * 4, [100.0, 0, 0, 0]], [[1.0] * 4, [0, 100.0, 0, 0]]])
    undecided, certain = metrics.router_entropy(logits).tolist()
    assert undecided == pytest.approx(math.log(4))
    assert certain == pytest.approx(0, abs=1e-12)
