"""Tiny checkpoints with quantized weights, each with the same model in float32, which has the numbers of its codes.

Codes are random bytes, so every code occurs. The numbers are computed here from their definitions, one code at a time.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from golden.tiny_checkpoints import Config, write_config
from llamac.errors import ExportError
from llamac.export.hf import model as hf
from llamac.export.hf.safetensors_file import header_bytes, read_safetensors

Floats = NDArray[np.float32]
# The format's dtype and the bytes of each tensor, which has its stored shape.
Stored = dict[str, tuple[str, NDArray[Any]]]
# The tensors for a matrix of this name and shape, and its numbers.
Quantizer = Callable[[str, tuple[int, ...]], tuple[Stored, Floats]]

LLAMA: Config = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 60,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


def of_layers(name: str) -> bool:
    """Whether a tensor is a weight of a layer, and not its router of experts."""
    return "layers." in name and not name.endswith("mlp.gate.weight")


def draws(name: str) -> np.random.RandomState:
    """Random numbers of a tensor of this name."""
    return np.random.RandomState(zlib.crc32(name.encode()))


def e4m3(codes: NDArray[np.uint8]) -> Floats:
    """The numbers of FP8 E4M3. float16 has the same fields, with two more fraction bits and exponents 8 larger."""
    signs, rest = (codes >> 7).astype(np.uint16) << 15, (codes & 127).astype(np.uint16) << 7
    found: Floats = (signs | rest).view(np.float16).astype(np.float32) * np.float32(256)
    return found


def to_bfloat16(numbers: Floats) -> tuple[NDArray[np.uint16], Floats]:
    """Positive numbers cut to bfloat16: its bits, and the numbers that they are."""
    bits = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    return bits, (bits.astype(np.uint32) << 16).view(np.float32)


def expanded(factors: Floats, block: tuple[int, int], shape: tuple[int, ...]) -> Floats:
    """The factor of every number of a tensor; the last blocks can be partial."""
    found = np.empty(shape, np.float32)
    for row in range(shape[-2]):
        for column in range(shape[-1]):
            found[..., row, column] = factors[..., row // block[0], column // block[1]]
    return found


def fp8(block: tuple[int, int], scale_dtype: str = "F32") -> Quantizer:
    """Random codes in FP8 E4M3 with a factor per block, in F32, BF16 or F8_E8M0."""

    def quantize(name: str, shape: tuple[int, ...]) -> tuple[Stored, Floats]:
        random = draws(name)
        codes = random.randint(0, 256, shape).astype(np.uint8)
        codes[codes & 127 == 127] = 0  # NaN
        grid = (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))
        if scale_dtype == "F8_E8M0":
            stored: NDArray[Any] = random.randint(117, 121, grid).astype(np.uint8)
            factors = (2.0 ** (stored.astype(np.float32) - 127)).astype(np.float32)
        else:
            stored = factors = random.uniform(0.001, 0.01, grid).astype(np.float32)
        if scale_dtype == "BF16":
            stored, factors = to_bfloat16(factors)
        numbers = e4m3(codes) * expanded(factors, block, shape)
        return {name: ("F8_E4M3", codes), f"{name}_scale_inv": (scale_dtype, stored)}, numbers

    return quantize


def factors(random: np.random.RandomState, grid: tuple[int, ...], dtype: str) -> tuple[NDArray[Any], Floats]:
    """Random factors as a tensor in BF16, F16, F32 or, exponents, U8, and the numbers that they are."""
    found = random.uniform(0.001, 0.01, grid).astype(np.float32)
    if dtype == "U8":
        exponents = random.randint(117, 121, grid).astype(np.uint8)
        return exponents, (2.0 ** (exponents.astype(np.float32) - 127)).astype(np.float32)
    if dtype == "BF16":
        return to_bfloat16(found)
    stored = found.astype(np.float16 if dtype == "F16" else np.float32)
    return stored, stored.astype(np.float32)


def rounded(numbers: Floats, dtype: str) -> Floats:
    """Numbers rounded to the nearest in BF16, F16 or F32. compressed-tensors rounds to the factors' dtype."""
    if dtype == "BF16":
        mantissas, exponents = np.frexp(numbers)
        numbers = np.ldexp(np.rint(mantissas * 256), exponents - 8).astype(np.float32)
    return numbers.astype(np.float16).astype(np.float32) if dtype == "F16" else numbers


