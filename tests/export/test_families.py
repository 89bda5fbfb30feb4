"""The table of families: published configs, checkpoints saved by transformers, defaults, and refused values."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from golden.family_cases import FAMILY_CASES
from golden.image_cases import IMAGE_CASES
from golden.make import auto_class
from golden.make_families import family_checkpoint
from golden.published_configs import PUBLISHED
from golden.tiny_checkpoints import Config, changed, random_tensor, write_config, write_safetensors
from hf_reading import parse, read
from llamac.errors import ExportError, UnsupportedError
from llamac.export.checkpoint import Checkpoint, ModelConfig
from llamac.export.hf import config as hf_config
from llamac.export.hf import model as hf
from llamac.export.hf.experts_config import EXPERTS
from llamac.export.hf.families import FAMILIES
from llamac.export.hf.safetensors_file import read_safetensors
from llamac.export.stored import StoredTensor

# test_families_images has the others
BASES = [name for name, case in FAMILY_CASES.items() if not case.base and name not in IMAGE_CASES]
EXPERT_FAMILIES = [name for name in BASES if FAMILIES[name].ffn == "experts"]


def assert_same(one: Checkpoint, other: Checkpoint) -> None:
    """Assert equal configs, and tensors equal bit for bit."""
    assert one.config == other.config
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        np.testing.assert_array_equal(tensor.array(), other.tensors[name].array(), err_msg=name)


# ---- published configs


def numbers(tensor: StoredTensor) -> NDArray[np.float32]:
    """All numbers of a tensor of up to three dimensions."""
    if not tensor.shape:
        return numbers(replace(tensor, shape=(1,), strides=(1,))).reshape(())
    parts = range(tensor.shape[0])
    return np.stack([numbers(tensor.part(i)) for i in parts]) if len(tensor.shape) == 3 else tensor.lazy().array()


def published(name: str) -> ModelConfig:
    return parse(PUBLISHED[name]).model


@pytest.mark.parametrize("name", [name for name in PUBLISHED if "vision_config" not in PUBLISHED[name]])
def test_published_configs_are_accepted_without_a_warning(name: str) -> None:
    sizes, model = PUBLISHED[name], published(name)
    assert model.dim in [sizes.get(key) for key in ("hidden_size", "n_embd", "n_embed", "d_model")]
    assert len(model.layers) in [sizes.get(key) for key in ("num_hidden_layers", "num_layers", "n_layer", "n_layers")]
    usual = FAMILIES[sizes["model_type"]].keys.get("max_position_embeddings")
    assert model.context == sizes.get("max_position_embeddings", sizes.get("n_positions", usual))


def test_every_family_has_a_published_config() -> None:
    assert {config["model_type"] for config in PUBLISHED.values()} == set(FAMILIES)


def windows(name: str) -> list[int]:
    return [layer.window for layer in published(name).layers]


def test_published_windows_are_in_the_expected_layers() -> None:
    assert windows("Mistral-7B-v0.1") == [4096] * 32
    assert windows("Mistral-Nemo") == [0] * 40
    assert windows("Ministral-8B") == [0, 32768, 32768, 32768] * 9
    assert windows("Qwen2.5-0.5B") == [0] * 24
    assert windows("gemma-2-27b") == [4096, 0] * 23
    assert windows("gemma-3-1b") == [*[512] * 5, 0] * 4 + [512] * 2
    assert windows("gemma-3-270m") == [*[512] * 5, 0] * 3
    assert windows("Phi-3-mini-4k") == [2047] * 32


def test_published_configs_give_the_expected_models() -> None:
    assert [layer.rope for layer in published("SmolLM3-3B").layers] == [0, 0, 0, -1] * 9
    gemma = published("gemma-2b")
    assert (gemma.activation, gemma.embedding_scale, gemma.tied_output) == ("gelu_tanh", 2048**0.5, True)
    gemma = published("gemma-2-27b")
    assert (gemma.attention_scale, gemma.attention_soft_cap, gemma.logit_soft_cap) == (144**-0.5, 50.0, 30.0)
    assert {layer.placement for layer in gemma.layers} == {"sandwich"}
    gemma = published("gemma-3-1b")
    assert [layer.rope for layer in gemma.layers[:7]] == [1, 1, 1, 1, 1, 0, 1]
    assert (gemma.qk_norm, gemma.attention_soft_cap, gemma.logit_soft_cap) == ("head", 0.0, 0.0)
    phi = published("Phi-4-mini")
    assert (phi.head_dim, phi.rope_dim, phi.rope_original_context) == (128, (96,), (4096,))
    assert published("Phi-3-mini-128k").rope_original_context == (4096,)
    pythia = published("pythia-70m")
    assert (pythia.rope_dim, pythia.layers[0].placement, pythia.layers[0].ffn) == ((16,), "parallel", "plain")
    granite = published("granite-3.1-2b")
    assert (granite.embedding_scale, granite.residual_scale) == (12.0, 0.22)
    assert (granite.logit_scale, granite.attention_scale) == (1 / 8, 0.015625)
    assert published("OLMo-2-1B").layers[0].placement == "post"
    assert published("stablelm-2-12b").qk_norm == "layer_head"
    assert published("stablelm-3b-4e1t").qk_norm == "none"
    for name, experts, used, width, normalized in (
        ("Mixtral-8x7B", 8, 2, 14336, 1),
        ("Qwen3-30B-A3B", 128, 8, 768, 1),
        ("OLMoE-1B-7B", 64, 8, 1024, 0),
        ("Qwen1.5-MoE-A2.7B", 60, 4, 1408, 0),
    ):
        layer = published(name).layers[0]
        assert (layer.n_experts, layer.n_experts_used, layer.ffn_dim) == (experts, used, width)
        assert layer.expert_weights == normalized
        assert (layer.shared_ffn_dim, layer.shared_gate) == ((5632, 1) if name.startswith("Qwen1.5") else (0, 0))


def test_published_configs_of_newer_families_give_the_expected_models() -> None:
    assert windows("gpt-oss-20b") == [128, 0] * 12
    assert windows("Olmo-3-7B") == windows("c4ai-command-r7b-12-2024") == [4096, 4096, 4096, 0] * 8
    assert windows("EXAONE-4.0-1.2B") == [0] * 30
    assert [layer.rope for layer in published("EXAONE-4.0-1.2B").layers] == [0] * 30
    for name, n in (("EXAONE-4.0-32B", 16), ("c4ai-command-r7b-12-2024", 8)):
        assert [layer.rope for layer in published(name).layers] == [0, 0, 0, -1] * n
    layer = published("gpt-oss-20b").layers[0]
    assert (layer.sinks, layer.activation_limit, layer.up_offset, layer.expert_weights) == (1, 7.0, 1.0, 1)
    layer = published("Ministral-3-text").layers[0]
    assert (layer.query_beta, layer.query_context) == (np.float32(0.1), 16384)
    assert published("Olmo-3-7B").rope_attention_factor == (1.2079441541679836, 1.0)
    granite = published("granite-4.0-micro")
    assert (granite.layers[0].ffn_dim, granite.logit_scale, granite.attention_scale) == (8192, 0.1, 0.015625)
    assert (published("GLM-4-9B-0414").rope_dim, published("phi-2").rope_dim) == ((64,), (32,))
    assert {layer.placement for layer in published("phi-2").layers} == {"parallel"}
    for name in ("Hunyuan-1.8B", "nanochat-d20"):
        assert (published(name).qk_norm, published(name).qk_norm_after_rope) == ("head", 1)


def test_published_configs_of_llama_4_give_the_expected_models() -> None:
    scout, maverick = published("Llama-4-Scout"), hf_config.parse_config(PUBLISHED["Llama-4-Maverick"], []).model
    assert (scout.qk_norm, scout.qk_norm_after_rope, scout.context) == ("rotated_head", 1, 10485760)
    assert (maverick.qk_norm, maverick.qk_norm_after_rope) == ("none", 0)
    first, *_, last = scout.layers[:4]
    assert (first.rope, first.window, first.window_chunks, first.query_beta) == (0, 8192, 1, 0)
    assert (last.rope, last.window, last.window_chunks, last.query_offset) == (-1, 0, 0, 1)
    assert (last.query_beta, last.query_context) == (np.float32(0.1), 8192)
    assert [layer.ffn_dim for layer in maverick.layers] == [16384, 8192] * 24
    expert = maverick.layers[1]
    assert (expert.router, expert.expert_weights, expert.expert_weights_first) == ("sigmoid", 0, 1)
    assert (expert.n_experts, expert.n_experts_used, expert.shared_ffn_dim) == (128, 1, 8192)


def test_published_configs_with_short_convolutions_give_the_expected_models() -> None:
    for name in ("LFM2-1.2B", "LFM2.5-1.2B"):
        model = published(name)
        attention = [i for i, layer in enumerate(model.layers) if layer.mixer == "attention"]
        assert (attention, model.layers[0].ffn_dim, model.tied_output) == ([2, 5, 8, 10, 12, 14], 8192, True)
        assert {(layer.mixer, layer.conv_width, layer.rope) for layer in model.layers} == {
            ("attention", 0, 0),
            ("short_conv", 3, -1),
        }
    layers = published("LFM2-8B-A1B").layers
    assert [layer.ffn for layer in layers] == [*["gated"] * 2, *["experts"] * 22]
    assert (layers[0].ffn_dim, layers[2].ffn_dim, layers[2].n_experts, layers[2].n_experts_used) == (7168, 1792, 32, 4)
    assert (layers[2].router, layers[2].router_choice_bias, layers[2].expert_weights) == ("sigmoid", 1, 1)
    assert layers[2].expert_weights_eps == np.float32(1e-6)


def test_the_published_config_of_lfm3_gives_the_expected_model() -> None:
    """Its RoPE is named "default", but rotates half of each head in layers that see all positions."""
    parsed = parse(PUBLISHED["LFM3-1.7B"])
    mixers = [(layer.mixer, layer.window, layer.rope, layer.output_gate) for layer in parsed.model.layers]
    conv, full, windowed = ("short_conv", 0, -1, "none"), ("attention", 0, 0, "head"), ("attention", 256, 1, "head")
    assert mixers == [conv, conv, *[full, conv, windowed, conv] * 5, full, conv]
    assert {layer.placement for layer in parsed.model.layers} == {"sandwich"}
    of_full, of_windowed = parsed.ropes
    assert [int(np.count_nonzero(table.inv_freq)) for table in (of_full, of_windowed)] == [32, 64]
    assert of_full.inv_freq[31] == np.float32(1 / np.float32(1000000.0 ** (62 / 128)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["conv"] * 23}, "full_attention, conv or sliding_attention for each of 24 layers"),
        ({"layer_types": ["full"] * 24}, "full_attention, conv or sliding_attention for each of 24 layers"),
        ({"sliding_window": None}, "sliding_window is null, expected a number, because layers are sliding_attention"),
        ({"use_attention_gate": 1}, "use_attention_gate is 1, expected true or false"),
        ({"use_sandwich_norm": None}, "use_sandwich_norm is null, expected true or false"),
        ({"conv_L_cache": 17}, "conv_L_cache is 17, expected"),
        ({"full_attn_idxs": [2]}, r"full_attn_idxs is \[2\]: llamac does not know this key"),
        ({"rope_theta": 500.0}, "rope_theta is 500.0: llamac does not know this key"),
        ({"mystery": 3}, "mystery is 3: llamac does not know this key"),
    ],
)
def test_wrong_keys_of_lfm3_are_refused_by_name(change: Config, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        parse({**PUBLISHED["LFM3-1.7B"], **change})


def test_another_language_model_in_a_model_with_images_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"is 'qwen2'; .*, only 'mistral' or 'ministral3' or 'mistral4' is sup"):
        parse({**PUBLISHED["Ministral-3-8B-Base"], "text_config": {"model_type": "qwen2"}})


def test_layers_without_experts_are_gated() -> None:
    config = PUBLISHED["Qwen3-30B-A3B"]
    mixed = parse({**config, "decoder_sparse_step": 3, "mlp_only_layers": [2, 3]}).model.layers
    assert [layer.ffn for layer in mixed[:6]] == [*["gated"] * 5, "experts"]
    assert [(layer.ffn_dim, layer.n_experts) for layer in mixed[4:6]] == [(6144, 0), (768, 128)]
    assert {layer.ffn for layer in parse({**config, "decoder_sparse_step": 49}).model.layers} == {"gated"}


def test_the_language_model_of_a_vision_model_is_read() -> None:
    warnings: list[str] = []
    parsed = hf_config.parse_config(PUBLISHED["gemma-3-4b"], warnings)
    assert ["only its language model is read" in warning for warning in warnings] == [True]
    model = parsed.model
    assert (model.dim, len(model.layers), model.n_heads, model.n_kv_heads, model.head_dim) == (2560, 34, 8, 4, 256)
    assert (model.vocab_size, model.context, model.layers[0].window) == (262208, 131072, 1024)
    global_table, local_table = parsed.ropes
    assert (global_table.inv_freq[0], local_table.inv_freq[0]) == (np.float32(1 / 8), 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_config": None}, "text_config is None, expected an object"),
        ({"text_config": {"hidden_size": -1}}, "hidden_size is -1"),
        ({"projector": 3}, "projector is 3: llamac does not know this key"),
        ({"text_config": {"mystery": 3}}, "mystery is 3: llamac does not know this key"),
    ],
)
def test_wrong_keys_of_a_vision_config_are_refused(change: Config, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        hf_config.parse_config({**PUBLISHED["gemma-3-4b"], **change}, [])


# ---- absent keys and null

# transformers computes these from other keys, or a row gives the value under another name.
COMPUTED = {
    *("num_key_value_heads", "num_kv_heads", "head_dim", "v_head_dim", "ffn_hidden_size", "word_embed_proj_dim"),
    *("layer_types", "attention_types", "attention_layers"),
    *("layers_block_type", "mlp_layer_types", "moe_layer_end_index", "full_attn_idxs", "mamba_d_head"),
    "time_step_limit",
    "no_rope_layers",
    "layer_rope_theta",
    "moe_layers",
    "mlp_only_layers",
    "sliding_window",
    "hidden_activation",
    "max_window_layers",
    "_sliding_window_pattern",
    "per_layer_config",
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
}
OTHERWISE = {"rope_theta", "rope_local_base_freq", "rotary_emb_base", "rotary_pct", "partial_rotary_factor"}


# models with images leave their text_config to other families; the last four are not in transformers
OTHERS = ("gpt2", "mistral3", "internvl", "idefics3", "smolvlm", "ovis2", "kimi_k2", "internlm2", "minicpm", "mimo")


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in OTHERS])
def test_defaults_match_transformers(name: str) -> None:
    pytest.importorskip("transformers")
    from transformers import AutoConfig

    theirs: dict[str, Any] = type(AutoConfig.for_model(name))().to_dict()
    if "text_config" in theirs:  # of models with images
        theirs = {**theirs["text_config"], "tie_word_embeddings": theirs["tie_word_embeddings"]}
    for key, ours in FAMILIES[name].keys.items():
        if key in COMPUTED or key in OTHERWISE or key not in theirs or (key, ours) == ("attention_multiplier", None):
            continue
        assert ours == theirs[key], key
    if FAMILIES[name].position != "rope" or FAMILIES[name].optional_rope or "rope_parameters" not in theirs:
        return  # GPT-J's cannot be chosen
    rope = theirs["rope_parameters"]
    if "full_attention" in FAMILIES[name].default_rope:  # each kind of layers has its own
        assert FAMILIES[name].default_rope == rope
        return
    rope = rope.get("full_attention", rope)
    row = FAMILIES[name].keys
    assert (row.get("rotary_emb_base") or row["rope_theta"]) == rope["rope_theta"]
    part = row.get("rotary_pct") or row.get("partial_rotary_factor", 1.0)
    assert part in (None, rope.get("partial_rotary_factor", 1.0))  # None: the widths determine it


SIZES = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


# These describe Mamba layers (of other widths), other numbers of KV heads, no experts in use or no kinds of layers.
WITHOUT_DEFAULTS = (
    *("granitemoehybrid", "minicpm3", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4", "lfm2_moe"),
    *("dots1", "solar_open", "youtu", "mamba2"),
    "olmo_hybrid",  # transformers then has RoPE, unlike the models' own code
)


@pytest.mark.parametrize("name", [name for name in BASES if name not in WITHOUT_DEFAULTS])
def test_a_config_of_sizes_alone_has_the_defaults_of_transformers(name: str, tmp_path: Path) -> None:
    """transformers saves every default explicitly; the result must be the same model."""
    pytest.importorskip("transformers")
    from transformers import AutoConfig

    sizes = {key: FAMILY_CASES[name].config[key] for key in SIZES if key in FAMILY_CASES[name].config}
    # 160 is a multiple of every family's default number of KV heads; 128 is the widest default head
    sizes |= {"num_attention_heads": 160, "hidden_size": 160 * 128}
    if name == "falcon_h1":  # the default heads of its Mamba layers have 8 dimensions, which is refused
        sizes["mamba_n_heads"] = 64
    write_config(tmp_path, sizes)
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert len(saved) > len(sizes) + 5
    assert parse(saved).model == parse(sizes).model


@pytest.mark.parametrize(
    ("name", "key", "is_none"),
    [
        ("Mistral-7B-v0.1", "sliding_window", lambda model: model.layers[0].window == 0),
        ("Mistral-7B-v0.1", "num_key_value_heads", lambda model: model.n_kv_heads == model.n_heads),
        ("gemma-2-27b", "final_logit_softcapping", lambda model: model.logit_soft_cap == 0),
        ("gemma-2-27b", "attn_logit_softcapping", lambda model: model.attention_soft_cap == 0),
    ],
)
def test_null_turns_a_feature_off_that_is_on_by_default(name: str, key: str, is_none: Any) -> None:
    config = changed(PUBLISHED[name], sliding_window_size=None)
    assert is_none(parse({**config, key: None}).model)
    assert not is_none(parse(changed(config, **{key: None})).model)


@pytest.mark.parametrize(
    ("name", "key", "expected"),
    [
        ("Llama-2-7B", "rms_norm_eps", "a number from 0"),
        ("Llama-3.2-1B", "rope_theta", "a number"),
        ("Llama-2-7B", "tie_word_embeddings", "true or false"),
        ("gpt2", "scale_attn_weights", "true or false"),
        ("Qwen3-0.6B", "head_dim", "an integer from 1"),
        ("Qwen2.5-0.5B", "max_window_layers", "an integer from 0"),
        ("pythia-70m", "rotary_pct", "a number"),
        ("pythia-70m", "use_parallel_residual", "true or false"),
        ("gemma-3-1b", "rope_local_base_freq", "a number from 0"),
        ("granite-3.1-2b", "attention_multiplier", "a number from 0"),
        ("Mixtral-8x7B", "num_local_experts", "an integer from 1"),
        ("Mistral-7B-v0.1", "vocab_size", "an integer from 1"),
    ],
)
def test_null_is_refused_where_it_is_meaningless(name: str, key: str, expected: str) -> None:
    with pytest.raises(ExportError, match=f"  {key} is null, expected {expected}"):
        parse({**PUBLISHED[name], key: None})
    with pytest.raises(UnsupportedError, match="hidden_act None is not supported"):
        parse({**PUBLISHED["Llama-2-7B"], "hidden_act": None})


# ---- refused values


OTHERS_KEYS = [
    (name, key)
    for name, config in PUBLISHED.items()
    for key in ("attn_temperature_tuning", "residual_multiplier", "clip_qkv", "no_rope_layers")
    if "vision_config" not in config
    and key not in FAMILIES[config["model_type"]].keys
    and key not in FAMILIES[config["model_type"]].fixed
]


@pytest.mark.parametrize(("name", "key"), OTHERS_KEYS)
def test_keys_of_other_families_are_refused_by_name(name: str, key: str) -> None:
    with pytest.raises(ExportError, match=f"{key} is 0.5: llamac does not know this key"):
        parse({**PUBLISHED[name], key: 0.5})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("OLMoE-1B-7B", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ("OLMo-1B", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ("OLMo-1B", {"layer_norm_eps": 1e-6}, "layer_norm_eps is 1e-06"),
        ("Qwen3-Coder-30B-A3B", {"qkv_bias": True}, "qkv_bias is True"),
        ("Qwen3-Coder-30B-A3B", {"shared_expert_intermediate_size": 512}, "shared_expert_intermediate_size is 512"),
        ("stablelm-zephyr-3b", {"rotary_scaling_factor": 2.0}, "rotary_scaling_factor is 2.0"),
        ("Mistral-7B-v0.1", {"rope_scaling": {"rope_type": 0, "factor": 2.0}}, "has the type 0; supported are"),
        ("granite-swash-2b", {"layer_rope_theta": [*[1e4] * 23, 5e5]}, r"the bases \[10000.0, 500000.0\]; only one"),
        ("falcon-7b", {"alibi": True}, "alibi is True"),
        ("bloom-560m", {"apply_residual_connection_post_layernorm": True}, "post_layernorm is True"),
        ("opt-125m", {"do_layer_norm_before": False}, "do_layer_norm_before is False"),
        ("Mistral-7B-v0.1", {"hidden_act": 0}, "hidden_act 0 is not supported"),
        ("gemma-3-1b", {"hidden_activation": []}, r"hidden_activation \[\] is not supported"),
        ("gpt2", {"activation_function": False}, "activation_function False is not supported"),
        ("gemma-3-1b", {"use_bidirectional_attention": True}, "'Gemma3ForCausalLM', which is not a model of embed"),
        ("gemma-2-27b", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("Phi-4-mini", {"lm_head_bias": True}, "lm_head_bias is True"),
        ("Phi-4-mini", {"full_attn_mod": 2}, "full_attn_mod is 2"),
        ("Mistral-7B-v0.1", {"architectures": ["MistralForSequenceClassification"]}, "classifier with 2 classes"),
        ("Qwen2.5-0.5B", {"model_type": "qwen2_audio"}, "'qwen2_audio' is not supported"),
    ],
)
def test_features_that_the_graph_lacks_are_refused(name: str, change: Config, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        parse({**PUBLISHED[name], **change})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("Mistral-7B-v0.1", {"sliding_window": 0}, "sliding_window is 0, expected an integer from 1"),
        ("Qwen2.5-0.5B", {"layer_types": ["full_attention"]}, "layer_types is .*for each of 24 layers"),
        ("Qwen2.5-0.5B", {"layer_types": ["chunked_attention"] * 24}, "expected full_attention or sliding_attention"),
        ("Qwen2.5-0.5B", {"layer_types": ["sliding_attention"] * 24}, "full_attention only"),
        ("Qwen2.5-0.5B", {"max_window_layers": -1}, "max_window_layers is -1"),
        ("SmolLM3-3B", {"no_rope_layers": [1, 0]}, "no_rope_layers is .*one number for each of 36"),
        ("SmolLM3-3B", {"no_rope_layers": [2] * 36}, "no_rope_layers is .*integers from 0 to 1"),
        ("gemma-2-27b", {"sliding_window_size": 8192}, "sliding_window_size is 8192, expected the same"),
        ("gemma-2-27b", {"hidden_act": "relu"}, "hidden_act is 'relu', expected the same activation"),
        ("gemma-2-27b", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0, expected a number above 0"),
        ("gemma-2-27b", {"final_logit_softcapping": "30"}, "final_logit_softcapping is '30'"),
        ("gemma-3-1b", {"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        ("gemma-3-270m", {"layer_types": None, "_sliding_window_pattern": 5}, "the same as sliding_window_p"),
        ("gemma-3-1b", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters.rope_type is 'default'"),
        ("gemma-3-1b", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.rope_type is missing"),
        ("gemma-3-1b", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}, "truncate is False"),
        ("gemma-3-1b", {"rope_parameters": {"full_attention": 3}}, "rope_parameters.full_attention is 3"),
        ("Phi-4-mini", {"partial_rotary_factor": 0.001}, "partial_rotary_factor: RoPE rotates 0 of the 128 dimensions"),
        ("stablelm-2-12b", {"partial_rotary_factor": 0.02}, "RoPE rotates 3 of the 160 dimensions .*even number"),
        ("Mistral-Nemo", {"head_dim": 15}, "head_dim: RoPE rotates 15 of the 15 dimensions"),
        ("Phi-4-mini", {"partial_rotary_factor": 1.5}, "RoPE rotates 192 of the 128 dimensions"),
        ("Qwen3-0.6B", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, expected 1: qwen3"),
        ("gpt-neox-20b", {"rotary_pct": 0.5}, "partial_rotary_factor and rotary_pct differ, expected"),
        ("gpt-neox-20b", {"rope_theta": 1e5}, "rope_theta and rotary_emb_base differ, expected"),
        ("pythia-70m", {"rotary_emb_base": None, "rope_theta": 1e5}, "rope_theta is 1.* expected 10000.0: rota"),
        ("pythia-70m", {"rotary_pct": None, "partial_rotary_factor": 1.0}, "partial_rotary_factor is 1.0, expected"),
        ("granite-3.1-2b", {"logits_scaling": 0.0}, "logits_scaling is 0.0, expected a number above 0"),
        ("Mixtral-8x7B", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, expected at most"),
        ("Mixtral-8x7B", {"num_experts": 4}, "num_experts and num_local_experts differ, expected"),
        ("Qwen3-30B-A3B", {"mlp_only_layers": [48]}, "mlp_only_layers is .*integers from 0 to 47"),
        ("Qwen3-30B-A3B", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
    ],
)
def test_wrong_values_are_refused_by_name(name: str, change: Config, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        parse({**PUBLISHED[name], **change})


def test_layer_types_override_the_sliding_window_pattern() -> None:
    config = PUBLISHED["gemma-3-270m"]
    assert config["layer_types"]
    assert parse({**config, "_sliding_window_pattern": 5}).model == parse(config).model


def test_a_key_that_transformers_ignores_is_ignored_with_a_warning() -> None:
    warnings: list[str] = []
    capped = hf_config.parse_config({**PUBLISHED["gemma-3-1b"], "attn_logit_softcapping": 50.0}, warnings)
    assert capped.model == published("gemma-3-1b")
    assert ["attn_logit_softcapping is ignored" in warning for warning in warnings] == [True]


# ---- tensors under other names


@pytest.mark.parametrize("name", BASES)
def test_a_checkpoint_saved_by_transformers_is_the_same(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = family_checkpoint(tmp_path / "m", FAMILY_CASES[name])
    model = auto_class(folder).from_pretrained(folder)
    model.save_pretrained(tmp_path / "saved")
    again = read(tmp_path / "saved")
    assert_same(read(folder), again)
    # this version of transformers fuses the experts and names the weights accordingly
    names = {key: value.numpy() for key, value in model.state_dict().items() if "inv_freq" not in key}
    if again.config.tied_output:
        del names["lm_head.weight"]
    shutil.copytree(tmp_path / "saved", tmp_path / "fused")
    write_safetensors(tmp_path / "fused" / "model.safetensors", names)
    assert_same(again, read(tmp_path / "fused"))


def rewritten(folder: Path, rename: Any) -> Path:
    """Copy a directory and rename its tensors."""
    stored = read_safetensors(folder / "model.safetensors")
    tensors = {rename(name): tensor.lazy().array() for name, tensor in stored.items()}
    target = folder.parent / "renamed"
    shutil.copytree(folder, target)
    write_safetensors(target / "model.safetensors", tensors)
    return target


def test_gpt_neox_is_read_under_its_published_names(tmp_path: Path) -> None:
    folder = family_checkpoint(tmp_path / "m", FAMILY_CASES["gpt_neox"])
    names = {"lm_head": "embed_out", "embed_out": "lm_head"}
    other = rewritten(folder, lambda name: re.sub("^(lm_head|embed_out)", lambda match: names[match[1]], name))
    assert_same(read(folder), read(other))


@pytest.mark.parametrize("name", BASES)
def test_buffers_stored_by_old_versions_are_ignored(name: str, tmp_path: Path) -> None:
    folder, prefix = family_checkpoint(tmp_path / "m", FAMILY_CASES[name]), FAMILIES[name].prefix
    stored = read_safetensors(folder / "model.safetensors")
    tensors = {full_name: numbers(tensor) for full_name, tensor in stored.items()}
    attention = "layers.1.attention." if name == "gpt_neox" else "layers.1.self_attn."
    others = [f"{place}rotary_emb.{kind}" for place in ("", attention) for kind in ("inv_freq", "cos_cached")]
    others += [f"{attention}bias", f"{attention}masked_bias"] if name == "gpt_neox" else []
    others += ["rotary_emb_local.inv_freq"] if name == "gemma3_text" else []
    for other in others:
        tensors[prefix + other] = random_tensor(other, (1, 3))
    shutil.copytree(folder, tmp_path / "old")
    write_safetensors(tmp_path / "old" / "model.safetensors", tensors)
    assert_same(read(folder), read(tmp_path / "old"))


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_weights_of_the_language_model_are_found_in_a_vision_model(prefix: str, tmp_path: Path) -> None:
    folder = family_checkpoint(tmp_path / "m", FAMILY_CASES["gemma3_text"])
    other = rewritten(folder, lambda name: name.replace("model.", prefix, 1))
    stored = read_safetensors(other / "model.safetensors")
    tensors = {name: tensor.lazy().array() for name, tensor in stored.items()}
    tensors["vision_tower.vision_model.post_layernorm.weight"] = random_tensor("x", (4,))
    write_safetensors(other / "model.safetensors", tensors)
    text = FAMILY_CASES["gemma3_text"].config
    write_config(
        other, {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    )
    assert_same(read(folder), hf.read(other, []))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"n_group": 4}, "n_group is 4, expected a divisor"),
        ({"n_group": 6, "topk_group": 3}, "n_group is 6, expected a divisor .* with 2 experts or more"),
        ({"topk_group": 3}, "topk_group is 3, expected at most 2"),
        ({"num_experts_per_tok": 4}, "topk_group is 1, expected .* enough for 4 experts"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ({"rope_interleave": False}, "rope_interleave is False"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
    ],
)
def test_routers_that_deepseek_v3_does_not_have_are_refused_by_name(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises((ExportError, UnsupportedError), match=problem):
        parse({**FAMILY_CASES["deepseek_v3"].config, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"mlp_layer_types": ["dense", "sparse"]},
        {"mlp_layer_types": ["dense", "sparse", "none"]},
        {"first_k_dense_replace": 1, "mlp_layer_types": ["sparse", "sparse", "sparse"]},
    ],
)
def test_kinds_of_layers_must_agree(changes: dict[str, Any]) -> None:
    with pytest.raises(ExportError, match="mlp_layer_types"):
        parse({**FAMILY_CASES["glm4_moe_lite"].config, **changes})


@pytest.mark.parametrize("name", EXPERT_FAMILIES)
def test_missing_and_surplus_experts_are_reported(name: str, tmp_path: Path) -> None:
    folder = family_checkpoint(tmp_path / "m", FAMILY_CASES[name])
    config = FAMILY_CASES[name].config
    key = next(key for key in EXPERTS if key in config)
    count = config[key]
    write_config(folder, {**config, key: count + 2})
    with pytest.raises(ExportError, match=rf"missing: model\.layers\.1\..*experts\.{count}\."):
        read(folder)
    write_config(folder, {**config, key: count - 2})
    with pytest.raises(ExportError, match=rf"unknown: model\.layers\.1\..*experts\.{count - 2}\."):
        read(folder)


def test_tied_outputs_and_bare_models_are_read_in_every_family(tmp_path: Path) -> None:
    for name in BASES:
        case, family = FAMILY_CASES[name], FAMILIES[name]
        config = {**case.config, "architectures": [family.bare], "tie_word_embeddings": True}
        folder = family_checkpoint(tmp_path / name, replace(case))
        stored = read_safetensors(folder / "model.safetensors")
        bare = {
            full_name.removeprefix(family.prefix): numbers(tensor)
            for full_name, tensor in stored.items()
            if not full_name.startswith(("lm_head", "embed_out"))
        }
        write_config(folder, config)
        write_safetensors(folder / "model.safetensors", bare)
        assert read(folder).config.tied_output or family.normed_embedding
