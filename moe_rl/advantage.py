"""Advantages relative to the other completions of a prompt."""

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-6  # of the standard deviation; rewards lie in [0, 1]
GROUP_ADVANTAGES = {
    "group_std": "(r_i - mean of its group) / (standard deviation of its group + 1e-6) (GRPO, arXiv 2402.03300)",
    "group_mean": "r_i - mean of its group (Dr. GRPO, arXiv 2503.20783)",
    "leave_one_out": "r_i - mean of the others of its group = G / (G - 1) group_mean (RLOO, arXiv 2402.14740)",
}
ADVANTAGES = GROUP_ADVANTAGES | {
    "gae": "of each token, from a critic: sum_l (gamma lam)^l delta_t+l, whitened (GAE, arXiv 1506.02438 eq. 16)",
}


def group_advantages(rewards_B: Tensor, group_ids_B: Tensor, kind: str = "group_std") -> Tensor:
    """The advantage of each completion, shape [B], float32. kind: one of GROUP_ADVANTAGES, which says what it computes.

    Groups are told apart by id, in any order. The standard deviation is the sample's (divided by G - 1). A group of
    equal rewards has advantage exactly 0. Raises ValueError for a group of one and for an unknown kind.
    """
    if kind not in GROUP_ADVANTAGES:
        raise ValueError(f"the advantage is {kind!r}; choose one of {', '.join(GROUP_ADVANTAGES)}")
    rewards = rewards_B.double()
    _, group_B, size_G = group_ids_B.unique(return_inverse=True, return_counts=True)
    if (size_G < 2).any():
        raise ValueError("a group of one completion has no advantage; sample 2 or more completions a prompt")

    def group_sum(values: Tensor) -> Tensor:
        return torch.zeros(len(size_G), dtype=torch.float64, device=values.device).index_add_(0, group_B, values)

    centred = rewards - (group_sum(rewards) / size_G)[group_B]
    if kind == "group_std":
        divisor_G = (group_sum(centred**2) / (size_G - 1)).sqrt() + EPSILON
    else:
        divisor_G = (size_G - 1) / size_G if kind == "leave_one_out" else torch.ones_like(size_G)
    reference_G = rewards.new_zeros(len(size_G)).index_copy_(0, group_B, rewards)  # some member of each group
    equal_G = group_sum((rewards != reference_G[group_B]).double()) == 0
    return (centred / divisor_G[group_B]).masked_fill(equal_G[group_B], 0.0).float()
