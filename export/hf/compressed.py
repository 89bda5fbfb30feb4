"""Reads matrices as the library compressed-tensors stores them: `quant_method` "compressed-tensors" of transformers.

Codes are FP8 E4M3, FP4 E2M1, int8, or unsigned integers in words of 32 bits, whose zero is in the middle or a tensor.
Factors are for a matrix, for each row, for each group of columns in a row, or for each block. Inputs are not quantized
here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llamac.errors import UnsupportedError
from llamac.export.hf import fp4
from llamac.export.hf.integers import IntegerTensor
from llamac.export.hf.quantized_keys import unsupported, wrong_keys
from llamac.export.hf.scaled import ExponentTensor, ScaledTensor, collected, is_contiguous, scaled
from llamac.export.hf.words import Words
from llamac.export.patterns import matcher
from llamac.export.stored import INTEGERS, WEIGHT_DTYPES, StoredTensor, integers
from llamac.format.strips import FLOATS

Stored = dict[str, StoredTensor]

METHOD = "compressed-tensors"
PACKED = "_packed"  # follows the name of a matrix of integers in words
SCALE, SHAPE, ZERO, GROUPS, WHOLE = "_scale", "_shape", "_zero_point", "_g_idx", "_global_scale"
OF_CACHE = re.compile(r"(.*\.)?([kqv]_(scale|zero_point)|[kv]_proj\.output_(scale|zero_point))")
MAX_BLOCK = 1 << 20
MAX_SCHEMES = 64
MAX_TARGETS = 1 << 14
PATTERN, CLASSES = "re:", ("Linear", "Embedding")  # the beginning of a target that is a pattern; targets by class
NVFP4, MXFP4, MXFP8 = "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"
PLAIN = ("float-quantized", "int-quantized", "naive-quantized")  # one format
FORMATS = (*PLAIN, MXFP8, "pack-quantized", NVFP4, MXFP4)
MIXED = "mixed-precision"  # each group of config_groups has its format
# The codes that are read as they are, by type and bits in config.json, and the bits of integers in words.
CODES = {("float", 8): "f8_e4m3", ("int", 8): "i8"}
WORD_CODES = range(2, 9)
# Keys that must have one of these values.
KEYS: dict[str, tuple[Any, ...]] = {
    "quant_method": (METHOD,),
    "format": (*FORMATS, MIXED),
    "quantization_status": (None, "compressed", "frozen"),  # earlier versions wrote "frozen" with compressed weights
    "transform_config": (None, {}),
}
GROUP_KEYS: dict[str, tuple[Any, ...]] = {"format": (None, *FORMATS), "output_activations": (None,)}
WEIGHT_KEYS: dict[str, tuple[Any, ...]] = {
    "dynamic": (None, False),
    "actorder": (None, False, "weight", "static", "group"),
}
# Keys without effect on numbers that are stored already.
HARMLESS = ("ignore", "version", "global_compression_ratio", "config_groups", "sparsity_config", "kv_cache_scheme")
GROUP_HARMLESS = ("targets", "weights", "input_activations")
WEIGHT_HARMLESS = (
    *("num_bits", "type", "strategy", "group_size", "block_structure", "symmetric"),  # read by `_scheme`
    *("observer", "observer_kwargs", "scale_dtype", "zp_dtype"),
)


@dataclass(frozen=True)
class Scheme:
    """How a group of config_groups stores matrices.

    Attributes:
        plain: The dtype of codes that are stored as they are; None: there are none.
        bits: The bits of integers in words; 0: there are none.
        strategy: "tensor", "channel", "group" or "block": what shares a factor; or NVFP4 or MXFP4.
        block: The rows and columns of a block or, of a group, 1 and its columns.
        has_zeros: Zeros of integers in words are a tensor.
        has_groups: The group of each column is a tensor.
    """

    plain: str | None
    bits: int
    strategy: str
    block: tuple[int, int]
    has_zeros: bool = False
    has_groups: bool = False

    def block_of(self, shape: tuple[int, ...], grid: tuple[int, ...]) -> tuple[int, int] | None:
        """The size of a block of a matrix; None if there are other numbers of blocks."""
        rows, columns = shape[-2:]
        row, column = {"tensor": (rows, columns), "channel": (1, columns)}.get(self.strategy, self.block)
        return (row, column) if grid[-2:] == (-(-rows // row), -(-columns // column)) else None


@dataclass(frozen=True)
class Compressed:
    """A quantization_config: the kinds of matrices that the checkpoint can have.

    Attributes:
        schemes: The kinds. Tensors say which of them a matrix has, except where several fit.
        targets: Names of modules, patterns of names ("re:") or names of classes, and the kind of each: then the first
            one that matches counts.
    """

    schemes: tuple[Scheme, ...]
    targets: tuple[tuple[str, Scheme], ...] = ()

    def dequantized(self, stored: Stored, is_ignored: Callable[[str], bool]) -> Stored:
        """The tensors, with numbers in place of codes, and without their factors and those of inputs.

        Raises:
            ExportError: If factors are missing or do not fit, or codes are of another kind than config.json says. The
                message lists all of these.
            UnsupportedError: If a pattern decides, and it is not supported.
        """
        return collected(
            (base, self._numbers(name, base, stored))
            for name, base in ((name, name.removesuffix(PACKED)) for name in stored)
            if not (is_ignored(name) or is_ignored(base) or _is_factor(name, stored))
        )

    def _numbers(self, name: str, base: str, stored: Stored) -> StoredTensor | str:
        """A tensor with numbers in place of codes, or what is wrong with it. `base` is the name without PACKED."""
        if name.endswith(ZERO):
            return f"unsupported: {name}: only integers in words have zeros"
        if name.endswith(f"weight{PACKED}"):
            return self._packed(name, base, stored)
        schemes = [scheme for scheme in self.schemes if scheme.plain == stored[name].dtype]
        return self._scaled(name, stored[name], stored, schemes) if schemes or name + SCALE in stored else stored[name]

    def _chosen(self, base: str, fitting: list[Scheme]) -> Scheme:
        """The kind of a matrix, of those that fit its tensors."""
        if len(fitting) == 1:
            return fitting[0]
        module = base.removesuffix(".weight")
        for target, scheme in self.targets:
            if scheme in fitting and _matches(target, module):
                return scheme
        return fitting[0]

    def _scaled(self, name: str, codes: StoredTensor, stored: Stored, schemes: list[Scheme]) -> ScaledTensor | str:
        """A matrix, or what is wrong with it."""
        if not schemes:
            expected = sorted({scheme.plain or "i32" for scheme in self.schemes})
            return f"dtype: {name} is {codes.dtype}, expected {' or '.join(expected)}"

        def blocks(shape: tuple[int, ...], grid: tuple[int, ...]) -> tuple[int, int] | None:
            fitting = [one for one in schemes if one.block_of(shape, grid) is not None]
            return self._chosen(name, fitting).block_of(shape, grid) if fitting else None

        scales = stored.get(name + SCALE)
        if scales is not None and scales.dtype == "u8" and codes.dtype == "f8_e4m3":
            scales = ExponentTensor(scales.path, "f32", scales.shape, scales.strides, scales.offset)
        if scales is not None and scales.shape == codes.shape[:1] and is_contiguous(scales):
            scales = replace(scales, shape=(*scales.shape, 1), strides=(1, 1))
        matrix = scaled(name, codes, name + SCALE, scales, blocks)
        if isinstance(matrix, str) or matrix.scales.dtype not in FLOATS:
            return matrix
        return replace(matrix, rounds_to=matrix.scales.dtype)  # as the library computes products

    def _packed(self, name: str, base: str, stored: Stored) -> StoredTensor | str:
        """A matrix of codes in words or bytes, (rows, ...), or what is wrong with it."""
        strategies = {scheme.strategy for scheme in self.schemes}
        is_nvfp4 = NVFP4 in strategies and base + WHOLE in stored
        if stored[name].dtype == "u8" and (is_nvfp4 or MXFP4 in strategies):
            return _fp4(name, base, stored, is_nvfp4=is_nvfp4)
        if problem := _wrong_description(base, stored):
            return problem
        found = self._layout(name, base, stored)
        return found if isinstance(found, str) else _integers(name, base, stored, found)

    def _layout(self, name: str, base: str, stored: Stored) -> _Layout | str:
        """How a matrix of integers in words is stored, or why no kind fits its tensors."""
        words, scales = stored[name], stored[base + SCALE]
        rows, columns = (int(n) for n in integers(stored[base + SHAPE]))
        possible = [one for one in self.schemes if one.bits and min(rows, columns) > 0]
        fit = {
            one: spills
            for one in possible
            for spills in (False, True)  # the second counts; earlier versions did not split integers
            if Words(words, (rows, columns), one.bits, spills=spills).problem(name) is None
        }
        if not fit:
            shapes = {Words(words, (rows, columns), one.bits, spills=True).tensor_shape for one in possible}
            expected = f": expected i32 {' or '.join(map(str, sorted(shapes)))}" if shapes else ""
            return (
                f"misshaped: {name} is {words.dtype} {words.shape}, which does not fit {base}{SHAPE}, "
                f"({rows}, {columns}){expected}"
            )
        fitting = [one for one in fit if _n_factors(one, rows, columns) == math.prod(scales.shape)]
        if not fitting:
            return f"misshaped: {base}{SCALE} is {scales.shape}, which does not fit {base}, ({rows}, {columns})"
        complete = [one for one in fitting if _other_tensors(one, base, stored) is None]
        scheme = self._chosen(base, complete or fitting)
        return _other_tensors(scheme, base, stored) or _Layout(scheme, rows, columns, fit[scheme])


@dataclass(frozen=True)
class _Layout:
    """How a matrix of integers in words is stored.

    Attributes:
        scheme: Its kind.
        rows, columns: Its size.
        spills: Integers can begin in one word and end in the next.
    """

    scheme: Scheme
    rows: int
    columns: int
    spills: bool


def _matches(target: str, module: str) -> bool:
    """Whether a target of a group is a module: by its name, by a pattern of its beginning, or by its class."""
    if target.startswith(PATTERN):
        return matcher(f"(?:{target.removeprefix(PATTERN)}).*", whole=True)(module)
    return target == module or target == ("Embedding" if "embed" in module.rpartition(".")[2] else "Linear")


def _fp4(name: str, base: str, stored: Stored, *, is_nvfp4: bool) -> StoredTensor | str:
    """A matrix of codes in FP4, or what is wrong with it. None has zeros."""
    if surplus := [base + end for end in (ZERO, GROUPS) if base + end in stored]:
        return f"surplus: {' and '.join(surplus)}, which no matrix in FP4 has"
    if not is_nvfp4:
        return fp4.mxfp4(name, base + SCALE, stored)
    matrix = fp4.nvfp4(name, base + SCALE, base + WHOLE, stored, divides=True)
    return replace(matrix, rounds_to="bf16") if isinstance(matrix, ScaledTensor) else matrix


def _wrong_description(base: str, stored: Stored) -> str | None:
    """What is wrong with the size and the factors of a matrix of integers in words."""
    shape, scales = stored.get(base + SHAPE), stored.get(base + SCALE)
    if shape is None:
        return f"missing: {base}{SHAPE}, two integers"
    if shape.dtype not in INTEGERS or shape.shape != (2,):
        return f"misshaped: {base}{SHAPE} is {shape.dtype} {shape.shape}, expected two integers"
    if scales is None:
        return f"missing: {base}{SCALE}, the factors of {base}"
    if scales.dtype not in WEIGHT_DTYPES or not is_contiguous(scales):
        return f"dtype: {base}{SCALE} is {scales.dtype}, expected one of {', '.join(WEIGHT_DTYPES)}"
    return None


def _integers(name: str, base: str, stored: Stored, layout: _Layout) -> IntegerTensor | str:
    """A matrix of integers in words, or what is wrong with its zeros or groups."""
    words, scales, group_of = stored[name], stored[base + SCALE], stored.get(base + GROUPS)
    scheme, rows, columns, spills = layout.scheme, layout.rows, layout.columns, layout.spills
    width = scheme.block[1] if scheme.strategy == "group" else columns
    n_groups = -(-columns // width)
    zeros: Words | int = 1 << (scheme.bits - 1)
    if scheme.has_zeros:
        zeros = Words(stored[base + ZERO], (rows, n_groups), scheme.bits, along_rows=True, spills=spills)
        if problem := zeros.problem(base + ZERO):
            return problem
    if group_of is not None and (group_of.dtype not in INTEGERS or group_of.shape != (columns,)):
        return f"misshaped: {base}{GROUPS} is {group_of.dtype} {group_of.shape}, expected {columns} integers"
    strides = (0, 1) if scheme.strategy == "tensor" else (n_groups, 1)
    return IntegerTensor(
        path=words.path,
        dtype="f32",
        shape=(rows, columns),
        strides=(columns, 1),
        offset=words.offset,
        name=base + SCALE,
        codes=Words(words, (rows, columns), scheme.bits, spills=spills),
        zeros=zeros,
        scales=replace(scales, shape=(rows, n_groups), strides=strides),
        width=width,
        group_of=group_of,
        rounds_to=scales.dtype if scales.dtype in FLOATS else "f32",  # as the library computes products
    )


def _n_factors(scheme: Scheme, rows: int, columns: int) -> int:
    """How many factors a matrix of integers in words has."""
    if scheme.strategy == "tensor":
        return 1
    return rows * (-(-columns // scheme.block[1]) if scheme.strategy == "group" else 1)


def _other_tensors(scheme: Scheme, base: str, stored: Stored) -> str | None:
    """What is wrong with the presence of zeros and groups of a matrix, which tell schemes of the same shapes apart."""
    for end, what, is_expected in ((ZERO, "zeros", scheme.has_zeros), (GROUPS, "groups", scheme.has_groups)):
        if is_expected and base + end not in stored:
            return f"missing: {base}{end}, the {what} of {base}"
        if base + end in stored and not is_expected:
            return f"surplus: {base}{end}, which no fitting group of config_groups has"
    return None


def _is_factor(name: str, stored: Stored) -> bool:
    """Whether a tensor only describes another one, the inputs of its product, or the cache."""
    if OF_CACHE.fullmatch(name):
        return True
    match = re.fullmatch(r"(.*\.)?(weight_(global_)?scale|weight_shape|input_(global_)?scale|input_zero_point)", name)
    if match is not None:
        return any(f"{match[1] or ''}weight{end}" in stored for end in ("", PACKED))
    match = re.fullmatch(r"(.*\.)?weight(_zero_point|_g_idx)", name)
    return match is not None and f"{match[1] or ''}weight{PACKED}" in stored


def parse(values: dict[str, Any], warnings: list[str]) -> Compressed:
    """Parse a quantization_config. UnsupportedError lists everything that is not read."""
    problems = list(wrong_keys(values, "", KEYS, HARMLESS))
    sparsity = values.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, dict) and sparsity.get("format") == "dense"):
        problems.append(f"sparsity_config is {sparsity!r:.80}")
    cache = values.get("kv_cache_scheme")
    if cache is not None and not isinstance(cache, dict):
        problems.append(f"kv_cache_scheme is {cache!r:.80}, expected an object")
    groups = values.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        problems.append(f"config_groups is {groups!r:.80}, expected an object")
        groups = {}
    schemes: dict[Scheme, None] = {}
    targets: dict[str, Scheme] = {}
    for name, group in groups.items():
        scheme, listed = _group(f"{name!s:.40}.", group, values.get("format"), problems)
        if scheme is not None:
            schemes[scheme] = None
            targets |= dict.fromkeys(listed, scheme)
    if len(schemes) > MAX_SCHEMES:
        problems.append(f"config_groups has {len(schemes)} kinds of groups, expected at most {MAX_SCHEMES}")
    if problems:
        raise UnsupportedError(unsupported(METHOD, problems))
    input_bits = dict.fromkeys(bits for group in groups.values() if (bits := _static_input_bits(group)))
    if input_bits:
        warnings.append(
            f"config.json asks for inputs of {' or '.join(input_bits)} bits with static scales: weights keep their "
            "numbers, inputs are not rounded, and their scales are left out"
        )
    if cache is not None:
        warnings.append(
            "config.json asks for a quantized cache (kv_cache_scheme): it is not applied, and its scales are left out; "
            "kv_dtype chooses the cache's dtype"
        )
    if len(targets) > MAX_TARGETS:
        raise UnsupportedError(
            unsupported(METHOD, [f"config_groups has {len(targets)} targets, expected at most {MAX_TARGETS}"])
        )
    # as the library orders them: names before patterns, and both before classes
    ranks = {target: (target in CLASSES, target.startswith(PATTERN), target) for target in targets}
    return Compressed(tuple(schemes), tuple((one, targets[one]) for one in sorted(targets, key=ranks.__getitem__)))


def _group(where: str, group: Any, form: Any, problems: list[str]) -> tuple[Scheme | None, Sequence[str]]:
    """How a group's matrices are stored, and the modules that it is for.

    Args:
        where: The place of the group in config.json, for messages.
        group: The group.
        form: The format of groups that do not name their own.
        problems: Receives what is not read.
    """
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        problems.append(f"{where}weights is {weights!r:.80}, expected an object")
        return None, ()
    problems += [*wrong_keys(group, where, GROUP_KEYS, GROUP_HARMLESS)]
    problems += [*wrong_keys(weights, f"{where}weights.", WEIGHT_KEYS, WEIGHT_HARMLESS)]
    scheme = _scheme(weights, group.get("format") or form)
    if isinstance(scheme, str):
        problems.append(f"{where}weights has {scheme}")
        return None, ()
    listed = group.get("targets") or ()
    if not isinstance(listed, list | tuple) or not all(isinstance(target, str) for target in listed):
        problems.append(f"{where}targets is {listed!r:.80}, expected names")
        return scheme, ()
    return scheme, listed


def _static_input_bits(group: dict[str, Any]) -> str:
    """The bits of a group's inputs if the file has scales for them; "" if it has none."""
    inputs = group.get("input_activations")
    if not isinstance(inputs, dict) or inputs.get("dynamic") not in (False, "local"):  # "local": one scale is static
        return ""
    return f"{inputs.get('num_bits', 8)!r:.40}"


