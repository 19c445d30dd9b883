"""Weights on disk under a key: written whole or not at all, checked when read, made by one process at a time."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe_rl.store import write_errors

WEIGHTS, FACTS = "weights.safetensors", "facts.json"


class CacheError(RuntimeError):
    """A cache folder that cannot be written; the message says what to do."""


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers by name; tied weights once."""
    saved = model.state_dict()
    first = {(tensor.data_ptr(), tensor.shape): name for name, tensor in reversed(saved.items())}
    return {name: tensor for name, tensor in saved.items() if first[tensor.data_ptr(), tensor.shape] == name}


def digest(model: nn.Module) -> str:
    """Hash of all weights, their names, shapes and dtypes."""
    digest = hashlib.blake2b()
    for name, tensor in tensors(model).items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@contextlib.contextmanager
def locked(root: Path, key: str) -> Iterator[None]:
    """One process at a time holds `key`; the kernel frees the lock of a process that dies."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = open(root / f"{key}.lock", "a", encoding="utf-8")  # noqa: SIM115 (held for the whole block)
    except OSError as error:
        raise CacheError(f"cannot write to {root}: {error.strerror}; choose another cache_dir") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def save(model: nn.Module, facts: Mapping[str, Any], root: Path, key: str) -> None:
    """Write weights and facts; the folder gets its name only when it is whole. Called with the lock held."""
    from safetensors.torch import save as to_bytes

    data = to_bytes({name: tensor.detach().cpu().contiguous() for name, tensor in tensors(model).items()})
    record = {"sha256": hashlib.sha256(data).hexdigest(), "facts": dict(facts)}
    for stale in root.glob(f".{key}.*"):
        shutil.rmtree(stale)
    temporary = root / f".{key}.{os.getpid()}"
    with write_errors(root / key):
        temporary.mkdir()
        for name, content in ((WEIGHTS, data), (FACTS, json.dumps(record).encode())):
            with open(temporary / name, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        if (root / key).exists():
            shutil.rmtree(root / key)
        os.replace(temporary, root / key)


def load(model: nn.Module, folder: Path) -> dict[str, Any] | None:
    """Put cached weights into `model` and return their facts; None when there are none or they are damaged."""
    from safetensors.torch import load as from_bytes

    try:
        data = (folder / WEIGHTS).read_bytes()
        record = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        facts, checksum = record["facts"], record["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if hashlib.sha256(data).hexdigest() != checksum or not isinstance(facts, dict):
        return None
    cached, current = from_bytes(data), tensors(model)
    if {n: (t.shape, t.dtype) for n, t in cached.items()} != {n: (t.shape, t.dtype) for n, t in current.items()}:
        return None
    with torch.no_grad():
        for name, tensor in current.items():
            tensor.copy_(cached[name])
    return facts
