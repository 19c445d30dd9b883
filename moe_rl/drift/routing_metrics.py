"""What one can say about recorded routing: load, specialisation, saturation, entropy. Pure functions.

All take the known tokens only, ids_NLK = known(trace): padding and rows of unknown routing are never counted. Rows hold
distinct ids. Counts add over batches; shares come from counts, without a unit, nan where nothing was counted.
OLMoE is arXiv 2409.02060, section 5.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_rl.drift.sets import changed_experts
from moe_rl.routing_trace import RoutingTrace


def known(trace: RoutingTrace) -> Tensor:
    """The expert ids of the tokens whose routing is known, int64 [N, L, K]."""
    return trace.expert_ids_BSLK[trace.valid_BS].long()


# ---------------------------------------------------------------------------------------------------------------- load
def load(ids_NLK: Tensor, num_experts: int) -> Tensor:
    """Tokens that each expert got, int64 [L, E]; each layer's row sums to N K."""
    L = ids_NLK.shape[1]
    offsets_L1 = torch.arange(L, device=ids_NLK.device)[:, None] * num_experts
    return torch.bincount((ids_NLK + offsets_L1).flatten(), minlength=L * num_experts).view(L, num_experts)


def max_violation(load_LE: Tensor) -> Tensor:
    """MaxVio = max_e load_e / mean_e load_e - 1, float64 [L]: 0 is uniform, E/K - 1 the worst.

    Source: Auxiliary-Loss-Free Load Balancing, arXiv 2408.15664.
    """
    return load_LE.max(-1).values / load_LE.double().mean(-1) - 1


def dead_experts(load_LE: Tensor) -> Tensor:
    """Experts that no token chose, int64 [L]. With few tokens some are idle by chance."""
    return (load_LE == 0).sum(-1)


# ------------------------------------------------------------------------------------------------------ specialisation
def vocabulary_counts(ids_NLK: Tensor, tokens_N: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(token_ids_U, counts_LUE, occurrences_U): how often each token id that occurs went to each expert, int64."""
    token_ids_U, place_N, occurrences_U = tokens_N.unique(return_inverse=True, return_counts=True)
    L, U = ids_NLK.shape[1], len(token_ids_U)
    cells_NLK = (torch.arange(L, device=ids_NLK.device)[:, None] * U + place_N[:, None, None]) * num_experts + ids_NLK
    counts = torch.bincount(cells_NLK.flatten(), minlength=L * U * num_experts)
    return token_ids_U, counts.view(L, U, num_experts), occurrences_U


def vocabulary_specialisation(counts_LUE: Tensor, occurrences_U: Tensor) -> Tensor:
    """N_xe / N_x: share of the occurrences of token id x that chose expert e, float64 [L, U, E]; each sums to K over e.

    1 means that e got every x; a router that does not look at the token gives K / E. Source: OLMoE, section 5.4.
    """
    return counts_LUE.double() / occurrences_U[:, None]


def mean_specialisation(shares_LUE: Tensor) -> Tensor:
    """Each expert's specialisation: its mean share over the token ids that it got at all, float64 [L, E].

    nan for an expert that got none. Rare token ids push it up (one occurrence is a share of 0 or 1): leave them out.
    """
    got_LUE = shares_LUE > 0
    return shares_LUE.sum(1) / got_LUE.sum(1)


# --------------------------------------------------------------------------------------------------- against another
def saturation(reference_NLK: Tensor, ids_NLK: Tensor) -> Tensor:
    """Mean share of a token's experts that the reference checkpoint chooses too, float64 [L]: 1 - slot change.

    (1/N) sum_n |E_n & E_n'| / K; two unrelated routers give K / E. Source: OLMoE eq. 5, reference = last checkpoint.
    """
    return 1 - changed_experts(reference_NLK, ids_NLK).double().mean(0) / ids_NLK.shape[-1]


def router_entropy(logits_NLE: Tensor) -> Tensor:
    """Mean entropy of softmax(logits), nats, float64 [L]: log E is undecided, 0 is certain.

    Of routers that score with a sigmoid it is the softmax's entropy all the same.
    """
    log_p_NLE = logits_NLE.double().log_softmax(-1)
    return -(log_p_NLE.exp() * log_p_NLE).sum(-1).mean(0)
