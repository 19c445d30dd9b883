"""Runs written to disk: one process a folder, nothing overwritten, nothing half written under a final name.

A table only grows; status.json says how much of it belongs to the run. So a process can be killed at any instruction:
status.json is the one thing that is replaced, first, and what it no longer vouches for is removed afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import yaml

from moe_rl.store.files import StoreError, digest, read_bytes, read_json, seal, to_json, write_atomic, write_errors
from moe_rl.store.format import DONE, LEGEND, TABLES, differing_keys
from moe_rl.store.reading import SEAL, read_config, read_status, vouched, written_state


class Written:
    """What a run has written of one table: its length in bytes and its digest."""

    def __init__(self, data: bytes = b""):
        self.length, self.hash = 0, hashlib.blake2b(digest_size=8)
        self.add(data)

    def add(self, data: bytes) -> None:
        self.length += len(data)
        self.hash.update(data)

    def told(self) -> tuple[int, str]:
        return self.length, self.hash.hexdigest()


@dataclasses.dataclass
class RunWriter:
    """One run being written. Made by `open_run`. settings: those that name it, whole. resumes: there is a checkpoint to
    go on from. mirror: called with (table, row) for each row once it is written."""

    folder: Path
    settings: str = ""
    resumes: bool = False
    mirror: Callable[[str, Mapping[str, Any]], None] | None = None
    started: float = dataclasses.field(default_factory=time.time)
    written: dict[str, Written] = dataclasses.field(default_factory=lambda: {table: Written() for table in TABLES})

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.safetensors"

    def adopt(self) -> None:
        """Take over what an earlier process has written. StoreError where it is damaged."""
        status = read_status(self.folder)
        facts = read_json(self.folder / "run.json", "tables" in status)
        self.written = {table: Written(vouched(self.folder, status, table)) for table in TABLES}
        self.describe(**facts)

    def rewind(self, step: int) -> None:
        """Drop the rows of later steps: the run goes on after `step`."""
        for table in TABLES:
            path, lines = self.folder / f"{table}.jsonl", []
            data = read_bytes(path)[: self.written[table].length] if path.exists() else b""
            for line in data.splitlines(keepends=True):
                if json.loads(line)["step"] > step:
                    break
                lines.append(line)
            self.written[table] = Written(b"".join(lines))
        self.status("running", step=step)
        for path in (self.folder / "traces").glob("step_*.parquet"):
            if int(path.stem.removeprefix("step_")) > step:
                path.unlink()

    def append(self, table: str, *rows: Mapping[str, Any]) -> None:
        """Add rows to steps, updates or drift. Unknown columns are refused: a typo must not become a metric."""
        for row in rows:
            unknown = row.keys() - LEGEND[table].keys()
            if unknown:
                raise StoreError(f"table {table} has no column {sorted(unknown)}; add it to store.LEGEND")
        if not rows:  # a table without rows has no file
            return
        data = "".join(json.dumps(to_json(row)) + "\n" for row in rows).encode()
        path, written = self.folder / f"{table}.jsonl", self.written[table]
        with write_errors(path), open(path, "ab") as file:
            file.truncate(written.length)  # of what was cut off nothing stays
            file.write(data)
        written.add(data)
        if self.mirror:
            for row in rows:
                self.mirror(table, row)

    def describe(self, **facts: Any) -> None:
        """Write run.json: what this run ran on."""
        own = {"settings": self.settings} if self.settings else {}
        write_atomic(self.folder / "run.json", json.dumps(seal(own | facts), indent=1))

    def describe_resumption(self, **facts: Any) -> None:
        """Add to run.json where and on what the run went on."""
        told = read_json(self.folder / "run.json")
        before = told.pop("resumed", [])
        self.describe(**told, resumed=[*before, facts])

    def status(self, state: str, **progress: Any) -> None:
        """Replace status.json, which vouches for all rows that were appended so far."""
        row = {"state": state, "pid": os.getpid(), "wall_s": time.time() - self.started, **progress}
        tables = {table: written.told() for table, written in self.written.items() if written.length}
        write_atomic(self.folder / "status.json", json.dumps(seal({**row, "tables": tables})))


@contextlib.contextmanager
def open_run(folder: Path, config: Mapping[str, Any], settings: str = "") -> Iterator[RunWriter | None]:
    """Claim a run's folder for writing. settings: what `settings_name` says, which the folder's name may cut short.

    Yields None when the run is already finished under the same config. Marks the run failed, with the reason, when the
    block raises an Exception; an interrupt leaves it cut off. A run that was cut off, or that the machine failed (an
    OSError, of a full disk say), is to be resumed; any other failure starts again. Raises StoreError when another
    process holds the run, or when the folder holds another config.
    """
    make_folder(folder)
    with write_errors(folder / "lock"):
        lock = open(folder / "lock", "a", encoding="utf-8")  # noqa: SIM115 (held for the run's whole life)
    with lock:
        if not _claim(lock):
            raise StoreError(f"{folder} is being written by another process; wait for it, or change the seed")
        check_config(folder, config)
        state = written_state(folder)
        if state in DONE:
            yield None
            return
        writer = RunWriter(folder, settings)
        goes_on = state == "running" or (state == "failed" and read_status(folder).get("resumable"))
        writer.resumes = bool(goes_on) and writer.checkpoint.exists() and (folder / "run.json").exists()
        _begin(writer, config)
        try:
            yield writer
        except Exception as error:
            with contextlib.suppress(OSError):  # without room for this, status.json still says running: cut off
                reason = f"{type(error).__name__}: {error}"[:2000]
                writer.status("failed", reason=reason, resumable=isinstance(error, OSError))
            raise


def _begin(writer: RunWriter, config: Mapping[str, Any]) -> None:
    """Make a claimed folder that of a run which begins, or goes on."""
    folder = writer.folder
    for path in [
        *folder.glob(".*"),
        *folder.glob("traces/.*"),
    ]:  # what a process that was killed was about to put in place
        path.unlink()
    if writer.resumes:
        writer.adopt()
    else:  # first, for it would be gone on from if this were cut off
        writer.checkpoint.unlink(missing_ok=True)
    text = yaml.safe_dump(dict(config), sort_keys=False).encode()
    write_atomic(folder / "config.yaml", text + SEAL + digest(text).encode() + b"\n")
    writer.status("running")
    if not writer.resumes:
        for stale in [*(f"{table}.jsonl" for table in TABLES), "run.json"]:
            (folder / stale).unlink(missing_ok=True)
        shutil.rmtree(folder / "traces", ignore_errors=True)


def make_folder(folder: Path) -> None:
    """Make a folder in which files can be made. WriteError."""
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "no permission to write, or a read-only file system")


def _claim(lock: IO[str]) -> bool:
    """Take the writer's lock. A reader in `state_of` holds it for an instant: worth half a second."""
    for _ in range(10):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(0.05)
    return False


def check_config(folder: Path, config: Mapping[str, Any]) -> None:
    """StoreError when `folder` holds a run of another config; the message names the keys that differ."""
    if not (folder / "config.yaml").exists():
        return
    stored = read_config(folder)
    if stored != config:
        keys = ", ".join(differing_keys(stored, config)[:4])
        raise StoreError(f"{folder} holds a run of another config: {keys}; delete it, or set study_name=<new name>")
