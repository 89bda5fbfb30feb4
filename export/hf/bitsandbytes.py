"""Reads matrices as the library bitsandbytes saves them: NF4 and FP4 with a factor for each block, or int8.

Dettmers et al., "QLoRA" (arXiv:2305.14314) and "LLM.int8()" (arXiv:2208.07339). A block has consecutive numbers of the
whole matrix, row after row. Its factor can be a code itself, with factors of its own (double quantization).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from llamac.errors import UnsupportedError
from llamac.export.checkpoint import LazyTensor
from llamac.export.hf.quantized_keys import unsupported, wrong_keys
from llamac.export.hf.scaled import collected
from llamac.export.stored import Floats, StoredTensor, are_sizes, contiguous_strides, read_bytes

Stored = dict[str, StoredTensor]

METHOD = "bitsandbytes"
STATE = ".quant_state.bitsandbytes__"  # and nf4 or fp4, after the name of a matrix: JSON in bytes
KINDS = ("nf4", "fp4")
ABSMAX, MAP, NESTED_ABSMAX, NESTED_MAP = ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"
ROW_FACTORS, LAYOUT = "SCB", "weight_format"  # of int8, in place of "weight"
INVERSE_127 = np.float32(1 / 127)
MAX_STATE_BYTES = 1 << 16
LARGEST_FLOAT = float(np.finfo(np.float32).max)
KEYS: dict[str, tuple[Any, ...]] = {"bnb_4bit_quant_storage": (None, "uint8")}


@dataclass(frozen=True)
class Blocks:
    """A vector of codes with a factor for each block, in a file.

    Attributes:
        codes: Bytes, of a code each, or of two, the first in the high bits.
        numbers: The number of each code.
        factors: The factor of each block.
        size: The codes of a block.
        offset: Added to each product.
    """

    codes: StoredTensor
    numbers: Floats
    factors: Blocks | StoredTensor
    size: int
    offset: float = 0

    def read(self, first: int, last: int) -> Floats:
        """Numbers [first, last)."""
        per_byte = 2 if len(self.numbers) == 16 else 1
        begin, end = first // per_byte, -(-last // per_byte)
        data = read_bytes(replace(self.codes, strides=(1,)), begin, end, 1)[:, 0]
        if per_byte == 2:
            data = np.stack((data >> 4, data & 15), axis=-1).reshape(-1)[first % 2 :][: last - first]
        low = first // self.size
        factors = self.factors.read(low, -(-last // self.size))
        found: Floats = self.numbers.take(data)
        found *= factors.take(np.arange(first, last) // self.size - low)
        if self.offset:
            found += np.float32(self.offset)
        return found


@dataclass(frozen=True, eq=False)
class BlockTensor(StoredTensor):
    """Rows of a matrix. `shape` and `dtype` (f32) are those of the numbers; `first` is its first row in `blocks`."""

    is_by_rows: ClassVar[bool] = True
    blocks: Blocks
    kind: str
    first: int = 0

    def rows(self, first: int, last: int) -> BlockTensor:
        return replace(self, shape=(last - first, *self.shape[1:]), first=self.first + first)

    def lazy(self) -> LazyTensor:
        return LazyTensor(self.shape, self.kind, self.read)

    def read(self, first: int, last: int) -> Floats:
        columns = self.shape[1]
        found = self.blocks.read((self.first + first) * columns, (self.first + last) * columns)
        return found.reshape(last - first, columns)


@dataclass(frozen=True)
class RowTensor(StoredTensor):
    """Rows of a matrix of int8. `factors` has the largest magnitude of each row."""

    is_by_rows: ClassVar[bool] = True
    factors: StoredTensor

    def rows(self, first: int, last: int) -> RowTensor:
        fields = super().rows(first, last)
        return RowTensor(
            *(fields.path, fields.dtype, fields.shape, fields.strides, fields.offset), self.factors.rows(first, last)
        )

    @property
    def number_type(self) -> np.dtype[Any]:
        return np.dtype(np.int8)

    def lazy(self) -> LazyTensor:
        return LazyTensor(self.shape, "i8", self.read)

    def read(self, first: int, last: int) -> Floats:
        found: Floats = super().read(first, last) * self.factors.read(first, last)[:, None]
        found *= INVERSE_127
        return found

    def _decoded(self, numbers: NDArray[Any]) -> Floats:
        return numbers.astype(np.float32)


@dataclass(frozen=True)
class BitsAndBytes:
    """A quantization_config. The tensors say the rest."""

    def dequantized(self, stored: Stored, is_ignored: Callable[[str], bool]) -> Stored:
        """The tensors, with numbers in place of codes.

        Raises:
            ExportError: If tensors of a matrix are missing or do not fit. The message lists all of these.
        """
        return collected(found for name in stored if not is_ignored(name) for found in _tensors(name, stored))


def _tensors(name: str, stored: Stored) -> Iterator[tuple[str, StoredTensor | str]]:
    """A tensor under its name, unless it only describes another one."""
    base = name.rpartition(".")[0]
    ends = (ABSMAX, MAP, NESTED_ABSMAX, NESTED_MAP, *(STATE + kind for kind in KINDS))
    if any(name.endswith(end) and name.removesuffix(end) in stored for end in ends):
        return
    if name.endswith((f".{ROW_FACTORS}", f".{LAYOUT}")) and f"{base}.weight" in stored:
        return
    tensor = stored[name]
    if kind := next((kind for kind in KINDS if name + STATE + kind in stored), None):
        yield name, _of_blocks(name, kind, stored)
    elif tensor.dtype == "i8":
        yield name, _of_rows(name, base, stored)
    elif tensor.dtype == "u8":
        yield name, f"missing: {name}{STATE}{KINDS[0]}, the state of {name}"
    else:
        yield name, tensor


def _of_rows(name: str, base: str, stored: Stored) -> StoredTensor | str:
    """A matrix of int8, or what is wrong with it."""
    codes, factors, layout = stored[name], stored.get(f"{base}.{ROW_FACTORS}"), stored.get(f"{base}.{LAYOUT}")
    if factors is None:
        return f"missing: {base}.{ROW_FACTORS}, the factors of {name}"
    if factors.dtype != "f32" or factors.shape != codes.shape[:1] or len(codes.shape) != 2:
        return f"misshaped: {base}.{ROW_FACTORS} is {factors.dtype} {factors.shape}, which does not fit {codes.shape}"
    if layout is not None and (layout.dtype != "u8" or layout.shape not in ((), (1,)) or _first_byte(layout) != 0):
        return f"unsupported: {base}.{LAYOUT}: only the layout of rows is read"
    if not np.isfinite(factors.read(0, factors.shape[0])).all():
        return f"{base}.{ROW_FACTORS} has factors that are not finite: the file is damaged"
    return RowTensor(codes.path, "f32", codes.shape, codes.strides, codes.offset, factors)


def _of_blocks(name: str, kind: str, stored: Stored) -> StoredTensor | str:
    """A matrix of 4 bits, or what is wrong with it."""
    codes, state = stored[name], stored[name + STATE + kind]
    try:
        values = json.loads(_bytes(state).decode())
        shape, size = tuple(values["shape"]), values["blocksize"]
        is_right = are_sizes(shape, tuple) and len(shape) == 2 and 0 not in shape and _is_size(size)
        nested = values.get("nested_blocksize")
        is_right &= nested is None or (_is_size(nested) and _is_offset(values["nested_offset"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        is_right = False
    if not is_right:
        return f"{name}{STATE}{kind} is not the state of a matrix: the file is damaged"
    count = math.prod(shape)
    if codes.dtype != "u8" or math.prod(codes.shape) != -(-count // 2):
        return f"misshaped: {name} is {codes.dtype} {codes.shape}, expected {-(-count // 2)} bytes for {shape}"
    needed = [(MAP, "f32", 16), (ABSMAX, "f32" if nested is None else "u8", -(-count // size))]
    if nested is not None:
        needed += [(NESTED_MAP, "f32", 256), (NESTED_ABSMAX, "f32", -(-needed[1][2] // nested))]
    for end, dtype, n in needed:
        found = stored.get(name + end)
        if found is None:
            return f"missing: {name}{end}, of {name}"
        if found.dtype != dtype or found.shape != (n,):
            return f"misshaped: {name}{end} is {found.dtype} {found.shape}, expected {dtype} ({n},)"
        if end != ABSMAX and not np.isfinite(found.read(0, n)).all():
            return f"{name}{end} has numbers that are not finite: the file is damaged"
    factors: Blocks | StoredTensor = stored[name + ABSMAX]
    if nested is not None:
        own = stored[name + NESTED_MAP].read(0, 256)
        factors = Blocks(
            stored[name + ABSMAX], own, stored[name + NESTED_ABSMAX], nested, float(values["nested_offset"])
        )
    blocks = Blocks(codes, stored[name + MAP].read(0, 16), factors, size)
    return BlockTensor(codes.path, "f32", shape, contiguous_strides(shape), codes.offset, blocks, kind)


def _first_byte(tensor: StoredTensor) -> int:
    return int(read_bytes(replace(tensor, strides=(1,)), 0, 1, 1)[0, 0])


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value <= 1 << 20


def _is_offset(value: Any) -> bool:
    """Whether a value is a number that is finite in float32."""
    return type(value) in (int, float) and abs(value) <= LARGEST_FLOAT


def _bytes(tensor: StoredTensor) -> bytes:
    """The bytes of a vector; none if there are too many."""
    is_short = tensor.dtype == "u8" and len(tensor.shape) == 1 and tensor.shape[0] <= MAX_STATE_BYTES
    return read_bytes(replace(tensor, strides=(1,)), 0, tensor.shape[0], 1).tobytes() if is_short else b""


def parse(values: dict[str, Any], warnings: list[str]) -> BitsAndBytes:
    """Parse a quantization_config, whose keys do not change numbers. UnsupportedError if codes are not in bytes."""
    if problems := list(wrong_keys(values, "", KEYS)):
        raise UnsupportedError(unsupported(METHOD, problems))
    return BitsAndBytes()
