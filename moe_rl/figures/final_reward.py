"""Where each arm ended: final reward of every seed, with mean and interval, arms from best to worst.

Dashed: mean reward before the first update, the same start for every arm. A diverged run counts as 0.
"""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moe_rl import measures, stats, summary
from moe_rl.figures import _bars, _looks, base
from moe_rl.store import Study

ROW = 0.34  # inches an arm


def draw(study: Study) -> Figure | None:
    """One panel a knob setting, one row an arm."""
    numbers = measures.run_numbers(study)
    knobs, arms = summary.knobs_of(study), summary.arms_of(study)
    if numbers["outcome"].dropna().empty:
        return None
    columns = min(2, len(knobs))
    rows = -(-len(knobs) // columns)
    figure, axes = base.page(rows, columns, width=6.4, height=0.9 + ROW * len(arms), sharex=True)
    for panel, setting in zip(axes.flat, knobs, strict=False):
        here = numbers[numbers["knobs"] == setting].dropna(subset=["outcome"])
        outcomes = {arm: here[here["arm"] == arm] for arm in arms}
        order = sorted((arm for arm in arms if len(outcomes[arm])), key=lambda arm: outcomes[arm]["outcome"].mean())
        for place, arm in enumerate(order):
            _row(
                panel,
                place,
                arm,
                outcomes[arm]["outcome"].to_numpy(),
                (outcomes[arm]["state"] == "diverged").to_numpy(),
            )
        panel.axvline(here["start"].mean(), color="black", linestyle=(0, (4, 2)), linewidth=1.2, zorder=1)
        panel.set_yticks(range(len(order)), order)
        panel.set_ylim(-0.7, len(order) - 0.3)
        panel.set_ylabel("arm, best above")
        panel.set_xlabel(f"final {summary.reward_measure(study).replace('_', ' ')}")
        panel.set_title(summary.knob_label(setting, knobs) or "all seeds")
        panel.grid(False, axis="y")
    _bars.hide_unused(axes, len(knobs))
    text = (
        "Points: single seeds (X: diverged, counted as 0). Thick mark: mean; line: 95 % t interval over seeds. Dashed: "
        "mean reward before the first update. Seeds are paired: intervals that overlap can hide a difference."
    )
    return base.finish(figure, study, "Where each arm ended" + base.short_model(study), text, base.arm_handles(study))


def _row(panel: Axes, place: int, arm: str, values: np.ndarray, diverged: np.ndarray) -> None:
    look, mean = _looks.look(arm), stats.mean_interval(values)
    if mean.n > 1:
        panel.hlines(place, mean.low, mean.high, color=look.color, linewidth=3, alpha=0.55, zorder=2)
    for chosen, marker in ((~diverged, look.marker), (diverged, "X")):
        panel.scatter(values[chosen], np.full(chosen.sum(), place), s=34, marker=marker, color="white",
                      edgecolor=look.color, linewidth=1.1, zorder=3)  # fmt: skip
    panel.plot([mean.value] * 2, [place - 0.3, place + 0.3], color=look.color, linewidth=3.4, zorder=4)
