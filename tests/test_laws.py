"""Laws of whole runs: the loop from prompts to weights, with arms, seeds and settings exchanged."""

import copy
import dataclasses
import math
import random

import pytest
import torch

from moe_rl import assembly, loop
from moe_rl.arm import Arm
from moe_rl.cold_start import ColdStart
from moe_rl.corrections import Correction
from moe_rl.drift.meter import DriftSettings
from moe_rl.engines.hf import Hf
from moe_rl.experiment import ConfigError, Experiment, Launch
from moe_rl.models.build import Tiny
from moe_rl.models.families import find_routers
from moe_rl.optim import Optim
from moe_rl.policy_losses.base import PolicyLoss
from moe_rl.policy_losses.grpo import Grpo
from moe_rl.policy_losses.gspo import Gspo
from moe_rl.policy_losses.gspo_token import GspoToken
from moe_rl.records import LossOutput
from moe_rl.routers.balanced import Balanced
from moe_rl.routers.binned import Binned
from moe_rl.routers.expert_dropout import ExpertDropout
from moe_rl.routers.learned_prior import LearnedPrior
from moe_rl.routers.native import Native
from moe_rl.routers.noisy import Noisy
from moe_rl.routers.predictive import Predictive
from moe_rl.store import open_run, read_json, read_table
from moe_rl.tasks.base import Task

SECONDS = ("rollout_s", "old_pass_s", "update_s", "drift_s", "cpu_s", "wall_s")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vowels(Task):
    """Rewards any text, so that random weights have something to learn from: the share of characters in a set."""

    wanted: str = "aeiou+-*=0123456789"

    @property
    def alphabet(self):
        return "ab"

    def draw(self, rng: random.Random):
        return "".join(rng.choices("abcdefgh", k=rng.randint(2, 5))) + "=", "ab"

    def reward(self, example, completion):
        return sum(c in self.wanted for c in completion) / 6


@dataclasses.dataclass
class Result:
    """What a run left: its state, its weights at the start and the end, and its tables."""

    state: str
    start: dict
    end: dict
    tables: dict
    run: dict
    status: dict

    def without_seconds(self):
        """The tables as text, in which nan equals nan."""
        return repr([[{k: v for k, v in row.items() if k not in SECONDS} for row in t] for t in self.tables.values()])


ARMS = {
    "grpo": Arm(policy_loss=Grpo()),
    "grpo_routing_replay": Arm(policy_loss=Grpo(), replay="old_policy"),
    "grpo_r3": Arm(policy_loss=Grpo(), replay="rollout"),
    "grpo_shuffled_replay": Arm(policy_loss=Grpo(), replay="shuffled"),
    "grpo_thresholded_replay": Arm(policy_loss=Grpo(), replay="thresholded", replay_threshold=0.9),
    "grpo_sticky_replay": Arm(policy_loss=Grpo(), replay="sticky", replay_threshold=0.9),
    "gspo": Arm(policy_loss=Gspo()),
    "gspo_token": Arm(policy_loss=GspoToken()),
}
SMALL = Tiny(layers=2, hidden_size=32, heads=2, experts=8, top_k=2, expert_size=16, initializer_range=0.1)


