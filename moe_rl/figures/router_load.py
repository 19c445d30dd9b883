"""Router entropy, load imbalance and dead experts against gradient updates, per arm.

Entropy of the softmax of the router logits; MaxVio = max_e load_e / mean_e load_e - 1; experts that no token chose.
Means over layers after the last update of a step, on the probe (the same text for every arm) where there is one, else
on the step's rollouts.
"""

import numpy as np
from matplotlib.figure import Figure

from moe_rl import summary
from moe_rl.figures import _bars, _curves, base
from moe_rl.store import Study

MEASURES = {
    "router_entropy": ("router entropy", "nats"),
    "max_violation": ("load of the busiest expert (MaxVio)", "times mean load, minus 1"),
    "dead_experts": ("experts without a token", "share of experts"),
}


def draw(study: Study) -> Figure | None:
    """A block a knob setting. Columns: the measures that the study has."""
    drift = base.measured(study.drift[study.drift["reference"] == "old"], "max_violation")
    if drift.empty:
        return None
    text_of = "probe" if (drift["tokens"] == "probe").any() else "rollout"
    drift = drift[drift["tokens"] == text_of]
    shown = {name: how for name, how in MEASURES.items() if len(base.measured(drift, name))}
    drift = drift.assign(**{name: [float(np.mean(layers)) for layers in drift[name]] for name in shown})
    arms, knobs = summary.arms_of(study), summary.knobs_of(study)
    figure, axes = base.blocks(len(knobs), 1, len(shown), width=4.6)
    for panels, setting in zip(axes[:, 0], knobs, strict=True):
        for panel, (name, (title, unit)) in zip(panels, shown.items(), strict=True):
            for arm in arms:
                rows = base.rows_of(study, _bars.spanned(study, drift, arm, setting, "old"), arm, setting)
                if name == "dead_experts":
                    experts = base.fact(study, arm, setting, "num_experts")
                    rows = rows.assign(dead_experts=rows["dead_experts"] / max(1, experts))
                _curves.draw_arm(panel, study, arm, setting, _curves.curves(rows, "updates", name))
            panel.set_title(base.titled(title, summary.knob_label(setting, knobs)))
            panel.set_ylabel(unit)
            panel.set_xlabel("gradient updates (step · M)")
            _curves.fit_to_lines([panel])
            if name != "router_entropy":
                panel.set_ylim(bottom=0)
    text = (
        f"Mean over layers and tokens of the {text_of} ({base.between(drift['n'])} tokens: few leave experts idle "
        f"by chance). {_curves.READ_CURVES}"
    )
    title = "How the routers spread their tokens" + base.short_model(study)
    return base.finish(figure, study, title, text, base.arm_handles(study))
