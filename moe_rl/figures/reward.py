"""Reward against gradient updates, per arm.

Training reward on sampled rollouts and, where measured, on evaluation prompts; gradient updates = step · M.
"""

from matplotlib.figure import Figure

from moe_rl import summary
from moe_rl.figures import _curves, base
from moe_rl.store import Study

TITLES = {"reward": "training rollouts", "eval_reward": "evaluation prompts"}


def draw(study: Study) -> Figure | None:
    """A block a knob setting; left the training reward, right the evaluation reward if there is any."""
    measures = [name for name in TITLES if study.steps[name].notna().any()]
    if not measures:
        return None
    knobs = summary.knobs_of(study)
    figure, axes = base.blocks(len(knobs), 1, len(measures), width=5.2, sharey="row")
    for row, setting in enumerate(knobs):
        for column, measure in enumerate(measures):
            panel = axes[row, 0, column]
            for arm in summary.arms_of(study):
                rows = base.rows_of(study, study.steps, arm, setting)
                by_seed = _curves.curves(rows, "updates", measure, sparse=True)
                _curves.draw_arm(panel, study, arm, setting, by_seed)
            panel.set_title(base.titled(TITLES[measure], summary.knob_label(setting, knobs)))
            panel.set_xlabel("gradient updates (step · M)")
            panel.set_ylabel("mean reward per completion" if column == 0 else "")
        _curves.fit_to_lines(axes[row].flat)
    return base.finish(figure, study, "Reward during training", _curves.READ_CURVES, base.arm_handles(study))
