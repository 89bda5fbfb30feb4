"""Rows of the table of families: decoders in which most layers have a short convolution in place of attention."""

from __future__ import annotations

from dataclasses import replace

from llamac.export.hf.families_gated import GEMMA3
from llamac.export.hf.family import Family, Module
from llamac.export.hf.family_parts import COMMON, EMBEDDING, L, attention, experts, norm, qk_norms, without

_ATTENTION = (
    *(Module(f"{L}self_attn.{x}_proj", (f"{L}attn_{x}",), only="attention") for x in "qkv"),
    Module(f"{L}self_attn.out_proj", (f"{L}attn_out",), only="attention"),
    *(norm(f"self_attn.{x}_layernorm", f"attn_{x}_norm", only="attention") for x in "qk"),
)
_SHORT_CONV = tuple(
    replace(module, bias="conv_bias", only="short_conv")
    for module in (
        Module(f"{L}conv.in_proj", (f"{L}conv_in",)),
        Module(f"{L}conv.conv", (f"{L}conv_taps",), taps=True),
        Module(f"{L}conv.out_proj", (f"{L}conv_out",)),
    )
)
_NAMES = {"gate": "w1", "up": "w3", "down": "w2"}
_MLP = tuple(Module(f"{L}feed_forward.{name}", (f"{L}ffn_{x}",), only="dense") for x, name in _NAMES.items())
_EXPERTS = (
    *experts("feed_forward.gate", "feed_forward.experts.{e}", ("w1", "w3", "w2")),
    Module(f"{L}feed_forward.expert_bias", (f"{L}ffn_router_choice",), bias="only", parameter=True, only="choice_bias"),
)


def _decoder(*ffn: Module) -> tuple[Module, ...]:
    return (
        EMBEDDING,
        norm("operator_norm", "attn_norm"),
        *_ATTENTION,
        *_SHORT_CONV,
        norm("ffn_norm", "ffn_norm"),
        *ffn,
        Module("embedding_norm", ("output_norm",)),
    )


LFM2 = Family(
    model_type="lfm2",
    architectures=("Lfm2ForCausalLM",),
    bare="Lfm2Model",
    modules=_decoder(*_MLP),
    keys={
        **without(COMMON, "hidden_act", "rms_norm_eps", "head_dim"),
        "vocab_size": 65536,
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128000,
        "norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "tie_embedding": None,  # another name
        "rope_theta": 1000000.0,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_ff_dim": None,  # another name of intermediate_size
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "layer_types": None,
        "full_attn_idxs": None,
    },
    fixed={"hidden_act": "silu", "block_use_swiglu": True, "use_pos_enc": True},
    harmless=(
        *("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_xavier_init"),
        *("conv_dim", "conv_dim_out", "conv_use_xavier_init"),
    ),
    old_keys={"theta": "rope_theta"},
    qk_norm="head",
)

# The first layers have a network of their own, the others experts.
LFM2_MOE = replace(
    LFM2,
    model_type="lfm2_moe",
    architectures=("Lfm2MoeForCausalLM",),
    bare="Lfm2MoeModel",
    modules=_decoder(*_MLP, *_EXPERTS),
    keys={
        **{key: value for key, value in LFM2.keys.items() if not key.startswith("block_") and key != "full_attn_idxs"},
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1792,
        "num_dense_layers": 2,
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.0,
    },
    fixed={"hidden_act": "silu"},
    harmless=(),
    ffn="experts",
    router="sigmoid",
    weights_eps=1e-6,
    fused=(
        (r"(layers\.\d+\.feed_forward\.experts)\.gate_up_proj", ("w1", "w3")),
        (r"(layers\.\d+\.feed_forward\.experts)\.down_proj", ("w2",)),
    ),
)

# Layers of attention have windows, too, a gate for each head, and RoPE on a part of each head where they have none.
LFM3 = replace(
    LFM2,
    model_type="lfm3",
    architectures=("Lfm3ForCausalLM",),
    bare="Lfm3Model",
    modules=(
        EMBEDDING,
        norm("operator_norm", "attn_norm"),
        *(replace(module, only="attention") for module in (*attention("attention_bias"), *qk_norms())),
        Module(f"{L}self_attn.gate_proj", (f"{L}attn_gate",), only="gated"),
        *_SHORT_CONV,
        norm("post_operator_norm", "attn_post_norm", only="sandwich"),
        norm("ffn_norm", "ffn_norm"),
        *_MLP,
        norm("post_ffn_norm", "ffn_post_norm", only="sandwich"),
        Module("embedding_norm", ("output_norm",)),
    ),
    keys={
        **{key: LFM2.keys[key] for key in ("max_position_embeddings", "norm_eps", "tie_word_embeddings")},
        "layer_types": None,
        "conv_bias": False,
        "vocab_size": 128000,
        "hidden_size": 2048,
        "intermediate_size": 7680,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "conv_L_cache": 7,
        "sliding_window": 256,
        "attention_bias": False,
        "use_sandwich_norm": True,
        "use_attention_gate": True,
    },
    fixed={"hidden_act": "silu"},
    harmless=(),
    two_ropes=True,
    partial_default=True,
    default_rope={
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
    renamed=((r"\.self_attn\.g_proj\.", ".self_attn.gate_proj."),),
)
LFM2_VL = replace(
    LFM2,
    model_type="lfm2_vl",
    architectures=("Lfm2VlForConditionalGeneration",),
    bare="Lfm2VlModel",
    ignored=(*LFM2.ignored, r"(vision_tower|multi_modal_projector)\..*"),
    renamed=GEMMA3.renamed,
    written_as="lfm2",
)
LFM3_VL = replace(
    LFM3,
    model_type="lfm3_vl",
    architectures=("Lfm3VlForConditionalGeneration",),
    bare="Lfm3VlModel",
    ignored=(*LFM3.ignored, r"(vision_tower|multi_modal_projector)\..*"),
    renamed=(*LFM3.renamed, *GEMMA3.renamed),
    written_as="lfm3",
)
