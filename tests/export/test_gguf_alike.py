"""GGUF architectures that compute what another one computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_mtp_samples import write_with_mtp
from gguf_samples import checkpoint_tensors, converted, metadata, write_gguf, write_tensors
from test_mtp_layers import mtp_tensors
from to_gguf_cases import NO_BIAS, SQUARE, fitting

import llamac
from golden.cases import CASES
from golden.family_cases import FAMILY_CASES
from golden.make_families import family_checkpoint
from golden.tiny_checkpoints import Config, Tensors, changed, tensors
from llamac.export.checkpoint import Checkpoint
from llamac.export.gguf import model as gguf_model
from llamac.export.gguf.config import EMBEDDING

# Keys that the other architecture does not have, or has other values of; None: that only it has.
OWN_KEYS: dict[str, Config] = {
    "orion": {"use_parallel_residual": None},
    "bailingmoe2": {"expert_shared_feed_forward_length": 20},
    "minicpm": {"attention.scale": None},
    "hunyuan_vl": {"rope.freq_base": 500.0, "rope.scaling.alpha": 50.0, "rope.dimension_sections": [3, 2, 2, 0]},
}


# Of those that compute what other families than LLaMA do: a case of that family, and changes of its config.
FURTHER: dict[str, tuple[str, Config]] = {
    "orion": ("stablelm-use_parallel_residual", {"partial_rotary_factor": 1.0, "qk_layernorm": False}),
    "bailingmoe2": ("glm4_moe", {**NO_BIAS, **SQUARE, "partial_rotary_factor": 0.4}),
    "hunyuan_vl": ("hunyuan_v1_dense", NO_BIAS),
}
LIKE_LLAMA = ("internlm2", "xverse", "baichuan")


def write_as(path: Path, arch: str, config: Config, weights: Tensors, absent: tuple[str, ...] = ()) -> Path:
    """Write a checkpoint as a file of this architecture, without some keys."""
    own = {**metadata(config)[1], **OWN_KEYS.get(arch, {}), **dict.fromkeys(absent)}
    keys = {f"{arch}.{key}": value for key, value in own.items() if value is not None}
    stored = converted(config, weights)
    if arch == "bailingmoe2":
        stored = of_ling(config["num_hidden_layers"], stored)
    return write_tensors(path, stored, keys={"tokenizer.ggml.model": "no_vocab", **keys}, arch=arch)


def of_ling(n_layers: int, stored: Tensors) -> Tensors:
    """GLM-4.5's tensors, as the converter writes those of Ling 2, which has q, k and v in one."""
    found = {full.replace("post_attention_norm", "ffn_norm"): rows for full, rows in stored.items()}
    for layer in range(n_layers + 1):
        if f"blk.{layer}.attn_q.weight" not in found:  # only models with an MTP layer have the last block
            continue
        parts = [found.pop(f"blk.{layer}.attn_{part}.weight") for part in "qkv"]
        found[f"blk.{layer}.attn_qkv.weight"] = np.concatenate(parts)
    return found


def further(root: Path, arch: str) -> tuple[Config, Tensors]:
    """The config and the tensors of the case."""
    name, changes = FURTHER[arch]
    config = changed(FAMILY_CASES[name].config, **changes)
    stored = checkpoint_tensors(family_checkpoint(root / "hf", FAMILY_CASES[name]))
    kept = {full: rows for full, rows in stored.items() if "_layernorm.norms." not in full}
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


def test_baichuan_13b_has_attention_that_llamac_does_not_compute(tmp_path: Path) -> None:
    keys = {"baichuan.block_count": 40}
    path = write_tensors(tmp_path / "m.gguf", {EMBEDDING: np.zeros((61, 40), np.float32)}, keys=keys, arch="baichuan")
    with pytest.raises(llamac.UnsupportedError, match=r"so many layers bias attention by distance \(ALiBi"):
        gguf_model.read(path, [])


@pytest.mark.parametrize("arch", FURTHER)
def test_files_that_compute_what_another_architecture_does_are_read_like_it(tmp_path: Path, arch: str) -> None:
    config, weights = further(tmp_path, arch)
    theirs = gguf_model.read(write_gguf(tmp_path / "n.gguf", config, weights), [])
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
    stored[f"blk.{n}.layer_output_norm.weight"] = stored.pop(f"blk.{n}.nextn.shared_head_norm.weight")
    own = {**metadata(config)[1], **OWN_KEYS["bailingmoe2"], "block_count": n + 1, "nextn_predict_layers": 1}
    keys = {f"bailingmoe2.{key}": value for key, value in own.items()}
    path = write_tensors(tmp_path / "m.gguf", of_ling(n, stored), keys=keys, arch="bailingmoe2")
    ours = gguf_model.read(path, [])
    assert ours.config == theirs.config
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
