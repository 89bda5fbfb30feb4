"""Configs and checkpoints of Gemma 4: its published models, keys that are refused, tensors that are ignored."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from test_families import assert_same, published

from golden.family_cases import FAMILY_CASES
from golden.make_families import family_checkpoint
from golden.published_configs import PUBLISHED
from golden.tiny_checkpoints import Config, random_tensor, write_safetensors
from hf_reading import parse, read
from llamac.errors import ExportError, UnsupportedError
from llamac.export.hf.safetensors_file import read_safetensors


def test_published_configs_of_gemma4_give_the_expected_models() -> None:
    model = published("gemma-4-31B-text")
    assert (model.n_heads, model.n_kv_heads, model.head_dim, model.rope_dim) == (32, 16, 512, (512, 256))
    assert (model.attention_scale, model.logit_soft_cap, model.embedding_scale) == (1.0, 30.0, 5376**0.5)
    local, full = model.layers[0], model.layers[5]
    assert (local.window, local.head_dim, local.n_kv_heads, local.v_is_k, local.rope) == (1024, 256, 0, 0, 1)
    assert (full.window, full.head_dim, full.n_kv_heads, full.v_is_k, full.rope) == (0, 0, 4, 1, 0)
    assert {layer.v_norm for layer in model.layers} == {"head"}
    parsed = parse(PUBLISHED["gemma-4-31B-text"])
    assert [np.count_nonzero(table.inv_freq) for table in parsed.ropes] == [64, 128]
    layers = published("gemma-4-E2B-text").layers
    assert [layer.kv_source for layer in layers] == [-1] * 15 + [13, 13, 13, 13, 14] * 4
    assert [layer.ffn_dim for layer in layers] == [6144] * 15 + [12288] * 20
    assert {(layer.layer_embedding_dim, layer.v_is_k) for layer in layers} == {(256, 0)}
    layer = published("gemma-4-26B-A4B-text").layers[0]
    assert (layer.ffn, layer.n_experts, layer.n_experts_used, layer.ffn_dim) == ("experts", 128, 8, 704)
    assert (layer.shared_ffn_dim, layer.shared_gate, layer.expert_norms, layer.expert_factors) == (2112, 0, 1, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_shared_layers": 60}, "num_kv_shared_layers is 60, expected an integer from 0 to 59"),
        ({"num_kv_shared_layers": 55}, "num_kv_shared_layers is 55, expected less: a kind of layers has no keys"),
        ({"num_global_key_value_heads": 3}, "num_global_key_value_heads is 3, expected a divisor"),
        ({"layer_types": ["sliding_attention"] * 60}, "full_attention for the last layer"),
        ({"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 7}, "expected at least vocab_size"),
        ({"hidden_size_per_layer_input": None}, "hidden_size_per_layer_input is null"),
        ({"enable_moe_block": True}, "num_experts is null"),
        ({"per_layer_config": {"05": {"head_dim": 512}}}, "per_layer_config is .*equal for layers of one kind"),
        ({"per_layer_config": {"9" * 5000: {"head_dim": 512}}}, "per_layer_config is .* some of 60 layers"),
        ({"per_layer_config": {"x": {"head_dim": 512}}}, "per_layer_config is .* some of 60 layers"),
        ({"per_layer_config": {"60": {"head_dim": 512}}}, "per_layer_config is .* some of 60 layers"),
        ({"per_layer_config": {"0": {"sliding_window": 5}}}, "per_layer_config is .*head_dim of some"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_theta is missing"),
        ({"rope_theta": 1e4}, "rope_theta is 10000.0: llamac does not know this key"),
    ],
)
def test_wrong_keys_of_gemma4_are_refused_by_name(change: Config, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        parse({**PUBLISHED["gemma-4-31B-text"], **change})


def test_what_gemma4_cannot_compute_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="use_bidirectional_attention is 'all'"):
        parse({**PUBLISHED["gemma-4-31B-text"], "use_bidirectional_attention": "all"})


def test_keys_of_layers_that_read_others_are_ignored(tmp_path: Path) -> None:
    """Published checkpoints have them for all layers."""
    folder = family_checkpoint(tmp_path / "m", FAMILY_CASES["gemma4_text"])
    stored = read_safetensors(folder / "model.safetensors")
    tensors = {name: tensor.lazy().array() for name, tensor in stored.items()}
    for name in ("k_proj.weight", "v_proj.weight", "k_norm.weight", "k_proj.bias"):
        tensors[f"model.layers.3.self_attn.{name}"] = random_tensor(name, (3, 4))
    shutil.copytree(folder, tmp_path / "all")
    write_safetensors(tmp_path / "all" / "model.safetensors", tensors)
    assert_same(read(folder), read(tmp_path / "all"))
    del tensors["model.layers.2.layer_scalar"]
    write_safetensors(tmp_path / "all" / "model.safetensors", tensors)
    with pytest.raises(ExportError, match=r"missing: model\.layers\.2\.layer_scalar, expected one number"):
        read(tmp_path / "all")
