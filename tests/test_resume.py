"""A run that was cut off goes on bit for bit; a damaged checkpoint is never read as something else."""

import contextlib
import dataclasses
import os
import random
import shutil
import signal
import time

import pytest
import torch
from models import tiny
from test_damage import no_file_longer_than
from test_laws import SECONDS, SMALL, Vowels, split_arm

from moe_rl import checkpoint, loop
from moe_rl.cold_start import ColdStart
from moe_rl.critic import Critic, CriticSettings
from moe_rl.drift.meter import DriftSettings
from moe_rl.engines.hf import Hf
from moe_rl.experiment import Experiment, Launch
from moe_rl.optim import Optim
from moe_rl.routers.balanced import Balanced
from moe_rl.routers.native import Native
from moe_rl.store import TABLES, WriteError, open_run, read_json, read_table, state_of

OPTIM = Optim(lr=1e-2, schedule="linear", warmup_updates=2)


def experiment(arm="grpo_routing_replay", router=None, steps=4, optim=None, **changes):
    return Experiment(
        study_name="s", seed=0, steps=steps, prompts=4, completions=2, updates=2, micro_batch=0,
        activation_checkpointing=False, eval_prompts=4, eval_every=2, model=SMALL,
        router=router or Native(), task=Vowels(), engine=Hf(max_new_tokens=6),
        optim=optim or OPTIM, cold_start=ColdStart(steps=2, batch_size=4),
        drift=DriftSettings(rollouts=2, probe=2, trace_every=2),
        launch=Launch(keep_policy=True), **split_arm(arm, changes),
    )  # fmt: skip


def go(folder, e, report=lambda row: None):
    with open_run(folder / "run", {"name": "same"}) as writer:
        return loop.run(e, writer, str(folder / "cache"), report) if writer else "finished before"


def outcome(folder):
    """Everything that a run leaves but seconds: tables, trace bytes and final weights."""
    run = folder / "run"
    rows = {t: [{k: v for k, v in row.items() if k not in SECONDS} for row in read_table(run, t)] for t in TABLES}
    traces = {path.name: path.read_bytes() for path in sorted(run.glob("traces/*"))}
    return repr(rows), traces, [path.read_bytes() for path in sorted(run.glob("policy/*.safetensors"))]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The outcome of a run that nothing interrupted, by router."""
    made = {}

    def of(router=None):
        if router not in made:
            folder = tmp_path_factory.mktemp("whole")
            go(folder, experiment(router=router))
            made[router] = outcome(folder)
        return made[router]

    return of


class Cut(BaseException):
    """As a keyboard interrupt."""


@pytest.mark.parametrize("router", [None, Balanced(speed=0.05)])
@pytest.mark.parametrize("after", [0, 1, 3, 4])
def test_a_run_interrupted_after_any_step_ends_as_if_it_had_not_been(tmp_path, whole, after, router):
    def cut(row):
        if row["step"] == after:
            raise Cut

    with pytest.raises(Cut):
        go(tmp_path, experiment(router=router), cut)
    assert state_of(tmp_path / "run") == "cut_off"
    seen = []
    assert go(tmp_path, experiment(router=router), seen.append) == "finished"
    assert outcome(tmp_path) == whole(router)
    # The report comes before the step's checkpoint: the interrupted step itself is done again, nothing before it.
    assert [row["step"] for row in seen] == list(range(after if after > 1 else 0, 5))
    assert ("resumed" in read_json(tmp_path / "run" / "run.json")) == (after > 1)
    assert not (tmp_path / "run" / "checkpoint.safetensors").exists()


@pytest.mark.parametrize("optim", [{"trains": "no_router"}, {"trains": "router"}, {"router_lr": 3.0}], ids=str)
def test_a_run_that_trains_some_weights_goes_on_as_if_it_had_not_been_cut(tmp_path, optim):
    def cut(row):
        if row["step"] == 3:
            raise Cut

    e = experiment(optim=dataclasses.replace(OPTIM, **optim))
    go(tmp_path / "whole", e)
    with pytest.raises(Cut):
        go(tmp_path / "cut", e, cut)
    assert go(tmp_path / "cut", e) == "finished"
    assert "resumed" in read_json(tmp_path / "cut" / "run" / "run.json")
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")


def test_sigkill_at_random_instants_changes_nothing(tmp_path, whole):
    """Each life of the run is a process that is killed a random moment after it has written so many steps."""
    rng, table = random.Random(0), tmp_path / "run" / "steps.jsonl"
    for steps in (0, 1, 2, 3, None):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                go(tmp_path, experiment())
                code = 0
            finally:
                os._exit(code)
        if steps is None:
            assert os.waitpid(child, 0)[1] == 0, "the run itself failed"
            break
        while not (table.exists() and len(table.read_bytes().splitlines()) > steps):
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "the run ended before it could be killed"
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.2))
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        assert state_of(tmp_path / "run") == "cut_off"
    assert outcome(tmp_path) == whole()


@pytest.mark.parametrize(("error", "resumes"), [(OSError("no space left on device"), True), (KeyError("x"), False)])
def test_a_run_that_the_machine_failed_goes_on_and_one_that_failed_by_itself_starts_again(
    tmp_path, whole, error, resumes
):
    def fail(row):
        if row["step"] == 2:
            raise error

    with pytest.raises(type(error)):
        go(tmp_path, experiment(), fail)
    assert read_json(tmp_path / "run" / "status.json")["reason"] == f"{type(error).__name__}: {error}"
    assert go(tmp_path, experiment()) == "finished"
    assert ("resumed" in read_json(tmp_path / "run" / "run.json")) == resumes
    assert outcome(tmp_path) == whole()


def test_a_run_whose_checkpoint_finds_no_room_goes_on_when_there_is_some(tmp_path, whole):
    with contextlib.ExitStack() as stack:

        def fill(row):
            if row["step"] == 3:
                stack.enter_context(no_file_longer_than(1000))

        with pytest.raises(WriteError, match=r"cannot write .*run/checkpoint.safetensors: .*; make room"):
            go(tmp_path, experiment(), fill)
    assert read_json(tmp_path / "run" / "status.json")["resumable"]
    seen = []
    assert go(tmp_path, experiment(), seen.append) == "finished"
    assert [row["step"] for row in seen] == [3, 4]  # from the checkpoint before
    assert outcome(tmp_path) == whole()


def test_a_run_goes_on_from_its_checkpoint_alone(tmp_path, whole, monkeypatch):
    """Neither the cold start's cache nor the code and threads that warmed it up have to be there again."""

    def cut(row):
        if row["step"] == 3:
            raise Cut

    with pytest.raises(Cut):
        go(tmp_path, experiment(), cut)
    shutil.rmtree(tmp_path / "cache")
    monkeypatch.setattr("moe_rl.cold_start.train", lambda *a: pytest.fail("the cold start was trained again"))
    assert go(tmp_path, experiment()) == "finished"
    assert outcome(tmp_path) == whole()


