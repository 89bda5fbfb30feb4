"""The model families as Hugging Face stores them: one row each in one table, FAMILIES.

A row says which config keys a family has, what its graph is (docs/format.md), and its tensors: their names here and
there, and their layout. It is plain data, which `config` and `model` use to read and `write` uses to write.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llamac.export.hf.family import Family, Module

# The output matrix. It has the same name in every family, without the prefix, and is missing if it is tied.
HEAD = Module("lm_head", ("output",))
EMBEDDING = Module("embed_tokens", ("token_embedding",))
L = "layers.{l}."


# ---- pieces of rows: modules


def _norm(name: str, *parts: str, **options: Any) -> Module:
    return Module(L + name, tuple(L + part for part in parts), **options)


def _attention(bias: str = "never", out_bias: str | None = None) -> tuple[Module, ...]:
    biases = {"q": bias, "k": bias, "v": bias, "o": bias if out_bias is None else out_bias}
    names = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_out"}
    return tuple(Module(f"{L}self_attn.{x}_proj", (L + names[x],), bias=biases[x]) for x in "qkvo")


def _mlp(bias: str = "never", only: str = "") -> tuple[Module, ...]:
    return tuple(Module(f"{L}mlp.{x}_proj", (f"{L}ffn_{x}",), bias=bias, only=only) for x in ("gate", "up", "down"))


def _experts(router: str, expert: str, names: tuple[str, str, str]) -> tuple[Module, ...]:
    """The router and the three matrices of each expert."""
    parts = [f"{L}experts.{{e}}.ffn_{part}" for part in ("gate", "up", "down")]
    matrices = [Module(f"{L}{expert}.{name}", (part,), only="experts") for name, part in zip(names, parts, strict=True)]
    return (Module(L + router, (f"{L}ffn_router",), only="experts"), *matrices)


def _qk_norms(name: str = "self_attn.{}_norm", **options: Any) -> tuple[Module, ...]:
    return tuple(_norm(name.replace("{}", x), f"attn_{x}_norm", only="qk_norm", **options) for x in "qk")


def _pre(attention: tuple[Module, ...], ffn: tuple[Module, ...], **norm: Any) -> tuple[Module, ...]:
    """The usual decoder, named as LLaMA's modules are."""
    return (
        EMBEDDING,
        _norm("input_layernorm", "attn_norm", **norm),
        *attention,
        _norm("post_attention_layernorm", "ffn_norm", **norm),
        *ffn,
        Module("norm", ("output_norm",), **norm),
    )


def _sandwich(attention: tuple[Module, ...], ffn: tuple[Module, ...], **norm: Any) -> tuple[Module, ...]:
    """Gemma 2's decoder."""
    return (
        EMBEDDING,
        _norm("input_layernorm", "attn_norm", **norm),
        *attention,
        _norm("post_attention_layernorm", "attn_post_norm", **norm),
        _norm("pre_feedforward_layernorm", "ffn_norm", **norm),
        *ffn,
        _norm("post_feedforward_layernorm", "ffn_post_norm", **norm),
        Module("norm", ("output_norm",), **norm),
    )


# ---- pieces of rows: config keys with the defaults of transformers

