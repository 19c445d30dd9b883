"""The contract of a rollout engine."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from moe_rl.records import Rollouts
from moe_rl.tasks.base import Example, Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engine(abc.ABC):
    """Samples completions from the policy, with the log probability it sampled them at. Fields are its settings.

    max_new_tokens: length limit of a response, the end-of-sequence token included.
    """

    max_new_tokens: int = 12

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"engine.max_new_tokens is {self.max_new_tokens}; set it to 1 or more")

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
