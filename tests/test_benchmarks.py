"""experiments/bench.py: its table has what it says. Whether the numbers are good is not a matter for a test."""

import json
import math
import random
import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moe_rl.advantage import group_advantages
from moe_rl.benchmarks import cycle, figure, harness, scaling
from moe_rl.benchmarks.cycle import PARTS, PROMPT, SIZES, VOCABULARY, Cycle, forward, multiply_adds
from moe_rl.benchmarks.harness import Harness
from moe_rl.benchmarks.instrument import MODES, Instrument, instrument
from moe_rl.benchmarks.loop import Cycles, bare_experiment, experiment
from moe_rl.benchmarks.scaling import Scaling
from moe_rl.benchmarks.turns import check_baseline, regressions
from moe_rl.models.build import Tiny
from moe_rl.store.reading import read_table
from moe_rl.tasks.chain_sum import ChainSum

TINY = {"layers": 2, "experts": 8, "top_k": 2, "hidden_size": 16, "expert_size": 8, "sequences": 2, "tokens": 6,
        "decode_batch": 2, "prompt": 3, "decode_steps": 2, "repeats": 3}  # fmt: skip


def test_instrument_measures_every_mode_and_memory_is_what_the_formula_says():
    rows = instrument(Instrument(**TINY))
    assert [row["mode"] for row in rows[:8]] == [*MODES, *MODES]
    for row in rows[:8]:
        assert row["cpu_s"] > 0
        assert row["paired_low"] <= row["paired_ratio"] <= row["paired_high"]
    assert rows[0]["ratio"] == rows[4]["ratio"] == 1
    assert [row["bytes"] for row in rows[8:]] == [row["formula_bytes"] for row in rows[8:]]
    assert rows[8]["bytes"] == 2 * 6 * (2 * 2 + 1)


def test_settings_below_one_are_refused():
    with pytest.raises(ValueError, match="repeats is 0"):
        Instrument(repeats=0)


# --------------------------------------------------------------------------------------------------------------- cycle
TINY_CYCLE = {"size": "tiny", "idle": "0.5", "prompts": 2, "completions": 2, "tokens": 3, "updates": 2, "cycles": 2}


def test_a_cycle_of_both_sides_is_measured_part_by_part():
    rows = cycle.cycle(Cycle(**TINY_CYCLE))
    assert {row["what"] for row in rows} == {"cycle tiny, 50% idle"}
    assert [row["mode"] for row in rows] == ["trl", "moe_rl"]
    trl, ours = rows
    parameters = sum(p.numel() for p in Tiny(**SIZES["tiny"]).build(0)[0].parameters())
    for row in rows:
        assert row["parameters"] == parameters
        assert 0 < row["least_s"] <= row["cpu_s"]
        assert all(row[f"{part}_s"] > 0 for part in PARTS if (row["mode"], part) != ("trl", "drift"))
        # Two cycles: the median of each part is its mean, and the means add up to the mean of the cycle.
        assert sum(row[f"{part}_s"] for part in PARTS) == pytest.approx(row["cpu_s"])
        assert row["tokens_per_s"] == pytest.approx(2 * 2 * 3 / row["cpu_s"])
        assert row["paired_low"] <= row["paired_ratio"] <= row["paired_high"]
        assert row["gflop"] == 2 * multiply_adds(Cycle(**TINY_CYCLE)) / 1e9
        assert row["limit_share"] == pytest.approx(row["gflop"] / row["cpu_s"] / row["limit_gflops"])
        assert 50 < row["over_mb"] + 50 < row["peak_mb"]
    assert trl["drift_s"] == 0
    assert (trl["ratio"], trl["paired_ratio"], trl["memory_ratio"]) == (1, 1, 1)
    assert ours["ratio"] == pytest.approx(ours["cpu_s"] / trl["cpu_s"])
    assert ours["memory_ratio"] == pytest.approx(ours["peak_mb"] / trl["peak_mb"])


