"""Group-relative advantages by hand."""

import pytest
import torch

from moe_rl.advantage import GROUP_ADVANTAGES, group_advantages


def test_numbers_by_hand():
    rewards = torch.tensor([0.0, 1.0, 0.5, 0.5, 1.0, 1.0, 1.0, 0.0])
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    # group 0: mean .5, deviations -.5 .5 0 0, sd sqrt(.5 / 3) = .408248; group 1: mean .75, sd sqrt(.75 / 3) = .5
    expected = [-1.2247419, 1.2247419, 0.0, 0.0, 0.499999, 0.499999, 0.499999, -1.499997]
    got = group_advantages(rewards, groups)
    assert got.dtype == torch.float32
    assert got.tolist() == pytest.approx(expected, abs=1e-6)


def test_numbers_by_hand_without_the_standard_deviation():
    rewards = torch.tensor([0.0, 1.0, 0.5, 0.5, 1.0, 1.0, 1.0, 0.0, 1.0])
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1])
    got = group_advantages(rewards, groups, "group_mean")
    assert got.dtype == torch.float32
    assert got.tolist() == pytest.approx([-0.5, 0.5, 0, 0, 0.2, 0.2, 0.2, -0.8, 0.2])
    # 0 - 2/3, 1 - 1/3, .5 - .5 twice; 1 - 3/4, and 0 - 1
    got = group_advantages(rewards, groups, "leave_one_out")
    assert got.tolist() == pytest.approx([-2 / 3, 2 / 3, 0, 0, 0.25, 0.25, 0.25, -1, 0.25])
    assert group_advantages(rewards, groups).tolist() == group_advantages(rewards, groups, "group_std").tolist()


def test_an_unknown_advantage_is_refused():
    with pytest.raises(ValueError, match="'best'; choose one of group_std, group_mean, leave_one_out"):
        group_advantages(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), "best")


def test_two_completions_have_advantages_of_one_half_root_2():
    got = group_advantages(torch.tensor([0.25, 0.75]), torch.tensor([7, 7]))
    assert got.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], abs=3e-6)


def test_the_order_of_sequences_does_not_matter():
    generator = torch.Generator().manual_seed(0)
    rewards, groups = torch.rand(24, generator=generator), torch.arange(24) // 4
    order = torch.randperm(24, generator=generator)
    assert (groups[order].diff() < 0).any()
    assert torch.allclose(group_advantages(rewards[order], groups[order]), group_advantages(rewards, groups)[order])


def test_groups_may_have_any_ids_and_different_sizes():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0])
    one = group_advantages(rewards, torch.tensor([90, 5, 90, 5, 90]))
    other = group_advantages(rewards, torch.tensor([1, 0, 1, 0, 1]))
    assert torch.equal(one, other)
    assert one[[0, 2, 4]].tolist() == pytest.approx([1.1547, -0.57735, -0.57735], abs=1e-4)


def test_advantages_of_a_group_sum_to_0_and_do_not_see_other_groups():
    rewards = torch.tensor([0.0, 0.2, 1.0, 0.1, 0.1, 0.3])
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    got = group_advantages(rewards, groups)
    assert got[:3].sum().item() == pytest.approx(0, abs=1e-6)
    assert torch.equal(got[:3], group_advantages(rewards[:3], groups[:3]))


@pytest.mark.parametrize("kind", GROUP_ADVANTAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1 + 0.2, 0.7, 1 / 3])
def test_e11_a_group_of_equal_rewards_has_advantage_exactly_0(reward, dtype, kind):
    for size in (2, 3, 7, 10):  # the mean of equal floats need not be that float
        rewards = torch.tensor([reward] * size + [0.0, 1.0], dtype=dtype)
        groups = torch.tensor([0] * size + [1, 1])
        got = group_advantages(rewards, groups, kind)
        assert got[:size].tolist() == [0.0] * size
        assert got[size] < 0 < got[size + 1]


def test_rewards_that_differ_by_float_noise_teach_nothing():
    assert 0.1 + 0.2 != 0.3
    for dtype in (torch.float32, torch.float64):
        got = group_advantages(torch.tensor([0.1 + 0.2, 0.3, 0.3], dtype=dtype), torch.zeros(3))
        assert got.abs().max() < 1e-9, got


def test_a_group_of_one_is_refused():
    with pytest.raises(ValueError, match="a group of one completion has no advantage"):
        group_advantages(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 0, 1]))
