"""How often two experts are active for the same token, over what independent experts of the same load would share.

Of the rollouts' routing after the last update of the last step that a run wrote traces of (drift.trace_every), replay
off. Experts i and j of N tokens share N_ij; independent ones share in proportion to N_i N_j.
"""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure

from moe_rl import expert_pairs, stats, summary
from moe_rl.figures import _bars, _maps, base
from moe_rl.store import Study
from moe_rl.store.traces import read_traces

PANELS = 12  # arms, settings and layers: with many of the former, fewer layers are shown
TOP = 3.0  # where the colours end


def draw(study: Study) -> Figure | None:
    """A panel an arm, setting and layer; None where no finished run has traces of a token with two experts."""
    found = {
        (arm, knobs): runs
        for knobs in summary.knobs_of(study)
        for arm in summary.arms_of(study)
        if (runs := _routing(study, arm, knobs))
    }
    if not found:
        return None
    layers = max(1, min(3, PANELS // len(found), *(ids.shape[1] for runs in found.values() for ids, _ in runs)))
    columns = {1: 4, 2: 4, 3: 3}[layers]
    panels = layers * len(found)
    rows = -(-panels // columns)
    figure, axes = base.page(rows, min(columns, panels), width=3.7, height=3.5)
    for number, ((arm, knobs), runs) in enumerate(found.items()):
        for panel, place in zip(axes.flat[number * layers :], _places(runs[0][0].shape[1], layers), strict=False):
            mesh = _panel(panel, runs, place)
            panel.set_title(f"{base.panel_title(study, arm, knobs)}\n{panel.get_title()}")
    _bars.hide_unused(axes, panels)
    bar = figure.colorbar(mesh, ax=axes, label="shared tokens, as a multiple of independent experts'", extend="max",
                          aspect=30, pad=0.015)  # fmt: skip
    bar.ax.axhline(1, color="white", linewidth=2)
    tokens = [len(ids) for runs in found.values() for ids, _ in runs]
    text = (
        "Colours: the first seed with traces; 1: independent. Off: share of the pairs of active experts that "
        "independence would place elsewhere, mean and 95 % t interval over finished seeds with traces; by chance: the "
        f"same for as many pairs drawn from independent experts. Tokens a run: {base.between(tokens)}. Hatched: the "
        "diagonal, and experts without tokens."
    )
    return base.finish(figure, study, "Experts that are active together" + base.short_model(study), text)


def _places(layers: int, shown: int) -> list[int]:
    """The first to the last layer in equal steps; the middle one alone."""
    return [(layers - 1) // 2] if shown == 1 else [round(place) for place in np.linspace(0, layers - 1, shown)]


def _routing(study: Study, arm: str, knobs: str) -> list[tuple[np.ndarray, int]]:
    """(ids_NLK of known tokens, E) of each finished run that has traces, by seed."""
    runs = study.runs[(study.runs["arm"] == arm) & (study.runs["knobs"] == knobs) & (study.runs["state"] == "finished")]
    found = []
    for folder in runs.sort_values("seed")["folder"] if "folder" in runs else []:
        files = sorted((Path(folder) / "traces").glob("step_*.parquet"))
        records = list(read_traces(files[-1], source="new")) if files else []
        last = max((record.update for record in records), default=0)
        ids = [record.expert_ids_TLK[record.valid_T] for record in records if record.update == last]
        if ids and records[0].header.top_k > 1:
            found.append((np.concatenate(ids), records[0].header.num_experts))
    return found


def _panel(panel: Axes, runs: list[tuple[np.ndarray, int]], layer: int) -> QuadMesh:
    """The first run's map of a layer, and in the title how far all runs are from independence."""
    counts = [expert_pairs.pair_counts(ids[:, [layer]], experts) for ids, experts in runs]
    generator = np.random.default_rng(0)  # a figure drawn again is the same
    off = stats.mean_interval([float(expert_pairs.off_independence(each)[0]) for each in counts])
    by_chance = np.mean([expert_pairs.off_by_chance(each, generator)[0] for each in counts])
    mesh = _maps.draw_map(panel, expert_pairs.against_independence(counts[0])[0], TOP, first_row=0, ticks=5)
    panel.invert_yaxis()
    panel.patch.set(facecolor="white", edgecolor="#999999", hatch="////")
    interval = f" [{off.low:.2f}, {off.high:.2f}]" if off.n > 1 else ""
    panel.set(xlabel="expert j", ylabel="expert i")
    panel.set_title(f"layer {layer + 1}: off {off.value:.2f}{interval}\nby chance {by_chance:.2f}")
    return mesh
