"""How the flip term and the weight term of the log ratio, and slot change, grow with the learning rate, per arm.

Flip term: log pi_new(own routing) - log pi_new(old routing). Weight term: log pi_new(old routing) - log pi_old. They
add up to log w; root mean square over response tokens at the end of a batch (u = M). Straight lines are power laws.
"""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from moe_rl import stats, summary
from moe_rl.figures import _bars, _knobs, base
from moe_rl.figures._bars import Array
from moe_rl.figures._looks import Look
from moe_rl.store import Study

KNOB = "optim.lr"
TERMS = {
    "flip_rms": ("flip term", Look("#BB5566", "-", "o")),
    "weight_rms": ("weight term", Look("#004488", (0, (5, 1.6)), "s")),
}
SLOTS = {"slot_change": ("slot change", Look("#555555", "-", "^"))}
Points = list[tuple[float, Array, Array]]


def draw(study: Study) -> Figure | None:
    """A block a setting of the other knobs. Rows: the two terms and slot change. Columns: arms."""
    drift = base.measured(study.drift[study.drift["tokens"] == "rollout"], "flip_rms")
    if drift.empty or KNOB not in _knobs.numeric_knobs(study):
        return None
    drift = drift.assign(slot_change=[float(np.mean(layers)) for layers in drift["slot_change"]])
    arms, scales = summary.arms_of(study), _knobs.scales(study, KNOB)
    figure, axes = base.blocks(len(scales), 2, len(arms), width=4.4, height=3.4, sharey="row")
    for block, scale in zip(axes, scales, strict=True):
        for column, arm in enumerate(arms):
            for panel, kinds in zip(block[:, column], (TERMS, SLOTS), strict=True):
                settings = [setting for _, setting in scale.points]
                panel.set_title(base.titled(f"{arm} ({base.counts(study, arm, settings)})", scale.shared))
                for name, (_, look) in kinds.items():
                    _line(panel, look, _points(study, drift, arm, scale, name))
                _knobs.set_scale(panel, f"{KNOB}, learning rate", [value for value, _ in scale.points])
                panel.set_yscale("log")
                panel.legend(loc="upper left", fontsize=10.5, handlelength=2.2, title="slope b", alignment="left")
        for panels in block:
            low, high = _knobs.drawn_span(panels)
            if low:  # all terms rise with the learning rate: room for the legend on the left
                panels[0].set_ylim(low / 2, 2 * high * (high / low) ** 0.35)
        block[0, 0].set_ylabel("root mean square (nats)")
        block[1, 0].set_ylabel("slot change over a batch\n(share of expert slots)")
    handles = [Line2D([], [], linewidth=2.2, label=label, **look.as_line) for label, look in (TERMS | SLOTS).values()]
    text = (
        f"{_knobs.READ_LINES} Slope b: exponent of lr^b, least squares on the logs of all n finished runs, with 95 % t "
        "interval; runs in which a term is exactly zero have no logarithm: left out and counted. Measured with replay "
        "off, whatever an arm trains with."
    )
    title = "What the log ratio grows by: changed experts or changed weights" + base.short_model(study)
    return base.finish(figure, study, title, text + summary.noise_text(study), handles)


def _points(study: Study, drift: pd.DataFrame, arm: str, scale: _knobs.Scale, name: str) -> Points:
    """At each learning rate the runs' values at the end of a batch: RMS over steps of a term, mean of slot change."""
    return [
        (
            value,
            *_bars.by_state(
                study, _bars.spanned(study, drift, arm, setting, "old"), arm, setting, name, 2 if name in TERMS else 1
            ),
        )
        for value, setting in scale.points
    ]


def _line(axes: Axes, look: Look, points: Points) -> None:
    shown = [(x, good[good > 0], bad[bad > 0]) for x, good, bad in points]
    zeros = sum(len(good) for _, good, _ in points) - sum(len(good) for _, good, _ in shown)
    x = np.concatenate([np.full(len(good), value) for value, good, _ in shown])
    y = np.concatenate([good for _, good, _ in shown])
    try:
        slope = stats.log_log_slope(x, y).slope
        told = f"{slope.value:.2f} [{slope.low:.2f}, {slope.high:.2f}], n = {slope.n}"
    except stats.StatsError:
        told = f"none, n = {len(x)}"
    _knobs.draw_line(axes, look, shown, label=told + (f" + {zeros} zeros" if zeros else ""))
