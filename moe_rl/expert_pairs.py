"""Which experts are active for the same token: counts of pairs, as shares, and against independence. No torch.

All take or give counts_LEE of known tokens only; counts add over batches.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
CHUNK = 4096  # tokens whose one-hot choice is held at a time


def pair_counts(ids_NLK: npt.NDArray[Any], num_experts: int) -> Array:
    """Tokens that chose both experts, float64 [L, E, E], symmetric; the diagonal is the load.

    All pairs of a token's set count, not only neighbours in rank. ids_NLK: the distinct experts of known tokens.
    """
    N, L, _ = ids_NLK.shape
    counts_LEE = np.zeros((L, num_experts, num_experts))
    for start in range(0, N, CHUNK):
        ids_LNK = ids_NLK[start : start + CHUNK].swapaxes(0, 1).astype(np.int64)
        chosen_LNE = np.zeros((*ids_LNK.shape[:2], num_experts), np.float32)
        np.put_along_axis(chosen_LNE, ids_LNK, 1.0, axis=2)
        counts_LEE += chosen_LNE.swapaxes(1, 2) @ chosen_LNE  # whole numbers below 2^24 are exact in float32
    return counts_LEE


def co_activation(counts_LEE: Array) -> Array:
    """N_ij / N_i: share of expert i's tokens that also chose j, [L, E, E]; rows i. nan on the diagonal.

    nan also for experts without tokens. Independent experts of equal load: (K - 1) / (E - 1). Source: OLMoE, arXiv
    2409.02060, section 5.2.
    """
    load_LE = np.diagonal(counts_LEE, axis1=1, axis2=2)
    shares_LEE = _over(counts_LEE, load_LE[..., None])
    shares_LEE[:, np.eye(counts_LEE.shape[-1], dtype=bool)] = np.nan
    return shares_LEE


def independent(counts_LEE: Array) -> Array:
    """As many pairs, spread over the experts in proportion to N_i N_j, [L, E, E]; 0 on the diagonal.

    The catch: of K distinct experts a token's choices are never quite independent; busy experts meet a little less.
    """
    load_LE = np.diagonal(counts_LEE, axis1=1, axis2=2)
    between = ~np.eye(counts_LEE.shape[-1], dtype=bool)
    products_LEE = load_LE[:, :, None] * load_LE[:, None, :] * between
    pairs_L = (counts_LEE * between).sum((1, 2))
    return products_LEE * np.nan_to_num(_over(pairs_L, products_LEE.sum((1, 2))))[:, None, None]


def against_independence(counts_LEE: Array) -> Array:
    """N_ij over what `independent` expects, [L, E, E]: 1 is independence, nan where none is expected."""
    return _over(counts_LEE, independent(counts_LEE))


def off_independence(counts_LEE: Array) -> Array:
    """Share of the pairs that would have to be others for independence, [L]: ½ sum |N_ij - expected| / sum N_ij, i ≠ j.

    Few tokens alone bring it above 0: see `off_by_chance`. nan without pairs.
    """
    return _apart(counts_LEE, independent(counts_LEE))


def off_by_chance(counts_LEE: Array, generator: np.random.Generator) -> Array:
    """What `off_independence` is, [L], when as many pairs are drawn by chance from what `independent` expects."""
    expected_LEE = independent(counts_LEE)
    upper_LP = np.triu(expected_LEE).reshape(len(counts_LEE), -1)
    pairs_L = upper_LP.sum(1)
    drawn_LP = generator.multinomial(pairs_L.round().astype(int), np.nan_to_num(_over(upper_LP, pairs_L[:, None])))
    drawn_LEE = drawn_LP.reshape(counts_LEE.shape).astype(float)
    return _apart(drawn_LEE + drawn_LEE.swapaxes(1, 2), expected_LEE)


def _apart(counts_LEE: Array, expected_LEE: Array) -> Array:
    apart_LEE = np.abs(counts_LEE - expected_LEE) * ~np.eye(counts_LEE.shape[-1], dtype=bool)
    return _over(apart_LEE.sum((1, 2)) / 2, expected_LEE.sum((1, 2)))


def _over(a: Array, b: Array) -> Array:
    """a / b, nan where b is 0."""
    return np.divide(a, b, out=np.full(np.broadcast_shapes(a.shape, b.shape), np.nan), where=b > 0)
