"""What a model says about given sequences: log probabilities of the response tokens, and its routing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moe_rl.recording import record
from moe_rl.records import Rollouts
from moe_rl.routing_trace import RoutingTrace

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LARGE_VOCABULARY = 32_768  # from here on the log probabilities are computed in pieces
PIECE = 2**25  # logits a piece: 128 MiB in fp32


def positions(attention_BS: Tensor) -> Tensor:
    """Position of each token within its own sequence, so that left padding shifts nothing; [B, S]."""
    return (attention_BS.long().cumsum(1) - 1).clamp(min=0)


def response_logprobs(model: PreTrainedModel, rollouts: Rollouts) -> tuple[Tensor, Tensor]:
    """(log probability, entropy) at each response token, nats, fp32, [B, T]; only the first has gradient.

    0 on padding. At temperature 1, over the whole vocabulary. From LARGE_VOCABULARY on, no fp32 tensor of all tokens by
    the vocabulary is made: the model's logits, in its own dtype, are the largest.
    """
    T = rollouts.response_BT.shape[1]
    logits_BUV = model(
        input_ids=rollouts.tokens_BS,
        attention_mask=rollouts.attention_BS.long(),
        position_ids=positions(rollouts.attention_BS),
        logits_to_keep=T + 1,
        use_cache=False,
    ).logits  # the last of the U = T + 1 columns predicts what comes after the response
    tokens_BT, real_BT = rollouts.tokens_BS[:, -T:], rollouts.response_BT
    if logits_BUV.shape[-1] < LARGE_VOCABULARY:
        logits_BTV = logits_BUV[:, :-1].float()
        chosen_BT, entropy_BT = chosen_and_entropy(logits_BTV, tokens_BT)
    else:
        chosen_BT, entropy_BT = InPieces.apply(logits_BUV, tokens_BT)
    return torch.where(real_BT, chosen_BT, 0.0), torch.where(real_BT, entropy_BT, 0.0)


def chosen_and_entropy(logits_BTV: Tensor, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
    """(log probability of the tokens, entropy) [B, T], nats; only the first has gradient. logits_BTV: fp32."""
    log_normaliser_BT = logits_BTV.logsumexp(-1)
    chosen_BT = logits_BTV.gather(-1, tokens_BT[..., None]).squeeze(-1)
    with torch.no_grad():
        probabilities_BTV = (logits_BTV - log_normaliser_BT[..., None]).exp()
        entropy_BT = log_normaliser_BT - (probabilities_BTV * logits_BTV).sum(-1)
    return chosen_BT - log_normaliser_BT, entropy_BT


class InPieces(torch.autograd.Function):
    """`chosen_and_entropy` of all columns but the last, some columns at a time.

    d log p(y) / d logits_v = [v = y] - p_v, computed again in backward from the logits, which are kept in their dtype.
    """

    @staticmethod
    def forward(ctx: Any, logits_BUV: Tensor, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(logits_BUV, tokens_BT)
        parts = [
            chosen_and_entropy(logits_BUV[:, columns].float(), tokens_BT[:, columns]) for columns in _pieces(logits_BUV)
        ]
        chosen, entropies = zip(*parts, strict=True)
        entropy_BT = torch.cat(entropies, 1)
        ctx.mark_non_differentiable(entropy_BT)
        return torch.cat(chosen, 1), entropy_BT

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        logits_BUV, tokens_BT = ctx.saved_tensors
        gradient_BUV = torch.zeros_like(logits_BUV)
        for columns in _pieces(logits_BUV):
            gradient_BT1 = gradients[0][:, columns, None]
            piece_BTV = logits_BUV[:, columns].float().softmax(-1).mul_(-gradient_BT1)
            piece_BTV.scatter_add_(-1, tokens_BT[:, columns, None], gradient_BT1)
            gradient_BUV[:, columns] = piece_BTV
        return gradient_BUV, None


def _pieces(logits_BUV: Tensor) -> list[slice]:
    """Columns of at most PIECE logits together, one column at least; the last column left out."""
    B, U, V = logits_BUV.shape
    width = max(1, PIECE // (B * V))
    return [slice(start, min(start + width, U - 1)) for start in range(0, U - 1, width)]


@torch.no_grad()
def routing_of(
    model: PreTrainedModel, tokens_BS: Tensor, attention_BS: Tensor, source: str = "", update: int = 0, **asked: bool
) -> RoutingTrace:
    """The experts that `model` chooses, of itself, on given tokens; valid on real tokens.

    asked: what else to record, such as margins=True; see `record`.
    The caller sees to it that no replay is in force and that the model is in eval mode (no router jitter).
    """
    with record(model, source=source, update=update, **asked) as recorder:
        model(
            input_ids=tokens_BS,
            attention_mask=attention_BS.long(),
            position_ids=positions(attention_BS),
            logits_to_keep=1,
            use_cache=False,
        )
    return recorder.trace


def make_deterministic(model: nn.Module) -> None:
    """Put the model in eval mode, so that dropout and router jitter cannot make old and new policy differ.

    Under activation checkpointing the layers themselves must be in training mode for it to happen; their parts stay in
    eval mode. Gradients flow in either mode.
    """
    model.eval()
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True
