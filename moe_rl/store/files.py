"""Files that are whole or refused: replaced atomically, with a digest of what they hold, and errors that name them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FORMAT = 1
DIGEST = "digest"


class StoreError(RuntimeError):
    """A results folder that cannot be used as asked; the message says what to do."""


class WriteError(StoreError, OSError):
    """A file that cannot be written: the disk is full, or the folder read-only. A run goes on from it when launched
    again."""


@contextlib.contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn an OSError into a WriteError that names the file and says what to do."""
    try:
        yield
    except OSError as error:
        raise WriteError(
            f"cannot write {path}: {error.strerror or error}; make room, or choose another launch.results_dir, "
            "and launch again: what is finished stays"
        ) from error


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace `path` by `content`; a reader sees the old one or the new one, never a part. WriteError."""
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


def read_bytes(path: Path) -> bytes:
    """The content of a file. StoreError names one that cannot be read; FileNotFoundError where there is none."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


# ---------------------------------------------------------------------------------------------------------------- JSON
def to_json(value: Any) -> Any:
    """JSON has no NaN: a non-finite number becomes the string that Python's float() reads back."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    return value


def from_json(value: Any) -> Any:
    """The reverse of `to_json`, for a value of a row."""
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    if isinstance(value, list):
        return [from_json(item) for item in value]
    return value


def seal(content: Mapping[str, Any]) -> dict[str, Any]:
    """JSON content with the format's number and a digest of all of it."""
    plain = {"format": FORMAT, **to_json(content)}
    return {**plain, DIGEST: _digest_of(plain)}


def _digest_of(plain: Mapping[str, Any]) -> str:
    return digest(json.dumps(plain, sort_keys=True).encode())


def read_json(path: Path, sealed: bool = False, marker: str = "", advice: str = "") -> dict[str, Any]:
    """A JSON object from `path`, without its digest.

    StoreError names the file when it is damaged or newer than this code; advice: what it says to do. sealed, or a key
    `marker` in the file: one without a digest is damaged. Others may be of before there were digests.
    """
    advice = advice or f"delete {path.parent} and run it again"
    try:
        value = json.loads(read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} is damaged ({error}); {advice}") from error
    if not isinstance(value, dict):
        raise StoreError(f"{path} is damaged (it holds {type(value).__name__} where an object belongs); {advice}")
    check_format(path, value.get("format", FORMAT))
    found = value.pop(DIGEST, None)
    if (sealed or marker in value or found is not None) and found != _digest_of(value):
        raise StoreError(f"{path} is damaged (its digest does not match); {advice}")
    return value


def check_format(path: Path, found: Any) -> None:
    """StoreError for a file that a newer version wrote."""
    if not isinstance(found, int):
        raise StoreError(f"{path} is damaged (its format is {found!r}, no number); delete it and make it again")
    if found > FORMAT:
        raise StoreError(f"{path} has format {found}, this version reads {FORMAT}; update moe_rl")
