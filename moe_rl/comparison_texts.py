"""The texts on which two checkpoints are compared: a text file, JSON lines, or a task's prompts with their answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from moe_rl.comparison_settings import ComparisonError
from moe_rl.discovery import variants
from moe_rl.models.tokenizer import encode
from moe_rl.tasks.base import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SEED = 0  # of a task's prompts


def read_texts(source: str, count: int) -> list[tuple[str, str]]:
    """(where, text), at most `count` of them.

    source: file.txt (every line that is not blank is a text), file.jsonl (objects with `text`, or with `prompt` and
    `answer`), or a task's name. ComparisonError names the file and the line.
    """
    path = Path(source).expanduser()
    if path.suffix not in (".txt", ".jsonl"):
        return _of_task(source, count)
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ComparisonError(f"cannot read {source}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise ComparisonError(f"{source} line {line}: not UTF-8 text; save it as UTF-8") from error
    lines = [(f"{source} line {number}", line) for number, line in enumerate(content.split("\n"), start=1)]
    texts = [(where, line) for where, line in lines if line.strip()]
    if not texts:
        raise ComparisonError(f"{source} is empty; write one text a line")
    if path.suffix == ".jsonl":
        texts = [(where, _parse(line, where)) for where, line in texts]
    return texts[:count]


def _parse(line: str, where: str) -> str:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
        raise ComparisonError(f"{where}: not JSON ({reason}); write one object a line") from error
    keys = ("text",) if isinstance(row, dict) and "text" in row else ("prompt", "answer")
    parts = [row[key] for key in keys if isinstance(row, dict) and isinstance(row.get(key), str)]
    if len(parts) != len(keys) or not "".join(parts).strip():
        raise ComparisonError(f'{where}: write an object with a "text", or with a "prompt" and an "answer"')
    return "".join(parts)


def _of_task(name: str, count: int) -> list[tuple[str, str]]:
    kinds = variants("moe_rl.tasks", Task)
    if name not in kinds:
        raise ComparisonError(f"text is {name!r}; give a file .txt or .jsonl, or a task: {', '.join(sorted(kinds))}")
    try:
        examples = kinds[name]().examples("eval", count, SEED)
    except ValueError as error:
        raise ComparisonError(f"text={name}: {error}") from error
    return [(f"{name} {example.id}", example.prompt + example.answer) for example in examples]


def token_ids(tokenizer: PreTrainedTokenizerBase, texts: list[tuple[str, str]], max_tokens: int) -> list[list[int]]:
    """Each text's tokens as the tokenizer makes them for its model, cut to `max_tokens`.

    ComparisonError for characters that it does not know: their routing would be that of another token.
    """
    sequences = []
    for where, text in texts:
        try:
            encode(tokenizer, text)
        except ValueError as error:
            raise ComparisonError(f"{where}: {error}") from error
        sequences.append(list(tokenizer(text)["input_ids"])[:max_tokens])
    return sequences


def require_same(old: PreTrainedTokenizerBase, new: PreTrainedTokenizerBase) -> None:
    """ComparisonError, with the first token that differs, unless both tokenizers have one vocabulary."""
    vocabularies = [tokenizer.get_vocab() for tokenizer in (old, new)]
    if vocabularies[0] == vocabularies[1]:
        return
    ids = [{number: token for token, number in vocabulary.items()} for vocabulary in vocabularies]
    first = next(number for number in sorted(ids[0].keys() | ids[1].keys()) if ids[0].get(number) != ids[1].get(number))
    raise ComparisonError(
        f"old and new have different tokenizers ({len(vocabularies[0])} and {len(vocabularies[1])} tokens, the first "
        f"to differ is {first}: {ids[0].get(first)!r} and {ids[1].get(first)!r}); compare checkpoints of one tokenizer"
    )
