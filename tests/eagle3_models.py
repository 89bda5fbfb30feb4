"""Tiny EAGLE-3 heads as published directories, and what they compute in float64 (EAGLE, eagle/model/cnets.py).

Shapes: n rows; dim and trunk_dim are the widths of the head and of the model that it drafts for.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from golden.tiny_checkpoints import Config, random_tensor
from llamac.export.rounding import Array

Stored = dict[str, NDArray[Any]]
TRUNK_DIM, VOCAB, DRAFTED = 48, 301, 97

CONFIG: Config = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 70,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 1,
    "rms_norm_eps": 2**-16,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "vocab_size": VOCAB,
    "draft_vocab_size": DRAFTED,
    "tie_word_embeddings": False,
}


def head_tensors(config: Config, *, embedding: bool = False) -> Stored:
    """Random tensors of a head. Its ids are every third one, from 2 on."""
    dim, ffn = config["hidden_size"], config["intermediate_size"]
    trunk_dim = config.get("target_hidden_size", TRUNK_DIM)
    q_dim, kv_dim = (config["head_dim"] * config[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
    shapes: dict[str, tuple[int, ...]] = {
        "midlayer.self_attn.q_proj.weight": (q_dim, 2 * dim),
        "midlayer.self_attn.k_proj.weight": (kv_dim, 2 * dim),
        "midlayer.self_attn.v_proj.weight": (kv_dim, 2 * dim),
        "midlayer.self_attn.o_proj.weight": (dim, q_dim),
        "midlayer.mlp.gate_proj.weight": (ffn, dim),
        "midlayer.mlp.up_proj.weight": (ffn, dim),
        "midlayer.mlp.down_proj.weight": (dim, ffn),
        "midlayer.hidden_norm.weight": (dim,),
        "midlayer.input_layernorm.weight": (dim,),
        "midlayer.post_attention_layernorm.weight": (dim,),
        "norm.weight": (dim,),
        "fc.weight": (dim, 3 * trunk_dim),
        "lm_head.weight": (config["draft_vocab_size"], dim),
        **({"embed_tokens.weight": (config["vocab_size"], dim)} if embedding else {}),
    }
    tensors: Stored = {name: random_tensor(name, shape) for name, shape in shapes.items()}
    rows = np.arange(config["draft_vocab_size"])
    tensors["d2t"] = (2 + 2 * rows).astype(np.int64)
    tensors["t2d"] = np.isin(np.arange(config["vocab_size"]), rows + tensors["d2t"])
    return tensors


def write_head(folder: Path, config: Config, tensors: Stored) -> Path:
    """Write the directory of a head."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    kinds = {"float32": "F32", "int64": "I64", "bool": "BOOL"}
    header, end = {}, 0
    for name, values in tensors.items():
        offsets = [end, end := end + values.nbytes]
        header[name] = {"dtype": kinds[values.dtype.name], "shape": list(values.shape), "data_offsets": offsets}
    text, data = json.dumps(header).encode(), b"".join(values.tobytes() for values in tensors.values())
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return folder


def as_speculators(config: Config, tensors: Stored) -> tuple[Config, Stored]:
    """The same head in the layout of the library speculators."""
    own = ("draft_vocab_size", "target_hidden_size", "norm_before_residual", "eagle_aux_hidden_state_layer_ids")
    layer = {key: value for key, value in config.items() if key not in (*own, "architectures", "eagle_config")}
    outer = {key: config[key] for key in own if key in config}
    outer |= {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.1"}
    outer |= {"transformer_layer_config": layer, "tie_word_embeddings": False}
    return outer, {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}


def fused(tensors: Stored, states: Array) -> Array:
    """The input of the layer from the model's states, (n, 3 trunk_dim)."""
    found: Array = states @ tensors["fc.weight"].astype(np.float64).T
    return found


def _norm(x: Array, weight: NDArray[Any], eps: float) -> Array:
    found: Array = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight.astype(np.float64)
    return found


def _rotated(x: Array, theta: float) -> Array:
    """RoPE at positions 0, 1, ... of x (n, heads, d), with pairs in halves."""
    half = x.shape[2] // 2
    angles = np.arange(len(x))[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None, :], np.sin(angles)[:, None, :]
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=2)


def reference(
    config: Config, tensors: Stored, tokens: list[int], inputs: Array, embedding: Array
) -> tuple[Array, Array]:
    """The head's stream and logits at positions 0, 1, ...

    Args:
        config: Its config.json.
        tensors: Its tensors.
        tokens: The token after each position.
        inputs: (n, dim): `fused` states, or for a draft after a draft the stream of the position before.
        embedding: (vocab_size, dim), its own or the model's.

    Returns:
        (n, dim) and (n, vocab_size); tokens that it cannot draft have minus infinity.
    """
    eps, n, d = config["rms_norm_eps"], len(tokens), config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    layer = {name[9:-7]: t.astype(np.float64) for name, t in tensors.items() if name.startswith("midlayer.")}
    normed = _norm(inputs, layer["hidden_norm"], eps)
    both = np.hstack([_norm(embedding[tokens].astype(np.float64), layer["input_layernorm"], eps), normed])
    q, k, v = (
        (both @ layer[f"self_attn.{x}_proj"].T).reshape(n, count, d)
        for x, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    )
    q, k = _rotated(q, config["rope_theta"]), _rotated(k, config["rope_theta"])
    k, v = (np.repeat(x, heads // kv_heads, axis=1) for x in (k, v))
    scores = np.einsum("ihd,jhd->hij", q, k) / d**0.5
    scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    weights /= weights.sum(axis=2, keepdims=True)
    mixed = np.einsum("hij,jhd->ihd", weights, v).reshape(n, heads * d)
    stream = (normed if config.get("norm_before_residual") else inputs) + mixed @ layer["self_attn.o_proj"].T
    y = _norm(stream, layer["post_attention_layernorm"], eps)
    gate = y @ layer["mlp.gate_proj"].T
    stream = stream + (gate / (1 + np.exp(-gate)) * (y @ layer["mlp.up_proj"].T)) @ layer["mlp.down_proj"].T
    logits = np.full((n, config["vocab_size"]), -np.inf)
    ids = np.arange(config["draft_vocab_size"]) + tensors["d2t"]
    logits[:, ids] = _norm(stream, tensors["norm.weight"], eps) @ tensors["lm_head.weight"].astype(np.float64).T
    return stream, logits
