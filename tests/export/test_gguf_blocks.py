"""Matrices of a GGUF file keep their numbers in flat files and their bits in GGUF files that are written from these."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf_blocks import SCALES, Blocks, block_of, write_blocks

import llamac
from golden.cases import CASES
from golden.family_cases import FAMILY_CASES
from golden.make import relative_errors
from golden.tiny_checkpoints import Config, changed
from llamac.errors import ArgumentError, ExportError
from llamac.export import reference
from llamac.export.attach_tokenizer import IDS_ONLY
from llamac.export.convert import export
from llamac.export.dtypes import BLOCK_DTYPES
from llamac.export.gguf import model as gguf_model
from llamac.export.gguf.file import open_gguf
from llamac.format.flatfile import FlatFile

SIZES = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "vocab_size": 288}
WIDE: Config = changed(CASES["llama"].config, **SIZES)
# Each family stores some matrices in another way: rows of q and k permuted, experts stacked, matrices fused.
STACKED = changed(FAMILY_CASES["mixtral"].config, **SIZES)
FUSED = changed(FAMILY_CASES["phi3-odd"].config, **SIZES)
FAMILIES = {"permuted": WIDE, "stacked": STACKED, "fused": FUSED}
# An error of the engine, which rounds inputs to 15 bits, relative to the largest logit.
TOLERANCE = 1e-3
IDS = [*range(3, 23), 287, 0]


def dtypes_in(path: Path) -> set[str]:
    """The dtypes of a flat file's matrices."""
    file = FlatFile(path)
    found = {tensor.dtype for tensor in file.tensors if len(tensor.shape) == 2}
    file.close()
    return found


def blocks_in(path: Path) -> dict[str, Blocks]:
    """The blocks of every tensor of a GGUF file that has some."""
    matrices = {name: tensor.matrix() for name, tensor in open_gguf(path).tensors.items() if len(tensor.shape) > 1}
    return {name: matrix.blocks(0, matrix.shape[0]) for name, matrix in matrices.items() if matrix.blocks}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", BLOCK_DTYPES)
def test_flat_files_keep_every_number(tmp_path: Path, dtype: str, family: str) -> None:
    path, _ = write_blocks(tmp_path / "m.gguf", FAMILIES[family], {"": dtype})
    report = export(path, tmp_path / "m.bin", probe_source=None)
    assert report.dtype == dtype
    assert report.warnings == [f"{path} has no tokenizer: {IDS_ONLY}"]
    source, file = gguf_model.read(path, []).tensors, FlatFile(tmp_path / "m.bin")
    kept = [tensor.name for tensor in file.tensors if tensor.dtype == dtype]
    assert kept == [name for name in source if source[name].blocks]
    for name in kept:
        assert np.array_equal(file.tensor(name), source[name].array()), name
    file.close()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", BLOCK_DTYPES)
def test_gguf_files_get_the_same_bits_back(tmp_path: Path, dtype: str, family: str) -> None:
    path, blocks = write_blocks(tmp_path / "m.gguf", FAMILIES[family], {"": dtype})
    export(path, tmp_path / "m.bin", probe_source=None)
    for source in (path, tmp_path / "m.bin"):
        export(source, tmp_path / "again.gguf", to="gguf", overwrite=True)
        again = blocks_in(tmp_path / "again.gguf")
        assert again.keys() == blocks.keys()
        for full, rows in again.items():
            assert np.array_equal(rows.reshape(blocks[full].shape), blocks[full]), full


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", BLOCK_DTYPES)
def test_the_engine_computes_with_these_numbers(tmp_path: Path, dtype: str, family: str) -> None:
    path, _ = write_blocks(tmp_path / "m.gguf", FAMILIES[family], {"": dtype})
    export(path, tmp_path / "m.bin", probe_source=None)
    with llamac.load(tmp_path / "m.bin", kv_dtype="f32") as model:
        found = model.logits(IDS)
    (exact,) = reference.forward(gguf_model.read(path, []), [IDS])
    assert relative_errors(found, exact).max() <= TOLERANCE


