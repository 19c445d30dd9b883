"""Runs of a sweep, each in a process of its own: whatever kills one, the others finish."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.types import Quote, QuotedString
from hydra.types import HydraContext
from omegaconf import DictConfig, open_dict

from moe_rl.config import ConfigError, build, identity, knobs
from moe_rl.progress import Board
from moe_rl.store import DONE, check_config, read_json, run_folder, state_of

POLL_SECONDS = 0.5


@dataclasses.dataclass
class Run:
    """One run of a sweep: its overrides, its folder, and its process once it was started."""

    overrides: list[str]
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    failure: str = ""


def launch(context: HydraContext, config: DictConfig, job_overrides: Sequence[Sequence[str]]) -> list[list[str]]:
    """Run a sweep: at most launch.jobs runs at once, each in a process of its own with launch.threads threads.

    All configs are checked before the first run starts. Finished runs are skipped, others started (again). A run that
    dies, of whatever, is reported with its reason; the others go on; the exit code is then 1.
    """
    runs = [_prepare(context, config, list(overrides)) for overrides in job_overrides]
    _refuse_twins(runs)
    waiting = [run for run in runs if state_of(run.folder) not in DONE]
    with Board([run.folder for run in runs], config.launch.progress) as board:
        _run_all(waiting, config, board)
    failed = [run for run in runs if run.failure]
    for run in failed:
        print(f"failed: {' '.join(run.overrides)}: {run.failure} (log: {run.folder / 'log.txt'})", file=sys.stderr)
    if failed:
        raise SystemExit(1)
    return [run.overrides for run in runs]


def _prepare(context: HydraContext, master: DictConfig, overrides: list[str]) -> Run:
    config = context.config_loader.load_sweep_config(master, overrides)
    with open_dict(config):
        config.pop("hydra", None)
    try:
        experiment = build(config)
    except ConfigError as error:
        raise ConfigError(f"{' '.join(overrides)}: {error}") from error
    results, varied = config.launch.results_dir, knobs(config, overrides)
    folder = run_folder(results, experiment.study_name, experiment.label, varied, experiment.seed)
    check_config(folder, identity(config))
    return Run(overrides, folder)


def _refuse_twins(runs: list[Run]) -> None:
    seen: dict[Path, Run] = {}
    for run in runs:
        twin = seen.setdefault(run.folder, run)
        if twin is not run:
            one, other = " ".join(twin.overrides), " ".join(run.overrides)
            raise ConfigError(f"{one} and {other} are the same run; sweep over what differs")


def _run_all(waiting: list[Run], config: DictConfig, board: Board) -> None:
    running: list[Run] = []
    queue = list(waiting)
    try:
        while queue or running:
            while queue and len(running) < config.launch.jobs:
                running.append(_start(queue.pop(0), config))
            for run in [run for run in running if run.process is not None and run.process.poll() is not None]:
                running.remove(run)
                _judge(run)
            board.refresh()
            time.sleep(POLL_SECONDS)
    finally:
        for run in running:
            if run.process is not None:
                run.process.terminate()


def _start(run: Run, config: DictConfig) -> Run:
    run.folder.mkdir(parents=True, exist_ok=True)
    threads = str(config.launch.threads)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
    }
    where = [f"launch.{key!s}={_as_override(value)}" for key, value in config.launch.items() if key != "progress"]
    kept = [override for override in run.overrides if not override.startswith("launch.")]
    with open(run.folder / "log.txt", "ab") as log:
        run.process = subprocess.Popen(
            [sys.executable, sys.argv[0], *_sources(config), *kept, *where, "launch.progress=false", "hydra.mode=RUN"],
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment,
        )  # fmt: skip
    return run


def _as_override(value: object) -> str:
    """A value as Hydra reads it back: a path may hold spaces, commas or letters that its grammar lacks."""
    return QuotedString(value, Quote.single).with_quotes() if isinstance(value, str) else str(value)


def _sources(config: DictConfig) -> list[str]:
    """Where the launch read its YAML from, for its runs to read the same."""
    of_provider = {source.provider: source.path for source in config.hydra.runtime.config_sources}
    flags = ["--config-path", of_provider["main"], "--config-name", config.hydra.job.config_name]
    flags += ["--config-dir", of_provider["command-line"]] if "command-line" in of_provider else []
    return [*flags, *(x for x in config.hydra.overrides.hydra if x.startswith("hydra.searchpath="))]


def _judge(run: Run) -> None:
    assert run.process is not None
    code = run.process.returncode
    if code == 0:
        return
    died = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    status = read_json(run.folder / "status.json") if (run.folder / "status.json").exists() else {}
    reason = str(status.get("reason") or last_line(run.folder / "log.txt"))
    run.failure = f"{died}: {reason}"


def last_line(path: Path) -> str:
    """The last line of a log that says something."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []
    return next((line for line in reversed(lines) if line.strip()), "nothing was logged")