@pytest.mark.parametrize(("idle", "least", "most"), [(0.0, 0.0, 0.0), (0.5, 0.3, 0.7)])
def test_a_share_of_prompts_has_no_advantage_and_no_other_group(idle, least, most):
    task = bare_experiment(["arm=grpo"], 24, idle).task
    examples = task.examples("train", 64, 0)
    rng = random.Random(0)
    texts = ["".join(rng.choices("0123456789abcdefghij", k=24)) for _ in range(64 * 8)]
    rewards = torch.tensor([task.reward(examples[i // 8], text) for i, text in enumerate(texts)])
    advantages = group_advantages(rewards, torch.arange(64).repeat_interleave(8))
    assert least <= float((advantages == 0).view(64, 8).all(1).float().mean()) <= most


def test_multiply_adds_are_those_that_torch_counts():
    model, tokenizer = Tiny(**SIZES["tiny"], experts_implementation="eager").build(0)
    model.set_attn_implementation("eager")
    assert len(tokenizer) == VOCABULARY
    example = ChainSum().examples("train", 1, 0)[0]
    assert len(tokenizer(example.prompt)["input_ids"]) == PROMPT
    ids = torch.randint(5, 40, (3, 7))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        cache = model(input_ids=ids, logits_to_keep=4, use_cache=True).cache
    assert counter.get_total_flops() == 2 * 3 * forward("tiny", 7, 7, 4)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=ids[:, :1], cache=cache)
    assert counter.get_total_flops() == 2 * 3 * forward("tiny", 1, 8, 1)
    # By hand: 4 sequences of 6 + 3 tokens. Sampling: the prompt, then tokens 1 and 2. Half have no backward.
    sampling = forward("tiny", 6, 6, 1) + forward("tiny", 1, 7, 1) + forward("tiny", 1, 8, 1)
    assert multiply_adds(Cycle(**TINY_CYCLE)) == 4 * sampling + 2 * (3 + 1) * forward("tiny", 9, 9, 4)


def test_cycle_settings_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="size is 'huge'; choose from tiny, small, large"):
        Cycle(size="huge")
    with pytest.raises(ValueError, match="cycles is 0"):
        Cycle(cycles=0)
    with pytest.raises(ValueError, match="idle is '0,2'; give shares from 0 to 1"):
        Cycle(idle="0,2")
    with pytest.raises(ValueError, match="idle is 'half'; give shares from 0 to 1"):
        Cycle(idle="half")
    with pytest.raises(ValueError, match="do not divide into 3 updates"):
        Cycle(updates=3)


# --------------------------------------------------------------------------------------------------------- regressions
def a_row(paired_ratio=0.8, **more):
    return {"what": "cycle small", "mode": "moe_rl", "paired_ratio": paired_ratio, **more}


def test_a_ratio_a_tenth_above_the_baseline_is_a_regression_and_times_are_not_compared():
    baseline = {"settings": {}, "rows": [a_row(memory_ratio=0.9, cpu_s=1.0)]}
    assert regressions([a_row(0.87, memory_ratio=0.98, cpu_s=9.0), a_row(7.0) | {"mode": "new"}], baseline) == []
    assert regressions([a_row(0.89, memory_ratio=1.0)], baseline) == [
        "cycle small, moe_rl: paired_ratio 0.890, was 0.800",
        "cycle small, moe_rl: memory_ratio 1.000, was 0.900",
    ]


def test_a_baseline_of_other_settings_is_refused_but_for_the_number_of_turns():
    settings = {"size": "small", "cycles": 8}
    check_baseline(settings, {"settings": {"size": "small", "cycles": 12}})
    with pytest.raises(ValueError, match="size is small here and large in the baseline"):
        check_baseline(settings, {"settings": {"size": "large", "cycles": 8}})


@pytest.fixture
def command(monkeypatch, capsys):
    """command(option, ...) -> exit code, stdout, stderr of experiments/bench.py instrument."""

    def run(*options):
        settings = [f"--{name}={value}" for name, value in TINY.items()]
        monkeypatch.setattr(sys, "argv", ["bench.py", "instrument", *settings, *options])
        with pytest.raises(SystemExit) as done:
            runpy.run_path(str(Path(__file__).parent.parent / "experiments" / "bench.py"), run_name="__main__")
        return done.value.code, *capsys.readouterr()

    return run


def test_the_command_writes_its_rows_and_fails_on_a_regression_only(command, tmp_path):
    path = tmp_path / "rows.json"
    code, out, err = command(f"--json={path}")
    assert code == 0, err
    assert len(out.splitlines()) == 10
    written = json.loads(path.read_text())
    assert len(written["rows"]) == 10
    for before, expected in ((100, 0), (0.01, 1)):  # baselines that no noise reaches
        written["rows"] = [row | {"paired_ratio": before} for row in written["rows"][:8]]
        path.write_text(json.dumps(written))
        code, _, err = command(f"--against={path}")
        assert code == expected, err
        assert ("paired_ratio 1.000, was 0.010" in err) == bool(expected)


# ------------------------------------------------------------------------------------------------------------- scaling
TINY_SCALING = {"sequences": 16, "tokens": 3, "layers": 1, "experts": 4, "updates": 2, "hidden_size": 16,
                "expert_size": 8, "doublings": 2, "repeats": 1}  # fmt: skip


@pytest.fixture(scope="module")
def scaling_rows():
    return scaling.scaling(Scaling(**TINY_SCALING))


def test_scaling_has_a_time_at_every_value_and_an_exponent_for_every_factor_and_part(scaling_rows):
    parts = {"rollout", "old pass", "updates", "drift", "cycle"}
    forwards = {"plain forward", "recorded forward", "replayed forward"}
    for factor, base in (("sequences", 16), ("tokens", 3), ("layers", 1), ("experts", 4), ("updates", 2)):
        mine = [row for row in scaling_rows if row["factor"] == factor]
        assert {row["mode"] for row in mine} == parts | (set() if factor == "updates" else forwards)
        for part in {row["mode"] for row in mine}:
            *points, slope = [row for row in mine if row["mode"] == part]
            assert [(row["value"], row["what"]) for row in points] == [
                (base * times, f"{factor} {base * times}") for times in (1, 2, 4)
            ]
            assert all(0 < row["least_s"] <= row["cpu_s"] for row in points)
            # Three points whose x are doubled: the least squares slope is the one between the first and the last.
            assert slope["slope"] == pytest.approx(math.log(points[2]["cpu_s"] / points[0]["cpu_s"]) / math.log(4))
            assert slope["low"] <= slope["slope"] <= slope["high"]
            assert slope["last_doubling"] == pytest.approx(math.log2(points[2]["cpu_s"] / points[1]["cpu_s"]))
            assert all(("paired_ratio" in row) == (part in forwards) for row in points)
    # More layers are more work, however small they are and however busy the machine is.
    assert next(row["slope"] for row in scaling_rows if row["what"] == "slope of layers") > 0


def test_every_setting_is_measured_once_and_the_base_is_shared():
    measured = scaling.points(Scaling(**TINY_SCALING))
    assert len(measured) == len(set(measured)) == 1 + 5 * 2
    assert ("layers", 4) in measured


def test_scaling_settings_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="updates is 1; set it to 2 or more"):
        Scaling(updates=1)
    with pytest.raises(ValueError, match="8 sequences do not divide into 4 completions a prompt and up to 16 updates"):
        Scaling(sequences=8)


def test_the_figure_has_a_panel_a_factor_and_shows_the_rows_and_a_line_of_slope_one():
    rows = [{"what": f"layers {n}", "mode": "drift", "factor": "layers", "value": n, "cpu_s": s, "least_s": s}
            for n, s in ((1, 0.5), (2, 0.75), (4, 1.5))]  # fmt: skip
    rows.append({"what": "slope of layers", "mode": "drift", "factor": "layers", "slope": 0.79, "low": 0, "high": 1})
    rows += [row | {"factor": "tokens"} for row in rows]
    drawn = figure.draw(rows)
    panels = [axis for axis in drawn.axes if axis.lines]
    assert len(panels) == 2
    for panel, label in zip(panels, ("layers", "tokens a response"), strict=True):
        assert (panel.get_xscale(), panel.get_yscale()) == ("log", "log")
        assert panel.get_xlabel() == f"{label}\nexponents: drift 0.79"
        drift, *dotted = panel.lines
        assert list(drift.get_xdata()) == [1, 2, 4]
        assert list(drift.get_ydata()) == [0.5, 0.75, 1.5]
        for line in dotted:
            assert line.get_linestyle() == ":"
            assert line.get_ydata()[2] == pytest.approx(4 * line.get_ydata()[0])


def test_parts_are_told_apart_without_colour():
    seen = {(str(look.line), look.marker) for look in figure.LOOKS.values()}
    assert len(seen) == len(figure.LOOKS)


def test_a_figure_is_drawn_again_from_its_rows_without_measuring(scaling_rows, monkeypatch, capsys, tmp_path):
    (tmp_path / "rows.json").write_text(json.dumps({"settings": TINY_SCALING, "rows": scaling_rows}))

    def bench(*options):
        monkeypatch.setattr(sys, "argv", ["bench.py", "scaling", f"--draw={tmp_path / 'rows.json'}", *options])
        with pytest.raises(SystemExit) as done:
            runpy.run_path(str(Path(__file__).parent.parent / "experiments" / "bench.py"), run_name="__main__")
        return done.value.code, *capsys.readouterr()

    def measures(settings):
        """What --draw must not do."""
        pytest.fail("measured")

    monkeypatch.setattr(scaling, "scaling", measures)
    assert bench(f"--figure={tmp_path / 'one.png'}") == (0, "", "")
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
    code, _, err = bench()
    assert (code, err) == (2, f"nowhere to draw {tmp_path / 'rows.json'} to; add --figure=<name>.png\n")
    code, _, err = bench(f"--figure={tmp_path / 'one.gif'}")
    assert (code, err.startswith("no figure format 'gif'")) == (2, True)
    (tmp_path / "rows.json").write_text(json.dumps({"settings": {}, "rows": [{"what": "trace", "mode": "1"}]}))
    code, _, err = bench(f"--figure={tmp_path / 'two.png'}")
    assert (code, err.startswith("these rows have no factor")) == (2, True)


# ------------------------------------------------------------------------------------------------------------- harness
TINY_HARNESS = {"layers": 1, "prompts": 2, "completions": 2, "updates": 2, "steps": 2, "runs": 2, "run_steps": 1,
                "cold_start": 0}  # fmt: skip


def test_the_harness_is_measured_against_the_bare_loop():
    rows = harness.overhead(Harness(**TINY_HARNESS))
    assert [(row["what"], row["mode"]) for row in rows] == [
        ("step, cpu", "bare"), ("step, cpu", "loop"), ("step, wall", "bare"), ("step, wall", "loop"),
    ]  # fmt: skip
    for row in rows:
        assert row["seconds"] > 0
        assert row["paired_low"] <= row["paired_ratio"] <= row["paired_high"]
    assert rows[0]["paired_ratio"] == rows[2]["paired_ratio"] == 1


def test_a_sweep_is_timed_from_the_command_line_to_its_end():
    row = harness.sweep(Harness(**TINY_HARNESS), 2)
    assert (row["what"], row["mode"]) == ("sweep of 2 runs", "jobs=2")
    assert row["runs_per_hour"] == pytest.approx(3600 * 2 / row["wall_s"])
    assert 0 < row["run_wall_s"] < row["wall_s"]
    assert row["outside_s"] == pytest.approx(row["wall_s"] - 2 * row["run_wall_s"] / 2)


def test_the_bare_loop_takes_the_very_updates_of_the_loop(tmp_path):
    sizes = ["model.layers=1", "prompts=2", "completions=2", "updates=2"]
    e = experiment([*sizes, "eval_prompts=0", "cold_start.steps=0", "steps=2"])
    with Cycles(e) as cycles:
        list(cycles.steps)
        written = read_table(cycles.folder, "updates")
        assert read_table(cycles.folder, "drift")
    bare = [update for updates in harness.bare_loop(e, str(tmp_path)) for update in updates]
    assert len(bare) == len(written) == 4
    for one, other in zip(bare, written, strict=True):
        assert {name: other[name] for name in one} == one


def test_a_sweep_that_fails_is_an_error_and_not_a_time():
    settings = Harness(**TINY_HARNESS | {"updates": 3})
    with pytest.raises(OSError, match=r"launch.jobs=1 ended with code 2: .*4 sequences do not divide into 3 updates"):
        harness.sweep(settings, 1)


def test_harness_settings_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="jobs is 1; set it to 2 or more"):
        Harness(jobs=1)
