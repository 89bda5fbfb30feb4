"""Checkpoints of bitsandbytes in NF4, FP4 and int8: the same numbers as their formulas give, and damage is reported."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from quantized_checkpoints import (
    LLAMA,
    Quantizer,
    Stored,
    assert_same_numbers,
    check_refused,
    draws,
    load,
    of_layers,
    quantized_pair,
    write,
)

from golden.tiny_checkpoints import Config, write_checkpoint
from llamac.errors import UnsupportedError
from llamac.export.convert import export
from llamac.export.hf import model as hf

MODULE = "model.layers.1.mlp.down_proj"  # (96, 160)
MATRIX, STATE = f"{MODULE}.weight", f"{MODULE}.weight.quant_state.bitsandbytes__nf4"
CONFIG: Config = {
    "quant_method": "bitsandbytes",
    "_load_in_4bit": True,
    "_load_in_8bit": False,
    "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_storage": "uint8",
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "llm_int8_enable_fp32_cpu_offload": False,
    "llm_int8_skip_modules": ["lm_head"],
    "llm_int8_threshold": 6.0,
    "load_in_4bit": True,
}


def four_bits(size: int, nested: int = 0, kind: str = "nf4") -> Quantizer:
    """Random codes with a factor for each block of `size` numbers; `nested`: the factors are also codes in blocks."""

    def quantize(name: str, shape: tuple[int, ...]) -> tuple[Stored, np.ndarray]:
        random, count = draws(name), int(np.prod(shape))
        codes = random.randint(0, 16, count).astype(np.uint8)
        numbers = np.sort(random.uniform(-1, 1, 16)).astype(np.float32)
        n = -(-count // size)
        state = {"quant_type": kind, "blocksize": size, "dtype": "bfloat16", "shape": list(shape)}
        stored: Stored = {
            name: ("U8", (codes[::2] << 4 | codes[1::2]).reshape(-1, 1)),
            f"{name}.quant_map": ("F32", numbers),
        }
        if nested:
            bytes_, own = random.randint(0, 256, n).astype(np.uint8), random.uniform(-1, 1, 256).astype(np.float32)
            outer = random.uniform(0.001, 0.01, -(-n // nested)).astype(np.float32)
            offset = 0.04123
            factors = np.array([own[byte] * outer[i // nested] for i, byte in enumerate(bytes_)], np.float32)
            factors = factors + np.float32(offset)
            stored |= {
                f"{name}.absmax": ("U8", bytes_),
                f"{name}.nested_absmax": ("F32", outer),
                f"{name}.nested_quant_map": ("F32", own),
            }
            state |= {"nested_blocksize": nested, "nested_dtype": "float32", "nested_offset": offset}
        else:
            factors = random.uniform(0.001, 0.01, n).astype(np.float32)
            stored[f"{name}.absmax"] = "F32", factors
        stored[f"{name}.quant_state.bitsandbytes__{kind}"] = "U8", np.frombuffer(json.dumps(state).encode(), np.uint8)
        products = [numbers[code] * factors[i // size] for i, code in enumerate(codes)]
        return stored, np.array(products, np.float32).reshape(shape)

    return quantize


def int8(name: str, shape: tuple[int, ...]) -> tuple[Stored, np.ndarray]:
    """Random codes with the largest magnitude of each row."""
    random = draws(name)
    codes = random.randint(-127, 128, shape).astype(np.int8)
    largest = random.uniform(0.1, 1, shape[0]).astype(np.float32)
    module = name.removesuffix("weight")
    stored: Stored = {
        name: ("I8", codes),
        f"{module}SCB": ("F32", largest),
        f"{module}weight_format": ("U8", np.zeros((), np.uint8)),
    }
    return stored, codes.astype(np.float32) * largest[:, None] * np.float32(1 / 127)


KINDS: dict[str, Quantizer] = {
    "NF4 with double quantization": four_bits(64, 256),
    "NF4": four_bits(64),
    "FP4 with blocks of parts of rows": four_bits(128, 4, kind="fp4"),
    "int8": int8,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same LLaMA in float32 and in NF4."""
    root = tmp_path_factory.mktemp("nf4")
    return quantized_pair(root, write_checkpoint(root / "shapes", LLAMA), CONFIG, of_layers, four_bits(64, 256))


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_codes_times_factors(tmp_path: Path, kind: str) -> None:
    floats = write_checkpoint(tmp_path / "shapes", LLAMA | {"num_hidden_layers": 1})
    pair = quantized_pair(tmp_path, floats, CONFIG, of_layers, KINDS[kind])
    assert_same_numbers(*pair)
    tensor = hf.read(pair[1], []).tensors["layers.0.ffn_down.weight"]
    whole = tensor.array()
    for first, last in ((0, 1), (5, 19), (95, 96), (7, 7)):
        np.testing.assert_array_equal(tensor.read(first, last), whole[first:last])
    assert export(pair[1], tmp_path / "m.bin", probe_source=None).dtype == "q8"