def words(codes: NDArray[np.uint8], bits: int) -> NDArray[np.int32]:
    """Unsigned codes of some bits in words, the first in the lowest bits, (rows, words)."""
    per_word = 32 // bits
    rows, columns = codes.shape
    found = np.zeros((rows, -(-columns // per_word)), np.uint32)
    for column in range(columns):
        found[:, column // per_word] |= codes[:, column].astype(np.uint32) << np.uint32(bits * (column % per_word))
    return found.view(np.int32)


def packed(
    bits: int,
    group: int,
    dtype: str = "BF16",
    *,
    symmetric: bool = True,
    shuffled: bool = False,
    exact: bool = False,
    pack: Callable[[NDArray[np.uint8]], NDArray[np.int32]] | None = None,
) -> Quantizer:
    """Random integers in words, with a factor for each group of columns in a row; 0: for each row.

    `exact` returns the numbers before they are rounded to the dtype of the factors.
    """

    def quantize(name: str, shape: tuple[int, ...]) -> tuple[Stored, Floats]:
        random = draws(name)
        codes = random.randint(0, 1 << bits, shape).astype(np.uint8)
        width = group or shape[1]
        grid = (shape[0], -(-shape[1] // width))
        scales, numbers = factors(random, grid, dtype)
        stored: Stored = {
            f"{name}_packed": ("I32", pack(codes) if pack else words(codes, bits)),
            f"{name}_scale": (dtype, scales),
            f"{name}_shape": ("I64", np.array(shape, np.int64)),
        }
        zeros = np.full(grid, 1 << (bits - 1), np.uint8)
        if not symmetric:
            zeros = random.randint(0, 1 << bits, grid).astype(np.uint8)
            stored[f"{name}_zero_point"] = "I32", np.ascontiguousarray(words(np.ascontiguousarray(zeros.T), bits).T)
        group_of = (np.arange(shape[1]) // width).astype(np.int32)
        if shuffled:
            random.shuffle(group_of)
            stored[f"{name}_g_idx"] = "I32", group_of
        differences = codes.astype(np.float32) - of_groups(zeros.astype(np.float32), group_of)
        products = differences * of_groups(numbers, group_of)
        return stored, products if exact else rounded(products, dtype)

    return quantize


def e2m1(codes: NDArray[np.uint8]) -> Floats:
    """The numbers of FP4 E2M1: a sign, two bits of exponent and one of fraction."""
    found = np.empty(codes.shape, np.float32)
    for at, code in np.ndenumerate(codes):
        exponent, fraction = int(code) >> 1 & 3, int(code) & 1
        size = 2.0 ** (exponent - 1) * (1 + fraction / 2) if exponent else fraction / 2
        found[at] = -size if code >> 3 else size
    return found


def fp4(block: int, names: tuple[str, ...], *, divides: bool = False) -> Quantizer:
    """NVFP4's or, with blocks of 32 columns, MXFP4's tensors: bytes, factors, and in NVFP4 one of the matrix.

    `names` are the ends of the names of these. `divides`: the factor of the matrix divides, and numbers are rounded to
    bfloat16, as compressed-tensors does.
    """

    def quantize(name: str, shape: tuple[int, ...]) -> tuple[Stored, Floats]:
        random = draws(name)
        codes = random.randint(0, 16, shape).astype(np.uint8)
        grid = (shape[0], shape[1] // block)
        stored: Stored = {name + names[0]: ("U8", codes[:, ::2] | codes[:, 1::2] << 4)}
        if block == 32:
            exponents = random.randint(117, 121, grid).astype(np.uint8)
            stored[name + names[1]] = "U8", exponents
            scales = (2.0 ** (exponents.astype(np.float32) - 127)).astype(np.float32)
        else:
            bits = random.randint(0, 127, grid).astype(np.uint8)
            whole = np.array([random.uniform(100, 200)], np.float32)
            whole = whole if divides else np.float32(1) / whole
            stored |= {name + names[1]: ("F8_E4M3", bits), name + names[2]: ("F32", whole)}
            scales = e4m3(bits) / whole if divides else e4m3(bits) * whole
        numbers = e2m1(codes) * expanded(scales, (1, block), shape)
        return stored, rounded(numbers, "BF16") if divides else numbers

    return quantize


def plain(kind: str, block: tuple[int, int], dtype: str = "BF16") -> Quantizer:
    """Random codes in F8_E4M3 or I8, with factors named X.weight_scale; a block of 0 columns has all of them.

    Factors in U8 are exponents.
    """

    def quantize(name: str, shape: tuple[int, ...]) -> tuple[Stored, Floats]:
        random = draws(name)
        codes = random.randint(0, 256, shape).astype(np.uint8)
        if kind == "F8_E4M3":
            codes[codes & 127 == 127] = 0  # NaN
        row, column = block[0] or shape[0], block[1] or shape[1]
        scales, numbers = factors(random, (-(-shape[0] // row), -(-shape[1] // column)), dtype)
        signed = e4m3(codes) if kind == "F8_E4M3" else codes.view(np.int8).astype(np.float32)
        products = signed * expanded(numbers, (row, column), shape)
        return {name: (kind, codes), f"{name}_scale": (dtype, scales)}, rounded(products, dtype)

    return quantize


def words_of_three_bits(codes: NDArray[np.uint8]) -> NDArray[np.int32]:
    """32 codes of 3 bits in 3 words, as GPTQ's code puts them there, piece by piece, (rows, words)."""
    found = np.zeros((len(codes), codes.shape[1] // 32, 3), np.uint32)
    groups = codes.reshape(len(codes), -1, 32).astype(np.uint32)
    for i in range(10):
        found[:, :, 0] |= groups[:, :, i] << np.uint32(3 * i)
        found[:, :, 1] |= groups[:, :, 11 + i] << np.uint32(3 * i + 1)
        found[:, :, 2] |= groups[:, :, 22 + i] << np.uint32(3 * i + 2)
    found[:, :, 0] |= groups[:, :, 10] << np.uint32(30)
    found[:, :, 1] |= groups[:, :, 10] >> np.uint32(2)
    found[:, :, 1] |= groups[:, :, 21] << np.uint32(31)
    found[:, :, 2] |= groups[:, :, 21] >> np.uint32(1)
    return found.reshape(len(codes), -1).view(np.int32)


def of_groups(per_group: NDArray[Any], group_of: NDArray[Any]) -> NDArray[Any]:
    """The value of each column's group, (rows, columns)."""
    found = np.empty((len(per_group), len(group_of)), per_group.dtype)
    for column, group in enumerate(group_of):
        found[:, column] = per_group[:, group]
    return found


def grouped_integers(
    name: str, shape: tuple[int, ...], bits: int, group: int, *, symmetric: bool, shuffled: bool = False
) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.float16], NDArray[np.int32], Floats]:
    """Random integers with a zero and a factor for each group; group 0: one for each row.

    Returns:
        The integers, the zeros and the factors of groups, (rows, ...), the group of each column, and the numbers.
    """
    random = draws(name)
    codes = random.randint(0, 1 << bits, shape).astype(np.uint8)
    width = group or shape[1]
    grid = (shape[0], -(-shape[1] // width))
    middle = np.full(grid, 1 << (bits - 1), np.uint8)
    zeros = middle if symmetric else random.randint(0, 1 << bits, grid).astype(np.uint8)
    scales = (random.uniform(0.001, 0.01, grid) * random.choice([-1, 1], grid)).astype(np.float16)
    group_of = (np.arange(shape[1]) // width).astype(np.int32)
    if shuffled:
        random.shuffle(group_of)
    differences = codes.astype(np.float32) - of_groups(zeros.astype(np.float32), group_of)
    return codes, zeros, scales, group_of, differences * of_groups(scales.astype(np.float32), group_of)


def gptq(
    bits: int, group: int, *, symmetric: bool = True, shuffled: bool = False, less: int = 1, has_groups: bool = True
) -> Quantizer:
    """GPTQ's tensors: words of inputs, (words, outputs), and zeros less 1 unless `less` is 0."""

    def quantize(name: str, shape: tuple[int, ...]) -> tuple[Stored, Floats]:
        codes, zeros, scales, group_of, numbers = grouped_integers(
            name, shape, bits, group, symmetric=symmetric, shuffled=shuffled
        )
        pack = words_of_three_bits if bits == 3 else lambda codes: words(codes, bits)
        base = name.removesuffix(".weight")
        lessened = ((zeros.astype(np.int32) - less) % (1 << bits)).astype(np.uint8)
        stored: Stored = {
            f"{base}.qweight": ("I32", np.ascontiguousarray(pack(codes).T)),
            f"{base}.qzeros": ("I32", pack(np.ascontiguousarray(lessened.T))),
            f"{base}.scales": ("F16", np.ascontiguousarray(scales.T)),
        }
        return stored | ({f"{base}.g_idx": ("I32", group_of)} if has_groups else {}), numbers

    return quantize


def awq_words(codes: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Codes of 4 bits in words of 8 columns each, in AWQ's order, (rows, words)."""
    found = np.zeros((len(codes), codes.shape[1] // 8), np.uint32)
    for word in range(found.shape[1]):
        for place, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            found[:, word] |= codes[:, 8 * word + column].astype(np.uint32) << np.uint32(4 * place)
    return found.view(np.int32)


def awq(group: int) -> Quantizer:
    """AWQ's tensors: words of outputs, (inputs, words)."""

    def quantize(name: str, shape: tuple[int, ...]) -> tuple[Stored, Floats]:
        codes, zeros, scales, _, numbers = grouped_integers(name, shape, 4, group, symmetric=False)
        base = name.removesuffix(".weight")
        stored: Stored = {
            f"{base}.qweight": ("I32", awq_words(np.ascontiguousarray(codes.T))),
            f"{base}.qzeros": ("I32", awq_words(np.ascontiguousarray(zeros.T))),
            f"{base}.scales": ("F16", np.ascontiguousarray(scales.T)),
        }
        return stored, numbers

    return quantize


def write(folder: Path, config: Config, tensors: Stored) -> Path:
    """Write a directory; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, config)
    head = header_bytes(((name, dtype, values.shape) for name, (dtype, values) in tensors.items()), {})
    data = b"".join(np.ascontiguousarray(values).tobytes() for _, values in tensors.values())
    (folder / "model.safetensors").write_bytes(head + data)
    return folder


def check_refused(folder: Path, config: Config, tensors: Stored, message: str) -> None:
    """Check that tensors do not match config.json, for a reason that matches a pattern."""
    with pytest.raises(ExportError, match=f"do not match quantization_config:\n  {message}"):
        hf.read(write(folder, config, tensors), [])


def load(folder: Path) -> Stored:
    """The tensors of a directory."""
    data = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    kinds = {"F32": np.float32, "BF16": np.uint16, "F16": np.float16, "I32": np.int32, "I64": np.int64, "I8": np.int8}
    found: Stored = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            kind = kinds.get(entry["dtype"], np.uint8)
            found[name] = entry["dtype"], np.frombuffer(data[begin:end], kind).reshape(entry["shape"]).copy()
    return found


def assert_same_numbers(floats: Path, quantized: Path) -> None:
    """Check that two directories have the same model, with the same numbers."""
    one, other = hf.read(floats, []), hf.read(quantized, [])
    assert one.config == other.config
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        np.testing.assert_array_equal(other.tensors[name].array(), tensor.array(), err_msg=name)


def quantized_pair(
    root: Path, floats: Path, quantization: Config, is_quantized: Callable[[str], bool], quantize: Quantizer
) -> tuple[Path, Path]:
    """Write a checkpoint with quantized weights, and one with the same numbers in float32.

    Args:
        root: The folder for both.
        floats: A directory with tensors in float32, which has the config and the names and shapes of tensors.
        quantization: The quantization_config.
        is_quantized: Whether the tensor with this name is quantized.
        quantize: How.

    Returns:
        The directories with numbers in float32 and with quantized ones.
    """
    config = json.loads((floats / "config.json").read_text())
    plain: Stored = {}
    packed: Stored = {}
    for name, tensor in read_safetensors(floats / "model.safetensors").items():
        if is_quantized(name) and len(tensor.shape) > 1:
            stored, numbers = quantize(name, tensor.shape)
            plain[name] = "F32", numbers
            packed |= stored
        else:
            count = int(np.prod(tensor.shape))
            numbers = np.fromfile(tensor.path, np.float32, count, offset=tensor.offset).reshape(tensor.shape)
            plain[name] = packed[name] = "F32", numbers
    quantized = {**config, "quantization_config": quantization}
    return write(root / "floats", config, plain), write(root / "quantized", quantized, packed)
