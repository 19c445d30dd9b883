"""Pairs of experts against numbers worked by hand."""

import numpy as np
import pytest

from moe_rl import expert_pairs

# Four tokens, two layers, K = 2 of E = 4.
IDS_NLK = np.array([[[0, 1], [2, 3]], [[0, 2], [2, 3]], [[1, 0], [3, 2]], [[3, 0], [2, 1]]], dtype=np.uint8)


def chosen(tokens, experts, top_k, seed=0):
    return np.random.default_rng(seed).random((tokens, 1, experts)).argsort(-1)[..., :top_k]


def test_pairs_are_all_pairs_of_a_set_and_not_neighbours_in_rank():
    counts_LEE = expert_pairs.pair_counts(np.array([[[0, 1, 2]]]), 4)  # 0 and 2 are no neighbours
    assert counts_LEE.tolist() == [[[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0], [0, 0, 0, 0]]]


def test_co_activation_by_hand():
    counts_LEE = expert_pairs.pair_counts(IDS_NLK, 4)
    assert counts_LEE[0].tolist() == [[4, 2, 1, 1], [2, 2, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]]
    shares_LEE = expert_pairs.co_activation(counts_LEE)
    assert shares_LEE[0, 0, 1:].tolist() == [0.5, 0.25, 0.25]  # of expert 0's four tokens
    assert shares_LEE[0, 1, 0] == 1.0  # both of expert 1's tokens
    assert np.isnan(shares_LEE[:, range(4), range(4)]).all()
    assert np.isnan(shares_LEE[1, 0]).all()  # expert 0 got no token in layer 1


def test_pair_counts_do_not_depend_on_the_chunk(monkeypatch):
    ids = chosen(50, 8, 3)
    whole = expert_pairs.pair_counts(ids, 8)
    monkeypatch.setattr(expert_pairs, "CHUNK", 7)
    assert np.array_equal(whole, expert_pairs.pair_counts(ids, 8))


def test_independence_by_hand():
    """Loads 4, 2, 1, 1: products 8, 4, 4, 2, 2, 1 of the pairs, 21 in all, for 4 pairs that were active."""
    counts_LEE = expert_pairs.pair_counts(IDS_NLK[:, :1], 4)
    expected = expert_pairs.independent(counts_LEE)[0]
    assert (expected[0, 1], expected[1, 2], expected[2, 3]) == pytest.approx((32 / 21, 8 / 21, 4 / 21))
    ratio = expert_pairs.against_independence(counts_LEE)[0]
    assert (ratio[0, 1], ratio[0, 2], ratio[1, 2]) == pytest.approx((21 / 16, 21 / 16, 0))
    assert np.isnan(ratio[0, 0])
    # apart by 10, 5, 5, 8, 8 and 4 of 21: half of 40 / 21, of 4 pairs
    assert expert_pairs.off_independence(counts_LEE) == pytest.approx([5 / 21])


def test_independent_choices_are_off_independence_by_chance_only_and_twins_are_not():
    counts = expert_pairs.pair_counts(chosen(500, 8, 2), 8)
    (off,), (chance,) = (
        expert_pairs.off_independence(counts),
        expert_pairs.off_by_chance(counts, np.random.default_rng(1)),
    )
    assert 0 < chance < 0.15
    assert off == pytest.approx(chance, abs=0.05)
    first = np.arange(500) % 4
    twins = expert_pairs.pair_counts(np.stack([2 * first, 2 * first + 1], -1)[:, None], 8)
    assert expert_pairs.off_independence(twins) == pytest.approx([6 / 7])  # one of seven partners is the twin


def test_without_pairs_there_is_nothing_to_say():
    counts_LEE = expert_pairs.pair_counts(np.zeros((3, 1, 1), np.uint8), 4)
    assert np.isnan(expert_pairs.off_independence(counts_LEE)).all()
    assert np.isnan(expert_pairs.off_by_chance(counts_LEE, np.random.default_rng(0))).all()
