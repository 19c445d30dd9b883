"""The command line as a user types it: what is refused, in one line, and what a sweep leaves behind."""

import fcntl
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.plugins import Plugins

from moe_rl import cli, config, progress, store
from moe_rl.store.files import digest
from moe_rl.store.reading import SEAL

TRAIN = str(Path(__file__).parent.parent / "experiments" / "train.py")
FIGURES = str(Path(__file__).parent.parent / "experiments" / "make_figures.py")
SMALL = [
    "steps=2", "prompts=4", "completions=2", "updates=2", "eval_prompts=4", "cold_start.steps=2", "drift.probe=2",
    "drift.rollouts=2", "model.layers=2", "model.hidden_size=32", "model.experts=8", "model.expert_size=16",
]  # fmt: skip


def train_here(monkeypatch, capsys, *arguments):
    """(exit code, stdout, stderr) of the entry point, in this process."""
    monkeypatch.setattr(sys, "argv", [TRAIN, *arguments])
    code = 0
    try:
        cli.train()
    except SystemExit as stopped:
        code = stopped.code or 0
    out = capsys.readouterr()
    return code, out.out, out.err


def launch(*arguments):
    """What a sweep printed that was launched from this process; its runs have processes of their own."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", [TRAIN, "-m", *arguments])
        cli.train()
    return out.getvalue()


REFUSED = {
    "arm=nope": r"Could not find 'arm/nope'.*grpo_routing_replay",
    "router=nope": "Could not find 'router/nope'.*binned",
    "model=nope": "Could not find 'model/nope'.*tiny_mixtral",
    "task=nope": "Could not find 'task/nope'.*sort_digits",
    "optim.lrr=1": "'lrr' not in 'Optim'",
    "optim.lr=abc": "'abc' of type 'str' could not be converted to Float",
    "optim.lr=0": "optim.lr is 0.0; set it above 0",
    "optim.lr=-1": "optim.lr is -1.0; set it above 0",
    "stps=3": "stps",
    "policy_loss=gspo": r"Did you mean to override policy_loss@arm.policy_loss\?\n$",
    "steps=0": "steps is 0; set it to 1 or more",
    "model.top_k=64": "top_k is 64, more than the 32 experts",
    "completions=1": "completions is 1.*2 or more",
    "arm=ppo completions=0": "completions is 0; set it to 1 or more",
    "arm=ppo dynamic_sampling=2": "only a group-relative advantage learns nothing; .*set dynamic_sampling=0",
    "+foo=1": "foo was added and is no setting",
    "-m +foo=1": "foo was added and is no setting",
    "+arm.repaly=old_policy": "arm.repaly was added and is no setting",
    "+launch.job=3": "launch.job was added and is no setting",
    "~critic": "critic was taken out and is needed",
    "~seed": "seed was taken out and is needed",
    "updates=3": "256 sequences do not divide into 3 updates",
    "arm.advantage=best": "'best'; choose one of group_std, group_mean, leave_one_out",
    "arm=sapo arm.policy_loss.tau_negative=0": "tau_negative 0.0 must be above 0",
    "arm=cispo arm.policy_loss.clip_high=-1": "clip_high is -1.0; the weight is at most",
    "arm=gmpo arm.policy_loss.clip_low=-0.1": "clip bounds low -0.1 and high 0.4 are impossible",
    "arm=dr_grpo arm.policy_loss.length=0": "length is 0.0; sums over tokens are divided by it",
    "arm=cispo arm.policy_loss.clip_low=0.2": "'clip_low' not in 'Cispo'",
    "model=tiny_dense arm=grpo_r3": "arm.replay=rollout needs MoE layers",
    "arm.replay=sometimes": "'sometimes'; choose one of none, old_policy, rollout, shuffled, thresholded, sticky",
    "arm=grpo_shuffled_replay prompts=1 completions=4 updates=4": "4 sequences in 4 updates have one each",
    "engine.dtype=fp4": "'fp4'; choose one of same, bfloat16",
    "engine.router_noise=-1": "engine.router_noise is -1.0; set it to 0 or more",
    "model=tiny_dense engine.router_noise=0.1": "needs MoE layers; a dense model runs with engine.router_noise=0",
    "arm.replay_threshold=0.5": "arm.replay=none has none; choose thresholded or sticky",
    "model=tiny_dense arm=grpo_sticky_replay": "arm.replay=sticky needs MoE layers",
    "arm=grpo_thresholded_replay arm.replay_threshold=-1": "arm.replay_threshold is -1.0; set it to 0 or more",
    "optim.balance_loss=-1": "optim.balance_loss is -1.0; set it to 0 or more",
    "model=tiny_dense optim.router_kl=0.1": "optim.router_kl=0",
    "arm.old_logprobs=never": "'never'; choose one of recompute, engine",
    "arm.correction=half": "arm.correction is 'half'; choose one of none, tis, icepop, sequence_mask, rspo",
    "arm.correction=rspo model=tiny_dense": "arm.correction=rspo needs MoE layers",
    "dynamic_sampling=-1": "dynamic_sampling is -1; set it to 0 or more",
    "overlong_buffer=13": "overlong_buffer is 13 and responses have at most 12 tokens",
    "reward=best": "'best'; choose one of verifier, preference_model",
    "preference_model.held_out=0": "preference_model.held_out is 0; set it to 1 or more",
    "arm=ppo arm.advantage=group_std": "Ppo takes its advantages from a critic and arm.advantage=group_std has none",
    "arm=gspo arm.advantage=gae": "gae gives each token an advantage of its own, Gspo takes one a sequence",
    "arm=gspo +lr_of_arm.grpo=1e-3": "lr_of_arm has no rate for gspo; add",
    "optim.lr=1e-3 +lr_of_arm.grpo=1e-3": "optim.lr is given and the study gives each arm its own",
    "optim={lr:1} +lr_of_arm.grpo=1e-3": "optim.lr is given and the study gives each arm its own",
    "critic=null": "a group cannot be null; choose one of its options",
    "arm.policy_loss=null": "arm.policy_loss: null is no PolicyLoss",
    "router._target_=moe_rl.policy_losses.grpo.Grpo": "router: Grpo is no Router",
    "+logger.at=log": "logger: dict is no Logger",
    "critic.lr=0": "critic.lr is 0.0; set it above 0",
    "arm.kl=-1": "arm.kl is -1.0; set it to 0 or more",
    "arm.kl=0.1 arm.kl_estimator=k4": "'k4'; choose one of k1, k2, k3",
    "arm=grpo_tis arm.correction_cap=0": "arm.correction_cap is 0.0; set it above 0",
    "arm=grpo_icepop arm.correction_low=9": "correction_low is 9.0 and arm.correction_high 5.0",
    "arm=grpo_tis arm.old_logprobs=engine": "set arm.old_logprobs=recompute or arm.correction=none",
    "optim.trains=half": "'half'; choose one of all, no_router, router, experts",
    "optim.trains=no_router optim.router_lr=2": "trains no router; set it to 1",
    "optim.trains=no_router router=balanced": "freezes the router, which Balanced moves",
    "model=tiny_dense optim.trains=router": "router_kl need MoE layers",
    "model=tiny_dense optim.router_lr=2": "a dense model runs with optim.trains=all",
    "router=binned router.width=-1": "width is -1.0",
    "model=tiny_dense arm=grpo_routing_replay": "needs MoE layers; a dense model runs with arm.replay=none",
    "model=tiny_dense router=binned": "a dense model runs with router=native",
    "task=jsonl": "set task.path=<file.jsonl>",
    "task=jsonl task.path=/nowhere.jsonl": "/nowhere.jsonl",
    "model=checkpoint model.path=/nowhere": "'/nowhere' is no folder",
    "engine.max_new_tokens=4": "set engine.max_new_tokens=11 or more",
    "engine.max_new_tokens=400": "exceed the model's 256 positions",
    "study_name=a/b": "'a/b' cannot name a results folder",
    "launch.device=gpu": "launch.device is 'gpu', which cannot be used here",
    "-m seed=0,1 optim.lr=1e-3,-1": "optim.lr=-1.*set it above 0",
    "-m seed=0 optim.lr=1e-3,0.001": "are the same run",
    "-m hydra/launcher=basic seed=0 optim.lr=1e-3,-1": "optim.lr=-1.*set it above 0",
    "-m hydra/launcher=basic seed=0 optim.lr=1e-3,0.001": "are the same run",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_bad_input_is_refused_in_one_line_before_anything_runs(arguments, tmp_path, monkeypatch, capsys):
    code, _, err = train_here(monkeypatch, capsys, *arguments.split(), f"launch.results_dir={tmp_path}")
    assert code == 2, err
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err
    assert re.search(REFUSED[arguments], err), err
    assert not list(tmp_path.glob("**/steps.jsonl"))
    assert not list(tmp_path.glob("**/weights.safetensors")), "refused only after the warm-up"


@pytest.mark.parametrize("mode", [["seed=0"], ["-m", "seed=0,1"]], ids=["alone", "sweep"])
def test_a_results_folder_that_cannot_be_is_refused_in_one_line(mode, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    code, _, err = train_here(monkeypatch, capsys, *mode, f"launch.results_dir={tmp_path}/file/x")
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(f"error: cannot write {tmp_path}/file/x")


def test_a_sweep_composes_the_config_of_each_run_once(tmp_path, monkeypatch, capsys):
    """The last run is refused, so that none starts."""
    composed, compose = [], ConfigLoaderImpl.load_sweep_config

    def counted(loader, master_config, sweep_overrides):
        composed.append(sweep_overrides)
        return compose(loader, master_config, sweep_overrides)

    monkeypatch.setattr(ConfigLoaderImpl, "load_sweep_config", counted)
    code, _, err = train_here(monkeypatch, capsys, "-m", "seed=0,1", "steps=1,0", f"launch.results_dir={tmp_path}")
    assert code == 2
    assert "steps is 0" in err
    assert [overrides[:2] for overrides in composed] == [["seed=0", "steps=1"], ["seed=0", "steps=0"]]


def test_a_bad_line_of_a_data_file_is_named_by_number(tmp_path, monkeypatch, capsys):
    data = tmp_path / "data.jsonl"
    data.write_text('{"id": "a", "prompt": "1+1=", "answer": "2"}\n{"id": "b", "prompt": "1+2="}\n')
    code, _, err = train_here(
        monkeypatch, capsys, "task=jsonl", f"task.path={data}", f"launch.results_dir={tmp_path}/r"
    )
    assert code == 2
    assert "line 2" in err
    assert "answer" in err


def test_a_checkpoint_without_moe_layers_says_so(tmp_path, monkeypatch, capsys):
    from moe_rl.models.build import Tiny

    model, tokenizer = Tiny(family="dense", layers=1, hidden_size=32, heads=4).build(0)
    model.save_pretrained(tmp_path / "dense")
    tokenizer.save_pretrained(tmp_path / "dense")
    arguments = [
        "model=checkpoint",
        f"model.path={tmp_path}/dense",
        "model.dtype=float32",
        f"launch.results_dir={tmp_path}",
    ]
    code, _, err = train_here(monkeypatch, capsys, *arguments, "arm=grpo_routing_replay")
    assert code == 2
    assert "no MoE layers" in err
    small = [a for a in SMALL if not a.startswith("model.")]
    code, _, err = train_here(monkeypatch, capsys, *arguments, "arm=grpo", *small)
    assert code == 0, err
    assert not list(tmp_path.glob("playground/**/drift.jsonl"))


def test_arms_of_ones_own_that_differ_in_numbers_alone_are_told_apart_in_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "conf" / "arm").mkdir(parents=True)
    for name, low in {"one": 0.1, "other": 0.2}.items():
        loss = f"policy_loss: {{_target_: moe_rl.policy_losses.grpo.Grpo, clip_low: {low}}}"
        (tmp_path / "conf" / "arm" / f"{name}.yaml").write_text(f"defaults: [schema, _self_]\n{loss}\n")
    code, _, err = train_here(
        monkeypatch,
        capsys,
        "--config-dir",
        str(tmp_path / "conf"),
        "-m",
        "arm=one,other",
        f"launch.results_dir={tmp_path}",
    )
    assert (code, err.count("\n")) == (2, 1)
    assert "have one name in results and differ in arm.policy_loss.clip_low (0.1 / 0.2); arms that" in err


FILES_OF_ONES_OWN = {
    r"arm lacks advantage; a file of arm begins: defaults: \[schema, _self_\]\n$": "replay: none\n",
    "arm lacks advantage; ": "[grpo, gspo]\n",
    'expected the node content, but found .* in ".*arm/mine.yaml", line 2': "policy_loss: [\n",
    "Invalid defaults list in 'arm/mine', defaults must be a list": "defaults: grpo\n",
}


@pytest.mark.parametrize("said", FILES_OF_ONES_OWN)
def test_a_file_of_ones_own_that_is_half_written_is_refused_in_one_line(said, tmp_path, monkeypatch, capsys):
    (tmp_path / "conf" / "arm").mkdir(parents=True)
    (tmp_path / "conf" / "arm" / "mine.yaml").write_text(FILES_OF_ONES_OWN[said])
    arguments = ("--config-dir", str(tmp_path / "conf"), "arm=mine", f"launch.results_dir={tmp_path}")
    code, _, err = train_here(monkeypatch, capsys, *arguments)
    assert (code, err.count("\n")) == (2, 1), err
    assert re.search(said, err)


def test_the_config_is_readable(monkeypatch, capsys):
    _, out, _ = train_here(monkeypatch, capsys, "--cfg", "job")
    assert "clip_high: 0.27" in out
    assert "hydra" not in out


# ------------------------------------------------------------------------------------------------------- a real sweep
@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Two arms, two seeds, one learning rate that diverges: a study of four runs, run once."""
    results = tmp_path_factory.mktemp("results")
    arguments = [
        "study_name=s",
        "arm=grpo_routing_replay,gspo",
        "seed=0,1",
        f"launch.results_dir={results}",
        *SMALL,
    ]
    return results, arguments, launch(*arguments)


