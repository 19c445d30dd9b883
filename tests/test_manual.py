"""What --help says, and what a name that nothing has is answered with."""

import re

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from test_cli import train_here

from moe_rl import cli, config, manual


def helped(monkeypatch, capsys, *words):
    code, out, err = train_here(monkeypatch, capsys, "--help", *words)
    assert (code, err) == (0, "")
    return out


@pytest.fixture(scope="module")
def pages():
    """The pages of all groups, made without the command line."""
    with initialize_config_dir(config.config_folder(), version_base="1.3"):
        loader, composed = GlobalHydra.instance().config_loader(), compose("config", ["router=noisy", "arm=dr_grpo"])
        groups = [group for group in loader.list_groups("") if group != "hydra" and manual.options_of(group, loader)]
        return {group: manual.manual(group, loader, composed) for group in groups}


def test_help_lists_groups_and_settings_with_a_meaning_and_the_allowed_values(monkeypatch, capsys):
    out = helped(monkeypatch, capsys)
    assert "\nmodel: what is trained: a tiny family with random weights, or a checkpoint\n" in out
    assert "\n    checkpoint, tiny_deepseek_v3, tiny_dense, " in out
    assert "\n    mlflow, tensorboard, trackio, wandb\n" in out
    assert re.search(r"^updates=4 +# mini-batches of a step, one optimizer step each \(M\)$", out, re.M)
    assert re.search(r"^optim.trains=all +# all, no_router, router, experts$", out, re.M)
    assert "\ndrift.rollouts=12\n" in out
    assert "schema" not in out
    assert "_target_" not in out
    assert max(map(len, out.splitlines())) < 130


@pytest.mark.parametrize(
    ("group", "lines"),
    {
        "study": ["  staleness +X1: from on-policy"],
        "arm": [
            "  grpo_r3 +GRPO: a clipped ratio per token. replay=rollout",
            "  grpo_shuffled_replay +A control:",
            "  dr_grpo +Dr. GRPO: GRPO without",
            "arm.policy_loss.length=.{engine.max_new_tokens}",
            "arm.replay=none",
            "    sticky +as old_policy, without",
        ],
        "router": ["  native +The model routes as it was made to.", "== Settings of Noisy ==", "router.scale="],
        "optim": ["optim.schedule=constant +# constant, linear, cosine"],
        "model": ["  tiny_mixtral +Mixtral: "],
        "launch": ["  local +Where and how, which no result depends on."],
        "logger": ["  tensorboard +Event files in"],
    }.items(),
)
def test_the_page_of_a_group_says_what_each_option_and_choice_means(group, lines, pages):
    for line in lines:
        assert re.search(f"^{line}", pages[group], re.M), f"{line!r} is not in\n{pages[group]}"


def test_no_group_and_no_option_goes_without_a_meaning(pages):
    assert len(pages) == 14
    for group, page in pages.items():
        assert group == "policy_loss" or page.startswith(f"{group}: ")
        for name, meaning in re.findall(r"^  (\w+)(.*)$", page.split("\n== ")[0], re.M):
            assert len(meaning.strip()) > 10, f"{group}={name} says {meaning!r}"


def test_options_of_ones_own_are_in_the_help_with_the_comment_at_their_head(tmp_path, monkeypatch, capsys):
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "short.yaml").write_text("# Three digits.\ndefaults: [sort_digits, _self_]\nlength: 3\n")
    (tmp_path / "task" / "bare.yaml").write_text("defaults: [sort_digits, _self_]\nlength: 3\n")
    out = helped(monkeypatch, capsys, "task", "--config-dir", str(tmp_path))
    assert re.search(r"^  short +Three digits\.$", out, re.M)
    assert re.search(r"^  bare$", out, re.M)


