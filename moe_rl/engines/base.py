"""The contract of a rollout engine."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Self

from moe_rl.emulation import DTYPES, emulated
from moe_rl.records import Rollouts
from moe_rl.tasks.base import Example, Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engine(abc.ABC):
    """Samples completions from the policy, with the log probability it sampled them at. Fields are its settings.

    max_new_tokens: length limit of a response, the end-of-sequence token included.
    dtype, fp8_emulated, router_noise: what makes the sampler differ from the trainer; see moe_rl.emulation. Evaluation
    asks how good the policy is and samples from the policy itself.
    """

    max_new_tokens: int = 12
    dtype: str = "same"
    fp8_emulated: bool = False
    router_noise: float = 0.0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"engine.dtype is {self.dtype!r}; choose one of {', '.join(DTYPES)}")
        if not 0 <= self.router_noise < math.inf:
            raise ValueError(f"engine.router_noise is {self.router_noise}; set it to 0 or more")
        if self.max_new_tokens < 1:
            raise ValueError(f"engine.max_new_tokens is {self.max_new_tokens}; set it to 1 or more")

    @property
    def exact(self) -> bool:
        """Whether it samples from the very policy that is trained, in the same precision. An engine has to say so."""
        return False

    def without_emulation(self) -> Self:
        """The same engine, sampling from the very policy that is trained."""
        return dataclasses.replace(self, dtype="same", fp8_emulated=False, router_noise=0.0)

    def emulation(self, model: PreTrainedModel, seed: int) -> AbstractContextManager[None]:
        """The block in which the engine samples."""
        return emulated(
            model, dtype=self.dtype, fp8=self.fp8_emulated, router_noise=self.router_noise, seed=seed ^ 0x5EED
        )

    @abc.abstractmethod
    def sample(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        task: Task,
        examples: Sequence[Example],
        completions: int,
        seed: int,
        record_routing: bool = False,
    ) -> Rollouts:
        """`completions` responses to each example, at temperature 1 without truncation; a function of `seed`.

        The caller's random state is left as it was. ValueError for prompts that do not fit the model's positions.
        """
