"""GGUF architectures that compute what another one computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf_samples import checkpoint_tensors, converted, metadata, write_gguf, write_tensors

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
    "hunyuan_vl": {"rope.freq_base": 500.0, "rope.scaling.alpha": 50.0, "rope.dimension_sections": [2, 2, 2, 2]},
}


def read_as(path: Path, arch: str, config: Config, weights: Tensors, absent: tuple[str, ...] = ()) -> Checkpoint:
    """A checkpoint as a file of this architecture, without some keys, read again."""
    keys = {f"{arch}.{key}": value for key, value in metadata(config)[1].items() if key not in absent}
    return gguf_model.read(write_tensors(path, converted(config, weights), keys=keys, arch=arch), [])


def assert_same_tensors(ours: Checkpoint, theirs: Checkpoint) -> None:
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name, tensor in theirs.tensors.items():
        np.testing.assert_array_equal(ours.tensors[name].array(), tensor.array(), name)


@pytest.mark.parametrize("arch", ["internlm2", "xverse", "baichuan"])
def test_files_that_compute_what_llama_computes_are_read_like_it(tmp_path: Path, arch: str) -> None:
    config = CASES["llama-no-biases"].config
    ours, theirs = (read_as(tmp_path / f"{name}.gguf", name, config, tensors(config)) for name in (arch, "llama"))
    assert ours.config == theirs.config
    assert ours.metadata["architecture"] == "llama"
    assert_same_tensors(ours, theirs)


def test_baichuan_13b_has_attention_that_llamac_does_not_compute(tmp_path: Path) -> None:
    keys = {"baichuan.block_count": 40}
    path = write_tensors(tmp_path / "m.gguf", {EMBEDDING: np.zeros((61, 40), np.float32)}, keys=keys, arch="baichuan")
    with pytest.raises(llamac.UnsupportedError, match=r"so many layers bias attention by distance \(ALiBi"):
        gguf_model.read(path, [])


@pytest.mark.parametrize(
    ("arch", "name", "changes"),
    [
        ("orion", "stablelm-use_parallel_residual", {"partial_rotary_factor": 1.0, "qk_layernorm": False}),
        ("bailingmoe2", "glm4_moe", {"attention_bias": False}),
        ("hunyuan_vl", "hunyuan_v1_dense", {"attention_bias": False}),
    ],
)
def test_files_that_compute_what_another_architecture_does_are_read_like_it(
    tmp_path: Path, arch: str, name: str, changes: Config
) -> None:
    case = FAMILY_CASES[name]
    config = changed(case.config, **changes)
    stored = checkpoint_tensors(family_checkpoint(tmp_path / "hf", replace(case, config=config)))
    weights = {full: rows for full, rows in stored.items() if "_layernorm.norms." not in full}
    theirs = gguf_model.read(write_gguf(tmp_path / "n.gguf", config, weights), [])
    own = {**metadata(config)[1], **OWN_KEYS[arch]}
    keys = {f"{arch}.{key}": value for key, value in own.items() if value is not None}
    stored = {
        full.replace("post_attention_norm", "ffn_norm"): rows for full, rows in converted(config, weights).items()
    }
    ours = gguf_model.read(write_tensors(tmp_path / "m.gguf", stored, keys=keys, arch=arch), [])
    assert ours.config == theirs.config
    assert ours.metadata["architecture"] == theirs.metadata["architecture"]
    assert_same_tensors(ours, theirs)


def test_minicpm_is_granite_with_scales_of_its_own_if_a_file_has_no_keys(tmp_path: Path) -> None:
    case = FAMILY_CASES["granite"]
    weights = checkpoint_tensors(family_checkpoint(tmp_path / "hf", case))
    theirs = gguf_model.read(write_gguf(tmp_path / "granite.gguf", case.config, weights), [])
    ours = read_as(tmp_path / "m.gguf", "minicpm", case.config, weights)
    assert ours.config == theirs.config
    assert_same_tensors(ours, theirs)
    scales = ("embedding_scale", "residual_scale", "logit_scale")
    early = read_as(tmp_path / "m.gguf", "minicpm", case.config, weights, absent=scales).config
    assert early.embedding_scale == 12.0
    assert early.residual_scale == pytest.approx(1.4 / len(early.layers) ** 0.5)
    assert early.logit_scale == pytest.approx(256 / early.dim)
    assert replace(early, **{name: getattr(theirs.config, name) for name in scales}) == theirs.config
