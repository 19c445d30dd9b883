"""Group-relative advantages."""

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-6  # of the standard deviation; rewards lie in [0, 1]


def group_advantages(rewards_B: Tensor, group_ids_B: Tensor) -> Tensor:
    """A_i = (r_i - mean of its group) / (standard deviation of its group + 1e-6), shape [B], float32, no unit.

    Groups are told apart by id, in any order. The standard deviation is the sample's (divided by G - 1). A group of
    equal rewards has advantage exactly 0. Source: arXiv 2402.03300 section 4.1.2. Raises ValueError for a group of one.
    """
    rewards = rewards_B.double()
    _, group_B, size_G = group_ids_B.unique(return_inverse=True, return_counts=True)
    if (size_G < 2).any():
        raise ValueError("a group of one completion has no advantage; sample 2 or more completions a prompt")

    def group_sum(values: Tensor) -> Tensor:
        return torch.zeros(len(size_G), dtype=torch.float64, device=values.device).index_add_(0, group_B, values)

    centred = rewards - (group_sum(rewards) / size_G)[group_B]
    deviation_G = (group_sum(centred**2) / (size_G - 1)).sqrt()
    reference_G = torch.zeros_like(deviation_G).index_copy_(0, group_B, rewards)  # some member of each group
    equal_G = group_sum((rewards != reference_G[group_B]).double()) == 0
    advantages = centred / (deviation_G + EPSILON)[group_B]
    return advantages.masked_fill(equal_G[group_B], 0.0).float()


def equal_group_share(rewards_B: Tensor, group_ids_B: Tensor) -> float:
    """Share of groups whose rewards are all equal, and which therefore teach nothing."""
    order = group_ids_B.argsort(stable=True)
    _, sizes = group_ids_B[order].unique_consecutive(return_counts=True)
    groups = rewards_B[order].split(sizes.tolist())
    return sum(bool((group == group[0]).all()) for group in groups) / len(groups)
