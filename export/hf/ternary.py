"""Reads the matrices of BitNet: four ternary codes per byte and a scale per matrix, or masters, which round to those.

Ma et al., "The Era of 1-bit LLMs" (arXiv:2402.17764), section 2: weights are -1, 0 or 1 times a scale, the mean
magnitude of the masters. The layout of the bytes and the kinds of scales are those of transformers.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llamac.errors import ExportError, UnsupportedError
from llamac.export.checkpoint import LazyTensor
from llamac.export.hf.family import TERNARY
from llamac.export.stored import WEIGHT_DTYPES, Floats, StoredTensor, read_bytes

PER_BYTE = 4
SCALE = "_scale"  # follows the name of a packed matrix
DTYPE = "t2"  # of flat files: it holds every such matrix exactly
OF_A_LAYER = re.compile(r"(.*\.)?layers\.\d+\..*\.weight")
SMALLEST = np.float32(1e-5)  # magnitudes below count as this one
# The keys of quantization_config, their defaults in transformers, and the values that are read.
KEYS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "quant_method": (TERNARY, (TERNARY,)),
    "linear_class": ("bitlinear", ("bitlinear", "autobitlinear")),
    "quantization_mode": ("offline", ("offline", "online")),
    "use_rms_norm": (False, (False,)),
    "modules_to_not_convert": (None, (None, ["lm_head"])),
}
WITHOUT_EFFECT = ("rms_norm_eps",)  # of use_rms_norm


@dataclass(frozen=True)
class TernaryConfig:
    """A quantization_config.

    Attributes:
        divides: Scales divide the codes' products; otherwise they multiply them.
        is_online: The tensors are masters; otherwise they are packed.
    """

    divides: bool
    is_online: bool


def parse(values: dict[str, Any]) -> TernaryConfig:
    """Parse a quantization_config. UnsupportedError lists everything that is not read."""
    problems = [f"{key} is {values[key]!r:.80}" for key in values if key not in (*KEYS, *WITHOUT_EFFECT)]
    found = {key: values.get(key, default) for key, (default, _) in KEYS.items()}
    for key, (_, known) in KEYS.items():
        if not any(type(value) is type(found[key]) and value == found[key] for value in known):
            problems.append(f"{key} is {found[key]!r:.80}, expected {' or '.join(map(repr, known))}")
    if problems:
        raise UnsupportedError(
            f"config.json: quantization_config cannot be read as ternary weights: {', '.join(problems)}"
        )
    is_auto = found["linear_class"] == "autobitlinear"  # the other class has no modes
    return TernaryConfig(not is_auto, is_auto and found["quantization_mode"] == "online")


@dataclass(frozen=True)
class PackedTensor(StoredTensor):
    """Rows of a packed matrix. `shape` and `dtype` are those of the decoded numbers.

    Attributes:
        packed: The bytes of the whole matrix, (rows / 4, columns). Bits 2i and 2i + 1 of row r are the code of row
            r + i rows / 4, plus 1.
        first: The first row of this tensor in the matrix.
        scale: Multiplies the codes.
    """

    packed: StoredTensor
    first: int
    scale: np.float32

    def rows(self, first: int, last: int) -> PackedTensor:
        return replace(self, shape=(last - first, *self.shape[1:]), first=self.first + first)

    def lazy(self) -> LazyTensor:
        return LazyTensor(self.shape, DTYPE, self.read)

    def read(self, first: int, last: int) -> Floats:
        quarter, columns = self.packed.shape
        found = np.empty((last - first, columns), np.float32)
        at, end = self.first + first, self.first + last
        while at < end:
            part, row = divmod(at, quarter)
            n = min(quarter - row, end - at)
            codes = read_bytes(self.packed, row, row + n, columns) >> 2 * part & 3
            if (codes == 3).any():
                raise ExportError(f"{self.path} has packed weights that are not ternary: the file is damaged")
            start = at - self.first - first
            found[start : start + n] = (codes.astype(np.float32) - 1) * self.scale
            at += n
        return found


@dataclass(frozen=True)
class ScaledBias(StoredTensor):
    """The bias of a packed matrix whose scale multiplies the whole output, as transformers' AutoBitLinear does."""

    scale: np.float32

    def lazy(self) -> LazyTensor:
        return super().lazy().times(float(self.scale))


