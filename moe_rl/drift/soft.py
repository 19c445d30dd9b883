"""Drift below the choice of experts: how far the routers' distributions moved, and how close to a tie they choose."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_rl.drift.routing_metrics import dead_experts, known, load, max_violation, router_entropy
from moe_rl.drift.sets import changed_experts
from moe_rl.routing_trace import RoutingTrace


def soft_drift(old: RoutingTrace, new: RoutingTrace) -> dict[str, Any]:
    """Columns of the table `drift`, from `old` to `new`, two traces of the same tokens, on the tokens that both know.

    p = softmax(router logits), of routers that score with a sigmoid too; per layer, mean over tokens, nats:
        kl = sum_e p_old (log p_old - log p_new)
        js = (KL(p_old || m) + KL(p_new || m)) / 2, m = (p_old + p_new) / 2; at most log 2
    router_shift = exp(-mean over layers and the token's old experts e of |log p_new(e) - log p_old(e)|), mean over
    tokens; 1 is no change (RSPO, arXiv 2510.23027). margin = s_(K) - s_(K+1) of the scores that the old router ranked,
    in their unit (a probability in most families); margin_flipped and margin_kept: of the tokens whose expert set
    changed in that layer, and of the others; nan where there are none.

    A column is left out where a trace does not carry what it takes: `router_logits` or `margins` in its extras.
    """
    both_BS = old.valid_BS & new.valid_BS
    ids_NLK = old.expert_ids_BSLK[both_BS]
    columns: dict[str, Any] = {}
    if "router_logits" in old.extras and "router_logits" in new.extras:
        old_NLE, new_NLE = (trace.extras["router_logits"][both_BS] for trace in (old, new))
        columns |= _divergences(old_NLE, new_NLE, ids_NLK)
    if "margins" in old.extras:
        flipped_NL = changed_experts(ids_NLK, new.expert_ids_BSLK[both_BS]) > 0
        margins_NL = old.extras["margins"][both_BS].squeeze(-1).double()
        columns |= {
            "margin": margins_NL.mean(0).tolist(),
            "margin_flipped": _mean_where(margins_NL, flipped_NL).tolist(),
            "margin_kept": _mean_where(margins_NL, ~flipped_NL).tolist(),
        }
    return columns


def router_state(trace: RoutingTrace) -> dict[str, Any]:
    """Columns of the table `drift` about one policy, each a list over layers: max_violation, dead_experts and, where
    the trace carries router logits, router_entropy (nats).

    Of few tokens even uniform routing looks unbalanced: N K / E choices an expert vary by about their square root.
    """
    load_LE = load(known(trace), trace.num_experts)
    columns = {"max_violation": max_violation(load_LE).tolist(), "dead_experts": dead_experts(load_LE).tolist()}
    if "router_logits" in trace.extras:
        columns["router_entropy"] = router_entropy(trace.extras["router_logits"][trace.valid_BS]).tolist()
    return columns


def _divergences(old_NLE: Tensor, new_NLE: Tensor, old_ids_NLK: Tensor) -> dict[str, Any]:
    """Layer by layer: in float64 the logits of all layers at once would be the largest tensor of the run."""
    kl, js, shifts = [], [], []
    for old_NE, new_NE, ids_NK in zip(old_NLE.unbind(1), new_NLE.unbind(1), old_ids_NLK.unbind(1), strict=True):
        log_p_NE, log_q_NE = old_NE.double().log_softmax(-1), new_NE.double().log_softmax(-1)
        change_NE = log_q_NE - log_p_NE
        kl.append(float(-(log_p_NE.exp() * change_NE).sum(-1).mean()))
        to_middle = log_p_NE.exp() * _log_half_sum(change_NE) + log_q_NE.exp() * _log_half_sum(-change_NE)
        js.append(float(-to_middle.sum(-1).mean() / 2))
        shifts.append(change_NE.gather(-1, ids_NK.long()).abs().mean(-1))
    return {"kl": kl, "js": js, "router_shift": float((-torch.stack(shifts).mean(0)).exp().mean())}


def _log_half_sum(change: Tensor) -> Tensor:
    """log((1 + exp(change)) / 2): log(m / p) for change = log(q / p), exactly 0 for 0. exp overflows at 709."""
    return (change.clamp(max=700).expm1() / 2).log1p()


def _mean_where(values_NL: Tensor, chosen_NL: Tensor) -> Tensor:
    """Mean of each layer's chosen tokens, [L]; nan without any."""
    return torch.where(chosen_NL, values_NL, 0.0).sum(0) / chosen_NL.sum(0)
