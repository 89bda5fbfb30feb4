"""What llama.cpp's converter makes of Apertus and families with sigmoid routers or shared experts. See gguf_samples."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Config = dict[str, Any]
Keys = dict[str, Any]

ROUTED = {
    "apertus": "apertus",
    "llama4_text": "llama4",
    "glm4_moe": "glm4moe",
    "solar_open": "glm4moe",
    "dots1": "dots1",
    "afmoe": "afmoe",
    "cohere2_moe": "cohere2moe",
    "exaone_moe": "exaone-moe",
    "minimax_m2": "minimax-m2",
    "hunyuan_v1_moe": "hunyuan-moe",
    "ernie4_5_moe": "ernie4_5-moe",
    "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
    "mistral4": "mistral4",
}
ROUTED_NAMES = {
    "attention_layernorm": "attn_norm",
    "feedforward_layernorm": "ffn_norm",
    "mlp.gate.wg": "ffn_gate_inp",
    "mlp.router.gate": "ffn_gate_inp",
    "self_attn.gate_proj": "attn_gate",
    "pre_mlp_layernorm": "ffn_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "feed_forward.router": "ffn_gate_inp",
    **{f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    **{f"feed_forward.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    **{f"mlp.shared_mlp.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}
# Both are names of ffn_norm; the second is that of GLM-4.5's.
POST_ATTENTION = ("glm4_moe", "solar_open")
COUNTS = {
    "expert_count": ("n_routed_experts", "num_experts", "moe_num_experts", "num_local_experts"),
    "expert_used_count": ("num_experts_per_tok", "moe_k", "moe_topk"),
    "expert_shared_count": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_weights_scale": ("routed_scaling_factor", "route_scale"),
    "expert_weights_norm": ("norm_topk_prob",),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
}
SIGMOIDS = ("glm4_moe", "solar_open", "dots1", "afmoe", "exaone_moe", "minimax_m2", "deepseek_v3", "glm4_moe_lite")


def of_latent(config: Config, name: str, values: Array) -> dict[str, Array]:
    """The halves of DeepSeek's kv_b, that of k transposed head by head; {} of other tensors."""
    found = re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.kv_b_proj\.weight", name)
    if not found or config["model_type"] == "minicpm3":
        return {}
    heads = values.reshape(config["num_attention_heads"], -1, values.shape[1])
    k, v = np.split(heads, [config["qk_nope_head_dim"]], axis=1)
    return {f"blk.{found[1]}.attn_k_b.weight": k.swapaxes(1, 2), f"blk.{found[1]}.attn_v_b.weight": v}


def of_experts(config: Config, name: str, values: Array) -> dict[str, Array]:
    """The tensors that the converter makes of a bias for the choice of experts, or of Llama 4's; {} of others."""
    if found := re.fullmatch(r"(?:model|backbone)\.layers\.(\d+)\..*(?:\.e_score_correction|mlp\.expert)_bias", name):
        return {f"blk.{found[1]}.exp_probs_b.bias": values.reshape(-1)}
    found = re.fullmatch(r"model\.layers\.(\d+)\.feed_forward\.experts\.(gate_up|down)_proj", name)
    if config["model_type"] != "llama4_text" or not found:
        return {}
    parts = ("gate", "up") if found[2] == "gate_up" else ("down",)
    matrices = np.split(values.swapaxes(1, 2), len(parts), axis=1)  # stored with inputs first
    return {f"blk.{found[1]}.ffn_{part}_exps.weight": rows for part, rows in zip(parts, matrices, strict=True)}


def routed_keys(config: Config) -> Keys:
    """The keys of experts and routers."""
    kind = config["model_type"]
    keys: Keys = {}
    for ours, names in COUNTS.items():
        value = next((config[name] for name in names if config.get(name) is not None), None)
        if value is not None:
            keys[ours] = value[0] if isinstance(value, list) else value
    if kind in SIGMOIDS:
        keys["expert_gating_func"] = 2
    if kind == "llama4_text":
        keys |= {
            "expert_feed_forward_length": config["intermediate_size"],
            "feed_forward_length": config["intermediate_size_mlp"],
            "interleave_moe_layer_step": config.get("interleave_moe_layer_step", 1),
        }
    if kind == "cohere2_moe":
        keys |= {
            "attention.sliding_window_pattern": [layer in (1, 2, 3) for layer in range(4)],
            "expert_feed_forward_length": config["intermediate_size"],
            "expert_gating_func": 2 if config["expert_selection_fn"] == "sigmoid" else 1,
            "expert_weights_norm": config.get("norm_topk_prob", True),
            "feed_forward_length": config["prefix_dense_intermediate_size"],
            "rope.scaling.type": "none",
        }
        if config["num_shared_experts"]:
            keys["expert_shared_count"] = config["num_shared_experts"]
            keys["expert_shared_feed_forward_length"] = config["num_shared_experts"] * config["intermediate_size"]
        if "rms_norm_eps" in config:
            keys["attention.layer_norm_rms_epsilon"] = config["rms_norm_eps"]
    if kind == "afmoe":
        keys["expert_weights_norm"] = True  # route_norm of the published models
    if kind == "minimax_m2":
        keys |= {
            "expert_feed_forward_length": config["intermediate_size"],
            "rope.dimension_count": config["rotary_dim"],
        }
    if kind == "hunyuan_v1_moe":
        keys |= dict.fromkeys(
            ("expert_feed_forward_length", "expert_shared_feed_forward_length"), config["intermediate_size"]
        )
    if kind == "ernie4_5_moe":
        keys |= {
            "interleave_moe_layer_step": config.get("moe_layer_interval", 1),
            "leading_dense_block_count": config["moe_layer_start_index"],
            "expert_shared_feed_forward_length": config["moe_intermediate_size"] * config["moe_num_shared_experts"],
        }
    if kind == "glm4_moe":
        keys["rope.dimension_count"] = int(config["head_dim"] * config.get("partial_rotary_factor", 0.5))
    if kind == "exaone_moe":
        keys["attention.sliding_window_pattern"] = [layer == "sliding_attention" for layer in config["layer_types"]]
        keys["rope.scaling.type"] = "none"
    for key in ("first_k_dense_replace", "num_dense_layers"):
        if key in config:
            keys["leading_dense_block_count"] = config[key]
    return keys


def xielu_keys(tensors: dict[str, Array], n_layers: int) -> Keys:
    """The numbers of Apertus' activation, one for each layer."""
    return {
        f"xielu.{name}": [
            float(np.reshape(tensors[f"model.layers.{layer}.mlp.act_fn.{name}"], -1)[0]) for layer in range(n_layers)
        ]
        for name in ("alpha_p", "alpha_n", "beta", "eps")
    }