def split_arm(name, changes):
    """Settings of an experiment: the arm, with those of `changes` that are an arm's, and the others."""
    own = {field.name for field in dataclasses.fields(Arm)} & changes.keys()
    arm = dataclasses.replace(ARMS[name], **{field: changes[field] for field in own})
    return {"arm": arm, **{key: value for key, value in changes.items() if key not in own}}


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """train(arm, setting=...) -> Result of a small run. Equal runs are made once, unless `fresh`."""
    build_policy, built, made = assembly.build_policy, [], {}
    tmp_path = tmp_path_factory.mktemp("laws")

    def remember(*args, **told):
        policy = build_policy(*args, **told)
        built.append((policy[0], copy.deepcopy(policy[0].state_dict())))
        return policy

    counter = iter(range(1000))

    def run(arm="grpo", fresh=False, **changes):
        key = repr((arm, sorted(changes.items())))
        if fresh or key not in made:
            made[key] = run_anew(arm, changes)
        return made[key]

    def run_anew(arm, changes):
        settings = {
            "study_name": "laws", "seed": 0, "steps": 3, "prompts": 4, "completions": 4, "updates": 2, "micro_batch": 0,
            "activation_checkpointing": False, "eval_prompts": 0, "eval_every": 0, "model": SMALL, "router": Native(),
            "task": Vowels(), "engine": Hf(max_new_tokens=6), "optim": Optim(lr=3e-3),
            "drift": DriftSettings(rollouts=4, probe=4), "cold_start": ColdStart(steps=0), "launch": Launch(),
        }  # fmt: skip
        experiment = Experiment(**settings | split_arm(arm, changes))
        folder = tmp_path / str(next(counter))
        with open_run(folder, {}) as writer:
            state = loop.run(experiment, writer, str(tmp_path / "cache"))
        model, start = built.pop()
        tables = {name: read_table(folder, name) for name in ("steps", "updates", "drift")}
        facts, status = read_json(folder / "run.json"), read_json(folder / "status.json")
        return Result(state, start, model.state_dict(), tables, facts, status)

    assembly.build_policy = remember
    yield run
    assembly.build_policy = build_policy


