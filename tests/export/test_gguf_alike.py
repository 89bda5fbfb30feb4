"""GGUF architectures that compute what another one computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf_samples import checkpoint_tensors, converted, metadata, write_gguf, write_tensors

from golden.cases import CASES
from golden.family_cases import FAMILY_CASES
from golden.make_families import family_checkpoint
from golden.tiny_checkpoints import Config, Tensors, tensors
from llamac.export.checkpoint import Checkpoint
from llamac.export.gguf import model as gguf_model


def read_as(path: Path, arch: str, config: Config, weights: Tensors, absent: tuple[str, ...] = ()) -> Checkpoint:
    """A checkpoint as a file of this architecture, without some keys, read again."""
    keys = {f"{arch}.{key}": value for key, value in metadata(config)[1].items() if key not in absent}
    return gguf_model.read(write_tensors(path, converted(config, weights), keys=keys, arch=arch), [])


def assert_same_tensors(ours: Checkpoint, theirs: Checkpoint) -> None:
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name, tensor in theirs.tensors.items():
        np.testing.assert_array_equal(ours.tensors[name].array(), tensor.array(), name)


@pytest.mark.parametrize("arch", ["internlm2", "xverse"])
def test_files_that_compute_what_llama_computes_are_read_like_it(tmp_path: Path, arch: str) -> None:
    config = CASES["llama-no-biases"].config
    ours, theirs = (read_as(tmp_path / f"{name}.gguf", name, config, tensors(config)) for name in (arch, "llama"))
    assert ours.config == theirs.config
    assert ours.metadata["architecture"] == "llama"
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
