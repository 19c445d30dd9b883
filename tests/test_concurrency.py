"""Processes that meet at a run's folder: whoever reads sees whole steps of one run, whoever writes is alone."""

import functools
import os
import random

from moe_rl import store
from moe_rl.store import reading

CONFIG = {"seed": 0}
LIVES = 12


def live(folder, number, rng):
    """One process's part of a run: it goes on from its checkpoint, writes some steps and is gone at any instruction."""
    with store.open_run(folder, CONFIG) as writer:
        last = 0
        if writer.resumes:
            last = int(writer.checkpoint.read_text())
            writer.rewind(last)
        else:
            writer.describe(life=number)
        end = last + rng.randint(1, 12)
        for step in range(last + 1, end + 1):
            for update in (1, 2):
                writer.append("updates", {"step": step, "update": update, "lr": float(number)})
                if step == end and number < LIVES and rng.random() < 0.3:
                    os._exit(9)
            writer.append("steps", {"step": step, "reward": float(number)})
            if step == end and number < LIVES and rng.random() < 0.5:
                os._exit(9)
            writer.status("running", step=step)
            if rng.random() < 0.7:
                writer.checkpoint.write_text(str(step))
        if number < LIVES:
            os._exit(9)
        writer.status("finished", step=end)


def in_child(work):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return child


def test_a_reader_beside_a_run_that_is_killed_and_goes_on_sees_whole_steps_of_it(tmp_path):
    """Each step has two rows of `updates` and one of `steps`, written by the same process; none may be missing."""
    folder = store.run_folder(tmp_path, "s", "x", {}, 0)
    reads, seen = 0, set()
    for number in range(LIVES + 1):
        child, running = in_child(functools.partial(live, folder, number, random.Random(number))), True
        while running:
            running = os.waitpid(child, os.WNOHANG) == (0, 0)
            if not store.run_folders(folder.parents[2]):
                continue
            study = store.read_study(folder.parents[2])
            steps, updates = study.steps, study.updates
            reads += 1
            seen.add(study.runs["state"][0])
            assert steps["step"].to_list() == list(range(1, len(steps) + 1))
            assert list(zip(updates["step"], updates["update"], strict=True)) == [
                (step, update) for step in steps["step"] for update in (1, 2)
            ]
            assert updates["lr"].to_list() == [life for life in steps["reward"] for _ in (1, 2)]
            assert steps["reward"].is_monotonic_increasing
    assert seen == {"running", "cut_off", "finished"}
    assert reads > 3 * LIVES


def test_a_reader_that_is_overtaken_reads_again(tmp_path, monkeypatch):
    """Between its look at status.json and its look at a table another process goes on with the run, from step 1."""
    folder = store.run_folder(tmp_path, "s", "x", {}, 0)
    with store.open_run(folder, CONFIG) as writer:
        writer.describe(life=1)
        writer.append("steps", *({"step": step, "reward": 0.5} for step in (1, 2, 3)))
        writer.status("running", step=3)
        writer.checkpoint.write_text("1")
    read, overtaken = reading.read_bytes, []

    def overtake(path):
        if path.name == "steps.jsonl" and not overtaken:
            overtaken.append(path)
            with store.open_run(folder, CONFIG) as writer:
                writer.rewind(1)
                writer.append("steps", {"step": 2, "reward": 0.25})
                writer.status("running", step=2)
        return read(path)

    monkeypatch.setattr(reading, "read_bytes", overtake)
    assert store.read_study(folder.parents[2]).steps["reward"].to_list() == [0.5, 0.25]
    assert overtaken


def test_of_many_processes_that_open_a_run_at_once_one_writes_it(tmp_path):
    folder = store.run_folder(tmp_path, "s", "x", {}, 0)

    def write():
        try:
            with store.open_run(folder, CONFIG) as writer:
                if writer is None:
                    os._exit(3)  # finished before
                for step in range(1, 30):
                    writer.append("steps", {"step": step, "reward": float(os.getpid())})
                    writer.status("running", step=step)
                writer.status("finished", step=29)
        except store.StoreError as error:
            os._exit(2 if "being written by another process" in str(error) else 1)

    children = [in_child(write) for _ in range(6)]
    codes = sorted(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)
    assert codes.count(0) == 1
    assert set(codes) <= {0, 2, 3}
    rows = store.read_table(folder, "steps")
    assert [row["step"] for row in rows] == list(range(1, 30))
    assert len({row["reward"] for row in rows}) == 1
