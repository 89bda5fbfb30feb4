"""Tiny EAGLE-3 heads as published directories, and what they compute in float64.

The definitions are those of EAGLE (eagle/model/cnets.py) and of the library speculators (models/eagle3/core.py).

Shapes: n rows; dim and trunk_dim are the widths of the head and of the model that it drafts for.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from golden.tiny_checkpoints import Config, changed, random_tensor
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
OTHER = changed(CONFIG, hidden_size=36, target_hidden_size=48, norm_before_residual=True)  # needs its own embedding
# As speculators trains heads by default: norms of the states and of what is recycled, and a window.
WINDOWED = changed(
    CONFIG,
    norm_before_fc=True,
    norm_before_residual=True,
    norm_output=True,
    layer_types=["sliding_attention"],
    sliding_window=11,
    use_sliding_window=True,
)
DEEP = changed(
    OTHER,
    num_hidden_layers=3,
    fc_norm=True,
    norm_output=True,
    layer_types=["full_attention", "sliding_attention", "full_attention"],
    sliding_window=7,
)
QWEN3 = changed(CONFIG, model_type="qwen3", architectures=["Eagle3Qwen3ForCausalLM"], norm_before_fc=True)


def layer_name(config: Config, layer: int) -> str:
    """The prefix of a layer's tensors in the layout of EAGLE."""
    return f"midlayer.{layer}." if config["num_hidden_layers"] > 1 else "midlayer."


