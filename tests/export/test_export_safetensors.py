"""Safetensors files: every dtype is read exactly and piecewise, and malformed files are refused."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from golden.tiny_checkpoints import write_safetensors
from llamac.errors import ExportError
from llamac.export.hf.safetensors_file import MAX_HEADER_BYTES, read_safetensors


def raw_safetensors(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """Write a safetensors file with any content. header: a JSON object, or its text."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


# ---- reading


def as_stored(values: NDArray[np.float32], dtype: str) -> bytes:
    if dtype == "BF16":
        return (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    return values.astype({"F64": "<f8", "F32": "<f4", "F16": "<f2"}[dtype]).tobytes()


@pytest.mark.parametrize(
    ("dtype", "expected_dtype"), [("F64", "f32"), ("F32", "f32"), ("F16", "f16"), ("BF16", "bf16")]
)
def test_numbers_of_every_dtype_are_exact(tmp_path: Path, dtype: str, expected_dtype: str) -> None:
    values = (np.random.RandomState(0).randint(-128, 128, (5, 7)) / 64).astype(np.float32)
    data = as_stored(values, dtype)
    header = {"x": {"dtype": dtype, "shape": [5, 7], "data_offsets": [0, len(data)]}}
    stored = read_safetensors(raw_safetensors(tmp_path / "x.safetensors", header, data))["x"]
    assert stored.lazy().dtype == expected_dtype
    np.testing.assert_array_equal(stored.read(0, 5), values)
    np.testing.assert_array_equal(stored.read(2, 3), values[2:3])
    np.testing.assert_array_equal(stored.transposed.read(3, 6), values.T[3:6])
    np.testing.assert_array_equal(stored.transposed.rows(2, 6).read(1, 3), values.T[3:5])


def test_wide_transposed_matrices_are_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(60, dtype=np.float32).reshape(6, 10)
    write_safetensors(tmp_path / "x.safetensors", {"x": values})
    stored = read_safetensors(tmp_path / "x.safetensors")["x"].transposed
    monkeypatch.setattr("llamac.export.stored.BLOCK_NUMBERS", 20)
    np.testing.assert_array_equal(stored.read(0, 10), values.T)
    np.testing.assert_array_equal(stored.read(4, 7), values.T[4:7])


@pytest.mark.parametrize("form", ["rows", "columns"])
def test_tensors_are_read_piecewise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    data = bytes(2 * 2048 * 2048)
    header = {"x": {"dtype": "BF16", "shape": [2048, 2048], "data_offsets": [0, len(data)]}}
    stored = read_safetensors(raw_safetensors(tmp_path / "x.safetensors", header, data))["x"]
    monkeypatch.setattr("llamac.export.checkpoint.CHUNK_BYTES", 1 << 19)
    monkeypatch.setattr("llamac.export.stored.BLOCK_NUMBERS", 1 << 16)
    tensor = (stored if form == "rows" else stored.transposed).lazy()
    tracemalloc.start()
    rows = sum(len(chunk) for _, chunk in tensor.chunks())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert rows == 2048
    assert peak < len(data) / 4


def test_a_file_truncated_during_the_read_is_refused(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "x.safetensors", {"x": np.ones((4, 4), np.float32)})
    stored = read_safetensors(tmp_path / "x.safetensors")["x"]
    (tmp_path / "x.safetensors").write_bytes(b"")
    with pytest.raises(ExportError, match="truncated while it was being read"):
        stored.read(0, 4)


# ---- refused files


def entry(begin: int, end: int, dtype: Any = "F32", shape: Any = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


MALFORMED: dict[str, tuple[Any, int, str]] = {
    # header, bytes of data, error message
    "no JSON": (b"{nonsense", 0, "is not valid JSON"),
    "no UTF-8": (b'{"\xff": 1}', 0, "is not valid JSON"),
    "no object": (b"[]", 0, "does not start with"),
    "space in front": (b" {}", 0, "does not start with"),
    "too deep": (b'{"a":' + b"[" * 100_000, 0, "is nested more than 100 deep"),
    "the same key twice": (b'{"a": 1, "a": 2}', 0, "duplicate key 'a'"),
    "a number that is none": (b'{"a": NaN}', 0, "NaN is not a JSON number"),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, 0, "__metadata__"),
    "an entry that is no object": ({"a": [1]}, 0, "'a': its entry"),
    "a key missing": ({"a": {"dtype": "F32", "shape": [1]}}, 4, "'a': its entry"),
    "a key too many": ({"a": {**entry(0, 4), "b": 1}}, 4, "'a': its entry"),
    "unknown dtype": ({"a": entry(0, 4, "F33")}, 4, "dtype 'F33'"),
    "dtype no text": ({"a": entry(0, 4, ["F32"])}, 4, "dtype"),
    "shape no list": ({"a": entry(0, 4, shape=1)}, 4, "shape is 1"),
    "negative size": ({"a": entry(0, 4, shape=[-1])}, 4, "shape is"),
    "boolean size": ({"a": entry(0, 4, shape=[True])}, 4, "shape is"),
    "fractional size": ({"a": entry(0, 4, shape=[1.0])}, 4, "shape is"),
    "too many dimensions": ({"a": entry(0, 4, shape=[1] * 65)}, 4, "shape is"),
    "three offsets": ({"a": {**entry(0, 4), "data_offsets": [0, 4, 8]}}, 4, "data_offsets is"),
    "offsets in the wrong order": ({"a": {**entry(0, 4), "data_offsets": [4, 0]}}, 4, "data_offsets is"),
    "negative offset": ({"a": {**entry(0, 4), "data_offsets": [-4, 0]}}, 4, "data_offsets is"),
    "wrong number of bytes": ({"a": entry(0, 4, shape=[2])}, 4, "has 8 bytes, but data_offsets give 4"),
    "sizes that overflow": ({"a": entry(0, 0, shape=[1 << 62, 1 << 62])}, 0, "has .* bytes"),
    "overlap": ({"a": entry(0, 8), "b": entry(4, 12)}, 12, "'b' overlaps"),
    "gap": ({"a": entry(0, 4), "b": entry(8, 12)}, 12, "'b' leaves a gap"),
    "gap in front": ({"a": entry(4, 8)}, 8, "'a' leaves a gap"),
    "bytes missing": ({"a": entry(0, 8)}, 4, "incomplete"),
    "bytes left": ({"a": entry(0, 4)}, 8, "incomplete"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_safetensors_file_is_refused(tmp_path: Path, name: str) -> None:
    header, count, message = MALFORMED[name]
    with pytest.raises(ExportError, match=message):
        read_safetensors(raw_safetensors(tmp_path / "x.safetensors", header, bytes(count)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "too few"),
        (b"1234567", "too few"),
        (struct.pack("<Q", 3) + b"{}", "ends at byte 11"),
        (struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}", "at most"),
        (struct.pack("<Q", (1 << 64) - 1) + b"{}", "at most"),
        (b"<!DOCTYPE html>\n<html>404</html>", "not a safetensors file"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(ExportError, match=message):
        read_safetensors(tmp_path / "x.safetensors")
