"""A run's state after a step, in one file: what a run that was cut off needs to go on bit for bit.

Weights, optimizer moments, the schedule, the routing at the start that drift is measured against, a reference policy
and a critic where there is one; no generator:
random choices are a function of (seed, purpose, step).
One safetensors file, replaced atomically, with a digest: it is whole or it is refused. No pickle.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from moe_rl import weight_cache
from moe_rl.store import write_errors

FORMAT = "3"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used; the message names the file and says what to do."""


def save(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: Any,
    progress: dict[str, Any],
    kept: Mapping[str, Tensor],
) -> None:
    """Replace `path` by the present state. progress, kept: JSON values and tensors that the loop wants back."""
    tensors = _tensors(model, optimizer) | {f"kept.{name}": tensor.cpu().contiguous() for name, tensor in kept.items()}
    told = {"format": FORMAT, "schedule": json.dumps(_plain(schedule)), "progress": json.dumps(progress)}
    told["digest"] = _digest(tensors, told)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with saving(path):
        try:
            save_file(tensors, temporary, told)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def saving(path: Path) -> Iterator[None]:
    """Turn what safetensors and the system say of a full disk into a WriteError: the run is to go on when launched
    again."""
    with write_errors(path):
        try:
            yield
        except SafetensorError as error:
            raise OSError(errno.EIO, str(error)) from error


def load(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Put the state of `path` into model, optimizer and schedule, and return its progress and the kept tensors.

    Raises CheckpointError for a damaged file, a newer format, or a file of another model.
    """
    advice = f"delete {path.parent} and run it again"
    try:
        with safe_open(path, "pt") as file:
            told = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); {advice}") from error
    if told.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {told.get('format')}, this version reads {FORMAT}; {advice}")
    if told.get("digest") != _digest(tensors, told):
        raise CheckpointError(f"{path} is damaged (its digest does not match); {advice}")
    weights = weight_cache.tensors(model)
    expected = {f"model.{name}": tuple(tensor.shape) for name, tensor in weights.items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items() if name.startswith("model.")}
    if found != expected:
        raise CheckpointError(f"{path} is of another model; {advice}")
    with torch.no_grad():
        for name, tensor in weights.items():
            tensor.copy_(tensors[f"model.{name}"])
    for name, parameter in model.named_parameters():
        moments = {
            key: tensors[f"{key}.{name}"].to(parameter.device)  # the step too: a fused kernel reads it there
            for key in ("exp_avg", "exp_avg_sq", "step")
            if f"{key}.{name}" in tensors
        }
        if moments:
            optimizer.state[parameter] = moments
    schedule.load_state_dict(json.loads(told["schedule"]))
    for group, lr in zip(optimizer.param_groups, schedule.get_last_lr(), strict=True):
        group["lr"] = lr
    kept = {name.removeprefix("kept."): tensor for name, tensor in tensors.items() if name.startswith("kept.")}
    return json.loads(told["progress"]), kept


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = {f"model.{name}": tensor for name, tensor in weight_cache.tensors(model).items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{key}.{name}"] = value
    return {name: tensor.detach().cpu().contiguous() for name, tensor in found.items()}


def _plain(schedule: Any) -> dict[str, Any]:
    """The schedule's state without its functions, which are rebuilt from the config."""
    return {key: value for key, value in schedule.state_dict().items() if key != "lr_lambdas"} | {
        "lr_lambdas": [None] * len(schedule.lr_lambdas)
    }


def _digest(tensors: dict[str, Tensor], told: dict[str, str]) -> str:
    # Of the safe ones the fastest where the processor helps, as most do: it is taken every step.
    digest = hashlib.sha256(repr([told.get(key) for key in ("format", "schedule", "progress")]).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
