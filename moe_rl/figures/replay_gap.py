"""What replayed routing hides: expected reward with natural routing minus with replayed routing, per arm.

Of the policy after each update, on the step's rollouts, weighted to it off-policy: reward with its own routing minus
reward with the routing of the policy that sampled. Where an arm trains with replay, below 0 means that it lost reward
when it is used as it is.
"""

from matplotlib.figure import Figure

from moe_rl import summary
from moe_rl.figures import _bars, _curves, base
from moe_rl.figures._bars import SPANS
from moe_rl.store import Study


def draw(study: Study) -> Figure | None:
    """A panel a knob setting. Over a batch of M updates."""
    drift = base.measured(study.drift[study.drift["tokens"] == "rollout"], "replay_gap")
    if drift.empty:
        return None
    knobs = summary.knobs_of(study)
    figure, axes = base.blocks(len(knobs), 1, 1, width=8.0)
    for panel, setting in zip(axes.flat, knobs, strict=True):
        for arm in summary.arms_of(study):
            rows = base.at_step_ends(study, _bars.spanned(study, drift, arm, setting, "old"), arm, setting)
            _curves.draw_arm(panel, study, arm, setting, _curves.curves(rows, "updates", "replay_gap", sparse=True))
        panel.axhline(0, color="black", linewidth=1)
        panel.set_title(base.titled(SPANS["old"], summary.knob_label(setting, knobs)))
        panel.set_ylabel("reward, natural - replayed")
        panel.set_xlabel("gradient updates (step · M)")
        _curves.fit_to_lines([panel])
    title = "What replayed routing hides" + base.short_model(study)
    text = f"Expected reward with natural minus with replayed routing, importance-weighted. {_curves.READ_CURVES}"
    return base.finish(figure, study, title, text, base.arm_handles(study))