def test_a_sweep_leaves_every_run_finished_with_all_tables(sweep):
    results, _, done = sweep
    study = store.read_study(results / "s")
    assert study.runs.state.tolist() == ["finished"] * 4
    assert study.runs.label.tolist() == study.runs.arm.tolist() == ["grpo_routing_replay"] * 2 + ["gspo"] * 2
    assert len(study.steps) == 4 * 3
    assert len(study.updates) == 4 * 4
    assert len(study.drift) == 4 * 4 * 5
    assert done.startswith("4 runs\n")
    assert "\ngspo seed 1: finished, step 2/2, reward 0." in done
    assert set(p.name for p in results.iterdir()) == {"s", ".cache"}


def test_seeds_are_paired_same_prompts_same_start(sweep):
    study = store.read_study(sweep[0] / "s")
    first = study.steps[study.steps.step == 1].set_index(["arm", "seed"]).reward
    for seed in (0, 1):
        assert first["grpo_routing_replay", seed] == first["gspo", seed]
    starts = study.steps[study.steps.step == 0].set_index(["arm", "seed"]).eval_reward
    assert starts["gspo", 0] == starts["grpo_routing_replay", 0]


def test_a_second_launch_recomputes_nothing(sweep):
    results, arguments, _ = sweep
    before = {p: p.stat().st_mtime_ns for p in results.glob("s/**/*.jsonl")}
    done = launch(*arguments)
    assert {p: p.stat().st_mtime_ns for p in results.glob("s/**/*.jsonl")} == before
    assert "4 runs, 4 finished before" in done


