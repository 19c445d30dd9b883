"""Mirrors of a run: what a tracker is told, and that nothing it does can cost the run."""

import contextlib
import dataclasses
import importlib.util
import re
import tomllib
from pathlib import Path
from typing import ClassVar

import pytest
from test_cli import SMALL, train_here

from moe_rl import discovery, store
from moe_rl.loggers.base import Logger, mirror

LOGGERS = discovery.variants("moe_rl.loggers", Logger)
CONFIG = {"seed": 0, "optim": {"lr": 0.5}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Missing(Logger):
    package: ClassVar = "a_tracker_that_nobody_has"

    def open(self, run):
        raise AssertionError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failing(Logger):
    """Fails when it is opened, at the second row, or when it is closed."""

    package: ClassVar = "json"
    at: str = "log"
    seen: ClassVar[list] = []

    @contextlib.contextmanager
    def open(self, run):
        if self.at == "open":
            raise ConnectionError("no tracker there")

        def log(taken, numbers):
            self.seen.append(taken)
            if self.at == "log" and len(self.seen) == 2:
                raise OSError("tracker is full")

        yield log
        if self.at == "close":
            raise RuntimeError("tracker lost the end")


def write_run(folder, logger, first=0, last=2):
    """Steps `first` to `last` of a run with two updates a step, the first of them as if it went on."""
    with store.open_run(folder, CONFIG) as writer, mirror(logger, folder, "s", CONFIG, 2) as writer.mirror:
        for step in range(first, last + 1):
            for update in (1, 2) if step else ():
                writer.append("updates", {"step": step, "update": update, "lr": 0.25 * step, "log_w_q": [0.0, 1.0]})
            writer.append("steps", {"step": step, "reward": 0.5 * step})
            writer.append("drift", {"step": step, "update": 1, "tokens": "probe", "slot_change": [0.5]})
        writer.status("finished")


@pytest.fixture
def folder(tmp_path):
    return store.run_folder(tmp_path, "s", "grpo", {}, 0)


def test_every_logger_is_an_extra_of_its_name():
    extras = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    for stem, kind in LOGGERS.items():
        names = [re.match(r"[\w.-]+", requirement)[0] for requirement in extras["optional-dependencies"][stem]]
        assert names == [kind.package]


def tensorboard_scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {tag: [(x.step, x.value) for x in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


READERS = {"tensorboard": tensorboard_scalars}


@pytest.mark.parametrize("stem", LOGGERS)
def test_a_logger_is_told_all_numbers_at_the_updates_taken_or_names_its_extra_where_it_is_missing(stem, folder, capfd):
    if importlib.util.find_spec(LOGGERS[stem].package) is None:
        with pytest.raises(ValueError, match=rf"is not installed; run  pip install 'moe_rl\[{stem}\]'"):
            LOGGERS[stem]()
        return
    read = READERS.get(stem)
    write_run(folder, LOGGERS[stem]())
    assert sum(path.stat().st_size for path in (folder / stem).glob("**/*") if path.is_file()) > 100
    assert read is None or read(folder / stem) == {
        "steps/step": [(0, 0), (2, 1), (4, 2)],
        "steps/reward": [(0, 0), (2, 0.5), (4, 1)],
        "updates/step": [(1, 1), (2, 1), (3, 2), (4, 2)],
        "updates/update": [(1, 1), (2, 2), (3, 1), (4, 2)],
        "updates/lr": [(1, 0.25), (2, 0.25), (3, 0.5), (4, 0.5)],
    }
    (folder / "status.json").unlink()
    write_run(folder, LOGGERS[stem](), first=2, last=3)  # it goes on after step 1: the old step 2 is no more
    assert read is None or read(folder / stem)["steps/reward"] == [(0, 0), (2, 0.5), (4, 1), (6, 1.5)]
    assert [row["reward"] for row in store.read_table(folder, "steps")] == [1.0, 1.5]
    if read:  # others hold on to their files, in one process
        (folder / "status.json").unlink()
        write_run(folder, LOGGERS[stem](), last=0)  # it begins again
        assert read(folder / stem)["steps/reward"] == [(0, 0)]
    assert "warning: logger" not in capfd.readouterr().err


@pytest.mark.parametrize("at", ["open", "log", "close"])
def test_a_logger_that_fails_is_dropped_with_one_warning_and_the_run_goes_on(at, folder, capsys):
    Failing.seen.clear()
    write_run(folder, Failing(at=at))
    err = capsys.readouterr().err
    assert err.startswith("warning: logger=test_loggers is dropped, the run goes on without it: ")
    assert err.count("\n") == 1
    assert len(Failing.seen) == {"open": 0, "log": 2, "close": 7}[at]
    assert store.state_of(folder) == "finished"
    assert [row["lr"] for row in store.read_table(folder, "updates")] == [0.25, 0.25, 0.5, 0.5]


def test_a_failing_logger_of_a_real_run_is_no_part_of_what_the_run_is(tmp_path, monkeypatch, capsys):
    Failing.seen.clear()
    run = [*SMALL, f"launch.results_dir={tmp_path}"]
    code, _, err = train_here(monkeypatch, capsys, *run, "+logger._target_=test_loggers.Failing", "+logger.at=log")
    assert (code, err.count("warning: logger=test_loggers is dropped")) == (0, 1)
    assert Failing.seen == [0, 1]
    code, out, _ = train_here(monkeypatch, capsys, *run)
    assert code == 0
    assert "finished before" in out, "another folder, or another config"


def test_a_tracker_that_is_not_installed_is_refused_before_the_run(tmp_path, monkeypatch, capsys):
    run = ["steps=1", f"launch.results_dir={tmp_path}", "+logger._target_=test_loggers.Missing"]
    for mode in ([], ["-m", "seed=0,1"]):
        code, _, err = train_here(monkeypatch, capsys, *mode, *run)
        assert code == 2
        assert "logger: a_tracker_that_nobody_has is not installed; run pip install" in " ".join(err.split())
    assert not list(tmp_path.glob("**/status.json"))
