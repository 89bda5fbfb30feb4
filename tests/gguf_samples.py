"""GGUF files of tiny checkpoints, made by the rules of llama.cpp's converter with the writer of the `gguf` package."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf_classic_samples import CLASSIC, CLASSIC_NAMES, classic_keys, ungrouped
from gguf_gemma4_samples import GEMMA4, GEMMA4_NAMES, OF_GEMMA4, gemma4_keys
from gguf_mamba_samples import (
    LFM3_NAMES,
    NEMOTRON_NAMES,
    SHORT_CONV_NAMES,
    falcon_keys,
    folded_falcon,
    granite_hybrid_keys,
    mamba2_keys,
    nemotron_keys,
    of_mamba2,
    short_conv_keys,
)
from gguf_rope_samples import llama3_factors, rope_base, rope_scaling
from gguf_routed_samples import POST_ATTENTION, ROUTED, ROUTED_NAMES, of_experts, of_latent, routed_keys, xielu_keys
from numpy.typing import NDArray
from vocab_samples import SPM_PIECES

from golden.tiny_checkpoints import Config, Tensors
from llamac.export.gguf.write_keys import add_keys

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
    "self_attn.attn_sub_norm": "attn_sub_norm",
    "mlp.ffn_sub_norm": "ffn_sub_norm",
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
NAMES |= {
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.gate": "ffn_gate_inp",
    "embed_in": "token_embd",
    "attention.query_key_value": "attn_qkv",
    "attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
    "final_layer_norm": "output_norm",
    "embed_out": "output",
}
NAMES |= {
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
    "self_attn.dense": "attn_output",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
    "final_layernorm": "output_norm",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
NAMES |= {
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
# Of EXAONE 3, whose norms and last matrix of the network have the names of GPT-2's.
NAMES |= {f"attn.attention.{part}_proj": f"attn_{part}" for part in "qkv"}
NAMES |= {"attn.attention.out_proj": "attn_output", "mlp.c_fc_0": "ffn_gate", "mlp.c_fc_1": "ffn_up"}
NAMES |= CLASSIC_NAMES | GEMMA4_NAMES | ROUTED_NAMES | NEMOTRON_NAMES | SHORT_CONV_NAMES
POST_NORMED = (
    "gemma2",
    "gemma3_text",
    "olmo2",
    "olmo3",
    "exaone4",
    "afmoe",
    *GEMMA4,
)  # post_attention_layernorm follows attention itself
# Matrices of experts and norms of heads, which the converter stacks.
STACKED = {
    r"(?:block_sparse_moe|mlp|feed_forward|mixer)\.experts\.(\d+)\.(?:w1|gate_proj)": "ffn_gate_exps",
    r"(?:block_sparse_moe|mlp|feed_forward|mixer)\.experts\.(\d+)\.(?:w3|up_proj)": "ffn_up_exps",
    r"(?:block_sparse_moe|mlp|feed_forward|mixer)\.experts\.(\d+)\.(?:w2|down_proj)": "ffn_down_exps",
    r"self_attn\.q_layernorm\.norms\.(\d+)": "attn_q_norm",
    r"self_attn\.k_layernorm\.norms\.(\d+)": "attn_k_norm",
}
# Families whose q and k the converter permutes, so that dimensions that RoPE rotates together are adjacent.
PAIRED = (
    *("llama", "iquestcoder", "internlm3", "arcee", "mistral", "mixtral", "granite"),
    *("granitemoehybrid", "granitemoe", "smollm3", "ministral3", "nemotron_h", "olmo"),
)
ARCHITECTURES = {
    "mistral": "llama",
    "iquestcoder": "llama",
    "internlm3": "llama",
    "mixtral": "llama",
    "gpt_neox": "gptneox",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
    "ministral3": "mistral3",
    "olmo3": "olmo2",
    "granitemoehybrid": "granite",
    "falcon_h1": "falcon-h1",
    "hunyuan_v1_dense": "hunyuan-dense",
    "glm": "chatglm",
    "phi": "phi2",
    "cohere": "command-r",
    "deepseek_v2": "deepseek2",
    "lfm2_moe": "lfm2moe",
    "youtu": "deepseek2",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    **dict.fromkeys(GEMMA4, "gemma4"),
    **ROUTED,
}
# Models with images, of which the language model is converted.
IMAGES = {"qwen2_vl": "qwen2vl", "qwen3_vl": "qwen3vl", "qwen3_vl_moe": "qwen3vlmoe"}
ARCHITECTURES |= IMAGES
# Families with gated delta nets, whose norms are stored minus one; in the second group, heads of v are sorted.
LATENT = ("minicpm3", "youtu", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4")
DELTA_NETS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
SORTED = DELTA_NETS[1:]


def gguf_name(name: str, model_type: str) -> tuple[str, int | None]:
    """llama.cpp's name of a tensor, given transformers' name, and its index if llama.cpp stacks such tensors."""
    for prefix in ("model.language_model.", "model.", "transformer.", "gpt_neox.", "backbone."):
        name = name.removeprefix(prefix)
    parts = name.split(".")
    kind = parts.pop()
    names = NAMES | LFM3_NAMES if model_type == "lfm3" else NAMES
    if parts[0] not in ("layers", "h", "blocks"):
        return f"{names['.'.join(parts)]}.{kind}", None
    module = ".".join(parts[2:])
    for pattern, stack in STACKED.items():
        if found := re.fullmatch(pattern, module):
            return f"blk.{parts[1]}.{stack}.{kind}", int(found[1])
    if module == "post_attention_layernorm" and model_type in (
        *POST_NORMED,
        *DELTA_NETS,
        *POST_ATTENTION,
        "seed_oss",
        "gpt_oss",
    ):
        return f"blk.{parts[1]}.post_attention_norm.{kind}", None
    if module == "norm":
        return f"blk.{parts[1]}.attn_norm.{kind}", None
    if module == "pre_ff_layernorm":
        return f"blk.{parts[1]}.ffn_norm", None  # without a suffix
    return f"blk.{parts[1]}.{names[module]}.{kind}", None


def permuted(rows: Array, heads: int) -> Array:
    """Rows (or biases) of q or k, permuted as in convert_hf_to_gguf.py."""
    shape = rows.shape
    result: Array = rows.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
    return result


def separated(config: Config, name: str, values: Array) -> Tensors:
    """The tensors that the converter makes of one, by llama.cpp's names; {} if it does not separate it."""
    kind = config["model_type"]
    if found := re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.sinks", name):
        return {f"blk.{found[1]}.attn_sinks.weight": values}
    if found := re.fullmatch(r"model\.layers\.(\d+)\.shared_mlp\.(in|out)put_linear\.weight", name):
        parts, end = ("gate", "up") if found[2] == "in" else ("down",), "_shexp" if config["num_local_experts"] else ""
        matrices = np.split(values, len(parts))
        return {f"blk.{found[1]}.ffn_{part}{end}.weight": rows for part, rows in zip(parts, matrices, strict=True)}
    if found := re.fullmatch(r"model\.layers\.(\d+)\.feed_forward\.expert_bias", name):
        return {f"blk.{found[1]}.exp_probs_b.bias": values}
    if found := re.fullmatch(r"model\.layers\.(\d+)\.conv\.conv\.weight", name):
        return {f"blk.{found[1]}.shortconv.conv.weight": values.squeeze(1)}
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
    if kind in GEMMA4 and found and found[2] in OF_GEMMA4:
        return {f"blk.{found[1]}.{OF_GEMMA4[found[2]]}": values}
    found = re.fullmatch(r"model\.(?:language_model\.)?layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj(_bias)?", name)
    if kind in ("qwen3_vl_moe", "mistral4") and found:
        parts = ("gate", "up") if found[2] == "gate_up" else ("down",)
        matrices = np.split(values, len(parts), axis=1)
        return {f"blk.{found[1]}.ffn_{part}_exps.weight": stack for part, stack in zip(parts, matrices, strict=True)}
    if stack := re.fullmatch(r"model\.layers\.(\d+)\.block_sparse_moe\.(in|out)put_linear\.weight", name):
        parts = ("gate", "up") if stack[2] == "in" else ("down",)
        matrices = np.split(values, len(parts), axis=1)
        return {f"blk.{stack[1]}.ffn_{part}_exps.weight": rows for part, rows in zip(parts, matrices, strict=True)}
    if kind != "gpt_oss" or not found:
        return {}
    suffix = f"_exps.{'bias' if found[3] else 'weight'}"
    outputs = values if found[3] else values.swapaxes(1, 2)
    if found[2] == "down":
        return {f"blk.{found[1]}.ffn_down{suffix}": outputs}
    return {f"blk.{found[1]}.ffn_{part}{suffix}": outputs[:, i::2] for i, part in enumerate(("gate", "up"))}


