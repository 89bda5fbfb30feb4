"""What rows of the table of families share: modules named as in LLaMA, and config keys with their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llamac.export.hf.family import Module

# The output matrix. It has the same name in every family, without the prefix, and is missing if it is tied.
HEAD = Module("lm_head", ("output",))
EMBEDDING = Module("embed_tokens", ("token_embedding",))
L = "layers.{l}."


# ---- pieces of rows: modules


def norm(name: str, *parts: str, **options: Any) -> Module:
    return Module(L + name, tuple(L + part for part in parts), **options)


def attention(bias: str = "never", out_bias: str | None = None) -> tuple[Module, ...]:
    biases = {"q": bias, "k": bias, "v": bias, "o": bias if out_bias is None else out_bias}
    names = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_out"}
    return tuple(Module(f"{L}self_attn.{x}_proj", (L + names[x],), bias=biases[x]) for x in "qkvo")


def mlp(bias: str = "never", only: str = "") -> tuple[Module, ...]:
    return tuple(Module(f"{L}mlp.{x}_proj", (f"{L}ffn_{x}",), bias=bias, only=only) for x in ("gate", "up", "down"))


def experts(router: str, expert: str, names: tuple[str, str, str]) -> tuple[Module, ...]:
    """The router and the three matrices of each expert."""
    parts = [f"{L}experts.{{e}}.ffn_{part}" for part in ("gate", "up", "down")]
    matrices = [Module(f"{L}{expert}.{name}", (part,), only="experts") for name, part in zip(names, parts, strict=True)]
    return (Module(L + router, (f"{L}ffn_router",), only="experts"), *matrices)


def qk_norms(name: str = "self_attn.{}_norm", **options: Any) -> tuple[Module, ...]:
    return tuple(norm(name.replace("{}", x), f"attn_{x}_norm", only="qk_norm", **options) for x in "qk")


def pre(attention: tuple[Module, ...], ffn: tuple[Module, ...], **options: Any) -> tuple[Module, ...]:
    """The usual decoder, named as LLaMA's modules are."""
    return (
        EMBEDDING,
        norm("input_layernorm", "attn_norm", **options),
        *attention,
        norm("post_attention_layernorm", "ffn_norm", **options),
        *ffn,
        Module("norm", ("output_norm",), **options),
    )


def sandwich(attention: tuple[Module, ...], ffn: tuple[Module, ...], **options: Any) -> tuple[Module, ...]:
    """Gemma 2's decoder."""
    return (
        EMBEDDING,
        norm("input_layernorm", "attn_norm", **options),
        *attention,
        norm("post_attention_layernorm", "attn_post_norm", **options),
        norm("pre_feedforward_layernorm", "ffn_norm", **options),
        *ffn,
        norm("post_feedforward_layernorm", "ffn_post_norm", **options),
        Module("norm", ("output_norm",), **options),
    )


# ---- pieces of rows: config keys with the defaults of transformers

# None: one KV head per head; hidden_size / heads.
COMMON: dict[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
QWEN_WINDOW: dict[str, Any] = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
# Of Qwen with a context of a million tokens, and of Cohere's models with experts. transformers does not apply them;
# reading them gives a warning.
NOT_APPLIED = ("dual_chunk_attention_config",)
ROPE_NOT_APPLIED = ("rope_scaling",)
GEMMA_KEYS: dict[str, Any] = {
    **COMMON,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "attention_bias": False,
}


def without(keys: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in keys.items() if name not in names}
