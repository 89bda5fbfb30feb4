"""Matrices in NVFP4 and MXFP4: codes in FP4 E2M1, two in a byte, with a factor for each block of columns of a row.

A block of NVFP4 has 16 columns and a factor in FP8 E4M3, and the matrix has one more factor. A block of MXFP4 has 32
columns and a power of two (`mxfp4`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamac.export.hf.mxfp4 import BLOCK_COLUMNS, Mxfp4Tensor
from llamac.export.hf.scaled import CODES, ScaledTensor, is_contiguous, scaled
from llamac.export.stored import WEIGHT_DTYPES, Floats, StoredTensor

BLOCK = (1, 16)


@dataclass(frozen=True)
class Fp8Factors(StoredTensor):
    """Factors in FP8 E4M3 times one of the whole matrix. `dtype` is f32."""

    whole: np.float32

    @property
    def number_type(self) -> np.dtype[Any]:
        return np.dtype(np.uint8)

    def _decoded(self, numbers: NDArray[Any]) -> Floats:
        factors = CODES["f8_e4m3"].take(numbers)
        factors *= self.whole
        return factors


@dataclass(frozen=True)
class DividedFactors(Fp8Factors):
    """The same, divided by the one of the whole matrix."""

    def _decoded(self, numbers: NDArray[Any]) -> Floats:
        factors = CODES["f8_e4m3"].take(numbers)
        factors /= self.whole
        return factors


def nvfp4(
    name: str, scale_name: str, whole_name: str, stored: dict[str, StoredTensor], *, divides: bool
) -> ScaledTensor | str:
    """A matrix in NVFP4, or what is wrong with it.

    Args:
        name: Its bytes, (rows, columns / 2).
        scale_name: The factors of its blocks.
        whole_name: The factor of the matrix.
        stored: All tensors.
        divides: The factor of the matrix divides the others.
    """
    codes, scales, whole = stored[name], stored.get(scale_name), stored.get(whole_name)
    if problem := _wrong_bytes(name, codes):
        return problem
    if scales is None or whole is None:
        return f"missing: {scale_name if scales is None else whole_name}, the factors of {name}"
    if scales.dtype != "f8_e4m3" or whole.dtype not in WEIGHT_DTYPES or whole.shape not in ((), (1,)):
        return (
            f"dtype: {scale_name} is {scales.dtype} and {whole_name} {whole.dtype} {whole.shape}, expected f8_e4m3 and "
            "one float"
        )
    number = np.float32(replace(whole, shape=(1,), strides=(1,)).lazy().array()[0])
    if not (np.isfinite(number) and number > 0):
        return f"{whole_name} is {number:g}, expected a positive number: the file is damaged"
    fields = (scales.path, "f32", scales.shape, scales.strides, scales.offset, number)
    factors = DividedFactors(*fields) if divides else Fp8Factors(*fields)

    def blocks(shape: tuple[int, ...], grid: tuple[int, ...]) -> tuple[int, int] | None:
        return BLOCK if grid == (shape[0], -(-shape[1] // BLOCK[1])) else None

    found = scaled(name, _codes(codes), scale_name, factors, blocks)
    return replace(found, has_zeros=True) if isinstance(found, ScaledTensor) else found


def mxfp4(name: str, scale_name: str, stored: dict[str, StoredTensor]) -> Mxfp4Tensor | str:
    """A matrix in MXFP4, or what is wrong with it. Arguments are as in `nvfp4`."""
    codes, scales = stored[name], stored.get(scale_name)
    if problem := _wrong_bytes(name, codes):
        return problem
    rows, columns = codes.shape[0], 2 * codes.shape[1]
    if scales is None:
        return f"missing: {scale_name}, the factors of {name}"
    grid = (rows, columns // BLOCK_COLUMNS)
    if scales.dtype not in ("u8", "f8_e8m0") or columns % BLOCK_COLUMNS or scales.shape != grid:
        return f"misshaped: {scale_name} is {scales.dtype} {scales.shape}, which does not fit {name}, {codes.shape}"
    return Mxfp4Tensor(codes.path, "bf16", (rows, columns), (codes.shape[1], 0), codes.offset, scales)


def _codes(tensor: StoredTensor) -> StoredTensor:
    """The codes in bytes."""
    shape = (tensor.shape[0], 2 * tensor.shape[1])
    return replace(tensor, dtype="f4", shape=shape, strides=(shape[1], 1))


def _wrong_bytes(name: str, tensor: StoredTensor) -> str | None:
    """What is wrong with the bytes of codes."""
    if tensor.dtype != "u8" or len(tensor.shape) != 2 or 0 in tensor.shape or not is_contiguous(tensor):
        return f"dtype: {name} is {tensor.dtype} {tensor.shape}, expected bytes (rows, columns / 2)"
    return None
