"""What llama.cpp's converter makes of Gemma 4: names of tensors, and keys. See gguf_samples."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]
Keys = dict[str, object]

GEMMA4_NAMES = {
    "embed_tokens_per_layer": "per_layer_token_embd",
    "per_layer_model_projection": "per_layer_model_proj",
    "per_layer_projection_norm": "per_layer_proj_norm",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "router.proj": "ffn_gate_inp",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
}
# Tensors whose names do not end in ".weight".
OF_GEMMA4 = {
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}
GEMMA4 = ("gemma4_text", "gemma4_unified_text")


def gemma4_keys(config: Config) -> Keys:
    """The keys of Gemma 4, which differ between its layers."""
    n_layers, width = config["num_hidden_layers"], config["intermediate_size"]
    shared = config.get("num_kv_shared_layers", 0)
    has_window = [kind == "sliding_attention" for kind in config["layer_types"]]
    keys: Keys = {
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config.get("hidden_size_per_layer_input", 0),
        "attention.sliding_window_pattern": has_window,
        "rope.freq_base_swa": config["rope_parameters"]["sliding_attention"]["rope_theta"],
    }
    for name in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        keys |= {name: config["global_head_dim"], f"{name}_swa": config["head_dim"]}
    if config.get("use_double_wide_mlp"):
        keys["feed_forward_length"] = [width * (1 + (layer >= n_layers - shared)) for layer in range(n_layers)]
    if config.get("attention_k_eq_v"):
        heads = config["num_global_key_value_heads"], config["num_key_value_heads"]
        keys["attention.head_count_kv"] = [heads[windowed] for windowed in has_window]
    if config.get("enable_moe_block"):
        keys["expert_used_count"] = config["top_k_experts"]
    return keys
