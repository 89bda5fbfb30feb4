"""Rows of the table of families: decoders with experts."""

from __future__ import annotations

from dataclasses import replace

from llamac.export.hf.families_gated import GRANITE
from llamac.export.hf.family import Family, Module
from llamac.export.hf.family_parts import (
    COMMON,
    NOT_APPLIED,
    QWEN_WINDOW,
    L,
    attention,
    experts,
    mlp,
    pre,
    qk_norms,
    without,
)

FUSED_EXPERTS = (
    (r"(layers\.\d+\.mlp\.experts)\.gate_up_proj", ("gate_proj", "up_proj")),
    (r"(layers\.\d+\.mlp\.experts)\.down_proj", ("down_proj",)),
)

EXPERTS = experts("mlp.gate", "mlp.experts.{e}", ("gate_proj", "up_proj", "down_proj"))
SHARED_EXPERT = (
    *(
        Module(f"{L}mlp.shared_expert.{x}_proj", (f"{L}shared_ffn_{x}",), only="experts")
        for x in ("gate", "up", "down")
    ),
    Module(f"{L}mlp.shared_expert_gate", (f"{L}shared_gate",), only="experts"),
)

MIXTRAL = Family(
    model_type="mixtral",
    architectures=("MixtralForCausalLM",),
    bare="MixtralModel",
    modules=pre(attention(), experts("block_sparse_moe.gate", "block_sparse_moe.experts.{e}", ("w1", "w3", "w2"))),
    keys={
        **COMMON,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    ffn="experts",
    renamed=((r"\.mlp\.(gate|experts)\.", r".block_sparse_moe.\1."),),
    fused=(
        (r"(layers\.\d+\.block_sparse_moe\.experts)\.gate_up_proj", ("w1", "w3")),
        (r"(layers\.\d+\.block_sparse_moe\.experts)\.down_proj", ("w2",)),
    ),
)

# A bias on everything, a sink per head, and experts as tensors of all experts.
GPT_OSS = Family(
    model_type="gpt_oss",
    architectures=("GptOssForCausalLM",),
    bare="GptOssModel",
    modules=pre(
        (*attention("attention_bias"), Module(f"{L}self_attn.sinks", (f"{L}attn_sinks",), parameter=True)),
        tuple(
            replace(module, bias="always")
            for module in experts("mlp.router", "mlp.experts.{e}", ("gate_proj", "up_proj", "down_proj"))
        ),
    ),
    keys={
        **without(COMMON, "hidden_act"),
        "head_dim": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "attention_bias": True,
        "sliding_window": 128,
        "layer_types": None,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
    },
    fixed={"hidden_act": "silu", "swiglu_alpha": 1.702},
    windows="alternate",
    ffn="experts",
    sinks=True,
    up_offset=1.0,
    activation="",
    fused=(
        (r"(layers\.\d+\.mlp\.experts)\.gate_up_proj", ("gate_proj", "up_proj")),
        (r"(layers\.\d+\.mlp\.experts)\.down_proj", ("down_proj",)),
    ),
    fused_columns=True,
    quantized=("mxfp4",),
    default_rope={
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
)

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    bare="Qwen3MoeModel",
    modules=pre((*attention("attention_bias"), *qk_norms()), (*mlp(only="dense"), *EXPERTS)),
    keys={
        **COMMON,
        **QWEN_WINDOW,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "attention_bias": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
    },
    fixed={"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0},  # Qwen3-Coder's
    harmless=NOT_APPLIED,
    qk_norm="head",
    ffn="experts",
    fused=FUSED_EXPERTS,
)

# Granite with experts, which are tensors of all experts.
GRANITE_MOE = Family(
    model_type="granitemoe",
    architectures=("GraniteMoeForCausalLM",),
    bare="GraniteMoeModel",
    modules=pre(
        attention("attention_bias"),
        experts("block_sparse_moe.router", "block_sparse_moe.experts.{e}", ("gate_proj", "up_proj", "down_proj")),
    ),
    keys={**without(GRANITE.keys, "mlp_bias"), "num_local_experts": 8, "num_experts_per_tok": 2},
    ffn="experts",
    renamed=(
        (r"\.block_sparse_moe\.input_linear\.weight$", ".block_sparse_moe.experts.gate_up_proj"),
        (r"\.block_sparse_moe\.output_linear\.weight$", ".block_sparse_moe.experts.down_proj"),
        (r"\.block_sparse_moe\.router\.layer\.", ".block_sparse_moe.router."),
    ),
    fused=(
        (r"(layers\.\d+\.block_sparse_moe\.experts)\.gate_up_proj", ("gate_proj", "up_proj")),
        (r"(layers\.\d+\.block_sparse_moe\.experts)\.down_proj", ("down_proj",)),
    ),
    fused_only=True,
)

# Besides the experts, one of all rows, multiplied by a gate.
QWEN2_MOE = Family(
    model_type="qwen2_moe",
    architectures=("Qwen2MoeForCausalLM",),
    bare="Qwen2MoeModel",
    modules=pre(
        attention("qkv_bias", out_bias="never"),
        (*mlp(only="dense"), *EXPERTS, *SHARED_EXPERT),
    ),
    keys={
        **without(COMMON, "head_dim"),
        **QWEN_WINDOW,
        "num_key_value_heads": 16,
        "max_position_embeddings": 32768,
        "layer_types": None,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "qkv_bias": True,
    },
    windows="early_alternate",
    ffn="experts",
    fused=FUSED_EXPERTS,
)

OLMOE = Family(
    model_type="olmoe",
    architectures=("OlmoeForCausalLM",),
    bare="OlmoeModel",
    modules=pre((*attention("attention_bias"), *qk_norms()), EXPERTS),
    keys={
        **without(COMMON, "head_dim"),
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    fixed={"clip_qkv": None},
    qk_norm="whole",
    ffn="experts",
    fused=FUSED_EXPERTS,
)
