"""Rows of the table of families: decoders with multi-head latent attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llamac.export.hf.families_experts import EXPERTS, FUSED_EXPERTS
from llamac.export.hf.families_gated import MINISTRAL3
from llamac.export.hf.family import Family, Module
from llamac.export.hf.family_parts import COMMON, L, mlp, norm, pre, without


def _attention(pairs: str) -> tuple[Module, ...]:
    """Latent attention, whose rotated rows are pairs of "halves" or of "neighbors"."""
    bias = "attention_bias"
    return (
        Module(f"{L}self_attn.q_proj", (f"{L}attn_q",), rotated=pairs, only="whole_q"),
        Module(f"{L}self_attn.q_a_proj", (f"{L}attn_q_a",), bias=bias, only="latent_q"),
        norm("self_attn.q_a_layernorm", "attn_q_a_norm", only="latent_q"),
        Module(f"{L}self_attn.q_b_proj", (f"{L}attn_q",), rotated=pairs, only="latent_q"),
        Module(f"{L}self_attn.kv_a_proj_with_mqa", (f"{L}attn_kv_a",), bias=bias, rotated=pairs),
        norm("self_attn.kv_a_layernorm", "attn_kv_a_norm"),
        Module(f"{L}self_attn.kv_b_proj", (f"{L}attn_k_b", f"{L}attn_v_b"), absorbed=True),
        Module(f"{L}self_attn.o_proj", (f"{L}attn_out",), bias=bias),
    )


def _shared_experts(bias: str = "never") -> tuple[Module, ...]:
    return tuple(
        Module(f"{L}mlp.shared_experts.{x}_proj", (f"{L}shared_ffn_{x}",), bias=bias, only="shared")
        for x in ("gate", "up", "down")
    )


# How many layers predict further tokens, and the tensors around the first one, which follows the other layers.
_PREDICTING = ("num_nextn_predict_layers", "num_mtp_layers")
MTP = (
    Module("layers.{n}.enorm", ("mtp.embedding_norm",)),
    Module("layers.{n}.hnorm", ("mtp.hidden_norm",)),
    Module("layers.{n}.eh_proj", ("mtp.in",)),
    Module("layers.{n}.shared_head.norm", ("mtp.output_norm",)),
)
_KEYS: dict[str, Any] = {**without(COMMON, "head_dim"), "attention_bias": False}

MINICPM3 = Family(
    model_type="minicpm3",
    architectures=("MiniCPM3ForCausalLM",),
    bare="MiniCPM3Model",
    modules=pre(_attention("halves"), mlp(bias="mlp_bias")),
    keys={
        **_KEYS,
        "hidden_size": 2560,
        "intermediate_size": 6400,
        "num_hidden_layers": 62,
        "num_attention_heads": 40,
        "num_key_value_heads": 40,
        "vocab_size": 73448,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "mlp_bias": False,
        "q_lora_rank": 768,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": None,
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
    },
)

DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    architectures=("DeepseekV2ForCausalLM",),
    bare="DeepseekV2Model",
    modules=pre(
        _attention("neighbors"),
        (*mlp(bias="mlp_bias", only="dense"), *EXPERTS, *_shared_experts("mlp_bias")),
    ),
    keys={
        **_KEYS,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 102400,
        "mlp_bias": False,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 0,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": None,
        "moe_intermediate_size": 1407,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
        "n_group": None,
        "topk_group": None,
    },
    # transformers does not divide the weights by their sum, whatever norm_topk_prob says
    fixed={"norm_topk_prob": False, "scoring_func": "softmax", "moe_layer_freq": 1},
    harmless=("aux_loss_alpha", "seq_aux", "ep_size"),
    ffn="experts",
    fused=FUSED_EXPERTS,
)

# Sigmoids, a bias for the choice of experts, groups, and weights that are divided by their sum.
DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    model_type="deepseek_v3",
    architectures=("DeepseekV3ForCausalLM",),
    bare="DeepseekV3Model",
    modules=pre(
        _attention("neighbors"),
        (
            *mlp(only="dense"),
            *EXPERTS,
            Module(
                f"{L}mlp.gate.e_score_correction_bias",
                (f"{L}ffn_router_choice",),
                bias="only",
                parameter=True,
                only="choice_bias",
            ),
            *_shared_experts(),
        ),
    ),
    keys={
        **{key: value for key, value in DEEPSEEK_V2.keys.items() if key not in ("mlp_bias", "topk_method")},
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "max_position_embeddings": 4096,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
    },
    fixed={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "rope_interleave": True},
    harmless=(*DEEPSEEK_V2.harmless, *_PREDICTING),
    router="sigmoid",
    weights_eps=1e-20,
    mtp=MTP,
    mtp_key="num_nextn_predict_layers",
)

# The same under another name, which transformers reads with the authors' own code only.
KIMI_K2 = replace(DEEPSEEK_V3, model_type="kimi_k2")

GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    model_type="glm4_moe_lite",
    architectures=("Glm4MoeLiteForCausalLM",),
    bare="Glm4MoeLiteModel",
    keys={
        **DEEPSEEK_V3.keys,
        "vocab_size": 154880,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "first_k_dense_replace": 1,
        "mlp_layer_types": None,  # which layers have experts, instead of first_k_dense_replace
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "routed_scaling_factor": 1.8,
        "n_group": 1,
        "topk_group": 1,
    },
)

# The scores are softmaxes, and queries grow with their position. head_dim is the width of a head of q.
MISTRAL4 = replace(
    DEEPSEEK_V2,
    model_type="mistral4",
    architectures=("Mistral4ForCausalLM",),
    bare="Mistral4Model",
    modules=tuple(module for module in DEEPSEEK_V3.modules if module.only != "choice_bias"),
    keys={
        **without(DEEPSEEK_V2.keys, "mlp_bias", "topk_method"),
        "vocab_size": 131072,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_key_value_heads": 32,
        "max_position_embeddings": 1048576,
        "partial_rotary_factor": None,
        "q_lora_rank": 1024,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 2048,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
    },
    fixed={"rope_interleave": True},
    harmless=(),
    rope_extras=MINISTRAL3.rope_extras,
    default_rope={**MINISTRAL3.default_rope, "factor": 128.0, "original_max_position_embeddings": 8192},
    fused_only=True,
)
