"""Runs on disk: one writer, one identity, nothing unfinished read as finished, nothing damaged read at all."""

import contextlib
import fcntl
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from moe_rl import store

CONFIG = {"arm": "gspo", "optim": {"lr": 1e-4}, "seed": 0}
HOLDER = """
import sys
import threading
from pathlib import Path
from moe_rl import store
try:
    with store.open_run(Path(sys.argv[1]), {"seed": 0}) as writer:
        writer.append("steps", {"step": 1, "reward": 0.5})
        print("won", flush=True)
        sys.stdin.readline()
        writer.status("finished", step=1)
except store.StoreError as error:
    print("refused", error, flush=True)
"""


def hold(folder: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def finish(folder: Path, config=CONFIG, state="finished", rows=({"step": 1, "reward": 0.5},)):
    with store.open_run(folder, config) as writer:
        assert writer is not None
        writer.describe(num_layers=2)
        for row in rows:
            writer.append("steps", row)
        writer.status(state, step=len(rows))


@pytest.fixture
def folder(tmp_path):
    return store.run_folder(tmp_path, "study", "gspo", {}, 0)


def test_another_config_is_refused_and_the_differing_keys_are_named(folder):
    finish(folder)
    other = {"arm": "gspo", "optim": {"lr": 2e-4, "beta": 1}, "seed": 0}
    with (
        pytest.raises(store.StoreError, match=r"optim.beta \(absent / 1\), optim.lr \(0.0001 / 0.0002\)"),
        store.open_run(folder, other),
    ):
        pass
    assert store.read_study(folder.parents[2]).steps["reward"].to_list() == [0.5]


@pytest.mark.parametrize("state", ["finished", "diverged"])
def test_a_run_with_a_result_is_not_run_again(folder, state):
    finish(folder, state=state)
    with store.open_run(folder, CONFIG) as writer:
        assert writer is None
    assert store.state_of(folder) == state
    assert len(store.read_table(folder, "steps")) == 1


def test_a_failed_run_says_why_and_starts_afresh(folder):
    with contextlib.suppress(ZeroDivisionError), store.open_run(folder, CONFIG) as writer:
        writer.append("steps", {"step": 1, "reward": 0.1})
        _ = 1 / 0
    run = store.read_study(folder.parents[2]).runs.iloc[0]
    assert run["state"] == "failed"
    assert run["reason"] == "ZeroDivisionError: division by zero"
    finish(folder)
    assert [row["reward"] for row in store.read_table(folder, "steps")] == [0.5]


def test_of_two_processes_racing_for_a_run_one_is_refused(folder):
    racers = [hold(folder), hold(folder)]
    said = sorted(racer.stdout.readline() for racer in racers)
    for racer in racers:
        racer.communicate("\n", timeout=30)
    assert said[1] == "won\n"
    assert said[0].startswith("refused")
    assert "being written by another process" in said[0]
    assert store.state_of(folder) == "finished"
    assert len(store.read_table(folder, "steps")) == 1


def test_a_killed_holder_leaves_a_cut_off_run_that_can_be_run_again(folder):
    holder = hold(folder)
    assert holder.stdout.readline() == "won\n"
    assert store.state_of(folder) == "running"
    os.kill(holder.pid, signal.SIGKILL)
    holder.communicate(timeout=30)
    assert store.state_of(folder) == "cut_off"
    finish(folder, {"seed": 0})
    assert store.state_of(folder) == "finished"


def test_a_reader_that_looks_at_a_run_does_not_keep_a_writer_out(folder):
    folder.mkdir(parents=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)  # what state_of holds for a moment
        release = threading.Timer(0.15, fcntl.flock, (lock, fcntl.LOCK_UN))
        release.start()
        finish(folder)
        release.join()
    assert store.state_of(folder) == "finished"


def test_of_a_run_that_was_cut_off_what_its_status_vouches_for_is_read(folder):
    finish(folder, state="running", rows=[{"step": 1, "reward": 0.1}, {"step": 2, "reward": 0.2}])
    with open(folder / "steps.jsonl", "a") as file:
        file.write('{"step": 3, "reward": 0.3}\n{"step": 4, "rew')
    assert store.state_of(folder) == "cut_off"
    assert [row["step"] for row in store.read_table(folder, "steps")] == [1, 2]


def test_a_run_of_before_there_were_digests_is_read_up_to_a_torn_last_line(folder):
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("seed: 0\n")
    (folder / "status.json").write_text('{"state": "running", "pid": 1}')
    (folder / "run.json").write_text('{"format": 1, "num_layers": 2}')
    (folder / "steps.jsonl").write_text('{"step": 1, "reward": 0.1}\n{"step": 2, "rew')
    study = store.read_study(folder.parents[2])
    assert (study.runs["state"][0], study.steps["reward"].to_list(), study.configs) == ("cut_off", [0.1], [{"seed": 0}])
    (folder / "status.json").write_text('{"state": "finished", "pid": 1}')
    with pytest.raises(store.StoreError, match=r"steps.jsonl line 2 is damaged"):
        store.read_table(folder, "steps")


@pytest.mark.parametrize("bad", ["{bad", '["a list"]', '{"step": 1, "rewrad": 2}', ""])
def test_a_line_that_is_no_row_is_an_error_that_names_file_and_line(folder, bad):
    finish(folder)
    (folder / "status.json").write_text('{"state": "finished"}')  # of before there were digests
    path = folder / "steps.jsonl"
    path.write_text(bad + "\n" + path.read_text())
    with pytest.raises(store.StoreError, match=r"steps.jsonl line 1 is "):
        store.read_table(folder, "steps")


@pytest.mark.parametrize("name", ["run.json", "status.json"])
def test_damaged_facts_are_an_error_that_names_the_file(folder, name):
    finish(folder)
    (folder / name).write_text('{"state": "finis')
    with pytest.raises(store.StoreError, match=rf"{name} is damaged"):
        store.read_study(folder.parents[2])


def test_a_newer_format_is_refused(folder):
    finish(folder)
    for name in ("run.json", "status.json"):
        text = (folder / name).read_text()
        (folder / name).write_text('{"format": 99, "news": "of a kind unknown here"}')
        with pytest.raises(store.StoreError, match=rf"{name} has format 99, this version reads 1; update moe_rl"):
            store.read_study(folder.parents[2])
        (folder / name).write_text(text)


def test_a_copy_of_a_run_beside_it_is_no_run(folder):
    finish(folder)
    shutil.copytree(folder, folder.with_name("seed_0.bak"))
    assert store.read_study(folder.parents[2]).runs["seed"].to_list() == [0]


def test_nan_and_infinity_survive_and_names_stay_names(folder):
    rows = [{"step": 1, "reward": float("nan"), "entropy": float("-inf"), "reward_sd": float("inf")}]
    with store.open_run(folder, CONFIG) as writer:
        writer.append("steps", rows[0])
        writer.append("updates", {"step": 1, "update": 1, "log_w_q": [0.0, float("nan")]})
        writer.append("drift", {"step": 1, "tokens": "probe", "reference": "old", "slot_change": [0.5, 0.25]})
        writer.status("diverged", step=1)
    study = store.read_study(folder.parents[2])
    step, update, drift = study.steps.iloc[0], study.updates.iloc[0], study.drift.iloc[0]
    assert math.isnan(step["reward"])
    assert (step["entropy"], step["reward_sd"]) == (-math.inf, math.inf)
    assert update["log_w_q"][0] == 0
    assert math.isnan(update["log_w_q"][1])
    assert (drift["tokens"], drift["slot_change"]) == ("probe", [0.5, 0.25])


def test_an_unknown_column_is_refused_and_nothing_is_written(folder):
    with (
        pytest.raises(store.StoreError, match=r"table steps has no column \['rewrad'\]"),
        store.open_run(folder, CONFIG) as writer,
    ):
        writer.append("steps", {"step": 1, "rewrad": 1})
    assert store.read_table(folder, "steps") == []


def test_folder_names_are_the_sorted_changed_settings(tmp_path):
    def name(**knobs):
        return store.run_folder(tmp_path, "s", "grpo", knobs, 3).relative_to(tmp_path).as_posix()

    assert name() == "s/grpo/default/seed_3"
    assert name(**{"optim.lr": 0.1, "model.layers": 4}) == "s/grpo/model.layers=4,optim.lr=0.1/seed_3"


@pytest.mark.parametrize(("study", "arm", "knobs"), [("a/b", "x", {}), ("", "x", {}), ("s", "..", {})])
def test_names_that_leave_the_results_folder_are_refused(tmp_path, study, arm, knobs):
    with pytest.raises(store.StoreError, match="cannot name a results folder"):
        store.run_folder(tmp_path, study, arm, knobs, 0)


def test_a_setting_whose_folder_name_was_cut_short_is_read_whole(tmp_path):
    settings = {f"group.setting_{number}": number for number in range(20)}
    for value in (1, 2):
        varied = settings | {"z.last": value}
        folder = store.run_folder(tmp_path, "s", "gspo", varied, 0)
        with store.open_run(folder, {"seed": 0}, store.settings_name(varied)) as writer:
            writer.describe(label="gspo")
            writer.status("finished")
        assert "~" in folder.parent.name
    runs = store.read_study(tmp_path / "s").runs
    assert runs["knobs"].tolist() == [f"{store.settings_name(settings)},z.last={value}" for value in (1, 2)]
    assert "settings" not in runs


def test_paths_and_long_values_become_one_folder_name_each(tmp_path):
    def middle(**knobs):
        return store.run_folder(tmp_path, "s", "x", knobs, 0).parent.name

    assert middle(path="/data/a b") == "path=%2Fdata%2Fa b"
    assert middle(path="a/b") != middle(path="a%2Fb") != middle(path="a_b")
    one, other = middle(k="v" * 300 + "1"), middle(k="v" * 300 + "2")
    assert one != other
    assert len(one) == len(other) == store.LONGEST_NAME


def test_seeds_come_in_numeric_order_and_an_empty_study_is_an_error(tmp_path):
    for seed in (10, 9):
        finish(store.run_folder(tmp_path, "s", "gspo", {}, seed), {"seed": seed})
    assert store.read_study(tmp_path / "s").runs["seed"].to_list() == [9, 10]
    with pytest.raises(store.StoreError, match="no runs below"):
        store.read_study(tmp_path / "other")


def test_an_unwritable_folder_is_said_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    run = store.open_run(tmp_path / "file" / "x", {})
    with pytest.raises(store.StoreError, match=r"choose another launch\.results_dir"), run:
        pass
