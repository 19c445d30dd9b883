"""The contract of a task: prompts with answers that a program can check.

One frozen dataclass per file of this package; its fields are the task's settings, the file's stem is its name.
"""

from __future__ import annotations

import abc
import dataclasses
import hashlib
import random
from typing import Any

SPLITS = ("train", "eval")
EVAL_ONE_IN = 16  # one prompt in 16 belongs to the evaluation split, whatever the seed
MAX_DRAWS = 2000  # (15/16)^2000 is 1e-56: only a prompt space without any prompt of the split runs out of draws
REWARD_KINDS = {"share": "right characters by position", "exact": "all or nothing"}


@dataclasses.dataclass(frozen=True)
class Example:
    """One prompt, its right answer, and a name that is unique within its split and seed."""

    id: str
    prompt: str
    answer: str


def split_of(prompt: str) -> str:
    """'train' or 'eval': a stable hash of the prompt's text decides, so that no seed can mix the two."""
    digest = hashlib.blake2b(prompt.encode("utf-8", "surrogatepass"), digest_size=2).digest()
    return "eval" if int.from_bytes(digest, "big") % EVAL_ONE_IN == 0 else "train"


def position_share(answer: str, completion: str) -> float:
    """Share of right characters by position, divided by the longer length: too long costs as much as too short."""
    longest = max(len(answer), len(completion))
    return sum(a == c for a, c in zip(answer, completion, strict=False)) / longest if longest else 1.0


def overlap(train: list[Example], evaluation: list[Example]) -> float:
    """Share of evaluation prompts that also occur in `train`, 0 to 1; nan without evaluation prompts."""
    seen = {example.prompt for example in train}
    return sum(e.prompt in seen for e in evaluation) / len(evaluation) if evaluation else float("nan")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task(abc.ABC):
    """A task: settings in, prompts and rewards out. A subclass writes `draw` and `alphabet`.

    reward_kind: one of REWARD_KINDS.
    """

    reward_kind: str = "share"

    def __post_init__(self) -> None:
        if self.reward_kind not in REWARD_KINDS:
            raise ValueError(f"reward_kind is {self.reward_kind!r}; choose one of {', '.join(REWARD_KINDS)}")

    @property
    def name(self) -> str:
        """The file's stem: option, results column and legend."""
        return type(self).__module__.rpartition(".")[2]

    @property
    @abc.abstractmethod
    def alphabet(self) -> str:
        """The characters that answers are made of; wrong demonstrations are drawn from them."""

    @abc.abstractmethod
    def draw(self, rng: random.Random) -> tuple[str, str]:
        """A (prompt, answer) drawn with `rng` alone."""

    def examples(self, split: str, count: int, seed: int, start: int = 0) -> list[Example]:
        """`count` examples of a split, beginning with item `start`.

        Item i is a function of (split, seed, i) and the settings, never of `count` or `start`. Train and eval prompts
        are disjoint for all seeds. Raises ValueError for an unknown split, a negative count or start, and where the
        settings allow too few prompts to give the split any.
        """
        self.check_request(split, count, start)
        return [self._example(split, seed, index) for index in range(start, start + count)]

    def check_request(self, split: str, count: int, start: int) -> None:
        """ValueError for an unknown split, a negative count or a negative start."""
        if split not in SPLITS:
            raise ValueError(f"split is {split!r}; ask for train or eval")
        if count < 0 or start < 0:
            raise ValueError(f"count is {count} and start is {start}; both must be 0 or more")

    def _example(self, split: str, seed: int, index: int) -> Example:
        rng = random.Random(f"{self.name}|{split}|{seed}|{index}")  # a string seed is hashed: seed+1 is another stream
        for _ in range(MAX_DRAWS):
            prompt, answer = self.draw(rng)
            if split_of(prompt) == split:
                return Example(f"{split}-{seed}-{index}", prompt, answer)
        raise ValueError(
            f"{self}: none of {MAX_DRAWS} drawn prompts belongs to {split}; too few are possible, make the task harder"
        )

    def read(self, completion: str) -> str:
        """The part of a completion that is compared with the answer."""
        return completion

    def exact(self, example: Example, completion: str) -> bool:
        """Whether the completion is the answer."""
        return self.read(completion) == example.answer

    def reward(self, example: Example, completion: str) -> float:
        """Reward in [0, 1] by `reward_kind`; defined for every string."""
        if self.reward_kind == "exact":
            return float(self.exact(example, completion))
        return position_share(example.answer, self.read(completion))

    def demonstration(self, example: Example, error_share: float, rng: random.Random) -> str:
        """The answer with each character replaced, with probability `error_share`, by a wrong one of the alphabet."""
        characters = []
        for character in example.answer:
            wrong = [other for other in self.alphabet if other != character]
            flip = rng.random() < error_share
            characters.append(rng.choice(wrong) if flip and wrong else character)
        return "".join(characters)

    def determinants(self) -> dict[str, Any]:
        """Everything that decides which examples this task gives: its name, its settings, its data."""
        return {"task": self.name, **dataclasses.asdict(self)}


def at_least_one(**settings: int) -> None:
    """ValueError naming the first setting below 1."""
    for name, value in settings.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; set it to 1 or more")