def head_tensors(config: Config, *, embedding: bool = False) -> Stored:
    """Random tensors of a head. Its ids are every third one, from 2 on."""
    dim, ffn = config["hidden_size"], config["intermediate_size"]
    trunk_dim = config.get("target_hidden_size", TRUNK_DIM)
    q_dim, kv_dim = (config["head_dim"] * config[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
    shapes: dict[str, tuple[int, ...]] = {
        "norm.weight": (dim,),
        "fc.weight": (dim, 3 * trunk_dim),
        "lm_head.weight": (config["draft_vocab_size"], dim),
        **({"embed_tokens.weight": (config["vocab_size"], dim)} if embedding else {}),
        **({"input_norm.weight": (3 * trunk_dim,)} if config.get("norm_before_fc") else {}),
        **({f"fc_norm.{i}.weight": (trunk_dim,) for i in range(3)} if config.get("fc_norm") else {}),
    }
    for layer in range(config["num_hidden_layers"]):
        inputs = dim if layer else 2 * dim
        of_layer: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj.weight": (q_dim, inputs),
            "self_attn.k_proj.weight": (kv_dim, inputs),
            "self_attn.v_proj.weight": (kv_dim, inputs),
            "self_attn.o_proj.weight": (dim, q_dim),
            "mlp.gate_proj.weight": (ffn, dim),
            "mlp.up_proj.weight": (ffn, dim),
            "mlp.down_proj.weight": (dim, ffn),
            "input_layernorm.weight": (dim,),
            "post_attention_layernorm.weight": (dim,),
            **({} if layer else {"hidden_norm.weight": (dim,)}),
        }
        if config["model_type"] == "qwen3":
            of_layer |= {f"self_attn.{x}_norm.weight": (config["head_dim"],) for x in "qk"}
        shapes |= {layer_name(config, layer) + name: shape for name, shape in of_layer.items()}
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
    own = (
        *("draft_vocab_size", "target_hidden_size", "norm_before_residual", "eagle_aux_hidden_state_layer_ids"),
        *("norm_before_fc", "fc_norm", "norm_output"),
    )
    layer = {key: value for key, value in config.items() if key not in (*own, "architectures", "eagle_config")}
    outer = {key: config[key] for key in own if key in config}
    outer |= {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.1"}
    outer |= {"transformer_layer_config": layer, "tie_word_embeddings": False}
    first = "layers." if config["num_hidden_layers"] > 1 else "layers.0."
    return outer, {name.replace("midlayer.", first): tensor for name, tensor in tensors.items()}


def fused(config: Config, tensors: Stored, states: Array) -> Array:
    """The input of the first layer from the model's states, (n, 3 trunk_dim)."""
    eps = config["rms_norm_eps"]
    if config.get("norm_before_fc"):
        states = _norm(states, tensors["input_norm.weight"], eps)
    if config.get("fc_norm"):
        each = np.split(states, 3, axis=1)
        states = np.hstack([_norm(state, tensors[f"fc_norm.{i}.weight"], eps) for i, state in enumerate(each)])
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


def _window(config: Config, layer: int) -> int:
    """The positions that a row of a layer sees, itself included; 0: all."""
    types = config.get("layer_types")
    return config["sliding_window"] if types and types[layer] == "sliding_attention" else 0


def _attention(config: Config, tensors: Stored, x: Array, window: int) -> Array:
    """Attention at positions 0, 1, ... of a layer whose tensors these are; x: its normed inputs."""
    n, d = len(x), config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    q, k, v = (
        (x @ tensors[f"self_attn.{name}_proj.weight"].T).reshape(n, count, d)
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    )
    if config["model_type"] == "qwen3":
        q, k = (
            _norm(vectors, tensors[f"self_attn.{name}_norm.weight"], config["rms_norm_eps"])
            for name, vectors in (("q", q), ("k", k))
        )
    q, k = _rotated(q, config["rope_theta"]), _rotated(k, config["rope_theta"])
    k, v = (np.repeat(x, heads // kv_heads, axis=1) for x in (k, v))
    scores = np.einsum("ihd,jhd->hij", q, k) / d**0.5
    sees = np.tri(n, dtype=bool) & ~np.tri(n, k=-window, dtype=bool) if window else np.tri(n, dtype=bool)
    scores = np.where(sees, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    weights /= weights.sum(axis=2, keepdims=True)
    mixed = np.einsum("hij,jhd->ihd", weights, v).reshape(n, heads * d)
    found: Array = mixed @ tensors["self_attn.o_proj.weight"].T
    return found


def reference(
    config: Config, tensors: Stored, tokens: list[int], inputs: Array, embedding: Array
) -> tuple[Array, Array]:
    """What a draft after a draft reads, and the logits, at positions 0, 1, ...

    Args:
        config: The head's config.json.
        tensors: Its tensors.
        tokens: The token after each position.
        inputs: (n, dim): `fused` states, or for a draft after a draft what it reads of the position before.
        embedding: (vocab_size, dim), its own or the model's.

    Returns:
        (n, dim), the stream or, with `norm_output`, the normed stream, and (n, vocab_size); tokens that the head cannot
        draft have minus infinity.
    """
    eps, stream = config["rms_norm_eps"], inputs
    for index in range(config["num_hidden_layers"]):
        prefix = layer_name(config, index)
        layer = {name[len(prefix) :]: t.astype(np.float64) for name, t in tensors.items() if name.startswith(prefix)}
        first_norm = layer["input_layernorm.weight"]
        if index:
            x = _norm(stream, first_norm, eps)
        else:
            normed = _norm(stream, layer["hidden_norm.weight"], eps)
            x = np.hstack([_norm(embedding[tokens].astype(np.float64), first_norm, eps), normed])
            stream = normed if config.get("norm_before_residual") else stream
        stream = stream + _attention(config, layer, x, _window(config, index))
        y = _norm(stream, layer["post_attention_layernorm.weight"], eps)
        gate = y @ layer["mlp.gate_proj.weight"].T
        hidden = gate / (1 + np.exp(-gate)) * (y @ layer["mlp.up_proj.weight"].T)
        stream = stream + hidden @ layer["mlp.down_proj.weight"].T
    output = _norm(stream, tensors["norm.weight"], eps)
    logits = np.full((len(tokens), config["vocab_size"]), -np.inf)
    ids = np.arange(config["draft_vocab_size"]) + tensors["d2t"]
    logits[:, ids] = output @ tensors["lm_head.weight"].astype(np.float64).T
    return output if config.get("norm_output") else stream, logits
