"""Reads the inputs of a model from a file: token ids, or embeddings to use instead of theirs."""

from __future__ import annotations

import math
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from llamac.errors import ArgumentError
from llamac.export.hf.safetensors_file import read_safetensors

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llamac.export.stored import StoredTensor

IDS = ("ids", "input_ids")  # tensors of a safetensors file
EMBEDDINGS = ("embeddings", "inputs_embeds")
DUMPED = "embedding.0"  # the stage in a dump
ID_KINDS = {"i32": "<i4", "i64": "<i8", "u32": "<u4", "u16": "<u2"}
FLOATS = ("f32", "f16", "bf16")
WANTED = "expected floats of shape (n, dim)"
MAX_TOKENS = 1 << 24  # more than any context


class Inputs(NamedTuple):
    """The inputs of a file. At least one of the two is there.

    Attributes:
        ids: Token ids (n), or None.
        embeddings: (n, dim), or None.
    """

    ids: array[int] | None
    embeddings: NDArray[np.float32] | None


def read_inputs(path: Path) -> Inputs:
    """Read a .npy or a safetensors file, which can be one that `--dump` has written.

    Args:
        path: The file. A .npy file has integers of shape (n) or (1, n), or float32 of shape (n, dim). A
            safetensors file has the ids as `ids` or `input_ids`, embeddings as `embeddings` or `inputs_embeds`, or
            both. Of a dump, the ids count, and `embedding.0` only without them.

    Raises:
        ArgumentError: If the file has neither.
        ExportError: If a safetensors file is damaged.
    """
    with open(path, "rb") as file:
        is_npy = file.read(6) == b"\x93NUMPY"
    if not is_npy:
        return _safetensors(path)
    found = _npy(path)
    return Inputs(None, _embeddings(path, found)) if found.dtype.kind == "f" else Inputs(_ids(path, found), None)


def _safetensors(path: Path) -> Inputs:
    import numpy as np

    tensors = read_safetensors(path)

    def first(names: tuple[str, ...]) -> StoredTensor | None:
        return next((tensors[name] for name in names if name in tensors), None)

    ids, embeddings = first(IDS), first(EMBEDDINGS)
    known = None
    if ids is not None:
        if ids.dtype not in ID_KINDS:
            raise ArgumentError(f"{path}: the ids have the dtype {ids.dtype}, expected {', '.join(ID_KINDS)}")
        numbers = np.fromfile(path, ID_KINDS[ids.dtype], math.prod(ids.shape), offset=ids.offset).reshape(ids.shape)
        if not numbers.size or (numbers != -1).any():  # -1: the dump of a trace that began with embeddings
            known = _ids(path, numbers)
    if embeddings is None and known is None:
        embeddings = first((DUMPED,))
    if embeddings is None and known is None:
        raise ArgumentError(f"{path} has none of the tensors {', '.join((*IDS, *EMBEDDINGS, DUMPED))}")
    if embeddings is None:
        return Inputs(known, None)
    if embeddings.dtype not in FLOATS or len(embeddings.shape) != 2:
        shape = tuple(embeddings.shape)
        raise ArgumentError(f"{path}: the embeddings have the dtype {embeddings.dtype} and the shape {shape}, {WANTED}")
    return Inputs(known, _embeddings(path, embeddings.read(0, embeddings.shape[0])))


def _ids(path: Path, found: NDArray[Any]) -> array[int]:
    if found.ndim == 2 and len(found) == 1:
        found = found[0]
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise ArgumentError(
            f"{path} holds an array of {found.dtype}, shape {found.shape}: expected integers of shape (n), or "
            "embeddings of shape (n, dim)"
        )
    if len(found) > MAX_TOKENS:
        raise ArgumentError(f"{path} holds {len(found)} ids, more than any context")
    if len(found) and not 0 <= int(found.min()) <= int(found.max()) < 1 << 31:
        raise ArgumentError(f"{path} holds numbers from {found.min()} to {found.max()}, expected token ids")
    return array("i", found.tolist())


def _embeddings(path: Path, found: NDArray[Any]) -> NDArray[np.float32]:
    import numpy as np

    if found.ndim != 2:
        raise ArgumentError(f"{path} holds an array of {found.dtype}, shape {found.shape}, {WANTED}")
    with np.errstate(over="ignore"):  # numbers too large for float32 are refused below
        numbers = np.ascontiguousarray(found, np.float32)
    if not np.isfinite(numbers).all():
        raise ArgumentError(f"{path} holds embeddings that are not finite")
    return numbers


def _npy(path: Path) -> NDArray[Any]:
    import numpy as np

    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # NumPy's parser of headers raises several kinds
        raise ArgumentError(f"{path} is not a .npy file that NumPy can read: {error}") from None
    return np.asarray(found)
