"""Reads matrices in FP8 E4M3 with a factor for each block or each matrix: `quant_method` "fp8" of transformers.

DeepSeek-AI, "DeepSeek-V3 Technical Report" (arXiv:2412.19437), section 3.3. Inputs are not quantized here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llamac.errors import UnsupportedError
from llamac.export.hf.named_scales import NamedScales
from llamac.export.hf.quantized_keys import unsupported, wrong_keys
from llamac.export.hf.scaled import EXPONENTS, ExponentTensor, collected, scaled
from llamac.export.stored import StoredTensor

Stored = dict[str, StoredTensor]

METHOD, CODES = "fp8", "f8_e4m3"
SCALE = "_scale_inv"  # follows the name of a matrix, and multiplies it in spite of its name
OTHER_SCALE = ".weight_scale"  # the name of factors that AutoFP8 wrote
INPUT_SCALE = "activation_scale"  # in place of "weight", or after the name of all experts' matrices
# The keys that have one meaning only, with the values that have it. Without effect on weights: `activation_scheme`, and
# the lists of modules, because the tensors themselves say which are in FP8.
KEYS: dict[str, tuple[Any, ...]] = {
    "quant_method": (METHOD,),
    "activation_scheme": (None, "dynamic", "static"),
    "fmt": (None, "e4m3", "float8_e4m3fn"),
    "scale_fmt": (None, "float", "ue8m0"),
    "expert_dtype": (None, "fp8"),
    "weight_per_tensor": (None, False),
    "act_per_tensor": (None, False, True),  # of inputs
    "modules_to_convert": (None, []),
    "kv_cache_scheme": (None, "static"),  # AutoFP8's
    "dequantize": (None, False, True),
}
LISTS = ("modules_to_not_convert", "ignored_layers")
BLOCK = "weight_block_size"
DEFAULT_BLOCK = [128, 128]
MAX_BLOCK = 1 << 20


@dataclass(frozen=True)
class Fp8:
    """A quantization_config.

    Attributes:
        block: The rows and columns that share a factor; None: the whole matrix does.
        has_exponents: Factors of bytes are exponents.
    """

    block: tuple[int, int] | None
    has_exponents: bool = False

    def dequantized(self, stored: Stored, is_ignored: Callable[[str], bool]) -> Stored:
        """The tensors, with numbers in place of codes, and without their factors and those of inputs.

        Args:
            stored: All tensors.
            is_ignored: Whether a tensor is not a weight of the model.

        Raises:
            ExportError: If factors are missing or do not fit. The message lists all of these.
        """
        is_named = {end: any(name.endswith(end) for name in stored) for end in (SCALE, OTHER_SCALE)}
        if is_named[OTHER_SCALE] and not is_named[SCALE]:
            return NamedScales().dequantized(stored, is_ignored)
        return collected(
            (name, self._numbers(name, tensor, stored.get(name + SCALE)))
            for name, tensor in stored.items()
            if not (is_ignored(name) or self._is_factor(name, stored))
        )

    def _numbers(self, name: str, tensor: StoredTensor, scales: StoredTensor | None) -> StoredTensor | str:
        """A tensor with numbers in place of codes, or what is wrong with it."""
        if tensor.dtype == CODES:
            return scaled(name, tensor, name + SCALE, self._scales(scales), self._blocks)
        if scales is not None:
            return f"dtype: {name} is {tensor.dtype}, expected {CODES}, because it has {SCALE}"
        return tensor

    def _is_factor(self, name: str, stored: Stored) -> bool:
        """Whether a tensor only scales another one, or its inputs."""
        of = [name.removesuffix(SCALE)] if name.endswith(SCALE) else []
        if name.endswith(INPUT_SCALE):
            of += [name.removesuffix(INPUT_SCALE) + "weight", name.removesuffix("_" + INPUT_SCALE)]
        return any(other in stored for other in of)

    def _scales(self, scales: StoredTensor | None) -> StoredTensor | None:
        if scales is None or not (scales.dtype == EXPONENTS or (self.has_exponents and scales.dtype == "u8")):
            return scales
        fields = (scales.shape, scales.strides, scales.offset)
        return ExponentTensor(scales.path, "f32", *fields)

    def _blocks(self, shape: tuple[int, ...], grid: tuple[int, ...]) -> tuple[int, int] | None:
        """The size of a block; None if there are other numbers of blocks."""
        rows, columns = shape[-2:]
        if self.block is not None:
            expected = (-(-rows // self.block[0]), -(-columns // self.block[1]))
            if grid[-2:] == expected:
                return self.block
            # gate and up of merged experts have a factor each, even where one block would cover both
            is_halved = len(shape) > 2 and grid[-2:] == (2, expected[1]) and rows % 2 == 0
            return (rows // 2, self.block[1]) if is_halved else None
        # One factor for each matrix, or for each part of a merged one.
        if 0 in grid or rows % grid[-2] or columns % grid[-1]:
            return None
        return rows // grid[-2], columns // grid[-1]


def parse(values: dict[str, Any], warnings: list[str]) -> Fp8:
    """Parse a quantization_config. UnsupportedError lists everything that is not read."""
    problems = list(wrong_keys(values, "", KEYS, (*LISTS, BLOCK)))
    for key in LISTS:
        names = values.get(key)
        if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            problems.append(f"{key} is {names!r:.80}, expected a list of names")
    block = values.get(BLOCK, DEFAULT_BLOCK)
    sizes = block if isinstance(block, list) else []
    is_block = len(sizes) == 2 and all(type(n) is int and 0 < n <= MAX_BLOCK for n in sizes)
    if block is not None and not is_block:
        problems.append(f"{BLOCK} is {block!r:.80}, expected null or two sizes")
    if problems:
        raise UnsupportedError(unsupported(METHOD, problems))
    if values.get("activation_scheme") == "static":
        warnings.append(
            "config.json asks for inputs in FP8 (activation_scheme 'static'): weights keep their numbers, inputs are "
            "not rounded, and their scales are left out"
        )
    return Fp8(None if block is None else (sizes[0], sizes[1]), values.get("scale_fmt") == "ue8m0")
