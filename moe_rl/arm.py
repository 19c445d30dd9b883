"""An arm: one of the methods that are compared."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

from torch import Tensor

from moe_rl.advantage import ADVANTAGES
from moe_rl.corrections import NO_CORRECTION, Correction
from moe_rl.keeping import keep_likely, keep_unless_outdone
from moe_rl.policy_losses.base import PolicyLoss
from moe_rl.reference import NO_KL, ReferenceKl

REPLAYS = {
    "none": "every policy routes by itself",
    "old_policy": "training forwards use the experts of the old-logprob pass (Routing Replay, R2)",
    "rollout": "training and old-logprob forwards use the experts of the sampling pass (R3, arXiv 2510.11370)",
    "shuffled": "as old_policy, but with the experts of another sequence of the mini-batch (a placebo)",
    "thresholded": "as old_policy, without experts whose live score fell below a share of the weakest live choice's",
    "sticky": "as old_policy, without experts that the live choice in their place leads by more than a margin",
}
LABELS = {
    "none": "",
    "old_policy": "_routing_replay",
    "rollout": "_r3",
    "shuffled": "_shuffled_replay",
    "thresholded": "_thresholded_replay",
    "sticky": "_sticky_replay",
}
KEEPS = {"thresholded": keep_likely, "sticky": keep_unless_outdone}  # the modes that have a threshold

OLD_LOGPROBS = {
    "recompute": "ratios are taken against the trainer's own log probabilities of the old policy; no forward is made "
    "for them where an fp32 engine samples from that very policy and so has said them, up to rounding",
    "engine": "ratios are taken against the log probabilities that the engine sampled with",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
    """A policy loss with its advantages, what its training forwards replay, and how it treats a differing engine.

    advantage, replay, old_logprobs: a key of ADVANTAGES, REPLAYS, OLD_LOGPROBS. replay_threshold: of the modes in
    KEEPS; 0 replays all. correction: for an engine that samples from another distribution than the trainer's old
    policy. kl: to the reference policy, added to the loss.
    """

    policy_loss: PolicyLoss
    advantage: str = "group_std"
    replay: str = "none"
    replay_threshold: float = 0.0
    old_logprobs: str = "recompute"
    correction: Correction = NO_CORRECTION
    kl: ReferenceKl = NO_KL

    def __post_init__(self) -> None:
        for name, known in (("advantage", ADVANTAGES), ("replay", REPLAYS), ("old_logprobs", OLD_LOGPROBS)):
            if getattr(self, name) not in known:
                raise ValueError(f"arm.{name} is {getattr(self, name)!r}; choose one of {', '.join(known)}")
        loss = type(self.policy_loss)
        if self.has_critic and not loss.token_advantages:
            raise ValueError(
                f"arm.advantage=gae gives each token an advantage of its own, {loss.__name__} takes one a sequence; "
                f"choose {loss.advantage}, or a loss such as ppo or gspo_token"
            )
        if loss.advantage == "gae" and not self.has_critic:
            raise ValueError(
                f"{loss.__name__} takes its advantages from a critic and arm.advantage={self.advantage} has none; set "
                "arm.advantage=gae, or choose dapo, the same loss without a critic"
            )
        if not 0 <= self.replay_threshold < math.inf:
            raise ValueError(f"arm.replay_threshold is {self.replay_threshold}; set it to 0 or more")
        if self.replay_threshold and self.replay not in KEEPS:
            raise ValueError(
                f"arm.replay_threshold is {self.replay_threshold} and arm.replay={self.replay} has none; choose "
                f"{' or '.join(KEEPS)}"
            )
        if self.old_logprobs == "engine" and self.correction.kind not in ("none", "rspo"):
            raise ValueError(
                f"arm.correction={self.correction.kind} weighs the trainer's old policy against the engine, and with "
                "arm.old_logprobs=engine that is the engine itself; set arm.old_logprobs=recompute or "
                "arm.correction=none"
            )

    @property
    def has_critic(self) -> bool:
        """Whether its advantages come from a critic, one a token, and not from the other completions of a prompt."""
        return self.advantage == "gae"

    @property
    def label(self) -> str:
        """Its name in results: what runs, not what it was called."""
        engine = "_engine_logprobs" if self.old_logprobs == "engine" else ""
        correction = "" if self.correction.kind == "none" else f"_{self.correction.kind}"
        kl = "_kl" if self.kl.on else ""
        return self.policy_loss.name(self.advantage) + LABELS[self.replay] + engine + correction + kl

    @property
    def keep(self) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
        """Which replayed experts stay, see moe_rl.keeping; None: all of them."""
        return functools.partial(KEEPS[self.replay], threshold=self.replay_threshold) if self.replay_threshold else None
