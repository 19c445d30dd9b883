"""The learned reward: its pairs, that it learns to prefer, its cache, and a run that is trained on it."""

import dataclasses
import itertools
import math

import pytest
import torch
from test_resume import experiment, go

from moe_rl import assembly, loop, preference_model
from moe_rl.cold_start import lay_out
from moe_rl.models.build import Tiny
from moe_rl.preference_model import PreferenceModel, Preferences, build, pairs
from moe_rl.store import read_json, read_table
from moe_rl.tasks.sort_digits import SortDigits

MODEL = Tiny(layers=2, hidden_size=32, heads=2, experts=8, top_k=2, expert_size=16)
TASK = SortDigits(length=3)


@pytest.mark.parametrize("task", [TASK, SortDigits(length=3, reward_kind="exact")], ids=lambda task: task.reward_kind)
def test_pairs_are_what_the_task_says_and_use_up_no_other_prompts(task):
    drawn = list(itertools.islice(pairs(task, Preferences(), 0), 50))
    assert all(task.reward(example, better) > task.reward(example, worse) for example, better, worse in drawn)
    assert any(len(worse) < len(example.answer) for example, _, worse in drawn)
    assert drawn == list(itertools.islice(pairs(task, Preferences(), 0), 50))
    assert drawn != list(itertools.islice(pairs(task, Preferences(), 1), 50))
    assert int(drawn[0][0].id.rpartition("-")[2]) == 2 * 10**9


def test_a_task_that_prefers_nothing_is_refused():
    class Indifferent(SortDigits):
        def reward(self, example, completion):
            return 1.0

    with pytest.raises(ValueError, match=r"rewards 100 pairs of answers to .* alike"):
        next(pairs(Indifferent(length=3), Preferences(), 0))


def test_it_learns_to_prefer_is_cached_and_does_not_mind_padding(tmp_path, monkeypatch):
    settings = Preferences(steps=120, held_out=128, lr=3e-3)
    model, tokenizer = MODEL.build(0)
    judge, facts = build(model, tokenizer, TASK, settings, 0, tmp_path)
    assert facts["accuracy"] > 0.65
    assert facts["loss"] < math.log(2) - 0.05
    assert facts["pairs"] == 120 * 16
    examples = TASK.examples("train", 8, 5)
    told = lay_out(tokenizer, examples, [example.answer for example in examples])[:2]
    before = judge(*told)
    assert torch.allclose(judge(told[0][:1], told[1][:1]), before[:1], atol=1e-5)
    padded = [torch.nn.functional.pad(x, (3, 2)) for x in told]
    assert torch.allclose(judge(*padded), before, atol=1e-5)
    monkeypatch.setattr(preference_model, "train", lambda *_: pytest.fail("trained again"))
    again, same = build(MODEL.build(0)[0], tokenizer, TASK, settings, 0, tmp_path)
    assert same == facts
    assert torch.equal(again(*told), before)
    assert not any(parameter.requires_grad for parameter in again.parameters())


def test_an_untrained_model_prefers_nothing_and_loses_log_2(tmp_path):
    model, tokenizer = MODEL.build(0)
    _, facts = build(model, tokenizer, TASK, Preferences(steps=1, held_out=2), 0, tmp_path)
    assert facts["loss"] == pytest.approx(math.log(2))


def test_a_run_is_trained_on_its_reward_and_the_true_one_is_logged(tmp_path, monkeypatch):
    e = experiment("grpo", steps=2, reward="preference_model", preference_model=Preferences(steps=4, held_out=8))
    e = dataclasses.replace(e, task=TASK)
    seen, judges, advantages, original = [], [], loop.group_advantages, assembly.build_preference_model
    monkeypatch.setattr(loop, "group_advantages", lambda r, *more: seen.append(r) or advantages(r, *more))
    monkeypatch.setattr(assembly, "build_preference_model", lambda *a: judges.append(original(*a)) or judges[-1])
    kept, sample = [], loop.sample
    monkeypatch.setattr(loop, "sample", lambda *a: kept.append(sample(*a)) or kept[-1])
    assert go(tmp_path, e) == "finished"
    (judge, told), steps = judges[0], read_table(tmp_path / "run", "steps")
    assert isinstance(judge, PreferenceModel)
    assert read_json(tmp_path / "run" / "run.json")["preference_model"] == told["preference_model"]
    for row, rewards, rollouts in zip(steps[1:], seen, kept, strict=True):
        assert torch.allclose(rewards, judge.reward(rollouts), atol=1e-5)
        assert row["model_reward"] == pytest.approx(float(rewards.mean()), abs=1e-5)
        texts = [float(x) for x in rollouts.rewards_B]
        assert row["reward"] == pytest.approx(sum(texts) / len(texts))
        assert row["reward"] != pytest.approx(row["model_reward"], abs=1e-3)


def test_the_verifiers_run_has_neither_model_nor_column(tmp_path):
    assert assembly.build_preference_model(experiment(), str(tmp_path)) == (None, {})


@pytest.mark.parametrize(
    "wrong", [{"steps": 0}, {"held_out": 0}, {"lr": 0.0}, {"error_share": 0.0}, {"error_share": 1.0}], ids=repr
)
def test_settings_that_cannot_work_are_refused(wrong):
    (name, value), = wrong.items()  # fmt: skip
    with pytest.raises(ValueError, match=rf"preference_model\.{name} is {value}"):
        Preferences(**wrong)
