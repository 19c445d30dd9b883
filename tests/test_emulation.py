"""An engine that differs on purpose: what it changes, what it leaves alone, and that nothing of it remains."""

import dataclasses

import pytest
import torch
from models import FAMILIES, sets_differ, tiny
from test_engine import TASK, build, examples
from test_update import grpo, seen_by_old

from moe_rl.drift import compare
from moe_rl.emulation import emulated, fp8_dims, round_to_fp8
from moe_rl.engines.hf import Hf
from moe_rl.models.families import find_routers
from moe_rl.policy import response_logprobs, routing_of
from moe_rl.routers.balanced import Balanced
from moe_rl.routers.base import install
from moe_rl.routing_trace import RoutingError

GAPS = {
    "bfloat16": {"dtype": "bfloat16"},
    "fp8": {"fp8_emulated": True},
    "noise": {"router_noise": 0.05},
    "all": {"dtype": "bfloat16", "fp8_emulated": True, "router_noise": 0.05},
}


def state(model):
    """(tensor, copy) of every parameter and buffer."""
    return {
        name: (value.data_ptr(), value.clone()) for name, value in (*model.named_parameters(), *model.named_buffers())
    }


def untouched(model, before):
    now = state(model)
    return now.keys() == before.keys() and all(
        now[name][0] == pointer and torch.equal(now[name][1], value) and now[name][1].dtype == value.dtype
        for name, (pointer, value) in before.items()
    )


# ---------------------------------------------------------------------------------------------- nothing of it remains
@pytest.mark.parametrize("family", [*FAMILIES, "dense"])
def test_after_the_block_every_weight_is_the_same_tensor_also_after_an_error(family):
    model = tiny(family, dtype="float32")
    noise = 0.0 if family == "dense" else 0.1
    before = state(model)
    for parameter in model.parameters():  # gradients of the last update are still there while sampling
        parameter.grad = torch.ones_like(parameter)
    with emulated(model, dtype="bfloat16", fp8=True, router_noise=noise):
        assert not untouched(model, before)
        assert model.lm_head.weight.dtype == torch.bfloat16
    assert untouched(model, before)
    with pytest.raises(KeyboardInterrupt), emulated(model, dtype="bfloat16", fp8=True, router_noise=noise):
        raise KeyboardInterrupt
    assert untouched(model, before)
    ids = torch.arange(5, 15)[None]
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    assert not any(hooks)
    assert torch.equal(model(input_ids=ids).logits, tiny(family)(input_ids=ids).logits)


def test_tied_weights_stay_tied_and_alone():
    model = tiny()
    model.lm_head.weight = model.model.embed_tokens.weight
    assert model.lm_head.weight not in fp8_dims(model)
    with emulated(model, dtype="bfloat16"):
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert model.lm_head.weight.dtype == torch.bfloat16
    assert model.lm_head.weight.dtype == torch.float32


def test_what_a_family_keeps_in_fp32_and_buffers_stay():
    model = tiny("deepseek_v3")
    with emulated(model, dtype="bfloat16"):
        kept = {name.rpartition(".mlp.")[2] for name, p in model.named_parameters() if p.dtype == torch.float32}
        assert kept == {"gate.weight"}
        assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}


# ---------------------------------------------------------------------------------------------- rounding
def test_fp8_rounding_by_hand():
    """e4m3 has three bits of mantissa: it is 32 apart from 256 to 448, 2 from 16 to 32, and 2^-9 below 2^-6."""
    weight = torch.tensor([[448.0, 300.0, -17.2, 0.003], [4.48, 3.0, -0.172, 0.0], [0.0, 0.0, 0.0, 0.0]])
    got = round_to_fp8(weight, 1)
    assert torch.allclose(got[0], torch.tensor([448.0, 288.0, -18.0, 0.00390625]))
    assert torch.allclose(got[1], torch.tensor([4.48, 2.88, -0.18, 0.0]))  # a scale of its own: 0.01
    assert not got[2].any()
    assert torch.equal(round_to_fp8(weight.T.contiguous(), 0), got.T)
    assert torch.equal(round_to_fp8(got, 1), got)


@pytest.mark.parametrize("family", [*FAMILIES, "dense"])
def test_fp8_rounds_linear_layers_and_experts_and_leaves_the_rest_alone(family):
    model = tiny(family)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with emulated(model, fp8=True):
        changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    experts = {"gate_up_proj", "down_proj"} if family != "dense" else set()
    for name, weight in before.items():
        stem = name.removesuffix(".weight").rpartition(".")[2]
        matrix = weight.dim() == 3 or (weight.dim() == 2 and stem.endswith(("_proj", "_proj_with_mqa")))
        assert (name in changed) == matrix, name
        experts -= {stem} if weight.dim() == 3 else set()
    assert not experts


