"""Expert kernels beside those of transformers: `megablocks`, grouped GEMM with fused permutation, on CUDA.

    use_megablocks(model)                              # in training: model.experts_implementation=megablocks
    model.set_experts_implementation("megablocks")

It computes what `grouped_mm` (torch, the default) computes, on the model's own parameters in place; nothing here says
that it is faster. Routers run as ever, so recording and replay work over it. Not run on a GPU by its authors: see
tests/test_experts.py for what was.

Installing it: megablocks 0.10 pins torch 2.7 and an old numpy in its metadata, and its CUDA extension does not compile
with CUDA 13, so pip cannot resolve it beside moe_rl. With a CUDA 12 torch, nvcc and a GPU in place:

    pip install triton
    pip install --no-deps --no-build-isolation megablocks==0.10.0 stanford-stk==0.7.1 grouped_gemm==0.3.0
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import torch
from torch import Tensor, nn

NAME = "megablocks"
PIECES = ("triton", "stk", "grouped_gemm", "megablocks_ops", "megablocks")
# What grouped_gemm and the Triton kernels run on. Tests with doubles in their place widen these.
DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16,)
DEVICES: tuple[str, ...] = ("cuda",)


def require_megablocks() -> None:
    """ImportError that names the piece that is missing and how to install it; imports nothing."""
    missing = [name for name in PIECES if name not in sys.modules and importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"experts_implementation megablocks needs {', '.join(missing)}; the head of moe_rl/models/experts.py says "
            "how to install the extra [megablocks] (CUDA only), or use grouped_mm"
        )


def use_megablocks(model: nn.Module) -> None:
    """Register `megablocks` with transformers, after checking that it is installed and fits every expert of `model`.

    ImportError for a missing piece; ValueError, with module and reason, for experts that it would compute wrongly.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    require_megablocks()
    experts = {name: module for name, module in model.named_modules() if hasattr(module, "_is_expert_parallel")}
    if not experts:
        raise ValueError(f"{type(model).__name__} computes its experts in its own way, or has none; use eager")
    for name, module in experts.items():
        _refuse(name, module)
    ALL_EXPERTS_FUNCTIONS.register(NAME, megablocks_experts_forward)


def _refuse(name: str, experts: Any) -> None:
    """ValueError for a layout or precision that the kernels do not know."""
    reasons = {
        "has biases": experts.has_bias,
        "stores its weights transposed": experts.is_transposed,
        "has no gate": not experts.has_gate,
        "normalises the output of each expert": experts.has_post_expert_norm,
        "is split over devices (expert parallelism)": experts._is_expert_parallel,
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise ValueError(f"megablocks cannot compute {name} ({type(experts).__name__}): it {' and '.join(found)}")
    dtype = experts.down_proj.dtype
    if dtype not in DTYPES:
        raise ValueError(
            f"megablocks cannot compute {name}: its weights are {dtype}, grouped_gemm knows bfloat16 only; "
            "set model.dtype=bfloat16 or use grouped_mm"
        )


def megablocks_experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Sum of each token's experts, weighted by its gates: [N, H] from hidden [N, H], ids and gates [N, K].

    Differentiable in hidden states, weights and gates. One transfer of the experts' loads to the host a layer:
    grouped_gemm wants its sizes there. ValueError for what `use_megablocks` refuses.
    Source: the sequence of operations of megablocks' ParallelDroplessMLP (grouped), on transformers' packed weights.
    """
    _refuse("experts", self)
    if hidden_states.dtype not in DTYPES or hidden_states.device.type not in DEVICES:
        raise ValueError(
            f"megablocks cannot compute {hidden_states.dtype} on {hidden_states.device.type}, "
            "only bfloat16 on cuda; move the model or use grouped_mm"
        )
    from megablocks import grouped_gemm_util, ops

    top_k, num_experts = top_k_index.shape[-1], self.num_experts
    gates_M = top_k_weights.reshape(-1).to(hidden_states.dtype)  # M = N K choices, token by token
    with torch.no_grad():
        highest_bit = max((num_experts - 1).bit_length(), 1)
        bin_ids_M, order_M = ops.sort(top_k_index.reshape(-1).int(), highest_bit)
        load_E = ops.histogram(bin_ids_M, num_experts)
        bins_E = ops.inclusive_cumsum(load_E, 0)
    rows_MH = ops.gather(hidden_states.contiguous(), order_M, bin_ids_M, bins_E, top_k)
    sizes_E = load_E.cpu().long()
    up_MI = self._apply_gate(grouped_gemm_util.ops.gmm(rows_MH, self.gate_up_proj, sizes_E, trans_b=True))
    down_MH = grouped_gemm_util.ops.gmm(up_MI, self.down_proj, sizes_E, trans_b=True)
    return ops.scatter(down_MH, order_M, bin_ids_M, gates_M, bins_E, top_k)
