"""Every arm of conf/arm: it composes, it is what its name says, and it runs."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir
from test_cli import SMALL

from moe_rl import cli, discovery, loop, store
from moe_rl.figures import _looks
from moe_rl.policy_losses.base import PolicyLoss

settings = cli.settings
FILES = sorted(Path(settings.config_folder(), "arm").glob("*.yaml"))
ARMS = [path.stem for path in FILES]
LOSSES = discovery.variants("moe_rl.policy_losses", PolicyLoss)


def composed(arm, *overrides):
    with initialize_config_dir(settings.config_folder(), version_base="1.3"):
        return compose("config", overrides=[f"arm={arm}", *overrides])


def by_hand(rewards, groups, kind):
    """The advantage of each completion, one at a time."""
    out = []
    for i, group in enumerate(groups):
        mine = rewards[groups == group]
        others = np.delete(rewards, i)[np.delete(groups, i) == group]
        out.append(
            {
                "group_std": (rewards[i] - mine.mean()) / (mine.std(ddof=1) + 1e-6),
                "group_mean": rewards[i] - mine.mean(),
                "leave_one_out": rewards[i] - others.mean(),
            }[kind]
        )
    return out


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return tmp_path_factory.mktemp("arms")


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_is_what_its_name_says_and_runs(arm, results, monkeypatch):
    config = composed(arm, *SMALL, "completions=4", "drift.probe=0", "eval_prompts=0")
    experiment = settings.build(config)
    assert experiment.arm.label == arm
    sampled, steps, rollouts = loop.sample, [], []

    def sample(*arguments):
        rollouts.append(sampled(*arguments))
        # Tiny models are always wrong: rewards that differ, so that there is something to learn.
        rollouts[-1].rewards_B.copy_(torch.linspace(0, 1, len(rollouts[-1])).pow(2))
        return rollouts[-1]

    def mini_batches(rollouts, advantages, *rest, **told):
        steps.append((rollouts.rewards_B.numpy(), rollouts.group_ids_B.numpy(), advantages.tolist()))
        return divided(rollouts, advantages, *rest, **told)

    divided = loop.mini_batches
    monkeypatch.setattr(loop, "sample", sample)
    monkeypatch.setattr(loop, "mini_batches", mini_batches)
    with store.open_run(results / arm, settings.identity(config)) as writer:
        assert loop.run(experiment, writer, str(results / "cache")) == "finished"
    run = store.read_json(results / arm / "run.json")
    wanted = yaml.safe_load((Path(settings.config_folder()) / "arm" / f"{arm}.yaml").read_text())
    assert (run["label"], run["replay"]) == (arm, wanted["replay"])
    for name, default in (("advantage", "group_std"), ("old_logprobs", "recompute"), ("correction", "none")):
        assert run[name] == wanted.get(name, default)
    updates = store.read_table(results / arm, "updates")
    assert len(updates) == 4
    assert all(row["grad_norm"] > 0 for row in updates)
    rounding = 1e-6 if run["old_logprobs"] == "engine" else 0.0  # generate and a whole forward add in other orders
    assert all((row["log_w_sd"] <= rounding) == (row["update"] == 1) for row in updates)
    assert all((x.routing is not None) == (wanted["replay"] == "rollout") for x in rollouts)
    if run["advantage"] == "gae":  # those of a critic: see test_critic.py
        assert all("value_loss" in row for row in updates)
        return
    for rewards, groups, advantages in steps:
        assert advantages == pytest.approx(by_hand(rewards, groups, run["advantage"]), rel=1e-5)


def test_every_loss_has_an_arm_with_its_own_defaults_and_advantage():
    """An arm's values are those of the loss, so that a loss chosen by hand is the published one too."""
    covered = set()
    for arm in ARMS:
        experiment = settings.build(composed(arm, "engine.max_new_tokens=12"))
        loss = experiment.arm.policy_loss
        if hasattr(loss, "length"):
            assert loss.length == 12  # follows the limit of a response
        else:
            assert loss == type(loss)()
        if arm != "rloo":
            assert experiment.arm.advantage == loss.advantage
        covered.add(type(loss))
    assert covered == set(LOSSES.values())


def test_another_advantage_than_its_own_shows_in_an_arms_label():
    assert settings.build(composed("grpo", "arm.advantage=group_mean")).arm.label == "grpo_group_mean"
    assert settings.build(composed("dr_grpo", "arm.advantage=group_std")).arm.label == "dr_grpo_group_std"
    assert settings.build(composed("rloo", "arm.replay=rollout")).arm.label == "rloo_r3"
    assert settings.build(composed("gspo", "arm.replay=shuffled")).arm.label == "gspo_shuffled_replay"
    assert settings.build(composed("gspo", "arm.replay=sticky")).arm.label == "gspo_sticky_replay"
    assert settings.build(composed("rloo", "arm.advantage=group_mean")).arm.label == "reinforce"
    assert settings.build(composed("grpo_r3", "arm.old_logprobs=engine")).arm.label == "grpo_r3_engine_logprobs"
    assert settings.build(composed("gspo_routing_replay", "arm.kl=0.1")).arm.label == "gspo_routing_replay_kl"
    assert settings.build(composed("gspo", "arm.correction=icepop")).arm.label == "gspo_icepop"


def test_every_arm_has_a_look_of_its_own():
    looks = _looks.KNOWN | _looks.FIELD
    assert set(ARMS) >= looks.keys()  # an arm that is not among them gets a spare look
    for part in ("color", "marker"):
        assert len({getattr(look, part) for look in looks.values()}) == len(looks), part
    assert not {look.color for look in looks.values()} & set(_looks.SPARE_COLORS)


def test_the_table_of_methods_is_current():
    path = Path(__file__).parent.parent / "experiments" / "method_table.py"
    spec = importlib.util.spec_from_file_location("method_table", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.TABLE.read_text("utf-8") == module.table(), "run python experiments/method_table.py"
