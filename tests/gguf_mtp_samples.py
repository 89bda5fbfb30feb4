"""What llama.cpp's converter makes of MTP layers. See gguf_samples."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from gguf_samples import DELTA_NETS, metadata, write_gguf

from golden.tiny_checkpoints import Config, Tensors

# The modules around an MTP layer of Qwen, and their names in other checkpoints, behind the number of the layer.
RENAMED = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
}
NEXTN = {
    "eh_proj": "eh_proj",
    "enorm": "enorm",
    "hnorm": "hnorm",
    "shared_head.norm": "shared_head_norm",
    "shared_head.head": "shared_head_head",
    "embed_tokens": "embed_tokens",
}


def write_with_mtp(
    path: Path, config: Config, tensors: Tensors, *, without: str = "", more: int = 0, alone: bool = False
) -> Path:
    """Write a checkpoint with an MTP layer as a GGUF file.

    Args:
        path: The file.
        config: The checkpoint's config.
        tensors: Its tensors.
        without: A tensor of the block that the file lacks, without "blk.N.".
        more: So many further blocks like this one.
        alone: Write no other block, as llama.cpp's converter does on request.

    Returns:
        The file.
    """
    n = config["num_hidden_layers"]
    layers: Tensors = {}
    around: Tensors = {}
    for name, values in tensors.items():
        name = re.sub(r"^mtp\.layers\.0\.", f"model.layers.{n}.", name)
        if found := re.fullmatch(r"mtp\.(.*)\.weight", name):
            name = f"model.layers.{n}.{RENAMED[found[1]]}.weight"
        found = re.fullmatch(rf"model\.layers\.{n}\.(.*)\.weight", name)
        if found and found[1] in NEXTN:
            is_less_one = config["model_type"] in DELTA_NETS and values.ndim == 1
            around[f"blk.{n}.nextn.{NEXTN[found[1]]}.weight"] = values + np.float32(is_less_one)
        else:
            layers[name] = values
    around.pop(f"blk.{n}.{without}", None)
    for block in range(n + 1, n + 1 + more):
        first, further = f"model.layers.{n}.", f"model.layers.{block}."
        layers |= {name.replace(first, further): values for name, values in layers.items() if name.startswith(first)}
        around |= {name.replace(f"blk.{n}.", f"blk.{block}."): values for name, values in around.items()}
    if alone:
        whole, own = ("model.embed_tokens.", "model.norm.", "lm_head."), f"model.layers.{n}."
        layers = {name: values for name, values in layers.items() if name.startswith((*whole, own))}
    changes: dict[str, Any] = {"block_count": n + 1 + more, "nextn_predict_layers": 1 + more}
    if config["model_type"] == "exaone4":  # as in the published file of EXAONE 4.5
        windows = [(block + 1) % config["sliding_window_pattern"] != 0 for block in range(n)]
        changes["attention.sliding_window_pattern"] = [*windows, *[True] * (1 + more)]
    recurrent = metadata(config)[1].get("attention.recurrent_layers")
    if recurrent is not None:
        changes["attention.recurrent_layers"] = [*recurrent, *[False] * (1 + more)]
    return write_gguf(path, config, layers, changes=changes, extra=around)
