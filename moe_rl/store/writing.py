"""Runs written to disk: one process a folder, nothing overwritten, nothing half written under a final name."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import yaml

from moe_rl.store.format import DONE, FORMAT, LEGEND, TABLES, StoreError, differing_keys, read_json, to_json
from moe_rl.store.reading import read_table, written_state


@dataclasses.dataclass
class RunWriter:
    """One run being written. Made by `open_run`. resumes: there is a checkpoint to go on from."""

    folder: Path
    resumes: bool = False
    started: float = dataclasses.field(default_factory=time.time)

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.safetensors"

    def rewind(self, step: int) -> None:
        """Drop the rows of later steps: the run goes on after `step`."""
        for table in TABLES:
            rows = [row for row in read_table(self.folder, table) if row["step"] <= step]
            text = "".join(json.dumps(to_json(row)) + "\n" for row in rows)
            write_atomic(self.folder / f"{table}.jsonl", text)
        for path in (self.folder / "traces").glob("step_*.parquet"):
            if int(path.stem.removeprefix("step_")) > step:
                path.unlink()

    def append(self, table: str, *rows: Mapping[str, Any]) -> None:
        """Add rows to steps, updates or drift. Unknown columns are refused: a typo must not become a metric."""
        for row in rows:
            unknown = row.keys() - LEGEND[table].keys()
            if unknown:
                raise StoreError(f"table {table} has no column {sorted(unknown)}; add it to store.LEGEND")
        if rows:  # a table without rows has no file
            with open(self.folder / f"{table}.jsonl", "a", encoding="utf-8") as file:
                file.writelines(json.dumps(to_json(row)) + "\n" for row in rows)

    def describe(self, **facts: Any) -> None:
        """Write run.json: what this run ran on."""
        write_atomic(self.folder / "run.json", json.dumps({"format": FORMAT, **to_json(facts)}, indent=1))

    def describe_resumption(self, **facts: Any) -> None:
        """Add to run.json where and on what the run went on."""
        told = read_json(self.folder / "run.json")
        before = told.pop("resumed", [])
        self.describe(**told, resumed=[*before, facts])

    def status(self, state: str, **progress: Any) -> None:
        """Replace status.json."""
        row = {"state": state, "pid": os.getpid(), "wall_s": time.time() - self.started, **progress}
        write_atomic(self.folder / "status.json", json.dumps(to_json(row)))


@contextlib.contextmanager
def open_run(folder: Path, config: Mapping[str, Any]) -> Iterator[RunWriter | None]:
    """Claim a run's folder for writing.

    Yields None when the run is already finished under the same config. Marks the run failed, with the reason, when the
    block raises an Exception; an interrupt leaves it cut off. A run that was cut off, or that the machine failed (an
    OSError, of a full disk say), is to be resumed; any other failure starts again. Raises StoreError when another
    process holds the run, or when the folder holds another config.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / "lock", "a", encoding="utf-8")  # noqa: SIM115 (held for the run's whole life)
    except OSError as error:
        raise StoreError(f"cannot write to {folder}: {error.strerror}; choose another results_dir") from error
    with lock:
        if not _claim(lock):
            raise StoreError(f"{folder} is being written by another process; wait for it, or change the seed")
        check_config(folder, config)
        state = written_state(folder)
        if state in DONE:
            yield None
            return
        writer = RunWriter(folder)
        goes_on = state == "running" or (state == "failed" and read_json(folder / "status.json").get("resumable"))
        writer.resumes = bool(goes_on) and writer.checkpoint.exists() and (folder / "run.json").exists()
        if not writer.resumes:
            for stale in [*(f"{t}.jsonl" for t in TABLES), "run.json", "status.json", writer.checkpoint.name]:
                (folder / stale).unlink(missing_ok=True)
            shutil.rmtree(folder / "traces", ignore_errors=True)
        write_atomic(folder / "config.yaml", yaml.safe_dump(dict(config), sort_keys=False))
        writer.status("running")
        try:
            yield writer
        except Exception as error:
            with contextlib.suppress(OSError):  # without room for this, status.json still says running: cut off
                reason = f"{type(error).__name__}: {error}"[:2000]
                writer.status("failed", reason=reason, resumable=isinstance(error, OSError))
            raise


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
    path = folder / "config.yaml"
    if not path.exists():
        return
    try:
        stored = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise StoreError(f"{path} is damaged; delete {folder} and run it again") from error
    if stored != config:
        keys = ", ".join(differing_keys(stored or {}, config)[:4])
        raise StoreError(f"{folder} holds a run of another config: {keys}; delete it, or set study_name=<new name>")


def write_atomic(path: Path, text: str) -> None:
    """Replace `path` with `text`; a reader sees the old text or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
