"""experiments/bench.py: its table has what it says. Whether the numbers are good is not a matter for a test."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moe_rl.benchmarks import MODES, Instrument, instrument

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


def test_the_command_writes_its_rows(tmp_path):
    options = [f"--{name}={value}" for name, value in TINY.items()]
    command = [sys.executable, "experiments/bench.py", "instrument", *options, f"--json={tmp_path / 'rows.json'}"]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 10
    assert len(json.loads((tmp_path / "rows.json").read_text())["rows"]) == 10
