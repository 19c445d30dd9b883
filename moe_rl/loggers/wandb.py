"""Weights & Biases, offline: `wandb sync <run>/wandb/offline-run-*` sends a run when you want it sent."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import ClassVar

from moe_rl.loggers.base import Log, Logger, Told


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wandb(Logger):
    """Offline runs in wandb/, one for each time that the run was launched."""

    package: ClassVar = "wandb"

    @contextlib.contextmanager
    def open(self, run: Told) -> Iterator[Log]:
        import wandb

        run.folder.mkdir(parents=True, exist_ok=True)
        with wandb.init(
            mode="offline",
            dir=str(run.folder.parent),  # wandb makes the folder wandb/ in it
            project=run.study,
            name=run.name,
            config=dict(run.config),
            settings=wandb.Settings(silent=True, console="off"),
        ) as tracker:
            yield lambda taken, numbers: tracker.log(numbers, step=taken)
