"""Corrections for what differs between sampling and training: an engine that samples from another distribution mu than
the trainer's old policy pi_old, and routers that shift from the old policy to the new.

One place for all losses: a token's log probability keeps its value and loses or gains gradient, so a loss multiplies
its gradient by the weight without knowing of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

CORRECTIONS = {
    "none": "the gap between sampler and trainer is left alone",
    "tis": "truncated importance sampling: a token's gradient is weighted by min(c, cap)",
    "icepop": "a token's gradient is weighted by c inside [low, high] and dropped outside",
    "sequence_mask": "sequences whose geometric mean of c lies outside [low, high] are dropped, others left alone",
    "rspo": "a token's gradient is weighted by how little its routers shifted since the old policy, at least by low",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Correction:
    """What a token's gradient is multiplied by because it was sampled from mu and not from pi_old.

        c_it = exp(old_logprobs - rollout_logprobs)
        tis            min(c_it, cap)
        icepop         c_it if low <= c_it <= high else 0
        sequence_mask  1 if low <= exp(mean_t log c_it) <= high else 0
        rspo           max(low, exp(-mean_lk |log p_new(e_lk) - log p_old(e_lk)|)), e_lk: the K old experts of layer l

    The catch: weights of tokens leave the loss's normalisation as it is, so what is dropped makes the step smaller.
    sequence_mask takes the geometric mean, so that a bound means the same at every length; TRL's mode of that name
    takes the product and keeps it as a weight. rspo is of another kind: p are softmaxes of router logits at the
    position that predicts the token, and it is 1 on a step's first update. It is published as a factor of the ratio in
    front of the clip, on GMPO and on GRPO; here it weighs the gradient alone, and what is clipped stays as it was.
    Sources: tis: Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training
    (fengyao.notion.site/off-policy-rl), cap 2 as in verl. icepop: arXiv 2510.18855, its objective; bounds 0.5 and 5 are
    in wide use. sequence_mask: Liu et al. 2025, When Speed Kills Stability (richardli.xyz/rl-collapse), the geometric
    rejection of verl's rollout correction; its bounds lie much nearer to 1. rspo: arXiv 2510.23027, its router
    shift ratio; the floor's value is ours.
    """

    kind: str = "none"
    cap: float = 2.0
    low: float = 0.5
    high: float = 5.0

    def __post_init__(self) -> None:
        if self.kind not in CORRECTIONS:
            raise ValueError(f"arm.correction is {self.kind!r}; choose one of {', '.join(CORRECTIONS)}")
        if not 0 < self.cap < math.inf:
            raise ValueError(f"arm.correction_cap is {self.cap}; set it above 0")
        if not 0 <= self.low <= self.high < math.inf:
            raise ValueError(
                f"arm.correction_low is {self.low} and arm.correction_high {self.high}; set 0 <= low <= high"
            )

    @property
    def needs_routers(self) -> bool:
        """Whether it takes router logits, which a dense model has none of."""
        return self.kind == "rspo"

    def weights(
        self, old_BT: Tensor, rollout_BT: Tensor, mask_BT: Tensor, router_shift_BT: Tensor | None = None
    ) -> Tensor:
        """What each response token's gradient is multiplied by, [B, T]; 1 elsewhere. router_shift_BT: for rspo."""
        if self.kind == "rspo":
            if router_shift_BT is None:
                raise ValueError("arm.correction=rspo needs the routers' shift; give their logits of the old pass")
            return router_shift_BT.clamp(min=self.low).masked_fill(~mask_BT, 1.0)
        log_c_BT = torch.where(mask_BT, old_BT - rollout_BT, 0.0).detach()
        if self.kind == "tis":
            return log_c_BT.clamp(max=math.log(self.cap)).exp()
        if self.kind == "icepop":
            c_BT = log_c_BT.exp()
            return torch.where((c_BT >= self.low) & (c_BT <= self.high), c_BT, 0.0).masked_fill(~mask_BT, 1.0)
        if self.kind == "sequence_mask":
            mean_B = (log_c_BT.sum(1) / mask_BT.sum(1).clamp(min=1)).exp()
            kept_B = ((mean_B >= self.low) & (mean_B <= self.high)).to(log_c_BT.dtype)
            return kept_B[:, None].expand_as(log_c_BT).masked_fill(~mask_BT, 1.0)
        return torch.ones_like(log_c_BT)

    def apply(
        self,
        logprobs_BT: Tensor,
        old_BT: Tensor,
        rollout_BT: Tensor,
        mask_BT: Tensor,
        router_shift_BT: Tensor | None = None,
    ) -> Tensor:
        """`logprobs_BT` with its values unchanged and its gradient multiplied by the weights."""
        if self.kind == "none":
            return logprobs_BT
        return weigh_gradient(logprobs_BT, self.weights(old_BT, rollout_BT, mask_BT, router_shift_BT))


NO_CORRECTION = Correction()


def router_shift(old_logits_BSLE: Tensor, new_logits: Sequence[Tensor], old_ids_BSLK: Tensor) -> Tensor:
    """exp(-mean over layers and a token's old experts of |change of log p|), [B, S], without gradient; 1: no change.

    new_logits: [B * S, E] of each layer. Meaningless where the old ids are not known.
    """
    changes = []
    for layer, new_NE in enumerate(new_logits):
        old_BSE = old_logits_BSLE[:, :, layer].float().log_softmax(-1)
        change_BSE = new_NE.detach().view_as(old_BSE).float().log_softmax(-1) - old_BSE
        changes.append(change_BSE.gather(-1, old_ids_BSLK[:, :, layer].long()).abs().mean(-1))
    return (-torch.stack(changes).mean(0)).exp()


def weigh_gradient(values: Tensor, weights: Tensor) -> Tensor:
    """`values`, bit for bit, whose gradient is multiplied by `weights`."""
    # Not w x + (1 - w) x: that rounds, and the first update's ratios would not be exactly 1.
    return values.detach() + weights.detach() * (values - values.detach())


def tails(log_ratio_N: Tensor) -> dict[str, float]:
    """How far ratios r = exp(log_ratio_N) are from 1; nan without any.

    k3: mean of r - 1 - log r, which estimates KL(sampled || other), nats. f2, f5: share with max(r, 1/r) > 2, 5.
    ess: effective sample size (sum r)^2 / (N sum r^2), a share in (0, 1].
    """
    log_N = log_ratio_N.double()
    if not len(log_N):
        return dict.fromkeys(("k3", "f2", "f5", "ess"), math.nan)
    r_N = (log_N - log_N.max()).exp()  # a common factor leaves ess as it is, and nothing overflows
    return {
        "k3": float((log_N.expm1() - log_N).mean()),
        "f2": float((log_N.abs() > math.log(2)).double().mean()),
        "f5": float((log_N.abs() > math.log(5)).double().mean()),
        "ess": float(r_N.sum() ** 2 / (len(r_N) * r_N.square().sum())),
    }
