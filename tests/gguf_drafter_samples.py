"""What llama.cpp's converter makes of EAGLE-3 heads and of Gemma 4's assistants. See gguf_samples."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf_samples import converted, gguf_name, metadata, permuted, write_tensors

from golden.tiny_checkpoints import Config, Tensors

# The tensors around a head's layer.
_AROUND = {
    "fc.weight": "fc.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "embed_tokens.weight": "token_embd.weight",
    "input_norm.weight": "enc.output_norm.weight",
    "midlayer.hidden_norm.weight": "blk.0.attn_norm_2.weight",
}
_PROJECTIONS = {"pre_projection.weight": "nextn.pre_projection.weight"}
_PROJECTIONS |= {"post_projection.weight": "nextn.post_projection.weight"}
_CLUSTERS = {"masked_embedding.centroids.weight": "masked_embd_centroids.weight"}
_CLUSTERS |= {"masked_embedding.token_ordering": "masked_embd_ordering"}
Keys = Mapping[str, Any]


def head_of(config: Config, tensors: Tensors, layers: list[int]) -> tuple[dict[str, Any], Tensors]:
    """The keys and tensors of a head. layers: those whose inputs it reads."""
    keys: dict[str, Any] = {
        **metadata(config)[1],
        "target_layers": layers,
        "target_hidden_size": config.get("target_hidden_size") or config["hidden_size"],
        "norm_before_residual": config.get("norm_before_residual", False),
        "norm_before_fc": config.get("norm_before_fc", False),
    }
    found: Tensors = {}
    for name, values in tensors.items():
        if name == "t2d":
            continue
        if name == "d2t":
            found[name] = values + np.arange(len(values))
            continue
        for kind, heads in (("q", config["num_attention_heads"]), ("k", config["num_key_value_heads"])):
            values = permuted(values, heads) if f".{kind}_proj." in name else values
        found[_AROUND.get(name) or gguf_name(name.replace("midlayer.", "layers.0."), "llama")[0]] = values
    if "rope_freqs.weight" in (of_model := converted(config, {})):
        found["rope_freqs.weight"] = of_model["rope_freqs.weight"]
    return keys, found


def assistant_of(config: Config, tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    """The keys and tensors of an assistant. Those of its clusters, which llama.cpp's converter leaves out, are kept."""
    text = config["text_config"]
    keys = metadata(text)[1]
    keys |= {"embedding_length_out": config["backbone_hidden_size"], "nextn_predict_layers": text["num_hidden_layers"]}
    own = {**_PROJECTIONS, **_CLUSTERS}
    around = {own[name]: values for name, values in tensors.items() if name in own}
    return keys, converted(text, {name: values for name, values in tensors.items() if name not in own}) | around


def write(path: Path, architecture: str, keys: Keys, tensors: Tensors, others: Keys | None = None) -> Path:
    """Write a drafter as a GGUF file.

    Args:
        path: The file.
        architecture: Its architecture.
        keys: Those of the architecture, without prefix; None: without this key.
        tensors: Its tensors.
        others: Further keys, with their prefixes.

    Returns:
        The path.
    """
    prefixed = {f"{architecture}.{key}": value for key, value in keys.items() if value is not None}
    return write_tensors(path, tensors, keys={"general.name": "tiny", **prefixed, **(others or {})}, arch=architecture)
