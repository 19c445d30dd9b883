"""What a model says about given sequences: log probabilities of the response tokens, and its routing."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from moe_rl.recording import record
from moe_rl.records import Rollouts, RoutingTrace


def positions(attention_BS: Tensor) -> Tensor:
    """Position of each token within its own sequence, so that left padding shifts nothing; [B, S]."""
    return (attention_BS.long().cumsum(1) - 1).clamp(min=0)


def response_logprobs(model: PreTrainedModel, rollouts: Rollouts) -> tuple[Tensor, Tensor]:
    """(log probability, entropy) at each response token, nats, fp32, [B, T]; only the first has gradient.

    0 on padding. At temperature 1, over the whole vocabulary.
    """
    T = rollouts.response_BT.shape[1]
    logits_BTV = model(
        input_ids=rollouts.tokens_BS,
        attention_mask=rollouts.attention_BS.long(),
        position_ids=positions(rollouts.attention_BS),
        logits_to_keep=T + 1,
        use_cache=False,
    ).logits[:, :-1].float()  # fmt: skip
    log_normaliser_BT = logits_BTV.logsumexp(-1)
    chosen_BT = logits_BTV.gather(-1, rollouts.tokens_BS[:, -T:, None]).squeeze(-1)
    with torch.no_grad():
        probabilities_BTV = (logits_BTV - log_normaliser_BT[..., None]).exp()
        entropy_BT = log_normaliser_BT - (probabilities_BTV * logits_BTV).sum(-1)
    real_BT = rollouts.response_BT
    return torch.where(real_BT, chosen_BT - log_normaliser_BT, 0.0), torch.where(real_BT, entropy_BT, 0.0)


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