# ---- what is refused


def test_codes_in_other_numbers_are_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    config = {**LLAMA, "quantization_config": CONFIG | {"bnb_4bit_quant_storage": "bfloat16"}}
    with pytest.raises(UnsupportedError, match="bnb_4bit_quant_storage is 'bfloat16', expected 'uint8'; export from"):
        hf.read(write(tmp_path, config, load(folders[1])), [])


def without(end: str) -> Callable[[Stored], None]:
    def damage(tensors: Stored) -> None:
        del tensors[MATRIX + end]

    return damage


def cut(end: str) -> Callable[[Stored], None]:
    def damage(tensors: Stored) -> None:
        kind, values = tensors[MATRIX + end]
        tensors[MATRIX + end] = kind, values[:-1]

    return damage


def having(**fields: object) -> Callable[[Stored], None]:
    def damage(tensors: Stored) -> None:
        state = json.loads(tensors[STATE][1].tobytes())
        tensors[STATE] = "U8", np.frombuffer(json.dumps(state | fields).encode(), np.uint8)

    return damage


def _with_wrong_numbers(tensors: Stored) -> None:
    tensors[f"{MATRIX}.quant_map"][1][3] = np.nan


def _with_int8_without_factors(tensors: Stored) -> None:
    for end in ("", ".absmax", ".nested_absmax", ".quant_map", ".nested_quant_map"):
        del tensors[MATRIX + end]
    del tensors[STATE]
    tensors[MATRIX] = "I8", np.zeros((96, 160), np.int8)


def _with_int8_in_tiles(tensors: Stored) -> None:
    _with_int8_without_factors(tensors)
    tensors[f"{MODULE}.SCB"] = "F32", np.ones(96, np.float32)
    tensors[f"{MODULE}.weight_format"] = "U8", np.full((), 2, np.uint8)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without(".absmax"), rf"missing: {MATRIX}\.absmax, of {MATRIX}"),
        (
            without(".quant_state.bitsandbytes__nf4"),
            rf"missing: {MATRIX}\.quant_state\.bitsandbytes__nf4, the state of",
        ),
        (cut(""), rf"misshaped: {MATRIX} is u8 \(7679, 1\), expected 7680 bytes for \(96, 160\)"),
        (cut(".nested_quant_map"), rf"misshaped: {MATRIX}\.nested_quant_map is f32 \(255,\), expected f32 \(256,\)"),
        (cut(".quant_state.bitsandbytes__nf4"), rf"{STATE} is not the state of a matrix: the file is damaged"),
        (having(shape=[96, 0]), rf"{STATE} is not the state of a matrix"),
        (having(nested_offset=10**400), rf"{STATE} is not the state of a matrix"),
        (having(nested_offset=-1e39), rf"{STATE} is not the state of a matrix"),
        (having(nested_offset=np.nan), rf"{STATE} is not the state of a matrix"),
        (having(nested_offset=True), rf"{STATE} is not the state of a matrix"),
        (_with_wrong_numbers, rf"{MATRIX}\.quant_map has numbers that are not finite: the file is damaged"),
        (_with_int8_without_factors, rf"missing: {MODULE}\.SCB, the factors of {MATRIX}"),
        (_with_int8_in_tiles, rf"unsupported: {MODULE}\.weight_format: only the layout of rows is read"),
    ],
)
def test_tensors_that_do_not_match_are_errors(
    folders: tuple[Path, Path], tmp_path: Path, damage: Callable[[Stored], None], message: str
) -> None:
    tensors = load(folders[1])
    damage(tensors)
    check_refused(tmp_path, {**LLAMA, "quantization_config": CONFIG}, tensors, message)
