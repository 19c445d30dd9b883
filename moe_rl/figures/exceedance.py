"""F(tau): share of tokens whose importance ratio leaves [1/tau, tau], per arm, on a log axis.

Of w = new / old policy in the last mini-batch of a step (u = M), where the policy is furthest from the one that
sampled; and, where the sampling engine differs from the trainer, of c = old policy / sampler. Mean over the run.
"""

from matplotlib.figure import Figure

from moe_rl import summary
from moe_rl.figures import _bars, _looks, base
from moe_rl.store import Study

SHARES = {
    "f2": "policies, tau = 2",
    "f5": "policies, tau = 5",
    "mismatch_f2": "engines, tau = 2",
    "mismatch_f5": "engines, tau = 5",
}


def draw(study: Study) -> Figure | None:
    """A block a knob setting. Columns: the two bounds, for the policies and, if any token leaves them, the engines."""
    if study.updates["f2"].isna().all():
        return None
    engines_differ = bool((study.steps["mismatch_f2"].astype(float) > 0).any())
    shown = [name for name in SHARES if engines_differ or not name.startswith("mismatch")]
    arms, knobs = summary.arms_of(study), summary.knobs_of(study)
    bars = {
        (arm, setting, name): _shares(study, arm, setting, name) for arm in arms for setting in knobs for name in shown
    }
    floor = _bars.log_floor(bars.values())
    figure, axes = base.blocks(len(knobs), 1, len(shown), width=5.2 if len(shown) == 2 else 4.2, sharey="all")
    for panels, setting in zip(axes[:, 0], knobs, strict=True):
        for panel, name in zip(panels, shown, strict=True):
            for place, arm in enumerate(arms):
                _bars.draw_bar(panel, place, 0.62, _looks.look(arm), bars[arm, setting, name], floor)
            panel.set_yscale("log")
            panel.set_ylim(floor, 1.5)
            _bars.arm_axis(panel, arms)
            panel.set_title(base.titled(SHARES[name], summary.knob_label(setting, knobs)))
        panels[0].set_ylabel("F(tau) (share of tokens)")
    text = "Policies: w = new / old policy, at u = M. Engines: c = old policy / sampler. "
    title = "Tokens whose importance ratio leaves [1/tau, tau]"
    return base.finish(figure, study, title, text + _bars.READ_BARS, base.arm_handles(study))


def _shares(study: Study, arm: str, knobs: str, name: str) -> _bars.Group:
    rows = base.rows_of(study, study.steps if name.startswith("mismatch") else study.updates, arm, knobs)
    if "update" in rows:
        rows = rows[rows["update"] == base.fact(study, arm, knobs, "updates_per_step")]
    return _bars.by_state(study, rows, arm, knobs, name)