def test_a_config_that_changed_under_the_same_name_is_refused(sweep, monkeypatch, capsys):
    results, arguments, _ = sweep
    folder = next(results.glob("s/gspo/*/seed_0"))
    text = (folder / "config.yaml").read_bytes()
    other = text.rpartition(SEAL)[0].replace(b"clip_low: 0.", b"clip_low: 0.1")
    (folder / "config.yaml").write_bytes(other + SEAL + digest(other).encode())
    try:
        code, _, err = train_here(monkeypatch, capsys, "-m", *arguments)
        assert code == 2
        assert "another config: arm.policy_loss.clip_low" in err
    finally:
        (folder / "config.yaml").write_bytes(text)


def test_a_run_alone_gives_the_same_numbers_as_in_the_sweep(sweep, tmp_path, monkeypatch, capsys):
    results, arguments, _ = sweep
    alone = [a for a in arguments if not a.startswith(("arm=", "seed=", "launch."))]
    code, _, err = train_here(monkeypatch, capsys, "arm=gspo", "seed=1", f"launch.results_dir={tmp_path}", *alone)
    assert code == 0, err
    (one,), (two,) = tmp_path.glob("s/gspo/*/seed_1"), results.glob("s/gspo/*/seed_1")
    for table in ("updates", "drift"):
        assert (one / f"{table}.jsonl").read_text() == (two / f"{table}.jsonl").read_text()


