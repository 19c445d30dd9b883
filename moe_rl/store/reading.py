"""Studies read from disk as pandas tables, and how far each run is."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from moe_rl.store.format import DONE, FORMAT, LEGEND, TABLES, StoreError, Study, from_json, read_json
from moe_rl.store.packing import is_packed, unpack

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def state_of(folder: Path) -> str:
    """missing, running, cut_off (says running, but nobody holds its lock), finished, diverged or failed."""
    state = written_state(folder)
    return "cut_off" if state == "running" and not _locked(folder) else state


def written_state(folder: Path) -> str:
    """The state as status.json has it: a run that was cut off still says running."""
    path = folder / "status.json"
    return read_json(path).get("state", "damaged") if path.exists() else "missing"


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
    """The run folders below a study, sorted by arm, knobs and seed number."""
    found = [path.parent for path in Path(study).glob("*/*/seed_*/status.json")]
    return sorted(found, key=lambda p: (p.parts[-3], p.parts[-2], int(p.name.removeprefix("seed_"))))


def read_table(folder: Path, table: str) -> list[dict[str, Any]]:
    """Rows of one table. The torn last line of a run that was cut off is dropped; any other damage is an error."""
    path = folder / f"{table}.jsonl"
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines) and not line.endswith("\n") and state_of(folder) not in DONE:
                break
            raise StoreError(
                f"{path} line {number} is damaged ({error.msg}); delete {folder} and run it again"
            ) from error
        if not isinstance(row, dict) or row.keys() - LEGEND[table].keys():
            raise StoreError(f"{path} line {number} is not a row of table {table}; delete {folder} and run it again")
        rows.append(
            {key: from_json(value) if key not in ("tokens", "reference") else value for key, value in row.items()}
        )
    return rows


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
    runs: list[dict[str, Any]] = []
    tables: dict[str, list[dict[str, Any]]] = {table: [] for table in TABLES}
    for path in paths:
        facts = read_json(path / "run.json") if (path / "run.json").exists() else {}
        if facts.get("format", FORMAT) > FORMAT:
            raise StoreError(f"{path} has format {facts['format']}, this version reads {FORMAT}; update moe_rl")
        status = read_json(path / "status.json")
        key = {"arm": path.parts[-3], "knobs": path.parts[-2], "seed": int(path.name.removeprefix("seed_"))}
        runs.append({**facts, **status, **key, "state": state_of(path), "folder": str(path)})
        for table in TABLES:
            tables[table].extend({**key, **row} for row in read_table(path, table))
    frames = {t: pd.DataFrame(tables[t], columns=["arm", "knobs", "seed", *LEGEND[t]]) for t in TABLES}
    return Study(folder, pd.DataFrame(runs), **frames, configs=[read_config(path) for path in paths])


def read_config(folder: Path) -> dict[str, Any]:
    """The resolved settings of a run. StoreError when they are missing or damaged."""
    try:
        config = yaml.load((folder / "config.yaml").read_text(encoding="utf-8"), Loader=LOADER)
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise StoreError(f"{folder}/config.yaml cannot be read; delete {folder} and run it again") from error
    return dict(config or {})
