"""Sampling with transformers' own `generate`."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from moe_rl.engines.base import Engine
from moe_rl.kv_cache import in_place_cache, read_prompts
from moe_rl.recording import record
from moe_rl.records import NotFiniteError, Rollouts
from moe_rl.shaping import join
from moe_rl.tasks.base import Example, Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hf(Engine):
    """Samples with `generate`, all completions of a batch of prompts at once.

    A prompt is read once for all its completions, unless its routing is recorded, which is that of every sequence.
    batch_size: sequences a call, in whole prompts; 0 for all at once. Larger is faster and takes more memory.
    """

    batch_size: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size < 0:
            raise ValueError(f"engine.batch_size is {self.batch_size}; set it to 1 or more, or 0 for all at once")

    @property
    def exact(self) -> bool:
        return self == self.without_emulation()

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
        prompts = encode_prompts(tokenizer, examples)
        width = prompts["input_ids"].shape[1]
        limit = model.config.get_text_config().max_position_embeddings
        if width + self.max_new_tokens > limit:
            raise ValueError(
                f"a prompt of {width} tokens and {self.max_new_tokens} new ones exceed the model's {limit} positions; "
                "shorten the prompts, or lower engine.max_new_tokens"
            )
        size = max(1, self.batch_size // completions) if self.batch_size else len(examples)
        devices = [model.device] if model.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.no_grad(), self.emulation(model, seed):
            torch.manual_seed(seed)
            parts = []
            for first in range(0, len(examples), size):
                some = slice(first, first + size)
                encoded = {name: tensor[some] for name, tensor in prompts.items()}
                part = self._generate(model, tokenizer, task, examples[some], encoded, completions, record_routing)
                parts.append(dataclasses.replace(part, group_ids_B=part.group_ids_B + first))
        return join(parts, tokenizer.pad_token_id)

    def _generate(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        task: Task,
        examples: Sequence[Example],
        prompts: dict[str, Tensor],
        completions: int,
        record_routing: bool,
    ) -> Rollouts:
        """All completions of some prompts, in one call of `generate`. A response that the limit cut is never exact."""
        tokens_PS, mask_PS = (prompts[name].to(model.device) for name in ("input_ids", "attention_mask"))
        width = mask_PS.shape[1]
        sampled = SampledLogprobs()
        cache = in_place_cache(model, width + self.max_new_tokens)
        if cache is not None and completions > 1 and width > 1 and not record_routing:
            read_prompts(model, tokens_PS, mask_PS, completions, cache)
        with contextlib.ExitStack() as stack:
            recorder = stack.enter_context(record(model, source="rollout")) if record_routing else None
            stack.enter_context(generation_settings(model, self._settings(model, tokenizer, completions)))
            sequences_BS = model.generate(
                input_ids=tokens_PS,
                attention_mask=mask_PS,
                logits_processor=LogitsProcessorList([sampled]),
                cache=cache,
            )
        tokens_BT = sequences_BS[:, width:]
        ended_BT = torch.isin(tokens_BT, torch.tensor(end_ids(model, tokenizer), device=tokens_BT.device))
        response_BT = (ended_BT.cumsum(1) - ended_BT.long()) == 0  # up to the first end of sequence, that one included
        stopped_B = (ended_BT & response_BT).any(1)
        attention_BS = torch.cat([mask_PS.repeat_interleave(completions, 0).bool(), response_BT], 1)
        logprobs_BT, entropy_BT = (values.masked_fill(~response_BT, 0.0) for values in sampled.finish(sequences_BS))
        asked = [example for example in examples for _ in range(completions)]
        rewards_B, exact_B = reward(tokenizer, task, asked, tokens_BT, response_BT)
        return Rollouts(
            tokens_BS=sequences_BS,
            attention_BS=attention_BS,
            response_BT=response_BT,
            group_ids_B=torch.arange(len(examples), device=tokens_BT.device).repeat_interleave(completions),
            rollout_logprobs_BT=logprobs_BT,
            rewards_B=rewards_B,
            exact_B=exact_B & stopped_B,
            truncated_B=~stopped_B,
            routing=None if recorder is None else recorder.trace.aligned_to(attention_BS),
            rollout_entropy_BT=entropy_BT,
        )

    def _settings(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, completions: int
    ) -> GenerationConfig:
        return GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,  # generate keeps the 50 likeliest tokens by default: sampled and trained logprobs would disagree
            top_p=1.0,
            num_beams=1,
            num_return_sequences=completions,
            max_new_tokens=self.max_new_tokens,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=end_ids(model, tokenizer),
            bos_token_id=tokenizer.bos_token_id,
        )


@contextlib.contextmanager
def generation_settings(model: PreTrainedModel, settings: GenerationConfig) -> Iterator[None]:
    """The model's generation settings are `settings` and nothing else.

    Given as an argument, they would be mixed with the model's own (a repetition penalty, suppressed tokens).
    """
    own, model.generation_config = model.generation_config, settings
    try:
        yield
    finally:
        model.generation_config = own


class SampledLogprobs(LogitsProcessor):
    """Keeps the log probability of each sampled token, and the entropy, but the logits of one step only.

    The logits of a step are seen before the token is drawn, so a step's token is scored when the next step begins.
    """

    def __init__(self) -> None:
        self.logits: Tensor | None = None
        self.columns: list[Tensor] = []
        self.entropies: list[Tensor] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self._score(input_ids)
        self.logits = scores.float()
        self.log_sums_B = self.logits.logsumexp(-1)
        if not self.log_sums_B.isfinite().all():  # before the token is drawn: on a GPU that would end the process
            raise NotFiniteError("the policy's logits are not finite")
        self.entropies.append(torch.special.entr(self.logits.softmax(-1)).sum(-1))
        return scores

    def _score(self, sequences: Tensor) -> None:
        if self.logits is not None:
            chosen = self.logits.gather(1, sequences[:, -1:]).squeeze(1)
            self.columns.append(chosen - self.log_sums_B)

    def finish(self, sequences: Tensor) -> tuple[Tensor, Tensor]:
        """(log probability, entropy) [B, T] at the T sampled tokens, nats."""
        self._score(sequences)
        return torch.stack(self.columns, 1), torch.stack(self.entropies, 1)


def encode_prompts(tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example]) -> dict[str, Tensor]:
    """input_ids and attention_mask [P, S], padded on the left. ValueError for characters that the tokenizer lacks."""
    texts = [example.prompt for example in examples]
    encoded = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    unknown = tokenizer.unk_token_id
    if unknown is not None and (encoded["input_ids"] == unknown).any():
        row = int((encoded["input_ids"] == unknown).any(1).nonzero()[0])
        raise ValueError(f"the prompt {texts[row]!r} has characters that the model's tokenizer does not know")
    return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}


def end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that end a response: the model's own list where it has one."""
    ids = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = tokenizer.eos_token_id if ids is None else ids
    return list(ids) if isinstance(ids, (list, tuple)) else [ids]


def reward(
    tokenizer: PreTrainedTokenizerBase, task: Task, examples: Sequence[Example], tokens_BT: Tensor, real_BT: Tensor
) -> tuple[Tensor, Tensor]:
    """(reward, whether exactly right) of each response to its example, [B] each; by the task, from the text."""
    readable_BT = tokens_BT.masked_fill(~real_BT, tokenizer.pad_token_id)
    texts = tokenizer.batch_decode(readable_BT, skip_special_tokens=True)
    rewards = [task.reward(example, text) for example, text in zip(examples, texts, strict=True)]
    for example, text, value in zip(examples, texts, rewards, strict=True):
        if not math.isfinite(value):  # the loss would not be finite either, and the method be blamed for it
            raise ValueError(
                f"{type(task).__name__} rewards {text!r} for {example.prompt!r} with {value}; mend the task"
            )
    exact = [task.exact(example, text) for example, text in zip(examples, texts, strict=True)]
    device = tokens_BT.device
    return torch.tensor(rewards, dtype=torch.float32, device=device), torch.tensor(exact, device=device)
