"""Every figure file meets the contract on every kind of study; how runs ended is told and never averaged away."""

import functools
import itertools
import os
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from synthetic import make_study

from moe_rl import figures, store, summary
from moe_rl.figures import _bars, _curves, _looks, base

SMALL = {"steps": 5, "updates": 2, "layers": 3, "top_k": 2, "experts": 8, "traces": True}
TROUBLE = {"missing": [("gspo", 1)], "diverged": [("grpo", 2)], "failed": [("grpo_routing_replay", 0)]}
STUDIES = {
    "complete": {},
    "troubled": TROUBLE,
    "knobs": {"knobs": [{"optim.lr": 1e-4}, {"optim.lr": 4e-4}], "seeds": (0, 1), "steps": 3},
    "troubled_lr": {"knobs": [{"optim.lr": lr} for lr in (1e-4, 2e-4, 1e-3)], "steps": 3, **TROUBLE},
    "troubled_grid": {
        "knobs": [{"optim.lr": lr, "updates": m, "task.digits": 5} for lr in (1e-4, 2e-4) for m in (2, 8)],
        "steps": 3,
        **TROUBLE,
    },
    "dense": {"dense": True},
    "edge": {
        "arms": ("gspo", "sapo", "cispo_wide"),
        "seeds": (0,),
        "diverged": [("sapo", 0)],
        "failed": [("cispo_wide", 0)],
        "steps": 1,
        "updates": 1,
    },
}
SCRIPT = Path(__file__).parents[1] / "experiments" / "make_figures.py"
DRIFT = {
    *("drift_by_update", "drift_by_layer", "deviation_histogram", "changed_layers", "soft_drift", "margins"),
    "co_activation",
    "replay_gap",
    *("router_load", "drift_and_ratio"),
}
KNOBS = {  # figure -> the studies that vary what it is about
    "flips_over_lr": {"knobs", "troubled_lr", "troubled_grid"},
    "against_knob": {"knobs", "troubled_lr"},
    "knob_heat_map": {"troubled_grid"},
}


def troubled(name):
    """The study with a missing, a diverged and a failed run that a figure can be drawn of, and one setting's label."""
    kind = {"flips_over_lr": "troubled_lr", "against_knob": "troubled_lr", "knob_heat_map": "troubled_grid"}.get(name)
    called = {"troubled_lr": " (lr=0.0001)", "troubled_grid": " (lr=0.0002, updates=8)"}.get(kind, "")
    return kind or "troubled", called


@pytest.fixture(scope="session")
def studies(tmp_path_factory):
    results = tmp_path_factory.mktemp("results")
    made = {name: make_study(results, name, **{**SMALL, **how}) for name, how in STUDIES.items()}
    return {name: store.read_study(folder) for name, folder in made.items()}


@pytest.fixture(scope="session")
def drawn(studies):
    """Figure of (name, kind of study), drawn once; a warning is an error."""

    @functools.cache
    def figure(name, kind):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return figures.draw(name, studies[kind])

    return figure


def texts(figure):
    """All that is written outside the panels' tick labels, on one line."""
    handles = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    inside = [text.get_text() for axes in figure.axes for text in (axes.title, *axes.texts)]
    return " ".join([figure.get_suptitle(), figure.get_supxlabel(), *handles, *inside]).replace("\n", " ")


def test_all_are_found():
    assert set(figures.names()) >= DRIFT | set(KNOBS) | {
        "reward",
        "clip_fraction",
        "ratio_bands",
        "training_health",
        "exceedance",
    }
    assert not {"base", "_bars", "_knobs"} & set(figures.names())


def test_a_new_file_is_a_new_figure(studies, tmp_path, monkeypatch):
    (tmp_path / "brand_new.py").write_text('"""A new one. Details."""\n\ndef draw(study):\n    return None\n')
    monkeypatch.setattr(figures, "__path__", [*figures.__path__, str(tmp_path)])
    assert "brand_new" in figures.names()
    assert figures.caption("brand_new") == "A new one."
    assert figures.draw("brand_new", studies["dense"]) is None


