"""What llama.cpp's converter makes of Falcon, GPT-BigCode, BLOOM and MPT. See gguf_samples."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Config = dict[str, Any]
Keys = dict[str, Any]

CLASSIC = {"falcon": "falcon", "gpt_bigcode": "starcoder", "bloom": "bloom", "mpt": "mpt"}
# The norm of Falcon 40B's network has the name of the only norm of Falcon 7B.
CLASSIC_NAMES = {
    "word_embeddings": "token_embd",
    "ln_attn": "attn_norm_2",
    "ln_mlp": "attn_norm",
    "self_attention.query_key_value": "attn_qkv",
    "self_attention.dense": "attn_output",
    "word_embeddings_layernorm": "token_embd_norm",
    "norm_1": "attn_norm",
    "norm_2": "ffn_norm",
    "norm_f": "output_norm",
    "attn.Wqkv": "attn_qkv",
    "attn.out_proj": "attn_output",
    "ffn.up_proj": "ffn_up",
    "ffn.down_proj": "ffn_down",
}


def kv_heads(config: Config) -> int:
    """The number of KV heads, which config.json states in several ways."""
    if config["model_type"] == "gpt_bigcode":
        return 1
    if config["model_type"] in ("bloom", "mpt"):
        return int(config.get("num_attention_heads") or config["n_heads"])
    shares_one = config.get("multi_query", True) and not config.get("new_decoder_architecture")
    return 1 if shares_one else int(config.get("num_kv_heads") or config["num_attention_heads"])


def classic_keys(config: Config) -> Keys:
    """The keys of the architecture. The converter writes neither RoPE's base nor its width."""
    names = ("n_positions", "n_embd", "n_layer", "n_head")
    if config["model_type"] == "falcon":
        names = ("max_position_embeddings", "hidden_size", "num_hidden_layers", "num_attention_heads")
    if config["model_type"] == "bloom":
        names = ("seq_length", "hidden_size", "num_hidden_layers", "num_attention_heads")
    if config["model_type"] == "mpt":
        names = ("max_seq_len", "d_model", "n_layers", "n_heads")
    context, dim, layers, heads = (config[name] for name in names)
    of_mpt = {"attention.max_alibi_bias": 8.0} if config["model_type"] == "mpt" else {}
    return {
        **of_mpt,
        "context_length": context,
        "embedding_length": dim,
        "block_count": layers,
        "feed_forward_length": config.get("n_inner") or 4 * dim,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads(config),
        "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
        "vocab_size": config["vocab_size"],
    }


def ungrouped(config: Config, rows: Array) -> Array:
    """Falcon's rows of q, k and v, which are stored KV head by KV head: those of q first."""
    count, heads = kv_heads(config), config["num_attention_heads"]
    width = config["hidden_size"] // heads
    grouped = rows.reshape(count, heads // count + 2, width, *rows.shape[1:])
    parts = (grouped[:, :-2], grouped[:, -2], grouped[:, -1])
    return np.concatenate([part.reshape(-1, *rows.shape[1:]) for part in parts])