def test_an_arm_of_ones_own_loss_is_told_by_that_class_and_help_survives_one_that_is_not_there(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "conf" / "arm").mkdir(parents=True)
    (tmp_path / "my_help_loss.py").write_text(
        'from moe_rl.policy_losses.grpo import Grpo\n\n\nclass Mine(Grpo):\n    """Mine is wide. More of it."""\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name, target in {"mine": "my_help_loss.Mine", "lost": "no_such_file.Lost"}.items():
        text = f"defaults: [schema, _self_]\npolicy_loss: {{_target_: {target}}}\nreplay: old_policy\n"
        (tmp_path / "conf" / "arm" / f"{name}.yaml").write_text(text)
    out = helped(monkeypatch, capsys, "arm", "--config-dir", "conf")
    assert re.search(r"^  mine +Mine is wide\. replay=old_policy$", out, re.M)
    lost = r"^  lost +no_such_file.Lost, which cannot be imported: .*no_such_file.* replay=old_policy$"
    assert re.search(lost, out, re.M)


@pytest.mark.parametrize(
    ("words", "read"),
    {
        "arm=gspo -m seed=0,1": "-m arm=gspo seed=0,1",
        "arm=mine --config-dir conf -m ~logger": "--config-dir conf -m arm=mine ~logger",
        "--help router router=binned": "--help hydra.help.header=router router=binned",
        "router --config-dir conf --help": "--config-dir conf --help hydra.help.header=router",
        "-h optim.lr": "-h hydra.help.header=optim",
        "--cfg job --config-dir=a=b seed=1": "--cfg job --config-dir=a=b seed=1",
        "seed=1 --config-dir a=b arm=mine": "--config-dir a=b seed=1 arm=mine",
        "seed=1 --info": "seed=1 --info",
        "seed=1 --info defaults": "--info defaults seed=1",
    }.items(),
)
def test_options_may_stand_among_settings(words, read):
    assert cli.for_hydra(words.split()) == read.split()


def test_help_shows_the_options_that_are_given(monkeypatch, capsys):
    out = helped(monkeypatch, capsys, "arm", "arm=dr_grpo")
    assert "\n== Settings of " in out
    assert "\narm.policy_loss.length=${engine.max_new_tokens}\n" in out


def test_help_on_no_group_is_one_line(monkeypatch, capsys):
    code, _, err = train_here(monkeypatch, capsys, "--help", "gspo")
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("error: 'gspo' is no group; choose one of arm, ")


@pytest.mark.parametrize("name", manual.CHOICES)
def test_the_choices_that_help_lists_are_those_that_are_accepted(name):
    with initialize_config_dir(config.config_folder(), version_base="1.3"):
        assert OmegaConf.select(compose("config"), name) in manual.CHOICES[name]
        composed = compose("config", [f"{name}=nonsense"])
    with pytest.raises(config.ConfigError, match="'nonsense'") as refused:
        config.build(composed)
    assert all(choice in str(refused.value) for choice in manual.CHOICES[name])


@pytest.mark.parametrize(
    ("name", "meant"),
    {
        "replay": ["arm.replay"],
        "optim.lrr": ["optim.lr"],
        "width": ["router.width"],
        "stps": ["steps"],
        "roter": ["router"],
        "routr.width": ["router.width"],
        "routr.colour": ["router"],
        "router.wdith": ["router.width"],
        "router.colour": [],
        "zzzz": [],
    }.items(),
)
def test_what_may_have_been_meant_ends_like_it_or_looks_like_it(name, meant):
    assert manual.nearest(name) == meant


@pytest.mark.parametrize(
    ("words", "answer"),
    {
        "lr=1e-4": "did you mean optim.lr or cold_start.lr or preference_model.lr or critic.lr?",
        "-m lr=1e-4": "did you mean optim.lr or cold_start.lr or preference_model.lr or critic.lr?",
        "arm.policy_los.clip_low=1": "did you mean arm.policy_loss.clip_low?",
        "zzzz=1": "--help shows every setting",
        "routr.width=1": "did you mean router.width?",
        "router.width=1": "a setting of binned",
        "router=binned router.width=abc": "--help shows every setting",
        "optim.lr=abc": "--help shows every setting",
    }.items(),
)
def test_a_setting_that_is_refused_is_answered_with_what_may_have_been_meant(words, answer, monkeypatch, capsys):
    code, _, err = train_here(monkeypatch, capsys, *words.split())
    assert (code, err.count("\n")) == (2, 1)
    assert err.endswith(f"({answer})\n"), err
