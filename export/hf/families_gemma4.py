"""Rows of the table of families: Gemma 4, whose layers differ in more than their windows (see `config_gemma4`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llamac.export.hf.families_gated import GEMMA3
from llamac.export.hf.family import Family, Module
from llamac.export.hf.family_parts import GEMMA_KEYS, L, attention, experts, mlp, norm, sandwich, without

_EMBEDDINGS = tuple(
    replace(module, only="embedded")
    for module in (
        Module("embed_tokens_per_layer", ("layer_embedding",)),
        Module("per_layer_model_projection", ("layer_embedding_in",)),
        Module("per_layer_projection_norm", ("layer_embedding_norm",)),
        Module(f"{L}per_layer_input_gate", (f"{L}layer_embedding_gate",)),
        Module(f"{L}per_layer_projection", (f"{L}layer_embedding_out",)),
        norm("post_per_layer_input_norm", "layer_embedding_post_norm"),
    )
)

# Layers that read the keys and values of another layer have no k and v; where k is also v, there is no v.
_OWN = {"k_proj": "own_kv", "v_proj": "own_v", "k_norm": "own_kv"}


def _where_present(module: Module) -> Module:
    return replace(module, only=_OWN.get(module.name.rpartition(".")[2], ""))


_ATTENTION = tuple(
    _where_present(module)
    for module in (*attention("attention_bias"), *(norm(f"self_attn.{x}_norm", f"attn_{x}_norm") for x in "qk"))
)
_KEYS: dict[str, Any] = {
    **without(GEMMA_KEYS, "hidden_act", "rope_theta"),
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "layer_types": None,
    "final_logit_softcapping": None,
    "global_head_dim": 512,
    "num_global_key_value_heads": None,
    "per_layer_config": None,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
}

# The language model of the models without an encoder: no layer embeddings, no experts.
GEMMA4_UNIFIED_TEXT = Family(
    model_type="gemma4_unified_text",
    architectures=("Gemma4UnifiedForCausalLM",),
    bare="Gemma4UnifiedTextModel",
    modules=sandwich(_ATTENTION, mlp()),
    keys={**_KEYS, "max_position_embeddings": 262144, "sliding_window": 1024},
    fixed={"use_bidirectional_attention": "vision"},  # of images among themselves
    layer_numbers={f"{L}layer_scalar": "layer_scale"},
    placement="sandwich",
    qk_norm="head",
    v_norm="head",
    attention_scale=1.0,
    windows="pattern_and_last",
    window_every=6,
    two_ropes=True,
    scaled_embedding=True,
    activation="hidden_activation",
    default_rope={
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
)
_EXPERTS = (
    *(Module(f"{L}mlp.{x}_proj", (f"{L}shared_ffn_{x}",), only="experts") for x in ("gate", "up", "down")),
    *experts("router.proj", "experts.{e}", ("gate_proj", "up_proj", "down_proj")),
    Module(f"{L}router.scale", (f"{L}ffn_router_norm",), parameter=True, times_root=True, only="experts"),
    Module(f"{L}router.per_expert_scale", (f"{L}expert_factors",), parameter=True, only="experts"),
    norm("pre_feedforward_layernorm_2", "experts_norm", only="experts"),
    norm("post_feedforward_layernorm_1", "shared_ffn_post_norm", only="experts"),
    norm("post_feedforward_layernorm_2", "experts_post_norm", only="experts"),
)
# With layer embeddings, or with experts beside the network.
GEMMA4_TEXT = replace(
    GEMMA4_UNIFIED_TEXT,
    model_type="gemma4_text",
    architectures=("Gemma4ForCausalLM",),
    bare="Gemma4TextModel",
    modules=(*sandwich(_ATTENTION, (*mlp(only="dense"), *_EXPERTS)), *_EMBEDDINGS),
    keys={
        **_KEYS,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
        "enable_moe_block": False,
        "num_experts": None,
        "top_k_experts": None,
        "moe_intermediate_size": None,
    },
    fused=(
        (r"(layers\.\d+\.experts)\.gate_up_proj", ("gate_proj", "up_proj")),
        (r"(layers\.\d+\.experts)\.down_proj", ("down_proj",)),
    ),
)
_NO_TEXT = r"(vision_tower|vision_embedder|audio_tower|embed_vision|embed_audio|multi_modal_projector)\..*"
GEMMA4_UNIFIED = replace(
    GEMMA4_UNIFIED_TEXT,
    model_type="gemma4_unified",
    architectures=("Gemma4UnifiedForConditionalGeneration", "Gemma4UnifiedForCausalLM"),
    bare="Gemma4UnifiedModel",
    ignored=(*GEMMA4_UNIFIED_TEXT.ignored, _NO_TEXT),
    renamed=GEMMA3.renamed,
    written_as="gemma4_unified_text",
)
GEMMA4 = replace(
    GEMMA4_TEXT,
    model_type="gemma4",
    architectures=("Gemma4ForConditionalGeneration", "Gemma4ForCausalLM"),
    bare="Gemma4Model",
    ignored=GEMMA4_UNIFIED.ignored,
    renamed=GEMMA3.renamed,
    written_as="gemma4_text",
)
