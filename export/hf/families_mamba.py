"""Rows of the table of families: decoders in which layers have Mamba 2, in place of attention, beside it, or alone."""

from __future__ import annotations

from dataclasses import replace

from llamac.export.hf.families_experts import GRANITE_MOE
from llamac.export.hf.families_gated import GRANITE
from llamac.export.hf.family import Family, Module
from llamac.export.hf.family_parts import COMMON, EMBEDDING, L, attention, norm, pre, without


def mamba2(name: str, *, proj_bias: str, conv_bias: str, out_bias: str) -> tuple[Module, ...]:
    """The modules of a Mamba 2 mixer. proj_bias, conv_bias, out_bias: the config keys of its biases."""
    found = (
        Module(f"{L}{name}.in_proj", (f"{L}mamba_z", f"{L}mamba_xbc", f"{L}mamba_dt"), bias=proj_bias),
        Module(f"{L}{name}.conv1d", (f"{L}mamba_conv",), taps=True, bias=conv_bias),
        Module(f"{L}{name}.dt_bias", (f"{L}mamba_step",), bias="only", parameter=True),
        Module(f"{L}{name}.A_log", (f"{L}mamba_decay",), log=True, parameter=True),
        Module(f"{L}{name}.D", (f"{L}mamba_skip",), parameter=True),
        Module(f"{L}{name}.norm", (f"{L}mamba_norm",), only="state_norm"),
        Module(f"{L}{name}.out_proj", (f"{L}mamba_out",), bias=out_bias),
    )
    return tuple(replace(module, only=module.only or "mamba2") for module in found)


MAMBA2_KEYS = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "time_step_limit": None,
}

# All layers have a network, some models also experts beside it.
_SHARED = tuple(
    Module(f"{L}shared_mlp.{name}", tuple(f"{L}{prefix}_{part}" for part in parts), only=only)
    for only, prefix in (("dense", "ffn"), ("experts", "shared_ffn"))
    for name, parts in (("input_linear", ("gate", "up")), ("output_linear", ("down",)))
)
GRANITE_HYBRID = replace(
    GRANITE,
    model_type="granitemoehybrid",
    architectures=("GraniteMoeHybridForCausalLM",),
    bare="GraniteMoeHybridModel",
    modules=pre(
        (
            *(replace(module, only="attention") for module in attention("attention_bias")),
            *mamba2("mamba", proj_bias="mamba_proj_bias", conv_bias="mamba_conv_bias", out_bias="mamba_proj_bias"),
        ),
        (*_SHARED, *(module for module in GRANITE_MOE.modules if module.only == "experts")),
    ),
    keys={
        **without(GRANITE.keys, "mlp_bias"),
        "shared_intermediate_size": 1024,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "layer_types": None,
        "position_embedding_type": None,
        **MAMBA2_KEYS,
    },
    fixed={"normalization_function": "rmsnorm"},
    harmless=("logits_to_keep", "time_step_min", "time_step_max", "mamba_chunk_size", "init_method"),
    old_keys={"layers_block_type": "layer_types"},
    state_norm="after_gate",
    renamed=GRANITE_MOE.renamed,
    fused=GRANITE_MOE.fused,
    fused_only=True,
)

