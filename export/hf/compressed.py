"""Reads matrices as the library compressed-tensors stores them: `quant_method` "compressed-tensors" of transformers.

Codes are FP8 E4M3, int8, or unsigned integers of 4 or 8 bits in words of 32 bits, with zero in the middle. Factors are
for a matrix, for each row, for each group of columns in a row, or for each block. Inputs are not quantized here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from llamac.errors import UnsupportedError
from llamac.export.hf.quantized_keys import unsupported, wrong_keys
from llamac.export.hf.scaled import ScaledTensor, collected, is_contiguous, scaled
from llamac.export.stored import INTEGERS, StoredTensor, integers
from llamac.format.strips import FLOATS

Stored = dict[str, StoredTensor]

METHOD = "compressed-tensors"
PACKED = "_packed"  # follows the name of a matrix of integers in words
SCALE, SHAPE, ZERO = "_scale", "_shape", "_zero_point"
WORD_BITS = 32
MAX_BLOCK = 1 << 20
MAX_SCHEMES = 64
FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")  # the first three are one format
MIXED = "mixed-precision"  # each group of config_groups has its format
# The codes that are read, by type and bits in config.json: as they are, and in words.
CODES = {("float", 8): ("f8_e4m3", None), ("int", 8): ("i8", "u8"), ("int", 4): (None, "u4")}
# Keys that must have one of these values.
KEYS: dict[str, tuple[Any, ...]] = {
    "quant_method": (METHOD,),
    "format": (*FORMATS, MIXED),
    "quantization_status": (None, "compressed", "frozen"),  # earlier versions wrote "frozen" with compressed weights
    "kv_cache_scheme": (None,),
    "transform_config": (None, {}),
}
GROUP_KEYS: dict[str, tuple[Any, ...]] = {"format": (None, *FORMATS), "output_activations": (None,)}
WEIGHT_KEYS: dict[str, tuple[Any, ...]] = {
    "symmetric": (None, True),
    "dynamic": (None, False),
    "actorder": (None, False, "weight", "static"),
}
# Keys without effect on numbers that are stored already.
HARMLESS = ("ignore", "version", "global_compression_ratio", "config_groups", "sparsity_config")
GROUP_HARMLESS = ("targets", "weights", "input_activations")
WEIGHT_HARMLESS = (
    *("num_bits", "type", "strategy", "group_size", "block_structure"),  # read by `_scheme`
    *("observer", "observer_kwargs", "scale_dtype", "zp_dtype"),
)


@dataclass(frozen=True)
class Scheme:
    """How a group of config_groups stores matrices.

    Attributes:
        plain: The dtype of codes that are stored as they are; None: there are none.
        packed: The dtype of codes in words; None: there are none.
        strategy: "tensor", "channel", "group" or "block": what shares a factor.
        block: The rows and columns of a block or, of a group, 1 and its columns.
    """

    plain: str | None
    packed: str | None
    strategy: str
    block: tuple[int, int]

    def block_of(self, shape: tuple[int, ...], grid: tuple[int, ...]) -> tuple[int, int] | None:
        """The size of a block of a matrix; None if there are other numbers of blocks."""
        rows, columns = shape[-2:]
        row, column = {"tensor": (rows, columns), "channel": (1, columns)}.get(self.strategy, self.block)
        return (row, column) if grid[-2:] == (-(-rows // row), -(-columns // column)) else None


@dataclass(frozen=True)
class Compressed:
    """A quantization_config: the kinds of matrices that the checkpoint can have."""

    schemes: tuple[Scheme, ...]

    def dequantized(self, stored: Stored, is_ignored: Callable[[str], bool]) -> Stored:
        """The tensors, with numbers in place of codes, and without their factors and those of inputs.

        Raises:
            ExportError: If factors are missing or do not fit, or codes are of another kind than config.json says. The
                message lists all of these.
        """
        return collected(
            (base, self._numbers(name, base, stored))
            for name, base in ((name, name.removesuffix(PACKED)) for name in stored)
            if not (is_ignored(name) or is_ignored(base) or _is_factor(name, stored))
        )

    def _numbers(self, name: str, base: str, stored: Stored) -> StoredTensor | str:
        """A tensor with numbers in place of codes, or what is wrong with it. `base` is the name without PACKED."""
        if name.endswith(ZERO):
            return f"unsupported: {name}: only symmetric codes are read"
        if name.endswith(f"weight{PACKED}"):
            return self._packed(name, base, stored)
        schemes = [scheme for scheme in self.schemes if scheme.plain == stored[name].dtype]
        return self._scaled(name, stored[name], stored, schemes) if schemes or name + SCALE in stored else stored[name]

    def _scaled(self, name: str, codes: StoredTensor, stored: Stored, schemes: list[Scheme]) -> ScaledTensor | str:
        """A matrix, or what is wrong with it."""
        if not schemes:
            expected = sorted({str(scheme.plain or "i32") for scheme in self.schemes})
            return f"dtype: {name} is {codes.dtype}, expected {' or '.join(expected)}"

        def blocks(shape: tuple[int, ...], grid: tuple[int, ...]) -> tuple[int, int] | None:
            return next((block for one in schemes if (block := one.block_of(shape, grid)) is not None), None)

        scales = stored.get(name + SCALE)
        if scales is not None and scales.shape == codes.shape[:1] and is_contiguous(scales):
            scales = replace(scales, shape=(*scales.shape, 1), strides=(1, 1))
        matrix = scaled(name, codes, name + SCALE, scales, blocks)
        if isinstance(matrix, str) or matrix.scales.dtype not in FLOATS:
            return matrix
        return replace(matrix, rounds_to=matrix.scales.dtype)  # as the library computes products

    def _packed(self, name: str, base: str, stored: Stored) -> ScaledTensor | str:
        """A matrix of codes in words, (rows, words), or what is wrong with it."""
        words, shape = stored[name], stored.get(base + SHAPE)
        if words.dtype != "i32" or len(words.shape) != 2 or not is_contiguous(words):
            return f"dtype: {name} is {words.dtype} {words.shape}, expected i32 (rows, words)"
        if shape is None or shape.dtype not in INTEGERS or shape.shape != (2,):
            return f"missing: {base}{SHAPE}, two integers"
        rows, columns = (int(n) for n in integers(shape))
        per_word = {"u4": WORD_BITS // 4, "u8": WORD_BITS // 8}
        kinds = {scheme.packed for scheme in self.schemes}
        fit = [kind for kind, n in per_word.items() if kind in kinds and words.shape == (rows, -(-columns // n))]
        if not fit or min(rows, columns) < 1:
            return f"misshaped: {name} is {words.shape}, which does not fit {base}{SHAPE}, ({rows}, {columns})"
        pitch = words.shape[1] * per_word[fit[0]]
        codes = StoredTensor(words.path, fit[0], (rows, columns), (pitch, 1), words.offset)
        return self._scaled(base, codes, stored, [scheme for scheme in self.schemes if scheme.packed == fit[0]])


def _is_factor(name: str, stored: Stored) -> bool:
    """Whether a tensor only describes another one, or the inputs of its product."""
    match = re.fullmatch(r"(.*\.)?(weight_scale|weight_shape|input_scale|input_zero_point)", name)
    return match is not None and any(f"{match[1] or ''}weight{end}" in stored for end in ("", PACKED))


def parse(values: dict[str, Any], warnings: list[str]) -> Compressed:
    """Parse a quantization_config. UnsupportedError lists everything that is not read."""
    problems = list(wrong_keys(values, "", KEYS, HARMLESS))
    sparsity = values.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, dict) and sparsity.get("format") == "dense"):
        problems.append(f"sparsity_config is {sparsity!r:.80}")
    schemes: dict[Scheme, None] = {}
    has_static_inputs = False
    groups = values.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        problems.append(f"config_groups is {groups!r:.80}, expected an object")
        groups = {}
    for name, group in groups.items():
        where = f"{name!s:.40}."
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            problems.append(f"{where}weights is {weights!r:.80}, expected an object")
            continue
        problems += [*wrong_keys(group, where, GROUP_KEYS, GROUP_HARMLESS)]
        problems += [*wrong_keys(weights, f"{where}weights.", WEIGHT_KEYS, WEIGHT_HARMLESS)]
        scheme = _scheme(weights, group.get("format") or values.get("format"))
        if isinstance(scheme, str):
            problems.append(f"{where}weights has {scheme}")
        else:
            schemes[scheme] = None
        inputs = group.get("input_activations")
        has_static_inputs |= isinstance(inputs, dict) and inputs.get("dynamic") is False
    if len(schemes) > MAX_SCHEMES:
        problems.append(f"config_groups has {len(schemes)} kinds of groups, expected at most {MAX_SCHEMES}")
    if problems:
        raise UnsupportedError(unsupported(METHOD, problems))
    if has_static_inputs:
        warnings.append(
            "config.json asks for inputs of 8 bits with static scales: weights keep their numbers, inputs are not "
            "rounded, and their scales are left out"
        )
    return Compressed(tuple(schemes))


def _scheme(weights: dict[str, Any], form: Any) -> Scheme | str:
    """How matrices are stored, or what is not supported."""
    kind, bits, size = weights.get("type", "int"), weights.get("num_bits", 8), weights.get("group_size")
    codes = CODES.get((kind, bits)) if isinstance(kind, str) and type(bits) is int else None
    plain, packed = codes or (None, None)
    plain, packed = (None, packed) if form == "pack-quantized" else (plain, None)
    if plain is None and packed is None:
        return f"type {kind!r:.40} with num_bits {bits!r:.40} in the format {form!r:.40}"
    usual = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = weights.get("strategy") or usual
    if strategy in ("tensor", "channel"):
        return Scheme(plain, packed, strategy, (1, 1))
    if strategy == "group" and type(size) is int and 0 < size <= MAX_BLOCK:
        return Scheme(plain, packed, strategy, (1, size))
    block = weights.get("block_structure")
    sizes = block if isinstance(block, list) and all(type(n) is int and 0 < n <= MAX_BLOCK for n in block) else []
    if strategy == "block" and len(sizes) == 2:
        return Scheme(plain, packed, strategy, (sizes[0], sizes[1]))
    return f"strategy {strategy!r:.40} with group_size {size!r:.40} and block_structure {block!r:.40}"
