"""Share of (token, layer) pairs of which d of the K experts changed, d = 0..K, on a log axis.

P(|E_old \\ E_new| = d) on the step's rollouts, replay off, mean over the run. Left since the previous update, right
since the start of the batch (after all M updates). Two unrelated routers: d is hypergeometric.
"""

from math import comb

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from moe_rl import summary
from moe_rl.figures import _bars, _looks, base
from moe_rl.figures._bars import SPANS
from moe_rl.store import Study


def draw(study: Study) -> Figure | None:
    """A block a knob setting. Columns: since the previous update, since the start of the batch."""
    drift = study.drift[study.drift["tokens"] == "rollout"]
    if drift.empty:
        return None
    arms, knobs = summary.arms_of(study), summary.knobs_of(study)
    shares = {
        (arm, setting, span): _bars.run_lists(
            study, _bars.spanned(study, drift, arm, setting, span), arm, setting, "deviation"
        )
        for arm in arms
        for setting in knobs
        for span in SPANS
    }
    floor = _bars.log_floor(group for found in shares.values() for group in found)
    figure, axes = base.blocks(len(knobs), 1, len(SPANS), width=5.6, sharey="all")
    for panels, setting in zip(axes[:, 0], knobs, strict=True):
        for panel, (span, title) in zip(panels, SPANS.items(), strict=True):
            width = 0.8 / len(arms)
            for number, arm in enumerate(arms):
                shift = (number - (len(arms) - 1) / 2) * width
                for d, group in enumerate(shares[arm, setting, span]):
                    _bars.draw_bar(panel, d + shift, 0.9 * width, _looks.look(arm), group, floor)
            _unrelated(panel, study, arms, setting)
            panel.set_title(base.titled(title, summary.knob_label(setting, knobs)))
            panel.set_yscale("log")
            panel.set_ylim(floor, 1.6)
            panel.set_xlabel("changed experts d of a token in a layer (of K)")
            panel.set_ylabel("pairs (token, layer), share" if span == "previous" else "")
            panel.xaxis.set_major_locator(MaxNLocator(8, integer=True))
            panel.grid(False, axis="x")
    chance = Line2D([], [], color="black", linewidth=2, linestyle=(0, (1, 1)), label="unrelated routers")
    handles = [*base.arm_handles(study), chance]
    title = "How many of a token's experts change in a layer" + base.short_model(study)
    return base.finish(figure, study, title, _bars.READ_BARS + summary.noise_text(study), handles)


def _unrelated(axes: Axes, study: Study, arms: list[str], knobs: str) -> None:
    """C(K, d) C(E-K, d) / C(E, K): K experts drawn blindly miss d of the K old ones."""
    found = {(base.fact(study, arm, knobs, "top_k"), base.fact(study, arm, knobs, "num_experts")) for arm in arms}
    for k, e in found - {(0, 0)}:
        for d in range(k + 1):
            chance = comb(k, d) * comb(e - k, d) / comb(e, k)
            axes.hlines(chance, d - 0.46, d + 0.46, color="black", linewidth=2, linestyles=(0, (1, 1)))