def test_gguf_files_can_be_requantized(tmp_path: Path) -> None:
    path, _ = write_blocks(tmp_path / "m.gguf", WIDE, {"": "q4_k"})
    export(path, tmp_path / "m.bin", dtype="q8", probe_source=None)
    assert dtypes_in(tmp_path / "m.bin") == {"q8"}
    export(path, tmp_path / "q.gguf", to="gguf", dtype="q8_0")
    types = {tensor.type.name for tensor in open_gguf(tmp_path / "q.gguf").tensors.values() if len(tensor.shape) > 1}
    assert types == {"Q8_0"}
    export(path, tmp_path / "f.gguf", to="gguf", dtype="f32")
    export(path, tmp_path / "f.bin", dtype="f32", probe_source=None)
    expected = gguf_model.read(path, []).tensors["layers.0.attn_q.weight"].array()
    assert np.array_equal(gguf_model.read(tmp_path / "f.gguf", []).tensors["layers.0.attn_q.weight"].array(), expected)
    assert np.array_equal(FlatFile(tmp_path / "f.bin").tensor("layers.0.attn_q.weight"), expected)


# ---- options and damaged files


def test_a_dtype_of_gguf_is_never_made(tmp_path: Path) -> None:
    path, _ = write_blocks(tmp_path / "m.gguf", WIDE, {"": "q4_k", "blk.0.ffn_up.weight": "q6_k"})
    for pattern, dtype, source in (
        ("layers.1.ffn_up.*", "q6_k", "q4_k"),
        ("layers.0.ffn_up.*", "q8_0", "q6_k"),
    ):
        expected = rf"layers.\d.ffn_up.weight is {source} in the source and cannot become {dtype}: .*one of f32, f16"
        with pytest.raises(ArgumentError, match=expected):
            export(path, tmp_path / "n.bin", dtype_map=[(pattern, dtype)], probe_source=None)
    with pytest.raises(ArgumentError, match="dtype 'q8_0' is for to='gguf' only"):
        export(path, tmp_path / "n.bin", dtype="q8_0", probe_source=None)


@pytest.mark.parametrize("dtype", BLOCK_DTYPES)
def test_a_scale_that_is_not_finite_names_the_tensor(tmp_path: Path, dtype: str) -> None:
    path, _ = write_blocks(tmp_path / "m.gguf", WIDE, {"": dtype})
    tensor = open_gguf(path).tensors["blk.1.ffn_up.weight"]
    width, size = block_of(dtype)
    offset = tensor.offset + (33 * (tensor.shape[1] // width) + 1) * size * (width == 32) + SCALES.get(dtype, (0,))[-1]
    data = bytearray(path.read_bytes())
    data[offset : offset + 2] = b"\x00\x7e" if dtype != "mxfp4" else b"\xff" + data[offset + 1 : offset + 2]
    path.write_bytes(data)
    with pytest.raises(ExportError, match=r"tensor layers\.1\.ffn_up\.weight has scales that are not finite"):
        export(path, tmp_path / "out.gguf", to="gguf")
    assert not (tmp_path / "out.gguf").exists()


def test_a_source_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path, _ = write_blocks(tmp_path / "m.gguf", WIDE, {"": "q4_0"})
    tensor = gguf_model.read(path, []).tensors["layers.1.ffn_down.weight"]
    assert tensor.blocks is not None
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ExportError, match="was truncated while it was read"):
        tensor.blocks(0, 16)


def test_changed_tensors_lose_their_blocks(tmp_path: Path) -> None:
    path, _ = write_blocks(tmp_path / "m.gguf", WIDE, {"": "q4_0"})
    tensor = gguf_model.read(path, []).tensors["layers.1.ffn_down.weight"]
    assert tensor.blocks is not None
    assert tensor.finite("x").blocks is tensor.blocks
    part = tensor.rows(16, 40).blocks
    assert part is not None
    assert np.array_equal(part(2, 7), tensor.blocks(18, 23))
    assert tensor.plus(1).blocks is None
    assert replace(tensor, dtype="f32").dtype == "f32"
