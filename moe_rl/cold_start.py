"""Supervised warm-up: a policy that sometimes answers, so that rewards have something to tell apart.

Reinforcement learning from random weights would wait for the first reward for ever. Some steps of cross
entropy on demonstrations, a share of whose characters is wrong, leave a policy that is right now and then when
sampled. Every arm starts from the same warmed-up weights, so they are cached by what determines them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import inspect
import json
import platform
import random
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_rl import weight_cache
from moe_rl.models.tokenizer import encode
from moe_rl.policy import positions
from moe_rl.tasks.base import Example, Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FIRST_ITEM = 10**9  # reinforcement learning counts its prompts from 0: the warm-up uses none of them up
WARM_UP_SHARE = 0.1  # of the steps, with linearly rising learning rate; it falls linearly to 0 over the others
BETAS = (0.9, 0.98)
MAX_GRAD_NORM = 1.0


class ColdStartError(RuntimeError):
    """A warm-up that cannot be done as asked; the message says what to change."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ColdStart:
    """Settings of the warm-up: `steps` of `batch_size` demonstrations, peak learning rate `lr`; 0 steps means none.

    `error_share` of the demonstrated characters are wrong: more leaves more entropy and a lower starting reward.
    """

    steps: int = 60
    batch_size: int = 32
    lr: float = 3e-3
    error_share: float = 0.1

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ValueError(f"cold_start.steps is {self.steps}; set it to 0 (no warm-up) or more")
        if self.batch_size < 1:
            raise ValueError(f"cold_start.batch_size is {self.batch_size}; set it to 1 or more")
        if not self.lr > 0:
            raise ValueError(f"cold_start.lr is {self.lr}; set it above 0")
        if not 0 <= self.error_share < 1:
            raise ValueError(f"cold_start.error_share is {self.error_share}; set it to 0 or more and below 1")


def warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    settings: ColdStart,
    seed: int,
    cache_dir: str | Path,
    forward_facts: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Train `model` in place on demonstrations of `task`, or load the weights of an equal warm-up from `cache_dir`.

    `forward_facts` names whatever changes the forward pass and cannot be seen on the model (a router variant).
    Returns facts: loss (mean over the last tenth, nats a token), first_loss, tokens trained on, cpu_s and wall_s of the
    training (of the earlier one on a hit), cache (none, trained, hit, rebuilt) and key. The caller's random state is
    left as it was; the model's train or eval mode too. Processes that want the same warm-up at once train it once.
    Raises ColdStartError when the loss is not finite, ValueError for demonstrations that do not fit the model.
    """
    if settings.steps == 0:
        return {"loss": None, "first_loss": None, "tokens": 0, "cpu_s": 0.0, "wall_s": 0.0, "cache": "none", "key": ""}
    key = cache_key(determinants(model, tokenizer, task, settings, seed, forward_facts))
    root = Path(cache_dir)
    with weight_cache.locked(root, key):
        folder = root / key
        damaged = folder.exists()
        facts = weight_cache.load(model, folder)
        if facts is not None:
            return {**facts, "cache": "hit", "key": key}
        facts = train(model, tokenizer, task, settings, seed)
        weight_cache.save(model, facts, root, key)
        return {**facts, "cache": "rebuilt" if damaged else "trained", "key": key}


# ------------------------------------------------------------------------------------------------------------ training
def train(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: Task, settings: ColdStart, seed: int
) -> dict[str, Any]:
    """Cross entropy on answers and their end, in float32, in place; see warm_up for the facts returned."""
    clock, cpu = time.perf_counter(), time.process_time()
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rng = random.Random(f"cold_start|{seed}")
    losses: list[float] = []
    tokens = 0
    with _training(model, seed):
        for parameter in model.parameters():
            parameter.data = parameter.data.float()
        optimizer = torch.optim.AdamW(trained, lr=settings.lr, betas=BETAS, weight_decay=0.0, fused=True)
        for step in range(settings.steps):
            optimizer.param_groups[0]["lr"] = settings.lr * learning_rate_share(step, settings.steps)
            examples = task.examples("train", settings.batch_size, seed, FIRST_ITEM + step * settings.batch_size)
            answers = [task.demonstration(example, settings.error_share, rng) for example in examples]
            tokens_BS, attention_BS, target_BS = lay_out(tokenizer, examples, answers)
            loss = answer_loss(model, tokens_BS, attention_BS, target_BS)
            losses.append(float(loss.detach()))
            if losses[-1] != losses[-1] or losses[-1] == float("inf"):
                raise ColdStartError(f"the warm-up's loss is {losses[-1]} at step {step + 1}; lower cold_start.lr")
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            tokens += int(target_BS.sum())
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(dtypes[name])
    last = losses[-max(1, settings.steps // 10) :]
    return {
        "loss": sum(last) / len(last),
        "first_loss": losses[0],
        "tokens": tokens,
        "cpu_s": time.process_time() - cpu,
        "wall_s": time.perf_counter() - clock,
    }


def learning_rate_share(step: int, steps: int) -> float:
    """Share of the peak learning rate at `step` (from 0): linear up over the first tenth, linear down to nearly 0."""
    rise = max(1, round(WARM_UP_SHARE * steps))
    return min((step + 1) / rise, (steps - step) / max(1, steps - rise))


def lay_out(
    tokenizer: PreTrainedTokenizerBase, examples: list[Example], answers: list[str]
) -> tuple[Tensor, Tensor, Tensor]:
    """Prompts padded on the left, answers and an end of sequence, padded on the right: the layout of rollouts.

    Returns tokens_BS, attention_BS (True on real tokens) and target_BS (True on answer and end tokens). Raises
    ValueError for characters that the tokenizer does not know and for more tokens than the model has positions.
    """
    prompts = [encode(tokenizer, example.prompt) for example in examples]
    responses = [[*encode(tokenizer, answer), tokenizer.eos_token_id] for answer in answers]
    prompt_width, response_width = max(map(len, prompts)), max(map(len, responses))
    width = prompt_width + response_width
    if width > tokenizer.model_max_length:
        raise ValueError(
            f"a demonstration takes {width} tokens, the model has {tokenizer.model_max_length} positions; "
            "make the task shorter or raise model.max_positions"
        )
    tokens_BS = torch.full((len(examples), width), tokenizer.pad_token_id)
    attention_BS = torch.zeros(len(examples), width, dtype=torch.bool)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        first, last = prompt_width - len(prompt), prompt_width + len(response)
        tokens_BS[row, first:last] = torch.tensor(prompt + response)
        attention_BS[row, first:last] = True
    target_BS = attention_BS.clone()
    target_BS[:, :prompt_width] = False
    return tokens_BS, attention_BS, target_BS


def answer_loss(model: PreTrainedModel, tokens_BS: Tensor, attention_BS: Tensor, target_BS: Tensor) -> Tensor:
    """Mean cross entropy of the target tokens, nats a token; scalar."""
    device = next(model.parameters()).device
    tokens_BS, attention_BS, target_BS = tokens_BS.to(device), attention_BS.to(device), target_BS.to(device)
    logits_BSV = model(
        input_ids=tokens_BS, attention_mask=attention_BS.long(), position_ids=positions(attention_BS), use_cache=False
    ).logits
    wanted_BS = target_BS[:, 1:]
    return F.cross_entropy(logits_BSV[:, :-1][wanted_BS].float(), tokens_BS[:, 1:][wanted_BS])


@contextlib.contextmanager
def _training(model: PreTrainedModel, seed: int) -> Iterator[None]:
    """Train mode and random draws from `seed` inside the block; mode, gradients and random state put back after it."""
    was_training = model.training
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())), torch.enable_grad():
        torch.manual_seed(seed)
        model.train()
        try:
            yield
        finally:
            model.zero_grad(set_to_none=True)
            model.train(was_training)


# --------------------------------------------------------------------------------------------------------------- cache
def determinants(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    settings: Any,
    seed: int,
    forward_facts: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything that decides the weights after a training with these settings, a dataclass, to the last bit."""
    return {
        "model": f"{type(model).__module__}.{type(model).__qualname__}",
        "config": {**model.config.to_dict(), "dtype": ""},  # dtypes are in weights; config spells its own in two ways
        "experts": str(model.get_experts_implementation()),
        "attention": str(model.config._attn_implementation),
        "frozen": [name for name, parameter in model.named_parameters() if not parameter.requires_grad],
        "weights": weight_cache.digest(model),
        "tokenizer": [type(tokenizer).__qualname__, tokenizer.get_vocab(), tokenizer.eos_token, tokenizer.pad_token],
        "task": task.determinants(),
        "settings": dataclasses.asdict(settings),
        "seed": seed,
        "forward": dict(forward_facts or {}),
        "sources": _sources(task),
        "versions": [torch.__version__, _transformers_version(), platform.python_version()],
        "machine": [
            str(next(model.parameters()).device),
            torch.get_num_threads(),
            torch.backends.cpu.get_cpu_capability(),
        ],
    }


def cache_key(facts: Mapping[str, Any]) -> str:
    """A name for a folder: hash of `facts`."""
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:24]


def _transformers_version() -> str:
    import transformers

    return str(transformers.__version__)


def _sources(task: Task) -> str:
    """Hash of the source text of the modules that take part: this one, the tokenizer's, the task's and its bases'."""
    modules = {__name__, encode.__module__, *(kind.__module__ for kind in type(task).__mro__ if issubclass(kind, Task))}
    digest = hashlib.sha256()
    for name in sorted(modules):
        try:
            digest.update(inspect.getsource(sys.modules[name]).encode())
        except (OSError, TypeError) as error:
            raise ColdStartError(
                f"module {name} has no source file, so its changes cannot be seen; save it as a file"
            ) from error
    return digest.hexdigest()
