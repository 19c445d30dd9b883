"""A language model's backbone with a scalar head: what judges instead of writing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from moe_rl.policy import positions

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ScalarModel(nn.Module):
    """One number at each token, 0 everywhere before training. It takes the model's backbone over."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.backbone = model.base_model
        self.head = nn.Linear(model.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def scores(self, tokens_BS: Tensor, attention_BS: Tensor) -> Tensor:
        """[B, S], fp32, with gradient; what stands on padding means nothing."""
        hidden_BSH = self.backbone(
            input_ids=tokens_BS,
            attention_mask=attention_BS.long(),
            position_ids=positions(attention_BS),
            use_cache=False,
        ).last_hidden_state
        scores_BS: Tensor = self.head(hidden_BSH.to(self.head.weight.dtype)).float().squeeze(-1)
        return scores_BS
