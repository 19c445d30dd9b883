"""The flip decomposition: which part of the importance ratio changed experts make, and which changed weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_rl.drift.sets import changed_experts
from moe_rl.policy import response_logprobs
from moe_rl.records import Rollouts
from moe_rl.replaying import replay
from moe_rl.routing_trace import RoutingTrace

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def flip_terms(
    model: PreTrainedModel,
    rollouts: Rollouts,
    old: tuple[RoutingTrace, Tensor],
    new: tuple[RoutingTrace, Tensor],
) -> dict[str, Any]:
    """Columns of the table `drift`, over the response tokens; one replayed forward of `model`.

    log w = log pi_new - log pi_old, every policy with its own routing, splits into
        flip term   = log pi_new(own routing) - log pi_new(old routing)
        weight term = log pi_new(old routing) - log pi_old
    old, new: routing and log probabilities [B, T] of `rollouts` under the old policy and under `model` as it is now,
    replay off, from forwards of this very batch: another shape alone would move them in low precision.

    An arm that replays routing in training uses the weight term alone for its ratio; its flip term says what replay
    spares it.
    """
    (old_routing, old_BT), (new_routing, new_BT) = old, new
    with replay(model, old_routing):
        replayed_BT, _ = response_logprobs(model, rollouts)
    changed_BSL = changed_experts(old_routing.expert_ids_BSLK, new_routing.expert_ids_BSLK) > 0
    T = rollouts.response_BT.shape[1]
    # A token's probability is read off the position before it: that one's routing made it.
    layers_BT = changed_BSL[:, -T - 1 : -1].sum(-1)
    mask_BT = rollouts.response_BT
    return {
        **split_ratio(old_BT, new_BT, replayed_BT, layers_BT, mask_BT, old_routing.num_layers),
        "replay_gap": replay_gap(rollouts.rewards_B, rollouts.rollout_logprobs_BT, new_BT, replayed_BT, mask_BT),
    }


def split_ratio(
    old_BT: Tensor, new_BT: Tensor, replayed_BT: Tensor, layers_BT: Tensor, mask_BT: Tensor, num_layers: int
) -> dict[str, Any]:
    """The columns from log probabilities: of the old policy, of the new one, and of the new one with old routing.

    layers_BT: in how many layers the predicting position's expert set changed. RMS and means are over mask_BT, nats;
    nan where no token counts. The three RMS do not add up, the terms of each token do.
    """
    old_N, new_N, replayed_N = (values_BT[mask_BT].double() for values_BT in (old_BT, new_BT, replayed_BT))
    size_N, layers_N = (new_N - old_N).abs(), layers_BT[mask_BT]
    by_layers = torch.bincount(layers_N, weights=size_N, minlength=num_layers + 1)
    tokens = torch.bincount(layers_N, minlength=num_layers + 1)
    return {
        "flip_rms": _rms(new_N - replayed_N),
        "weight_rms": _rms(replayed_N - old_N),
        "log_w_rms": _rms(size_N),
        "log_w_flipped": float(by_layers[1:].sum() / tokens[1:].sum()),
        "log_w_unflipped": float(by_layers[0] / tokens[0]),
        "log_w_by_changed_layers": (by_layers / tokens).tolist(),
    }


def replay_gap(rewards_B: Tensor, sampled_BT: Tensor, new_BT: Tensor, replayed_BT: Tensor, mask_BT: Tensor) -> float:
    """Expected reward of the new policy with its own routing, minus with the old policy's, estimated off-policy.

        mean_i (r_i - mean r) (prod_t pi_new(own routing) / mu - prod_t pi_new(old routing) / mu)

    sampled_BT: log mu, by which the tokens were sampled. No bias but a factor 1 - 1 / B, which comes with taking mean r
    off, against noise; dynamic sampling, which chooses by reward, adds one. Below 0, an arm that trains with replay
    loses reward when it is used as it is. Reward units; long responses make it noisy.
    """
    weights_B = [
        torch.where(mask_BT, logprobs_BT - sampled_BT, 0.0).double().sum(1).exp()
        for logprobs_BT in (new_BT, replayed_BT)
    ]
    centred_B = rewards_B.double() - rewards_B.double().mean()
    return float((centred_B * (weights_B[0] - weights_B[1])).mean())


def _rms(values_N: Tensor) -> float:
    return float(values_N.square().mean().sqrt())
