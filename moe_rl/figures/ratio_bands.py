"""Spread of the token log ratio log w and of the sequence log ratio log s against gradient updates, per arm.

Quantiles over the tokens (log w) and sequences (log s) of the last mini-batch of every step, where the policy is
furthest from the one that sampled: .01 to .99, .05 to .95, .25 to .75, median. log s is a mean over tokens.
"""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from moe_rl import summary
from moe_rl.figures import _curves, _looks, base
from moe_rl.store import QUANTILES, Study

RATIOS = {"log_w_q": "log w, tokens\n(nats)", "log_s_q": "log s, sequences\n(nats a token)"}
BANDS = ((0, 6, 0.18), (1, 5, 0.3), (2, 4, 0.55))


def draw(study: Study) -> Figure | None:
    """A block a knob setting. Rows: log w and log s. Columns: arms."""
    updates = study.updates[study.updates["log_w_q"].map(lambda q: isinstance(q, list))]
    if updates.empty:
        return None
    arms, knobs = summary.arms_of(study), summary.knobs_of(study)
    figure, axes = base.blocks(len(knobs), 2, len(arms), height=2.6, sharex="all", sharey="row")
    for block, setting in zip(axes, knobs, strict=True):
        for panels, (name, label) in zip(block, RATIOS.items(), strict=True):
            tops = [_panel(panels[column], study, updates, arm, setting, name) for column, arm in enumerate(arms)]
            _scale(panels, [top for top in tops if top.size])
            panels[0].set_ylabel(label)
        for column, arm in enumerate(arms):
            block[0, column].set_title(base.panel_title(study, arm, setting))
            block[0, column].tick_params(labelbottom=False)
            block[1, column].set_xlabel("gradient updates (step · M)")
    handles: list[Patch | Line2D] = [
        Patch(color="#444444", alpha=alpha, linewidth=0, label=f"{QUANTILES[low]:g} to {QUANTILES[high]:g}")
        for low, high, alpha in BANDS
    ]
    handles.append(Line2D([], [], color="black", linewidth=1.6, label="median"))
    text = (
        "Shaded: quantiles over tokens or sequences of a step's last mini-batch (u = M), mean over seeds. Dotted: the "
        ".01 and .99 quantiles of single seeds, whose spread is the uncertainty. After a divergence (dashed line): "
        "finished seeds only. 0: the likelihood has not moved."
    )
    title = "Importance ratios of tokens (w) and sequences (s) at the end of a batch"
    return base.finish(figure, study, title, text, handles)


def _panel(axes: Axes, study: Study, updates: pd.DataFrame, arm: str, knobs: str, name: str) -> np.ndarray:
    """Draws; returns the outermost quantiles' size, for the scale."""
    rows = base.rows_of(study, updates, arm, knobs)
    rows = rows[rows["update"] == base.fact(study, arm, knobs, "updates_per_step")]
    color, parts = _looks.look(arm).color, []
    for place in range(len(QUANTILES)):
        by_seed = _curves.curves(rows.assign(q=[quantiles[place] for quantiles in rows[name]]), "updates", "q")
        parts.append(_curves.mean_parts(by_seed, study, arm, knobs))
        if place in (0, len(QUANTILES) - 1):
            for values in by_seed.values():
                axes.plot(values.index, values, color=color, linewidth=0.8, linestyle=":")
    for part in (0, 1):
        q = [both[part]["mean"] for both in parts]
        for low, high, alpha in BANDS:
            _curves.draw_band(axes, q[low], q[high], color, alpha)
        axes.plot(q[3].index, q[3], color="black", linewidth=1.6, marker="_" if len(q[3]) == 1 else "")
    whole, rest = parts[0]
    if len(rest) and len(whole):
        axes.axvline(float(whole.index.max()), color="#333333", linestyle="--", linewidth=1.3)
    outer = [np.abs(both[part]["mean"].to_numpy()) for both in (parts[0], parts[-1]) for part in (0, 1)]
    return np.concatenate(outer)


def _scale(panels: np.ndarray, outer: list[np.ndarray]) -> None:
    """Linear, unless one arm's tails dwarf the usual ones: then linear up to the usual size and logarithmic beyond."""
    sizes = np.concatenate([*outer, np.zeros(1)])
    usual = float(np.median(sizes[sizes > 0])) if (sizes > 0).any() else 0.0
    if usual and sizes.max() > 20 * usual:
        for axes in panels:
            axes.set_yscale("symlog", linthresh=usual)
            axes.text(0.02, 0.03, f"logarithmic beyond ±{usual:.1g}", transform=axes.transAxes, fontsize=10)
