"""The texts on which two checkpoints are compared: a text file, JSON lines, or a task's prompts with their answers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from moe_rl.comparison.settings import ComparisonError, refusing
from moe_rl.discovery import variants
from moe_rl.models.tokenizer import encode
from moe_rl.tasks.base import Task
from moe_rl.tasks.jsonl import parse_json

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
    with refusing():
        row = parse_json(line, where)
    row = row if isinstance(row, dict) else {}
    keys = ("text",) if "text" in row else ("prompt", "answer")
    parts = [row[key] for key in keys if isinstance(row.get(key), str)]
    if len(parts) != len(keys) or not "".join(parts).strip():
        raise ComparisonError(f'{where}: write an object with a "text", or with a "prompt" and an "answer"')
    return "".join(parts)


def _of_task(name: str, count: int) -> list[tuple[str, str]]:
    kinds = variants("moe_rl.tasks", Task)
    if name not in kinds:
        raise ComparisonError(f"text is {name!r}; give a file .txt or .jsonl, or a task: {', '.join(sorted(kinds))}")
    with refusing(f"text={name}: "):
        examples = kinds[name]().examples("eval", count, SEED)
    return [(f"{name} {example.id}", example.prompt + example.answer) for example in examples]


def token_ids(tokenizer: PreTrainedTokenizerBase, texts: list[tuple[str, str]], max_tokens: int) -> list[list[int]]:
    """Each text's tokens as the tokenizer makes them for its model, cut to `max_tokens`.

    ComparisonError for characters that it does not know: their routing would be that of another token.
    """
    for where, text in texts:
        with refusing(f"{where}: "):
            encode(tokenizer, text)
    return [list(tokenizer(text)["input_ids"])[:max_tokens] for _, text in texts]


def require_same(old: PreTrainedTokenizerBase, new: PreTrainedTokenizerBase) -> None:
    """ComparisonError, with the first token that differs, unless both tokenizers have one vocabulary."""
    a, b = ({number: token for token, number in tokenizer.get_vocab().items()} for tokenizer in (old, new))
    first = next((number for number in sorted(a.keys() | b.keys()) if a.get(number) != b.get(number)), None)
    if first is not None:
        raise ComparisonError(
            f"old and new have different tokenizers ({len(a)} and {len(b)} tokens, the first to differ is {first}: "
            f"{a.get(first)!r} and {b.get(first)!r}); compare checkpoints of one tokenizer"
        )
