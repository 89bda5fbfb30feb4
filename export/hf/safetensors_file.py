"""Reads the header of a safetensors file strictly: every accepted tensor is entirely inside the file. Writes headers.

The `safetensors` package returns bfloat16 only through PyTorch, and it maps files, which defeats our memory bound.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from llamac.errors import ExportError
from llamac.export.stored import StoredTensor, are_sizes, contiguous_strides
from llamac.format.git_lfs import HEAD_BYTES, check_not_pointer
from llamac.format.strict_json import parse_object

MAX_HEADER_BYTES = 1 << 24  # parsing takes 27 times as much memory; 100,000 tensors need about 12 MB
MAX_HEADER_VALUES = 1 << 21  # of JSON: 8 for each tensor
# Bits per number of the format's dtypes.
DTYPE_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8}
DTYPE_BITS |= {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "I16": 16, "U16": 16, "F16": 16, "BF16": 16}
DTYPE_BITS |= {"I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64}


def header_bytes(tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str]) -> bytes:
    """The bytes of a file before its data, which follow in the order of the tensors.

    Args:
        tensors: The name, the format's dtype and the shape of each.
        metadata: The strings of `__metadata__`.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, dtype, shape in tensors:
        size = math.prod(shape) * DTYPE_BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # spaces align the data to 8 bytes
    return struct.pack("<Q", len(text)) + text


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Read the header of a safetensors file.

    Args:
        path: The file.

    Returns:
        The tensors by name, in the order of their data.

    Raises:
        ExportError: If the file is incomplete or invalid.
    """
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES)
        check_not_pointer(path, head)
        if len(head) < 8:
            raise ExportError(f"{path} has {size} bytes, too few for a safetensors file")
        (length,) = struct.unpack_from("<Q", head)
        if length > MAX_HEADER_BYTES:
            raise ExportError(
                f"{path} is not a safetensors file: its header has {length} bytes, expected at most {MAX_HEADER_BYTES}"
            )
        if 8 + length > size:
            raise ExportError(f"{path} is incomplete: its header ends at byte {8 + length}, the file has {size}")
        file.seek(8)
        text = file.read(length)
    if not text.startswith(b"{"):
        raise ExportError(f"{path} is not a safetensors file: its header does not start with '{{'")
    header = parse_object(text, f"the header of {path}", max_bytes=MAX_HEADER_BYTES, max_values=MAX_HEADER_VALUES)
    _check_metadata(path, header.pop("__metadata__", {}))
    return _contiguous(path, header, 8 + length, size)


def _check_metadata(path: Path, metadata: Any) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ExportError(f"the header of {path}: __metadata__ must be an object of strings")


def _contiguous(path: Path, header: dict[str, Any], data_at: int, size: int) -> dict[str, StoredTensor]:
    """The tensors of a header. Their bytes must fill the rest of the file without gaps or overlaps."""
    entries = [(*_entry(path, name, entry), name) for name, entry in header.items()]
    tensors, end = {}, 0
    for begin, finish, dtype, shape, name in sorted(entries, key=lambda entry: entry[:2]):
        if begin != end:
            what = "overlaps the previous one" if begin < end else "leaves a gap after the previous one"
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
        raise ExportError(f"{where}: its entry must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise ExportError(f"{where}: unknown dtype {dtype!r}")
    if not are_sizes(shape, list):
        raise ExportError(f"{where}: shape is {shape!r}, expected a list of sizes")
    if not are_sizes(offsets, list) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ExportError(f"{where}: data_offsets is {offsets!r}, expected [begin, end]")
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits != 8 * (offsets[1] - offsets[0]):
        raise ExportError(
            f"{where}: {dtype} of shape {shape} has {bits / 8:g} bytes, but data_offsets give {offsets[1] - offsets[0]}"
        )
    return offsets[0], offsets[1], dtype, tuple(shape)