def _scheme(weights: dict[str, Any], form: Any) -> Scheme | str:
    """How matrices are stored, or what is not supported."""
    kind, bits, size = weights.get("type", "int"), weights.get("num_bits", 8), weights.get("group_size")
    is_known = isinstance(kind, str) and type(bits) is int
    if is_known and (kind, bits, size, form) in (("float", 4, 16, NVFP4), ("float", 4, 32, MXFP4)):
        return Scheme(None, 0, form, (1, 16 if form == NVFP4 else 32))
    plain = CODES.get((kind, bits)) if is_known and form in (*PLAIN, MXFP8) else None
    is_packed = is_known and kind == "int" and bits in WORD_CODES and form == "pack-quantized"
    if plain is None and not is_packed:
        return f"type {kind!r:.40} with num_bits {bits!r:.40} in the format {form!r:.40}"
    symmetric = weights.get("symmetric", True)
    if symmetric not in (None, True) and not (is_packed and symmetric is False):
        return f"symmetric {symmetric!r:.40} in the format {form!r:.40}"
    usual = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = weights.get("strategy") or usual
    fields = (bits if is_packed else 0, strategy)
    tensors = (symmetric is False, weights.get("actorder") == "group")
    if strategy in ("tensor", "channel"):
        return Scheme(plain, *fields, (1, 1), *tensors)
    if strategy == "group" and type(size) is int and 0 < size <= MAX_BLOCK:
        return Scheme(plain, *fields, (1, size), *tensors)
    block = weights.get("block_structure")
    if isinstance(block, str) and re.fullmatch("[0-9]{1,9}x[0-9]{1,9}", block):  # of earlier versions
        block = [int(size) for size in block.split("x")]
    sizes = block if isinstance(block, list) and all(type(n) is int and 0 < n <= MAX_BLOCK for n in block) else []
    if strategy == "block" and len(sizes) == 2 and not is_packed:
        return Scheme(plain, *fields, (sizes[0], sizes[1]))
    return f"strategy {strategy!r:.40} with group_size {size!r:.40} and block_structure {block!r:.40}"
