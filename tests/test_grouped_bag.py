"""The expert kernel for the CPU, against transformers' own."""

import pytest
import torch
from models import FAMILIES, tiny, tokens
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from moe_rl.models import grouped_bag


def outputs_and_gradients(model):
    ids, mask = tokens()
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    (logits * mask[..., None]).pow(2).mean().backward()
    return logits.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def no_grouped_mm(*args):
    raise AssertionError("grouped_mm ran instead")


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gpt_oss"])
def test_outputs_and_gradients_are_those_of_the_eager_experts(family, monkeypatch):
    monkeypatch.setattr(grouped_bag, "grouped_mm_experts_forward", no_grouped_mm)
    logits, gradients = outputs_and_gradients(tiny(family, experts_implementation="grouped_bag"))
    expected, expected_gradients = outputs_and_gradients(tiny(family, experts_implementation="eager"))
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-6, rtol=1e-4)


def one_layer(num_experts=6, top_k=3):
    config = tiny(experts=num_experts, top_k=top_k).config
    experts = Qwen3MoeExperts(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    config._experts_implementation = "grouped_bag"
    return experts, generator


def by_hand(experts, hidden_NH, ids_NK, gates_NK):
    """The definition, token by token: sum over k of g_k down(act(gate x) * up x)."""
    rows = []
    for hidden_H, ids_K, gates_K in zip(hidden_NH, ids_NK.tolist(), gates_NK, strict=True):
        total = 0
        for expert, weight in zip(ids_K, gates_K, strict=True):
            gate, up = (experts.gate_up_proj[expert] @ hidden_H).chunk(2)
            total = total + weight * (experts.down_proj[expert] @ (experts.act_fn(gate) * up))
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("ids", [[[0, 1, 2]], [[5, 0, 3], [0, 5, 3], [3, 5, 0], [1, 5, 2]]])
def test_every_gradient_against_the_definition(ids, monkeypatch):
    """Experts that nobody chose, orders that differ from the experts', a single token."""
    monkeypatch.setattr(grouped_bag, "grouped_mm_experts_forward", no_grouped_mm)
    experts, generator = one_layer()
    ids_NK = torch.tensor(ids)
    hidden_NH = torch.randn(len(ids), 32, generator=generator, requires_grad=True)
    gates_NK = torch.rand(ids_NK.shape, generator=generator, requires_grad=True)
    inputs = [hidden_NH, gates_NK, *experts.parameters()]
    direction_NH = torch.randn(hidden_NH.shape, generator=generator)
    output_NH, expected_NH = experts(hidden_NH, ids_NK, gates_NK), by_hand(experts, hidden_NH, ids_NK, gates_NK)
    torch.testing.assert_close(output_NH, expected_NH, atol=1e-5, rtol=1e-5)
    found, expected = (torch.autograd.grad((x * direction_NH).sum(), inputs) for x in (output_NH, expected_NH))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("family", "settings"), [("gpt_oss", {}), ("qwen3_moe", {"dtype": "bfloat16"})])
def test_what_it_does_not_know_is_grouped_mm_bit_for_bit(family, settings):
    ids, mask = tokens()
    given = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    own, other = (tiny(family, experts_implementation=x, **settings)(**given) for x in ("grouped_bag", "grouped_mm"))
    assert torch.equal(own.logits, other.logits)


def test_autocast_is_left_to_grouped_mm():
    model, (ids, mask) = tiny(), tokens()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        own = model(input_ids=ids, attention_mask=mask).logits
        model.set_experts_implementation("grouped_mm")
        assert torch.equal(own, model(input_ids=ids, attention_mask=mask).logits)
