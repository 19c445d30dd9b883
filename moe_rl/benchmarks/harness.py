"""What the harness costs over the bare loop, and how many runs an hour a sweep gets done.

Used by `experiments/bench.py harness`.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from moe_rl.advantage import group_advantages
from moe_rl.assembly import build_state
from moe_rl.benchmarks.loop import Cycles, experiment
from moe_rl.benchmarks.turns import one_thread, paired
from moe_rl.experiment import Experiment
from moe_rl.loop import derive_seed, sample_step, samples_exactly
from moe_rl.mini_batches import mini_batches, shortest_first, split_rows
from moe_rl.old_pass import old_pass
from moe_rl.store import read_study
from moe_rl.update import take_update

CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}
CHECKOUT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Harness:
    """The runs of `harness`: the defaults of conf/, but for these sizes. updates: M.

    steps: that are timed, of each side; one more before them is dropped. runs, run_steps: of the sweep, which is
    launched with launch.jobs=1 and again with launch.jobs=`jobs`. cold_start: its steps in each of these runs.
    """

    layers: int = 4
    prompts: int = 32
    completions: int = 8
    updates: int = 4
    steps: int = 16
    runs: int = 6
    run_steps: int = 8
    cold_start: int = 60
    jobs: int = 2

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            least = {"completions": 2, "jobs": 2, "cold_start": 0}.get(field.name, 1)
            if getattr(self, field.name) < least:
                raise ValueError(f"{field.name} is {getattr(self, field.name)}; set it to {least} or more")

    @property
    def overrides(self) -> list[str]:
        return [f"model.layers={self.layers}"] + [
            f"{name}={getattr(self, name)}" for name in ("prompts", "completions", "updates")
        ]


def harness(settings: Harness) -> list[dict[str, Any]]:
    """Rows of the loop against its bare calls, in CPU and in wall seconds a step, and of a sweep's runs an hour.

    bare: sampling, advantages, old pass, updates and drift. loop: `loop.train`, which does the same and writes tables
    and status, and a checkpoint after each step. They take turns, a step each, in one process, and take the same steps
    bit for bit; no evaluation, no cold start. seconds: median over steps; paired_ratio: the median over steps of the
    ratio to the bare one, paired_low to paired_high its 95 % interval.
    A sweep goes through experiments/train.py, with cold start, evaluation and all: wall_s from command to exit, start
    included; run_wall_s and run_cpu_s: what a run took itself, its mean; outside_s: wall_s less what the runs took,
    divided by the jobs: starting up, and waiting for the last run.
    """
    sweeps = [sweep(settings, jobs) for jobs in (1, settings.jobs)]
    return overhead(settings) + [row | {"speed_up": sweeps[0]["wall_s"] / row["wall_s"]} for row in sweeps]


def overhead(settings: Harness) -> list[dict[str, Any]]:
    with one_thread():
        seconds = _take_turns(settings)
    rows = []
    for clock, sides in seconds.items():
        for side, mine in sides.items():
            row: dict[str, Any] = {"what": f"step, {clock}", "mode": side, "seconds": statistics.median(mine)}
            rows.append(row | paired(mine, sides["bare"]))
    return rows


def _take_turns(settings: Harness) -> dict[str, dict[str, list[float]]]:
    """Seconds of each timed step, by clock and side."""
    own = ["eval_prompts=0", "cold_start.steps=0", f"steps={settings.steps + 1}"]
    e = experiment([*settings.overrides, *own])
    seconds: dict[str, dict[str, list[float]]] = {clock: {"bare": [], "loop": []} for clock in CLOCKS}
    with Cycles(e) as cycles, tempfile.TemporaryDirectory() as cache:
        sides: dict[str, Generator[Any, None, Any]] = {"bare": bare_loop(e, cache), "loop": cycles.steps}
        next(sides["bare"])
        for step in range(settings.steps + 1):
            for side in sorted(sides, reverse=bool(step % 2)):
                before = {clock: read() for clock, read in CLOCKS.items()}
                next(sides[side])
                for clock, read in CLOCKS.items():
                    seconds[clock][side].append(read() - before[clock])
    return {clock: {side: mine[1:] for side, mine in of_clock.items()} for clock, of_clock in seconds.items()}


def bare_loop(e: Experiment, cache_dir: str) -> Generator[list[dict[str, Any]], None, None]:
    """The calls of `loop.train` that do the work, and no others: nothing is written. Yields the updates of each step.

    Before the first one it yields nothing, when everything is built. For experiments without critic, preference model,
    corrections and evaluation.
    """
    state, _ = build_state(e, cache_dir)
    model, drift = state.model, state.drift
    yield []
    for step in range(1, e.steps + 1):
        rollouts, _ = sample_step(e, state, step)
        advantages = group_advantages(rollouts.training_rewards_B, rollouts.group_ids_B, e.arm.advantage)
        rows = split_rows(len(rollouts), e.updates, derive_seed(e.seed, "split", step))
        rows = shortest_first(rows, rollouts)
        batches = mini_batches(rollouts, advantages, rows, micro_batch=e.micro_batch, train_all=e.train_all)
        old_pass(model, batches, e.arm, exact=samples_exactly(e, state))
        drift.begin_step(step, rollouts)
        updates = []
        for number, batch in enumerate(batches, start=1):
            update = take_update(
                model, state.optimizer, state.schedule, batch, e.arm, max_grad_norm=e.optim.max_grad_norm
            )
            updates.append(update)
            drift.after_update(step, number)
        yield updates


def sweep(settings: Harness, jobs: int) -> dict[str, Any]:
    """A row of one sweep. OSError, with the last line that was said, when it fails."""
    seeds = ",".join(str(seed) for seed in range(settings.runs))
    train = CHECKOUT / "experiments" / "train.py"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")])}
    with tempfile.TemporaryDirectory() as home:
        own = [f"seed={seeds}", f"steps={settings.run_steps}", f"launch.jobs={jobs}", f"launch.results_dir={home}"]
        command = [sys.executable, str(train), "-m", *settings.overrides, *own, "study_name=sweep"]
        command += [f"cold_start.steps={settings.cold_start}", "launch.progress=false"]
        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        wall = time.perf_counter() - start
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines() or ["nothing was said"]
            raise ChildProcessError(f"a sweep with launch.jobs={jobs} ended with code {done.returncode}: {said[-1]}")
        last = read_study(Path(home) / "sweep").steps.groupby("seed")[["wall_s", "cpu_s"]].max()
    row = {"what": f"sweep of {settings.runs} runs", "mode": f"jobs={jobs}", "wall_s": wall}
    row |= {"runs_per_hour": 3600 * settings.runs / wall}
    row |= {"run_wall_s": float(last["wall_s"].mean()), "run_cpu_s": float(last["cpu_s"].mean())}
    return row | {"outside_s": wall - float(last["wall_s"].sum()) / jobs}
