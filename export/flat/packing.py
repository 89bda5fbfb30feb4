"""Reads rows of tensors for files: checks that their numbers fit, and regroups blocks of GGUF into strips."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from llamac import _core
from llamac.errors import ExportError
from llamac.export.checkpoint import LazyTensor
from llamac.export.dtypes import DTYPES
from llamac.format.strips import BF16_OVERFLOW, OVERFLOW, STRIP_ROWS


def regroup(name: str, tensor: LazyTensor, first: int, last: int) -> NDArray[np.uint8]:
    """Read rows [first, last) of a tensor's blocks and pack them into strips of the same numbers.

    Raises:
        ExportError: If a scale is not finite. The message has the tensor's `name`.
    """
    strips = np.empty(_core.matrix_bytes(DTYPES[tensor.dtype], last - first, tensor.shape[1]), np.uint8)
    regroup_into(strips, name, tensor, first, last)
    return strips


def regroup_into(strips: NDArray[np.uint8], name: str, tensor: LazyTensor, first: int, last: int) -> None:
    """Write what `regroup` returns to `strips`. Raises as `regroup` does."""
    assert tensor.blocks is not None
    if not _core.regroup(DTYPES[tensor.dtype], tensor.blocks(first, last).data, tensor.shape[1], strips.data):
        raise ExportError(f"tensor {name} has scales that are not finite: the source is damaged")


def checked_chunks(name: str, tensor: LazyTensor, dtype: str) -> Iterator[NDArray[np.float32]]:
    """Yield a tensor some rows at a time, a multiple of 16 in all but the last chunk.

    Raises:
        ExportError: If a number is not finite or does not fit `dtype`. The message has the tensor's `name`.
    """
    for _, rows in tensor.chunks(STRIP_ROWS):
        yield _checked(name, rows, dtype)


def checked_rows(name: str, tensor: LazyTensor, dtype: str, first: int, last: int) -> NDArray[np.float32]:
    """Read rows [first, last) of a tensor. Raises as `checked_chunks` does."""
    return _checked(name, tensor.read(first, last), dtype)


def _checked(name: str, rows: NDArray[np.float32], dtype: str) -> NDArray[np.float32]:
    limit = OVERFLOW.get(dtype, np.inf)
    peak = max(float(rows.max(initial=0.0)), -float(rows.min(initial=0.0)))
    if not np.isfinite(peak):
        raise ExportError(f"tensor {name} holds numbers that are not finite")
    if peak >= limit:
        wider = "f32" if peak >= BF16_OVERFLOW else "f32 or bf16"
        raise ExportError(f"tensor {name} holds {peak:g}, which does not fit {dtype}: use --dtype {wider}")
    return rows
