"""Reads the header of a safetensors file, strictly: what is accepted here lies whole inside the file.

The package of that name gives bfloat16 only through PyTorch, and maps files where this project must bound its memory.
"""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path
from typing import Any

from llamac.errors import ExportError
from llamac.export.lfs import HEAD_BYTES, refuse_pointer
from llamac.export.stored import StoredTensor, contiguous_strides
from llamac.export.strict_json import parse_object

MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
MAX_DIMS = 16
# Bits of a number of every dtype of the format.
DTYPE_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8}
DTYPE_BITS |= {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "I16": 16, "U16": 16, "F16": 16, "BF16": 16}
DTYPE_BITS |= {"I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64}


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name, in the order of their bytes. Raises ExportError for any file that is not whole."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES)
        refuse_pointer(path, head)
        if len(head) < 8:
            raise ExportError(f"{path} has {size} bytes, too few for a safetensors file")
        (length,) = struct.unpack_from("<Q", head)
        if length > MAX_HEADER_BYTES:
            raise ExportError(
                f"{path} is no safetensors file: its header would have {length} bytes, at most are {MAX_HEADER_BYTES}"
            )
        if 8 + length > size:
            raise ExportError(f"{path} is incomplete: its header ends at byte {8 + length}, the file has {size}")
        file.seek(8)
        text = file.read(length)
    if not text.startswith(b"{"):
        raise ExportError(f"{path} is no safetensors file: its header does not begin with '{{'")
    header = parse_object(text, f"the header of {path}")
    _check_metadata(path, header.pop("__metadata__", {}))
    return _contiguous(path, header, 8 + length, size)


def _check_metadata(path: Path, metadata: Any) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ExportError(f"the header of {path}: __metadata__ must be an object of strings")


def _contiguous(path: Path, header: dict[str, Any], data_at: int, size: int) -> dict[str, StoredTensor]:
    """The tensors of a header, whose bytes must follow one another without gap or overlap up to the file's end."""
    entries = [(*_entry(path, name, entry), name) for name, entry in header.items()]
    tensors, end = {}, 0
    for begin, finish, dtype, shape, name in sorted(entries, key=lambda entry: entry[:2]):
        if begin != end:
            what = "overlaps the one before" if begin < end else "leaves a gap after the one before"
            raise ExportError(f"{path}: tensor {name!r} {what}: it starts at byte {begin}, expected {end}")
        end = finish
        tensors[name] = StoredTensor(path, dtype.lower(), shape, contiguous_strides(shape), data_at + begin)
    if data_at + end != size:
        raise ExportError(
            f"{path} is damaged or incomplete: its tensors end at byte {data_at + end}, but the file has {size} bytes"
        )
    return tensors


def _entry(path: Path, name: str, entry: Any) -> tuple[int, int, str, tuple[int, ...]]:
    """(begin, end, dtype, shape) of a header's entry."""
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ExportError(f"{where}: its entry must have dtype, shape and data_offsets, nothing else")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise ExportError(f"{where}: dtype {dtype!r} is unknown")
    if not _are_sizes(shape):
        raise ExportError(f"{where}: shape is {shape!r}, expected a list of sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ExportError(f"{where}: data_offsets is {offsets!r}, expected [begin, end]")
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits != 8 * (offsets[1] - offsets[0]):
        raise ExportError(
            f"{where}: {dtype} of shape {shape} has {bits / 8:g} bytes, but data_offsets give {offsets[1] - offsets[0]}"
        )
    return offsets[0], offsets[1], dtype, tuple(shape)


def _are_sizes(values: Any) -> bool:
    if not isinstance(values, list) or len(values) > MAX_DIMS:
        return False
    return all(type(value) is int and 0 <= value < 1 << 63 for value in values)
