"""The contract of a logger: a mirror of a run's numbers in a tracker. What counts is in the results folder.

One frozen dataclass per file of this package; the file's stem is the option `logger=<stem>` and the extra that brings
the tracker. A logger is no part of what makes a run this run, and nothing that it does can end one.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import importlib.util
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

TABLES = ("steps", "updates")
Log = Callable[[int, dict[str, float]], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Told:
    """What a tracker is told of a run. folder: for its files, below the run's. first: optimizer updates taken before
    the first row: above 0 where a run goes on."""

    folder: Path
    study: str
    name: str
    config: Mapping[str, Any]
    first: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Logger(abc.ABC):
    """A tracker on this machine: without network, its files in the run's folder."""

    package: ClassVar[str]

    def __post_init__(self) -> None:
        if importlib.util.find_spec(self.package) is None:
            raise ValueError(f"{self.package} is not installed; run  pip install 'moe_rl[{self.stem()}]'")

    @classmethod
    def stem(cls) -> str:
        return cls.__module__.rpartition(".")[2]

    @abc.abstractmethod
    def open(self, run: Told) -> AbstractContextManager[Log]:
        """A block that gives log(updates taken so far, {name: number}). The tracker is imported in it, not before."""


class Mirror:
    """Hands a run's rows of `steps` and `updates` to a logger, as `steps/reward` and the like; lists are left out.

    Whatever the logger raises, it is dropped with one warning on stderr. updates: of a step.
    """

    def __init__(self, logger: Logger, folder: Path, study: str, config: Mapping[str, Any], updates: int):
        self.logger, self.folder, self.study, self.config, self.updates = logger, folder, study, config, updates
        self.stack = contextlib.ExitStack()
        self.log: Log | None = None
        self.dropped = False

    def __call__(self, table: str, row: Mapping[str, Any]) -> None:
        """Mirror one row, which is written already."""
        if table not in TABLES or self.dropped:
            return
        taken = row["step"] * self.updates if table == "steps" else (row["step"] - 1) * self.updates + row["update"]
        numbers = {f"{table}/{key}": float(x) for key, x in row.items() if isinstance(x, (int, float))}
        with self._dropping():
            if self.log is None:
                self.log = self.stack.enter_context(self.logger.open(self._told(taken)))
            self.log(taken, numbers)

    def _told(self, first: int) -> Told:
        place = self.folder / self.logger.stem()
        if first == 0:  # the run begins: what an earlier, failed one has left is not of this one
            shutil.rmtree(place, ignore_errors=True)
        name = " ".join(part for part in self.folder.parts[-3:] if part != "default").replace("_", " ")
        return Told(folder=place, study=self.study, name=name, config=self.config, first=first)

    @contextlib.contextmanager
    def _dropping(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.dropped = True
            print(
                f"warning: logger={self.logger.stem()} is dropped, the run goes on without it: "
                f"{type(error).__name__}: {error}",
                file=sys.stderr,
                flush=True,
            )
            with contextlib.suppress(Exception):
                self.stack.close()

    def close(self) -> None:
        if not self.dropped:
            with self._dropping():
                self.stack.close()


@contextlib.contextmanager
def mirror(
    logger: Logger | None, folder: Path, study: str, config: Mapping[str, Any], updates: int
) -> Iterator[Callable[[str, Mapping[str, Any]], None] | None]:
    """A block in which a run's rows can be mirrored; None without a logger. For RunWriter.mirror."""
    if logger is None:
        yield None
        return
    reflection = Mirror(logger, folder, study, config, updates)
    try:
        yield reflection
    finally:
        reflection.close()
