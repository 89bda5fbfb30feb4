"""Tiny random checkpoints in Hugging Face's layout, determined by a config alone.

Weights are large: matrices and biases have a standard deviation of 0.5, norm weights are around 1. A missing weight,
bias or config key therefore changes logits much. Each tensor has its own random stream, seeded by its name, so two
configs that differ in one key share all other weights. NumPy guarantees the 53-bit uniform numbers of MT19937 for all
versions and machines; nothing else is used.
"""

from __future__ import annotations

import functools
import json
import math
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Config = dict[str, Any]
Tensors = dict[str, NDArray[np.float32]]
# Tensors that are the same in all checkpoints, of xIELU.
BUFFERS = {".act_fn.beta": 0.5, ".act_fn.eps": -1e-6}
KEPT_SIZE = 1 << 16  # of the largest tensor that is kept, in elements


def changed(config: Config, **changes: object) -> Config:
    """The config with changes; None removes a key."""
    return {key: value for key, value in {**config, **changes}.items() if value is not None}


def random_tensor(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Uniform numbers with standard deviation 0.5 and mean 0, or 1 for norm weights and scales of layers; BUFFERS."""
    return _kept(name, shape).copy() if math.prod(shape) <= KEPT_SIZE else _drawn(name, shape)


def _drawn(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    for buffer, value in BUFFERS.items():
        if name.endswith(buffer):
            return np.full(shape, value, np.float32)
    draw = np.random.RandomState(zlib.crc32(name.encode())).random_sample(shape)
    is_around_one = len(shape) == 1 and name.endswith((".weight", ".layer_scalar"))
    return ((draw - 0.5) * 3**0.5 + is_around_one).astype(np.float32)


# Cases that differ in one key follow each other, and share almost all tensors.
_kept = functools.lru_cache(maxsize=1024)(_drawn)


def llama_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Names and shapes of LlamaForCausalLM's tensors."""
    dim, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or dim // heads
    q_dim, kv_dim = heads * head_dim, config.get("num_key_value_heads", heads) * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, dim)}
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        shapes[f"{name}.input_layernorm.weight"] = shapes[f"{name}.post_attention_layernorm.weight"] = (dim,)
        attention = {"q": (q_dim, dim), "k": (kv_dim, dim), "v": (kv_dim, dim), "o": (dim, q_dim)}
        mlp = {"gate": (ffn, dim), "up": (ffn, dim), "down": (dim, ffn)}
        for part, matrices, key in (("self_attn", attention, "attention_bias"), ("mlp", mlp, "mlp_bias")):
            for matrix, shape in matrices.items():
                shapes[f"{name}.{part}.{matrix}_proj.weight"] = shape
                if config.get(key):
                    shapes[f"{name}.{part}.{matrix}_proj.bias"] = shape[:1]
    shapes["model.norm.weight"] = (dim,)
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocab, dim)
    return shapes


def gpt2_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Names and shapes of GPT2LMHeadModel's tensors; its matrices are (in, out)."""
    dim, vocab = config["n_embd"], config["vocab_size"]
    ffn = config.get("n_inner") or 4 * dim
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (vocab, dim),
        "transformer.wpe.weight": (config["n_positions"], dim),
    }
    for layer in range(config["n_layer"]):
        name = f"transformer.h.{layer}"
        for norm in (f"{name}.ln_1", f"{name}.ln_2"):
            shapes[f"{norm}.weight"] = shapes[f"{norm}.bias"] = (dim,)
        matrices = {
            "attn.c_attn": (dim, 3 * dim),
            "attn.c_proj": (dim, dim),
            "mlp.c_fc": (dim, ffn),
            "mlp.c_proj": (ffn, dim),
        }
        for matrix, shape in matrices.items():
            shapes[f"{name}.{matrix}.weight"], shapes[f"{name}.{matrix}.bias"] = shape, shape[1:]
    shapes["transformer.ln_f.weight"] = shapes["transformer.ln_f.bias"] = (dim,)
    if not config.get("tie_word_embeddings", True):
        shapes["lm_head.weight"] = (vocab, dim)
    return shapes


def tensors(config: Config) -> Tensors:
    """The weights of a checkpoint with this config, by Hugging Face's names."""
    shapes = {"llama": llama_shapes, "gpt2": gpt2_shapes}[config["model_type"]](config)
    return {name: random_tensor(name, shape) for name, shape in shapes.items()}


def write_safetensors(path: Path, tensors: Tensors) -> None:
    """Write a safetensors file of float32 tensors: 8 bytes of header length, JSON header, data."""
    header: dict[str, Any] = {}
    end = 0
    for name, values in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [end, end + values.nbytes]}
        end += values.nbytes
    text = json.dumps(header).encode()
    data = b"".join(values.astype("<f4").tobytes() for values in tensors.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_config(folder: Path, config: Config) -> None:
    """Write config.json to an existing folder."""
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def write_checkpoint(folder: Path, config: Config) -> Path:
    """Write a Hugging Face directory with config.json and model.safetensors; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, config)
    write_safetensors(folder / "model.safetensors", tensors(config))
    return folder
