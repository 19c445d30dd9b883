"""Log probabilities of large vocabularies: the same numbers in pieces, without a large tensor in fp32."""

import pytest
import torch
from models import tiny
from test_update import rollouts
from torch.utils._python_dispatch import TorchDispatchMode

from moe_rl import policy
from moe_rl.policy import response_logprobs


def scores_and_gradient(model, data):
    model.zero_grad()
    logprobs, entropy = response_logprobs(model, data)
    (logprobs * torch.linspace(-1, 1, logprobs.numel()).view_as(logprobs)).sum().backward()
    return logprobs.detach(), entropy, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("columns", [1, 2, 4, 100])
def test_pieces_say_what_the_whole_says(columns, monkeypatch):
    model, data = tiny(), rollouts()
    whole = scores_and_gradient(model, data)
    monkeypatch.setattr(policy, "LARGE_VOCABULARY", 1)
    monkeypatch.setattr(policy, "PIECE", columns * len(data) * model.config.vocab_size)
    logprobs, entropy, gradient = scores_and_gradient(model, data)
    assert not entropy.requires_grad
    torch.testing.assert_close(logprobs, whole[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(entropy, whole[1], rtol=0, atol=1e-6)
    torch.testing.assert_close(gradient, whole[2], rtol=1e-4, atol=1e-6)
    assert whole[2].abs().max() > 0.1


class Largest(TorchDispatchMode):
    """Elements of the largest fp32 tensor that any operation gave."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = function(*args, **(kwargs or {}))
        for tensor in given if isinstance(given, (tuple, list)) else [given]:
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                self.elements = max(self.elements, tensor.numel())
        return given


@pytest.mark.parametrize("large", [True, False])
def test_no_fp32_tensor_of_all_tokens_by_a_large_vocabulary_is_made(large, monkeypatch):
    model, data = tiny(dtype="bfloat16"), rollouts(batch=4, T=6)
    model.resize_token_embeddings(policy.LARGE_VOCABULARY if large else policy.LARGE_VOCABULARY - 1)
    V = model.get_output_embeddings().weight.shape[0]
    monkeypatch.setattr(policy, "PIECE", 2 * len(data) * V)  # two columns of the six
    with Largest() as largest:
        scores_and_gradient(model, data)
    assert largest.elements == (2 if large else 6) * len(data) * V
