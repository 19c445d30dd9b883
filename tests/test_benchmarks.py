"""experiments/bench.py: its table has what it says. Whether the numbers are good is not a matter for a test."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moe_rl import benchmark_cycle
from moe_rl.benchmark_cycle import PARTS, PROMPT, SIZES, VOCABULARY, Cycle, forward, multiply_adds
from moe_rl.benchmarks import MODES, Instrument, check_baseline, instrument, regressions
from moe_rl.models.build import Tiny
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
TINY_CYCLE = {"size": "tiny", "prompts": 2, "completions": 2, "tokens": 3, "updates": 2, "cycles": 2}


def test_a_cycle_of_both_sides_is_measured_part_by_part():
    rows = benchmark_cycle.cycle(Cycle(**TINY_CYCLE))
    assert [(row["what"], row["mode"]) for row in rows] == [("cycle tiny", "trl"), ("cycle tiny", "moe_rl")]
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
        assert row["gflop"] == 2 * multiply_adds(Cycle(**TINY_CYCLE), "tiny") / 1e9
        assert row["limit_share"] == pytest.approx(row["gflop"] / row["cpu_s"] / row["limit_gflops"])
        assert 50 < row["over_mb"] + 50 < row["peak_mb"]
    assert trl["drift_s"] == 0
    assert (trl["ratio"], trl["paired_ratio"], trl["memory_ratio"]) == (1, 1, 1)
    assert ours["ratio"] == pytest.approx(ours["cpu_s"] / trl["cpu_s"])
    assert ours["memory_ratio"] == pytest.approx(ours["peak_mb"] / trl["peak_mb"])


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
    # By hand: 4 sequences of 6 + 3 tokens. Sampling: the prompt, then tokens 1 and 2. Half of them have an old pass.
    sampling = forward("tiny", 6, 6, 1) + forward("tiny", 1, 7, 1) + forward("tiny", 1, 8, 1)
    assert multiply_adds(Cycle(**TINY_CYCLE), "tiny") == 4 * sampling + (2 + 3 * 4) * forward("tiny", 9, 9, 4)


def test_cycle_settings_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="size is 'huge'; choose from tiny, small, large"):
        Cycle(size="huge")
    with pytest.raises(ValueError, match="cycles is 0"):
        Cycle(cycles=0)
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
