"""Numbers of single runs, on which the claims are judged: a row a run, no torch.

A run that diverged counts here with a final reward of 0, so that an arm cannot look better by losing its worst seeds;
`summary` averages finished runs only. A run that failed or was cut off has no number: it says nothing about its arm.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt
import pandas as pd

from moe_rl import summary
from moe_rl.store import KEY, Study, once_per_study

UPDATE_MEANS = ("k3", "f2", "f5", "ess")
STEP_MEANS = ("mismatch_k3", "mismatch_f2", "mismatch_f5", "mismatch_ess", "routing_mismatch")
BUDGETS = {"queries": "queries", "tokens": "response tokens", "train_cpu_s": "CPU seconds of training"}
TRAINING = ("rollout_s", "old_pass_s", "update_s")  # without measuring drift and without evaluation


@once_per_study
def run_numbers(study: Study) -> pd.DataFrame:
    """A row a run, in the order of study.runs: all columns of `summary.run_measures`, and

    start: reward before the first update. best: highest reward. outcome: final reward, 0 if diverged, NaN if neither
    finished nor diverged. gain: outcome - start. failing: 1 if it diverged, collapsed (final below half of its own
    best) or ended below its start, else 0, NaN without outcome. set_change, any_layer_change: as slot_change, by one
    update. batch_slot_change: slot change over the M updates of a batch. late_slot_change: slot change by one update in
    the second half of the run. log_w_sd, log_s_sd: root mean square over updates 2 to M. flip_rms, weight_rms: root
    mean square over updates. response_length: mean. queries, tokens, train_cpu_s: spent in all. And means of
    UPDATE_MEANS over updates and STEP_MEANS over steps, NaN where a study has no such column.
    """
    measured, measure = summary.run_measures(study), summary.reward_measure(study)
    groups = {name: dict(iter(table.groupby(list(KEY)))) for name, table in _tables(study).items()}
    rows = []
    for run, told in zip(study.runs.to_dict("records"), measured.to_dict("records"), strict=True):
        parts = {name: by_run.get(tuple(run[k] for k in KEY)) for name, by_run in groups.items()}
        rows.append({**told, **_reward(parts["steps"], measure, told), **_spent(parts["steps"]), **_means(parts)})
    return study.exactly(pd.DataFrame(rows))


def _tables(study: Study) -> dict[str, pd.DataFrame]:
    drift = study.drift[study.drift["tokens"] == "rollout"]
    later = study.updates["update"].astype(float) > 1
    return {
        "steps": study.steps,
        "updates": study.updates,
        "later": study.updates[later],
        "previous": drift[drift["reference"] == "previous"],
        "old": drift[drift["reference"] == "old"],
    }


def _reward(steps: pd.DataFrame | None, measure: str, told: Mapping[str, object]) -> dict[str, float]:
    nothing = float("nan")
    final, state = float(str(told["final_reward"])), told["state"]
    values = pd.Series(dtype=float) if steps is None else steps.set_index("step")[measure].astype(float).sort_index()
    first = 0 if measure == "eval_reward" else 1  # the first batch is sampled before the first update
    start = float(values.get(first, nothing))
    outcome = final if state == "finished" else 0.0 if state == "diverged" else nothing
    failing = nothing if np.isnan(outcome) else float(state == "diverged" or bool(told["collapsed"]) or outcome < start)
    best = float(values.max()) if values.notna().any() else nothing
    return {"start": start, "best": best, "outcome": outcome, "gain": outcome - start, "failing": failing}


def _spent(steps: pd.DataFrame | None) -> dict[str, float]:
    if steps is None:
        return {name: float("nan") for name in ("response_length", *BUDGETS)}
    return {
        "response_length": float(steps["response_length"].astype(float).mean()),
        "queries": float(steps["queries"].max()),
        "tokens": float(steps["tokens"].max()),
        "train_cpu_s": float(_training_seconds(steps).sum()),
    }


def _training_seconds(steps: pd.DataFrame) -> pd.Series:
    return steps[list(TRAINING)].astype(float).fillna(0.0).sum(axis=1)


def _means(parts: Mapping[str, pd.DataFrame | None]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in ("set_change", "any_layer_change"):
        found[name] = _mean_of(parts["previous"], name)
    found["batch_slot_change"] = _mean_of(_last_update(parts["old"]), "slot_change")
    found["late_slot_change"] = _mean_of(_second_half(parts["previous"]), "slot_change")
    for name in ("log_w_sd", "log_s_sd"):
        found[name] = _root_mean_square(parts["later"], name)
    for name in ("flip_rms", "weight_rms"):
        found[name] = _root_mean_square(parts["old"], name)
    for name in UPDATE_MEANS:
        found[name] = _mean_of(parts["updates"], name)
    for name in STEP_MEANS:
        found[name] = _mean_of(parts["steps"], name)
    return found


def _values(rows: pd.DataFrame | None, name: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """A column's finite values, lists (one value a layer) as their mean."""
    if rows is None or name not in rows:
        return np.zeros(0)
    values = np.array([float(np.mean(cell)) if isinstance(cell, list) else float(cell) for cell in rows[name]])
    return values[np.isfinite(values)]


