"""Damaged files and full disks: an error that names the file, or the right answer, never a wrong number."""

import contextlib
import dataclasses
import random
import resource
import shutil
import signal

import pytest

from moe_rl import store
from moe_rl.store import StoreError, WriteError, open_run, pack, read_study

CONFIG = {"optim": {"lr": 0.5}, "seed": 0}


@pytest.fixture
def folder(tmp_path):
    """A finished run with a row in each table, as small as can be: every byte of it is damaged in turn."""
    folder = store.run_folder(tmp_path, "s", "x", {}, 0)
    with open_run(folder, CONFIG) as writer:
        writer.describe(top_k=2)
        writer.append("steps", {"step": 1, "reward": 0.5})
        writer.append("updates", {"step": 1, "lr": 0.25, "log_w_q": [0.5, float("nan")]})
        writer.append("drift", {"step": 1, "tokens": "probe", "n": 7})
        writer.status("finished", step=1)
    return folder


def contents(folder):
    """All that a study says, as text, in which nan equals nan."""
    study = read_study(folder)
    tables = [getattr(study, name).dropna(axis="columns", how="all").to_dict("list") for name in store.TABLES]
    return repr((study.runs.to_dict("list"), tables, study.configs))


def damages(data, rng):
    """Cut off at every byte, and one bit flipped in every byte."""
    yield from (data[:length] for length in range(len(data)))
    yield from (data[:i] + bytes([byte ^ (1 << rng.randrange(8))]) + data[i + 1 :] for i, byte in enumerate(data))


def said_of(path, study, damaged):
    """What reading a study with each damage of one of its files said; '' where it gave an answer, the right one."""
    right, data, said = contents(study), path.read_bytes(), []
    for other in damaged:
        path.write_bytes(other)
        try:
            said.append("" if contents(study) == right else "a wrong answer")
        except StoreError as error:
            said.append(str(error))
    path.write_bytes(data)
    assert contents(study) == right
    return said


@pytest.mark.parametrize(
    "name", ["status.json", "run.json", "config.yaml", "steps.jsonl", "updates.jsonl", "drift.jsonl"]
)
def test_any_damage_of_a_run_is_an_error_or_does_not_show(folder, name):
    path = folder / name
    said = said_of(path, folder.parents[2], damages(path.read_bytes(), random.Random(0)))
    assert all(str(path) in message for message in said if message)
    assert said.count("") < 0.05 * len(said)


def test_any_damage_of_a_packed_study_is_an_error_or_does_not_show(folder, tmp_path):
    """Each file of it: configs.json at every byte, the tables, whose digests are in it, in some hundred places."""
    packed = tmp_path / "packed"
    study, rng = read_study(folder.parents[2]), random.Random(0)
    paths = pack(study, packed, study.runs[list(store.KEY)])
    assert len(paths) == 6
    for path in paths:
        data = path.read_bytes()
        damaged = list(damages(data, rng))
        said = said_of(path, packed, damaged if path.suffix == ".json" else rng.sample(damaged, 100))
        assert all(str(path) in message for message in said if message)
        assert said.count("") < 0.05 * len(said)
        path.unlink()
        with pytest.raises(StoreError, match="no runs below" if path.stem == "runs" else rf"{path} is missing"):
            read_study(packed)
        path.write_bytes(data)


def test_files_of_two_packings_are_not_taken_for_one(folder, tmp_path):
    study = read_study(folder.parents[2])
    for name, reward in (("one", 0.5), ("other", 0.25)):
        steps = study.steps.assign(reward=reward)
        pack(dataclasses.replace(study, steps=steps), tmp_path / name, study.runs[list(store.KEY)])
    shutil.copy(tmp_path / "other" / "steps.parquet", tmp_path / "one")
    with pytest.raises(StoreError, match=r"one/steps.parquet is damaged .*; pack the study again"):
        read_study(tmp_path / "one")


def test_a_newer_packed_study_is_refused(folder, tmp_path):
    study = read_study(folder.parents[2])
    pack(study, tmp_path / "packed", study.runs[list(store.KEY)])
    path = tmp_path / "packed" / "configs.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(StoreError, match=r"configs.json has format 2, this version reads 1; update moe_rl"):
        read_study(tmp_path / "packed")


# ------------------------------------------------------------------------------------------------------------ no room
@contextlib.contextmanager
def no_file_longer_than(limit):
    """As on a disk that is full: writing more fails, in this process, with an OSError."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def write_until_full(folder):
    with open_run(folder, CONFIG) as writer, no_file_longer_than(500):
        for step in range(1, 100):
            writer.append("steps", {"step": step, "reward": 0.25})
            writer.status("running", step=step)


def test_a_row_that_finds_no_room_is_an_error_that_names_its_file_and_leaves_the_rows_before(tmp_path):
    folder = store.run_folder(tmp_path, "s", "x", {}, 0)
    with pytest.raises(WriteError, match=r"cannot write .*seed_0/steps.jsonl: .*too large; make room"):
        write_until_full(folder)
    text = (folder / "steps.jsonl").read_text()
    assert not text.endswith("\n"), "the last row was written in part"
    rows = store.read_table(folder, "steps")
    assert [row["step"] for row in rows] == list(range(1, text.count("\n") + 1))
    status = store.read_status(folder)
    assert (status["state"], status["resumable"]) == ("failed", True)
    assert not list(folder.glob(".*")), "temporary files are left"


def test_a_row_after_one_that_found_no_room_does_not_follow_its_remains(tmp_path):
    folder = store.run_folder(tmp_path, "s", "x", {}, 0)
    with open_run(folder, CONFIG) as writer:
        writer.append("steps", {"step": 1, "reward": 0.25})
        with no_file_longer_than(40), pytest.raises(WriteError):
            writer.append("steps", {"step": 2, "reward": 0.25})
        assert (folder / "steps.jsonl").stat().st_size == 40
        writer.append("steps", {"step": 9, "reward": 0.125})
        writer.status("finished", step=9)
    assert [row["step"] for row in store.read_table(folder, "steps")] == [1, 9]


def test_a_packed_study_that_finds_no_room_leaves_the_one_before(folder, tmp_path):
    study = read_study(folder.parents[2])
    keys = study.runs[list(store.KEY)]
    pack(study, tmp_path / "packed", keys)
    before = contents(tmp_path / "packed")
    with no_file_longer_than(100), pytest.raises(WriteError, match=r"cannot write .*runs.parquet"):
        pack(dataclasses.replace(study, steps=study.steps.assign(reward=0.125)), tmp_path / "packed", keys)
    assert contents(tmp_path / "packed") == before
