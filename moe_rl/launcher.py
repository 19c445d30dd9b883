"""Runs of a sweep, each in a process of its own: whatever kills one, the others finish."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict

from moe_rl import cli
from moe_rl.config import identity, knobs, settle
from moe_rl.experiment import ConfigError
from moe_rl.progress import Board, counted
from moe_rl.store import DONE, StoreError, check_config, differing_keys, make_folder, read_status, run_folder, state_of

POLL_SECONDS = 0.5
ELSEWHERE = "is being written by another process; launch again when that has ended"


@dataclasses.dataclass
class Run:
    """One run of a sweep: its overrides, those of them that tell it from the sweep's others, its resolved config, what
    names its folder, the folder, its process once started."""

    overrides: list[str]
    name: str
    config: dict[str, Any]
    knobs: dict[str, Any]
    folder: Path
    process: ForkServerProcess | None = None
    failure: str = ""


def launch(context: HydraContext, config: DictConfig, job_overrides: Sequence[Sequence[str]]) -> list[list[str]]:
    """Run a sweep: at most launch.jobs runs at once, each in a process of its own with launch.threads threads.

    All configs are checked before the first run starts. Finished runs are skipped, others started (again). A run that
    dies, of whatever, is reported with its reason; the others go on; the exit code is then 1.
    """
    runs = prepare(context, config, job_overrides)
    waiting = [run for run in runs if state_of(run.folder) not in DONE]
    with Board([run.folder for run in runs], config.launch.progress) as board:
        _run_all(waiting, config, board)
    _report(runs)
    return [run.overrides for run in runs]


def delegate(
    launcher: Launcher, context: HydraContext, config: DictConfig, job_overrides: Sequence[Sequence[str]], first: int
) -> Sequence[JobReturn]:
    """Run a sweep by another of Hydra's launchers: configs checked before, finished runs left out, failed ones reported
    as in `launch`. What survives the death of a run is then up to that launcher. first: number of the first run."""
    runs = prepare(context, config, job_overrides)
    waiting = [run for run in runs if state_of(run.folder) not in DONE]
    print(counted(len(runs), len(runs) - len(waiting)), flush=True)
    if not waiting:
        return []
    try:
        with _environment(config.launch.threads):
            results = launcher.launch([run.overrides for run in waiting], initial_job_idx=first)
    except Exception as error:  # a run was killed, say, and the launcher has given up; which one, it may not know
        for run in waiting:
            state, reason = state_of(run.folder), read_status(run.folder).get("reason")
            run.failure = "" if state in DONE else f"{state}: {reason}" if reason else state
        lost = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        print(f"the launcher gave up on waiting, runs may still go on: {lost}", file=sys.stderr)
    else:
        for run, result in zip(waiting, results, strict=True):
            if result.status != JobStatus.COMPLETED:
                reason = result._return_value
                run.failure = f"{type(reason).__name__}: {reason}"
    _report(runs)
    return results


def _report(runs: list[Run]) -> None:
    failed = [run for run in runs if run.failure]
    for run in failed:
        log = run.folder / "log.txt"
        where = f" (log: {log})" if log.exists() else ""
        print(f"failed: {run.name}: {run.failure}{where}", file=sys.stderr)
    if failed:
        raise SystemExit(1)


def prepare(context: HydraContext, config: DictConfig, job_overrides: Sequence[Sequence[str]]) -> list[Run]:
    """The runs of a sweep. ConfigError or StoreError for settings that cannot be run, runs that are the same one, or a
    folder that holds another."""
    shared = set.intersection(*map(set, job_overrides)) if len(job_overrides) > 1 else set()
    runs = []
    for overrides in job_overrides:
        name = " ".join(override for override in overrides if override not in shared) or " ".join(overrides)
        runs.append(_prepare(context, config, list(overrides), name))
    _refuse_twins(runs)
    return runs


def _prepare(context: HydraContext, master: DictConfig, overrides: list[str], name: str) -> Run:
    config = context.config_loader.load_sweep_config(master, overrides)
    with open_dict(config):
        config.pop("hydra", None)
    try:
        experiment = settle(config, overrides)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
    results, varied = config.launch.results_dir, knobs(config, overrides)
    folder = run_folder(results, experiment.study_name, experiment.arm.label, varied, experiment.seed)
    check_config(folder, identity(config))
    with open_dict(config):
        config.launch.progress = False
    values = OmegaConf.to_container(config, resolve=True)
    assert isinstance(values, dict)
    return Run(overrides, name, {str(key): value for key, value in values.items()}, varied, folder)


def _refuse_twins(runs: list[Run]) -> None:
    seen: dict[Path, Run] = {}
    for run in runs:
        twin = seen.setdefault(run.folder, run)
        if twin is run:
            continue
        differ = differing_keys(*(identity(OmegaConf.create(one.config)) for one in (twin, run)))
        if differ:
            raise ConfigError(
                f"{twin.name} and {run.name} have one name in results and differ in {', '.join(differ[:3])}; arms that "
                "differ in settings alone are a sweep of one arm over these"
            )
        raise ConfigError(f"{twin.name} and {run.name} are the same run; sweep over what differs")


def _run_all(waiting: list[Run], config: DictConfig, board: Board) -> None:
    running: list[Run] = []
    queue = list(waiting)
    # Runs are forked from a server that has imported everything once: seconds of a core saved for each of them.
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["moe_rl.loop", "moe_rl.cli", "transformers.modeling_utils"])
    try:
        with _environment(config.launch.threads), _interrupted_by_sigterm():
            while queue or running:
                while queue and len(running) < config.launch.jobs:
                    run = queue.pop(0)
                    if _may_start(run):
                        log = run.folder / "log.txt"
                        run.process = processes.Process(target=_live, args=(run.config, run.knobs, log))
                        run.process.start()
                        running.append(run)
                for run in [run for run in running if run.process is not None and not run.process.is_alive()]:
                    running.remove(run)
                    _note_failure(run)
                board.refresh()
                time.sleep(POLL_SECONDS)
    finally:
        for run in running:
            if run.process is not None:
                run.process.terminate()


def _may_start(run: Run) -> bool:
    """Whether a run is to be started now; another launch may have begun or finished it since this one was prepared."""
    state = state_of(run.folder)
    try:
        make_folder(run.folder)
    except StoreError as error:
        run.failure = str(error)
    if state == "running":
        run.failure = ELSEWHERE
    return state not in DONE and not run.failure


@contextlib.contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """A cluster ends a job with SIGTERM: the runs must not go on as orphans."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _environment(threads: int) -> Iterator[None]:
    """What the runs find in their environment; it is read when they import torch.

    They import from where this process did: a fork server, or submitit, would look into the present folder first.
    """
    own = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    own |= {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path), "PYTHONSAFEPATH": "1"}
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _live(values: dict[str, Any], varied: dict[str, Any], log: Path) -> None:
    """One run, in its own process: all that it says goes to `log`."""
    with open(log, "ab") as file, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        cli.run_one(OmegaConf.create(values), varied)
    except cli.USER_ERRORS as error:
        cli.fail(str(error))


def _note_failure(run: Run) -> None:
    """Note why a run that has ended went wrong, if it did."""
    assert run.process is not None
    code, state = run.process.exitcode, state_of(run.folder)
    if code == 0 or state in DONE:
        return
    if state == "running":  # of ours there is no process left
        run.failure = ELSEWHERE
        return
    died = "lost" if code is None else f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    status = read_status(run.folder)
    reason = str(status.get("reason") or last_line(run.folder / "log.txt"))
    run.failure = f"{died}: {reason}"


def last_line(path: Path) -> str:
    """The last line of a log that says something; of an error's message, its first line."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []
    return next((line for line in reversed(lines) if line.strip() and not line[0].isspace()), "nothing was logged")
