"""How far the likelihood moved for tokens with and without changed experts: mean |log w|, per arm.

Over a batch of M updates, log w = log pi_new - log pi_old, both with their own routing (replay off, whatever an arm
trains with). A token counts as changed when the position that predicts it chose other experts in some layer.
"""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from moe_rl import stats, summary
from moe_rl.figures import _bars, _looks, base
from moe_rl.store import Study

KINDS = {"log_w_unflipped": "none", "log_w_flipped": "some"}


def draw(study: Study) -> Figure | None:
    """A block a knob setting. Left: tokens without and with changed layers; right: by the number of changed layers."""
    drift = base.measured(study.drift[study.drift["tokens"] == "rollout"], "log_w_by_changed_layers")
    if drift.empty:
        return None
    arms, knobs = summary.arms_of(study), summary.knobs_of(study)
    figure, axes = base.blocks(len(knobs), 1, 2, width=5.6)
    for panels, setting in zip(axes[:, 0], knobs, strict=True):
        for number, arm in enumerate(arms):
            rows = _bars.spanned(study, drift, arm, setting, "old")
            _bars_of(panels[0], study, rows, arm, setting, number, len(arms))
            _line_of(panels[1], study, rows, arm, setting)
        label = summary.knob_label(setting, knobs)
        panels[0].set_xticks(range(len(KINDS)), list(KINDS.values()))
        panels[0].grid(False, axis="x")
        for panel, title in zip(panels, ("without and with changed layers", "by changed layers"), strict=True):
            panel.set_title(base.titled(title, label))
            panel.set_xlabel("changed layers of the predicting position (of L)")
            panel.set_ylabel("mean |log w| (nats)")
            panel.set_ylim(bottom=0)
        panels[1].xaxis.set_major_locator(MaxNLocator(8, integer=True))
    text = (
        "Mean over response tokens of the step's rollouts and over measured steps. Bars and lines: mean over finished "
        "seeds; vertical: 95 % t interval over seeds; points: single seeds (X: diverged, in no mean). Numbers of "
        "changed layers that fewer than half of the runs have are left out. A gap between the two bars shows that "
        "flips and ratios go together, not which causes which: see flips_over_lr."
    )
    title = "Moved likelihood of tokens with and without changed experts" + base.short_model(study)
    return base.finish(figure, study, title, text + summary.noise_text(study), base.arm_handles(study))


def _bars_of(axes: Axes, study: Study, rows: pd.DataFrame, arm: str, knobs: str, number: int, arms: int) -> None:
    width = 0.8 / arms
    for place, name in enumerate(KINDS):
        group = _bars.by_state(study, rows, arm, knobs, name)
        shift = (number - (arms - 1) / 2) * width
        _bars.draw_bar(axes, place + shift, 0.9 * width, _looks.look(arm), group, 0.0)


def _line_of(axes: Axes, study: Study, rows: pd.DataFrame, arm: str, knobs: str) -> None:
    """Mean over seeds at every number of changed layers that most of them have, with its interval as a band."""
    seeds = base.finished(study, arm, knobs)
    runs = [_mean_lists(part["log_w_by_changed_layers"]) for seed, part in rows.groupby("seed") if seed in seeds]
    if not runs:
        return
    found = []
    for number, values in enumerate(np.array(runs).T):
        values = values[np.isfinite(values)]
        if len(values) >= len(runs) / 2:
            mean = stats.mean_interval(values)
            found.append((number, mean.value, mean.low, mean.high))
    layers, means, low, high = zip(*found, strict=True)
    look = _looks.look(arm)
    axes.plot(layers, means, linewidth=2.2, markersize=6, **look.as_line)
    axes.fill_between(layers, low, high, color=look.color, alpha=0.13, linewidth=0)


def _mean_lists(lists: pd.Series) -> np.ndarray:
    """Mean over rows of every place of a list column, over those that have a value there; nan where none has."""
    values = np.array(lists.to_list(), dtype=float)
    counted = np.isfinite(values).sum(axis=0)
    return np.where(counted > 0, np.nansum(values, axis=0) / np.maximum(counted, 1), np.nan)
