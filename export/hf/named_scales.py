"""Reads matrices in FP8 and NVFP4 whose factors are named X_scale: AutoFP8's, `fbgemm_fp8`, and NVIDIA's `modelopt`.

The tensors define every number: a factor for a matrix, for each row, or for each block, in floats or exponents, and in
NVFP4 one more for the matrix, X_scale_2. Inputs are not quantized here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from llamac.errors import UnsupportedError
from llamac.export.hf import fp4
from llamac.export.hf.quantized_keys import unsupported, wrong_keys
from llamac.export.hf.scaled import ExponentTensor, collected, scaled
from llamac.export.stored import StoredTensor, contiguous_strides

Stored = dict[str, StoredTensor]

FBGEMM, MODELOPT = "fbgemm_fp8", "modelopt"
HF_QUANT_CONFIG = "hf_quant_config.json"  # of earlier versions of modelopt, beside config.json
SCALE, WHOLE = "_scale", "_scale_2"
BLOCK = 128  # the rows and columns of a block, where the last ones can be partial
# Scales of inputs, of outputs and of the cache.
OF_OTHERS = re.compile(r"(.*\.)?(input_scale|input_scale_ub|output_scale|[kqv]_scale|kv_scale|prob_output_scale)")
WITH_INPUTS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "MXFP8", "MIXED_PRECISION")  # whose inputs are quantized
ALGORITHMS = (*WITH_INPUTS, "FP8_PB_WO", "fp8_pb_wo", "W4A16_NVFP4")
# Without `quant_algo`, only the cache is quantized.
KEYS: dict[str, dict[str, tuple[Any, ...]]] = {FBGEMM: {}, MODELOPT: {"quant_algo": (None, *ALGORITHMS)}}
# Keys without effect on numbers that are stored already.
HARMLESS = (
    *("quant_method", "modules_to_not_convert", "activation_scale_ub", "ignore", "exclude_modules", "producer"),
    *("kv_cache_scheme", "kv_cache_quant_algo", "config_groups", "group_size", "quantized_layers", "weights"),
    *("input_activations", "targets", "quant_type"),
)


@dataclass(frozen=True)
class NamedScales:
    """A quantization_config. The tensors say the rest."""

    def dequantized(self, stored: Stored, is_ignored: Callable[[str], bool]) -> Stored:
        """The tensors, with numbers in place of codes, and without factors.

        Raises:
            UnsupportedError: If inputs are multiplied by numbers.
            ExportError: If factors are missing or do not fit. The message lists all of these.
        """
        if turned := next((name for name in stored if name.endswith(".pre_quant_scale")), None):
            raise UnsupportedError(unsupported(MODELOPT, [f"{turned} multiplies inputs"]))
        return collected(
            (name, _numbers(name, tensor, stored))
            for name, tensor in stored.items()
            if not (is_ignored(name) or _is_factor(name, stored))
        )


def _numbers(name: str, tensor: StoredTensor, stored: Stored) -> StoredTensor | str:
    """A tensor with numbers in place of codes, or what is wrong with it."""
    scales = stored.get(name + SCALE)
    if tensor.dtype == "u8" and (scales is not None or name + WHOLE in stored):
        return fp4.nvfp4(name, name + SCALE, name + WHOLE, stored, divides=False)
    if tensor.dtype == "f8_e4m3":
        return scaled(name, tensor, name + SCALE, None if scales is None else _of_rank(scales, tensor), _blocks)
    if scales is not None:
        return f"dtype: {name} is {tensor.dtype}, expected f8_e4m3 or u8, because it has {SCALE}"
    return tensor


def _of_rank(scales: StoredTensor, codes: StoredTensor) -> StoredTensor:
    """Factors with as many dimensions as their codes: one for each row is a column, and blocks have no sizes."""
    shape = scales.shape
    if len(codes.shape) == 2 and len(shape) == 4 and shape[1::2] == (1, 1):
        shape = shape[::2]
    elif len(codes.shape) == 2 and shape == codes.shape[:1]:
        shape = (*shape, 1)
    if scales.dtype == "u8":
        return ExponentTensor(scales.path, "f32", shape, contiguous_strides(shape), scales.offset)
    return replace(scales, shape=shape, strides=contiguous_strides(shape))


def _blocks(shape: tuple[int, ...], grid: tuple[int, ...]) -> tuple[int, int] | None:
    """The size of a block; None if there are other numbers of blocks."""
    rows, columns = shape[-2:]
    if grid[-2:] == (-(-rows // BLOCK), -(-columns // BLOCK)):
        return BLOCK, BLOCK
    is_whole = 0 not in grid and rows % grid[-2] == columns % grid[-1] == 0
    return (rows // grid[-2], columns // grid[-1]) if is_whole else None


def _is_factor(name: str, stored: Stored) -> bool:
    """Whether a tensor only scales another one, or what is not a weight."""
    return OF_OTHERS.fullmatch(name) is not None or any(
        name.endswith(end) and name.removesuffix(end) in stored for end in (SCALE, WHOLE)
    )


def parse(values: dict[str, Any], warnings: list[str]) -> NamedScales:
    """Parse a quantization_config. UnsupportedError lists everything that is not read."""
    method, algorithm = values["quant_method"], values.get("quant_algo")
    if problems := list(wrong_keys(values, "", KEYS[method], HARMLESS)):
        raise UnsupportedError(unsupported(method, problems))
    if method == MODELOPT and algorithm in WITH_INPUTS:
        warnings.append(
            f"config.json asks for inputs of few bits (quant_algo {algorithm!r}): weights keep their numbers, inputs "
            "are not rounded, and their scales are left out"
        )
    return NamedScales()
