"""The reference policy: how far the trained policy has moved from the one after the cold start, as a loss."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from moe_rl.swapping import swapped

ESTIMATORS = {
    "k1": "-log r: no bias, often below 0",
    "k2": "(log r)^2 / 2: never below 0; its mean is the KL to second order only",
    "k3": "r - 1 - log r: no bias, never below 0",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferenceKl:
    """KL(new policy || reference), estimated on the sampled tokens and added to the policy loss with a coefficient.

        r = exp(reference - logprobs)      w = exp(logprobs - old_logprobs), with gradient
        loss = coefficient * mean over the mini-batch's response tokens of w k(r)              nats a token

    The factor w is what makes the gradient that of the KL itself: E_old[w k] is E_new[k] for every new policy, at the
    prefixes that the old one sampled. Without it k1 has no gradient on average, and k3 that of the reverse direction.
    k1 and k3 are unbiased with it, k2 is not. The reference routes live, whatever the arm replays.
    The catch: w is not clipped. Sources: estimators: Schulman 2020, Approximating KL divergence (joschu.net/blog); the
    unbiased form: DeepSeek-V3.2, arXiv 2512.02556 eq. 7.
    """

    coefficient: float = 0.0
    estimator: str = "k3"

    def __post_init__(self) -> None:
        if not 0 <= self.coefficient < math.inf:
            raise ValueError(f"arm.kl is {self.coefficient}; set it to 0 or more")
        if self.estimator not in ESTIMATORS:
            raise ValueError(f"arm.kl_estimator is {self.estimator!r}; choose one of {', '.join(ESTIMATORS)}")

    @property
    def on(self) -> bool:
        return self.coefficient > 0

    def __call__(
        self, logprobs_BT: Tensor, old_BT: Tensor, reference_BT: Tensor | None, mask_BT: Tensor, num_tokens: int
    ) -> Tensor:
        """The estimate without its coefficient: a scalar, of a part of a mini-batch of num_tokens response tokens."""
        if reference_BT is None:
            raise ValueError("arm.kl needs the reference's log probabilities; call old_pass with reference weights")
        log_r_BT = torch.where(mask_BT, reference_BT - logprobs_BT, 0.0)
        w_BT = torch.where(mask_BT, logprobs_BT - old_BT, 0.0).exp()
        k_BT = {
            "k1": lambda: -log_r_BT,
            "k2": lambda: log_r_BT.square() / 2,
            "k3": lambda: log_r_BT.expm1() - log_r_BT,
        }[self.estimator]()
        return (w_BT * k_BT).sum() / num_tokens  # k is 0 where log r is: padding adds nothing


NO_KL = ReferenceKl()


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """A copy of all weights and buffers, those of a router variant too."""
    return {name: tensor.detach().clone() for name, tensor in _tensors(model).items()}


def acting_as(model: nn.Module, weights: Mapping[str, Tensor]) -> AbstractContextManager[None]:
    """A block in which `model` computes with the weights of a snapshot.

    The very same module, because a copy of it would have no router variant. ValueError for another model's snapshot.
    """
    tensors = _tensors(model)
    if tensors.keys() != weights.keys():
        raise ValueError(f"a snapshot of {len(weights)} tensors is not of this model with {len(tensors)}")
    return swapped(tensors, lambda name, own: weights[name].to(own.device))


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