# A layer has a norm and one part: Mamba 2, attention without RoPE, a network, or experts. None of them has a gate.
_PLAIN = tuple(
    Module(f"{L}mixer.{name}{part}_proj", (f"{L}{canonical}_{part}",), bias=bias, only=only)
    for name, canonical, bias, only in (
        ("", "ffn", "mlp_bias", "dense"),
        ("experts.{e}.", "experts.{e}.ffn", "never", "experts"),
        ("shared_experts.", "shared_ffn", "mlp_bias", "experts"),
    )
    for part in ("up", "down")
)
NEMOTRON_H = Family(
    model_type="nemotron_h",
    architectures=("NemotronHForCausalLM",),
    bare="NemotronHModel",
    modules=(
        Module("embeddings", ("token_embedding",)),
        norm("norm", "attn_norm", only="mixer"),
        norm("norm", "ffn_norm", only="network"),
        *(
            Module(f"{L}mixer.{x}_proj", (f"{L}attn_{part}",), only="attention")
            for x, part in {"q": "q", "k": "k", "v": "v", "o": "out"}.items()
        ),
        *mamba2("mixer", proj_bias="use_bias", conv_bias="use_conv_bias", out_bias="use_bias"),
        *_PLAIN,
        Module(f"{L}mixer.gate", (f"{L}ffn_router",), only="experts"),
        Module(f"{L}mixer.fc1_latent_proj", (f"{L}experts_in",), bias="mlp_bias", only="mapped"),
        Module(f"{L}mixer.fc2_latent_proj", (f"{L}experts_out",), bias="mlp_bias", only="mapped"),
        Module(
            f"{L}mixer.gate.e_score_correction_bias",
            (f"{L}ffn_router_choice",),
            bias="only",
            parameter=True,
            only="choice_bias",
        ),
        Module("norm_f", ("output_norm",)),
    ),
    keys={
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "layer_norm_epsilon": 1e-5,
        "mlp_hidden_act": "relu2",
        "tie_word_embeddings": False,
        "use_bias": False,
        "mlp_bias": False,
        "use_conv_bias": True,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "time_step_min": 0.001,
        "hybrid_override_pattern": None,
        "layers_block_type": None,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "moe_latent_size": None,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
    },
    fixed={"attention_bias": False, "mamba_hidden_act": "silu", "sliding_window": None},
    # transformers reads none of these, or not for the logits
    harmless=(
        *("expand", "chunk_size", "mamba_proj_bias", "mamba_ssm_cache_dtype", "use_mamba_kernels"),
        *("time_step_limit", "time_step_max", "time_step_floor", "time_step_rank"),
        *("moe_shared_expert_overlap", "num_nextn_predict_layers", "mtp_layers_block_type"),
        *("mtp_hybrid_override_pattern", "num_logits_to_keep", "rescale_prenorm_residual", "residual_in_fp32"),
        *("norm_eps", "partial_rotary_factor", "rms_norm_eps", "rope_theta"),
    ),
    old_keys={
        "attention_head_dim": "head_dim",
        "layer_types": "layers_block_type",
        "num_local_experts": "n_routed_experts",
        "mamba_conv_bias": "use_conv_bias",
        "mamba_d_conv": "conv_kernel",
        "mamba_dt_min": "time_step_min",
        "mamba_n_groups": "n_groups",
    },
    ffn="plain",
    activation="mlp_hidden_act",
    router="sigmoid",
    weights_eps=1e-20,
    position="none",
    state_norm="after_gate",
    ignored=(*GRANITE_HYBRID.ignored, r"mtp\..*"),  # layers that predict further tokens
    prefix="backbone.",
    renamed=((r"^model\.", "backbone."),),
    fused=tuple((rf"(layers\.\d+\.mixer\.experts)\.{part}_proj", (f"{part}_proj",)) for part in ("up", "down")),
)

# A layer has a norm and Mamba 2, nothing else.
MAMBA2 = Family(
    model_type="mamba2",
    architectures=("Mamba2ForCausalLM",),
    bare="Mamba2Model",
    modules=(
        Module("embeddings", ("token_embedding",)),
        norm("norm", "attn_norm"),
        *mamba2("mixer", proj_bias="use_bias", conv_bias="use_conv_bias", out_bias="use_bias"),
        Module("norm_f", ("output_norm",)),
    ),
    keys={
        "vocab_size": 32768,
        "hidden_size": 4096,
        "num_hidden_layers": 64,
        "max_position_embeddings": 1 << 20,  # transformers has no limit
        "layer_norm_epsilon": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "num_heads": 128,
        "head_dim": 64,
        "n_groups": 8,
        "state_size": 128,
        "conv_kernel": 4,
        "expand": 2,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": None,
    },
    # transformers reads none of these, or not for the logits
    harmless=(
        *("chunk_size", "intermediate_size", "norm_before_gate", "rms_norm", "rescale_prenorm_residual"),
        *("residual_in_fp32", "time_step_floor", "time_step_init_scheme", "time_step_max", "time_step_min"),
        *("time_step_rank", "time_step_scale"),
    ),
    ffn="plain",
    position="none",
    state_norm="after_gate",
    prefix="backbone.",
    renamed=((r"^model\.", "backbone."),),
)

