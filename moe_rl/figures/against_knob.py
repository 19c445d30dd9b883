"""Reward, drift, clipping and the spread of the ratios against the one number that the study varies, per arm.

Final reward of finished runs; slot change and any-layer change by one gradient update, on the step's rollouts, replay
off, with the noise floor; clip fraction, mean over updates; standard deviation of log w (tokens) and log s (sequences),
root mean square over the updates of a batch but the first.
"""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from moe_rl import summary
from moe_rl.figures import _bars, _knobs, _looks, base
from moe_rl.measures import run_numbers
from moe_rl.store import Study

MEASURES = {
    "outcome": ("final reward", "mean reward"),
    "slot_change": ("slot change by one update", "share of expert slots"),
    "any_layer_change": ("any-layer change by one update", "share of tokens"),
    "clip_frac": ("clipped tokens", "share of tokens"),
    "log_w_sd": ("spread of log w over tokens", "sd for u > 1 (nats)"),
    "log_s_sd": ("spread of log s over sequences", "sd for u > 1 (nats a token)"),
}


def draw(study: Study) -> Figure | None:
    """Two rows of three panels, for every combination of the knobs that are not numbers; None for two numeric knobs."""
    keys = _knobs.numeric_knobs(study)
    if len(keys) != 1:
        return None
    runs, arms, scales = run_numbers(study), summary.arms_of(study), _knobs.scales(study, keys[0])
    shown = [name for name in MEASURES if runs[name].notna().any()]
    columns = min(3, len(shown))
    rows = -(-len(shown) // columns)
    figure, axes = base.blocks(len(scales), rows, columns, width=4.5, height=3.1)
    for panels, scale in zip(axes, scales, strict=True):
        for panel, name in zip(panels.flat, shown, strict=False):
            for arm in arms:
                found = [(value, *_bars.run_values(runs, arm, setting, name)) for value, setting in scale.points]
                _knobs.draw_line(panel, _looks.look(arm), found)
            title, unit = MEASURES[name]
            panel.set_title(base.titled(title, scale.shared))
            panel.set_ylabel(unit)
            _knobs.set_scale(panel, keys[0], [value for value, _ in scale.points])
            _knobs.fit_y(panel, from_zero=name != "outcome")
            if name == "slot_change":
                _noise(panel, runs, scale)
        _bars.hide_unused(panels, len(shown))
    handles = base.arm_handles(study)
    if runs["noise_floor"].notna().any() and "slot_change" in shown:
        handles.append(Line2D([], [], color="black", linestyle=(0, (1, 1)), linewidth=2, label="noise floor of drift"))
    text = f"{_knobs.READ_LINES} The final reward of a diverged run is shown as 0."
    title = f"What changes with {keys[0]}" + base.short_model(study)
    return base.finish(figure, study, title, text + summary.noise_text(study), handles)


def _noise(axes: Axes, runs: pd.DataFrame, scale: _knobs.Scale) -> None:
    """The highest noise floor of any run at each setting."""
    floors = [(value, runs[runs["knobs"] == setting]["noise_floor"].max()) for value, setting in scale.points]
    floors = [(value, floor) for value, floor in floors if np.isfinite(floor)]
    axes.plot(*zip(*floors, strict=True) if floors else ([], []), color="black", linestyle=(0, (1, 1)), linewidth=2)
