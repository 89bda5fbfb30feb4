"""Rows of the table of families: decoders with experts whose routers have sigmoids or a bias, or that share experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llamac.export.hf.families_experts import EXPERTS, FUSED_EXPERTS, GRANITE_MOE, MIXTRAL
from llamac.export.hf.families_gated import ERNIE, EXAONE4, GEMMA3, HUNYUAN, OLMO2
from llamac.export.hf.families_latent import MTP
from llamac.export.hf.families_layer_norm import COHERE2
from llamac.export.hf.family import Family, Module
from llamac.export.hf.family_parts import (
    COMMON,
    EMBEDDING,
    ROPE_NOT_APPLIED,
    L,
    attention,
    experts,
    mlp,
    norm,
    pre,
    qk_norms,
    without,
)


def _choice_bias(name: str, **options: Any) -> Module:
    return Module(L + name, (f"{L}ffn_router_choice",), bias="only", parameter=True, only="choice_bias", **options)


def _shared(name: str, bias: str = "never") -> tuple[Module, ...]:
    return tuple(
        Module(f"{L}mlp.{name}.{x}_proj", (f"{L}shared_ffn_{x}",), bias=bias, only="shared")
        for x in ("gate", "up", "down")
    )


_SHARED = _shared("shared_experts")
_BIAS = _choice_bias("mlp.gate.e_score_correction_bias")

# DeepSeek V3's experts with grouped-query attention.
GLM4_MOE = Family(
    model_type="glm4_moe",
    architectures=("Glm4MoeForCausalLM",),
    bare="Glm4MoeModel",
    modules=pre(
        (*attention("attention_bias", out_bias="never"), *qk_norms()),
        (*mlp(only="dense"), *EXPERTS, _BIAS, *_SHARED),
    ),
    keys={
        **COMMON,
        "vocab_size": 151552,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "attention_bias": False,
        "use_qk_norm": False,
        "first_k_dense_replace": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
    },
    fixed={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
    harmless=("num_nextn_predict_layers", "num_mtp_layers"),
    qk_norm="head",
    ffn="experts",
    router="sigmoid",
    weights_eps=1e-20,
    fused=FUSED_EXPERTS,
    mtp=MTP,
    mtp_key="num_nextn_predict_layers",
    odd_rope=True,
)

# Experts in every layer.
SOLAR_OPEN = replace(
    GLM4_MOE,
    model_type="solar_open",
    architectures=("SolarOpenForCausalLM",),
    bare="SolarOpenModel",
    modules=pre(attention("attention_bias", out_bias="never"), (*EXPERTS, _BIAS, *_SHARED)),
    keys={
        **without(GLM4_MOE.keys, "intermediate_size", "use_qk_norm", "partial_rotary_factor", "first_k_dense_replace"),
        "vocab_size": 196608,
        "head_dim": 128,
        "num_hidden_layers": 48,
        "num_attention_heads": 64,
        "moe_intermediate_size": 1280,
        "rope_theta": 1000000.0,
    },
    # keys of the published config.json that transformers does not read
    harmless=("first_k_dense_replace", "intermediate_size", "use_qk_norm"),
    qk_norm="none",
    mtp=(),
    mtp_key="",
)

DOTS1 = replace(
    GLM4_MOE,
    model_type="dots1",
    architectures=("Dots1ForCausalLM",),
    bare="Dots1Model",
    modules=pre(
        (*attention("attention_bias"), *qk_norms()),
        (*mlp(only="dense"), *EXPERTS, _BIAS, *_SHARED),
    ),
    keys={
        **without(GLM4_MOE.keys, "use_qk_norm", "partial_rotary_factor"),
        "vocab_size": 152064,
        "hidden_size": 4608,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "first_k_dense_replace": 0,
        "n_routed_experts": None,
        "n_shared_experts": None,
        "num_experts_per_tok": None,
        "norm_topk_prob": False,
        "sliding_window": 4096,
        "max_window_layers": 62,
        "layer_types": None,
    },
    fixed={"topk_method": "noaux_tc", "moe_layer_freq": 1},
    harmless=("scoring_func", "use_sliding_window"),  # transformers always has sigmoids and a window that is a number
    windows="late",
    mtp=(),
    mtp_key="",
)

EXAONE_MOE = replace(
    EXAONE4,
    model_type="exaone_moe",
    architectures=("ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM"),  # the second: published with its own code
    bare="ExaoneMoeModel",
    modules=pre(
        (*attention(), *qk_norms()),
        (*mlp(only="dense"), *EXPERTS, _choice_bias("mlp.e_score_correction_bias"), *_SHARED),
    ),
    keys={
        **EXAONE4.keys,
        "first_k_dense_replace": 1,
        "mlp_layer_types": None,
        "num_experts": 64,
        "num_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1024,
        "routed_scaling_factor": 2.5,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "sliding_windows": None,
        "is_moe_layer": None,
        "mtp_layer_types": None,
        "mtp_sliding_windows": None,
    },
    fixed={"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    placement="pre",
    ffn="experts",
    router="sigmoid",
    weights_eps=1e-20,
    renamed=((r"\.mlp\.gate\.e_score_correction_bias$", ".mlp.e_score_correction_bias"),),
    fused=FUSED_EXPERTS,
)

# A gate for each element of attention's result, and norms before and after each part.
AFMOE = replace(
    GLM4_MOE,
    model_type="afmoe",
    architectures=("AfmoeForCausalLM",),
    bare="AfmoeModel",
    modules=(
        EMBEDDING,
        norm("input_layernorm", "attn_norm"),
        *(*attention("attention_bias"), *qk_norms(), Module(f"{L}self_attn.gate_proj", (f"{L}attn_gate",))),
        norm("post_attention_layernorm", "attn_post_norm"),
        norm("pre_mlp_layernorm", "ffn_norm"),
        *mlp(only="dense"),
        *experts("mlp.router.gate", "mlp.experts.{e}", ("gate_proj", "up_proj", "down_proj")),
        *(_choice_bias("mlp.expert_bias"), *_SHARED),
        norm("post_mlp_layernorm", "ffn_post_norm"),
        Module("norm", ("output_norm",)),
    ),
    keys={
        **COMMON,
        "vocab_size": 200192,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "head_dim": 128,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mup_enabled": False,
        "global_attn_every_n_layers": 4,
        "sliding_window": 1024,
        "layer_types": None,
        "num_dense_layers": 1,
        "num_experts": 64,
        "num_shared_experts": 2,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "route_scale": 1.0,
    },
    fixed={
        "score_func": "sigmoid",
        "route_norm": True,
        **dict.fromkeys(("n_group", "topk_group", "num_expert_groups", "num_limited_groups"), 1),
    },
    harmless=("load_balance_coeff", "use_grouped_mm"),
    placement="sandwich",
    output_gate=True,
    windows="pattern",
    rotates="windowed",
    mtp=(),
    mtp_key="",
)

# Chunks of positions in the layers with RoPE, experts weighted before their networks.
LLAMA4_TEXT = Family(
    model_type="llama4_text",
    architectures=("Llama4ForCausalLM",),
    bare="Llama4TextModel",
    modules=pre(
        attention("attention_bias"),
        (
            *(replace(x, name=x.name.replace(".mlp.", ".feed_forward.")) for x in mlp(only="dense")),
            *experts("feed_forward.router", "feed_forward.experts.{e}", ("gate_proj", "up_proj", "down_proj")),
            *(replace(x, name=x.name.replace(".mlp.", ".feed_forward.")) for x in _shared("shared_expert")),
        ),
    ),
    keys={
        **COMMON,
        "vocab_size": 202048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "attention_bias": False,
        "use_qk_norm": True,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "layer_types": None,
        "attn_temperature_tuning": True,
        "attn_scale": 0.1,
        "floor_scale": 8192,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "moe_layers": None,
        "interleave_moe_layer_step": 1,
    },
    harmless=("for_llm_compressor",),
    plain_norms=(f"{L}attn_q_norm", f"{L}attn_k_norm"),
    qk_norm="rotated_head",
    qk_norm_after_rope=True,
    windows="rotated",
    window_key="attention_chunk_size",
    window_chunks=True,
    pairs="neighbors",
    ffn="experts",
    router="sigmoid",
    fused=tuple((name.replace(r"\.mlp\.", r"\.feed_forward\."), parts) for name, parts in FUSED_EXPERTS),
    fused_turned="always",
    fused_only=True,
)
LLAMA4 = replace(
    LLAMA4_TEXT,
    model_type="llama4",
    architectures=("Llama4ForConditionalGeneration",),
    bare="Llama4Model",
    ignored=(*LLAMA4_TEXT.ignored, r"(vision_model|multi_modal_projector)\..*"),
    renamed=GEMMA3.renamed,
    written_as="llama4_text",
)

# Norms of the whole q and k, and RoPE on a part of a head.
MINIMAX_M2 = replace(
    MIXTRAL,
    model_type="minimax_m2",
    architectures=("MiniMaxM2ForCausalLM",),
    bare="MiniMaxM2Model",
    modules=pre(
        (*attention(), *qk_norms()),
        (
            *experts("block_sparse_moe.gate", "block_sparse_moe.experts.{e}", ("w1", "w3", "w2")),
            _choice_bias("block_sparse_moe.e_score_correction_bias"),
        ),
    ),
    keys={
        **COMMON,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "max_position_embeddings": 196608,
        "rope_theta": 5000000.0,
        "rotary_dim": None,
        "partial_rotary_factor": 1.0,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
    },
    fixed={
        "scoring_func": "sigmoid",
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "use_routing_bias": True,
        "shared_intermediate_size": 0,
        "sliding_window": None,
        **dict.fromkeys((f"layernorm_{part}_beta" for part in ("full_attention", "linear_attention", "mlp")), 1.0),
    },
    harmless=("mtp_transformer_layers", "num_mtp_modules", "use_mtp", "shared_moe_mode", "attn_type_list"),
    qk_norm="whole",
    router="sigmoid",
    renamed=((r"\.mlp\.(gate|experts|e_score_correction_bias)\b", r".block_sparse_moe.\1"),),
    odd_rope=True,
)

# Granite with experts and one that all rows use.
GRANITE_MOE_SHARED = replace(
    GRANITE_MOE,
    model_type="granitemoeshared",
    architectures=("GraniteMoeSharedForCausalLM",),
    bare="GraniteMoeSharedModel",
    modules=(
        *GRANITE_MOE.modules,
        Module(f"{L}shared_mlp.input_linear", (f"{L}shared_ffn_gate", f"{L}shared_ffn_up"), only="shared"),
        Module(f"{L}shared_mlp.output_linear", (f"{L}shared_ffn_down",), only="shared"),
    ),
    keys={**GRANITE_MOE.keys, "shared_intermediate_size": 0},
)

# Cohere 2 with experts, in all layers or all but the first few, and layer norms or RMS norms.
COHERE2_MOE = replace(
    COHERE2,
    model_type="cohere2_moe",
    architectures=("Cohere2MoeForCausalLM",),
    bare="Cohere2MoeModel",
    modules=(
        *(module for module in COHERE2.modules if ".mlp." not in module.name),
        *(*mlp(only="dense"), *EXPERTS),
        *_SHARED,
    ),
    keys={
        **COHERE2.keys,
        "vocab_size": 256000,
        "hidden_size": 8192,
        "intermediate_size": 22528,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "head_dim": 128,
        "rms_norm_eps": None,
        "first_k_dense_replace": 0,
        "mlp_layer_types": None,
        "prefix_dense_intermediate_size": None,
        "prefix_dense_sliding_window_pattern": 1,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_shared_experts": 0,
        "shared_expert_combination_strategy": "average",
        "expert_selection_fn": "softmax",
        "norm_topk_prob": True,
    },
    harmless=(*COHERE2.harmless, *ROPE_NOT_APPLIED),
    sizes_of_head=False,
    ffn="experts",
    windows="pattern_after_dense",
    fused=FUSED_EXPERTS,
)

# In Hunyuan's own code, a number can be a list that repeats it for each layer.
HUNYUAN_MOE = replace(
    HUNYUAN,
    model_type="hunyuan_v1_moe",
    architectures=("HunYuanMoEV1ForCausalLM",),
    bare="HunYuanMoEV1Model",
    modules=pre(
        (
            *attention("attention_bias"),
            norm("self_attn.query_layernorm", "attn_q_norm"),
            norm("self_attn.key_layernorm", "attn_k_norm"),
        ),
        (
            *experts("mlp.gate.wg", "mlp.experts.{e}", ("gate_proj", "up_proj", "down_proj")),
            *_shared("shared_mlp"),
        ),
    ),
    keys={**HUNYUAN.keys, "num_experts": 1, "moe_topk": 1},
    fixed={
        **HUNYUAN.fixed,
        "norm_topk_prob": True,
        "use_mixed_mlp_moe": True,
        "use_mla": False,
        "moe_layer_num_skipped": 0,
        **dict.fromkeys(("n_group", "topk_group", "routed_scaling_factor"), False),
        **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")),
    },
    harmless=(
        *HUNYUAN.harmless,
        *("moe_drop_tokens", "moe_random_routing_dropped_token"),
    ),
    ffn="experts",
    fused=FUSED_EXPERTS,
)

FLEX_OLMO = replace(
    OLMO2,
    model_type="flex_olmo",
    architectures=("FlexOlmoForCausalLM",),
    bare="FlexOlmoModel",
    modules=(*(module for module in OLMO2.modules if ".mlp." not in module.name), *EXPERTS),
    keys={
        **OLMO2.keys,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0,
        "num_experts": 7,
        "num_experts_per_tok": 5,
        "norm_topk_prob": False,
    },
    ffn="experts",
    fused=FUSED_EXPERTS,
)

# The scores are softmaxes; a bias changes the choice of experts, and the weights are divided by their sum.
ERNIE_MOE = replace(
    ERNIE,
    model_type="ernie4_5_moe",
    architectures=("Ernie4_5_MoeForCausalLM",),
    bare="Ernie4_5_MoeModel",
    modules=pre(
        attention("use_bias"),
        (
            *mlp("use_bias", only="dense"),
            *EXPERTS,
            _choice_bias("mlp.moe_statics.e_score_correction_bias", one_row=True),
            *_shared("shared_experts", "use_bias"),
        ),
    ),
    keys={
        **ERNIE.keys,
        "head_dim": None,
        "num_key_value_heads": 4,
        "moe_num_experts": 64,
        "moe_k": 6,
        "moe_num_shared_experts": 2,
        "moe_intermediate_size": 1536,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
    },
    # a sum of weights below moe_norm_min would not be divided by itself
    fixed={"moe_norm_min": 1e-12, "moe_gate": "topk", "moe_use_aux_free": True, "use_rmsnorm": True},
    harmless=("moe_capacity", "num_nextn_predict_layers"),
    ffn="experts",
    choice_bias=True,
    head_bias="use_bias",
    renamed=((r"\.mlp\.gate\.moe_statics\.", ".mlp.moe_statics."),),
    fused=FUSED_EXPERTS,
    mtp=(
        Module("mtp_emb_norm.0", ("mtp.embedding_norm",)),
        Module("mtp_hidden_norm.0", ("mtp.hidden_norm",)),
        Module("mtp_linear_proj.0", ("mtp.in",)),
    ),
    mtp_key="num_nextn_predict_layers",
    mtp_block="mtp_block",
    mtp_dense=True,
)
