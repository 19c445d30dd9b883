"""Entropy, gradient norm, response length and k3 against gradient updates, per arm.

k3 = mean of w - 1 - log w estimates KL(old || new). Gradient norm and k3 are means over a step's updates.
"""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moe_rl import summary
from moe_rl.figures import _curves, base
from moe_rl.store import Study

MEASURES = {
    "entropy": ("entropy of the next token", "nats"),
    "grad_norm": ("gradient norm before clipping", "norm"),
    "response_length": ("response length", "tokens"),
    "k3": ("k3, estimate of KL(old || new)", "nats a token"),
}
LOGARITHMIC = ("grad_norm", "k3")


def draw(study: Study) -> Figure | None:
    """A block of two by two panels a knob setting."""
    tables = {name: study.updates if name in LOGARITHMIC else study.steps for name in MEASURES}
    if all(table[name].dropna().empty for name, table in tables.items()):
        return None
    knobs = summary.knobs_of(study)
    figure, axes = base.blocks(len(knobs), 2, 2, width=5.2 if len(knobs) == 1 else 4.1, height=2.9)
    panels = iter(axes.flat)
    for setting in knobs:
        for name, (title, unit) in MEASURES.items():
            panel, drawn = next(panels), []
            for arm in summary.arms_of(study):
                rows = base.rows_of(study, tables[name], arm, setting)
                rows = base.at_step_ends(study, rows[rows["step"] > 0], arm, setting)  # the start is evaluated only
                by_seed = _curves.curves(rows, "updates", name)
                _curves.draw_arm(panel, study, arm, setting, by_seed)
                drawn += [values.to_numpy(dtype=float) for values in by_seed.values()]
            _scale(panel, name, np.concatenate([*drawn, np.zeros(0)]))
            panel.set_title(base.titled(title, summary.knob_label(setting, knobs)))
            panel.set_ylabel(unit)
            panel.set_xlabel("gradient updates (step · M)")
    title = "Training health: entropy, gradient norm, response length, k3"
    return base.finish(figure, study, title, _curves.READ_CURVES, base.arm_handles(study))


def _scale(panel: Axes, name: str, values: np.ndarray) -> None:
    positive = values[values > 0]
    if name in LOGARITHMIC and len(positive) == len(values) and len(values) and positive.max() > 20 * positive.min():
        panel.set_yscale("log")
        panel.set_ylim(positive.min() / 2, positive.max() * 2)
    else:
        _curves.fit_to_lines([panel])
