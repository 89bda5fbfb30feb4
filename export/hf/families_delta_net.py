"""Rows of the table of families: decoders in which most layers have a gated delta net in place of attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llamac.export.hf.families_experts import EXPERTS, FUSED_EXPERTS, SHARED_EXPERT
from llamac.export.hf.families_gated import GEMMA3
from llamac.export.hf.family import Family, Module
from llamac.export.hf.family_parts import COMMON, EMBEDDING, L, attention, mlp, norm, pre, qk_norms, without

# The first product of attention has the rows of q and of the gate.
_ATTENTION = (
    Module(f"{L}self_attn.q_proj", (f"{L}attn_q", f"{L}attn_gate"), interleaved="heads"),
    *(Module(f"{L}self_attn.{x}_proj", (f"{L}attn_{x}",)) for x in "kv"),
    Module(f"{L}self_attn.o_proj", (f"{L}attn_out",)),
)
_GATED_ATTENTION = (
    *(replace(module, bias="attention_bias", only="attention") for module in _ATTENTION),
    *(norm(f"self_attn.{x}_norm", f"attn_{x}_norm", plus_one=True, only="attention") for x in "qk"),
)


def _delta_net(*products: Module) -> tuple[Module, ...]:
    """A gated delta net, whose first products the families arrange differently."""
    others = (
        Module(f"{L}linear_attn.conv1d", (f"{L}delta_conv",), taps=True),
        Module(f"{L}linear_attn.A_log", (f"{L}delta_decay",), log=True, parameter=True),
        Module(f"{L}linear_attn.dt_bias", (f"{L}delta_dt",), bias="only", parameter=True),
        Module(f"{L}linear_attn.norm", (f"{L}delta_norm",)),
        Module(f"{L}linear_attn.out_proj", (f"{L}delta_out",)),
    )
    return tuple(replace(module, only="delta_net") for module in (*products, *others))


_TOGETHER = _delta_net(
    Module(f"{L}linear_attn.in_proj_qkvz", (f"{L}delta_qkv", f"{L}delta_z"), interleaved="qkvz"),
    Module(f"{L}linear_attn.in_proj_ba", (f"{L}delta_beta", f"{L}delta_a"), interleaved="ba"),
)
_SEPARATE = _delta_net(
    *(
        Module(f"{L}linear_attn.in_proj_{name}", (f"{L}delta_{part}",))
        for name, part in (("qkv", "qkv"), ("z", "z"), ("b", "beta"), ("a", "a"))
    )
)
_KEYS: dict[str, Any] = {
    **without(COMMON, "hidden_act"),
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
    "attention_bias": False,
    "layer_types": None,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_FIXED = {"hidden_act": "silu", "attn_output_gate": True, "output_gate_type": "swish"}
_MTP = (
    Module("mtp.pre_fc_norm_embedding", ("mtp.embedding_norm",), plus_one=True),
    Module("mtp.pre_fc_norm_hidden", ("mtp.hidden_norm",), plus_one=True),
    Module("mtp.fc", ("mtp.in",)),
    Module("mtp.norm", ("mtp.output_norm",), plus_one=True),
)

QWEN3_NEXT = Family(
    model_type="qwen3_next",
    architectures=("Qwen3NextForCausalLM",),
    bare="Qwen3NextModel",
    modules=pre((*_GATED_ATTENTION, *_TOGETHER), (*mlp(only="dense"), *EXPERTS, *SHARED_EXPERT), plus_one=True),
    keys={
        **_KEYS,
        "num_key_value_heads": 2,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
    },
    fixed={**_FIXED, "use_sliding_window": False},
    output_gate=True,
    qk_norm="head",
    ffn="experts",
    ignored=GEMMA3.ignored,
    fused=FUSED_EXPERTS,
    mtp=_MTP,
    odd_rope=True,
)

QWEN3_5_TEXT = Family(
    model_type="qwen3_5_text",
    architectures=("Qwen3_5ForCausalLM",),
    bare="Qwen3_5TextModel",
    modules=pre((*_GATED_ATTENTION, *_SEPARATE), mlp(), plus_one=True),
    keys={**_KEYS, "num_key_value_heads": 4},
    fixed=_FIXED,
    harmless=(
        *("mamba_ssm_dtype", "mlp_only_layers"),
        *("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "unsloth_fixed_mtp"),
    ),
    output_gate=True,
    qk_norm="head",
    rope_harmless=("mrope_section", "mrope_interleaved"),  # all three positions of a token of text are equal
    ignored=(*QWEN3_NEXT.ignored, r"visual\..*"),
    renamed=GEMMA3.renamed,
    mtp=_MTP,
    mtp_key="mtp_num_hidden_layers",
    odd_rope=True,
)

QWEN3_5_MOE_TEXT = replace(
    QWEN3_5_TEXT,
    model_type="qwen3_5_moe_text",
    architectures=("Qwen3_5MoeForCausalLM",),
    bare="Qwen3_5MoeTextModel",
    modules=pre((*_GATED_ATTENTION, *_SEPARATE), (*EXPERTS, *SHARED_EXPERT), plus_one=True),
    keys={
        **_KEYS,
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    fixed={**_FIXED, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    harmless=(*QWEN3_5_TEXT.harmless, "intermediate_size"),
    ffn="experts",
    fused=FUSED_EXPERTS,
)

# Models with images: the language model, which text_config describes, is read.
QWEN3_5 = replace(
    QWEN3_5_TEXT,
    model_type="qwen3_5",
    architectures=("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"),
    bare="Qwen3_5Model",
    written_as="qwen3_5_text",
)
QWEN3_5_MOE = replace(
    QWEN3_5_MOE_TEXT,
    model_type="qwen3_5_moe",
    architectures=("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"),
    bare="Qwen3_5MoeModel",
    written_as="qwen3_5_moe_text",
)

# Layers with a delta net have norms before it and the network, those with attention have OLMo 2's after both.
_OLMO_DELTA_NET = (
    Module(f"{L}linear_attn.{{h}}_proj", (f"{L}delta_qkv",), pieces=("q", "k", "v")),
    Module(f"{L}linear_attn.{{h}}_conv1d", (f"{L}delta_conv",), pieces=("q", "k", "v"), taps=True),
    *(
        Module(f"{L}linear_attn.{name}_proj", (f"{L}delta_{part}",))
        for name, part in (("g", "z"), ("b", "beta"), ("a", "a"), ("o", "out"))
    ),
    Module(f"{L}linear_attn.A_log", (f"{L}delta_decay",), log=True, parameter=True),
    Module(f"{L}linear_attn.dt_bias", (f"{L}delta_dt",), bias="only", parameter=True),
    Module(f"{L}linear_attn.o_norm", (f"{L}delta_norm",)),
    norm("attention_layer_norm", "attn_norm"),
    norm("feedforward_layer_norm", "ffn_norm"),
)
_OLMO_ATTENTION = (
    *attention("attention_bias"),
    *qk_norms(),
    norm("feedforward_layer_norm", "attn_post_norm"),
    norm("post_feedforward_layernorm", "ffn_post_norm"),
)
OLMO_HYBRID = Family(
    model_type="olmo_hybrid",
    architectures=("OlmoHybridForCausalLM",),
    bare="OlmoHybridModel",
    modules=(
        EMBEDDING,
        *(replace(module, only="delta_net") for module in _OLMO_DELTA_NET),
        *(replace(module, only="attention") for module in _OLMO_ATTENTION),
        *mlp(),
        Module("norm", ("output_norm",)),
    ),
    keys={
        **without(COMMON, "head_dim", "hidden_act"),
        "vocab_size": 100352,
        "hidden_size": 3840,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 30,
        "max_position_embeddings": 65536,
        "rope_theta": None,
        "attention_bias": False,
        "layer_types": None,
        **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads")),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim")),
        "linear_conv_kernel_dim": 4,
        "linear_allow_neg_eigval": True,
    },
    fixed={"hidden_act": "silu", "linear_use_gate": True},
    # of the initial weights
    harmless=(
        *("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor"),
        "mlp_bias",
    ),
    placement="post",
    delta_net_placement="pre",
    qk_norm="whole",
    optional_rope=True,
    split=((r"(layers\.\d+\.linear_attn)\.conv1d\.weight", tuple(f"{x}_conv1d.weight" for x in "qkv")),),
    renamed=(
        (r"\.input_layernorm\.", ".attention_layer_norm."),
        (r"\.post_attention_layernorm\.", ".feedforward_layer_norm."),
    ),
)