def test_figures_are_drawn_without_torch(sweep):
    results, _, _ = sweep
    code = (
        "import sys, runpy; sys.modules['torch'] = None; sys.argv = sys.argv[1:]; "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, FIGURES, str(results / "s"), "--format", "png"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (results / "s" / "figures" / "reward.png").stat().st_size > 10_000


def test_status_shows_where_runs_stand(sweep, tmp_path):
    script = str(Path(FIGURES).parent / "status.py")
    done = subprocess.run([sys.executable, script, str(sweep[0] / "s")], capture_output=True, text=True)
    assert "4 of 4 runs done" in done.stdout
    assert done.stdout.count("finished") == 4
    all_studies = subprocess.run([sys.executable, script, str(sweep[0])], capture_output=True, text=True)
    assert all_studies.stdout == done.stdout
    done = subprocess.run([sys.executable, script, str(tmp_path)], capture_output=True, text=True)
    assert (done.returncode, "no runs below" in done.stderr) == (2, True)


def test_a_run_is_called_by_what_tells_it_from_the_others_beside_it():
    shared = "drift.probe=0,eval_every=0,model.layers=4"
    one, other = (Path(f"results/s/grpo/{shared},optim.lr={lr}/seed_2") for lr in ("0.1", "0.2"))
    assert progress.names_of([one, other]) == {one: "grpo lr=0.1 seed 2", other: "grpo lr=0.2 seed 2"}
    assert progress.names_of([one]) == {one: "grpo seed 2"}


def test_the_runs_of_a_sweep_read_the_configs_of_the_launch_wherever_results_go(tmp_path):
    own, more, results = tmp_path / "own", tmp_path / "more", tmp_path / "r é, x's [1]"
    for folder in (own / "arm", more / "task"):
        folder.mkdir(parents=True)
    (own / "arm" / "mine.yaml").write_text("defaults: [schema, {/policy_loss@policy_loss: gspo}]\nreplay: none\n")
    (more / "task" / "short.yaml").write_text("defaults: [sort_digits, _self_]\nlength: 3\n")
    flags = ["--config-dir", str(own), f"hydra.searchpath=[file://{more}]"]
    quoted = str(results).replace("'", "\\'")
    launch(*flags, *SMALL, "arm=mine", "task=short", "steps=1", f"launch.results_dir='{quoted}'", "launch.jobs=1")
    study = store.read_study(results / "playground")
    assert study.runs["state"].tolist() == ["finished"]
    assert (study.runs["arm"][0], study.steps["response_length"].notna().any()) == ("gspo", True)


def test_the_runs_of_a_sweep_read_the_main_config_of_the_launch(tmp_path):
    """Else they would train by the default settings, in the folders of the launch's."""
    (tmp_path / "mine.yaml").write_text("defaults: [config, _self_]\nseed: 7\nsteps: 1\n")
    small = [setting for setting in SMALL if not setting.startswith("steps=")]
    launch("--config-dir", str(tmp_path), "--config-name", "mine", *small, f"launch.results_dir={tmp_path}/results")
    study = store.read_study(tmp_path / "results" / "playground")
    assert study.runs["seed"].tolist() == [7]
    assert study.runs["steps"].tolist() == [1]


def test_one_dying_run_does_not_take_the_others_along(tmp_path):
    """The middle run is killed from outside; the other two finish, and it is reported."""
    command = [
        "-m",
        "study_name=k",
        "arm=grpo",
        "seed=0,1,2",
        f"launch.results_dir={tmp_path}",
        *SMALL,
        "launch.jobs=3",
    ]
    command = [c.replace("steps=2", "steps=10") if c == "steps=2" else c for c in command]
    sweep = subprocess.Popen(
        [sys.executable, TRAIN, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    pid = None
    while pid is None:
        time.sleep(0.1)
        assert sweep.poll() is None, sweep.stderr.read()
        for path in tmp_path.glob("k/grpo/*/seed_1/status.json"):
            status = json.loads(path.read_text())
            pid = status["pid"] if status.get("step") else None
    os.kill(pid, signal.SIGKILL)
    _, err = sweep.communicate(timeout=900)
    assert sweep.returncode == 1
    assert err.startswith("failed: seed=1: killed by signal 9: ")
    assert store.read_study(tmp_path / "k").runs.state.tolist() == ["finished", "cut_off", "finished"]
    done = launch(*command[1:])
    assert "3 runs, 2 finished before" in done
    assert store.read_study(tmp_path / "k").runs.state.tolist() == ["finished"] * 3


def test_a_launch_ended_by_sigterm_takes_its_runs_along_and_goes_on_when_launched_again(tmp_path):
    command = ["-m", "study_name=k", "arm=grpo", "seed=0", f"launch.results_dir={tmp_path}", *SMALL, "steps=8"]
    command.remove("steps=2")
    elsewhere = tmp_path / "elsewhere"  # launched from a folder with another moe_rl: it is none of ours
    (elsewhere / "moe_rl").mkdir(parents=True)
    (elsewhere / "moe_rl" / "__init__.py").write_text("raise SystemExit('the wrong moe_rl')")
    sweep, status = subprocess.Popen([sys.executable, TRAIN, *command], cwd=elsewhere), {}
    while not status.get("step"):
        time.sleep(0.1)
        assert sweep.poll() is None
        for path in tmp_path.glob("k/grpo/*/seed_0/status.json"):
            status = json.loads(path.read_text())
    sweep.terminate()
    assert sweep.wait(60) != 0
    deadline = time.monotonic() + 10
    while Path(f"/proc/{status['pid']}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    (run,) = tmp_path.glob("k/grpo/*/seed_0")
    assert store.state_of(run) == "cut_off"
    launch(*command[1:])
    assert store.state_of(run) == "finished"


def test_each_arm_gets_its_own_learning_rate_and_it_names_no_setting(tmp_path):
    rates = ["+lr_of_arm.grpo=1e-3", "+lr_of_arm.gspo=2e-3"]
    launch("study_name=t", "arm=grpo,gspo", *rates, f"launch.results_dir={tmp_path}", *SMALL)
    study = store.read_study(tmp_path / "t")
    assert dict(zip(study.runs.arm, study.setting("optim.lr"), strict=True)) == {"grpo": 1e-3, "gspo": 2e-3}
    assert study.updates.groupby("arm").lr.max().to_dict() == {"grpo": 1e-3, "gspo": 2e-3}
    assert not study.runs.knobs.str.contains("lr_of_arm").any()


def test_the_learning_rates_of_a_study_can_be_dropped():
    given = ["study=methods", "arm=ppo", "~lr_of_arm", "optim.lr=3e-3"]
    with initialize_config_dir(config.config_folder(), version_base="1.3"):
        composed = compose("config", given)
    assert config.settle(composed, given).optim.lr == 3e-3
    assert config.identity(composed)["lr_of_arm"] == {}
    assert config.knobs(composed, given) == {"optim.lr": 3e-3}


def test_a_diverged_run_is_recorded_and_the_sweep_goes_on(tmp_path):
    launch("study_name=d", "arm=grpo", "seed=0", "optim.lr=1e-3,1e30", f"launch.results_dir={tmp_path}", *SMALL)
    runs = store.read_study(tmp_path / "d").runs.set_index("knobs").state
    assert sorted(runs) == ["diverged", "finished"]
    assert [state for knobs, state in runs.items() if "1e+30" in knobs] == ["diverged"]


def test_a_run_that_has_diverged_is_called_so_when_it_is_launched_again(tmp_path, monkeypatch, capsys):
    again = ["optim.lr=1e30", f"launch.results_dir={tmp_path}", "launch.progress=false", *SMALL]
    assert [train_here(monkeypatch, capsys, *again)[1].partition(": ")[0] for _ in range(2)] == [
        "diverged",
        "diverged before",
    ]


def test_two_launches_of_one_study_at_once_leave_each_run_whole(sweep, tmp_path, monkeypatch, capsys):
    """One has a process of its own. What one is writing, the other says so of and leaves alone; it takes the rest."""
    results, arguments, _ = sweep
    again = [f"launch.results_dir={tmp_path}" if a.startswith("launch.results_dir=") else a for a in arguments]
    other = subprocess.Popen([sys.executable, TRAIN, "-m", *again], stderr=subprocess.PIPE, text=True)
    while not (begun := list(tmp_path.glob("s/*/*/seed_*/status.json"))):
        assert other.poll() is None
        time.sleep(0.02)
    writing = json.loads(begun[0].read_text())["pid"]
    os.kill(writing, signal.SIGSTOP)  # so that it is still at it when the second launch comes by
    try:
        code, _, err = train_here(monkeypatch, capsys, "-m", *again)
    finally:
        os.kill(writing, signal.SIGCONT)
    others_err = other.communicate(timeout=300)[1]
    said = err.splitlines() + others_err.splitlines()
    assert err
    assert all(line.startswith("failed: ") and "is being written by another process" in line for line in said), said
    assert (code, other.returncode) == (int(bool(err)), int(bool(others_err)))
    for table in ("updates", "drift"):
        for path in results.glob(f"s/*/*/seed_*/{table}.jsonl"):
            assert (tmp_path / path.relative_to(results)).read_text() == path.read_text()
    assert store.read_study(tmp_path / "s").runs["state"].tolist() == ["finished"] * 4


def test_a_launcher_that_gives_up_is_quoted_once_and_every_run_that_it_left_is_named(tmp_path, monkeypatch, capsys):
    """As joblib does when a run is killed, whichever that was."""

    def launch(launcher, job_overrides, initial_job_idx):
        raise RuntimeError("a worker was killed")

    name = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
    monkeypatch.setattr(Plugins.instance().class_name_to_class[name], "launch", launch)
    words = ["hydra/launcher=basic", "seed=0,1", f"launch.results_dir={tmp_path}"]
    code, _, err = train_here(monkeypatch, capsys, "-m", *words)
    assert code == 1
    given_up = "the launcher gave up on waiting, runs may still go on: RuntimeError: a worker was killed"
    assert err.splitlines() == [given_up, "failed: seed=0: missing", "failed: seed=1: missing"]


def test_another_launcher_makes_the_same_runs_goes_on_after_a_failed_one_and_repeats_none(
    sweep, tmp_path, monkeypatch, capsys
):
    """Hydra's basic launcher stands for those of the extras: they are all given the runs in the same way."""
    results, arguments, _ = sweep
    changed = {"arm": "arm=gspo", "launch.results_dir": f"launch.results_dir={tmp_path}"}
    again = ["hydra/launcher=basic", *(changed.get(a.partition("=")[0], a) for a in arguments)]
    made = sorted(path.relative_to(results) for path in results.glob("s/gspo/*/seed_*"))
    (tmp_path / made[0]).mkdir(parents=True)
    with open(tmp_path / made[0] / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, out, err = train_here(monkeypatch, capsys, "-m", *again)
    assert code == 1
    assert out.startswith("2 runs\n")
    assert [line.startswith("failed: ") and "seed=0" in line for line in err.splitlines()] == [True], err
    assert "StoreError: " in err
    assert "is being written by another process" in err
    code, out, err = train_here(monkeypatch, capsys, "-m", *again)
    assert (code, err) == (0, "")
    assert "2 runs, 1 finished before" in out
    for run in made:
        for table in ("updates", "drift"):
            assert (tmp_path / run / f"{table}.jsonl").read_text() == (results / run / f"{table}.jsonl").read_text()
    code, out, _ = train_here(monkeypatch, capsys, "-m", *again)
    assert (code, out) == (0, "2 runs, 2 finished before\n")
