"""What the figures of drift and of knobs draw, against numbers worked by hand."""

import numpy as np
import pytest
from matplotlib.collections import PathCollection

from moe_rl import figures, store
from moe_rl.figures import _knobs, _looks, base


def write_run(results, arm="gspo", seed=0, knobs=None, rewards=(0.5,), updates=(), drift=(), state="finished", **facts):
    """A run of two updates a step, K = 1 of E = 4 in 2 layers, with just the rows and columns that a test is about."""
    with store.open_run(store.run_folder(results, "s", arm, knobs or {}, seed), {}) as writer:
        writer.describe(**{"num_layers": 2, "top_k": 1, "num_experts": 4, "updates_per_step": 2} | facts)
        for step, reward in enumerate(rewards, start=1):
            writer.append("steps", {"step": step, "reward": reward})
        writer.append("updates", *updates)
        writer.append("drift", *drift)
        writer.status(state, step=len(rewards))


def row(step, update, reference, tokens="rollout", **columns):
    place = {"step": step, "update": update, "tokens": tokens, "reference": reference, "n": 5}
    return {**place, "slot_change": [0.0, 0.1], **columns}


def draw(name, results):
    return figures.draw(name, store.read_study(results / "s"))


def legend(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def points(line):
    """y at each x."""
    return {float(x): float(y) for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)}


def means(axes, arm="gspo"):
    """Of the thick lines in an arm's colour."""
    color = _looks.look(arm).color
    return [points(line) for line in axes.lines if line.get_linewidth() > 2 and line.get_color() == color]


# -------------------------------------------------------------------------------------------------------- flips_over_lr
def test_slopes_of_the_two_terms_are_those_of_the_power_laws_that_they_follow(tmp_path):
    for lr in (1e-4, 1e-3, 1e-2):
        for seed in (0, 1):
            zero = lr == 1e-4 and seed == 1
            ends = [row(1, 2, "old", flip_rms=0.0 if zero else lr**0.5, weight_rms=3 * lr)]
            early = [row(1, 1, "old", flip_rms=99.0, weight_rms=99.0), row(1, 2, "previous")]
            write_run(tmp_path, seed=seed, knobs={"optim.lr": lr}, drift=early + ends)
    terms, slots = draw("flips_over_lr", tmp_path).axes
    assert legend(terms) == ["0.50 [0.50, 0.50], n = 5 + 1 zeros", "1.00 [1.00, 1.00], n = 6"]
    assert legend(slots) == ["0.00 [0.00, 0.00], n = 6"]
    assert points(terms.lines[1]) == pytest.approx({1e-4: 3e-4, 1e-3: 3e-3, 1e-2: 3e-2})


def test_a_term_of_several_steps_is_their_root_mean_square_and_slot_change_their_mean(tmp_path):
    for lr in (1e-4, 1e-3):
        rows = [row(1, 2, "old", flip_rms=3.0, weight_rms=1.0), row(2, 2, "old", flip_rms=4.0, weight_rms=1.0)]
        rows.append(row(3, 2, "old", slot_change=[1.0, 1.0]))  # a step whose flips were not measured
        write_run(tmp_path, knobs={"optim.lr": lr}, drift=rows)
    terms, slots = draw("flips_over_lr", tmp_path).axes
    assert list(points(terms.lines[0]).values()) == pytest.approx([12.5**0.5] * 2)
    assert list(points(slots.lines[0]).values()) == pytest.approx([0.05] * 2)
    assert legend(terms)[0] == "none, n = 2"


def test_without_a_varied_learning_rate_there_is_no_slope_to_draw(tmp_path):
    for layers in (4, 8):
        write_run(tmp_path, knobs={"model.layers": layers}, drift=[row(1, 2, "old", flip_rms=0.1, weight_rms=0.1)])
    assert draw("flips_over_lr", tmp_path) is None


# ------------------------------------------------------------------------------------------------------ drift_and_ratio
def test_moved_likelihood_is_that_of_the_end_of_the_batch(tmp_path):
    for seed, by_layers in enumerate(([0.1, 0.2, float("nan")], [0.3, 0.6, float("nan")])):
        size = {"log_w_unflipped": by_layers[0], "log_w_flipped": by_layers[1], "log_w_by_changed_layers": by_layers}
        early = row(1, 1, "old", log_w_unflipped=9.0, log_w_flipped=9.0, log_w_by_changed_layers=[9.0] * 3)
        write_run(tmp_path, seed=seed, drift=[early, row(1, 2, "old", **size), row(2, 2, "old")])
    bars, line = draw("drift_and_ratio", tmp_path).axes
    assert [bar.get_height() for bar in bars.patches] == pytest.approx([0.2, 0.4])
    assert means(line) == [pytest.approx({0: 0.2, 1: 0.4})]  # nobody has a token with two changed layers