@pytest.mark.parametrize("name", figures.names())
def test_the_caption_is_one_sentence(name):
    caption = figures.caption(name)
    assert caption.endswith(".")
    assert 20 < len(caption) < 160


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for name, kind in itertools.product(figures.names(), STUDIES)
        if name in KNOBS or kind not in ("troubled_lr", "troubled_grid")  # the others have "troubled" and "knobs"
    ],
)
def test_contract(drawn, name, kind):
    figure = drawn(name, kind)
    nothing_to_draw = (kind == "dense" and name in DRIFT) or (name in KNOBS and kind not in KNOBS[name])
    assert (figure is None) == nothing_to_draw
    if figure is None:
        return
    told = texts(figure)
    assert figure.get_suptitle()
    assert "n = " in told
    assert any(word in told for word in ("interval", "spread"))
    assert f"Study {kind}" in told
    panels = [axes for axes in figure.axes if axes.get_visible() and axes.get_label() != "<colorbar>"]
    assert figure.legends or len(panels) < len(figure.axes), "neither legend nor colour bar"
    for axes in panels:
        assert axes.get_title() or name == "ratio_bands"
        assert axes.get_xlabel() or name == "ratio_bands"
    rows = {}
    for axes in panels:
        rows.setdefault(axes.get_subplotspec().rowspan.start, []).append(axes.get_ylabel())
    assert all(any(labels) for labels in rows.values())


