"""Load balance and router KL: values by hand, their gradients, and nothing of them at coefficient 0."""

import copy
import math

import pytest
import torch
from models import FAMILIES, tiny
from test_update import advantages, distance, grpo, rollouts, seen_by_old, weights

from moe_rl import record
from moe_rl.mini_batches import split_rows
from moe_rl.optim import Optim
from moe_rl.policy import make_deterministic, routing_of
from moe_rl.router_pressure import NO_PRESSURE, RouterPressure, balance, kl, router_outputs
from moe_rl.routing_trace import RoutingError
from moe_rl.update import take_update

BOTH = RouterPressure(balance_loss=0.3, router_kl=0.7)


def test_balance_by_hand():
    even = torch.zeros(4, 4)
    assert balance(even, torch.tensor([[0, 1], [2, 3], [0, 2], [1, 3]])).item() == pytest.approx(1.0)
    p = torch.tensor([[0.5, 0.3, 0.1, 0.1], [0.7, 0.1, 0.1, 0.1]])
    # choices 0 1, 0 2: f = 1/2 1/4 1/4 0; P = .6 .2 .1 .1; 4 (.3 + .05 + .025)
    assert balance(p.log(), torch.tensor([[0, 1], [0, 2]])).item() == pytest.approx(1.5)
    alone = torch.tensor([[50.0, 50.0, 0.0, 0.0]])
    assert balance(alone, torch.tensor([[0, 1]])).item() == pytest.approx(2.0), "E / K when K experts get all"


def test_kl_by_hand():
    old, new = torch.tensor([[0.5, 0.5], [0.9, 0.1]]), torch.tensor([[0.25, 0.75], [0.9, 0.1]])
    expected = (0.5 * math.log(2) + 0.5 * math.log(2 / 3)) / 2
    assert kl(old.log() + 3, new.log() - 1).item() == pytest.approx(expected, rel=1e-5)
    assert kl(old.log(), old.log()).item() == 0.0


