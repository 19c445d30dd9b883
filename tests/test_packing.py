"""A packed study is small and tells the same: summary, figures, settings."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from synthetic import make_study

from moe_rl import contrasts, figures, store, summary
from moe_rl.measures import run_numbers
from moe_rl.store import StoreError, pack, read_study
from moe_rl.store.format import shared_and_varied, unflatten

SCRIPT = Path(__file__).parents[1] / "experiments" / "pack_study.py"
TROUBLED = {"missing": [("gspo", 1)], "diverged": [("grpo", 2)], "failed": [("grpo_routing_replay", 0)]}
KNOBS = [{"optim.lr": 1e-4}, {"optim.lr": 4e-4}]


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return read_study(make_study(tmp_path_factory.mktemp("results"), "s", knobs=KNOBS, steps=12, layers=3, **TROUBLED))


@pytest.fixture(scope="module", params=[1_000_000, 150_000], ids=["whole", "thinned"])
def packed(study, tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("packed") / "s"
    pack(study, folder, run_numbers(study), request.param)
    return read_study(folder)


def test_the_summary_is_unchanged(study, packed):
    assert ("drift" in packed.thinned) == (len(packed.drift) < len(study.drift))
    for table in (summary.summary_table, run_numbers, contrasts.comparison_table):
        pd.testing.assert_frame_equal(table(study), table(packed), check_dtype=False, rtol=1e-6)
    assert summary.incidents(packed) == summary.incidents(study)


def test_thinning_keeps_first_and_last_steps_and_more_of_those_with_soft_drift(study, tmp_path):
    pack(study, tmp_path / "s", run_numbers(study), 150_000)
    packed = read_study(tmp_path / "s")
    assert packed.thinned.startswith("drift: one of ")
    assert sum(path.stat().st_size for path in (tmp_path / "s").iterdir()) < 150_000
    nth = int(packed.thinned.split()[3])
    nth_richer = int(packed.thinned.split()[-1])
    assert nth_richer < nth
    for key, rows in study.drift.groupby(["arm", "knobs", "seed"]):
        steps = sorted(int(step) for step in rows["step"].unique())
        kept = packed.drift[(packed.drift[["arm", "knobs", "seed"]] == list(key)).all(axis=1)]
        richer = steps[::2]  # soft drift and flips are measured at every second step
        plain = [step for step in steps if step not in richer]
        thinned = {*plain[::nth], plain[-1], *richer[::nth_richer], richer[-1]}
        assert sorted(int(step) for step in kept["step"].unique()) == sorted(thinned)
        assert kept["flip_rms"].notna().any()
        assert set(kept["update"]) == set(rows["update"])


def test_tables_come_back_as_they_were(study, tmp_path):
    pack(study, tmp_path / "s", run_numbers(study))
    packed = read_study(tmp_path / "s")
    assert packed.thinned == ""
    for name in store.TABLES:
        before, after = getattr(study, name), getattr(packed, name)
        assert list(before) == list(after)
        assert len(before) == len(after)
    for was, now in zip(study.drift["slot_change"], packed.drift["slot_change"], strict=True):
        assert isinstance(now, list)
        np.testing.assert_allclose(now, was, rtol=2**-10)
    left_out = {"folder", "pid"}
    for was, now in zip(study.runs.to_dict("records"), packed.runs.to_dict("records"), strict=True):
        told = {key: value for key, value in was.items() if key not in left_out and value == value}
        assert told == {key: value for key, value in now.items() if key in told}
        assert now["noise_floor"] == {"batch_size": 0.0, "decode": 0.0012}
    assert packed.configs == study.configs
    assert set(packed.setting("optim.lr")) == {1e-4, 4e-4}
    assert set(packed.setting("no.such")) == {None}


@pytest.mark.parametrize("name", ["drift_by_layer", "changed_layers", "ratio_bands"])
def test_figures_are_drawn_from_a_thinned_study(study, tmp_path, name):
    pack(study, tmp_path / "s", run_numbers(study), 150_000)
    assert figures.draw(name, read_study(tmp_path / "s")) is not None


def test_settings_are_kept_once_if_shared():
    configs = [{"lr": 1, "arm": {"low": 0.1, "empty": {}}}, {"lr": 2, "arm": {"low": 0.1, "empty": {}, "tau": 3}}]
    shared, varied = shared_and_varied(configs)
    assert shared == {"arm.low": 0.1, "arm.empty": {}}
    assert varied == [{"lr": 1}, {"lr": 2, "arm.tau": 3}]
    assert [unflatten({**shared, **settings}) for settings in varied] == configs


def test_packing_refuses_what_would_be_misread(study, tmp_path):
    numbers = run_numbers(study)
    with pytest.raises(StoreError, match="holds the runs themselves"):
        pack(study, study.folder, numbers)
    pack(study, tmp_path / "s", numbers)
    make_study(tmp_path, "s", steps=1, seeds=[0], arms=["gspo"])
    with pytest.raises(StoreError, match="holds runs and a packed study"):
        read_study(tmp_path / "s")
    with store.open_run(tmp_path / "open" / "gspo" / "default" / "seed_0", {}) as writer:
        writer.describe()
        unfinished = read_study(tmp_path / "open")
        with pytest.raises(StoreError, match="still running"):
            pack(unfinished, tmp_path / "t", numbers)


@pytest.mark.parametrize("name", ["drift.parquet", "configs.json", "measures.parquet"])
def test_a_damaged_pack_is_named(study, tmp_path, name):
    pack(study, tmp_path / "s", run_numbers(study))
    path = tmp_path / "s" / name
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(StoreError, match=name):
        read_study(tmp_path / "s")


def test_a_newer_pack_is_refused(study, tmp_path, monkeypatch):
    monkeypatch.setattr("moe_rl.store.packing.FORMAT", 99)
    pack(study, tmp_path / "s", run_numbers(study))
    monkeypatch.undo()
    with pytest.raises(StoreError, match="has format 99"):
        read_study(tmp_path / "s")


def test_the_script_packs_and_says_how_small(study, tmp_path):
    command = [sys.executable, str(SCRIPT), str(study.folder), "--to", str(tmp_path), "--limit-kb", "110"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True
    )
    assert f"{tmp_path / 's'}: 16 runs, " in done.stdout
    assert "drift: one of" in done.stdout
    assert json.loads((tmp_path / "s" / "configs.json").read_text())["runs"][0]["arm"] == "grpo"
    missing = subprocess.run([*command[:2], str(tmp_path / "nothing")], capture_output=True, text=True, check=False)
    assert missing.returncode == 2
    assert missing.stderr.startswith("error: no runs below")
