"""What a run carries from step to step."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_rl import checkpoint
from moe_rl.critic import Critic
from moe_rl.drift.meter import DriftMeter
from moe_rl.preference_model import PreferenceModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclasses.dataclass
class State:
    """The policy and what surrounds it. reference: weights of the reference policy, if a KL to it is asked for.

    preference_model, critic: the learned reward and the learned values, if they are asked for.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    optimizer: torch.optim.Optimizer
    schedule: Any
    drift: DriftMeter
    preference_model: PreferenceModel | None = None
    critic: Critic | None = None
    reference: dict[str, Tensor] | None = None

    def save(self, path: Path, progress: dict[str, Any]) -> None:
        """Write all that changes to a checkpoint, with `progress`, JSON values."""
        parts = {
            "drift": self.drift.state(),
            "reference": self.reference or {},
            "critic": self.critic.state() if self.critic else {},
        }
        kept = {f"{part}.{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}
        checkpoint.save(path, self.model, self.optimizer, self.schedule, progress, kept)

    def load(self, path: Path) -> dict[str, Any]:
        """Take over what `save` wrote, and return its progress. CheckpointError as from `checkpoint.load`."""
        progress, kept = checkpoint.load(path, self.model, self.optimizer, self.schedule)

        def part(name: str) -> dict[str, Tensor]:
            return {key.removeprefix(f"{name}."): x for key, x in kept.items() if key.startswith(f"{name}.")}

        self.drift.resume(part("drift"))
        if self.reference is not None:
            self.reference = part("reference")
        if self.critic is not None:
            self.critic.resume(part("critic"))
        return progress
