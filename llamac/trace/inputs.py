"""Reads the token ids of a text from a file."""

from __future__ import annotations

import math
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamac.errors import ArgumentError
from llamac.export.hf.safetensors_file import read_safetensors

if TYPE_CHECKING:
    from numpy.typing import NDArray

NAMES = ("ids", "input_ids")  # of a safetensors file's tensor
KINDS = {"i32": "<i4", "i64": "<i8", "u32": "<u4", "u16": "<u2"}
MAX_IDS = 1 << 24  # more than any context


def read_inputs(path: Path) -> array[int]:
    """Read the ids of a .npy or a safetensors file, which can be one that `--dump` has written.

    Args:
        path: The file: an array of whole numbers of shape (n) or (1, n); in a safetensors file, the tensor `ids` or
            `input_ids`.

    Raises:
        ArgumentError: If the file has no such array.
        ExportError: If a safetensors file is damaged.
    """
    with open(path, "rb") as file:
        is_npy = file.read(6) == b"\x93NUMPY"
    found = _npy(path) if is_npy else _safetensors(path)
    if found.ndim == 2 and len(found) == 1:
        found = found[0]
    if found.ndim != 1 or found.dtype.kind not in "iu":
        what = "embeddings, which the engine does not read" if found.dtype.kind == "f" else "no token ids"
        raise ArgumentError(
            f"{path} holds an array of {found.dtype}, shape {found.shape}, {what}: expected whole numbers, shape (n)"
        )
    if len(found) > MAX_IDS:
        raise ArgumentError(f"{path} holds {len(found)} ids, more than any context")
    if len(found) and not 0 <= int(found.min()) <= int(found.max()) < 1 << 31:
        raise ArgumentError(f"{path} holds numbers from {found.min()} to {found.max()}, which are no token ids")
    return array("i", found.tolist())


def _npy(path: Path) -> NDArray[Any]:
    import numpy as np

    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise ArgumentError(f"{path} is no .npy file that NumPy reads: {error}") from None
    return np.asarray(found)


def _safetensors(path: Path) -> NDArray[Any]:
    import numpy as np

    tensors = read_safetensors(path)
    name = next((name for name in NAMES if name in tensors), None)
    if name is None:
        raise ArgumentError(f"{path} has no tensor `ids` or `input_ids`")
    tensor = tensors[name]
    if tensor.dtype not in KINDS:
        raise ArgumentError(f"{path}: the tensor {name} has the dtype {tensor.dtype}, expected {', '.join(KINDS)}")
    return np.fromfile(path, KINDS[tensor.dtype], math.prod(tensor.shape), offset=tensor.offset).reshape(tensor.shape)
