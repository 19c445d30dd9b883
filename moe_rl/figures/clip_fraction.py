"""Share of tokens whose gradient is clipped away, per arm, on a log axis.

Mean over all gradient updates of a run, then over runs; a token counts as clipped when its sequence is (gspo).
"""

from matplotlib.figure import Figure

from moe_rl import summary
from moe_rl.figures import _bars, _looks, base
from moe_rl.store import Study


def draw(study: Study) -> Figure | None:
    """One panel a knob setting, one bar an arm."""
    if study.updates["clip_frac"].dropna().empty:
        return None
    measures, knobs, arms = summary.run_measures(study), summary.knobs_of(study), summary.arms_of(study)
    columns = min(3, len(knobs))
    figure, axes = base.page(-(-len(knobs) // columns), columns, width=max(4.6, 0.62 * len(arms)), sharey=True)
    bars = {(arm, setting): _bars.run_values(measures, arm, setting, "clip_frac") for arm in arms for setting in knobs}
    floor = _bars.log_floor(bars.values())
    for panel, setting in zip(axes.flat, knobs, strict=False):
        for place, arm in enumerate(arms):
            _bars.draw_bar(panel, place, 0.62, _looks.look(arm), bars[arm, setting], floor)
        panel.set_yscale("log")
        panel.set_ylim(floor, 1.5)
        _bars.arm_axis(panel, arms)
        panel.set_ylabel("clipped tokens (share)")
        panel.set_title(summary.knob_label(setting, knobs) or "all gradient updates")
    _bars.hide_unused(axes, len(knobs))
    return base.finish(figure, study, "Tokens whose gradient is clipped away", _bars.READ_BARS, base.arm_handles(study))