# --------------------------------------------------------------------------------------------------------- exceedance
@pytest.mark.parametrize("engine", [None, 0.0, 0.03])
def test_exceedance_is_of_the_last_update_and_of_the_engines_where_they_differ(tmp_path, engine):
    rows = [{"step": step, "update": u, "f2": 0.1 * step * (u - 1), "f5": 0.0} for step in (1, 2) for u in (1, 2)]
    with store.open_run(store.run_folder(tmp_path, "s", "gspo", {}, 0), {}) as writer:
        writer.describe(num_layers=0, top_k=0, num_experts=0, updates_per_step=2)
        for step in (1, 2):
            mismatch = {} if engine is None else {"mismatch_f2": engine, "mismatch_f5": engine / 3}
            writer.append("steps", {"step": step, "reward": 0.5, **mismatch})
        writer.append("updates", *rows)
        writer.status("finished", step=2)
    heights = [panel.patches[0].get_height() for panel in draw("exceedance", tmp_path).axes]
    assert heights == pytest.approx([0.15, 0.0, 0.03, 0.01] if engine else [0.15, 0.0])


# ---------------------------------------------------------------------------------- soft_drift, margins and router_load
SOFT = {"js": [0.0, 0.0], "router_shift": 0.9}


def test_soft_drift_by_one_update_and_over_a_batch(tmp_path):
    rows = [row(1, u, "previous", kl=[0.0, 0.2 * u], **SOFT) for u in (1, 2)]
    rows += [row(1, u, "old", kl=[0.0, 2.0 * u], **SOFT) for u in (1, 2)]
    rows += [row(1, 2, "old", tokens="probe", kl=[7.0, 7.0], **SOFT), row(2, 1, "old"), row(2, 1, "previous")]
    write_run(tmp_path, drift=rows)
    panels = draw("soft_drift", tmp_path).axes
    assert means(panels[0]) == [pytest.approx({2: 0.15})]  # u = 1 and 2: .1 and .2 over layers
    assert means(panels[3]) == [pytest.approx({2: 2.0})]  # after u = 2
    assert means(panels[2]) == [pytest.approx({2: 0.9})]


def test_margins_are_means_over_the_layers_in_which_tokens_flipped(tmp_path):
    nan = float("nan")
    rows = [
        row(1, 1, "previous", margin=[0.2, 0.4], margin_kept=[0.2, 0.6], margin_flipped=[nan, 0.02]),
        row(1, 2, "previous", margin=[0.2, 0.4], margin_kept=[0.4, 0.4], margin_flipped=[nan, nan]),
    ]
    write_run(tmp_path, drift=rows)
    (panel,) = draw("margins", tmp_path).axes
    assert means(panel) == [pytest.approx({2: 0.4}), pytest.approx({2: 0.02})]


def test_load_is_that_of_the_probe_and_dead_experts_are_a_share(tmp_path):
    state = {"max_violation": [1.0, 2.0], "dead_experts": [0, 1]}
    rows = [row(1, 2, "old", tokens="probe", router_entropy=[1.0, 1.2], **state)]
    rows += [row(1, 2, "start", tokens="probe", router_entropy=[9.0, 9.0], **state)]
    rows += [row(1, 2, "old", router_entropy=[9.0, 9.0], max_violation=[9.0, 9.0], dead_experts=[4, 4])]
    write_run(tmp_path, drift=rows)
    panels = draw("router_load", tmp_path).axes
    assert [means(panel) for panel in panels] == [[pytest.approx({2: y})] for y in (1.1, 1.5, 0.125)]


def test_load_without_router_logits_is_drawn_without_entropy(tmp_path):
    write_run(tmp_path, drift=[row(1, 2, "old", max_violation=[1.0, 2.0], dead_experts=[0, 1])])
    panels = draw("router_load", tmp_path).axes
    assert [panel.get_title() for panel in panels] == ["load of the busiest expert (MaxVio)", "experts without a token"]


