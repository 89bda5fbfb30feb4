"""Models with Mamba 2 or short convolutions as llama.cpp's converter writes them to GGUF: a part of gguf_samples."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Config = dict[str, Any]
OF_MAMBA2 = {
    "in_proj": "ssm_in.weight",
    "conv1d": "ssm_conv1d.weight",
    "conv1d.bias": "ssm_conv1d.bias",
    "A_log": "ssm_a",
    "D": "ssm_d",
    "dt_bias": "ssm_dt.bias",
    "norm": "ssm_norm.weight",
    "out_proj": "ssm_out.weight",
}
NEMOTRON_NAMES = {
    "embeddings": "token_embd",
    "norm_f": "output_norm",
    **{f"mixer.{x}_proj": f"attn_{part}" for x, part in {"q": "q", "k": "k", "v": "v", "o": "output"}.items()},
    **{f"mixer.{part}_proj": f"ffn_{part}" for part in ("up", "down")},
    **{f"mixer.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("up", "down")},
    "mixer.gate": "ffn_gate_inp",
    "pre_ff_layernorm": "ffn_norm",
    "final_layernorm": "output_norm",
    **{f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}


def of_mamba2(config: Config, name: str, values: Array) -> dict[str, Array]:
    """The tensors that the converter makes of one of a Mamba 2 layer, by llama.cpp's names; {} of others."""
    found = re.fullmatch(r"(?:model|backbone)\.layers\.(\d+)\.(?:mamba|mixer)\.(.*)", name)
    module = found[2].removesuffix(".weight") if found else ""
    if not found or module not in OF_MAMBA2:
        return {}
    if module == "A_log":
        values = -np.exp(values)
    groups = config.get("mamba_n_groups") or config["n_groups"]
    shapes = {"conv1d": (-1, values.shape[-1]), "norm": (groups, -1)}
    shapes |= dict.fromkeys(("A_log", "D"), (-1, 1))
    return {f"blk.{found[1]}.{OF_MAMBA2[module]}": values.reshape(shapes.get(module, values.shape))}


def folded_falcon(config: Config, tensors: dict[str, Array]) -> dict[str, Array]:
    """Falcon-H1's weights times its multipliers, as the converter writes them."""
    attention_in, gate_and_down = config["attention_in_multiplier"], config["mlp_multipliers"]
    state, pairs = config["mamba_n_groups"] * config["mamba_d_state"], config["ssm_multipliers"]
    widths = [config["mamba_d_ssm"], config["mamba_d_ssm"], state, state, config["mamba_n_heads"]]
    factors: dict[str, Any] = {
        "self_attn.q_proj": attention_in,
        "self_attn.k_proj": attention_in * config["key_multiplier"],
        "self_attn.v_proj": attention_in,
        "self_attn.o_proj": config["attention_out_multiplier"],
        "feed_forward.gate_proj": gate_and_down[0],
        "feed_forward.down_proj": gate_and_down[1],
        "mamba.in_proj": config["ssm_in_multiplier"] * np.repeat(np.array(pairs, np.float64), widths)[:, None],
        "mamba.out_proj": config["ssm_out_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
        "lm_head": config["lm_head_multiplier"],
    }
    found = {}
    for name, values in tensors.items():
        factor = next((factor for end, factor in factors.items() if name.endswith(f"{end}.weight")), 1.0)
        found[name] = (values * factor).astype(np.float32)
    return found


def falcon_keys(config: Config) -> dict[str, Any]:
    """The keys of Falcon-H1's Mamba 2 layers."""
    return {
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.group_count": config["mamba_n_groups"],
        "ssm.inner_size": config["mamba_d_ssm"],
        "ssm.time_step_rank": config["mamba_n_heads"],
    }


def mamba2_keys(config: Config) -> dict[str, Any]:
    """The keys of Mamba 2, which has neither attention nor networks."""
    return {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": 0,
        "block_count": config["num_hidden_layers"],
        "attention.head_count": 0,
        "attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"],
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.state_size": config["state_size"],
        "ssm.group_count": config["n_groups"],
        "ssm.inner_size": config["expand"] * config["hidden_size"],
        "ssm.time_step_rank": config["num_heads"],
        "vocab_size": config["vocab_size"],
    }


def nemotron_keys(config: Config, keys: dict[str, Any]) -> str:
    """Add the keys of Nemotron-H; return its architecture, which is another one with experts."""
    pattern, eps = config["hybrid_override_pattern"], config["layer_norm_epsilon"]
    has_experts, heads = "E" in pattern, config["num_key_value_heads"]
    width = config["moe_intermediate_size"] if has_experts else config["intermediate_size"]
    network = "E" if has_experts else "-"
    keys |= {
        "attention.layer_norm_epsilon": eps,
        "attention.layer_norm_rms_epsilon": eps,
        "attention.head_count_kv": [heads if part == "*" else 0 for part in pattern],
        "feed_forward_length": [width if part == network else 0 for part in pattern],
        "rope.scaling.finetuned": False,
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.state_size": config["ssm_state_size"],
        "ssm.group_count": config["n_groups"],
        "ssm.inner_size": config["mamba_num_heads"] * config["mamba_head_dim"],
        "ssm.time_step_rank": config["mamba_num_heads"],
    }
    if not has_experts:
        return "nemotron_h"
    keys |= {
        "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
        "expert_shared_count": 1,
    }
    return "nemotron_h_moe"


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


SHORT_CONV_NAMES = {
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "embedding_norm": "token_embd_norm",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
    "feed_forward.gate": "ffn_gate_inp",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
}
# Of LFM3, where they differ.
LFM3_NAMES = {
    "embedding_norm": "output_norm",
    "post_ffn_norm": "post_ffw_norm",
    "post_operator_norm": "post_attention_norm",
    "self_attn.gate_proj": "attn_gate",
}


def short_conv_keys(config: Config) -> dict[str, Any]:
    """The keys of short convolutions."""
    heads = config["num_key_value_heads"]
    keys: dict[str, Any] = {
        "shortconv.l_cache": config["conv_L_cache"],
        "attention.head_count_kv": [0 if kind == "conv" else heads for kind in config["layer_types"]],
    }
    if "block_multiple_of" in config:
        width, multiple = 2 * config["intermediate_size"] // 3, config["block_multiple_of"]
        keys["feed_forward_length"] = -(-int(config["block_ffn_dim_multiplier"] * width) // multiple) * multiple
    elif "num_dense_layers" in config:
        keys |= {"leading_dense_block_count": config["num_dense_layers"], "expert_gating_func": 2}
    else:
        keys |= {
            "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config["layer_types"]],
            "rope.dimension_count": config["head_dim"],
            "rope.freq_base_swa": config["rope_parameters"]["sliding_attention"]["rope_theta"],
        }
    return keys
