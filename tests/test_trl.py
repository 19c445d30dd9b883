"""GRPO + Routing Replay and drift inside TRL's trainer: a tiny model is really trained on the CPU."""

import importlib
import random
import sys

import pytest
import torch
from models import tiny

from moe_rl.models.tokenizer import character_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # TRL 1.16 calls transformers by old names


def test_without_trl_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.delitem(sys.modules, "moe_rl.integrations.trl", raising=False)
    with pytest.raises(ImportError, match=r"moe_rl\[trl\]"):
        importlib.import_module("moe_rl.integrations.trl")


def test_another_minor_version_of_trl_is_refused(monkeypatch):
    monkeypatch.setattr("trl.__version__", "1.17.0")
    monkeypatch.delitem(sys.modules, "moe_rl.integrations.trl", raising=False)
    with pytest.raises(ImportError, match=r"1\.16, this is 1\.17\.0"):
        importlib.import_module("moe_rl.integrations.trl")


def shares_of_digits(completions, **columns):
    return [sum(letter.isdigit() for letter in text) / max(len(text), 1) for text in completions]


def make_trainer(tmp_path, kind=None, **settings):
    """A GRPO trainer of 8 completions a generation batch: 2 prompts x 4, in 2 optimizer steps unless told otherwise."""
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    draw = random.Random(0)
    prompts = [f"{draw.randint(1, 99)}+{draw.randint(1, 9)}=" for _ in range(16)]
    defaults = {
        "output_dir": str(tmp_path), "use_cpu": True, "seed": 0, "report_to": "none", "save_strategy": "no",
        "logging_steps": 1, "disable_tqdm": True, "bf16": False, "max_steps": 4, "learning_rate": 3e-2,
        "lr_scheduler_type": "constant", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1,
        "steps_per_generation": 2, "num_generations": 4, "max_completion_length": 6, "beta": 0.0, "temperature": 1.0,
        "router_aux_loss_coef": 0.0,
    }  # fmt: skip
    trainer = (kind or GRPOTrainer)(
        model=tiny(layers=2),
        reward_funcs=shares_of_digits,
        args=GRPOConfig(**(defaults | settings)),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=character_tokenizer(),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def train(tmp_path, kind=None, **settings):
    """A trained trainer. Made and trained at once: making one seeds the global random state that sampling uses."""
    trainer = make_trainer(tmp_path, kind, **settings)
    trainer.train()
    return trainer


def weights_of(trainer):
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def assert_same_weights(one, other):
    different = [name for name, weight in weights_of(one).items() if not torch.equal(weight, weights_of(other)[name])]
    assert not different


@pytest.fixture
def replaying():
    from moe_rl.integrations.trl import RoutingReplayGRPOTrainer

    return RoutingReplayGRPOTrainer


def test_drift_is_logged_per_optimizer_step_and_is_zero_until_weights_move(tmp_path):
    from moe_rl.integrations.trl import RoutingDriftCallback

    warm = {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 1}  # the first step has learning rate 0
    measured = make_trainer(tmp_path, **warm)
    callback = RoutingDriftCallback(measured, sequences=5)
    measured.add_callback(callback)
    measured.train()
    logs = [row for row in measured.state.log_history if "loss" in row]
    assert len(logs) == 4
    kinds = ("slot_change", "set_change", "any_layer_change")
    for kind in kinds:
        drift = {name: [row[f"drift/{name}/{kind}"] for row in logs] for name in ("previous", "sampled")}
        assert drift["previous"][0] == drift["sampled"][0] == 0
        assert min(drift["previous"][1:]) > 0
        assert drift["sampled"][1] == drift["previous"][1]  # the policy before step 2 is still the one that sampled
        assert drift["sampled"][2] == drift["previous"][2]  # the first step on a new generation batch
    assert [row["step"] for row in callback.rows] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert len(callback.references["sampled"].expert_ids_BSLK) == 5
    assert_same_weights(measured, train(tmp_path, **warm))  # measuring changes nothing


def test_experts_receive_the_old_policys_ids_in_training_and_in_recomputation(tmp_path, replaying):
    from moe_rl.integrations.trl import EXPERT_IDS, VALID

    received, wanted, moved = {}, {}, []

    class Watched(replaying):
        def compute_loss(self, model, inputs, *args, **kwargs):
            received.clear()
            wanted.update(ids=inputs[EXPERT_IDS], valid=inputs[VALID])
            return super().compute_loss(model, inputs, *args, **kwargs)

        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            for layer in range(2):
                assert len(received[layer]) == 2  # the forward and, with TRL's default, its recomputation
                for ids_NK in received[layer]:
                    valid_N = wanted["valid"].flatten()
                    assert torch.equal(ids_NK[valid_N], wanted["ids"][:, :, layer].flatten(0, 1)[valid_N].long())
            moved.append(self._drift())
            return loss

        @torch.no_grad()
        def _drift(self):
            from moe_rl import record

            batch = self._buffered_inputs[(self._step - 1) % 2]
            tokens = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
            mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
            with record(self.model) as recorder:
                self.model(input_ids=tokens, attention_mask=mask)
            live = recorder.trace.expert_ids_BSLK.sort(-1).values
            return bool((live != batch[EXPERT_IDS].sort(-1).values)[batch[VALID]].any())

    trainer = make_trainer(tmp_path, Watched)
    for layer, block in enumerate(trainer.model.model.layers):
        block.mlp.experts.register_forward_pre_hook(
            lambda module, args, layer=layer: received.setdefault(layer, []).append(args[1].clone())
        )
    trainer.train()
    # Live routing was the old one on the first step of each generation batch and another on the second.
    assert moved == [False, True, False, True]


def test_activation_checkpointing_does_not_change_replayed_training(tmp_path, replaying):
    on, off = (train(tmp_path, replaying, activation_checkpointing=value) for value in (True, False))
    assert on.model.is_activation_checkpointing
    assert not off.model.is_activation_checkpointing
    assert_same_weights(on, off)


def test_replay_changes_training_from_the_second_update_on_and_the_first_not_at_all(tmp_path, replaying):
    for steps, same in ((1, True), (2, False)):
        replayed, plain = train(tmp_path, replaying, max_steps=steps), train(tmp_path, max_steps=steps)
        pairs = zip(weights_of(replayed).values(), weights_of(plain).values(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs) == same


@pytest.mark.parametrize("accumulation", [1, 2])
def test_one_update_a_generation_is_plain_grpo_bit_for_bit(tmp_path, replaying, accumulation):
    shape = {"steps_per_generation": accumulation, "gradient_accumulation_steps": accumulation, "max_steps": 2}
    replayed, plain = train(tmp_path, replaying, **shape), train(tmp_path, **shape)
    assert not replayed.replays
    assert_same_weights(replayed, plain)


def test_a_batch_that_lost_its_routing_raises(tmp_path, replaying):
    class Forgetful(replaying):
        def _prepare_inputs(self, batch):
            kept = super()._prepare_inputs(batch)
            return {name: value for name, value in kept.items() if "expert_ids" not in name}

    with pytest.raises(RuntimeError, match="lost its routing"):
        train(tmp_path, Forgetful)


def test_routing_that_was_not_shuffled_with_its_tokens_raises(tmp_path, replaying):
    class Shuffling(replaying):
        def _prepare_inputs(self, batch):
            kept = super()._prepare_inputs(batch)
            moved = {name: kept[name].flip(0) for name in ("prompt_ids", "completion_ids")}
            return kept | moved

    with pytest.raises(RuntimeError, match="other tokens"):
        train(tmp_path, Shuffling)


def test_dense_models_are_refused(tmp_path, replaying, monkeypatch):
    monkeypatch.setitem(globals(), "tiny", lambda **settings: tiny_dense())
    with pytest.raises(RuntimeError, match="no MoE layers"):
        make_trainer(tmp_path, replaying, router_aux_loss_coef=None)


def tiny_dense():
    from moe_rl.models.build import Tiny

    return Tiny(family="dense", layers=2, hidden_size=32, heads=4, expert_size=16).build(0)[0]