def of_delta_net(config: Config, name: str, values: Array) -> Tensors:
    """The tensors that the converter makes of one of a gated delta net, by llama.cpp's names; {} of others."""
    found = re.fullmatch(r"model\.layers\.(\d+)\.linear_attn\.(.*)", name)
    if not found:
        return {}
    key_heads, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    keys, width = config["linear_key_head_dim"], config["linear_value_head_dim"]
    block, module = f"blk.{found[1]}.", found[2].removesuffix(".weight")
    values = values.squeeze(1) if module == "conv1d" else -np.exp(values) if module == "A_log" else values
    if module == "in_proj_qkvz":
        ends = np.cumsum([keys, keys, heads // key_heads * width])
        q, k, v, z = (
            part.reshape(-1, values.shape[1])
            for part in np.split(values.reshape(key_heads, -1, values.shape[1]), ends, axis=1)
        )
        return {f"{block}attn_qkv.weight": np.concatenate((q, k, v)), f"{block}attn_gate.weight": z}

    def tiled(rows: Array, of_head: int) -> Array:
        shape = (key_heads, heads // key_heads, of_head, *rows.shape[1:])
        sorted_rows: Array = rows.reshape(shape).swapaxes(0, 1).reshape(rows.shape)
        return sorted_rows

    if config["model_type"] in SORTED and module != "norm":
        first = 2 * key_heads * keys if module in ("in_proj_qkv", "conv1d") else 0
        of_head = width if module in ("in_proj_qkv", "conv1d", "in_proj_z", "out_proj") else 1
        if module == "out_proj":
            values = tiled(values.T, of_head).T
        else:
            values = np.concatenate((values[:first], tiled(values[first:], of_head)))
    names = {"A_log": "ssm_a", "dt_bias": "ssm_dt.bias"}
    full = names[module] if module in names else f"{NAMES[f'linear_attn.{module}']}.weight"
    return {block + full: values}


def converted(config: Config, tensors: Tensors) -> Tensors:
    """A checkpoint's tensors under llama.cpp's names, transformed like the converter does."""
    found: Tensors = {}
    stacks: dict[str, dict[int, Array]] = {}
    config = of_text(config)
    kind = config["model_type"]
    heads = config.get("num_attention_heads", 1)
    for name, values in (folded_falcon(config, tensors) if kind == "falcon_h1" else tensors).items():
        if "visual." in name or ".act_fn." in name:
            continue
        if parts := (
            separated(config, name, values)
            or of_delta_net(config, name, values)
            or of_mamba2(config, name, values)
            or of_latent(config, name, values)
            or of_experts(config, name, values)
        ):
            found |= {part: np.ascontiguousarray(numbers) for part, numbers in parts.items()}
            continue
        if kind in PAIRED and ".q_proj." in name:
            values = permuted(values, heads)
        if kind in PAIRED and ".k_proj." in name:
            values = permuted(values, config.get("num_key_value_heads") or heads)
        if kind == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            values = values.T
        is_less_one = kind.startswith(("gemma", *DELTA_NETS)) or kind == "nemotron"
        if is_less_one and kind not in GEMMA4 and name.endswith("norm.weight"):
            values = values + np.float32(1)
        if kind in ("gpt_neox", "bloom") and ".query_key_value." in name:  # transformers stores them head by head
            values = values.reshape(heads, 3, -1, *values.shape[1:]).swapaxes(0, 1).reshape(values.shape)
        if kind == "falcon" and ".query_key_value." in name:
            values = ungrouped(config, values)
        full, index = gguf_name(name, kind)
        if name.endswith(".shared_expert_gate.weight"):
            values = values.squeeze()
        if index is None:
            found[full] = np.ascontiguousarray(values)
        else:
            stacks.setdefault(full, {})[index] = values
    for full, stack in stacks.items():
        found[full] = np.stack([stack[index] for index in range(len(stack))])
    scaling = rope_scaling(config)
    if scaling.get("rope_type") == "llama3":
        found["rope_freqs.weight"] = llama3_factors(config, scaling)
    if scaling.get("rope_type") == "proportional":
        width = config.get("global_head_dim") or config["head_dim"]
        turned = int(width * scaling["partial_rotary_factor"] / 2)
        found["rope_freqs.weight"] = np.array([1.0] * turned + [1e30] * (width // 2 - turned), np.float32)
    if scaling.get("rope_type") == "longrope":
        found["rope_factors_long.weight"] = np.array(scaling["long_factor"], np.float32)
        found["rope_factors_short.weight"] = np.array(scaling["short_factor"], np.float32)
    return found


def of_text(config: Config) -> Config:
    """The config with the keys of its language model, which a model with images can have in an object of its own."""
    return {**config, **config.get("text_config", {}), "model_type": config["model_type"]}


def metadata(config: Config) -> tuple[str, Keys]:
    """(architecture, keys without its prefix), as the converter writes them."""
    config = of_text(config)
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
    if kind in CLASSIC:
        return CLASSIC[kind], classic_keys(config)
    if kind == "mamba2":
        return kind, mamba2_keys(config)
    dim, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or dim // heads
    partial = config.get("partial_rotary_factor") or config.get("rotary_pct") or 1.0
    partial = rope_scaling(config).get("partial_rotary_factor") or partial
    keys: Keys = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": dim,
        "feed_forward_length": config.get("shared_intermediate_size") or config["intermediate_size"],
        "block_count": config.get("num_hidden_layers") or len(config["hybrid_override_pattern"]),
        "attention.head_count": heads,
        "attention.head_count_kv": config.get("num_key_value_heads") or heads,
        "rope.freq_base": rope_base(config),
        "rope.dimension_count": int(partial * head_dim),
        "vocab_size": config["vocab_size"],
    }
    of_nemotron = config.get("norm_eps") if kind == "nemotron" else None
    of_nemotron = 1e-5 if kind == "olmo" else of_nemotron
    if eps := of_nemotron or config.get("layer_norm_eps") or config.get("norm_epsilon"):
        keys["attention.layer_norm_epsilon"] = eps
    else:
        keys["attention.layer_norm_rms_epsilon"] = config.get("rms_norm_eps") or config.get("norm_eps", 1e-6)
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
        if scaling.get("attention_factor") is not None:  # llama.cpp multiplies by a factor of its own
            default = 1 + 0.1 * math.log(scaling["factor"])
            keys["rope.scaling.attn_factor"] = scaling["attention_factor"] / default
    return add_family_keys(config, keys), keys


def add_family_keys(config: Config, keys: Keys) -> str:
    """Add the keys that a family has and LLaMA does not; return its architecture."""
    kind = str(config["model_type"])
    renamed = {
        "sliding_window": "attention.sliding_window",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
        "rope_local_base_freq": "rope.freq_base_swa",
        "use_parallel_residual": "use_parallel_residual",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "attention_multiplier": "attention.scale",
        "logits_scaling": "logit_scale",
        "logit_scale": "logit_scale",
        "num_experts": "expert_count",
        "num_local_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    }
    if kind in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "smollm3", "dots1", *IMAGES):
        del renamed["sliding_window"]  # llama.cpp's graphs of these families have no window
    keys |= {ours: config[theirs] for theirs, ours in renamed.items() if config.get(theirs) is not None}
    if kind == "gpt_oss":
        keys["expert_feed_forward_length"] = config["intermediate_size"]
    if kind == "granitemoehybrid":
        return granite_hybrid_keys(config, keys)
    if kind == "falcon_h1":
        keys |= falcon_keys(config)
        del keys["embedding_scale"]
    if kind == "nemotron_h":
        keys |= routed_keys(config)
        keys.pop("expert_group_used_count", None)
        return nemotron_keys(config, keys)
    if kind in IMAGES:
        keys["rope.dimension_sections"] = [*rope_scaling(config).get("mrope_section", [24, 20, 20]), 0]
        if layers := config["vision_config"].get("deepstack_visual_indexes"):
            keys["n_deepstack_layers"] = len(layers)
    if kind in DELTA_NETS:
        keys |= delta_net_keys(config)
    if kind in LATENT:
        keys |= latent_keys(config)
    if kind in ("lfm2", "lfm2_moe", "lfm3"):
        keys |= short_conv_keys(config)
    if kind in GEMMA4:
        keys |= gemma4_keys(config)
    if kind in ROUTED:
        keys |= routed_keys(config)
    if kind == "mellum":
        keys["attention.sliding_window_pattern"] = [layer == "sliding_attention" for layer in config["layer_types"]]
        keys["rope.freq_base_swa"] = config["rope_parameters"]["sliding_attention"]["rope_theta"]
    if kind in ("ministral3", "mistral4"):
        keys["attention.temperature_scale"] = config["rope_parameters"]["llama_4_scaling_beta"]
    if kind == "mistral4":  # of files that are converted from Mistral's own names
        keys["attention.temperature_length"] = config["rope_parameters"]["original_max_position_embeddings"]
    if kind == "ministral3":
        keys["rope.scaling.yarn_log_multiplier"] = config["rope_parameters"]["mscale_all_dim"]
    if kind == "phi3" and "rope_scaling" in config:
        original, context = config["original_max_position_embeddings"], config["max_position_embeddings"]
        scale = context / original
        keys["rope.scaling.original_context_length"] = original
        keys["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    return ARCHITECTURES.get(kind, kind)


def latent_keys(config: Config) -> Keys:
    """The keys of latent attention. The converter of MiniCPM3 describes a head, that of DeepSeek the shared key."""
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    query = config["qk_nope_head_dim"] + rotated
    keys: Keys = {"attention.kv_lora_rank": rank, "rope.dimension_count": rotated}
    if config.get("q_lora_rank"):
        keys["attention.q_lora_rank"] = config["q_lora_rank"]
    if config["model_type"] == "minicpm3":
        return keys | {"attention.key_length": query}
    keys |= {"attention.head_count_kv": 1, "attention.key_length": rank + rotated, "attention.value_length": rank}
    keys |= {"attention.key_length_mla": query, "attention.value_length_mla": config["v_head_dim"]}
    if config["model_type"] == "youtu":
        keys |= {"leading_dense_block_count": config["num_hidden_layers"], "expert_shared_count": 0}
        return keys | {"expert_feed_forward_length": config["intermediate_size"]}
    keys |= {
        "leading_dense_block_count": config.get("first_k_dense_replace", 1),
        "expert_count": config["n_routed_experts"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": float(config.get("routed_scaling_factor", 1.0)),
    }
    if "mscale_all_dim" in rope_scaling(config):
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * rope_scaling(config)["mscale_all_dim"]
    return keys


def delta_net_keys(config: Config) -> Keys:
    """The keys of gated delta nets."""
    keys: Keys = {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": config["linear_num_value_heads"],
        "ssm.inner_size": config["linear_value_head_dim"] * config["linear_num_value_heads"],
        "full_attention_interval": config["full_attention_interval"],
    }
    if config["model_type"] in SORTED:
        keys["rope.dimension_sections"] = [*rope_scaling(config).get("mrope_section", [11, 11, 10]), 0]
    if "layer_types" in config:
        keys["attention.recurrent_layers"] = [kind == "linear_attention" for kind in config["layer_types"]]
    return keys


def checkpoint_tensors(folder: Path) -> Tensors:
    """The tensors of a directory's model.safetensors; all are float32."""
    data = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    found: Tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            first, last = (8 + length + offset for offset in entry["data_offsets"])
            found[name] = np.frombuffer(data[first:last], "<f4").reshape(entry["shape"])
    return found


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
    """Write a checkpoint as a GGUF file.

    Args:
        path: The file.
        config: The checkpoint's config.
        tensors: Its tensors.
        kind: The type of matrices.
        changes: Other values of the architecture's keys, without prefix; None removes a key.
        more: Further keys.
        extra: Further tensors.
        part_tensors: Tensors in each part of a split file; 0 for a single file.

    Returns:
        The file.
    """
    arch, keys = metadata(config)
    keys = (xielu_keys(tensors, config["num_hidden_layers"]) if arch == "apertus" else {}) | keys
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=part_tensors)
    keys |= dict(changes or {})
    prefixed = {
        key if key.startswith("xielu.") else f"{arch}.{key}": value for key, value in keys.items() if value is not None
    }
    add_keys(writer, {"general.name": "tiny", **prefixed, **(more or {})})
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
    """Write a GGUF file with these tensors and keys; return it. kinds: the types of tensors that are packed bytes."""
    writer = gguf.GGUFWriter(path, arch)
    add_keys(writer, keys or {})
    for name, values in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(values), raw_dtype=(kinds or {}).get(name))
    finish(writer)
    return path


def finish(writer: Any) -> None:
    """Write the file and close the writer."""
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
