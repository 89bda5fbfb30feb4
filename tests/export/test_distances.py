"""Biases of distances, as MPNet stores them: by buckets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import llamac
from golden.encoder_cases import ENCODER_CASES
from golden.make_encoders import encoder_checkpoint
from golden.tiny_checkpoints import write_safetensors
from llamac import ExportError
from llamac.export.checkpoint import LazyTensor
from llamac.export.distances import BUCKETS, FARTHEST, bucket, by_distance
from llamac.export.hf import model as hf
from llamac.export.hf.safetensors_file import read_safetensors
from llamac.format.flatfile import FlatFile

TABLE = "encoder.relative_attention_bias.weight"
# The first distance of each bucket of one side, as transformers' MPNet computes them.
FIRST = [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91]


@pytest.mark.parametrize("sign", [-1, 1])
def test_buckets_are_those_of_transformers(sign: int) -> None:
    first_of_side = 0 if sign < 0 else BUCKETS // 2
    for distance in range(1, 1000):
        index = bucket(sign * distance) - first_of_side
        assert FIRST[index] <= distance < [*FIRST, 1000][index + 1]
    assert bucket(0) == 0


def test_biases_can_be_read_in_parts() -> None:
    table = np.arange(BUCKETS * 3, dtype=np.float32).reshape(BUCKETS, 3)
    tensor = by_distance(LazyTensor.of(table))
    biases = tensor.array().reshape(3, 2 * FARTHEST + 1)
    for head in range(3):
        for distance in (-FARTHEST, -91, -90, -1, 0, 1, 8, FARTHEST):
            assert biases[head, FARTHEST + distance] == table[bucket(distance), head]
    np.testing.assert_array_equal(tensor.read(100, 700), biases.reshape(-1)[100:700])


def test_a_table_of_another_shape_is_an_error(tmp_path: Path) -> None:
    folder = encoder_checkpoint(tmp_path / "mpnet", ENCODER_CASES["mpnet"])
    stored = read_safetensors(folder / "model.safetensors")
    tensors = {name: tensor.lazy().array() for name, tensor in stored.items()}
    for found in (tensors[TABLE][:-1], tensors[TABLE].T.copy()):
        write_safetensors(folder / "model.safetensors", tensors | {TABLE: found})
        with pytest.raises(ExportError, match=rf"misshaped: {TABLE} is .*requires \(32, 4\)"):
            hf.read(folder, [])


def test_quantized_models_keep_their_biases(tmp_path: Path) -> None:
    folder = encoder_checkpoint(tmp_path / "mpnet", ENCODER_CASES["mpnet"])
    for dtype in ("f32", "q8", "q4"):
        llamac.export.export(folder, tmp_path / f"{dtype}.bin", dtype=dtype)
    files = [FlatFile(tmp_path / f"{dtype}.bin") for dtype in ("f32", "q8", "q4")]
    exact, *others = (file.tensor("distance_bias.weight") for file in files)
    assert exact.shape == (4 * (2 * FARTHEST + 1),)
    for other in others:
        np.testing.assert_array_equal(other, exact)
    vectors = []
    for file in files:
        with llamac.load(file.path) as model:
            vectors.append(model.embed([5, 6, 7, 8]))
    assert 0.99 < float(vectors[0] @ vectors[1]) < 1