# ------------------------------------------------------------------------------------------ against_knob, knob_heat_map
def test_measures_over_a_knob_that_is_a_number(tmp_path):
    for layers, slots in ((4, 0.1), (16, 0.3), (48, 0.5)):
        for seed in (0, 1):
            drift = [row(1, 1, "previous", slot_change=[slots + 0.1 * seed], any_layer_change=0.9)]
            noise = {"decode": slots / 100}
            write_run(tmp_path, seed=seed, knobs={"model.layers": layers, "x": "a"}, drift=drift, noise_floor=noise)
    figure = draw("against_knob", tmp_path)
    panels = {axes.get_title(): axes for axes in figure.axes}
    slots = panels["slot change by one update"]
    assert means(slots) == [pytest.approx({4: 0.15, 16: 0.35, 48: 0.55})]
    assert slots.get_xscale() == "log"
    assert slots.get_ylim() == pytest.approx((0, 0.66))  # the highest point is .6
    assert [label.get_text() for label in slots.get_xticklabels()] == ["4", "16", "48"]
    (floor,) = (line for line in slots.lines if line.get_color() == "black")
    assert points(floor) == pytest.approx({4: 0.001, 16: 0.003, 48: 0.005})
    seeds = [
        tuple(spot) for part in slots.collections if isinstance(part, PathCollection) for spot in part.get_offsets()
    ]
    assert sorted(seeds)[:2] == [pytest.approx((4, 0.1)), pytest.approx((4, 0.2))]
    assert "spread of log w over tokens" not in panels  # nothing was recorded of it


def test_a_scale_holds_every_other_setting_fixed(tmp_path):
    for lr in (0.1, 0.2):
        for router in ("native", "binned"):
            write_run(tmp_path, knobs={"optim.lr": lr, "router": router, "steps": 3})
    study = store.read_study(tmp_path / "s")
    assert _knobs.numeric_knobs(study) == ["optim.lr"]  # steps is a number, and the same everywhere
    found = {scale.shared: [value for value, _ in scale.points] for scale in _knobs.scales(study, "optim.lr")}
    assert found == {"router=native": [0.1, 0.2], "router=binned": [0.1, 0.2]}


def test_a_cell_tells_its_mean_and_how_its_runs_ended(tmp_path):
    for lr in (0.1, 0.2):
        for m in (2, 8):
            for seed, rewards in enumerate(([0.2, 0.6], [0.2, 0.8], [0.9, 0.4])):
                state = "diverged" if (lr, m, seed) == (0.2, 8, 0) else "finished"
                write_run(tmp_path, seed=seed, knobs={"optim.lr": lr, "updates": m}, rewards=rewards, state=state)
    panel = draw("knob_heat_map", tmp_path).axes[0]
    told = {(text.get_position()): text.get_text() for text in panel.texts}
    # of .6, .8, .4: sd .2, t = 4.3027, half width .2 * 4.3027 / sqrt(3) = .497
    assert told[0, 0] == "0.6\n± 0.5\n1/3 collapsed"
    assert told[1, 1].splitlines()[2:] == ["1/3 collapsed", "1/3 diverged"]
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("updates", "optim.lr")
    assert panel.collections[0].get_array().ravel().tolist() == pytest.approx([0.6, 0.6, 0.6, 0.6])


# ----------------------------------------------------------------------------------------------------- titles, one step
def test_long_settings_are_broken_over_lines():
    label = "layers=12, hidden_size=64, experts=32, task=sort_digits, router=tempered"
    lines = base.titled("gspo (n = 5)", label).splitlines()
    assert lines[0] == "gspo (n = 5)"
    assert ", ".join(lines[1:]) == label
    assert max(map(len, lines)) <= 36
    assert base.titled("gspo", "") == "gspo"


def test_measures_that_span_a_factor_of_20_stand_on_a_log_axis(tmp_path):
    for m, clipped in ((1, 0.001), (4, 0.1)):
        write_run(tmp_path, knobs={"updates": m}, updates=[{"step": 1, "update": 2, "clip_frac": clipped}])
    panels = {axes.get_title(): axes for axes in draw("against_knob", tmp_path).axes}
    assert panels["clipped tokens"].get_yscale() == "log"
    assert panels["clipped tokens"].get_ylim() == pytest.approx((0.0005, 0.2))
    assert panels["final reward"].get_yscale() == "linear"


@pytest.mark.parametrize("name", ["drift_by_update", "ratio_bands"])
def test_a_run_of_one_step_can_be_seen(tmp_path, name):
    quantiles = {"log_w_q": [-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0], "log_s_q": [-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0]}
    for seed in (0, 1, 2):
        drift = [row(1, u, reference) for u in (1, 2) for reference in ("old", "previous")]
        updates = [{"step": 1, "update": u, **quantiles} for u in (1, 2)]
        write_run(tmp_path, seed=seed, drift=drift, updates=updates)
    figure = draw(name, tmp_path)
    for panel in figure.axes:
        single = [line for line in panel.lines if len(line.get_xdata()) == 1 and line.get_linestyle() != ":"]
        assert single
        assert all(line.get_marker() not in ("", "None") for line in single)
        spans = [np.ptp(path.vertices[:, 1]) for band in panel.collections for path in band.get_paths()]
        if name == "ratio_bands":
            assert max(spans) == 6  # the .01 and .99 quantiles