@pytest.mark.parametrize("name", figures.names())
def test_nothing_lies_over_the_legend(drawn, name):
    """Title, legend, panels and foot are stacked without overlap; laying out raises no warning."""
    figure = drawn(name, troubled(name)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        base.freeze(figure)
    boxes = [axes.get_tightbbox() for axes in figure.axes]
    strip = [legend.get_window_extent() for legend in figure.legends] + [figure._suptitle.get_window_extent()]
    for box, other in [*itertools.product(strip, boxes), *itertools.combinations(strip, 2)]:
        assert min(box.y1, other.y1) - max(box.y0, other.y0) <= 1
    foot = figure._supxlabel.get_window_extent()
    assert all(foot.y1 <= box.y0 + 1 for box in boxes)
    for box in [*strip, foot]:
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.x1


@pytest.mark.parametrize("name", figures.names())
def test_every_run_that_went_wrong_is_named(drawn, name):
    kind, called = troubled(name)
    told, step = texts(drawn(name, kind)), 3 if kind == "troubled" else 2
    for phrase in (
        f"grpo{called} seed 2 diverged at step {step}",
        f"grpo_routing_replay{called} seed 0 failed at step {step}",
        f"gspo{called} seed 1 is missing",
    ):
        assert phrase in told


def test_lines_stop_at_divergence_and_failed_runs_are_in_no_mean(studies):
    study = studies["troubled"]

    def series(arm):
        return _curves.curves(base.rows_of(study, study.steps, arm, "default"), "updates", "reward")

    grpo, replay = series("grpo"), series("grpo_routing_replay")
    assert grpo[2].index.to_list() == [2, 4]  # NaN at step 3: two steps of two updates
    assert grpo[0].index.to_list() == [2, 4, 6, 8, 10]
    whole, rest = _curves.mean_parts(grpo, study, "grpo", "default")
    assert whole.index.to_list() == [2, 4]
    assert whole["mean"][4] == pytest.approx(np.mean([grpo[seed][4] for seed in (0, 1, 2)]))
    assert rest.index.to_list() == [6, 8, 10]
    assert rest["mean"][6] == pytest.approx(np.mean([grpo[seed][6] for seed in (0, 1)]))
    whole, rest = _curves.mean_parts(replay, study, "grpo_routing_replay", "default")
    assert whole["mean"][2] == pytest.approx(np.mean([replay[seed][2] for seed in (1, 2)]))
    assert rest.empty


def test_the_reward_figure_draws_exactly_these_means(drawn):
    panel = drawn("reward", "troubled").axes[0]
    color = _looks.look("grpo").color
    thick = [line for line in panel.lines if line.get_color() == color and line.get_linewidth() > 2]
    assert [list(line.get_xdata()) for line in thick] == [[2, 4]]
    crosses = [line for line in panel.lines if line.get_marker() == "X"]
    assert [list(line.get_xdata()) for line in crosses] == [[4]]


def test_a_bands_width_is_the_t_interval(studies):
    study = studies["complete"]
    by_seed = _curves.curves(base.rows_of(study, study.steps, "gspo", "default"), "updates", "reward")
    mean = _curves.mean_curve(by_seed, [0, 1, 2])
    values = [by_seed[seed][4] for seed in (0, 1, 2)]
    assert mean["high"][4] - mean["mean"][4] == pytest.approx(4.302653 * np.std(values, ddof=1) / np.sqrt(3))
    assert _curves.mean_curve(by_seed, [0, 1])["low"].isna().all()


def test_updates_count_gradient_steps(studies):
    study = studies["complete"]
    rows = base.rows_of(study, study.updates, "gspo", "default")
    rows = rows[rows["seed"] == 0]
    assert rows["updates"].to_list() == list(range(1, 11))


def test_headline_drift_is_against_the_previous_update_on_rollouts(studies, drawn):
    study, panel = studies["complete"], drawn("drift_by_update", "complete").axes[2]  # gspo
    black = next(line for line in panel.lines if line.get_color() == "black")
    drift = study.drift[(study.drift["arm"] == "gspo") & (study.drift["tokens"] == "rollout")]
    rows = drift[(drift["reference"] == "previous") & (drift["step"] == 2)]
    assert black.get_ydata()[1] == pytest.approx(np.mean([np.mean(layers) for layers in rows["slot_change"]]))
    assert black.get_xdata()[1] == 3.5  # between updates 3 and 4, the second step's


def test_unrelated_routers_change_by_the_hypergeometric_law(drawn):
    """K = 2 of E = 8: C(6,2), 2·6 and 1 of the C(8,2) = 28 pairs share 0, 1 and 2 experts with a given pair."""
    panel = drawn("deviation_histogram", "complete").axes[0]
    segments = [
        part for group in panel.collections if isinstance(group, LineCollection) for part in group.get_segments()
    ]
    flat = [part[0][1] for part in segments if part[0][1] == part[1][1]]
    assert flat == pytest.approx([1 / 28, 12 / 28, 15 / 28])


def test_a_zero_on_a_log_axis_is_written_out(tmp_path):
    with store.open_run(store.run_folder(tmp_path, "s", "gspo", {}, 0), {}) as writer:
        writer.describe(num_layers=0, top_k=0, num_experts=0, updates_per_step=1)
        writer.append("steps", {"step": 1, "reward": 0.5})
        writer.append("updates", {"step": 1, "update": 1, "clip_frac": 0.0})
        writer.status("finished", step=1)
    panel = figures.draw("clip_fraction", store.read_study(tmp_path / "s")).axes[0]
    assert [text.get_text() for text in panel.texts] == ["0"]
    assert panel.get_yscale() == "log"


def test_a_log_axis_starts_below_every_positive_value():
    group = (np.array([0.0, 3e-3]), np.array([1.1e-4]))
    assert _bars.log_floor([group]) == pytest.approx(1e-5)
    assert _bars.log_floor([(np.zeros(2), np.zeros(0))]) == 1e-4


def test_an_arm_looks_the_same_whatever_else_is_in_the_study(drawn):
    def color_of(figure, arm):
        legend = figure.legends[0]
        named = dict(zip([text.get_text() for text in legend.get_texts()], legend.get_lines(), strict=True))
        return next(line.get_color() for label, line in named.items() if label.startswith(f"{arm} ("))

    assert color_of(drawn("reward", "complete"), "gspo") == color_of(drawn("reward", "edge"), "gspo")
    assert _looks.look("sapo") == _looks.look("sapo")
    arms = (*_looks.KNOWN, *_looks.FIELD, "my_own")
    assert len({_looks.look(arm) for arm in arms}) == len(arms)


def test_known_arms_differ_in_colour_grey_line_and_marker():
    looks = list(_looks.KNOWN.values())
    for part in zip(*looks, strict=True):
        assert len({str(value) for value in part}) == 3
    greys = sorted(float(np.dot(to_rgb(look.color), [0.299, 0.587, 0.114])) for look in looks)
    assert min(np.diff(greys)) > 0.12
    assert greys[-1] < 0.7, "too light for a thin line on white"


def test_the_same_figure_gives_the_same_bytes(studies, drawn, tmp_path):
    ones = base.save(drawn("clip_fraction", "dense"), tmp_path / "a", "it", figures.FORMATS)
    twos = base.save(figures.draw("clip_fraction", studies["dense"]), tmp_path / "b", "it", reversed(figures.FORMATS))
    for one in ones:
        assert any(one.read_bytes() == two.read_bytes() for two in twos), one.suffix


def test_a_figure_is_drawn_once_a_format_and_laid_out_once(studies, tmp_path, monkeypatch):
    drawings, layouts = [], []
    monkeypatch.setattr(Figure, "draw", lambda *a, plain=Figure.draw, **k: drawings.append(1) or plain(*a, **k))
    engine = base.ConstrainedLayoutEngine
    monkeypatch.setattr(engine, "execute", lambda *a, plain=engine.execute: layouts.append(1) or plain(*a))
    base.save(figures.draw("clip_fraction", studies["dense"]), tmp_path, "it", ["png", "svg"])
    assert (len(drawings), len(layouts)) == (2, 1)


def test_a_fresh_process_gives_the_same_bytes_and_loads_neither_torch_nor_pyplot(studies, drawn, tmp_path):
    study = studies["dense"].folder
    program = (
        "import sys; from moe_rl import figures, printing, store, stats; "
        f"study = store.read_study({str(study)!r}); figure = figures.draw('clip_fraction', study); "
        "from pathlib import Path; figures.base.save(figure, Path(sys.argv[1]), 'it', ['svg']); "
        "printing.print_summary(study); "
        "loaded = {'torch', 'transformers', 'matplotlib.pyplot', 'scipy.stats'} & set(sys.modules); "
        "sys.exit(f'loaded {loaded}' if loaded else 0)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    command = [sys.executable, "-c", program, str(tmp_path / "fresh")]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    base.save(drawn("clip_fraction", "dense"), tmp_path / "here", "it", ["svg"])
    assert (tmp_path / "fresh" / "it.svg").read_bytes() == (tmp_path / "here" / "it.svg").read_bytes()


def test_drawing_leaves_the_readers_matplotlib_settings_alone(studies):
    before = dict(matplotlib.rcParams)
    figures.draw("clip_fraction", studies["complete"])
    assert dict(matplotlib.rcParams) == before


def test_draw_all_writes_pictures_and_summary_and_removes_stale_ones(tmp_path):
    folder = make_study(tmp_path, "s", **{**SMALL, "steps": 2, "dense": True})
    stale = folder / "figures" / "drift_by_layer.png"
    stale.parent.mkdir()
    stale.write_text("of an older study")
    _, paths = figures.draw_all(folder, ["clip_fraction", "drift_by_layer"], ["png"])
    assert [path.relative_to(folder).as_posix() for path in paths] == ["summary.csv", "figures/clip_fraction.png"]
    assert all(path.stat().st_size > 500 for path in paths)
    assert not stale.exists()


def make_figures(monkeypatch, *arguments):
    """The script's exit code, run here: a process of its own costs seconds."""
    monkeypatch.setattr(sys, "argv", ["make_figures.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return stop.value.code


def test_make_figures_prints_the_table_and_the_paths(studies, monkeypatch, capsys):
    folder = studies["edge"].folder
    assert make_figures(monkeypatch, folder, "--only", "clip_fraction", "--format", "svg") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("arm ")
    assert lines[-1] == str(folder / "figures" / "clip_fraction.svg")


def test_make_figures_refuses_in_one_line_with_exit_code_2(studies, tmp_path, monkeypatch, capsys):
    for arguments in ([tmp_path], [studies["edge"].folder, "--only", "rewrad"]):
        assert make_figures(monkeypatch, *arguments) == 2
        said = capsys.readouterr()
        assert len(said.err.splitlines()) == 1
        assert not said.out


def test_co_activation_is_of_the_last_traces_and_needs_some(studies, drawn, tmp_path):
    """Experts 0 and 1 of the synthetic traces are active together; a map shows them over independence."""
    panel = drawn("co_activation", "complete").axes[0]
    ratios = np.asarray(panel.collections[0].get_array()).reshape(8, 8)
    assert ratios[0, 1] == ratios[1, 0] > 1.5
    assert "layer 1: off 0." in panel.get_title()
    assert figures.draw("co_activation", store.read_study(make_study(tmp_path, **{**SMALL, "traces": False}))) is None


def test_arms_at_settings_of_their_own_stand_side_by_side(tmp_path):
    """Tuned arms: one row of panels, not a row a setting with one arm in each."""
    for arm, lr in (("grpo", 1e-4), ("gspo", 4e-4)):
        make_study(tmp_path, "tuned", arms=[arm], knobs=[{"optim.lr": lr, "updates": 2}], **SMALL)
    study = store.read_study(tmp_path / "tuned")
    panels = figures.draw("drift_by_layer", study).axes
    assert [panel.get_title() for panel in panels[:2]] == ["grpo, lr=0.0001 (n = 3)", "gspo, lr=0.0004 (n = 3)"]
    reward = figures.draw("reward", study)
    assert [panel.get_title() for panel in reward.axes] == ["training rollouts", "evaluation prompts"]
    assert [text.get_text() for text in reward.legends[0].get_texts()] == [panel.get_title() for panel in panels[:2]]
    assert "missing" not in texts(reward)
    assert len(summary.summary_table(study)) == 2  # tables keep the settings


@pytest.mark.parametrize(("count", "rows", "columns", "down", "across"), [(2, 1, 2, 2, 1), (9, 1, 2, 5, 2)])
def test_settings_stand_beside_each_other_before_a_page_becomes_a_tower(count, rows, columns, down, across):
    """9 rows of 3.3 inches are more than 1.7 times 2 panels of 5 inches; 5 rows are not for 4 panels of 4.1."""
    figure, panels = base.blocks(count, rows, columns, width=5.0, sharey="row")
    assert panels.shape == (count, rows, columns)
    assert len(figure.axes) == count * rows * columns
    width, height = figure.get_size_inches()
    assert height < 2 * width
    places = [panel.get_subplotspec() for panel in panels[:, 0, 0]]
    assert [place.rowspan.start for place in places] == [number // across for number in range(count)]
    assert [place.colspan.start for place in places] == [number % across * columns for number in range(count)]
    assert places[0].get_gridspec().get_geometry() == (down * rows, across * columns)
    panels[1, 0, 0].set_ylim(0, 7)
    assert panels[1, 0, 1].get_ylim() == (0, 7)
    assert panels[0, 0, 0].get_ylim() != (0, 7)


def test_one_range_for_all_blocks_is_shared_by_all_panels():
    _, panels = base.blocks(9, 2, 3, sharex="all", sharey="row")
    panels[4, 1, 2].set(xlim=(1, 3), ylim=(0, 7))
    assert {panel.get_xlim() for panel in panels.flat} == {(1, 3)}
    assert [panel.get_ylim() == (0, 7) for panel in panels[4].flat] == [False] * 3 + [True] * 3


def test_a_row_of_many_arms_is_broken_into_lines(tmp_path):
    """Seven panels of 4.1 inches are wider than 21: four and three."""
    arms = ["grpo", "gspo", "dapo", "cispo", "sapo", "gmpo", "rloo"]
    folder = make_study(tmp_path, "wide", arms=arms, seeds=[0], steps=2, updates=2, layers=2)
    for name in ("drift_by_update", "drift_by_layer"):
        figure = figures.draw(name, store.read_study(folder))
        panels = [panel for panel in figure.axes if panel.get_label() != "<colorbar>"]
        places = [panel.get_subplotspec() for panel in panels]
        assert [(place.rowspan.start, place.colspan.start) for place in places] == [divmod(n, 4) for n in range(7)]
        assert panels[4].get_ylabel() == panels[0].get_ylabel() != panels[5].get_ylabel()
        assert panels[4].yaxis.get_tick_params()["labelleft"]
    assert figure.get_size_inches()[0] < 21


def test_many_settings_are_told_in_reading_order(tmp_path):
    folder = make_study(tmp_path, "many", arms=["gspo"], seeds=[0], knobs=[{"updates": m} for m in range(1, 8)],
                        steps=2, updates=2, layers=2)  # fmt: skip
    figure = figures.draw("changed_layers", store.read_study(folder))
    width, height = figure.get_size_inches()
    assert height < 2 * width
    firsts = [panel for panel in figure.axes if panel.get_title().startswith("by one update")]
    titles = [panel.get_title().splitlines()[1] for panel in firsts]
    assert titles == [f"updates={m}" for m in range(1, 8)]


def test_a_line_never_resumes_after_a_value_that_is_not_finite():
    rows = pd.DataFrame({"seed": 0, "x": [1, 2, 3, 4], "y": [1.0, float("inf"), 3.0, 4.0]})
    assert _curves.curves(rows, "x", "y")[0].to_list() == [1.0]
    gaps = pd.DataFrame({"seed": 0, "x": [1, 2, 3, 4], "y": [1.0, float("nan"), 3.0, 4.0]})
    assert _curves.curves(gaps, "x", "y")[0].to_list() == [1.0]
    assert _curves.curves(gaps, "x", "y", sparse=True)[0].to_list() == [1.0, 3.0, 4.0]


def test_a_row_for_the_start_draws_at_0_and_cuts_no_other_line(studies, tmp_path):
    with store.open_run(store.run_folder(tmp_path, "s", "gspo", {}, 0), {}) as writer:
        writer.describe(num_layers=0, top_k=0, num_experts=0, updates_per_step=2)
        writer.append("steps", {"step": 0, "eval_reward": 0.3})
        for step in (1, 2):
            writer.append("steps", {"step": step, "reward": 0.5, "eval_reward": 0.4, "entropy": 0.9})
        writer.status("finished", step=2)
    study = store.read_study(tmp_path / "s")
    assert list(figures.draw("reward", study).axes[1].lines[0].get_xdata()) == [0, 2, 4]
    assert list(figures.draw("training_health", study).axes[0].lines[0].get_xdata()) == [2, 4]