@dataclass(frozen=True)
class MasterTensor(StoredTensor):
    """Rows of a matrix of masters, which are rounded as they are read.

    Attributes:
        whole: The whole matrix, whose mean magnitude is the scale.
        first: The first row of this tensor in the matrix.
    """

    whole: StoredTensor
    first: int

    def rows(self, first: int, last: int) -> MasterTensor:
        return replace(self, shape=(last - first, *self.shape[1:]), first=self.first + first)

    def lazy(self) -> LazyTensor:
        return LazyTensor(self.shape, DTYPE, self.read)

    def read(self, first: int, last: int) -> Floats:
        factor = _inverse_mean(self.whole)
        numbers = self.whole.read(self.first + first, self.first + last)
        return (np.clip(np.rint(numbers * factor), -1, 1) / factor).astype(np.float32, copy=False)


@functools.lru_cache(maxsize=8)
def _inverse_mean(whole: StoredTensor) -> np.float32:
    """1 / the mean magnitude of a matrix, as float32."""
    rows, columns = whole.shape
    total = sum(float(np.abs(part).sum(dtype=np.float64)) for _, part in whole.lazy().chunks())
    found: np.float32 = np.float32(1) / max(np.float32(total / (rows * columns)), SMALLEST)
    return found


def unpacked(config: TernaryConfig, stored: dict[str, StoredTensor]) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors, with the matrices of the layers as ternary ones, and without their scales.

    Raises:
        ExportError: If a matrix of a layer is not packed, or its scale is missing or not a positive number. The message
            lists all of these.
    """
    problems: list[str] = []
    for name, tensor in stored.items():
        is_matrix = OF_A_LAYER.fullmatch(name) is not None and len(tensor.shape) == 2
        if not is_matrix:
            if not (name.endswith(SCALE) and OF_A_LAYER.fullmatch(name.removesuffix(SCALE))) or config.is_online:
                yield name, tensor if config.divides or config.is_online else _bias(stored, name)
        elif config.is_online:
            is_read = tensor.dtype in WEIGHT_DTYPES and 0 not in tensor.shape
            yield name, MasterTensor(**_fields(tensor, tensor.shape), whole=tensor, first=0) if is_read else tensor
        elif tensor.dtype != "u8":
            problems.append(f"dtype: {name} is {tensor.dtype}, expected u8: {PER_BYTE} codes per byte")
        elif (scale := _scale(stored.get(name + SCALE))) is None:
            problems.append(f"scale: {name}{SCALE} is not one positive number")
        else:
            shape = (PER_BYTE * tensor.shape[0], tensor.shape[1])
            scale = np.float32(1) / scale if config.divides else scale
            yield name, PackedTensor(**_fields(tensor, shape), packed=tensor, first=0, scale=scale)
    if problems:
        raise ExportError("the tensors do not match quantization_config:\n  " + "\n  ".join(problems))


def _bias(stored: dict[str, StoredTensor], name: str) -> StoredTensor:
    """A vector, scaled if it is the bias of a packed matrix."""
    tensor = stored[name]
    scale = _scale(stored.get(f"{name.removesuffix('.bias')}.weight{SCALE}")) if name.endswith(".bias") else None
    return tensor if scale is None else ScaledBias(**_fields(tensor, tensor.shape, tensor.dtype), scale=scale)


def _fields(tensor: StoredTensor, shape: tuple[int, ...], dtype: str = "f32") -> dict[str, Any]:
    """The fields of a tensor of decoded numbers."""
    return {"path": tensor.path, "dtype": dtype, "shape": shape, "strides": tensor.strides, "offset": tensor.offset}


def _scale(tensor: StoredTensor | None) -> np.float32 | None:
    """The scale of a packed matrix; None if the tensor is not one positive number."""
    if tensor is None or tensor.dtype not in WEIGHT_DTYPES or tensor.shape not in ((), (1,)):
        return None
    one = replace(tensor, shape=(1,), strides=(1,))
    value: np.float32 = one.lazy().array()[0]
    return value if np.isfinite(value) and value > 0 and np.isfinite(np.float32(1) / value) else None
