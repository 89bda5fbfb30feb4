"""Models with Mamba 2 layers as llama.cpp's converter writes them to GGUF: a part of gguf_samples."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Config = dict[str, Any]


def of_mamba2(config: Config, name: str, values: Array) -> dict[str, Array]:
    """The tensors that the converter makes of one of a Mamba 2 layer, by llama.cpp's names; {} of others."""
    found = re.fullmatch(r"model\.layers\.(\d+)\.mamba\.(.*)", name)
    if not found:
        return {}
    module = found[2].removesuffix(".weight")
    if module == "A_log":
        values = -np.exp(values)
    shapes = {"conv1d": (-1, values.shape[-1]), "norm": (config["mamba_n_groups"], -1)}
    shapes |= dict.fromkeys(("A_log", "D"), (-1, 1))
    names = {"in_proj": "ssm_in.weight", "conv1d": "ssm_conv1d.weight", "conv1d.bias": "ssm_conv1d.bias"}
    names |= {"A_log": "ssm_a", "D": "ssm_d", "dt_bias": "ssm_dt.bias", "norm": "ssm_norm.weight"}
    names |= {"out_proj": "ssm_out.weight"}
    return {f"blk.{found[1]}.{names[module]}": values.reshape(shapes.get(module, values.shape))}


def granite_hybrid_keys(config: Config, keys: dict[str, Any]) -> str:
    """Add the keys of Granite 4; return its architecture, which is another one without Mamba 2 layers."""
    is_mamba = [kind == "mamba" for kind in config["layer_types"]]
    if not config["num_local_experts"]:
        del keys["expert_count"]
        keys.pop("expert_used_count", None)
    else:
        keys["feed_forward_length"] = config["intermediate_size"]
        keys["expert_shared_feed_forward_length"] = config["shared_intermediate_size"]
    if not any(is_mamba):
        return "granite"
    keys |= {
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.group_count": config["mamba_n_groups"],
        "ssm.inner_size": config["mamba_expand"] * config["hidden_size"],
        "ssm.time_step_rank": config["mamba_n_heads"],
        "rope.scaling.finetuned": False,
    }
    heads = config["num_key_value_heads"]
    keys["attention.head_count_kv"] = [0 if recurrent else heads for recurrent in is_mamba]
    return "granitehybrid"