# Attention and Mamba 2 read the same rows. Numbers that multiply inputs and outputs become parts of the matrices.
FALCON_H1 = Family(
    model_type="falcon_h1",
    architectures=("FalconH1ForCausalLM",),
    bare="FalconH1Model",
    modules=(
        EMBEDDING,
        norm("input_layernorm", "attn_norm"),
        *attention("attention_bias"),
        *mamba2("mamba", proj_bias="mamba_proj_bias", conv_bias="mamba_conv_bias", out_bias="projectors_bias"),
        norm("pre_ff_layernorm", "ffn_norm"),
        *(Module(f"{L}feed_forward.{x}_proj", (f"{L}ffn_{x}",), bias="mlp_bias") for x in ("gate", "up", "down")),
        Module("final_layernorm", ("output_norm",)),
    ),
    keys={
        **COMMON,
        "vocab_size": 128000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
        "projectors_bias": False,
        "mamba_d_ssm": 1024,
        **MAMBA2_KEYS,
        "mamba_norm_before_gate": True,
        "mamba_rms_norm": False,
        "embedding_multiplier": 1.0,
        "lm_head_multiplier": 1.0,
        "mlp_multipliers": [1.0, 1.0],
        "key_multiplier": 1.0,
        "attention_in_multiplier": 1.0,
        "attention_out_multiplier": 1.0,
        "ssm_multipliers": [1.0, 1.0, 1.0, 1.0, 1.0],
        "ssm_in_multiplier": 1.0,
        "ssm_out_multiplier": 1.0,
    },
    fixed={"attn_layer_indices": None, "mamba_use_mlp": True},
    harmless=(
        *("logits_to_keep", "num_logits_to_keep", "mamba_chunk_size", "layers_block_type", "layer_types"),
        *("time_step_min", "time_step_max", "time_step_floor", "rescale_prenorm_residual", "residual_in_fp32"),
        *("mlp_expansion_factor", "time_step_rank"),
    ),
)

# Layers have attention, whose RoPE rotates half of a head, or Mamba 2.
BAMBA = Family(
    model_type="bamba",
    architectures=("BambaForCausalLM",),
    bare="BambaModel",
    modules=(
        EMBEDDING,
        norm("input_layernorm", "attn_norm"),
        *(replace(module, only="attention") for module in attention("attention_bias")),
        *mamba2("mamba", proj_bias="mamba_proj_bias", conv_bias="mamba_conv_bias", out_bias="mamba_proj_bias"),
        norm("pre_ff_layernorm", "ffn_norm"),
        *(Module(f"{L}feed_forward.{x}_proj", (f"{L}ffn_{x}",), bias="mlp_bias") for x in ("gate", "up", "down")),
        Module("final_layernorm", ("output_norm",)),
    ),
    keys={
        **COMMON,
        "vocab_size": 128000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "attention_bias": False,
        "mlp_bias": False,
        "attn_layer_indices": None,
        "attn_rotary_emb": None,
        **MAMBA2_KEYS,
    },
    fixed={"partial_rotary_factor": 0.5},
    harmless=("num_logits_to_keep", "mamba_chunk_size", "z_loss_coefficient"),
    state_norm="after_gate",
    odd_rope=True,
)
