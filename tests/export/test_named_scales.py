"""Checkpoints of AutoFP8, fbgemm_fp8 and modelopt: numbers are codes times the factors named X_scale."""

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
    fp4,
    load,
    of_layers,
    plain,
    quantized_pair,
    write,
)

import llamac
from golden.tiny_checkpoints import Config, write_checkpoint
from llamac.errors import UnsupportedError
from llamac.export.convert import export
from llamac.export.hf import model as hf

MATRIX = "model.layers.1.mlp.down_proj.weight"  # (96, 160)
MODELOPT: Config = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
    "kv_cache_scheme": {"num_bits": 8, "type": "float"},
    "ignore": ["lm_head"],
    "producer": {"name": "modelopt", "version": "0.29.0"},
}
NVFP4 = fp4(16, ("", "_scale", "_scale_2"))


def exact(block: tuple[int, int], dtype: str = "F32", shape: Callable[..., tuple[int, ...]] | None = None) -> Quantizer:
    """Codes in FP8 whose products are not rounded, with scales of inputs; `shape` is that of the factors."""

    def quantize(name: str, of: tuple[int, ...]) -> tuple[Stored, np.ndarray]:
        stored, numbers = plain("F8_E4M3", block, dtype)(name, of)
        kind, factors = stored[f"{name}_scale"]
        stored[f"{name}_scale"] = kind, factors.reshape(shape(*factors.shape)) if shape else factors
        stored[name.removesuffix("weight") + "input_scale"] = "F32", np.ones((), np.float32)
        return stored, numbers

    return quantize


def mixed(name: str, shape: tuple[int, ...]) -> tuple[Stored, np.ndarray]:
    return (NVFP4 if "mlp" in name else exact((0, 0)))(name, shape)


def unquantized(name: str, shape: tuple[int, ...]) -> tuple[Stored, np.ndarray]:
    stored, numbers = exact((0, 0))(name, shape)
    del stored[f"{name}_scale"]
    return stored | {name: ("F32", numbers)}, numbers


KINDS: dict[str, tuple[Config, Quantizer]] = {
    "AutoFP8": (
        {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "ignored_layers": ["lm_head"],
            "kv_cache_scheme": "static",
        },
        exact((0, 0), shape=lambda *_: (1,)),
    ),
    "fbgemm": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": []},
        exact((1, 0)),
    ),
    "FP8": (MODELOPT | {"quant_algo": "FP8"}, exact((0, 0), shape=lambda *_: ())),
    "FP8 of rows": (
        MODELOPT | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        exact((1, 0), shape=lambda rows, _: (rows,)),
    ),
    "FP8 of blocks": (
        MODELOPT | {"quant_algo": "FP8_PB_WO"},
        exact((128, 128), shape=lambda rows, columns: (rows, 1, columns, 1)),
    ),
    "MXFP8": (MODELOPT | {"quant_algo": "MXFP8"}, exact((1, 32), "U8")),
    "NVFP4": (MODELOPT, NVFP4),
    "only the cache": (MODELOPT | {"quant_algo": None, "kv_cache_quant_algo": "FP8"}, unquantized),
    "mixed": (MODELOPT | {"quant_algo": "MIXED_PRECISION", "quantized_layers": {}}, mixed),
}


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_codes_times_factors(tmp_path: Path, kind: str) -> None:
    config, quantize = KINDS[kind]
    floats = write_checkpoint(tmp_path / "shapes", LLAMA)
    pair = quantized_pair(tmp_path, floats, config, of_layers, quantize)
    assert_same_numbers(*pair)
    tensor = hf.read(pair[1], []).tensors["layers.1.ffn_down.weight"]
    np.testing.assert_array_equal(tensor.read(5, 19), tensor.array()[5:19])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same LLaMA in float32 and in NVFP4."""
    root = tmp_path_factory.mktemp("nvfp4")
    return quantized_pair(root, write_checkpoint(root / "shapes", LLAMA), MODELOPT, of_layers, NVFP4)


def test_the_config_can_be_a_file_of_its_own(folders: tuple[Path, Path], tmp_path: Path) -> None:
    folder = write(tmp_path, LLAMA, load(folders[1]))
    found = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": found}))
    assert_same_numbers(folders[0], folder)


def test_export_and_the_engine(folders: tuple[Path, Path], tmp_path: Path) -> None:
    export(folders[0], tmp_path / "floats.bin", dtype="f32", probe_source=None)
    export(folders[1], tmp_path / "f32.bin", dtype="f32", probe_source=None)
    report = export(folders[1], tmp_path / "auto.bin", probe_source=None)
    assert report.dtype == "q8"
    assert "inputs are not rounded" in report.warnings[0]
    with llamac.load(tmp_path / "floats.bin") as one, llamac.load(tmp_path / "f32.bin") as other:
        np.testing.assert_array_equal(one.logits([3, 1, 4, 1, 5]), other.logits([3, 1, 4, 1, 5]))


def _without_factors(tensors: Stored) -> None:
    del tensors[f"{MATRIX}_scale"]


def _without_the_factor_of_the_matrix(tensors: Stored) -> None:
    del tensors[f"{MATRIX}_scale_2"]


def _with_a_factor_too_few(tensors: Stored) -> None:
    kind, factors = tensors[f"{MATRIX}_scale"]
    tensors[f"{MATRIX}_scale"] = kind, factors[:, 1:]


def _with_a_factor_of_zero(tensors: Stored) -> None:
    tensors[f"{MATRIX}_scale_2"] = "F32", np.zeros(1, np.float32)


def _with_floats(tensors: Stored) -> None:
    tensors[MATRIX] = "F32", np.zeros((96, 160), np.float32)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without_factors, f"missing: {MATRIX}_scale, the factors of {MATRIX}"),
        (_without_the_factor_of_the_matrix, f"missing: {MATRIX}_scale_2, the factors of {MATRIX}"),
        (_with_a_factor_too_few, rf"misshaped: {MATRIX}_scale is \(96, 9\), which does not fit {MATRIX}, \(96, 160\)"),
        (_with_a_factor_of_zero, f"{MATRIX}_scale_2 is 0, expected a positive number: the file is damaged"),
        (_with_floats, f"dtype: {MATRIX} is f32, expected f8_e4m3 or u8, because it has _scale"),
    ],
)
def test_tensors_that_do_not_match_are_errors(
    folders: tuple[Path, Path], tmp_path: Path, damage: Callable[[Stored], None], message: str
) -> None:
    tensors = load(folders[1])
    damage(tensors)
    check_refused(tmp_path, {**LLAMA, "quantization_config": MODELOPT}, tensors, message)


def test_what_is_not_read_is_named(folders: tuple[Path, Path], tmp_path: Path) -> None:
    tensors = load(folders[1])
    turned = tensors | {MATRIX.replace("weight", "pre_quant_scale"): ("F32", np.ones(160, np.float32))}
    for config, stored, message in (
        (
            MODELOPT | {"quant_algo": "INT4_AWQ"},
            tensors,
            "modelopt is not supported: quant_algo is 'INT4_AWQ', expected",
        ),
        (MODELOPT | {"luck": 7}, tensors, "modelopt is not supported: luck is 7; export from the original model"),
        (MODELOPT, turned, r"down_proj\.pre_quant_scale multiplies inputs"),
        ({"quant_method": "hqq"}, tensors, r"quantization_config is {'quant_method': 'hqq'} \(quantized weights"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            hf.read(write(tmp_path, {**LLAMA, "quantization_config": config}, stored), [])
