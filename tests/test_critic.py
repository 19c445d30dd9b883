"""The critic: GAE worked by hand, what it learns, and runs of PPO."""

import dataclasses
import math

import pytest
import torch
from models import tiny
from test_resume import Cut, experiment, go, outcome
from test_update import rollouts

from moe_rl.arm import Arm
from moe_rl.critic import Critic, CriticSettings, gae, whitened
from moe_rl.experiment import check
from moe_rl.mini_batches import mini_batches
from moe_rl.policy_losses.ppo import Ppo
from moe_rl.store import read_json, read_table

PPO = Arm(policy_loss=Ppo(), advantage="gae")


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def test_gae_by_hand():
    """gamma .9, lam .5. Row 0, reward 1, values .2 .4 .5: deltas -.2 + .36 = .16, -.4 + .45 = .05, 1 - .5 = .5;
    A_2 = .5, A_1 = .05 + .45 * .5 = .275, A_0 = .16 + .45 * .275 = .28375. Row 1, reward -1, has one token of value .3;
    what stands on its padding must not matter. Row 2 has none."""
    values = double([[0.2, 0.4, 0.5], [0.3, math.nan, 9.0], [1.0, 2.0, 3.0]])
    mask = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
    advantages, returns = gae(double([1.0, -1.0, 5.0]), values, mask, 0.9, 0.5)
    expected = [[0.28375, 0.275, 0.5], [-1.3, 0, 0], [0, 0, 0]]
    assert torch.allclose(advantages, double(expected), atol=1e-14)
    assert torch.allclose(returns, double([[0.48375, 0.675, 1.0], [-1.0, 0, 0], [0, 0, 0]]), atol=1e-14)


def test_lam_1_is_the_return_minus_the_value_and_lam_0_the_one_step_error():
    generator = torch.Generator().manual_seed(0)
    values, mask = torch.randn(4, 6, generator=generator, dtype=torch.float64), torch.arange(6) < torch.tensor([[6]])
    mask = mask.expand(4, 6)
    rewards = double([1.0, 0.5, 0.0, -1.0])
    full, returns = gae(rewards, values, mask, 1.0, 1.0)
    assert torch.allclose(full, rewards[:, None] - values)
    assert torch.allclose(returns, rewards[:, None].expand(4, 6))
    short, _ = gae(rewards, values, mask, 1.0, 0.0)
    assert torch.allclose(short[:, :-1], values[:, 1:] - values[:, :-1])
    assert torch.allclose(short[:, -1], rewards - values[:, -1])


def test_whitened_by_hand_and_equal_values_are_0():
    mask = torch.tensor([[True, True], [True, False]])
    assert torch.allclose(whitened(double([[1.0, 2.0], [3.0, 99.0]]), mask), double([[-1, 0], [1, 0]]) * math.sqrt(1.5))
    assert not whitened(double([[2.0, 2.0], [2.0, 9.0]]), mask).any()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_do_not_pass_for_no_advantage(value):
    mask = torch.tensor([[True, True], [True, False]])
    assert whitened(double([[1.0, value], [3.0, 99.0]]), mask).isnan().tolist() == mask.tolist()


def test_a_value_is_of_the_prefix_and_sees_no_token_that_comes_after():
    critic, data = Critic(tiny(), CriticSettings()), rollouts()
    torch.nn.init.normal_(critic.head.weight)
    with torch.no_grad():
        before = critic.values(data)
        changed = data.tokens_BS.clone()
        T = data.response_BT.shape[1]
        changed[:, -T + 2] = (changed[:, -T + 2] + 1) % 7 + 3
        after = critic.values(dataclasses.replace(data, tokens_BS=changed))
    assert before.shape == data.response_BT.shape
    assert torch.equal(before[:, :3], after[:, :3])  # the value before token 2 does not know it
    assert not torch.equal(before[:, 3], after[:, 3])


def test_it_learns_the_returns_and_micro_batches_change_rounding_only():
    data, told = rollouts(), {}
    for name, (micro_batch, parts) in {"whole": (0, 1), "cut": (3, 3)}.items():
        critic = Critic(tiny(), CriticSettings(lr=1e-2, lam=1.0))
        advantages, returns = critic.assess(data, micro_batch)
        assert torch.allclose(returns[data.response_BT], data.rewards_B[:, None].expand_as(returns)[data.response_BT])
        assert abs(float(advantages[data.response_BT].mean())) < 1e-6
        rows = [torch.arange(8)]
        (batch,) = mini_batches(data, advantages, rows, returns_BT=returns, micro_batch=micro_batch)
        assert len({part.returns_BT.shape[1] for part in batch}) == parts
        told[name] = [critic.learn(batch, 1.0) for _ in range(30)]
        assert not critic.assess(data, 0)[1].isnan().any()
    first, last = told["whole"][0], told["whole"][-1]
    errors = data.rewards_B[:, None].expand(data.response_BT.shape)[data.response_BT].square()
    assert first["value_loss"] == pytest.approx(float(errors.mean()) / 2, rel=1e-5)  # a critic of zeros
    assert first["explained_variance"] == pytest.approx(0.0, abs=1e-5)
    assert last["value_loss"] < first["value_loss"] / 5
    assert last["explained_variance"] > 0.8
    assert told["cut"][0]["value_loss"] == pytest.approx(first["value_loss"], rel=1e-4)


def test_a_run_of_ppo_starts_at_ratio_1_learns_values_and_goes_on_bit_for_bit(tmp_path):
    e = dataclasses.replace(experiment(), arm=PPO)
    assert go(tmp_path / "whole", e) == "finished"
    run = tmp_path / "whole" / "run"
    assert read_json(run / "run.json")["label"] == "ppo"
    rows = read_table(run, "updates")
    assert all(row["log_w_sd"] == 0 for row in rows if row["update"] == 1)
    assert rows[-1]["log_w_sd"] > 0
    assert all(row["value_loss"] >= 0 and row["explained_variance"] <= 1 for row in rows)
    assert len({row["value_loss"] for row in rows}) == len(rows)

    def cut(row):
        if row["step"] == 3:
            raise Cut

    with pytest.raises(Cut):
        go(tmp_path / "cut", e, cut)
    assert go(tmp_path / "cut", e) == "finished"
    assert "resumed" in read_json(tmp_path / "cut" / "run" / "run.json")
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")


def test_ppo_needs_no_group(tmp_path):
    e = dataclasses.replace(experiment(), arm=PPO, prompts=8, completions=1)
    check(e)
    assert go(tmp_path, e) == "finished"
    rows = read_table(tmp_path / "run", "updates")
    assert rows[-1]["log_w_sd"] > 0
    assert all(math.isfinite(row["value_loss"]) and row["grad_norm"] > 0 for row in rows)


def test_a_run_whose_critic_stops_learning_ends_as_diverged(tmp_path):
    e = dataclasses.replace(experiment(), arm=PPO, critic=CriticSettings(lr=1e30))
    assert go(tmp_path, e) == "diverged"
    assert "the critic's loss is inf" in read_json(tmp_path / "run" / "status.json")["reason"]


def test_a_step_of_one_completion_has_no_spread_of_rewards(tmp_path):
    e = dataclasses.replace(experiment(), arm=PPO, steps=1, prompts=1, completions=1, updates=1)
    assert go(tmp_path, e) == "finished"
    assert math.isnan(read_table(tmp_path / "run", "steps")[-1]["reward_sd"])


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match=r"critic\.lr is 0"):
        CriticSettings(lr=0)
    with pytest.raises(ValueError, match=r"critic\.lam is 1\.5; it lies in"):
        CriticSettings(lam=1.5)
