"""Studies read from disk as pandas tables, and how far each run is.

Each file of a run is checked: status.json, run.json and config.yaml carry a digest of themselves, and status.json says
of each table how many bytes a run had written by then, and their digest. What lies behind them, a step that was cut off
or is being written, is not read. Runs of before there were digests are read unchecked.
"""

from __future__ import annotations

import fcntl
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
import yaml

from moe_rl.store.files import StoreError, digest, from_json, read_bytes, read_json
from moe_rl.store.format import DONE, KEY, LEGEND, TABLES, Study
from moe_rl.store.packing import is_packed, unpack

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
SEAL = b"# digest: "
Read = TypeVar("Read")


# -------------------------------------------------------------------------------------------------------------- states
def read_status(folder: Path) -> dict[str, Any]:
    """status.json of a run, {} without one. `tables` in it: bytes and digest of what is to be read of each table."""
    try:
        return read_json(folder / "status.json", marker="tables")
    except FileNotFoundError:
        return {}


def state_of(folder: Path) -> str:
    """missing, running, cut_off (says running, but nobody holds its lock), finished, diverged or failed."""
    state = written_state(folder)
    if state != "running" or _locked(folder):
        return state
    state = written_state(folder)  # it may have ended between the two looks
    return "cut_off" if state == "running" else state


def written_state(folder: Path) -> str:
    """The state as status.json has it: a run that was cut off still says running."""
    status = read_status(folder)
    return str(status.get("state", "damaged")) if status else "missing"


def _locked(folder: Path) -> bool:
    try:
        with open(folder / "lock", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def run_folders(study: str | Path) -> list[Path]:
    """The run folders below a study, sorted by arm, knobs and seed number. Copies such as seed_1.bak are none."""
    found = [path.parent for path in Path(study).glob("*/*/seed_*/status.json")]
    runs = [path for path in found if re.fullmatch(r"seed_\d+", path.name)]
    return sorted(runs, key=lambda p: (p.parts[-3], p.parts[-2], seed_of(p)))


def seed_of(folder: Path) -> int:
    return int(folder.name.removeprefix("seed_"))


# -------------------------------------------------------------------------------------------------------------- tables
def read_table(folder: Path, table: str) -> list[dict[str, Any]]:
    """Rows of one table, as far as status.json vouches for them. StoreError names a file that is damaged."""
    return _steadily(folder, lambda status: _rows(folder, status, table))


def _steadily(folder: Path, read: Callable[[dict[str, Any]], Read]) -> Read:
    """read(status), and again where status.json has changed meanwhile: a run that goes on must not look damaged."""
    status = read_status(folder)
    while True:
        try:
            return read(status)
        except StoreError:
            newer = read_status(folder)
            if newer == status:
                raise
            status = newer


def vouched(folder: Path, status: dict[str, Any], table: str) -> bytes:
    """The lines of a table that belong to the run. StoreError where they are not what status.json says."""
    path = folder / f"{table}.jsonl"
    try:
        data = read_bytes(path)
    except FileNotFoundError:
        data = b""
    if "tables" not in status:  # of before there were digests: all but a torn last line of a run that was cut off
        return data if status.get("state") in DONE else data[: data.rfind(b"\n") + 1]
    length, expected = status["tables"].get(table, (0, digest(b"")))
    whole = len(data) == length if status.get("state") in DONE else len(data) >= length
    if not whole or digest(data[:length]) != expected:
        raise StoreError(f"{path} is damaged (its digest does not match); delete {folder} and run it again")
    return data[:length]


def _rows(folder: Path, status: dict[str, Any], table: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    path = folder / f"{table}.jsonl"
    for number, line in enumerate(vouched(folder, status, table).splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise StoreError(f"{path} line {number} is damaged ({error}); delete {folder} and run it again") from error
        if not isinstance(row, dict) or row.keys() - LEGEND[table].keys():
            raise StoreError(f"{path} line {number} is not a row of table {table}; delete {folder} and run it again")
        rows.append(
            {key: from_json(value) if key not in ("tokens", "reference") else value for key, value in row.items()}
        )
    return rows


# ------------------------------------------------------------------------------------------------------------- studies
def read_study(folder: str | Path) -> Study:
    """Read all runs of a study, packed or not. Raises StoreError for an empty or damaged study."""
    folder = Path(folder)
    paths = run_folders(folder)
    if is_packed(folder):
        if paths:
            raise StoreError(f"{folder} holds runs and a packed study; move the *.parquet files elsewhere")
        return unpack(folder)
    if not paths:
        raise StoreError(f"no runs below {folder}; give the folder of a study that has run, such as results/<study>")
    runs, configs = [], []
    tables: dict[str, list[dict[str, Any]]] = {table: [] for table in TABLES}
    for path in paths:
        facts, rows, config = _steadily(path, functools.partial(_read_run, path))
        key = {"arm": path.parts[-3], "knobs": facts.pop("settings", path.parts[-2]), "seed": seed_of(path)}
        runs.append({**facts, **key, "folder": str(path)})
        configs.append(config)
        for table in TABLES:
            tables[table].extend({**key, **row} for row in rows[table])
    frames = {t: pd.DataFrame(tables[t], columns=[*KEY, *LEGEND[t]]) for t in TABLES}
    return Study(folder, pd.DataFrame(runs), **frames, configs=configs)


def _read_run(
    folder: Path, status: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]], dict[str, Any]]:
    """(all of run.json and status.json, rows of each table, settings) of a run as `status` has it."""
    sealed = "tables" in status
    try:
        facts = read_json(folder / "run.json", sealed)
    except FileNotFoundError:  # the run has not got that far
        facts = {}
    rows = {table: _rows(folder, status, table) for table in TABLES}
    config = read_config(folder, sealed)
    state = state_of(folder)
    if ("running" if state == "cut_off" else state) != status["state"]:
        raise StoreError(f"{folder} has gone from {status['state']} to {state} while it was read; read it again")
    told = {name: value for name, value in status.items() if name != "tables"}
    return {**facts, **told, "state": state}, rows, config


def read_config(folder: Path, sealed: bool = False) -> dict[str, Any]:
    """The resolved settings of a run. StoreError when they are missing or damaged; sealed: see `read_json`."""
    path = folder / "config.yaml"
    advice = f"delete {folder} and run it again"
    try:
        data = read_bytes(path)
        text, seal, found = data.rpartition(SEAL)
        if (seal or sealed) and found.strip() != digest(text).encode():
            raise StoreError(f"{path} is damaged (its digest does not match); {advice}")
        config = yaml.load(data, Loader=LOADER)
    except (FileNotFoundError, yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        raise StoreError(f"{path} cannot be read ({str(error).splitlines()[0]}); {advice}") from error
    if not isinstance(config, dict):
        raise StoreError(f"{path} is damaged (it holds no settings); {advice}")
    return config
