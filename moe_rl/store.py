"""Runs on disk: the only bridge between training and figures. Imports no torch.

    results/<study>/<arm>/<knob=value,...>/seed_<n>/
        config.yaml     the resolved config: the run's identity
        run.json        what it ran on: versions, commit, machine, model size, L, K, E
        status.json     state (running, finished, diverged, failed), progress, reason; replaced atomically
        steps.jsonl     one line a step      \
        updates.jsonl   one line an update    >  columns: LEGEND
        drift.jsonl     one line a comparison /
        checkpoint.safetensors   the state after the last whole step, while the run is not finished
        lock            held by the process that writes; the kernel frees it when that process dies

A second launch of a finished run does nothing, of one that was cut off goes on from its checkpoint, of a failed one
starts it again; with another config it is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import math
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

import pandas as pd
import yaml

FORMAT = 1
DONE = ("finished", "diverged")
LONGEST_NAME = 200  # file systems stop at 255 bytes
TABLES = ("steps", "updates", "drift")

LEGEND: dict[str, dict[str, str]] = {
    "steps": {
        "step": "rollout batch, from 1 (0 is the policy after the cold start)",
        "reward": "mean reward of the step's sampled completions",
        "reward_sd": "standard deviation of that reward over completions",
        "exact": "share of completions that are exactly right",
        "eval_reward": "mean reward on the evaluation prompts, one sampled completion each",
        "eval_exact": "share exactly right on the evaluation prompts",
        "equal_groups": "share of groups whose rewards are all equal (no gradient)",
        "response_length": "mean response length, tokens",
        "truncated": "share of completions cut off by the length limit",
        "entropy": "mean entropy of the next-token distribution, nats",
        "queries": "completions sampled so far",
        "tokens": "response tokens sampled so far",
        "rollout_s": "CPU seconds: sampling",
        "old_pass_s": "CPU seconds: old logprobs and routing",
        "update_s": "CPU seconds: gradient updates",
        "drift_s": "CPU seconds: measuring drift",
        "cpu_s": "CPU seconds since the run began",
        "wall_s": "seconds since the run began",
    },
    "updates": {
        "step": "rollout batch, from 1",
        "update": "optimizer step within the batch, 1 to M",
        "loss": "value of the policy loss",
        "grad_norm": "gradient norm before clipping",
        "lr": "learning rate",
        "clip_frac": "share of tokens whose gradient is clipped away",
        "clip_frac_sequences": "share of sequences with at least one clipped token",
        "log_w_sd": "standard deviation of the token log ratio, nats",
        "log_w_q": "quantiles .01 .05 .25 .5 .75 .95 .99 of the token log ratio, nats",
        "log_s_sd": "standard deviation of the sequence log ratio, nats a token",
        "log_s_q": "quantiles .01 .05 .25 .5 .75 .95 .99 of the sequence log ratio, nats a token",
        "k3": "mean of w - 1 - log w over tokens: estimates KL(old || new), nats a token",
    },
    "drift": {
        "step": "rollout batch, from 1",
        "update": "optimizer step within the batch, 1 to M",
        "tokens": "which tokens: rollout (this step's) or probe (fixed, the same for every arm)",
        "reference": "compared with: old (before this batch), previous (before this update), start (after cold start)",
        "n": "real tokens compared",
        "slot_change": "per layer: share of expert slots that changed",
        "set_change": "per layer: share of tokens whose expert set changed",
        "deviation": "share of (token, layer) pairs with 0, 1, ... K changed experts",
        "any_layer_change": "share of tokens with a changed set in some layer",
        "changed_layers": "share of tokens with 0, 1, ... L changed layers",
        "first_changed": "per layer: share of tokens whose first changed layer it is",
        "by_position": "slot change by tenth of the real tokens of a sequence",
    },
}
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


class StoreError(RuntimeError):
    """A results folder that cannot be used as asked; the message says what to do."""


# ------------------------------------------------------------------------------------------------- small file helpers
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


def _jsonable(value: Any) -> Any:
    """JSON has no NaN: a non-finite number becomes the string that Python's float() reads back."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    return value


def _unjson(value: Any) -> Any:
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    if isinstance(value, list):
        return [_unjson(item) for item in value]
    return value


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from `path`; StoreError names the file when it is damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise StoreError(f"{path} is damaged ({error}); delete the run's folder and run it again") from error
    if not isinstance(value, dict):
        raise StoreError(f"{path} holds {type(value).__name__} where an object belongs; delete the run's folder")
    return value


# ------------------------------------------------------------------------------------------------------------ identity
def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mapping -> {'a.b': leaf}."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{name}."))
        else:
            flat[name] = value
    return flat


