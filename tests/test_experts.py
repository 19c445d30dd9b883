"""The megablocks experts. No GPU: what ran is our code over doubles, and megablocks' own Triton code interpreted."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import random_trace_like, tiny, tokens

from moe_rl import record, replay
from moe_rl.models import experts
from moe_rl.models.build import Checkpoint, Tiny, _set_experts_implementation
from tests import megablocks_doubles


@pytest.fixture
def doubles(monkeypatch):
    """megablocks replaced by torch code, which computes any precision on the CPU."""
    megablocks_doubles.install_operations(lambda name, module: monkeypatch.setitem(sys.modules, name, module))
    monkeypatch.setattr(experts, "DTYPES", (torch.bfloat16, torch.float32))
    monkeypatch.setattr(experts, "DEVICES", ("cuda", "cpu"))


def outputs_and_gradients(model):
    ids, mask = tokens()
    model.zero_grad()
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    (logits * mask[..., None]).pow(2).mean().backward()
    return logits.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_parity(family):
    eager = tiny(family, experts_implementation="eager")
    logits, gradients = outputs_and_gradients(eager)
    before = {name: parameter.data_ptr() for name, parameter in eager.named_parameters()}
    _set_experts_implementation(eager, "megablocks")
    assert before == {name: parameter.data_ptr() for name, parameter in eager.named_parameters()}  # weights in place
    other_logits, other_gradients = outputs_and_gradients(eager)
    torch.testing.assert_close(other_logits, logits, atol=1e-5, rtol=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(other_gradients[name], gradient, atol=1e-5, rtol=1e-4, msg=lambda m, n=name: n + m)
        assert gradient.abs().max() > 0 or "bias" in name or "experts" in name, name


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe", "deepseek_v3"])
def test_with_doubles_the_outputs_and_all_gradients_are_those_of_eager(doubles, family):
    assert_parity(family)


def test_with_doubles_the_configuration_reaches_the_kernels(doubles, monkeypatch):
    calls = []
    scatter = megablocks_doubles.scatter
    monkeypatch.setattr(sys.modules["megablocks.ops"], "scatter", lambda *args: calls.append(1) or scatter(*args))
    model = tiny(experts_implementation="megablocks")
    assert model.get_experts_implementation()[""] == "megablocks"
    model(input_ids=tokens()[0])
    assert len(calls) == 3  # once a layer


def test_with_doubles_replay_forces_the_experts_and_self_replay_changes_no_bit(doubles):
    model = tiny(experts_implementation="megablocks")
    ids, mask = tokens()
    with record(model) as recorder:
        logits = model(input_ids=ids, attention_mask=mask).logits
    with replay(model, recorder.trace):
        assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, logits)
    other = random_trace_like(recorder.trace)
    with replay(model, other):
        forced = model(input_ids=ids, attention_mask=mask).logits
    _set_experts_implementation(model, "eager")
    with replay(model, other):
        eager = model(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(forced[mask.bool()], eager[mask.bool()], atol=1e-5, rtol=1e-5)


# ----------------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("attribute", "value", "reason"),
    [
        ("has_bias", True, "has biases"),
        ("is_transposed", True, "stores its weights transposed"),
        ("has_gate", False, "has no gate"),
        ("has_post_expert_norm", True, "normalises the output of each expert"),
        ("_is_expert_parallel", True, "expert parallelism"),
    ],
)
def test_unknown_layouts_are_refused_by_name_before_running(doubles, attribute, value, reason):
    model = tiny()
    setattr(model.model.layers[1].mlp.experts, attribute, value)
    with pytest.raises(ValueError, match=rf"model\.layers\.1\.mlp\.experts \(Qwen3MoeExperts\).*{reason}"):
        _set_experts_implementation(model, "megablocks")
    assert model.get_experts_implementation()[""] == "grouped_bag"


def test_gpt_oss_is_refused_for_its_biases_and_transposed_weights(doubles):
    with pytest.raises(ValueError, match="has biases and stores its weights transposed"):
        tiny("gpt_oss", experts_implementation="megablocks")


def test_a_layout_that_changes_after_the_choice_is_refused_when_it_runs(doubles):
    model = tiny(experts_implementation="megablocks")
    model.model.layers[0].mlp.experts._is_expert_parallel = True
    with pytest.raises(ValueError, match="expert parallelism"):
        model(input_ids=tokens()[0])


def test_models_without_dispatched_experts_are_refused(doubles):
    dense = Tiny(family="dense", layers=2, hidden_size=32, heads=4, expert_size=16).build(0)[0]
    with pytest.raises(ValueError, match="in its own way, or has none"):
        _set_experts_implementation(dense, "megablocks")


def test_other_precisions_and_devices_are_refused(doubles, monkeypatch):
    model = tiny(experts_implementation="megablocks")
    monkeypatch.setattr(experts, "DEVICES", ("cuda",))
    with pytest.raises(ValueError, match=r"torch\.float32 on cpu"):
        model(input_ids=tokens()[0])
    monkeypatch.setattr(experts, "DTYPES", (torch.bfloat16,))
    with pytest.raises(ValueError, match=r"mlp\.experts: its weights are torch\.float32, grouped_gemm knows bfloat16"):
        _set_experts_implementation(tiny(), "megablocks")
    with pytest.raises(ValueError, match="megablocks computes bfloat16 only, dtype is float32"):
        Tiny(experts_implementation="megablocks")


def test_a_missing_piece_is_named_with_the_extra(doubles, monkeypatch):
    monkeypatch.delitem(sys.modules, "grouped_gemm")
    if importlib.util.find_spec("grouped_gemm") is not None:
        pytest.skip("grouped_gemm is installed")
    with pytest.raises(ImportError, match=r"needs grouped_gemm; .*\[megablocks\]"):
        experts.require_megablocks()
    with pytest.raises(ValueError, match="needs grouped_gemm"):
        Checkpoint(path="somewhere", experts_implementation="megablocks")


# ------------------------------------------------------------------------------------------ megablocks' own Triton code
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("triton", "stk", "megablocks")),
    reason="triton, stanford-stk and megablocks are not installed (extra [megablocks])",
)
def test_megablocks_triton_code_interpreted_with_its_cuda_extensions_replaced_by_doubles():
    """Its Python and Triton code runs on the CPU; sorting, histogram, sums and grouped GEMM are doubles."""
    root = Path(__file__).parent.parent
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.interpret_megablocks"], cwd=root, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "interpreted kernels ran" in done.stdout


@pytest.mark.skipif(
    not torch.cuda.is_available() or any(importlib.util.find_spec(name) is None for name in experts.PIECES),
    reason="needs a GPU and the extra [megablocks]",
)
def test_on_a_gpu_bfloat16_outputs_are_close_to_eager():
    model = tiny(dtype="bfloat16", experts_implementation="eager").cuda()
    ids, mask = (tensor.cuda() for tensor in tokens())
    with record(model) as recorder:
        eager = model(input_ids=ids, attention_mask=mask).logits
    _set_experts_implementation(model, "megablocks")
    with replay(model, recorder.trace):  # in bfloat16 another rounding would choose other experts
        logits = model(input_ids=ids, attention_mask=mask).logits
        logits.float().pow(2).mean().backward()
    torch.testing.assert_close(logits, eager, atol=0.1, rtol=0.1)
    assert all(layer.mlp.gate.weight.grad.abs().max() > 0 for layer in model.model.layers)
