"""Biases by distance: in buckets, as MPNet stores them, and by the slopes of ALiBi."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf_samples import checkpoint_tensors, write_gguf

import llamac
from golden.encoder_cases import ENCODER_CASES
from golden.family_cases import FAMILY_CASES
from golden.make_encoders import encoder_checkpoint
from golden.make_families import family_checkpoint
from golden.published_configs import PUBLISHED
from golden.tiny_checkpoints import Config, write_safetensors
from llamac import ExportError, UnsupportedError
from llamac.export.checkpoint import LazyTensor
from llamac.export.distances import (
    BIASES,
    BUCKETS,
    FARTHEST,
    alibi_slopes,
    bucket,
    by_distance,
    by_slopes,
    largest_bias,
)
from llamac.export.gguf import model as gguf_model
from llamac.export.gguf import write as gguf_writer
from llamac.export.gguf.file import open_gguf
from llamac.export.hf import model as hf
from llamac.export.hf.config import parse_config
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


@pytest.mark.parametrize(
    ("n_heads", "largest", "exponents"),
    [
        (1, 8.0, [8]),
        (4, 8.0, [2, 4, 6, 8]),
        (4, 16.0, [4, 8, 12, 16]),
        (5, 8.0, [2, 4, 6, 8, 1]),
        (6, 6.0, [1.5, 3, 4.5, 6, 0.75, 2.25]),
    ],
)
def test_slopes_are_those_of_alibi(n_heads: int, largest: float, exponents: list[float]) -> None:
    slopes = np.array(alibi_slopes(n_heads, largest))
    np.testing.assert_allclose(slopes, 0.5 ** np.array(exponents))
    tensor = by_slopes(tuple(slopes), 7)
    biases = tensor.array().reshape(n_heads, 15)
    np.testing.assert_allclose(biases, -np.outer(slopes, abs(np.arange(-7, 8))), rtol=1e-7)
    np.testing.assert_array_equal(tensor.read(3, 12), biases.reshape(-1)[3:12])
    assert largest_bias(tensor, n_heads) == largest


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn_config": {"alibi_bias_max": 16}}, r"attn_config\.alibi_bias_max is 16"),
        ({"attn_config": {"alibi": False}}, r"attn_config\.alibi is False"),
        ({"attn_config": {"attn_type": "multiquery_attention"}}, r"attn_config\.attn_type is 'multiquery_attention'"),
        ({"attn_config": {"clip_qkv": 6}}, r"attn_config\.clip_qkv is 6"),
        ({"attn_config": {"qk_ln": True}}, r"attn_config\.qk_ln is True"),
        ({"attn_config": {"prefix_lm": True}}, r"attn_config\.prefix_lm is True"),
        ({"no_bias": False}, "no_bias is False"),
        ({"norm_type": "rmsnorm"}, "norm_type is 'rmsnorm'"),
        ({"logit_scale": "inv_sqrt_d_model"}, "logit_scale is 'inv_sqrt_d_model'"),
        ({"expansion_ratio": 2}, "expansion_ratio is 2"),
        ({"attn_config": {"rope": True}}, r"attn_config\.rope is True: llamac does not know this key"),
        ({"attn_config": 8}, "attn_config is 8"),
    ],
)
def test_what_the_graph_of_mpt_lacks_is_refused_by_name(change: Config, message: str) -> None:
    with pytest.raises((UnsupportedError, ExportError), match=message):
        parse_config({**PUBLISHED["mpt-7b"], **change}, [])


@pytest.mark.parametrize("name", ["mpt", "mpt-num_attention_heads"])
def test_a_gguf_file_of_mpt_states_the_largest_bias(tmp_path: Path, name: str) -> None:
    case, path, key = FAMILY_CASES[name], tmp_path / "m.gguf", "attention.max_alibi_bias"
    weights = checkpoint_tensors(family_checkpoint(tmp_path / "hf", case))
    write_gguf(path, case.config, weights, changes={key: 16.0})
    read = gguf_model.read(path, [])
    n_heads = read.config.n_heads
    biases = read.tensors[BIASES].array()
    np.testing.assert_array_equal(biases, by_slopes(alibi_slopes(n_heads, 16.0), read.config.context - 1).array())
    gguf_writer.write_gguf(read, tmp_path / "again.gguf", "f32", [])
    assert open_gguf(tmp_path / "again.gguf").values[f"mpt.{key}"] == 16.0
    for changes, expected in (
        ({key: 0.0}, f"{key} is 0.0, expected a number above 0"),
        ({key: 65.0}, f"{key} is 65.0, expected a number from 0 to 64"),
        ({"attention.clamp_kqv": 6.0}, "clamp_kqv is 6.0, expected 0"),
    ):
        write_gguf(path, case.config, weights, changes=changes)
        with pytest.raises(ExportError, match=expected):
            gguf_model.read(path, [])
