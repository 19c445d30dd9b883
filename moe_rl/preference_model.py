"""A reward that was learned from preferences: what reinforcement learning optimises in place of the true reward.

A model of the policy's kind with a scalar head is trained, before reinforcement learning, on pairs of answers to the
task's prompts, of which the task's own reward prefers one. From then on it alone rewards the policy.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_rl import cold_start, weight_cache
from moe_rl.policy import positions
from moe_rl.records import Rollouts
from moe_rl.scalar_model import ScalarModel
from moe_rl.tasks.base import Example, Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

REWARDS = {
    "verifier": "the task's own reward",
    "preference_model": "a model that was trained on pairs of answers; the task's own reward is only logged",
}
FIRST_ITEM = 2 * 10**9  # neither the policy's prompts nor its warm-up's
MAX_DRAWS = 100
SCORED = 64  # sequences a forward


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preferences:
    """Bradley-Terry: log P(better preferred) = log sigmoid(score(better) - score(worse)).

        reward = (score - mean) / standard deviation, both over the held-out answers

    steps of batch_size pairs, peak learning rate lr. Both answers of a pair are the right one with up to error_share of
    its characters wrong, and one in four is cut short; pairs that the task rewards alike are drawn again. held_out:
    pairs whose accuracy goes to run.json. The model starts from fresh weights, routes as its family does, and never
    changes afterwards. The catch: it has seen nothing that is longer than the right answer.
    Source: arXiv 1706.03741 section 2.2.3; as used on language models: arXiv 2203.02155 eq. 1.
    """

    steps: int = 200
    batch_size: int = 16
    lr: float = 1e-3
    error_share: float = 0.5
    held_out: int = 256

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "held_out"):
            if getattr(self, name) < 1:
                raise ValueError(f"preference_model.{name} is {getattr(self, name)}; set it to 1 or more")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"preference_model.lr is {self.lr}; set it above 0")
        if not 0 < self.error_share < 1:
            raise ValueError(f"preference_model.error_share is {self.error_share}; it lies between 0 and 1")


class PreferenceModel(ScalarModel):
    """The score of the last real token."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, model: PreTrainedModel):
        super().__init__(model)
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("deviation", torch.ones(()))

    def forward(self, tokens_BS: Tensor, attention_BS: Tensor) -> Tensor:
        """Scores [B], fp32, with gradient; only their differences mean something."""
        last_B = positions(attention_BS).argmax(1)
        return self.scores(tokens_BS, attention_BS).gather(1, last_B[:, None]).squeeze(1)

    @torch.no_grad()
    def reward(self, rollouts: Rollouts) -> Tensor:
        """The reward of each completion, [B]: in standard deviations of the held-out answers."""
        parts = zip(rollouts.tokens_BS.split(SCORED), rollouts.attention_BS.split(SCORED), strict=True)
        scores_B = torch.cat([self(tokens, attention) for tokens, attention in parts])
        return (scores_B - self.mean) / self.deviation


def build(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    settings: Preferences,
    seed: int,
    cache_dir: str | Path,
) -> tuple[PreferenceModel, dict[str, Any]]:
    """(preference model, facts), trained from `model`, which it takes over, or read from `cache_dir`.

    facts: accuracy on the held-out pairs, loss of the last tenth of training (nats a pair), pairs trained on.
    """
    own = {module: inspect.getsource(sys.modules[module]) for module in (__name__, ScalarModel.__module__)}
    key = cold_start.cache_key(cold_start.determinants(model, tokenizer, task, settings, seed, own))
    judge, root = PreferenceModel(model).eval(), Path(cache_dir)
    with weight_cache.locked(root, key):
        facts = weight_cache.load(judge, root / key)
        if facts is None:
            facts = train(judge, tokenizer, task, settings, seed)
            weight_cache.save(judge, facts, root, key)
    return judge.requires_grad_(False), facts


def train(
    judge: PreferenceModel, tokenizer: PreTrainedTokenizerBase, task: Task, settings: Preferences, seed: int
) -> dict[str, Any]:
    """Train in place; see `build` for the facts."""
    optimizer = torch.optim.AdamW(judge.parameters(), lr=settings.lr, weight_decay=0.0, fused=True)
    drawn = pairs(task, settings, seed)
    losses = []
    for step in range(settings.steps):
        optimizer.param_groups[0]["lr"] = settings.lr * cold_start.learning_rate_share(step, settings.steps)
        batch = [next(drawn) for _ in range(settings.batch_size)]
        better_B, worse_B = scores(judge, tokenizer, batch)
        loss = -F.logsigmoid(better_B - worse_B).mean()
        losses.append(float(loss.detach()))
        loss.backward()
        nn.utils.clip_grad_norm_(judge.parameters(), cold_start.MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        held_out = [next(drawn) for _ in range(settings.held_out)]
        parts = [scores(judge, tokenizer, held_out[i : i + SCORED]) for i in range(0, len(held_out), SCORED)]
        better, worse = (torch.cat(side) for side in zip(*parts, strict=True))
        both = torch.cat([better, worse])
        judge.mean.copy_(both.mean())
        judge.deviation.copy_(both.std().clamp(min=1e-6))
    last = losses[-max(1, settings.steps // 10) :]
    return {
        "accuracy": float((better > worse).float().mean()),
        "loss": sum(last) / len(last),
        "pairs": settings.steps * settings.batch_size,
    }


def pairs(task: Task, settings: Preferences, seed: int) -> Iterator[tuple[Example, str, str]]:
    """(example, better answer, worse answer) without end, each of another item of the task's train split."""
    rng, item = random.Random(f"preferences|{seed}"), FIRST_ITEM
    while True:
        (example,) = task.examples("train", 1, seed, item)
        item += 1
        for _ in range(MAX_DRAWS):
            one, other = (_answer(task, example, settings, rng) for _ in range(2))
            gain = task.reward(example, one) - task.reward(example, other)
            if gain:
                yield (example, one, other) if gain > 0 else (example, other, one)
                break
        else:
            raise ValueError(
                f"{type(task).__name__} rewards {MAX_DRAWS} pairs of answers to {example.prompt!r} alike; "
                "raise preference_model.error_share or use reward=verifier"
            )


def _answer(task: Task, example: Example, settings: Preferences, rng: random.Random) -> str:
    answer = task.demonstration(example, rng.uniform(0, settings.error_share), rng)
    return answer[: rng.randint(1, len(answer))] if rng.random() < 0.25 else answer


def scores(
    judge: PreferenceModel, tokenizer: PreTrainedTokenizerBase, batch: list[tuple[Example, str, str]]
) -> tuple[Tensor, Tensor]:
    """(scores of the better answers, of the worse ones), each [pairs]."""
    examples = [example for example, _, _ in batch] * 2
    answers = [better for _, better, _ in batch] + [worse for _, _, worse in batch]
    tokens_BS, attention_BS, _ = cold_start.lay_out(tokenizer, examples, answers)
    device = judge.head.weight.device
    better_B, worse_B = judge(tokens_BS.to(device), attention_BS.to(device)).chunk(2)
    return better_B, worse_B
