"""The transformers config of each tiny family; imports transformers only when one is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from moe_rl.models.build import Tiny


def common_fields(tiny: Tiny, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Config fields that all families share."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": tiny.hidden_size,
        "num_hidden_layers": tiny.layers,
        "num_attention_heads": tiny.heads,
        "num_key_value_heads": tiny.heads,
        "max_position_embeddings": tiny.max_positions,
        "initializer_range": tiny.initializer_range,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }


def _qwen3_moe(tiny: Tiny, common: dict[str, Any]) -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        **common,
        head_dim=tiny.hidden_size // tiny.heads,
        num_experts=tiny.experts,
        num_experts_per_tok=tiny.top_k,
        moe_intermediate_size=tiny.expert_size,
        norm_topk_prob=True,  # as in the released Qwen3 models
        router_aux_loss_coef=0.0,
    )


def _mixtral(tiny: Tiny, common: dict[str, Any]) -> Any:
    from transformers import MixtralConfig

    return MixtralConfig(
        **common,
        num_local_experts=tiny.experts,
        num_experts_per_tok=tiny.top_k,
        intermediate_size=tiny.expert_size,
        router_aux_loss_coef=0.0,
    )


def _olmoe(tiny: Tiny, common: dict[str, Any]) -> Any:
    from transformers import OlmoeConfig

    return OlmoeConfig(
        **common,
        num_experts=tiny.experts,
        num_experts_per_tok=tiny.top_k,
        intermediate_size=tiny.expert_size,
        norm_topk_prob=False,  # as in the released OLMoE models
        router_aux_loss_coef=0.0,
    )


def _deepseek_v3(tiny: Tiny, common: dict[str, Any]) -> Any:
    from transformers import DeepseekV3Config

    head_dim = tiny.hidden_size // tiny.heads
    return DeepseekV3Config(
        **common,
        n_routed_experts=tiny.experts,
        num_experts_per_tok=tiny.top_k,
        moe_intermediate_size=tiny.expert_size,
        n_shared_experts=1,
        n_group=tiny.expert_groups,
        topk_group=max(1, tiny.expert_groups // 2),
        first_k_dense_replace=0,
        num_mtp_layers=0,
        q_lora_rank=max(1, tiny.hidden_size // 2),
        kv_lora_rank=max(1, tiny.hidden_size // 2),
        qk_rope_head_dim=head_dim // 2,
        qk_nope_head_dim=head_dim // 2,
        v_head_dim=head_dim,
    )


def _gpt_oss(tiny: Tiny, common: dict[str, Any]) -> Any:
    from transformers import GptOssConfig

    return GptOssConfig(
        **common,
        head_dim=tiny.hidden_size // tiny.heads,
        num_local_experts=tiny.experts,
        num_experts_per_tok=tiny.top_k,
        intermediate_size=tiny.expert_size,
        sliding_window=min(128, tiny.max_positions),
        router_aux_loss_coef=0.0,
    )


def _dense(tiny: Tiny, common: dict[str, Any]) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        **common,
        head_dim=tiny.hidden_size // tiny.heads,
        intermediate_size=tiny.top_k * tiny.expert_size,
    )


FAMILIES: dict[str, Callable[[Tiny, dict[str, Any]], Any]] = {
    "deepseek_v3": _deepseek_v3,
    "dense": _dense,
    "gpt_oss": _gpt_oss,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "qwen3_moe": _qwen3_moe,
}
