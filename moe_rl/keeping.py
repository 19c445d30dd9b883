"""Replay that lets go: which replayed experts stay when the router has turned to others, and what replaces the rest.

Both rules take (replayed_NK, live_NK, scores_NE, threshold) and return expert ids [N, K]. Rows are sets of K distinct
ids; a kept expert keeps its place, the first that is dropped gives way to the best live choice, and so on. p is what
the router ranks, see `probabilities`. At threshold 0 all stay; from 1 on the set is the live one, ties apart, if the
live choice is the best scores.
"""

from __future__ import annotations

import torch
from torch import Tensor


def keep_likely(replayed_NK: Tensor, live_NK: Tensor, scores_NE: Tensor, threshold: float) -> Tensor:
    """Replayed experts stay while the router gives them a share of what its weakest live choice has.

    kept: p(expert) >= threshold * min_k p(live_k)
    """
    p_NE = probabilities(scores_NE)
    p_live_NK = p_NE.gather(-1, live_NK)
    kept_NK = p_NE.gather(-1, replayed_NK) >= threshold * p_live_NK.amin(-1, keepdim=True)
    return _fill(replayed_NK, kept_NK, live_NK, p_live_NK)


def keep_unless_outdone(replayed_NK: Tensor, live_NK: Tensor, scores_NE: Tensor, threshold: float) -> Tensor:
    """Replayed experts stay until the live choice that would take their place leads by a margin.

        expert_ids = topk(log p + margin * [expert is replayed])        margin = -log(threshold), over both choices

    So the strongest newcomer takes the place of the weakest replayed expert, and enters if threshold * p(newcomer) is
    more. With K = 1 that is `keep_likely`; with more, a strong newcomer enters here where it does not there.
    """
    p_NE = probabilities(scores_NE)
    p_replayed_NK, p_live_NK = p_NE.gather(-1, replayed_NK), p_NE.gather(-1, live_NK)
    same_NKK = replayed_NK[:, :, None] == live_NK[:, None, :]
    replayed_first_N2K = torch.cat(
        [
            p_replayed_NK.masked_fill(same_NKK.any(2), torch.inf),
            (threshold * p_live_NK).masked_fill(same_NKK.any(1), -1.0),  # already among the replayed
        ],
        dim=-1,
    )
    rank_N2K = replayed_first_N2K.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)  # stable: a tie is kept
    K = replayed_NK.shape[-1]
    return _fill(replayed_NK, rank_N2K[:, :K] < K, live_NK, p_live_NK)


def probabilities(scores_NE: Tensor) -> Tensor:
    """Scores that are no probabilities as some, by softmax: those of a token with a negative one (-inf, an expert that
    it may not choose, is probability 0). Told apart token by token, for a choice must not depend on its batch.
    """
    no_probability_N1 = ((scores_NE < 0) & ~scores_NE.isneginf()).any(-1, keepdim=True)
    return torch.where(no_probability_N1, scores_NE.softmax(-1), scores_NE.clamp(min=0.0))


def _fill(replayed_NK: Tensor, kept_NK: Tensor, live_NK: Tensor, p_live_NK: Tensor) -> Tensor:
    """The kept experts, and in place of the others the best live choices that are not among them."""
    # At most K - kept live choices are among the kept, so the others always suffice.
    taken_NK = ((live_NK[:, :, None] == replayed_NK[:, None, :]) & kept_NK[:, None, :]).any(-1)
    order_NK = p_live_NK.masked_fill(taken_NK, -1.0).argsort(dim=-1, descending=True, stable=True)
    turn_NK = ((~kept_NK).cumsum(-1) - 1).clamp(min=0)
    return torch.where(kept_NK, replayed_NK, live_NK.gather(-1, order_NK).gather(-1, turn_NK))
