"""GGUF files of tiny checkpoints, by the published conversion and the `gguf` package's writer: none of it our code."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from vocab_samples import SPM_PIECES

from golden.tiny_checkpoints import Config, Tensors

Array = NDArray[Any]
Type = gguf.GGMLQuantizationType
Keys = dict[str, Any]

NAMES = {
    "embed_tokens": "token_embd",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "norm": "output_norm",
    "lm_head": "output",
    "wte": "token_embd",
    "wpe": "position_embd",
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "ln_f": "output_norm",
}
PAIRED = ("llama", "smollm3")  # converters that put the halves that RoPE turns together side by side


def gguf_name(name: str) -> str:
    """llama.cpp's name of a tensor of transformers."""
    parts = name.removeprefix("model.").removeprefix("transformer.").split(".")
    kind = parts.pop()
    if parts[0] in ("layers", "h"):
        return f"blk.{parts[1]}.{NAMES['.'.join(parts[2:])]}.{kind}"
    return f"{NAMES['.'.join(parts)]}.{kind}"


def neighbours(rows: Array, heads: int) -> Array:
    """Rows (or biases) of q or k as convert_hf_to_gguf.py permutes them for llama.cpp's first kind of RoPE."""
    shape = rows.shape
    permuted: Array = rows.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
    return permuted


def converted(config: Config, tensors: Tensors) -> Tensors:
    """A checkpoint's tensors under llama.cpp's names, changed as the converter changes them."""
    found: Tensors = {}
    for name, values in tensors.items():
        if config["model_type"] in PAIRED and ".self_attn.q_proj." in name:
            values = neighbours(values, config["num_attention_heads"])
        if config["model_type"] in PAIRED and ".self_attn.k_proj." in name:
            values = neighbours(values, config.get("num_key_value_heads") or config["num_attention_heads"])
        if config["model_type"] == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            values = values.T
        found[gguf_name(name)] = np.ascontiguousarray(values)
    scaling = rope_scaling(config)
    if scaling.get("rope_type") == "llama3":
        found["rope_freqs.weight"] = llama3_factors(config, scaling)
    return found


def rope_scaling(config: Config) -> dict[str, Any]:
    """How positions are scaled, with the name of the kind under its new key."""
    scaling = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    return {"rope_type": scaling.pop("type", "default"), **scaling}


def llama3_factors(config: Config, scaling: Mapping[str, float]) -> NDArray[np.float32]:
    """What divides the frequencies of Llama 3.1 and its successors."""
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    factors = []
    for i in range(0, dim, 2):
        wave = 2 * math.pi * config["rope_theta"] ** (i / dim)
        if wave < original / high:
            factors.append(1.0)
        elif wave > original / low:
            factors.append(scaling["factor"])
        else:
            smooth = (original / wave - low) / (high - low)
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, np.float32)


def metadata(config: Config) -> tuple[str, Keys]:
    """(architecture, its keys without prefix) as the converter writes them."""
    kind = config["model_type"]
    if kind == "gpt2":
        return "gpt2", {
            "context_length": config["n_positions"],
            "embedding_length": config["n_embd"],
            "feed_forward_length": config.get("n_inner") or 4 * config["n_embd"],
            "block_count": config["n_layer"],
            "attention.head_count": config["n_head"],
            "attention.layer_norm_epsilon": config.get("layer_norm_epsilon", 1e-5),
        }
    dim, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or dim // heads
    keys: Keys = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": dim,
        "feed_forward_length": config["intermediate_size"],
        "block_count": config["num_hidden_layers"],
        "attention.head_count": heads,
        "attention.head_count_kv": config.get("num_key_value_heads", heads),
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps", 1e-6),
        "rope.freq_base": float(config.get("rope_theta", 10000.0)),
        "rope.dimension_count": head_dim,
        "vocab_size": config["vocab_size"],
    }
    if "head_dim" in config:
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    scaling = rope_scaling(config)
    if scaling.get("rope_type") in ("linear", "yarn"):
        keys |= {"rope.scaling.type": scaling["rope_type"], "rope.scaling.factor": float(scaling["factor"])}
    if scaling.get("rope_type") == "yarn":
        keys["rope.scaling.original_context_length"] = scaling["original_max_position_embeddings"]
        for beta in ("beta_fast", "beta_slow"):
            if scaling.get(beta) is not None:
                keys[f"rope.scaling.yarn_{beta}"] = float(scaling[beta])
        if scaling.get("attention_factor") is not None:  # llama.cpp multiplies by its own factor by itself
            own = 1 + 0.1 * math.log(scaling["factor"])
            keys["rope.scaling.attn_factor"] = scaling["attention_factor"] / own
    return kind, keys


def write_gguf(
    path: Path,
    config: Config,
    tensors: Tensors,
    *,
    kind: Any = Type.F32,
    changes: Mapping[str, Any] | None = None,
    more: Mapping[str, Any] | None = None,
    extra: Mapping[str, Array] | None = None,
    part_tensors: int = 0,
) -> Path:
    """A checkpoint as a GGUF file. kind: of the matrices. changes: other values of the architecture's keys, None: none.
    more: whole keys beside them. extra: more tensors. part_tensors: in each part of a split file. Returns `path`."""
    arch, keys = metadata(config)
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=part_tensors)
    prefixed = {f"{arch}.{key}": value for key, value in (keys | dict(changes or {})).items() if value is not None}
    for key, value in {"general.name": "tiny", **prefixed, **(more or {})}.items():
        add_key(writer, key, value)
    for name, values in (converted(config, tensors) | dict(extra or {})).items():
        chosen = kind if values.ndim > 1 else Type.F32
        raw = values if values.dtype == np.uint8 else gguf.quants.quantize(values, chosen)
        writer.add_tensor(name, raw, raw_dtype=None if chosen in (Type.F32, Type.F16) else chosen)
    finish(writer)
    return path


def write_tensors(
    path: Path,
    tensors: Mapping[str, Array],
    kinds: Mapping[str, Any] | None = None,
    keys: Mapping[str, Any] | None = None,
    arch: str = "llama",
) -> Path:
    """A GGUF file with these tensors and keys as they are. kinds: of those that are packed bytes. Returns `path`."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (keys or {}).items():
        add_key(writer, key, value)
    for name, values in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(values), raw_dtype=(kinds or {}).get(name))
    finish(writer)
    return path


def finish(writer: Any) -> None:
    """Writes all that a writer was told."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def spm_keys() -> Keys:
    """The metadata of a vocabulary of 266 pieces."""
    texts, scores, kinds = zip(*SPM_PIECES, strict=True)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(texts),
        "tokenizer.ggml.scores": list(scores),
        "tokenizer.ggml.token_type": list(kinds),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def add_key(writer: Any, key: str, value: Any) -> None:
    """Adds a value with the type that the converter would take."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
