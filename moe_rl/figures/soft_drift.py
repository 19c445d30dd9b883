"""How far the routers' distributions move: KL and JS divergence and router shift ratio against updates, per arm.

Of the softmax of the router logits, on the step's rollouts, replay off; KL and JS are means over layers and tokens.
Router shift ratio: exp(-mean over layers and old experts of |change of log p|), mean over tokens; 1 is no change.
"""

import itertools

import numpy as np
from matplotlib.figure import Figure

from moe_rl import summary
from moe_rl.figures import _bars, _curves, base
from moe_rl.figures._bars import SPANS
from moe_rl.store import Study

MEASURES = {
    "kl": ("KL(old || new)", "nats a token and layer"),
    "js": ("JS divergence", "nats a token and layer"),
    "router_shift": ("router shift ratio", "ratio, 1 is no change"),
}


def draw(study: Study) -> Figure | None:
    """A block a knob setting. Rows: by one update and over a batch. Columns: the three measures."""
    drift = base.measured(study.drift[study.drift["tokens"] == "rollout"], "kl")
    if drift.empty:
        return None
    drift = drift.assign(**{name: [float(np.mean(layers)) for layers in drift[name]] for name in MEASURES})
    knobs = summary.knobs_of(study)
    figure, axes = base.blocks(len(knobs), len(SPANS), len(MEASURES), width=4.4, height=2.7)
    for panels, (setting, span) in zip(axes.reshape(-1, len(MEASURES)), itertools.product(knobs, SPANS), strict=True):
        for panel, (name, (title, unit)) in zip(panels, MEASURES.items(), strict=True):
            for arm in summary.arms_of(study):
                rows = base.at_step_ends(study, _bars.spanned(study, drift, arm, setting, span), arm, setting)
                _curves.draw_arm(panel, study, arm, setting, _curves.curves(rows, "updates", name))
            label = summary.knob_label(setting, knobs)
            panel.set_title(base.titled(title, f"{SPANS[span]}, {label}" if label else SPANS[span]))
            panel.set_ylabel(unit)
            panel.set_xlabel("gradient updates (step · M)")
            _curves.fit_to_lines([panel])
            if name == "router_shift":
                panel.set_ylim(top=min(1.0, panel.get_ylim()[1]))
            else:
                panel.set_ylim(bottom=0)
    title = "How far the routers' distributions move" + base.short_model(study)
    text = f"By one update: mean over a step's updates. {_curves.READ_CURVES}"
    return base.finish(figure, study, title, text, base.arm_handles(study))
