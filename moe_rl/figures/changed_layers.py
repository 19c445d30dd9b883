"""Share of tokens whose expert set changed in at most l of the L MoE layers: changed layers per token.

On the step's rollouts, replay off, mean over the run. Left since the previous update, right since the batch's start.
"""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from moe_rl import stats, summary
from moe_rl.figures import _bars, _looks, base
from moe_rl.figures._bars import SPANS
from moe_rl.store import Study


def draw(study: Study) -> Figure | None:
    """A block a knob setting. Columns: since the previous update, since the start of the batch."""
    drift = study.drift[study.drift["tokens"] == "rollout"]
    if drift.empty:
        return None
    arms, knobs = summary.arms_of(study), summary.knobs_of(study)
    figure, axes = base.blocks(len(knobs), 1, len(SPANS), width=5.6, sharey="all")
    for panels, setting in zip(axes[:, 0], knobs, strict=True):
        for panel, (span, title) in zip(panels, SPANS.items(), strict=True):
            for arm in arms:
                _steps(panel, study, _bars.spanned(study, drift, arm, setting, span), arm, setting, len(arms))
            panel.set_title(base.titled(title, summary.knob_label(setting, knobs)))
            panel.set_ylim(0, 1.03)
            panel.set_xlabel("MoE layers with a changed expert set (of L)")
            panel.set_ylabel("tokens with at most so many\nchanged layers (share)" if span == "previous" else "")
            panel.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    title = "In how many layers a token's routing changes" + base.short_model(study)
    text = (
        "Cumulative distribution over tokens, mean over updates and finished seeds; diverged runs are thin, in no "
        "mean. Bands: 95 % t interval over seeds. m: mean changed layers per token."
    )
    return base.finish(figure, study, title, text + summary.noise_text(study), base.arm_handles(study))


def _steps(axes: Axes, study: Study, rows: pd.DataFrame, arm: str, knobs: str, arms: int) -> None:
    groups = _bars.run_lists(study, rows, arm, knobs, "changed_layers")
    if not groups:
        return
    look = _looks.look(arm)
    good = np.cumsum([values for values, _ in groups], axis=0)
    bad = np.cumsum([values for _, values in groups], axis=0)
    layers = np.arange(len(groups))
    for run in bad.T:
        axes.step(layers, run, where="post", color=look.color, linewidth=0.8)
    if not good.size:
        return
    found = [stats.mean_interval(values) for values in good]
    axes.step(layers, [e.value for e in found], where="post", linewidth=2.4, markersize=6, **look.as_line)
    low, high = [e.low for e in found], [e.high for e in found]
    axes.fill_between(layers, low, high, step="post", color=look.color, alpha=0.13, linewidth=0)
    mean = float(np.mean(np.sum(1 - good, axis=0)))
    right = mean < len(layers) / 2  # where a distribution with this mean leaves room
    line = min(0.09, 0.88 / arms)  # of the panel's height
    place = (0.97 if right else 0.03, (0.06 if right else 0.97 - arms * line) + line * len(axes.texts))
    how: Any = {"ha": "right" if right else "left", "fontsize": 12 * line / 0.09}
    axes.text(*place, f"{arm}: m = {mean:.2g}", transform=axes.transAxes, **how)
