"""The choice of each tensor's dtype."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from llamac.export.checkpoint import LazyTensor
from llamac.export.dtypes import BLOCK_DTYPES, exact_dtype, nearest_dtypes

Floats = NDArray[np.float32]
Blocks = NDArray[np.uint8]


def matrix(dtype: str, rows: int = 16, *, blocks: bool = False) -> LazyTensor:
    def read(first: int, last: int) -> Floats:
        return np.zeros((last - first, 32), np.float32)

    def read_blocks(first: int, last: int) -> Blocks:
        return np.zeros((last - first, 18), np.uint8)

    return LazyTensor((rows, 32), dtype, read, read_blocks if blocks else None)


VECTOR = LazyTensor.of(np.zeros(8, np.float32))


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_auto_keeps_floats(dtype: str) -> None:
    assert nearest_dtypes({"x": matrix(dtype), "v": VECTOR}) == (dtype, [])


@pytest.mark.parametrize(
    "dtype",
    [
        *("q3_k", "q2_k", "iq2_xxs", "tq1_0", "nvfp4", "a type of the future"),
        *("q4_k", "q8", "q4", "q4s"),
    ],
)
def test_auto_stores_quantized_types_without_blocks_as_q8(dtype: str) -> None:
    assert nearest_dtypes({"x": matrix(dtype), "v": VECTOR}) == ("q8", [])


@pytest.mark.parametrize("dtype", BLOCK_DTYPES)
def test_auto_keeps_blocks(dtype: str) -> None:
    assert nearest_dtypes({"x": matrix(dtype, blocks=True), "v": VECTOR}) == (dtype, [])


def test_auto_decides_matrix_by_matrix() -> None:
    mixed = {"a": matrix("f16"), "b": matrix("q4_k", 48, blocks=True), "c": matrix("q3_k"), "d": VECTOR}
    assert nearest_dtypes(mixed) == ("q4_k", [("a", "f16"), ("c", "q8")])
    assert nearest_dtypes({"v": VECTOR}) == ("f32", [])


def test_the_default_dtype_stores_every_matrix_exactly() -> None:
    assert exact_dtype({"a": matrix("bf16"), "b": matrix("bf16"), "v": VECTOR}) == "bf16"
    assert exact_dtype({"a": matrix("bf16"), "b": matrix("f16")}) == "f32"
    assert exact_dtype({"a": matrix("t2"), "b": matrix("bf16")}) == "f32"
    assert exact_dtype({"a": matrix("q8"), "b": matrix("bf16")}) == "f32"
    assert exact_dtype({"a": matrix("q4_0"), "b": matrix("f32")}) == "bf16"
    assert exact_dtype({"a": matrix("u4"), "token_embedding.weight": matrix("f16")}) == "f16"
    assert exact_dtype({"a": matrix("q4_0"), "token_embedding.weight": matrix("q6_k")}) == "bf16"
