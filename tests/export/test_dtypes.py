"""The choice of each tensor's dtype."""

from __future__ import annotations

import numpy as np
import pytest

from llamac.export.checkpoint import LazyTensor
from llamac.export.dtypes import exact_dtype, nearest_dtypes


def matrix(dtype: str, rows: int = 16) -> LazyTensor:
    return LazyTensor((rows, 32), dtype, lambda first, last: np.zeros((last - first, 32), np.float32))


VECTOR = LazyTensor.of(np.zeros(8, np.float32))


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_auto_keeps_floats(dtype: str) -> None:
    assert nearest_dtypes({"x": matrix(dtype), "v": VECTOR}) == (dtype, [])


@pytest.mark.parametrize(
    "dtype",
    [
        *("q4_0", "q4_1", "q4_k", "q3_k", "q2_k", "iq4_nl", "iq2_xxs", "tq1_0", "mxfp4", "q5_0", "q6_k", "q8_0"),
        *("q8", "q4", "q4s"),
        "a type of the future",
    ],
)
def test_auto_stores_every_quantized_type_as_q8(dtype: str) -> None:
    assert nearest_dtypes({"x": matrix(dtype), "v": VECTOR}) == ("q8", [])


def test_auto_decides_matrix_by_matrix() -> None:
    mixed = {"a": matrix("f16"), "b": matrix("q4_k", 48), "c": matrix("f32"), "d": VECTOR}
    assert nearest_dtypes(mixed) == ("q8", [("a", "f16"), ("c", "f32")])
    assert nearest_dtypes({"v": VECTOR}) == ("f32", [])


def test_the_default_dtype_stores_every_matrix_exactly() -> None:
    assert exact_dtype({"a": matrix("bf16"), "b": matrix("bf16"), "v": VECTOR}) == "bf16"
    assert exact_dtype({"a": matrix("bf16"), "b": matrix("f16")}) == "f32"
    assert exact_dtype({"a": matrix("q8")}) == "f32"
