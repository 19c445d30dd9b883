"""Dynamic sampling and the overlong penalty: numbers by hand, rollouts that stay themselves, queries counted."""

import dataclasses

import pytest
import torch
from models import tiny
from test_laws import Vowels
from test_resume import experiment, go
from test_update import rollouts

from moe_rl import loop
from moe_rl.policy import response_logprobs
from moe_rl.shaping import equal_groups, join, overlong_penalty, replace_equal_groups
from moe_rl.store import read_table


def test_overlong_penalty_by_hand():
    response = torch.arange(12) < torch.tensor([0, 8, 9, 10, 12])[:, None]
    assert overlong_penalty(response, 12, 4).tolist() == [0.0, 0.0, -0.25, -0.5, -1.0]
    assert overlong_penalty(response, 12, 12).tolist() == pytest.approx([0, -8 / 12, -9 / 12, -10 / 12, -1])


def test_groups_of_equal_training_rewards_are_replaced_while_there_are_others():
    old, fresh = rollouts(batch=8), rollouts(batch=4, width=15, T=4)
    old = dataclasses.replace(old, shaped_rewards_B=torch.tensor([1.0, 1, 0, 1, 0, 0, 2, 2]))
    fresh = dataclasses.replace(fresh, shaped_rewards_B=torch.tensor([0.0, 0, 3, 4]))
    assert equal_groups(old.training_rewards_B, 2).tolist() == [True, False, True, True]
    got = replace_equal_groups(old, fresh, 2, pad=7)
    assert got.training_rewards_B.tolist() == [3, 4, 0, 1, 0, 0, 2, 2], "one group of two was of use"
    assert torch.equal(got.group_ids_B, old.group_ids_B)
    assert got.rewards_B[:2].tolist() == fresh.rewards_B[2:].tolist()
    assert replace_equal_groups(old, fresh[:2], 2, pad=7) is old
    settled = dataclasses.replace(old, shaped_rewards_B=torch.arange(8.0))
    assert replace_equal_groups(settled, fresh, 2, pad=7) is settled


def test_rollouts_of_other_widths_are_the_same_rollouts_after_they_were_joined():
    model = tiny()
    parts = [rollouts(model, batch=4, routing=True), rollouts(model, batch=4, width=15, T=4, routing=True)]
    both = join(parts, pad=0)
    assert both.tokens_BS.shape == (8, 11 + 6), "the wider prompt and the wider response"
    together, start = response_logprobs(model, both)[0], 0
    for part in parts:
        alone, rows = response_logprobs(model, part)[0], slice(start, start + 4)
        T, start = alone.shape[1], start + 4
        assert torch.allclose(together[rows, :T], alone, atol=1e-5)
        assert not both.response_BT[rows, T:].any()
        assert torch.equal(both[rows].tokens_BS[both[rows].attention_BS], part.tokens_BS[part.attention_BS])
        known, of_part = both.routing[rows], part.routing
        assert known.valid_BS.sum() == of_part.valid_BS.sum()
        assert torch.equal(known.expert_ids_BSLK[known.valid_BS], of_part.expert_ids_BSLK[of_part.valid_BS])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Coarse(Vowels):
    """All or nothing, so that many groups are equal."""

    def reward(self, example, completion):
        return float(sum(c in self.wanted for c in completion) >= 3)


def sampled_by(monkeypatch):
    """All that the loop samples, with the prompts."""
    kept, sample = [], loop.sample

    def keep(e, state, prompts, *more):
        kept.append((prompts, sample(e, state, prompts, *more)))
        return kept[-1][1]

    monkeypatch.setattr(loop, "sample", keep)
    return kept


@pytest.mark.parametrize("arm", ["grpo", "grpo_r3"])
def test_dynamic_sampling_replaces_equal_groups_and_counts_every_query(tmp_path, monkeypatch, arm):
    e = dataclasses.replace(experiment(arm, steps=2), task=Coarse(), eval_prompts=0)
    go(tmp_path / "plain", e)
    kept = sampled_by(monkeypatch)
    go(tmp_path / "more", dataclasses.replace(e, dynamic_sampling=3))
    plain, more = (read_table(tmp_path / name / "run", "steps")[1:] for name in ("plain", "more"))
    assert plain[0]["equal_groups"] > more[0]["equal_groups"]
    assert more[0]["replaced_groups"] == plain[0]["equal_groups"] - more[0]["equal_groups"]
    assert (more[0]["reward"], plain[0]["queries"]) == (plain[0]["reward"], 8)
    assert more[-1]["queries"] == sum(len(rollouts) for _, rollouts in kept) > 16
    assert more[-1]["tokens"] == sum(int(rollouts.response_BT.sum()) for _, rollouts in kept)
    ids = [prompt.id for prompts, _ in kept for prompt in prompts]
    assert len(set(ids)) == len(ids), "no prompt is asked twice"
    assert all(row["log_w_sd"] == 0 for row in read_table(tmp_path / "more" / "run", "updates") if row["update"] == 1)


def test_the_overlong_penalty_is_trained_on_and_not_reported(tmp_path, monkeypatch):
    e = experiment("grpo", steps=1)
    seen, advantages = [], loop.group_advantages
    monkeypatch.setattr(loop, "group_advantages", lambda r, *more: seen.append(r) or advantages(r, *more))
    kept = sampled_by(monkeypatch)
    go(tmp_path, dataclasses.replace(e, overlong_buffer=3))
    rollouts = kept[0][1]
    assert torch.equal(seen[0], rollouts.rewards_B + overlong_penalty(rollouts.response_BT, 6, 3))
    assert not torch.equal(seen[0], rollouts.rewards_B)
    assert read_table(tmp_path / "run", "steps")[1]["reward"] == pytest.approx(float(rollouts.rewards_B.mean()))