def test_an_output_channel_of_an_expert_has_one_scale_whatever_the_layout():
    for family, dim in (("qwen3_moe", 2), ("gpt_oss", 1)):
        model = tiny(family)
        experts = next(module for module in model.modules() if type(module).__name__.endswith("Experts"))
        with torch.no_grad():  # one channel is so large that a shared scale would round the others to 0
            experts.down_proj.select(3 - dim, 0).mul_(1e6)
        before = experts.down_proj.clone()
        with emulated(model, fp8=True):
            error = ((experts.down_proj - before).abs() / before.abs().amax(dim, keepdim=True)).max()
        assert 0 < error < 1 / 16


def test_experts_of_unknown_layout_are_refused():
    model = tiny()
    for module in model.modules():
        vars(module).pop("is_transposed", None)
    with pytest.raises(RoutingError, match="which dimension of its matrices is the input"):
        fp8_dims(model)


# ---------------------------------------------------------------------------------------------- noisy routers
@pytest.mark.parametrize("family", FAMILIES)
def test_noise_changes_the_choice_by_the_seed_and_not_the_gates_of_the_chosen(family):
    model = tiny(family)
    ids, mask = torch.randint(5, 40, (4, 9), generator=torch.Generator().manual_seed(0)), torch.ones(4, 9).bool()
    own = routing_of(model, ids, mask)
    traces = []
    for seed, deviation in ((0, 0.1), (0, 0.1), (1, 0.1), (0, 1e-9)):
        with emulated(model, router_noise=deviation, seed=seed):
            traces.append(routing_of(model, ids, mask))
    one, again, other, silent = traces
    assert 0 < compare(own, one).slot_change < 1
    assert torch.equal(one.expert_ids_BSLK, again.expert_ids_BSLK)
    assert sets_differ(one, other).any()
    assert not sets_differ(own, silent).any()
    one.check()


def test_a_router_variant_sees_the_noisy_scores():
    model = tiny()
    install(model, Balanced(speed=0.0))
    for site in find_routers(model):
        site.module.balance_bias[3] = 100.0
    with emulated(model, router_noise=1.0):
        trace = routing_of(model, torch.arange(5, 25)[None], torch.ones(1, 20).bool())
    assert (trace.expert_ids_BSLK == 3).any(-1).all()
    assert len(trace.expert_ids_BSLK.unique()) == 8, "the other expert is a matter of noise"


def test_noise_on_a_dense_model_is_refused():
    with pytest.raises(RoutingError, match="no MoE layers"), emulated(tiny("dense"), router_noise=0.1):
        pass


# ---------------------------------------------------------------------------------------------- sampling
@pytest.mark.parametrize("gap", GAPS)
def test_a_gap_shows_in_the_log_probabilities_and_leaves_the_policy_as_it_was(gap):
    policy = build()
    before = state(policy[0])
    engine = Hf(max_new_tokens=6, **GAPS[gap])
    assert not engine.exact
    assert engine.without_emulation() == Hf(max_new_tokens=6)
    rollouts, again = (engine.sample(*policy, TASK, examples(8), 4, 0, True) for _ in range(2))
    assert torch.equal(rollouts.tokens_BS, again.tokens_BS)
    assert torch.equal(rollouts.rollout_logprobs_BT, again.rollout_logprobs_BT)
    assert untouched(policy[0], before)
    batch = seen_by_old(policy[0], rollouts, torch.zeros(32), [torch.arange(32)], grpo())[0]
    log_c = (batch[0].old.logprobs_BT - rollouts.rollout_logprobs_BT)[rollouts.response_BT]
    assert log_c.abs().max() > 1e-3
    assert log_c.abs().mean() < 0.5
    exact = Hf(max_new_tokens=6).sample(*policy, TASK, examples(8), 4, 0)
    assert (response_logprobs(policy[0], exact)[0] - exact.rollout_logprobs_BT).abs().max() < 1e-4


def test_the_log_probability_is_that_of_the_engine_that_sampled():
    """So noise apart, the emulated model says the same of the tokens."""
    policy = build()
    engine = Hf(max_new_tokens=6, fp8_emulated=True)
    rollouts = engine.sample(*policy, TASK, examples(8), 4, 0)
    with emulated(policy[0], fp8=True), torch.no_grad():
        logprobs, _ = response_logprobs(policy[0], rollouts)
    assert torch.allclose(logprobs, rollouts.rollout_logprobs_BT, atol=1e-4)


def test_settings_of_an_engine_that_cannot_work_are_refused():
    for wrong in ({"dtype": "fp4"}, {"router_noise": -0.1}, {"router_noise": float("nan")}):
        with pytest.raises(ValueError, match=rf"engine\.{next(iter(wrong))} is"):
            Hf(**wrong)
    assert Hf().exact
    assert dataclasses.replace(Hf(), batch_size=4).exact