def test_padding_counts_in_neither():
    pressure, real = RouterPressure(balance_loss=1.0, router_kl=1.0), torch.tensor([[False, True], [True, True]])
    logits = torch.randn(4, 8)
    ids, old = logits.topk(2).indices, torch.randn(2, 2, 1, 8)
    _, values = pressure([(logits, ids)], real, old)
    spoilt = logits.clone()
    spoilt[0], old[0, 0] = 1e4, -1e4
    assert pressure([(spoilt, ids.roll(1, 1))], real, old)[1] == values
    keep = torch.tensor([1, 2, 3])
    assert values["balance_loss"] == pytest.approx(balance(logits[keep], ids[keep]).item())
    assert values["router_kl"] == pytest.approx(kl(old.view(4, 8)[keep], logits[keep]).item(), rel=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_router_outputs_are_what_is_recorded_with_gradient(family):
    model, data = tiny(family), rollouts()
    with router_outputs(model) as seen, record(model, router_logits=True) as recorder:
        model(input_ids=data.tokens_BS, attention_mask=data.attention_BS.long())
    trace = recorder.trace
    assert len(seen) == trace.num_layers
    for layer, (logits, ids) in enumerate(seen):
        assert torch.equal(logits.view(8, 13, -1), trace.extras["router_logits"][:, :, layer])
        assert torch.equal(ids.reshape(8, 13, -1), trace.expert_ids_BSLK[:, :, layer].long())
        assert logits.requires_grad
    assert not any(site._forward_hooks for site in model.modules())
    with pytest.raises(RoutingError, match="no MoE layers"), router_outputs(tiny("dense")):
        pass


def train(pressure, checkpointing=False, micro_batch=0, arm="none", updates=2, lr=1e-2, start=None):
    model, data = copy.deepcopy(start) if start else tiny(), rollouts()
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    make_deterministic(model)
    rows = split_rows(8, updates, 0)
    batches = seen_by_old(model, data, advantages(), rows, grpo(arm), micro_batch=micro_batch, pressure=pressure)
    optimizer, schedule = Optim(lr=lr).build(model, updates)
    told = [take_update(model, optimizer, schedule, b, grpo(arm), pressure=pressure) for b in batches]
    return model, told


@pytest.mark.parametrize("arm", ["none", "old_policy", "shuffled"])
def test_router_kl_is_0_on_the_first_update_and_grows(arm):
    _, rows = train(BOTH, arm=arm)
    assert rows[0]["router_kl"] == pytest.approx(0.0, abs=1e-7)
    assert rows[1]["router_kl"] > 1e-4
    assert all(0.9 < row["balance_loss"] < 4.0 for row in rows)
    assert rows[0]["log_w_sd"] == 0.0


@pytest.mark.parametrize("arm", ["none", "old_policy"])
def test_activation_checkpointing_changes_nothing_of_it(arm):
    plain, rows = train(BOTH, arm=arm)
    checkpointed, same = train(BOTH, checkpointing=True, arm=arm)
    assert rows == same
    assert distance(weights(plain), weights(checkpointed)) == 0.0
    bare, _ = train(NO_PRESSURE, arm=arm)
    assert distance(weights(plain), weights(bare)) > 1e-3


@pytest.mark.parametrize("micro_batch", [2, 3])
def test_parts_of_a_mini_batch_add_up_for_router_kl(micro_batch):
    """At the same weights: Adam makes a step of any gradient, so rounding in the first update would grow."""
    model, pressure = tiny(), RouterPressure(router_kl=50.0)
    make_deterministic(model)
    given = (model, rollouts(), advantages(), split_rows(8, 2, 0), grpo())
    batches, cut = (seen_by_old(*given, micro_batch=size, pressure=pressure) for size in (0, micro_batch))
    optimizer, schedule = Optim(lr=1e-2).build(model, 2)
    take_update(model, optimizer, schedule, batches[0], grpo(), pressure=pressure)
    told = []
    for batch in (batches[1], cut[1]):
        twin = copy.deepcopy(model)
        optimizer, schedule = Optim(lr=1e-2).build(twin, 1)
        told.append(take_update(twin, optimizer, schedule, batch, grpo(), pressure=pressure))
    one, other = told
    assert len(cut[1]) > 1
    assert one["router_kl"] > 1e-3
    for column in ("router_kl", "grad_norm", "loss"):
        assert one[column] == pytest.approx(other[column], rel=1e-5, abs=1e-7)


def test_nothing_is_asked_and_nothing_changes_at_0():
    model, rows = train(NO_PRESSURE)
    other, told = train(RouterPressure(balance_loss=1e-30))
    assert not rows[0].keys() & {"balance_loss", "router_kl"}
    assert "balance_loss" in told[0]
    assert distance(weights(model), weights(other)) < 1e-5
    batch = seen_by_old(tiny(), rollouts(), advantages(), split_rows(8, 2, 0), grpo("old_policy"))[1]
    assert batch[0].old.router_logits is None
    assert not batch[0].old.routing.extras


def test_pressure_alone_balances_the_load_and_pulls_the_routers_back():
    """Without advantages only the pressure moves the weights."""
    model, data = tiny(), rollouts()
    optimizer, schedule = Optim(lr=1e-2).build(model, 30)
    pressure = RouterPressure(balance_loss=1.0)
    batch = seen_by_old(model, data, torch.zeros(8), [torch.arange(8)], grpo())[0]
    rows = [
        take_update(model, optimizer, schedule, batch, grpo(), max_grad_norm=1.0, pressure=pressure) for _ in range(30)
    ]
    assert rows[-1]["balance_loss"] < rows[0]["balance_loss"] - 0.05
    assert {row["loss"] for row in rows} == {0.0}, "the column is the policy loss alone"
    old = seen_by_old(model, data, torch.zeros(8), [torch.arange(8)], grpo(), pressure=RouterPressure(router_kl=1.0))[0]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".gate." in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    optimizer, schedule = Optim(lr=3e-3, trains="router").build(model, 30)
    pressure = RouterPressure(router_kl=1.0)
    rows = [
        take_update(model, optimizer, schedule, old, grpo(), max_grad_norm=1.0, pressure=pressure) for _ in range(30)
    ]
    assert rows[-1]["router_kl"] < rows[0]["router_kl"] / 3


def test_router_kl_without_old_logits_is_refused():
    model, data = tiny(), rollouts()
    batch = seen_by_old(model, data, advantages(), [torch.arange(8)], grpo())[0]
    optimizer, schedule = Optim().build(model, 1)
    with pytest.raises(RoutingError, match="needs the router logits of the old pass"):
        take_update(
            model, optimizer, schedule, batch, grpo(), max_grad_norm=1.0, pressure=RouterPressure(router_kl=1.0)
        )
    assert routing_of(model, data.tokens_BS, data.attention_BS).num_layers == 3
