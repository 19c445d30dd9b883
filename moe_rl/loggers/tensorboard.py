"""TensorBoard: `tensorboard --logdir results/<study>` shows all runs of a study."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import ClassVar

from moe_rl.loggers.base import Log, Logger, Told


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensorboard(Logger):
    """Event files in tensorboard/; a run that goes on purges what comes after the step it goes on from."""

    package: ClassVar = "tensorboard"

    @contextlib.contextmanager
    def open(self, run: Told) -> Iterator[Log]:
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(run.folder), purge_step=run.first, flush_secs=10) as writer:

            def log(taken: int, numbers: dict[str, float]) -> None:
                for name, number in numbers.items():
                    writer.add_scalar(name, number, taken)

            yield log