def saved(tmp_path, model):
    optimizer, schedule = Optim(schedule="cosine").build(model, 10)
    model(input_ids=torch.tensor([[5, 6, 7]])).logits.sum().backward()
    optimizer.step()
    schedule.step()
    checkpoint.save(tmp_path / "c", model, optimizer, schedule, {"step": 1}, {"ids": torch.tensor([7])})
    return tmp_path / "c"


def test_a_checkpoint_that_is_damaged_or_foreign_is_refused(tmp_path):
    model = tiny(layers=1)
    path = saved(tmp_path, model)
    whole, rng = path.read_bytes(), random.Random(0)
    places = [*range(0, 64), *(rng.randrange(len(whole)) for _ in range(64))]
    fresh = tiny(layers=1, seed=3)
    made = Optim(schedule="cosine").build(fresh, 10)
    for place in places:
        for damaged in (whole[:place], whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :]):
            path.write_bytes(damaged)
            with pytest.raises(checkpoint.CheckpointError, match="run it again"):
                checkpoint.load(path, fresh, *made)
    path.write_bytes(whole)
    other = tiny(layers=2)
    with pytest.raises(checkpoint.CheckpointError, match="another model"):
        checkpoint.load(path, other, *Optim().build(other, 10))
    optimizer, schedule = made
    assert checkpoint.load(path, fresh, optimizer, schedule) == ({"step": 1}, {"ids": torch.tensor([7])})
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), fresh.state_dict().values(), strict=True))
    assert optimizer.param_groups[0]["lr"] == schedule.get_last_lr()[0] < 2e-4


@pytest.mark.parametrize(
    ("optim", "reason"),
    [
        ({"lr": 1e38, "max_grad_norm": 0.0}, "the policy's logits are not finite at step 3"),
        ({"lr": 1e38, "max_grad_norm": 0.0, "updates": 2}, "loss nan, gradient norm nan at update 2 at step 2"),
    ],
    ids=["in sampling", "in an update"],
)
def test_a_run_that_diverges_after_a_checkpoint_leaves_none(tmp_path, optim, reason):
    settings = {name: value for name, value in optim.items() if name != "updates"}
    e = experiment(optim=Optim(**settings, warmup_updates=0))
    e = dataclasses.replace(e, updates=optim.get("updates", 1), eval_every=0)
    build = Optim.build

    def later(self, model, total):
        """The learning rate is that high from the second step on: a checkpoint has been written by then."""
        optimizer, schedule = build(dataclasses.replace(self, lr=1e-3), model, total)
        first = e.updates
        schedule.lr_lambdas = [lambda update: 1.0 if update < first else self.lr / 1e-3]
        return optimizer, schedule

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Optim, "build", later)
        assert go(tmp_path, e) == "diverged"
    status = read_json(tmp_path / "run" / "status.json")
    assert status["reason"] == reason
    assert [row["step"] for row in read_table(tmp_path / "run", "steps")] == list(range(status["step"]))
    assert not (tmp_path / "run" / "checkpoint.safetensors").exists()


def test_moments_come_back_to_where_the_weights_are(tmp_path):
    """The step too: fused AdamW on a GPU reads it there. The meta device stands for any that is not the CPU."""
    model, elsewhere = torch.nn.Linear(3, 1, bias=False), torch.nn.Linear(3, 1, bias=False, device="meta")
    optimizer, schedule = Optim().build(model, 10)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path / "c", model, optimizer, schedule, {}, {})
    resumed, schedule = Optim().build(elsewhere, 10)
    checkpoint.load(tmp_path / "c", elsewhere, resumed, schedule)
    trained, critic = (Critic(tiny(layers=1), CriticSettings()) for _ in range(2))
    trained.scores(torch.tensor([[5, 6, 7]]), torch.ones(1, 3)).sum().backward()
    trained.optimizer.step()
    critic.to("meta").resume(trained.state())
    for made in (resumed, critic.optimizer):
        places = {str(moment.device) for moments in made.state.values() for moment in moments.values()}
        assert places == {"meta"}


def test_checkpoints_can_be_left_out(tmp_path):
    e = experiment(steps=1)
    e = dataclasses.replace(e, launch=Launch(checkpoint_every=0))
    assert go(tmp_path, e) == "finished"