def differing_keys(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Dotted keys at which two configs disagree, each with both values."""
    a, b = flatten(one), flatten(other)
    absent = "absent"
    return [
        f"{k} ({a.get(k, absent)} / {b.get(k, absent)})"
        for k in sorted(a.keys() | b.keys())
        if a.get(k, absent) != b.get(k, absent)
    ]


def run_folder(results_dir: str | Path, study: str, arm: str, knobs: Mapping[str, Any], seed: int) -> Path:
    """Where a run lives. `knobs` are the settings that a launch varied, besides arm and seed.

    Values are percent-encoded where they hold slashes and the like; a name that gets too long for a file system ends in
    a digest instead.
    """
    middle = ",".join(f"{key}={quote(str(value), safe='+-._ ')}" for key, value in sorted(knobs.items())) or "default"
    if len(middle) > LONGEST_NAME:
        middle = f"{middle[: LONGEST_NAME - 17]}~{hashlib.blake2b(middle.encode(), digest_size=8).hexdigest()}"
    for part in (study, arm):
        if "/" in part or part in ("", ".", ".."):
            raise StoreError(f"{part!r} cannot name a results folder; choose a name without slashes")
    return Path(results_dir) / study / arm / middle / f"seed_{seed}"


# ------------------------------------------------------------------------------------------------------------- writing
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
            text = "".join(json.dumps(_jsonable(row)) + "\n" for row in rows)
            write_atomic(self.folder / f"{table}.jsonl", text)
        for path in (self.folder / "traces").glob("step_*.parquet"):
            if int(path.stem.removeprefix("step_")) > step:
                path.unlink()

    def append(self, table: str, row: Mapping[str, Any]) -> None:
        """Add a row to steps, updates or drift. Unknown columns are refused: a typo must not become a metric."""
        unknown = row.keys() - LEGEND[table].keys()
        if unknown:
            raise StoreError(f"table {table} has no column {sorted(unknown)}; add it to store.LEGEND")
        with open(self.folder / f"{table}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(_jsonable(row)) + "\n")

    def describe(self, **facts: Any) -> None:
        """Write run.json: what this run ran on."""
        write_atomic(self.folder / "run.json", json.dumps({"format": FORMAT, **_jsonable(facts)}, indent=1))

    def describe_resumption(self, **facts: Any) -> None:
        """Add to run.json where and on what the run went on."""
        told = read_json(self.folder / "run.json")
        before = told.pop("resumed", [])
        self.describe(**told, resumed=[*before, facts])

    def status(self, state: str, **progress: Any) -> None:
        """Replace status.json."""
        row = {"state": state, "pid": os.getpid(), "wall_s": time.time() - self.started, **progress}
        write_atomic(self.folder / "status.json", json.dumps(_jsonable(row)))


@contextlib.contextmanager
def open_run(folder: Path, config: Mapping[str, Any]) -> Iterator[RunWriter | None]:
    """Claim a run's folder for writing.

    Yields None when the run is already finished under the same config. Marks the run failed, with the reason, when the
    block raises an Exception; an interrupt leaves it cut off, to be resumed. Raises StoreError when another process
    holds the run, or when the folder holds another config.
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
        state = _state(folder)
        if state in DONE:
            yield None
            return
        writer = RunWriter(folder)
        writer.resumes = state == "running" and writer.checkpoint.exists() and (folder / "run.json").exists()
        if not writer.resumes:
            for stale in [*(f"{t}.jsonl" for t in TABLES), "run.json", "status.json", writer.checkpoint.name]:
                (folder / stale).unlink(missing_ok=True)
            shutil.rmtree(folder / "traces", ignore_errors=True)
        write_atomic(folder / "config.yaml", yaml.safe_dump(dict(config), sort_keys=False))
        writer.status("running")
        try:
            yield writer
        except Exception as error:
            with contextlib.suppress(OSError):
                writer.status("failed", reason=f"{type(error).__name__}: {error}"[:2000])
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


def state_of(folder: Path) -> str:
    """missing, running, cut_off (says running, but nobody holds its lock), finished, diverged or failed."""
    state = _state(folder)
    return "cut_off" if state == "running" and not _locked(folder) else state


def _state(folder: Path) -> str:
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


# ------------------------------------------------------------------------------------------------------------- reading
@dataclasses.dataclass(frozen=True)
class Study:
    """A study read from disk. Every table carries the columns arm, knobs, seed; lists stay lists.

    runs: one row a run: arm, knobs, seed, state, reason, folder and all of run.json.
    steps, updates, drift: see LEGEND; runs that have not finished contribute the lines they have.
    """

    folder: Path
    runs: pd.DataFrame
    steps: pd.DataFrame
    updates: pd.DataFrame
    drift: pd.DataFrame


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
            {key: _unjson(value) if key not in ("tokens", "reference") else value for key, value in row.items()}
        )
    return rows


def read_study(folder: str | Path) -> Study:
    """Read all runs of a study. Raises StoreError for an empty or damaged study."""
    folder = Path(folder)
    paths = run_folders(folder)
    if not paths:
        raise StoreError(f"no runs below {folder}; run  python experiments/train.py study=<name>  first")
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
    return Study(
        folder,
        pd.DataFrame(runs),
        *(pd.DataFrame(tables[t], columns=["arm", "knobs", "seed", *LEGEND[t]]) for t in TABLES),
    )
