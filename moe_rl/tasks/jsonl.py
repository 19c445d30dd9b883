"""Prompts and answers from a file of JSON lines."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import random
from pathlib import Path
from typing import Any

from moe_rl.tasks.base import Example, Task, split_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class JsonLines(Task):
    """Answer the prompts of a file with lines {"id": ..., "prompt": ..., "answer": ...}.

    The prompt is used as it stands, white space around a completion is ignored. It is as hard as the file. Every prompt
    comes once an epoch, in an order set by the seed. Without `eval_path` a sixteenth of the prompts, chosen by a hash
    of their text, is kept for evaluation. The files are read once.
    """

    path: str = ""
    eval_path: str = ""

    def read(self, completion: str) -> str:
        return completion.strip()

    @functools.cached_property
    def alphabet(self) -> str:
        return "".join(sorted({c for examples in self._splits.values() for e in examples for c in e.answer}))

    def draw(self, rng: random.Random) -> tuple[str, str]:
        example = rng.choice(self._splits["train"])
        return example.prompt, example.answer

    def examples(self, split: str, count: int, seed: int, start: int = 0) -> list[Example]:
        """As in Task; also ValueError for a file that is missing, empty, or has a bad line, named by number."""
        self.check_request(split, count, start)
        pool = self._splits[split]
        orders: dict[int, list[int]] = {}
        chosen = []
        for index in range(start, start + count):
            epoch, position = divmod(index, len(pool))
            if epoch not in orders:
                orders[epoch] = list(range(len(pool)))
                random.Random(f"{split}|{seed}|{epoch}").shuffle(orders[epoch])
            chosen.append(pool[orders[epoch][position]])
        return chosen

    def determinants(self) -> dict[str, Any]:
        contents = [f"{e.id}\0{e.prompt}\0{e.answer}" for split in self._splits.values() for e in split]
        data = hashlib.sha256("\1".join(contents).encode("utf-8", "surrogatepass")).hexdigest()
        return {**super().determinants(), "data": data}

    @functools.cached_property
    def _splits(self) -> dict[str, list[Example]]:
        examples = read_examples(self.path, "path")
        if not self.eval_path:
            splits: dict[str, list[Example]] = {"train": [], "eval": []}
            for example in examples:
                splits[split_of(example.prompt)].append(example)
            for split, chosen in splits.items():
                if not chosen:
                    raise ValueError(
                        f"{self.path} has {len(examples)} prompts and none of them falls to {split}; "
                        "add prompts, or set task.eval_path=<file.jsonl>"
                    )
            return splits
        evaluation = read_examples(self.eval_path, "eval_path")
        shared = {e.prompt for e in examples} & {e.prompt for e in evaluation}
        if shared:
            raise ValueError(
                f"{self.path} and {self.eval_path} share {len(shared)} prompts, one is {min(shared)!r}; "
                "take them out of one of the files"
            )
        return {"train": examples, "eval": evaluation}


def read_examples(path: str, setting: str) -> list[Example]:
    """The examples of one file. Raises ValueError naming the file, the line and what is wrong with it."""
    if not path:
        raise ValueError(f"the jsonl task has no file; set task.{setting}=<file.jsonl>")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; set task.{setting}=<file.jsonl>") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    lines = text.removesuffix("\n").split("\n")  # splitlines would also cut at characters that JSON strings may hold
    if not text.strip():
        raise ValueError(f'{path} is empty; write lines like {{"id": "1", "prompt": "2+2=", "answer": "4"}}')
    examples: list[Example] = []
    lines_of: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        example = _parse(line, f"{path} line {number}")
        if example.id in lines_of:
            raise ValueError(
                f"{path} line {number}: id {example.id!r} is taken by line {lines_of[example.id]}; rename one"
            )
        lines_of[example.id] = number
        examples.append(example)
    return examples


def parse_json(line: str, where: str) -> Any:
    """What a line says. ValueError, beginning with `where`, for one that is not JSON."""
    try:
        return json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
        raise ValueError(f"{where}: not JSON ({reason}); write one object a line") from error


def _parse(line: str, where: str) -> Example:
    row = parse_json(line, where)
    if not isinstance(row, dict):
        raise ValueError(f"{where}: holds {type(row).__name__}; write an object with id, prompt and answer")
    if set(row) != {"id", "prompt", "answer"}:
        raise ValueError(f"{where}: has the keys {sorted(row)}; write exactly id, prompt and answer")
    for key, value in row.items():
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{where}: {key} is {value!r}; write a string that is not blank")
    return Example(row["id"], row["prompt"], row["answer"].strip())
