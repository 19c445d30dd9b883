"""Expert-activation drift: how much the routing of the same tokens changed between two policies."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
from torch import Tensor

from moe_rl.routing_trace import RoutingError, RoutingTrace

POSITION_BINS = 10


@dataclasses.dataclass(frozen=True)
class Drift:
    """One comparison of routing. E_l(t) is the set of experts of token t in layer l, o = |E_old & E_new|.

    n: tokens compared. slot_change_L: 1 - mean_t o / K. set_change_L: mean_t [E_old != E_new].
    deviation_K1: share of (token, layer) pairs with 0..K changed experts. changed_layers_L1: share of tokens with 0..L
    changed layers. any_layer_change: share of tokens with one or more. first_changed_L: share of tokens whose first
    changed layer it is. by_position: slot change by tenth of a sequence's real tokens. No unit, all in [0, 1].
    Without tokens every value is nan.
    """

    n: int
    slot_change_L: Tensor
    set_change_L: Tensor
    deviation_K1: Tensor
    changed_layers_L1: Tensor
    any_layer_change: float
    first_changed_L: Tensor
    by_position: Tensor

    @property
    def slot_change(self) -> float:
        """The headline: share of activated experts that changed, over all layers."""
        return float(self.slot_change_L.mean())

    def row(self) -> dict[str, Any]:
        """As columns of the table `drift`."""
        return {
            "n": self.n,
            "slot_change": self.slot_change_L.tolist(),
            "set_change": self.set_change_L.tolist(),
            "deviation": self.deviation_K1.tolist(),
            "changed_layers": self.changed_layers_L1.tolist(),
            "any_layer_change": self.any_layer_change,
            "first_changed": self.first_changed_L.tolist(),
            "by_position": self.by_position.tolist(),
        }


def compare(old: RoutingTrace, new: RoutingTrace) -> Drift:
    """The drift from `old` to `new`, two traces of the same sequences, on the tokens that both know.

    Compares sets: the order of equal experts does not count. Raises RoutingError for traces that do not match.
    """
    if old.layer_names != new.layer_names or old.expert_ids_BSLK.shape != new.expert_ids_BSLK.shape:
        raise RoutingError(
            f"traces of {tuple(old.expert_ids_BSLK.shape)} and {tuple(new.expert_ids_BSLK.shape)} [B, S, L, K] "
            "cannot be compared; record both on the same tokens of the same architecture"
        )
    both_BS = old.valid_BS & new.valid_BS
    changed_NL = changed_experts(old.expert_ids_BSLK[both_BS], new.expert_ids_BSLK[both_BS])
    N, L = changed_NL.shape
    K = old.top_k
    layers_N = (changed_NL > 0).sum(1)
    first_N = torch.where(layers_N > 0, (changed_NL > 0).int().argmax(1), L)
    place = both_BS.cumsum(1) - 1
    bin_N = (place * POSITION_BINS // both_BS.sum(1, keepdim=True).clamp(min=1))[both_BS]
    slots_N = changed_NL.double().mean(1) / K
    in_bin = torch.bincount(bin_N, minlength=POSITION_BINS)
    return Drift(
        n=N,
        slot_change_L=changed_NL.double().mean(0) / K,
        set_change_L=(changed_NL > 0).double().mean(0),
        deviation_K1=torch.bincount(changed_NL.flatten(), minlength=K + 1) / (N * L or float("nan")),
        changed_layers_L1=torch.bincount(layers_N, minlength=L + 1) / (N or float("nan")),
        any_layer_change=float((layers_N > 0).double().mean()),
        first_changed_L=torch.bincount(first_N, minlength=L + 1)[:L] / (N or float("nan")),
        by_position=torch.bincount(bin_N, weights=slots_N, minlength=POSITION_BINS) / in_bin,
    )


def changed_experts(old_NLK: Tensor, new_NLK: Tensor) -> Tensor:
    """|E_old minus E_new| of each token and layer, int64 [N, L]. Rows hold distinct ids.

    Compares column by column: a K x K table for every token takes six times as long.
    """
    old_KNL, new_KNL = (ids_NLK.movedim(-1, 0).contiguous() for ids_NLK in (old_NLK, new_NLK))
    kept_NL = torch.zeros_like(old_KNL[0], dtype=torch.int16)
    for one_NL, other_NL in itertools.product(old_KNL, new_KNL):
        kept_NL += one_NL == other_NL
    return len(old_KNL) - kept_NL.long()