def same(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def distance(one, other):
    """Largest relative distance of two sets of weights."""
    return max(float((one[name] - other[name]).norm() / one[name].norm().clamp(min=1e-9)) for name in one)


# ----------------------------------------------------------------------------------------------------------------- arms
@pytest.mark.parametrize("arm", ARMS)
def test_law_1_every_first_update_of_a_step_has_ratios_of_exactly_1_and_e9_the_others_have_not(train, arm):
    result = train(arm, updates=4, steps=2)
    assert result.state == "finished"
    updates = result.tables["updates"]
    assert [(row["step"], row["update"]) for row in updates] == [(s, u) for s in (1, 2) for u in (1, 2, 3, 4)]
    for row in updates:
        if row["update"] == 1:
            assert row["log_w_q"] == row["log_s_q"] == [0.0] * 7
            assert (row["log_w_sd"], row["log_s_sd"], row["k3"], row["clip_frac"]) == (0, 0, 0, 0)
        else:
            assert row["log_w_sd"] > 1e-4
        assert row["grad_norm"] > 0.01
    assert distance(result.start, result.end) > 1e-3


def test_law_3_with_one_update_a_batch_the_arms_are_the_same_run(train):
    results = {arm: train(arm, updates=1) for arm in ARMS if arm != "grpo_shuffled_replay"}
    grpo = results["grpo"]
    assert distance(grpo.start, grpo.end) > 1e-3
    assert same(grpo.end, results["grpo_routing_replay"].end)
    assert grpo.without_seconds() == results["grpo_routing_replay"].without_seconds()
    for arm in ("grpo_r3", "gspo", "gspo_token"):
        assert distance(grpo.end, results[arm].end) < 1e-5, arm
        rewards = [[row.get("reward") for row in r.tables["steps"]] for r in (grpo, results[arm])]
        assert rewards[0] == rewards[1]


def test_with_more_updates_the_arms_are_different_runs(train):
    results = [train(arm, updates=4, steps=2).end for arm in ("grpo", "grpo_routing_replay", "gspo")]
    assert distance(results[0], results[1]) > 1e-4
    assert distance(results[0], results[2]) > 1e-4


def test_with_one_engine_in_full_precision_both_replays_are_the_same_run(train):
    one, other = (train(arm, updates=4, steps=2) for arm in ("grpo_routing_replay", "grpo_r3"))
    assert distance(one.end, other.end) < 1e-5
    natural = train("grpo", updates=4, steps=2)
    assert distance(one.end, natural.end) > 1e-4


def test_arms_of_one_seed_start_from_the_same_policy_and_see_the_same_first_rollouts(train):
    results = [train(arm, updates=4, steps=2) for arm in ARMS]
    for arm, other in zip(ARMS, results, strict=True):
        assert same(results[0].start, other.start)
        foreign = arm == "grpo_shuffled_replay"  # its entropy is that of the wrong experts
        for column in ("reward", "tokens", "response_length", *(() if foreign else ("entropy",))):
            assert results[0].tables["steps"][1][column] == pytest.approx(other.tables["steps"][1][column], rel=1e-6)


def test_law_4_groups_of_equal_rewards_change_nothing_and_are_counted(train):
    for arm in ("grpo", "grpo_routing_replay", "gspo"):
        result = train(arm, steps=1, task=Vowels(wanted=""))
        assert result.state == "finished"
        assert same(result.start, result.end)
        assert result.tables["steps"][1]["equal_groups"] == 1.0
        assert [(row["loss"], row["grad_norm"]) for row in result.tables["updates"]] == [(0.0, 0.0)] * 2
        assert all(not any(row["slot_change"]) for row in result.tables["drift"])


def test_drift_is_measured_of_the_policy_itself_also_where_training_is_replayed(train):
    for arm in ("grpo", "grpo_routing_replay", "grpo_r3"):
        rows = train(arm, updates=4, steps=2).tables["drift"]
        assert len(rows) == 2 * 4 * 5
        for row in rows:
            assert row["n"] > 0
            assert row["any_layer_change"] > 0, (arm, row)
    meant = {(r["tokens"], r["reference"]) for r in rows}
    assert meant == {("rollout", "old"), ("rollout", "previous"), *(("probe", x) for x in ("old", "previous", "start"))}


# ------------------------------------------------------------------------------------------------------ the same result
@pytest.mark.parametrize("arm", ["grpo_routing_replay", "gspo"])
def test_the_same_seed_gives_the_same_weights_and_another_seed_others(train, arm):
    torch.manual_seed(1)
    one = train(arm, fresh=True)
    torch.manual_seed(2)
    torch.rand(5)  # nothing hangs on the global generator
    other = train(arm, fresh=True)
    assert one is not other
    assert same(one.end, other.end)
    assert one.without_seconds() == other.without_seconds()
    assert not same(one.end, train(arm, seed=1).end)


def test_measuring_does_not_change_what_is_measured(train):
    plain = train("grpo_routing_replay", drift=DriftSettings(every=0))
    assert plain.tables["drift"] == []
    for changes in ({}, {"eval_prompts": 3, "eval_every": 1, "drift": DriftSettings(every=2, probe=0)}):
        assert same(plain.end, train("grpo_routing_replay", **changes).end)


@pytest.mark.parametrize("router", [Native(), Balanced(speed=0.01)])
@pytest.mark.parametrize("arm", ["grpo_routing_replay", "gspo"])
def test_activation_checkpointing_changes_nothing_and_micro_batches_only_rounding(train, arm, router):
    plain = train(arm, router=router)
    assert same(plain.end, train(arm, router=router, activation_checkpointing=True).end)
    cut = train(arm, router=router, micro_batch=3)
    for one, other in zip(plain.tables["updates"], cut.tables["updates"], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    assert distance(plain.end, cut.end) < 1e-4


def test_a_variant_that_chooses_as_the_model_does_trains_the_same_run(train):
    plain = train("grpo_routing_replay")
    idle = train("grpo_routing_replay", router=Balanced(speed=0.0))
    assert same(plain.end, {name: value for name, value in idle.end.items() if "balance" not in name})


@pytest.mark.parametrize("arm", ["grpo", "grpo_routing_replay", "grpo_r3"])
@pytest.mark.parametrize("router", [Balanced(speed=0.01), LearnedPrior(), Binned(width=0.02), Predictive()], ids=repr)
def test_router_variants_train_under_every_replay(train, arm, router):
    result = train(arm, router=router, steps=1)
    assert result.state == "finished"
    for row in result.tables["updates"]:
        assert (row["log_w_sd"] == 0) == (row["update"] == 1)
    for name, value in result.end.items():
        if name.endswith(("balance_bias", "prior", "predictor")):
            assert not torch.equal(value, result.start[name]), name


@pytest.mark.parametrize("router", [Noisy(every=2), ExpertDropout(share=0.3, every=2)], ids=repr)
def test_random_routers_route_alike_in_sampling_old_pass_and_training(train, router):
    result, name = train(router=router, steps=2), "gumbel" if isinstance(router, Noisy) else "draw"
    assert all((row["log_w_sd"] == 0) == (row["update"] == 1) for row in result.tables["updates"])
    assert all(row["mismatch_k3"] < 1e-6 for row in result.tables["steps"][1:])
    assert not same({k: v for k, v in result.start.items() if k.endswith(name)},
                    {k: v for k, v in result.end.items() if k.endswith(name)})  # fmt: skip


def test_predictive_replay_foresees_the_router_better_than_the_router_of_the_old_policy(train):
    runs = [train("grpo_r3", router=Predictive(), updates=4, steps=6, prompts=8, seed=seed) for seed in (0, 1, 2)]
    rows = [row for run in runs for row in run.tables["updates"]]
    assert all(("foreseen" in row) == (row["update"] > 1) for row in rows), "the first update's scores are the old ones"
    start = [row for row in rows if (row["step"], row["update"]) == (1, 2)]
    assert all(row["foreseen"] == row["foreseen_by_native"] for row in start), "it starts as the family's own choice"
    gain = {u: [r["foreseen"] - r["foreseen_by_native"] for r in rows if r["update"] == u] for u in (2, 3, 4)}
    assert sum(gain[4]) / len(gain[4]) > 0.005
    assert all((row["log_w_sd"] == 0) == (row["update"] == 1) for row in rows)
    native = train("grpo_r3", updates=4, steps=6, prompts=8)
    assert distance(native.end, {name: runs[0].end[name] for name in native.end}) > 1e-4
    assert all("foreseen" not in row for row in native.tables["updates"])


def test_what_a_router_foresees_depends_on_micro_batches_and_checkpointing_by_rounding_only(train):
    told = {"router": Predictive(), "updates": 2, "steps": 2}
    plain = train("grpo_routing_replay", **told)
    assert same(plain.end, train("grpo_routing_replay", activation_checkpointing=True, **told).end)
    cut = train("grpo_routing_replay", micro_batch=3, **told)
    for one, other in zip(plain.tables["updates"], cut.tables["updates"], strict=True):
        assert one.get("foreseen") == pytest.approx(other.get("foreseen"), abs=0.02)
    predictors = [[v for k, v in run.end.items() if k.endswith("predictor")] for run in (plain, cut)]
    assert all(torch.allclose(one, other, atol=1e-2) for one, other in zip(*predictors, strict=True))
    assert all(one.abs().max() > 0.01 for one in predictors[0])


def test_a_warm_up_is_not_shared_between_router_variants(train):
    warm = {"cold_start": ColdStart(steps=2, batch_size=4), "steps": 1}
    native, binned = train(**warm), train(router=Binned(width=0.2), **warm)
    assert (native.run["cold_start"]["cache"], binned.run["cold_start"]["cache"]) == ("trained", "trained")
    assert not same(native.start, binned.start)
    again = train(router=Binned(width=0.2), fresh=True, **warm)
    assert again.run["cold_start"]["cache"] == "hit"
    assert same(binned.start, again.start)
    assert train(router=Binned(width=0.1), **warm).run["cold_start"]["cache"] == "trained"


# ------------------------------------------------------------------------------------------------ choices in training
@pytest.mark.parametrize(
    ("trains", "kept"),
    [("all", set()), ("no_router", {"gate"}), ("router", {"experts", "rest"}), ("experts", {"gate", "rest"})],
)
def test_what_is_not_trained_is_at_the_end_what_it_was_after_the_cold_start(train, trains, kept):
    optim, warm = Optim(lr=3e-3, trains=trains), {"cold_start": ColdStart(steps=2, batch_size=4), "steps": 1}
    result, untrained = train(optim=optim, **warm), SMALL.build(0)[0].state_dict()
    for name, value in result.end.items():
        kind = "gate" if ".gate." in name else "experts" if ".experts." in name else "rest"
        assert torch.equal(value, result.start[name]) == (kind in kept), name
        assert not torch.equal(result.start[name], untrained[name]), "the cold start trains everything"


def test_pressure_on_the_routers_is_logged_and_takes_part(train):
    plain = train()
    for name in ("balance_loss", "router_kl"):
        assert name not in plain.tables["updates"][0]
        result = train(optim=Optim(lr=3e-3, **{name: 0.5}))
        assert all(math.isfinite(row[name]) for row in result.tables["updates"])
        assert distance(plain.end, result.end) > 1e-4


@pytest.mark.parametrize("arm", ["grpo_thresholded_replay", "grpo_sticky_replay"])
def test_the_share_of_replayed_experts_that_were_kept_is_logged(train, arm):
    rows = train(arm, updates=4, steps=2, replay_threshold=0.999).tables["updates"]
    assert all(row["replay_kept"] == 1 for row in rows if row["update"] == 1)
    assert all(0.5 < row["replay_kept"] <= 1 for row in rows)
    assert sum(row["replay_kept"] < 1 for row in rows) > 2


# ------------------------------------------------------------------------------------------- sampler against trainer
NOISY = Hf(max_new_tokens=6, router_noise=0.1)


def test_an_exact_engine_has_no_mismatch_and_an_emulated_one_has(train):
    for row in train().tables["steps"][1:]:
        assert (row["mismatch_f2"], row["mismatch_f5"]) == (0.0, 0.0)
        assert (row["mismatch_k3"], row["mismatch_ess"]) == pytest.approx((0.0, 1.0), abs=1e-6)
        assert "routing_mismatch" not in row
    for engine in (NOISY, Hf(max_new_tokens=6, dtype="bfloat16"), Hf(max_new_tokens=6, fp8_emulated=True)):
        result = train(engine=engine)
        for row in result.tables["steps"][1:]:
            assert row["mismatch_k3"] > 1e-6
            assert 0.2 < row["mismatch_ess"] < 1 - 1e-6
        assert all((row["log_w_sd"] == 0) == (row["update"] == 1) for row in result.tables["updates"])


def test_routing_mismatch_is_measured_where_both_choices_are_known(train):
    for arm in ("grpo", "grpo_routing_replay"):
        assert all(0 < row["routing_mismatch"] < 1 for row in train(arm, engine=NOISY).tables["steps"][1:])
    for arm in ("grpo_r3", "grpo_shuffled_replay"):  # their old pass executes another choice than its own
        assert all("routing_mismatch" not in row for row in train(arm, engine=NOISY).tables["steps"][1:])


def test_replaying_the_samplers_experts_takes_away_what_noisy_routers_do(train):
    live, replayed = (train(arm, engine=NOISY, steps=1).tables["steps"][1] for arm in ("grpo", "grpo_r3"))
    assert live["reward"] == replayed["reward"]
    assert replayed["mismatch_k3"] < live["mismatch_k3"] / 5


def test_evaluation_samples_from_the_policy_itself(train):
    told = {"eval_prompts": 16, "eval_every": 1, "steps": 1}
    exact, noisy = (train(engine=engine, **told).tables["steps"] for engine in (Hf(max_new_tokens=6), NOISY))
    assert exact[0]["eval_reward"] == noisy[0]["eval_reward"]
    assert exact[1]["reward"] != noisy[1]["reward"]


def test_old_logprobs_of_the_engine_put_the_mismatch_into_the_ratio(train):
    own, engine = (train(engine=NOISY, old_logprobs=which) for which in ("recompute", "engine"))
    assert (own.run["old_logprobs"], engine.run["old_logprobs"]) == ("recompute", "engine")
    first = {row["step"]: row for row in engine.tables["updates"] if row["update"] == 1}
    assert first[1]["k3"] > 1e-4
    assert own.tables["updates"][0]["k3"] == 0
    for column in ("mismatch_k3", "entropy", "reward"):  # of the same first rollouts
        assert own.tables["steps"][1][column] == engine.tables["steps"][1][column]
    assert distance(own.end, engine.end) > 1e-4


def test_with_one_update_a_step_the_engines_ratio_is_the_mismatch_itself(train):
    result = train(engine=NOISY, old_logprobs="engine", updates=1)
    for step, update in zip(result.tables["steps"][1:], result.tables["updates"], strict=True):
        for name in ("k3", "f2", "f5", "ess"):
            assert update[name] == pytest.approx(step[f"mismatch_{name}"], rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("kind", ["tis", "icepop", "sequence_mask"])
def test_corrections_change_the_run_under_a_gap_and_nothing_without_one(train, kind):
    correction = Correction(kind=kind, cap=1.0, low=0.99, high=1.01)
    assert distance(train(engine=NOISY).end, train(engine=NOISY, correction=correction).end) > 1e-4
    assert distance(train().end, train(correction=correction).end) < 1e-4


# ---------------------------------------------------------------------------------------------------- what may go wrong
@dataclasses.dataclass(frozen=True, kw_only=True)
class NanOnceMoved(PolicyLoss):
    """A loss that is nan where the policy has moved."""

    def __call__(self, batch):
        moved = (batch.logprobs_BT - batch.old_logprobs_BT).abs().sum() > 0
        loss = -(batch.logprobs_BT.sum(1) * batch.advantages_B).mean()
        return LossOutput(loss * float("nan") if moved else loss, torch.zeros_like(batch.mask_BT))


def test_a_run_whose_loss_is_not_finite_diverges_with_its_last_good_weights(train):
    result = train(policy_loss=NanOnceMoved())
    assert result.state == result.status["state"] == "diverged"
    assert "loss nan" in result.status["reason"]
    assert "at update 2 at step 1" in result.status["reason"]
    assert [row["update"] for row in result.tables["updates"]] == [1, 2]
    assert math.isnan(result.tables["updates"][1]["loss"])
    assert all(value.isfinite().all() for value in result.end.values())
    assert distance(result.start, result.end) > 1e-4


def test_a_dense_model_trains_without_drift_and_refuses_replay_and_routers(train):
    dense = dataclasses.replace(SMALL, family="dense")
    result = train("gspo", model=dense)
    assert result.state == "finished"
    assert result.tables["drift"] == []
    assert distance(result.start, result.end) > 1e-3
    for changes in ({"replay": "old_policy"}, {"router": Binned()}):
        with pytest.raises(ConfigError, match="has no MoE layers"):
            train("gspo", model=dense, **changes)


def test_answers_that_cannot_be_given_are_refused_before_training(train):
    with pytest.raises(ConfigError, match=r"set engine\.max_new_tokens=3"):
        train(engine=Hf(max_new_tokens=2))
    with pytest.raises(ConfigError, match="exceed the model's 8 positions"):
        train(model=dataclasses.replace(SMALL, max_positions=8))


def test_tables_name_as_many_layers_and_experts_as_the_model_has(train):
    result = train(steps=1)
    row = result.tables["drift"][0]
    assert (len(row["slot_change"]), len(row["deviation"])) == (2, 3)
    assert (result.run["num_layers"], result.run["num_experts"], result.run["top_k"]) == (2, 8, 2)
    assert len(find_routers(SMALL.build(0)[0])) == 2
