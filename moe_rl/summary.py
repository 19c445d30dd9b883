"""What a study says in one table, and which of its runs ended how. No torch.

A run that diverged, failed or is missing is counted and named, never averaged: means are over finished runs, and every
mean says how many those are.
"""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from moe_rl import stats
from moe_rl.store import Study, once_per_study

KNOWN_ARMS = ("grpo", "grpo_routing_replay", "gspo")
SEED = 0  # of the bootstrap: a table made again has the same numbers
UNFINISHED = ("running", "cut_off")


# ----------------------------------------------------------------------------------------------- what is in the study
def arms_of(study: Study) -> list[str]:
    """The study's arms: the three under comparison first, others by name."""
    present = set(study.runs["arm"])
    return [arm for arm in KNOWN_ARMS if arm in present] + sorted(present - set(KNOWN_ARMS))


def knobs_of(study: Study) -> list[str]:
    """The study's knob settings as folder names, numbers in numeric order."""

    def natural(knobs: str) -> list[tuple[int, float, str]]:
        parts = re.split(r"(?<=[=,])", knobs)
        return [(0, float(p.rstrip(",")), "") if is_number(p.rstrip(",")) else (1, 0.0, p) for p in parts]

    return sorted(set(study.runs["knobs"]), key=natural)


def is_number(text: str) -> bool:
    """Whether a knob's value, as it stands in a folder's name, is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def knob_pairs(knobs: str) -> dict[str, str]:
    """'optim.lr=0.1,updates=4' -> {'optim.lr': '0.1', 'updates': '4'}; {} for 'default'.

    A name that was too long for a file system ends in a digest, which then stands in its last value.
    """
    pairs = (pair.partition("=") for pair in knobs.split(","))
    return {key: value for key, equals, value in pairs if equals}


def knob_label(knobs: str, everywhere: Iterable[str]) -> str:
    """What tells a setting from the study's others: 'lr=0.1' of 'optim.lr=0.1,updates=4'; '' when there is one only.

    A key keeps its whole name when two keys of the study end alike.
    """
    every = [set(setting.split(",")) for setting in everywhere]
    shared = set.intersection(*every) if every else set()
    keys = {pair.partition("=")[0] for pairs in every for pair in pairs - shared}
    short = {key: key.rpartition(".")[2] for key in keys}
    clash = len(set(short.values())) < len(short)
    pairs = (pair.partition("=") for pair in knobs.split(",") if pair not in shared)
    return ", ".join((key if clash else short[key]) + equals + value for key, equals, value in pairs)


def runs_in(study: Study, arm: str, knobs: str, states: Iterable[str] | None = None) -> list[int]:
    """Seeds of an arm at a knob setting, sorted; with `states`, only runs in these."""
    wanted = None if states is None else set(states)
    runs = zip(*(study.runs[name] for name in ("arm", "knobs", "seed", "state")), strict=True)
    return sorted(int(seed) for a, k, seed, state in runs if (a, k) == (arm, knobs) and (not wanted or state in wanted))


def incidents(study: Study) -> list[str]:
    """One phrase for every run that is not finished, such as 'grpo seed 2 diverged at step 14'; [] when all went well.

    A seed counts as missing when another arm has it at the same knobs.
    """
    told: list[str] = []
    everywhere, empty = knobs_of(study), collections.defaultdict(list)
    for knobs, arm in itertools.product(everywhere, arms_of(study)):
        label = knob_label(knobs, everywhere)
        name = f"{arm} ({label})" if label else arm
        runs = study.runs[(study.runs["arm"] == arm) & (study.runs["knobs"] == knobs)].sort_values("seed")
        expected = set(study.runs[study.runs["knobs"] == knobs]["seed"])
        absent = sorted(expected - set(runs["seed"]))
        if runs.empty:
            empty[arm].append(label)
            continue
        told += [f"{name} seed {seed} is missing" for seed in absent]
        for run in runs.to_dict("records"):
            if run["state"] != "finished":
                verb = {"running": "is still running", "cut_off": "was cut off"}.get(run["state"], run["state"])
                step = last_step(study, run)
                told.append(f"{name} seed {run['seed']} {verb}" + (f" at step {step}" if step else ""))
    for arm, labels in empty.items():
        told.append(
            f"{arm} has no runs at {', '.join(labels) if len(labels) < 3 else f'{len(labels)} of the settings'}"
        )
    return told


def last_step(study: Study, run: dict[Any, Any]) -> int:
    """Where a run ended: the step that its status names, else the last one it wrote; 0 when it wrote none."""
    if pd.notna(run.get("step")):
        return int(run["step"])
    steps = _of(study.steps, run)["step"]
    return 0 if steps.empty else int(steps.max())


def _of(table: pd.DataFrame, run: dict[Any, Any]) -> pd.DataFrame:
    return table[(table["arm"] == run["arm"]) & (table["knobs"] == run["knobs"]) & (table["seed"] == run["seed"])]


# ------------------------------------------------------------------------------------------------- numbers of one run
def reward_measure(study: Study) -> str:
    """eval_reward when the study has any, else reward."""
    return "eval_reward" if study.steps["eval_reward"].notna().any() else "reward"


def final_and_best(steps: pd.DataFrame, measure: str) -> tuple[float, float]:
    """A run's final value (mean over the last 10 % of its steps, at least one) and its best; NaN when it has none.

    Where nothing was evaluated in these last steps, the final value is the last evaluation.
    """
    values = steps.sort_values("step").set_index("step")[measure].astype(float).dropna()
    if values.empty:
        return float("nan"), float("nan")
    last = int(steps["step"].max())
    tail = values[values.index > last - max(1, round(last / 10))]
    return float(tail.mean() if len(tail) else values.iloc[-1]), float(values.max())


def noise_text(study: Study) -> str:
    """The noise floor of all runs in a sentence, '' when none was measured."""
    found = [_highest(checks) for checks in study.runs.get("noise_floor", [])]
    worst = max((floor for floor in found if floor == floor), default=None)
    if worst is None:
        return ""
    return f" Noise floor (same weights, computed otherwise): {worst:.2%} of the slots at most."


def _highest(checks: Any) -> float:
    return max(checks.values(), default=float("nan")) if isinstance(checks, dict) else float("nan")


@once_per_study
def run_measures(study: Study) -> pd.DataFrame:
    """A row a run: arm, knobs, seed, state, final_reward, collapsed, slot_change, noise_floor, clip_frac, cpu_s.

    final_reward and collapsed (final below half of the run's own best) are NaN / False unless the run finished.
    slot_change: share of expert slots that change in one gradient update, on the step's rollouts, mean over updates and
    layers. noise_floor: the same share when only the way of computing changes, at worst. clip_frac: share of tokens
    clipped away, mean over updates.
    """
    measure = reward_measure(study)
    drift = study.drift[(study.drift["tokens"] == "rollout") & (study.drift["reference"] == "previous")]
    rows = []
    for run in study.runs.to_dict("records"):
        steps, finished = _of(study.steps, run), run["state"] == "finished"
        final, best = final_and_best(steps, measure) if finished else (float("nan"), float("nan"))
        slots = [float(np.mean(layers)) for layers in _of(drift, run)["slot_change"]]
        cpu = run.get("cpu_s")
        clipped = _of(study.updates, run)["clip_frac"].astype(float)
        rows.append(
            {
                **{key: run[key] for key in ("arm", "knobs", "seed", "state")},
                "final_reward": final,
                "collapsed": final < best / 2,
                "slot_change": float(np.nanmean(slots)) if np.isfinite(slots).any() else float("nan"),
                "noise_floor": _highest(run.get("noise_floor")),
                "clip_frac": float(clipped.mean()),
                "cpu_s": float(cpu if pd.notna(cpu) else steps["cpu_s"].max()),
            }
        )
    return study.exactly(pd.DataFrame(rows))


# ------------------------------------------------------------------------------------------------------------- tables
@once_per_study
def summary_table(study: Study) -> pd.DataFrame:
    """A row per arm and knob setting: how its runs ended and, over the finished ones, what they reached.

    Columns: arm, knobs, seeds, finished, diverged, failed, unfinished, missing, collapsed (of the finished); measure
    (the reward's column), final_reward with final_low and final_high (95 % t interval over seeds, NaN below 2), its
    interquartile mean iqm with iqm_low and iqm_high (95 % bootstrap interval, NaN below 10 finished runs),
    slot_change, noise_floor, clip_frac (shares) and cpu_s (CPU seconds a run), each the mean over finished runs.
    """
    runs, measure, rows = run_measures(study), reward_measure(study), []
    for knobs, arm in itertools.product(knobs_of(study), arms_of(study)):
        here = runs[(runs["arm"] == arm) & (runs["knobs"] == knobs)]
        if here.empty:
            continue
        done = here[here["state"] == "finished"]
        expected = set(runs[runs["knobs"] == knobs]["seed"])
        reached = done["final_reward"].dropna().to_list()
        nothing = stats.Estimate(float("nan"), float("nan"), float("nan"), 0)
        final = stats.mean_interval(reached) if reached else nothing
        enough = len(reached) >= stats.BOOTSTRAP_RUNS
        iqm = stats.iqm_bootstrap({arm: reached}, np.random.default_rng(SEED)) if enough else nothing
        rows.append(
            {
                "arm": arm,
                "knobs": knobs,
                "seeds": len(here),
                "finished": len(done),
                "diverged": int((here["state"] == "diverged").sum()),
                "failed": int((here["state"] == "failed").sum()),
                "unfinished": int(here["state"].isin(UNFINISHED).sum()),
                "missing": len(expected - set(here["seed"])),
                "collapsed": int(done["collapsed"].sum()),
                "measure": measure,
                "final_reward": final.value,
                "final_low": final.low,
                "final_high": final.high,
                "iqm": iqm.value,
                "iqm_low": iqm.low,
                "iqm_high": iqm.high,
                **{name: float(done[name].mean()) for name in ("slot_change", "noise_floor", "clip_frac", "cpu_s")},
            }
        )
    return pd.DataFrame(rows)