# None: one KV head per head; hidden_size / heads.
_COMMON: dict[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
_QWEN_WINDOW: dict[str, Any] = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_GEMMA: dict[str, Any] = {
    **_COMMON,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "attention_bias": False,
}


def _without(keys: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in keys.items() if name not in names}


# ---- the rows

LLAMA = Family(
    model_type="llama",
    architectures=("LlamaForCausalLM", "LLaMAForCausalLM"),  # the second: early conversions
    bare="LlamaModel",
    modules=_pre(_attention("attention_bias"), _mlp("mlp_bias")),
    keys={**_COMMON, "attention_bias": False, "mlp_bias": False},
)

MISTRAL = Family(
    model_type="mistral",
    architectures=("MistralForCausalLM",),
    bare="MistralModel",
    modules=_pre(_attention(), _mlp()),
    keys={**_COMMON, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
)

# Mistral with a kind of attention per layer.
MINISTRAL = replace(
    MISTRAL,
    model_type="ministral",
    architectures=("MinistralForCausalLM",),
    bare="MinistralModel",
    keys={**MISTRAL.keys, "layer_types": None},
)

QWEN2 = Family(
    model_type="qwen2",
    architectures=("Qwen2ForCausalLM",),
    bare="Qwen2Model",
    modules=_pre(_attention("always", out_bias="never"), _mlp()),
    keys={
        **_COMMON,
        **_QWEN_WINDOW,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "layer_types": None,
    },
    windows="late",
)

QWEN3 = Family(
    model_type="qwen3",
    architectures=("Qwen3ForCausalLM",),
    bare="Qwen3Model",
    modules=_pre((*_attention("attention_bias"), *_qk_norms()), _mlp()),
    keys={**QWEN2.keys, "head_dim": 128, "attention_bias": False},
    windows="late",
    qk_norm="head",
)

SMOLLM3 = Family(
    model_type="smollm3",
    architectures=("SmolLM3ForCausalLM",),
    bare="SmolLM3Model",
    modules=LLAMA.modules,
    keys={
        **LLAMA.keys,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "rope_theta": 2000000.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": None,  # stored, but has no effect
        "layer_types": None,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
    },
    windows="unrotated",
)

GRANITE = Family(
    model_type="granite",
    architectures=("GraniteForCausalLM",),
    bare="GraniteModel",
    modules=LLAMA.modules,
    keys={
        **LLAMA.keys,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
    },
)

# No norm has weights. The canonical form has ones and zeros instead.
OLMO = Family(
    model_type="olmo",
    architectures=("OlmoForCausalLM",),
    bare="OlmoModel",
    modules=(EMBEDDING, *_attention("attention_bias"), *_mlp()),
    keys={**_without(_COMMON, "rms_norm_eps"), "attention_bias": False},
    fixed={"clip_qkv": None, "layer_norm_eps": 1e-5},
    norm="layer",
    plain_norms=(L + "attn_norm", L + "ffn_norm", "output_norm"),
)

OLMO2 = Family(
    model_type="olmo2",
    architectures=("Olmo2ForCausalLM",),
    bare="Olmo2Model",
    modules=(
        EMBEDDING,
        *_attention("attention_bias"),
        *_qk_norms(),
        _norm("post_attention_layernorm", "attn_post_norm"),
        *_mlp(),
        _norm("post_feedforward_layernorm", "ffn_post_norm"),
        Module("norm", ("output_norm",)),
    ),
    keys={**_COMMON, "rms_norm_eps": 1e-5, "attention_bias": False},
    placement="post",
    qk_norm="whole",
)

STABLELM = Family(
    model_type="stablelm",
    architectures=("StableLmForCausalLM",),
    bare="StableLmModel",
    modules=(
        EMBEDDING,
        _norm("input_layernorm", "attn_norm", bias="always", only="sequential"),
        _norm("input_layernorm", "attn_norm", "ffn_norm", bias="always", only="parallel", shared=True),
        *_attention("use_qkv_bias", out_bias="never"),
        *_qk_norms("self_attn.{}_layernorm.norms.{h}"),
        _norm("post_attention_layernorm", "ffn_norm", bias="always", only="sequential"),
        *_mlp(),
        Module("norm", ("output_norm",), bias="always"),
    ),
    keys={
        **_without(_COMMON, "rms_norm_eps", "head_dim"),
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
        "layer_norm_eps": 1e-5,
        "partial_rotary_factor": 0.25,
        "use_qkv_bias": False,
        "qk_layernorm": False,
        "use_parallel_residual": False,
    },
    fixed={"rotary_scaling_factor": 1},  # an attribute of the first version's class
    norm="layer",
    qk_norm="layer_head",
)

GEMMA = Family(
    model_type="gemma",
    architectures=("GemmaForCausalLM",),
    bare="GemmaModel",
    modules=_pre(_attention("attention_bias"), _mlp(), plus_one=True),
    keys={**_GEMMA, "num_key_value_heads": 16},
    fixed={"use_bidirectional_attention": False},
    scaled_embedding=True,
)

GEMMA2 = Family(
    model_type="gemma2",
    architectures=("Gemma2ForCausalLM",),
    bare="Gemma2Model",
    modules=_sandwich(_attention("attention_bias"), _mlp(), plus_one=True),
    keys={
        **_GEMMA,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_size": None,  # another name, in some checkpoints
        "layer_types": None,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    fixed={"use_bidirectional_attention": False},
    placement="sandwich",
    windows="alternate",
    scaled_embedding=True,
    activation="hidden_activation",
)

GEMMA3_TEXT = Family(
    model_type="gemma3_text",
    architectures=("Gemma3ForCausalLM",),
    bare="Gemma3TextModel",
    modules=_sandwich(
        (*_attention("attention_bias"), *_qk_norms(plus_one=True)),
        _mlp(),
        plus_one=True,
    ),
    keys={
        **_GEMMA,
        # missing in text_config of the larger models
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "_sliding_window_pattern": None,  # the name in newer versions
        "layer_types": None,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,  # stored, but transformers does not apply it
    },
    fixed={"use_bidirectional_attention": False},
    placement="sandwich",
    qk_norm="head",
    windows="pattern",
    scaled_embedding=True,
    activation="hidden_activation",
)

# Multimodal models: the language model, which text_config describes, is read.
GEMMA3 = replace(
    GEMMA3_TEXT,
    model_type="gemma3",
    architectures=("Gemma3ForConditionalGeneration",),
    bare="Gemma3Model",
    ignored=(*GEMMA3_TEXT.ignored, r"(vision_tower|multi_modal_projector)\..*"),
    renamed=((r"^language_model\.(model\.|lm_head\.)", r"\1"), (r"^(model\.)?language_model\.", "model.")),
    written_as="gemma3_text",
)

PHI3 = Family(
    model_type="phi3",
    architectures=("Phi3ForCausalLM",),
    bare="Phi3Model",
    modules=_pre(
        (
            Module(f"{L}self_attn.qkv_proj", (f"{L}attn_q", f"{L}attn_k", f"{L}attn_v")),
            Module(f"{L}self_attn.o_proj", (f"{L}attn_out",)),
        ),
        (
            Module(f"{L}mlp.gate_up_proj", (f"{L}ffn_gate", f"{L}ffn_up")),
            Module(f"{L}mlp.down_proj", (f"{L}ffn_down",)),
        ),
    ),
    keys={
        **_COMMON,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 1.0,
        "sliding_window": None,
    },
    fixed={
        "attention_bias": False,
        "mlp_bias": False,
        "lm_head_bias": False,
        "full_attn_mod": 1,
        "interpolate_factor": 1,
    },
    rope_names={"su": "longrope", "yarn": "longrope"},
    odd_rope=True,
)

GPT_NEOX = Family(
    model_type="gpt_neox",
    architectures=("GPTNeoXForCausalLM",),
    bare="GPTNeoXModel",
    prefix="gpt_neox.",
    modules=(
        Module("embed_in", ("token_embedding",)),
        _norm("input_layernorm", "attn_norm", bias="always"),
        Module(
            f"{L}attention.query_key_value",
            (f"{L}attn_q", f"{L}attn_k", f"{L}attn_v"),
            by_head=True,
            bias="attention_bias",
        ),
        Module(f"{L}attention.dense", (f"{L}attn_out",), bias="attention_bias"),
        _norm("post_attention_layernorm", "ffn_norm", bias="always"),
        Module(f"{L}mlp.dense_h_to_4h", (f"{L}ffn_up",), bias="always"),
        Module(f"{L}mlp.dense_4h_to_h", (f"{L}ffn_down",), bias="always"),
        Module("final_layer_norm", ("output_norm",), bias="always"),
    ),
    keys={
        "max_position_embeddings": 2048,
        "layer_norm_eps": 1e-5,
        "hidden_act": "gelu",
        "tie_word_embeddings": False,
        "rotary_emb_base": 10000.0,
        "rope_theta": None,  # the name in some versions
        "rotary_pct": 0.25,
        "partial_rotary_factor": None,  # the name in some versions
        "attention_bias": True,
        "use_parallel_residual": True,
    },
    norm="layer",
    ffn="plain",
    ignored=(*LLAMA.ignored, r"layers\.\d+\.attention\.(bias|masked_bias)"),
    renamed=((r"^embed_out\.", "lm_head."),),
    head="embed_out",
    odd_rope=True,
)

MIXTRAL = Family(
    model_type="mixtral",
    architectures=("MixtralForCausalLM",),
    bare="MixtralModel",
    modules=_pre(_attention(), _experts("block_sparse_moe.gate", "block_sparse_moe.experts.{e}", ("w1", "w3", "w2"))),
    keys={
        **_COMMON,
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

_FUSED = (
    (r"(layers\.\d+\.mlp\.experts)\.gate_up_proj", ("gate_proj", "up_proj")),
    (r"(layers\.\d+\.mlp\.experts)\.down_proj", ("down_proj",)),
)
_EXPERTS = _experts("mlp.gate", "mlp.experts.{e}", ("gate_proj", "up_proj", "down_proj"))

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    bare="Qwen3MoeModel",
    modules=_pre((*_attention("attention_bias"), *_qk_norms()), (*_mlp(only="dense"), *_EXPERTS)),
    keys={
        **_COMMON,
        **_QWEN_WINDOW,
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
    qk_norm="head",
    ffn="experts",
    fused=_FUSED,
)

OLMOE = Family(
    model_type="olmoe",
    architectures=("OlmoeForCausalLM",),
    bare="OlmoeModel",
    modules=_pre((*_attention("attention_bias"), *_qk_norms()), _EXPERTS),
    keys={
        **_without(_COMMON, "head_dim"),
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
    fused=_FUSED,
)

GPT2 = Family(
    model_type="gpt2",
    architectures=("GPT2LMHeadModel",),
    bare="GPT2Model",
    prefix="transformer.",
    modules=(
        Module("wte", ("token_embedding",)),
        Module("wpe", ("position_embedding",)),
        Module("h.{l}.ln_1", ("layers.{l}.attn_norm",), bias="always"),
        Module(
            "h.{l}.attn.c_attn",
            ("layers.{l}.attn_q", "layers.{l}.attn_k", "layers.{l}.attn_v"),
            transposed=True,
            bias="always",
        ),
        Module("h.{l}.attn.c_proj", ("layers.{l}.attn_out",), transposed=True, bias="always"),
        Module("h.{l}.ln_2", ("layers.{l}.ffn_norm",), bias="always"),
        Module("h.{l}.mlp.c_fc", ("layers.{l}.ffn_up",), transposed=True, bias="always"),
        Module("h.{l}.mlp.c_proj", ("layers.{l}.ffn_down",), transposed=True, bias="always"),
        Module("ln_f", ("output_norm",), bias="always"),
    ),
    keys={
        "n_inner": None,  # four times n_embd
        "n_ctx": None,
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
        "scale_attn_weights": True,
    },
    norm="layer",
    ffn="plain",
    activation="activation_function",
    ignored=(r"h\.\d+\.attn\.(bias|masked_bias)",),
)

_ROWS = (
    *(LLAMA, GPT2, MISTRAL, MINISTRAL, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3_TEXT, GEMMA3, PHI3, SMOLLM3, GRANITE, OLMO),
    *(OLMO2, STABLELM, GPT_NEOX, MIXTRAL, QWEN3_MOE, OLMOE),
)
FAMILIES = {family.model_type: family for family in _ROWS}

# transformers' names of the engine's activations. The first of several names is the one to write.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu_erf",
    "gelu_python": "gelu_erf",
    "relu": "relu",
    "quick_gelu": "quick_gelu",
}
