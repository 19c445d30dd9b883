"""An expert kernel for the CPU: transformers' `grouped_mm`, with fewer passes over memory around the products.

    model.set_experts_implementation("grouped_bag")        # model.experts_implementation, default of the tiny models

The products are torch's grouped ones. Around them a token's rows are gathered, and the outputs of its experts weighted
and summed, by one operator each (index_select, embedding_bag), which differentiate into one another. Results differ
from `grouped_mm` in the last bits. Anywhere but on fp32 tensors of the CPU it is `grouped_mm`, which is a checkpoint's
default: on a GPU `generate` takes `batched_mm` for it while decoding, but not for this.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding_bag
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

NAME = "grouped_bag"
# Before 2.11 torch's product on the CPU wants aligned rows, which weights that lie in a mapped file need not have.
TORCH_KNOWS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 11)


def grouped_bag_experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Sum of each token's experts, weighted by its gates: [N, H] from hidden [N, H], ids and gates [N, K]."""
    if not _fits(self, hidden_states):
        return grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
    N, K = top_k_index.shape
    sorted_ids_M, choice_M = top_k_index.reshape(-1).sort()  # M = N K choices, in the order of their experts
    ends_E = torch.bincount(sorted_ids_M, minlength=self.num_experts).cumsum(0).int()
    token_M, place_M = choice_M // K, torch.empty_like(choice_M)
    place_M[choice_M] = torch.arange(N * K)
    place_NK = place_M.view(N, K)
    rows_MH = _Gather.apply(hidden_states, token_M, place_NK)
    inner_MI = self._apply_gate(_products(rows_MH, self.gate_up_proj, ends_E))
    outer_MH = _products(inner_MI, self.down_proj, ends_E)
    return _WeightedSum.apply(outer_MH, top_k_weights.to(outer_MH.dtype), token_M, choice_M, place_NK)


def _fits(experts: Any, hidden_states: Tensor) -> bool:
    plain = experts.has_gate and not (
        experts.has_bias or experts.is_transposed or experts.has_post_expert_norm or experts._is_expert_parallel
    )
    fp32 = hidden_states.dtype == experts.down_proj.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    return TORCH_KNOWS and plain and fp32 and hidden_states.device.type == "cpu" and len(hidden_states) > 0


def _products(rows_MX: Tensor, weights_EYX: Tensor, ends_E: Tensor) -> Tensor:
    """[M, Y]: each row times the weights of its expert, whose rows end at ends_E."""
    return torch.nn.functional.grouped_mm(rows_MX, weights_EYX.transpose(-2, -1), offs=ends_E)


class _Gather(torch.autograd.Function):
    """Rows [M, H] of tokens [N, H]; place_NK: where the K rows of a token are."""

    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, token_M: Tensor, place_NK: Tensor) -> Tensor:
        ctx.save_for_backward(place_NK)
        return hidden_NH.index_select(0, token_M)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MH: Tensor) -> tuple[Tensor, None, None]:
        (place_NK,) = ctx.saved_tensors
        return embedding_bag(place_NK, grad_MH, mode="sum"), None, None


class _WeightedSum(torch.autograd.Function):
    """Tokens [N, H]: the sum of their rows [M, H], weighted by gates [N, K]."""

    @staticmethod
    def forward(
        ctx: Any, rows_MH: Tensor, gates_NK: Tensor, token_M: Tensor, choice_M: Tensor, place_NK: Tensor
    ) -> Tensor:
        ctx.save_for_backward(rows_MH, gates_NK, token_M, choice_M)
        return embedding_bag(place_NK, rows_MH, per_sample_weights=gates_NK, mode="sum")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NH: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        rows_MH, gates_NK, token_M, choice_M = ctx.saved_tensors
        grad_MH = grad_NH.index_select(0, token_M)
        gates_M, grad_gates = gates_NK.reshape(-1).index_select(0, choice_M), grad_NH.new_empty(len(choice_M))
        grad_gates[choice_M] = torch.linalg.vecdot(grad_MH, rows_MH)
        return grad_MH.mul_(gates_M[:, None]), grad_gates.view_as(gates_NK), None, None, None


ALL_EXPERTS_FUNCTIONS.register(NAME, grouped_bag_experts_forward)