def _mean_of(rows: pd.DataFrame | None, name: str) -> float:
    values = _values(rows, name)
    return float(values.mean()) if len(values) else float("nan")


def _root_mean_square(rows: pd.DataFrame | None, name: str) -> float:
    values = _values(rows, name)
    return float(np.sqrt((values**2).mean())) if len(values) else float("nan")


def _last_update(rows: pd.DataFrame | None) -> pd.DataFrame | None:
    return None if rows is None else rows[rows["update"] == rows["update"].max()]


def _second_half(rows: pd.DataFrame | None) -> pd.DataFrame | None:
    return None if rows is None else rows[rows["step"] > rows["step"].max() / 2]


# -------------------------------------------------------------------------------------------------------- equal compute
Curve = tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]


def reward_curves(study: Study, numbers: pd.DataFrame, budget: str) -> dict[int, Curve]:
    """(spent, reward) at each evaluation of the runs among `numbers`, by their index; runs without any are left out.

    budget: a key of BUDGETS. The reward is that of `summary.reward_measure`.
    """
    measure = summary.reward_measure(study)
    by_run = dict(iter(study.steps.groupby(list(KEY))))
    curves = {}
    for place, run in numbers.iterrows():
        rows = by_run.get(tuple(run[name] for name in KEY))
        if rows is not None:
            rows = rows.sort_values("step")
            training = _training_seconds(rows).cumsum()
            spent = training if budget == "train_cpu_s" else rows[budget].astype(float).fillna(0.0)
            measured = rows[measure].astype(float).notna()
            if measured.any():
                curves[place] = (spent[measured].to_numpy(), rows[measure][measured].to_numpy(dtype=float))
    return curves


def reward_at_equal(study: Study, numbers: pd.DataFrame, budget: str) -> pd.Series:
    """Each run's reward when it had spent as much as the run among `numbers` that spent least in all.

    numbers: rows of `run_numbers`, the runs to be compared. budget: a key of BUDGETS. The reward is interpolated
    between a run's evaluations; a run that diverged counts 0, one without outcome NaN. Index: that of `numbers`.
    """
    curves = reward_curves(study, numbers[numbers["state"] == "finished"], budget)
    least = min((spent[-1] for spent, _ in curves.values()), default=0.0)
    reached = {place: float(np.interp(least, *curve)) for place, curve in curves.items()}
    return pd.Series({place: reached.get(place, outcome) for place, outcome in numbers["outcome"].items()}, dtype=float)


# ------------------------------------------------------------------------------------------------------------- frontier
def largest_surviving(numbers: pd.DataFrame, rates: Iterable[float]) -> pd.DataFrame:
    """Per arm, seed and other settings, the largest learning rate up to which no run failed.

    rates: the learning rate of each row of `numbers`, which may have a column `at` for the settings besides it.
    Columns: arm, at, seed, largest (0: not even the smallest survived) and tried (the largest that was run).
    """
    table = numbers.assign(rate=[float(rate) for rate in rates], at=numbers.get("at", ""))
    rows = []
    for (arm, at, seed), runs in table.dropna(subset=["failing"]).groupby(["arm", "at", "seed"]):
        rising = runs.sort_values("rate")
        alive = rising["failing"].astype(bool).cumsum() == 0
        largest = float(rising["rate"][alive].max()) if alive.any() else 0.0
        tried = float(rising["rate"].max())
        rows.append({"arm": arm, "at": at, "seed": seed, "largest": largest, "tried": tried})
    return pd.DataFrame(rows, columns=["arm", "at", "seed", "largest", "tried"])
