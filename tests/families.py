"""A tiny random model of every MoE family of transformers, as a table: class, settings, and what cannot be checked."""

import dataclasses
import importlib
import re
from pathlib import Path

import torch

# Fields that mean the same wherever a config class declares them; a family's own settings come on top.
COMMON = {
    **{"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64},
    **{"num_hidden_layers": 3, "hidden_size": 32, "head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 4},
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "topk_group"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("shared_intermediate_size", "moe_shared_expert_intermediate_size", "share_expert_dim"), 16),
    **{"n_group": 4, "norm_topk_prob": True, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
    **{"index_head_dim": 8, "index_n_heads": 2, "index_topk": 4, "sliding_window": 4, "initializer_range": 0.2},
    **{"linear_head_dim": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{
        "linear_num_heads": 4,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 2,
    },
    **{"mamba_d_state": 8, "mamba_n_heads": 4, "mamba_chunk_size": 8, "unpadded_vocab_size": 64},
    **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_head_dim": 8, "d_rel": 4, "rel_extent": 16},
    **{"sliding_window_size": 4, "dense_intermediate_size": 16, "moe_hidden_size": 32},
    **{"shared_experts_intermediate_size": 16},
}
LINEAR = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
SLIDING = {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "global_head_dim": 8}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
GROUPS = {"topk_method": "group_limited_greedy"}
TEXT_MODEL = "the text model alone does not generate; a decode with a cache stands in"


@dataclasses.dataclass(frozen=True)
class Family:
    """One row: a family, the class that is built ("": its ForCausalLM), its settings, what is left out and why.

    skip_expert: an id that a router may choose and that its experts receive as 0, with gate 0.
    refused: what the refusal says; nothing else is checked then. note: what a reader should know.
    quick: part of the normal test run.
    """

    name: str
    kind: str = ""
    settings: dict = dataclasses.field(default_factory=dict)
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)
    note: str = ""
    variant: str = ""
    skip_expert: int | None = None
    refused: str = ""
    quick: bool = False

    @property
    def label(self) -> str:
        return f"{self.name} ({self.variant})" if self.variant else self.name

    @property
    def model_class(self):
        module = importlib.import_module(f"transformers.models.{self.name}.modeling_{self.name}")
        if self.kind:
            return getattr(module, self.kind)
        (found,) = (
            cls
            for name, cls in vars(module).items()
            if name.endswith("ForCausalLM") and cls.__module__ == module.__name__
        )
        return found

    def build(self, dtype=torch.float32):
        """The model in eval mode, with weights spread enough for tokens to choose different experts."""
        model_class = self.model_class
        config_class = model_class.config_class
        declared = {field.name for field in dataclasses.fields(config_class)}
        config = config_class(**{k: v for k, v in COMMON.items() if k in declared} | self.settings)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = model_class._from_config(config, dtype=dtype).eval()
            for weight in model.parameters():
                if weight.dim() > 1:  # some families start routers at zero, or experts with memory as it is
                    torch.nn.init.normal_(weight, std=COMMON["initializer_range"])
        if self.variant == "talker":
            model.embed_tokens = model.codec_embedding  # what its forward should read, given ids
        return model


def text_model(name: str, kind: str, settings: dict | None = None, **more) -> Family:
    return Family(name, kind, settings or {}, note=TEXT_MODEL, **more)


FAMILIES = [
    Family("afmoe", quick=True),
    Family("aria"),
    Family("axk1"),
    Family("axk2"),
    Family("bailing_hybrid", settings=LINEAR),
    Family("beam"),
    Family("cohere2_moe"),
    Family(
        "dbrx",
        settings={
            **{"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
            "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 16, "moe_num_experts": 8, "moe_top_k": 2},
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        },
        note="chosen by the block around the router",
        quick=True,
    ),
    text_model("deepseek_ocr2", "DeepseekOcr2TextModel", GROUPS),
    Family("deepseek_v2", variant="greedy"),
    Family("deepseek_v2", settings=GROUPS, variant="group limit", quick=True),
    Family("deepseek_v3", quick=True),
    Family("deepseek_v32"),
    Family(
        "deepseek_v4",
        settings={
            "mlp_layer_types": ["hash_moe", "moe", "moe"],
            "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
            "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
            **{"o_groups": 2, "o_lora_rank": 8, "num_key_value_heads": 1},
        },
        note="hash layers route by token id, which is constant: no sites",
        quick=True,
    ),
    text_model("diffusion_gemma", "DiffusionGemmaEncoderTextModel", SLIDING),
    Family("doge", settings={"is_moe": True, "num_experts": 16}, refused="product keys", quick=True),
    Family("dots1"),
    Family(
        "dots3_note",
        settings={"swa_" + name: value for name, value in COMMON.items() if "head" in name or "rank" in name},
    ),
    Family("ernie4_5_moe"),
    text_model(
        "ernie4_5_vl_moe",
        "Ernie4_5_VLMoeTextModel",
        {"moe_intermediate_size": [16, 16], "rope_parameters": ROPE | {"mrope_section": [1, 1, 2]}},
        quick=True,
    ),
    Family("exaone_moe"),
    Family("flex_olmo"),
    Family("flint"),
    Family(
        "gemma4",
        settings=SLIDING
        | {"enable_moe_block": True, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 64},
        quick=True,
    ),
    Family("glm4_moe"),
    Family("glm4_moe_lite"),
    text_model(
        "glm4v_moe",
        "Glm4vMoeTextModel",
        {"rope_parameters": ROPE | {"mrope_section": [1, 1, 2], "partial_rotary_factor": 1.0}},
    ),
    text_model(
        "glm5_next", "Glm5NextTextModel", LINEAR | {"index_kpool": 2, "qk_rope_head_dim": 0, "qk_nope_head_dim": 8}
    ),
    Family("glm_moe_dsa"),
    Family("gpt_oss", quick=True),
    Family("granitemoe"),
    Family("granitemoe_swa"),
    Family("granitemoehybrid", settings=LINEAR),
    Family("granitemoeshared"),
    Family("hunyuan_v1_moe"),
    Family("hy_v3"),
    Family("hy_v4"),
    text_model("hy_v4_vl", "HYV4VLTextModel", {"rope_parameters": ROPE | {"mrope_section": [1, 1, 0]}}),
    Family("inkling", quick=True),
    Family("inkling2"),
    Family(
        "inkling2_loop",
        settings={
            **{"num_hidden_layers": 3, "loop_layer_index_start": 1, "loop_layer_index_end": 3, "loop_num_passes": 2},
            **{"n_layers_per_attn_res_block": 1, "loop_gate_rank": 8},
        },
        note="layers 1 and 2 run twice: a layer entry for each run",
        quick=True,
    ),
    Family(
        "jamba",
        settings={"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 1, "expert_layer_offset": 0},
    ),
    Family("jetmoe", settings={"kv_channels": 8}, note="two routers a layer: attention and feed-forward", quick=True),
    Family("kimi_linear", settings=LINEAR),
    Family("kolibri1"),
    Family("laguna"),
    Family("lara_mini"),
    Family("lfm2_moe", settings={"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1}),
    Family("llama4", quick=True),
    Family(
        "longcat_flash",
        settings={
            "num_layers": 2,
            "expert_ffn_hidden_size": 16,
            "ffn_hidden_size": 16,
            "zero_expert_num": 2,
            "head_dim": 4,
        },
        note="ids 8 and 9 are identity experts",
        quick=True,
    ),
    Family("mellum"),
    Family(
        "mimo_v2_flash",
        settings={
            "num_key_value_heads": 2,
            "rope_parameters": dict.fromkeys(
                ("full_attention", "sliding_attention"), ROPE | {"partial_rotary_factor": 0.5}
            ),
        },
    ),
    Family("minimax"),
    Family("minimax_m2"),
    Family("minimax_m3_vl"),
    Family("mistral4"),
    text_model("mistral_large4", "MistralLarge4TextModel"),
    Family("mixtral", quick=True),
    text_model("muse_spark", "MuseSparkTextModel"),
    Family(
        "nemotron_h",
        settings={
            "layers_block_type": ["moe", "attention", "mamba", "moe"],
            **{"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8},
        },
    ),
    Family(
        "nllb_moe",
        "NllbMoeForConditionalGeneration",
        {
            **{"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16},
            **{"encoder_attention_heads": 4, "decoder_attention_heads": 4},
            **{"encoder_sparse_step": 1, "decoder_sparse_step": 1},
        },
        refused="encoder-decoder router with capacity limits",
        quick=True,
    ),
    Family("olmoe", quick=True),
    Family(
        "openai_privacy_filter",
        "OpenAIPrivacyFilterModel",
        left_out={"generate": "an encoder: no generation, no cache"},
    ),
    Family("phimoe", refused="two masked maxima", quick=True),
    Family("qwen2_moe"),
    Family("qwen3_5_moe", settings=LINEAR),
    Family("qwen3_moe", quick=True),
    Family("qwen3_next", settings=LINEAR),
    text_model("qwen3_omni_moe", "Qwen3OmniMoeThinkerTextModel", variant="thinker"),
    text_model("qwen3_omni_moe", "Qwen3OmniMoeTalkerModel", {"shared_expert_intermediate_size": 16}, variant="talker"),
    text_model("qwen3_vl_moe", "Qwen3VLMoeTextModel"),
    Family(
        "qwen4_exp",
        settings={
            "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
            **{"hc_count": 2, "hc_lowrank": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8},
            **{"indexer_budget": 4, "indexer_compress_ratio": 2},
        },
    ),
    Family("solar_open"),
    text_model("step3p7", "Step3p7TextModel"),
    Family(
        "switch_transformers",
        "SwitchTransformersForConditionalGeneration",
        {
            **{"d_model": 32, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4},
            **{"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
        },
        refused="encoder-decoder router with capacity limits",
        quick=True,
    ),
    text_model("unlimited_ocr", "UnlimitedOcrTextModel", GROUPS),
    Family(
        "zaya",
        settings={"num_experts_per_tok": 1, "router_hidden_size": 16},
        note="id 8 skips the experts: they receive it as 0, with gate 0",
        skip_expert=8,
        quick=True,
    ),
]


def declared_by_transformers() -> list[str]:
    """Families whose modeling file declares a module that emits router logits."""
    import transformers

    files = (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")
    return sorted({file.parent.name for file in files if re.search(r'"router_logits":', file.read_text("utf-8"))})
