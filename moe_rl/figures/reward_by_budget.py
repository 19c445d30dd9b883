"""Reward against what it cost: queries, response tokens and CPU seconds of training, per arm.

Evaluation reward where there is any, interpolated between the evaluations of a run; CPU seconds of sampling, the old
pass and the updates, without measuring drift and without evaluating.
"""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from moe_rl import summary
from moe_rl.figures import _curves, base
from moe_rl.measures import BUDGETS, reward_curves, run_numbers
from moe_rl.store import Study

POINTS = 40


def draw(study: Study) -> Figure | None:
    """A block a knob setting, one column a budget."""
    measure = summary.reward_measure(study)
    if study.steps[measure].dropna().empty:
        return None
    numbers, knobs, arms = run_numbers(study), summary.knobs_of(study), summary.arms_of(study)
    figure, axes = base.blocks(len(knobs), 1, len(BUDGETS), width=4.4, sharey="row")
    for column, (budget, told) in enumerate(BUDGETS.items()):
        curves = reward_curves(study, numbers, budget)
        for row, setting in enumerate(knobs):
            panel = axes[row, 0, column]
            for arm in arms:
                runs = numbers[(numbers["arm"] == arm) & (numbers["knobs"] == setting)]
                chosen = {int(runs["seed"][i]): curves[i] for i in runs.index if i in curves}
                _curves.draw_arm(panel, study, arm, setting, _on_one_grid(chosen))
            panel.xaxis.set_major_locator(MaxNLocator(4))
            panel.set_title(summary.knob_label(setting, knobs) or f"against {told}")
            panel.set_xlabel(told)
            panel.set_ylabel(measure.replace("_", " ") if column == 0 else "")
    for panels in axes:
        _curves.fit_to_lines(panels.flat)
    return base.finish(figure, study, "Reward against its cost", _curves.READ_CURVES, base.arm_handles(study))


def _on_one_grid(curves: dict[int, tuple[np.ndarray, np.ndarray]]) -> dict[int, pd.Series]:
    """The runs of an arm at the same budgets, each up to where it ends."""
    if not curves:
        return {}
    first, last = max(spent[0] for spent, _ in curves.values()), max(spent[-1] for spent, _ in curves.values())
    ends = [spent[-1] for spent, _ in curves.values() if spent[-1] >= first]
    grid = np.unique(np.concatenate([np.linspace(first, last, POINTS), ends]))
    reach = {seed: grid[grid <= spent[-1]] for seed, (spent, _) in curves.items() if spent[-1] >= first}
    return {seed: pd.Series(np.interp(xs, *curves[seed]), index=xs) for seed, xs in reach.items()}
