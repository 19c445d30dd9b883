"""Trackio: `TRACKIO_DIR=<run>/trackio trackio show` draws a run."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import ClassVar

from moe_rl.loggers.base import Log, Logger, Told


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trackio(Logger):
    """A database in trackio/. Trackio takes its folder from the environment when it is imported: one run a process."""

    package: ClassVar = "trackio"

    @contextlib.contextmanager
    def open(self, run: Told) -> Iterator[Log]:
        os.environ["TRACKIO_DIR"] = str(run.folder.absolute())
        import trackio

        trackio.init(project=run.study, name=run.name, config=dict(run.config), resume="allow", embed=False)
        try:
            yield lambda taken, numbers: trackio.log(numbers, step=taken)
        finally:
            trackio.finish()
