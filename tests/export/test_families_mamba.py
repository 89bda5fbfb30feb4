"""Families with Mamba 2 layers: the models that published configs give, and keys that contradict each other."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from golden.published_configs import PUBLISHED
from golden.tiny_checkpoints import Config
from hf_reading import parse
from llamac.errors import ExportError, UnsupportedError
from llamac.export.checkpoint import ModelConfig
from llamac.format.strict_json import read_object


def published(name: str) -> ModelConfig:
    return parse(PUBLISHED[name]).model


def test_published_configs_with_mamba_layers_give_the_expected_models() -> None:
    micro, tiny = (published(f"granite-4.0-h-{size}") for size in ("micro", "tiny"))
    assert [layer for layer, record in enumerate(micro.layers) if record.mixer == "attention"] == [5, 15, 25, 35]
    assert (micro.state_norm, micro.state_step_min, micro.state_step_max) == ("after_gate", 0.0, 0.0)
    assert {layer.rope for layer in micro.layers} == {-1}
    layer = micro.layers[0]
    assert (layer.state_heads, layer.state_value_dim, layer.state_key_heads, layer.state_key_dim) == (64, 64, 1, 128)
    assert (layer.ffn, layer.ffn_dim, layer.conv_width) == ("gated", 8192, 4)
    layer = tiny.layers[0]
    assert (layer.mixer, layer.n_experts, layer.n_experts_used, layer.ffn_dim) == ("mamba2", 64, 6, 512)
    assert (layer.shared_ffn_dim, layer.shared_gate, layer.expert_weights) == (1024, 0, 1)


def test_published_configs_of_falcon_h1_give_the_expected_models() -> None:
    config = parse(PUBLISHED["Falcon-H1-0.5B-Instruct"])
    layer = config.model.layers[35]
    assert (layer.mixer, layer.rope, layer.ffn, layer.state_heads, layer.state_value_dim) == (
        *("attention_mamba2", 0, "gated"),
        *(24, 64),
    )
    assert (config.model.state_norm, config.model.embedding_scale) == ("none", 5.656854249492381)
    assert config.model.logit_scale == 0.0390625
    assert config.factors["attn_k.weight"] == config.factors["attn_k.bias"] == 0.390625
    of_xbc = np.asarray(config.factors["mamba_xbc.weight"])
    expected = np.array([0.3125, 1.25 * 0.3535533905932738, 0.625], np.float32)
    np.testing.assert_allclose(np.unique(of_xbc), expected, rtol=1e-6)
    for changes, message in (
        ({"ssm_multipliers": [1.0, 2.0]}, r"ssm_multipliers is \[1.0, 2.0\], expected 5 nonnegative numbers"),
        ({"mlp_multipliers": [1.0, "a"]}, "mlp_multipliers is .*, expected a list of nonnegative numbers"),
        ({"mamba_d_ssm": 1500}, "mamba_n_heads is 24, expected a number for which the heads have 1500 numbers"),
    ):
        with pytest.raises(ExportError, match=message):
            parse({**PUBLISHED["Falcon-H1-0.5B-Instruct"], **changes})


def test_published_configs_of_nemotron_h_give_the_expected_models() -> None:
    for name, mixers, networks in (
        ("Nemotron-H-8B-Base-8K", {"mamba2": 24, "attention": 4}, {"plain": 24}),
        ("NVIDIA-Nemotron-Nano-9B-v2", {"mamba2": 27, "attention": 4}, {"plain": 25}),
        ("NVIDIA-Nemotron-3-Nano-30B-A3B", {"mamba2": 23, "attention": 6}, {"experts": 23}),
    ):
        model = published(name)
        assert Counter(layer.mixer for layer in model.layers if layer.ffn == "none") == mixers
        assert Counter(layer.ffn for layer in model.layers if layer.mixer == "none") == networks
        assert (model.position, model.activation, model.state_norm) == ("none", "relu2", "after_gate")
        assert (model.state_step_min, model.state_step_max) == (np.float32(0.001), 0.0)
    layer = published("NVIDIA-Nemotron-3-Nano-30B-A3B").layers[1]
    assert (layer.n_experts, layer.n_experts_used, layer.ffn_dim, layer.shared_ffn_dim) == (128, 6, 1856, 3712)
    assert (layer.plain_experts, layer.router, layer.router_choice_bias, layer.n_expert_groups) == (1, "sigmoid", 1, 0)
    assert (layer.expert_weights, layer.expert_scale) == (1, 2.5)


def test_keys_of_nemotron_h_that_are_not_computed_or_contradict_each_other_are_refused() -> None:
    config = PUBLISHED["NVIDIA-Nemotron-3-Nano-30B-A3B"]
    refused: list[tuple[Config, str]] = [
        ({"attention_bias": True}, "requires features that llamac does not support: attention_bias is True"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act is 'gelu'"),
        ({"sliding_window": 512}, "sliding_window is 512"),
    ]
    for changes, message in refused:
        with pytest.raises(UnsupportedError, match=message):
            parse({**config, **changes})
    wrong: list[tuple[Config, str]] = [
        ({"num_hidden_layers": 51}, "num_hidden_layers is 51, expected the number of layers in the pattern, 52"),
        ({"hybrid_override_pattern": "M*X"}, r"hybrid_override_pattern is 'M\*X', expected one of M \(linear_"),
        ({"layers_block_type": ["moe", "conv"]}, r"layers_block_type is \['moe', 'conv'\], expected one of M"),
        ({"mamba_num_heads": 63}, r"mamba_num_heads is 63, expected a multiple of n_groups \(8\)"),
        ({"moe_latent_size": 0}, "moe_latent_size is 0, expected an integer from 1"),
        ({"n_group": 3}, "n_group is 3, expected a divisor of the number of experts, 128"),
        ({"mamba_n_groups": 4}, "mamba_n_groups is 4, but n_groups is 8"),
        ({"new_key": 1}, "new_key is 1: llamac does not know this key"),
    ]
    for changes, message in wrong:
        with pytest.raises(ExportError, match=message):
            parse({**config, **changes})


def test_keys_of_mamba_layers_that_contradict_each_other_are_refused() -> None:
    config = PUBLISHED["granite-4.0-h-micro"]
    for changes, message in (
        ({"mamba_n_heads": 63}, "mamba_n_heads is 63, expected a number for which the heads have 4096 numbers"),
        ({"mamba_n_groups": 3}, r"mamba_n_heads is 64, expected a multiple of mamba_n_groups \(3\)"),
        ({"layer_types": ["mamba"] * 39 + ["conv"]}, "layer_types is .*, expected mamba or attention for each of 40"),
        ({"time_step_limit": [1.0, 0.5]}, "time_step_limit is .*, expected two ascending numbers"),
        ({"num_local_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok is 5, expected at most the number"),
    ):
        with pytest.raises(ExportError, match=message):
            parse({**config, **changes})
    with pytest.raises(UnsupportedError, match="hidden_act is 'gelu'; llamac computes Mamba 2 layers with silu only"):
        parse({**config, "hidden_act": "gelu"})


def test_no_upper_limit_of_steps_is_infinity(tmp_path: Path) -> None:
    """Python writes Infinity, which is not JSON; transformers 5 an object."""
    text = json.dumps({**PUBLISHED["granite-4.0-h-micro"], "time_step_limit": [0.5, float("inf")]})
    (tmp_path / "config.json").write_text(text)
    values = read_object(tmp_path / "config.json", infinity=True)
    assert values["time_step_limit"] == [0.5, {"__float__": "Infinity"}]
    model = parse(values).model
    assert (model.state_step_min, model.state_step_max) == (0.5, 0.0)
    with pytest.raises(ExportError, match="Infinity is not a JSON number"):
        read_object(tmp_path / "config.json")
