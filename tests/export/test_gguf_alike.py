"""GGUF architectures that compute what another one computes."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_mtp_samples import write_with_mtp
from gguf_samples import checkpoint_tensors, converted, metadata, permuted, write_gguf, write_tensors
from test_mtp_layers import mtp_tensors
from to_gguf_cases import NO_BIAS, SQUARE, fitting

from golden.cases import CASES
from golden.family_cases import FAMILY_CASES
from golden.make_families import family_checkpoint
from golden.tiny_checkpoints import Config, Tensors, changed, tensors
from llamac.export.checkpoint import Checkpoint
from llamac.export.gguf import model as gguf_model

# GLM-4.5 with softmaxes over experts, whose weights are not divided by their sum, and without norms of q and k.
_SOFTMAX: Config = {
    **NO_BIAS,
    **SQUARE,
    "partial_rotary_factor": 1.0,
    "use_qk_norm": False,
    "norm_topk_prob": False,
    **dict.fromkeys(("n_group", "topk_group"), 1),
}
_WITHOUT_GROUPS = dict.fromkeys(("expert_gating_func", "expert_group_count", "expert_group_used_count"))
# Keys that the other architecture does not have, or has other values of; None: that only it has.
OWN_KEYS: dict[str, Config] = {
    "orion": {"use_parallel_residual": None},
    "bailingmoe2": {"expert_shared_feed_forward_length": 20},
    "bailingmoe": _WITHOUT_GROUPS,
    "codeshell": {"attention.sliding_window": None},
    "deepseek": _WITHOUT_GROUPS,
    "minicpm": {"attention.scale": None},
    "qwen": {"feed_forward_length": 104, "attention.head_count_kv": None},
    "hunyuan_vl": {"rope.freq_base": 500.0, "rope.scaling.alpha": 50.0, "rope.dimension_sections": [3, 2, 2, 0]},
}


# Of those that compute what other families than LLaMA do: a case of that family, and changes of its config.
FURTHER: dict[str, tuple[str, Config]] = {
    "orion": ("stablelm-use_parallel_residual", {"partial_rotary_factor": 1.0, "qk_layernorm": False}),
    "bailingmoe": ("glm4_moe-use_qk_norm", {**_SOFTMAX, "norm_topk_prob": True, "first_k_dense_replace": 0}),
    "bailingmoe2": ("glm4_moe", {**NO_BIAS, **SQUARE, "partial_rotary_factor": 0.4}),
    "codeshell": ("starcoder2", {"sliding_window": None}),
    "deepseek": ("glm4_moe-use_qk_norm", _SOFTMAX),
    "hunyuan_vl": ("hunyuan_v1_dense", NO_BIAS),
    "qwen": ("qwen2", {"num_key_value_heads": 4, "use_sliding_window": False}),
}
FUSED_QKV = ("bailingmoe2", "codeshell", "qwen")
ROTATED_PAIRS = ("bailingmoe", "deepseek")
LIKE_LLAMA = ("internlm2", "xverse", "baichuan")


def write_as(path: Path, arch: str, config: Config, weights: Tensors, absent: tuple[str, ...] = ()) -> Path:
    """Write a checkpoint as a file of this architecture, without some keys."""
    own = {**metadata(config)[1], **OWN_KEYS.get(arch, {}), **dict.fromkeys(absent)}
    keys = {f"{arch}.{key}": value for key, value in own.items() if value is not None}
    stored = converted(config, weights)
    if arch in ("bailingmoe", "bailingmoe2", "deepseek"):
        stored = {full.replace("post_attention_norm", "ffn_norm"): rows for full, rows in stored.items()}
    for part, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
        for full in [full for full in stored if arch in ROTATED_PAIRS and f".attn_{part}." in full]:
            stored[full] = permuted(stored[full], config[heads])
    if arch in FUSED_QKV:
        stored = with_fused_qkv(config["num_hidden_layers"], stored)
    return write_tensors(path, stored, keys={"tokenizer.ggml.model": "no_vocab", **keys}, arch=arch)


def with_fused_qkv(n_layers: int, stored: Tensors) -> Tensors:
    """The tensors, with q, k and v fused. Only models with an MTP layer have a block after the layers."""
    found = dict(stored)
    for layer, kind in itertools.product(range(n_layers + 1), ("weight", "bias")):
        if f"blk.{layer}.attn_q.{kind}" in found:
            parts = [found.pop(f"blk.{layer}.attn_{part}.{kind}") for part in "qkv"]
            found[f"blk.{layer}.attn_qkv.{kind}"] = np.concatenate(parts)
    return found


def further(root: Path, arch: str) -> tuple[Config, Tensors]:
    """The config and the tensors of the case."""
    name, changes = FURTHER[arch]
    config = changed(FAMILY_CASES[name].config, **changes)
    stored = checkpoint_tensors(family_checkpoint(root / "hf", FAMILY_CASES[name]))
    kept = {full: rows for full, rows in stored.items() if "_layernorm.norms." not in full}
    if arch == "qwen":  # as many KV heads as heads
        kept |= {
            full: np.concatenate((rows, rows[::-1])) for full, rows in kept.items() if ".k_p" in full or ".v_p" in full
        }
    if arch in ROTATED_PAIRS:
        kept = {full: rows for full, rows in kept.items() if "e_score_correction" not in full}
    if arch == "bailingmoe":  # all layers have experts
        config = changed(config, num_hidden_layers=config["num_hidden_layers"] - 1)
        shifted = {
            re.sub(r"layers\.(\d+)", lambda found: f"layers.{int(found[1]) - 1}", full): rows
            for full, rows in kept.items()
        }
        kept = {full: rows for full, rows in shifted.items() if "layers.-1." not in full}
    return config, fitting(config, kept)


def assert_same_tensors(ours: Checkpoint, theirs: Checkpoint) -> None:
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name, tensor in theirs.tensors.items():
        np.testing.assert_array_equal(ours.tensors[name].array(), tensor.array(), name)


@pytest.mark.parametrize("arch", LIKE_LLAMA)
def test_files_that_compute_what_llama_computes_are_read_like_it(tmp_path: Path, arch: str) -> None:
    config = CASES["llama-no-biases"].config
    files = (write_as(tmp_path / f"{name}.gguf", name, config, tensors(config)) for name in (arch, "llama"))
    ours, theirs = (gguf_model.read(file, []) for file in files)
    assert ours.config == theirs.config
    assert ours.metadata["architecture"] == "llama"
    assert_same_tensors(ours, theirs)


def test_baichuan_13b_has_biases_by_distance_in_place_of_rope(tmp_path: Path) -> None:
    """test_gguf_llama_cpp compares their sizes."""
    config = changed(CASES["llama-no-biases"].config, num_hidden_layers=40)
    made = gguf_model.read(write_as(tmp_path / "m.gguf", "baichuan", config, tensors(config)), [])
    assert made.config.position == "none"
    assert made.config.bias_distance == made.config.context - 1
    assert "distance_bias.weight" in made.tensors


@pytest.mark.parametrize("arch", FURTHER)
def test_files_that_compute_what_another_architecture_does_are_read_like_it(tmp_path: Path, arch: str) -> None:
    config, weights = further(tmp_path, arch)
    router = {"expert_gating_func": 1} if arch in ROTATED_PAIRS else {}
    theirs = gguf_model.read(write_gguf(tmp_path / "n.gguf", config, weights, changes=router), [])
    ours = gguf_model.read(write_as(tmp_path / "m.gguf", arch, config, weights), [])
    assert ours.config == theirs.config
    assert ours.metadata["architecture"] == theirs.metadata["architecture"]
    assert_same_tensors(ours, theirs)


def test_the_norm_after_the_mtp_layer_of_ling_2_has_a_name_of_its_own(tmp_path: Path) -> None:
    config, weights = further(tmp_path, "bailingmoe2")
    weights |= mtp_tensors(weights, "glm4_moe")[1]
    theirs = gguf_model.read(write_with_mtp(tmp_path / "n.gguf", config, weights), [])
    assert theirs.config.mtp is not None
    with_mtp = gguf.GGUFReader(tmp_path / "n.gguf")
    stored = {tensor.name: np.array(tensor.data) for tensor in with_mtp.tensors}
    n = config["num_hidden_layers"]
    stored = {full.replace("post_attention_norm", "ffn_norm"): rows for full, rows in stored.items()}
    stored[f"blk.{n}.layer_output_norm.weight"] = stored.pop(f"blk.{n}.nextn.shared_head_norm.weight")
    own = {**metadata(config)[1], **OWN_KEYS["bailingmoe2"], "block_count": n + 1, "nextn_predict_layers": 1}
    keys = {f"bailingmoe2.{key}": value for key, value in own.items()}
    path = write_tensors(tmp_path / "m.gguf", with_fused_qkv(n, stored), keys=keys, arch="bailingmoe2")
    ours = gguf_model.read(path, [])
    assert ours.config == theirs.config
    assert_same_tensors(ours, theirs)


def test_files_of_mistral_4_can_have_the_architecture_of_deepseek(tmp_path: Path) -> None:
    """The converter writes it for models with Mistral's own names, and for Mistral Large 3."""
    case = FAMILY_CASES["mistral4"]
    weights = checkpoint_tensors(family_checkpoint(tmp_path / "hf", case))
    files = (write_as(tmp_path / f"{arch}.gguf", arch, case.config, weights) for arch in ("deepseek2", "mistral4"))
    ours, theirs = (gguf_model.read(file, []) for file in files)
    assert ours.config == theirs.config
    assert {layer.query_beta for layer in ours.config.layers} == {0.5}
    assert ours.metadata["architecture"] == theirs.metadata["architecture"] == "mistral4"
    assert_same_tensors(ours, theirs)


def test_minicpm_is_granite_with_scales_of_its_own_if_a_file_has_no_keys(tmp_path: Path) -> None:
    case = FAMILY_CASES["granite"]
    weights = checkpoint_tensors(family_checkpoint(tmp_path / "hf", case))
    theirs = gguf_model.read(write_gguf(tmp_path / "granite.gguf", case.config, weights), [])
    ours = gguf_model.read(write_as(tmp_path / "m.gguf", "minicpm", case.config, weights), [])
    scale = theirs.config.head_dim**-0.5
    assert ours.config == replace(theirs.config, attention_scale=scale)
    assert_same_tensors(ours, theirs)
    scales = ("embedding_scale", "residual_scale", "logit_scale")
    path = write_as(tmp_path / "m.gguf", "minicpm", case.config, weights, absent=scales)
    early = gguf_model.read(path, []).config
    assert early.embedding_scale == 12.0
    assert early.residual_scale == pytest.approx(1.4 / len(early.layers) ** 0.5)
    assert early.logit_scale == pytest.approx(256 / early.dim)
    assert replace(early, **{name: getattr(ours.config, name) for name in scales}) == ours.config
