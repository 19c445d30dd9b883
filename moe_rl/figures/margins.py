"""How close to a tie the old router chose the tokens whose experts then changed, and those whose experts stayed.

Margin s_(K) - s_(K+1) of the scores that the router ranks, before the update; mean over tokens, layers and the updates
of a step, on the step's rollouts. Flips that come from near ties have far smaller margins than the tokens that stay.
"""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from moe_rl import summary
from moe_rl.figures import _curves, _looks, base
from moe_rl.figures._looks import Look
from moe_rl.store import Study

KINDS = {  # label, and the look in black
    "margin_kept": ("set stayed in this update", Look("black", "-", "o")),
    "margin_flipped": ("set changed in this update", Look("black", (0, (5, 1.6)), "s")),
}


def draw(study: Study) -> Figure | None:
    """A block a knob setting. Columns: arms."""
    drift = study.drift[(study.drift["tokens"] == "rollout") & (study.drift["reference"] == "previous")]
    drift = base.measured(drift, "margin")
    if drift.empty:
        return None
    drift = drift.assign(**{name: [_mean(layers) for layers in drift[name]] for name in KINDS})
    arms, knobs = summary.arms_of(study), summary.knobs_of(study)
    figure, axes = base.blocks(len(knobs), 1, len(arms), sharex="row", sharey="all")
    for row, setting in enumerate(knobs):
        for column, arm in enumerate(arms):
            _panel(axes[row, 0, column], study, base.rows_of(study, drift, arm, setting), arm, setting)
            axes[row, 0, column].set_yscale("log")
            axes[row, 0, column].set_ylabel("margin s_(K) - s_(K+1)\n(unit of the scores)" if column == 0 else "")
    handles = [Line2D([], [], linewidth=2.4, label=label, **look.as_line) for label, look in KINDS.values()]
    title = "How close to a tie the tokens were that changed their experts" + base.short_model(study)
    text = "The unit is that of the scores that a family's router ranks: a probability in most. " + _curves.READ_CURVES
    return base.finish(figure, study, title, text, handles)


def _mean(layers: list[float]) -> float:
    """Over the layers in which some token was of this kind; nan without any."""
    values = np.array(layers, dtype=float)
    return float(values[np.isfinite(values)].mean()) if np.isfinite(values).any() else float("nan")


def _panel(axes: Axes, study: Study, rows: pd.DataFrame, arm: str, knobs: str) -> None:
    rows = base.at_step_ends(study, rows, arm, knobs)
    for name, (_, look) in KINDS.items():
        by_seed = _curves.curves(rows.dropna(subset=[name]), "updates", name)
        _curves.draw_arm(axes, study, arm, knobs, by_seed, look._replace(color=_looks.look(arm).color))
    axes.set_title(base.panel_title(study, arm, knobs))
    axes.set_xlabel("gradient updates (step · M)")
