"""The cases of families as checkpoints that GGUF can express and llama.cpp can compute."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
from gguf_samples import checkpoint_tensors
from numpy.typing import NDArray
from test_gguf_families import CASES as GGUF_CASES
from test_gguf_families import RECURRENT

from golden.case_table import FULL, LINEAR
from golden.cases import CASES as LLAMA_CASES
from golden.cases import Case
from golden.family_cases import FAMILY_CASES
from golden.gemma4_cases import GEMMA4_CASES
from golden.image_cases import IMAGE_CASES
from golden.latent_cases import LATENT_CASES
from golden.make_families import family_checkpoint
from golden.routed_cases import ROUTED_CASES
from golden.tiny_checkpoints import Config, Tensors, changed, write_checkpoint, write_config, write_safetensors
from llamac.export.gguf.families import WRITTEN

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
GPT_OSS: Config = {"swiglu_limit": 7.0, "rope_scaling": {"rope_type": "default"}}
QWEN: Config = {"use_sliding_window": False}
# llama.cpp cannot load or compute: biases outside q, k and v; experts in only some layers; fewer KV heads in OLMoE;
# windows in Mistral and Phi-3 (see below).
NO_BIAS: Config = {"attention_bias": False}
LATENT_DENSE: Config = {"attention_bias": False, "mlp_bias": False, "rms_norm_eps": 1e-6}
MISTRAL4_ROPE: Config = {**YARN, "rope_theta": 1e6, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}
ALL_HEADS: Config = {**NO_BIAS, "num_key_value_heads": 4}
UNCHANGED: Config = {}
# With three frequencies, two of which stay as they are.
DEEPSEEK_YARN: Config = {"rope_theta": 1e6, "rope_scaling": {**YARN, "mscale": 1.5, "mscale_all_dim": 1.5}}
SQUARE: Config = {"head_dim": 10}  # all heads together are as wide as the model
TIED: Config = {**NO_BIAS, "tie_word_embeddings": True}
ALL_EXPERTS: Config = {"mlp_only_layers": [], "num_hidden_layers": 2}
UNWINDOWED: Config = {**SQUARE, "sliding_window": None}
# Families in whose cases layer 0 has no experts.
DENSE_FIRST = ("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_vl_moe", "mellum")
CHANGES: dict[str, Config] = {
    "mistral": {"sliding_window": 4096},
    "mistral-tied": {"sliding_window": 4096},
    "mistral-yarn": {"sliding_window": 4096},
    "qwen2-yarn": {**QWEN, "rope_scaling": YARN},
    "qwen3": {**QWEN, **NO_BIAS},
    "arcee": {"mlp_bias": False, **NO_BIAS},
    "arcee-yarn": {"mlp_bias": False, **NO_BIAS, "rope_scaling": YARN},
    "jais2-yarn": {"rope_scaling": YARN},
    "smollm3": {"mlp_bias": False, **NO_BIAS},
    "gemma": NO_BIAS,
    "gemma-head_dim": NO_BIAS,
    "gemma2-layer_types": {"query_pre_attn_scalar": 10},
    "gemma3_text-sliding_window_pattern": {"query_pre_attn_scalar": 10},
    "gemma3_text-all_sliding": {"query_pre_attn_scalar": 10},
    "gemma3_text-all_full": {"query_pre_attn_scalar": 10},
    "phi3": {"sliding_window": None},
    "phi3-long_factor": {"sliding_window": None},
    "phi3-rope_scaling": {"sliding_window": None, "original_max_position_embeddings": None},
    "gpt_neox-tied": {"hidden_act": "gelu"},
    "gpt_neox-linear": {"hidden_act": "gelu"},
    "olmo2": NO_BIAS,
    **dict.fromkeys(["qwen2_moe", "qwen2_moe-num_experts_per_tok"], ALL_EXPERTS),
    "qwen3_moe": {**ALL_EXPERTS, **NO_BIAS},
    "olmoe": ALL_HEADS,
    **dict.fromkeys(["gpt_oss", "gpt_oss-num_experts_per_tok", "gpt_oss-sliding_window"], GPT_OSS),
    "seed_oss": {"attention_out_bias": False, "mlp_bias": False},
    "starcoder2": {"sliding_window": 4096},
    **dict.fromkeys(["exaone4", "exaone4-llama3"], UNWINDOWED),
    "glm": {**SQUARE, "partial_rotary_factor": 0.8},
    "glm-partial_rotary_factor": SQUARE,
    "ernie4_5": {"use_bias": False},
    **dict.fromkeys(["olmo3", "olmo3-sliding_window", "hunyuan_v1_dense", "hunyuan_v1_dense-alpha"], NO_BIAS),
    **dict.fromkeys(["cohere", "cohere-logit_scale"], TIED),
    "nemotron": {**SQUARE, "partial_rotary_factor": 0.4},
    **dict.fromkeys(["cohere2", "cohere2-logit_scale", "cohere2-sliding_window"], TIED),
}
LEFT_OUT = (
    "arcee-attention_bias",
    *("mistral-no_window", "phi3-sliding_window", "qwen3-attention_bias", "smollm3-llama3"),
    "exaone4-sliding_window",
    "granitemoe-residual_multiplier",  # rounded to f16, llama.cpp chooses other experts
)
# Recurrent layers and others whose files are compared with those of llama.cpp's converter.
# llama.cpp has no biases here; it also uses this epsilon, which is fixed in transformers, for latents.
LATENT: Config = {**NO_BIAS, "rms_norm_eps": 1e-6}
# llama.cpp has no other width of v; it also uses this epsilon, which is fixed in transformers, in delta nets
DELTA_NET: Config = {"linear_value_head_dim": 16, "attention_bias": False, "rms_norm_eps": 1e-6}
WITH_EXPERTS: Config = {**DELTA_NET, **ALL_EXPERTS, "norm_topk_prob": True, "layer_types": [FULL, LINEAR]}
NO_CONV_BIAS: Config = {"conv_bias": False}
# llama.cpp's layers with shared keys read the last two layers before them: in other cases, these are of another kind.
GEMMA4 = [f"gemma4_text-{end}" for end in ("num_kv_shared_layers", "no_layer_embeddings", "num_experts")]
GEMMA4 += [f"gemma4_unified_text-{end}" for end in ("no_kv_shared_layers", "num_kv_shared_layers")]
AS_CONVERTED: dict[str, Config] = {
    **dict.fromkeys(["lfm2", "lfm2-layer_types", "lfm2_moe", "lfm2_moe-num_dense_layers"], NO_CONV_BIAS),
    **dict.fromkeys(GEMMA4, NO_BIAS),
    **dict.fromkeys(["deepseek_v2", "deepseek_v2-whole_q", "minicpm3"], LATENT_DENSE),
    **dict.fromkeys(["deepseek_v3", "deepseek_v3-no_groups", "deepseek_v3-norm_topk_prob", "glm4_moe_lite"], LATENT),
    "deepseek_v3-yarn": {**LATENT, **DEEPSEEK_YARN},
    "mistral4": {**LATENT, "rope_parameters": MISTRAL4_ROPE},
    **dict.fromkeys(["glm4_moe", "glm4_moe-use_qk_norm", "exaone_moe", "exaone_moe-sliding_window"], UNCHANGED),
    **dict.fromkeys(["minimax_m2", "minimax_m2-rotary_dim", "llama4_text-defaults"], UNCHANGED),
    **dict.fromkeys(["solar_open", "hunyuan_v1_moe", "hunyuan_v1_moe-moe_topk", "apertus"], NO_BIAS),
    **dict.fromkeys(["dots1", "dots1-routed_scaling_factor"], ALL_HEADS),
    "ernie4_5_moe-moe_layer_end_index": {"use_bias": False},
    **dict.fromkeys(["qwen3_next", "qwen3_next-linear_num_key_heads"], WITH_EXPERTS),
    **dict.fromkeys(["qwen3_5_text", "qwen3_5_text-linear_num_value_heads"], DELTA_NET),
    **dict.fromkeys(["qwen3_5_moe_text", "qwen3_5_moe_text-layer_types"], DELTA_NET),
    **dict.fromkeys(["falcon_h1-no_biases", "nemotron_h-experts", "nemotron_h-dense", "mamba2"], UNCHANGED),
    **dict.fromkeys(["granitemoehybrid", "granitemoehybrid-experts", "granitemoehybrid-mamba_n_groups"], NO_BIAS),
    **dict.fromkeys(["bloom", "bloom-num_attention_heads", "mpt", "mpt-num_attention_heads"], UNCHANGED),
}
CHANGES |= AS_CONVERTED
WITH_MTP = ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "deepseek_v3", "glm4_moe"]
OTHERS = [name for name in RECURRENT if name not in AS_CONVERTED]
OTHERS += [name for name in GEMMA4_CASES | LATENT_CASES | ROUTED_CASES if name not in AS_CONVERTED]
NOT_WRITTEN = (*LEFT_OUT, *OTHERS, *IMAGE_CASES)
NOT_WRITTEN += ("nemotron-partial_rotary_factor", "youtu")
NOT_WRITTEN += ("bitnet-attention_bias", "olmo-attention_bias", "iquestcoder", "internlm3")
NOT_WRITTEN += ("falcon", "falcon-new_decoder_architecture")
NOT_WRITTEN += ("mellum", "mellum-yarn", "mellum-sliding_window")
NAMES = [name for name in dict.fromkeys([*GGUF_CASES, *CHANGES]) if name not in NOT_WRITTEN]
# The families that are written as another one: those that compute the same, and models with images.
WITH_IMAGES = {
    **dict.fromkeys(("iquestcoder", "internlm2", "internlm3"), "llama"),
    "minicpm": "granite",
    "mimo": "qwen2",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_text",
    "kimi_k2": "deepseek_v3",
    "llama4": "llama4_text",
    "mistral3": "llama",
    **dict.fromkeys(("llava", "llava_next"), "llama"),
    **dict.fromkeys(("llava_onevision", "ovis2"), "qwen2"),
    **dict.fromkeys(("kimi_k25", "sarvam_mla"), "deepseek_v3"),
    "aya_vision": "cohere2",
    "glm46v": "glm4",
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "internvl": "qwen2",
    "idefics3": "llama",
    "smolvlm": "llama",
    "glm4v": "glm4",
    "glm4v_moe": "glm4_moe",
    "cohere2_vision": "cohere2",
    "exaone4_5": "exaone4",
    "lfm2_vl": "lfm2",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
}
LLAMA_NAMES = ["llama", "llama-llama3", "llama-yarn", "llama-linear", "llama-longrope", "llama-dynamic", "gpt2"]


def fitting(config: Config, weights: Tensors) -> Tensors:
    """The weights for a changed config."""
    found: Tensors = {}
    for name, values in weights.items():
        kind, layer = str(config["model_type"]), re.search(r"layers\.(\d+)\.", name)
        no_bias = False in (config.get("attention_bias"), config.get("use_bias"))
        if no_bias and name.endswith(".bias") and not re.search(r"\.(mamba|mixer)\.", name):
            continue
        if config.get("bias") is False and re.search(r"(query_key_value|dense\w*)\.bias$", name):
            continue
        if config.get("conv_bias") is False and re.search(r"\.conv\..*bias$", name):
            continue
        if SQUARE.items() <= config.items() and ".self_attn." in name:
            values = narrowed(name, values)
        if config.get("linear_value_head_dim") == 16 and ".linear_attn." in name:
            values = with_narrow_values(config, name, values)
        if kind == "seed_oss" and re.search(r"\.(o|gate|up|down)_proj\.bias$", name):
            continue
        if TIED.items() <= config.items() and name == "lm_head.weight":
            continue
        if kind in DENSE_FIRST and layer:
            if layer[1] == "0":
                continue
            name = name.replace(layer[0], f"layers.{int(layer[1]) - 1}.")
        if ALL_HEADS.items() <= config.items() and re.search(r"\.[kv]_(proj|norm)\.", name) and len(values) > 10:
            values = np.concatenate([values, values[::-1]])
        found[name] = values
    return found


def narrowed(name: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """A tensor of attention with 4 heads and 2 KV heads of 10."""
    size = 10 if "norm" in name else 40 if re.search("[qo]_proj", name) else 20
    return np.ascontiguousarray(values[:, :size] if "o_proj" in name and values.ndim > 1 else values[:size])


def with_narrow_values(config: Config, name: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """A tensor of a delta net whose heads of v have 16 dimensions in place of 32."""
    heads = config["linear_num_value_heads"]
    keys = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    module = re.sub(r"(\.weight)?$", "", name.split(".linear_attn.")[1])
    rows = {"in_proj_qkvz": keys + 32 * heads, "in_proj_z": 16 * heads, "norm": 16}
    rows |= dict.fromkeys(("in_proj_qkv", "conv1d"), keys + 16 * heads)
    narrow = values[:, : 16 * heads] if module == "out_proj" else values[: rows.get(module)]
    return np.ascontiguousarray(narrow)


def config_of(name: str) -> Config:
    if name in LLAMA_CASES:
        return LLAMA_CASES[name].config
    return changed(FAMILY_CASES[name].config, **{**GGUF_CASES.get(name, {}), **CHANGES.get(name, {})})


def case_of(name: str) -> Case:
    return replace(LLAMA_CASES.get(name) or FAMILY_CASES[name], config=config_of(name))


def architecture_of(name: str) -> str:
    """The architecture as which a case is written."""
    config = config_of(name)
    found = [key for key, row in WRITTEN.items() if config["model_type"] in (row.family, *row.others)]
    if "hybrid_override_pattern" in config:
        return found["E" in config["hybrid_override_pattern"]]
    has_mamba2 = "mamba" in config.get("layer_types", ()) or "state_size" in config
    return next(key for key in found if WRITTEN[key].mamba2 == has_mamba2)


def folder_of(root: Path, name: str, **changes: object) -> Path:
    """A Hugging Face directory that GGUF can express and llama.cpp can compute, before the changes are applied."""
    config = changed(config_of(name), **changes)
    if config["model_type"] == "exaone4":
        config.setdefault("sliding_window", None)  # null means none, but a missing key does not
    if name == "deepseek_v2-whole_q":
        config["q_lora_rank"] = None  # null means none, but a missing key does not
    if name in LLAMA_CASES:
        return write_checkpoint(root / "hf", config)
    weights = checkpoint_tensors(family_checkpoint(root / "case", FAMILY_CASES[name]))
    folder = root / "hf"
    folder.mkdir()
    write_config(folder, config)
    write_safetensors(folder / "model.safetensors", fitting(config, weights))
    return folder
