"""Checkpoints in FP8: every number is its code times its block's factor, in every family, and damage is reported."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quantized_checkpoints
from quantized_checkpoints import Stored, assert_same_numbers, check_refused, e4m3, fp8, load, quantized_pair, write

import llamac
from commands import Command
from golden.family_cases import FAMILY_CASES
from golden.make_families import family_checkpoint
from golden.tiny_checkpoints import Config, write_checkpoint
from hf_reading import read
from llamac.errors import ExportError, UnsupportedError
from llamac.export.convert import export
from llamac.export.hf import model as hf
from llamac.export.hf.fp8 import Fp8
from llamac.export.hf.safetensors_file import read_safetensors
from llamac.export.hf.scaled import CODES

LLAMA: Config = quantized_checkpoints.LLAMA | {"hidden_size": 160, "intermediate_size": 272}
QUANTIZATION: Config = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "weight_per_tensor": False,  # as in Qwen3.5's and Qwen3.6's
    "act_per_tensor": False,
}
MATRIX = "model.layers.1.mlp.down_proj.weight"  # (160, 272): the last blocks are partial
EXPERTS = "model.layers.0.block_sparse_moe."  # of Granite, merged
GATE_UP, DOWN = "input_linear.weight", "output_linear.weight"
IDS = [3, 1, 4, 1, 5, 9, 2, 6]


def of_layers(name: str) -> bool:
    """Whether a tensor is a matrix of a layer, and not one that published checkpoints keep in bfloat16."""
    return "layers." in name and "bias" not in name and not name.endswith(("gate.weight", "conv1d.weight"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same LLaMA in float32 and in FP8."""
    root = tmp_path_factory.mktemp("fp8")
    floats = write_checkpoint(root / "shapes", LLAMA)
    return quantized_pair(root, floats, QUANTIZATION, of_layers, fp8((128, 128)))


def test_codes_are_e4m3() -> None:
    codes = np.arange(256, dtype=np.uint8)
    is_nan = codes & 127 == 127
    np.testing.assert_array_equal(CODES["f8_e4m3"][~is_nan], e4m3(codes)[~is_nan])
    assert np.isnan(CODES["f8_e4m3"][is_nan]).all()


@pytest.mark.parametrize("scale_dtype", ["F32", "BF16", "F8_E8M0"])
def test_numbers_are_codes_times_the_factors_of_blocks(tmp_path: Path, scale_dtype: str) -> None:
    quantization = QUANTIZATION | ({"scale_fmt": "ue8m0"} if scale_dtype == "F8_E8M0" else {})
    floats = write_checkpoint(tmp_path / "shapes", LLAMA)
    assert_same_numbers(*quantized_pair(tmp_path, floats, quantization, of_layers, fp8((128, 128), scale_dtype)))


def test_any_rows_are_read(folders: tuple[Path, Path]) -> None:
    tensor = read(folders[1]).tensors["layers.1.ffn_down.weight"]
    assert tensor.dtype == "f8_e4m3"
    whole = tensor.array()
    for first, last in ((0, 1), (100, 150), (127, 129), (159, 160), (40, 40)):
        np.testing.assert_array_equal(tensor.read(first, last), whole[first:last])


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("deepseek_v3", (16, 8)),  # with latent attention: partial blocks, and rows of a matrix in two tensors
        ("qwen3_moe", (4, 4)),  # a tensor per expert
        ("gpt_oss", (4, 4)),  # one tensor for all experts, with inputs before outputs and alternating parts
        ("minimax_m2", (4, 4)),
        ("mistral3", (16, 16)),  # the language model of a model with images
        ("qwen3_next", (16, 16)),
    ],
)
def test_families_do_not_know_of_it(tmp_path: Path, name: str, block: tuple[int, int]) -> None:
    floats = family_checkpoint(tmp_path / "shapes", FAMILY_CASES[name])
    quantization = QUANTIZATION | {"weight_block_size": list(block)}
    pair = quantized_pair(tmp_path, floats, quantization, of_layers, fp8(block))
    assert_same_numbers(*pair)
    dtypes = {tensor.dtype for tensor in hf.read(pair[1], []).tensors.values()}
    assert "f8_e4m3" in dtypes


def per_tensor(name: str, shape: tuple[int, ...]) -> tuple[Stored, Any]:
    """One factor, and one of inputs, for a matrix, as in Ministral 3."""
    stored, numbers = fp8((1 << 20, 1 << 20), "BF16")(name, shape)
    kind, factor = stored[f"{name}_scale_inv"]
    stored[f"{name}_scale_inv"] = kind, factor.reshape(())
    stored[name.removesuffix("weight") + "activation_scale"] = "BF16", np.full((), 0x3F80, np.uint16)
    return stored, numbers


def test_a_factor_per_matrix_and_static_inputs(tmp_path: Path) -> None:
    quantization = {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "dequantize": False,
        "weight_block_size": None,
        "modules_to_not_convert": ["model.vision_tower", "lm_head"],
    }
    floats = write_checkpoint(tmp_path / "shapes", LLAMA)
    pair = quantized_pair(tmp_path, floats, quantization, of_layers, per_tensor)
    assert_same_numbers(*pair)
    warnings: list[str] = []
    hf.read(pair[1], warnings)
    assert len(warnings) == 1
    assert "inputs are not rounded" in warnings[0]


def test_merged_halves_with_factors_of_their_own(tmp_path: Path) -> None:
    """transformers gives gate and up of merged experts a factor each, whatever the size of a block."""

    def quantize(name: str, shape: tuple[int, ...]) -> tuple[Stored, Any]:
        return fp8((shape[-2] // 2, shape[-1]))(name, shape)

    floats = family_checkpoint(tmp_path / "shapes", FAMILY_CASES["granitemoe"])
    pair = quantized_pair(tmp_path, floats, QUANTIZATION, lambda name: name.endswith(GATE_UP), quantize)
    assert read_safetensors(pair[1] / "model.safetensors")[EXPERTS + GATE_UP].dtype == "f8_e4m3"
    assert_same_numbers(*pair)


def test_merged_experts_have_partial_blocks(tmp_path: Path) -> None:
    """A block has the size in config.json, even if the blocks of a matrix could all have another one."""
    floats = family_checkpoint(tmp_path / "shapes", FAMILY_CASES["granitemoe"])
    _, rows, columns = read_safetensors(floats / "model.safetensors")[EXPERTS + DOWN].shape
    assert columns % 2 == 0
    block = (rows, columns - 2)  # two blocks, of which one has two columns
    quantization = QUANTIZATION | {"weight_block_size": list(block)}
    pair = quantized_pair(tmp_path, floats, quantization, lambda name: name.endswith(DOWN), fp8(block))
    assert read_safetensors(pair[1] / "model.safetensors")[EXPERTS + DOWN].dtype == "f8_e4m3"
    assert_same_numbers(*pair)


def test_export_and_the_engine(folders: tuple[Path, Path], tmp_path: Path) -> None:
    floats, quantized = folders
    export(floats, tmp_path / "floats.bin", dtype="f32", probe_source=None)
    export(quantized, tmp_path / "f32.bin", dtype="f32", probe_source=None)
    report = export(quantized, tmp_path / "auto.bin", probe_source=None)
    assert report.dtype == "q8"
    assert not any("has quantized weights" in warning for warning in report.warnings)
    logits = []
    for name in ("floats.bin", "f32.bin", "auto.bin"):
        with llamac.load(tmp_path / name, kv_dtype="f32") as model:
            kinds = {tensor.dtype for tensor in model.file.tensors if len(tensor.shape) == 2}
            logits.append(model.logits(IDS))
    assert kinds == {"q8", "f32"}  # the embeddings and the output matrix keep their dtype
    np.testing.assert_array_equal(logits[1], logits[0])
    assert not np.array_equal(logits[2], logits[0])


def test_to_hf_writes_plain_weights(folders: tuple[Path, Path], tmp_path: Path) -> None:
    export(folders[1], tmp_path / "hf", to="hf")
    assert "quantization_config" not in json.loads((tmp_path / "hf" / "config.json").read_text())
    assert_same_numbers(folders[0], tmp_path / "hf")


def test_numbers_are_transformers(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """transformers refuses partial blocks, so these are whole."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = LLAMA | {"intermediate_size": 256, "hidden_size": 128}
    floats = write_checkpoint(tmp_path / "shapes", config)
    _, quantized = quantized_pair(tmp_path, floats, QUANTIZATION, of_layers, fp8((128, 128)))
    chosen = transformers.FineGrainedFP8Config(dequantize=True)
    for dtype, ours in ((torch.float32, "f32"), (torch.bfloat16, "bf16")):
        theirs = transformers.AutoModelForCausalLM.from_pretrained(quantized, dtype=dtype, quantization_config=chosen)
        export(quantized, tmp_path / f"{ours}.bin", dtype=ours, probe_source=None)
        with llamac.load(tmp_path / f"{ours}.bin") as model:
            np.testing.assert_array_equal(
                model.file.tensor("layers.1.ffn_down.weight"),
                theirs.state_dict()[MATRIX].to(torch.float32).numpy(),
            )


def test_every_stage_is_transformers(llamac_command: Command, tmp_path: Path) -> None:
    for module in ("torch", "transformers", "accelerate"):
        pytest.importorskip(module)
    floats = write_checkpoint(tmp_path / "shapes", LLAMA | {"intermediate_size": 256, "hidden_size": 128})
    _, quantized = quantized_pair(tmp_path, floats, QUANTIZATION, of_layers, fp8((128, 128)))
    export(quantized, tmp_path / "m.bin", dtype="f32", probe_source=None)
    assert llamac_command("check", tmp_path / "m.bin", "--against", quantized).code == 0


# ---- what is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fmt": "e5m2"}, "fmt is 'e5m2', expected 'e4m3' or 'float8_e4m3fn'"),
        ({"weight_block_size": [128]}, r"weight_block_size is \[128\], expected null or two sizes"),
        ({"weight_block_size": [0, 128]}, r"weight_block_size is \[0, 128\], expected null or two sizes"),
        ({"weight_block_size": [True, 128]}, r"weight_block_size is \[True, 128\], expected null or two sizes"),
        ({"activation_scheme": 3}, "activation_scheme is 3, expected 'dynamic' or 'static'"),
        ({"scale_fmt": "ue5m3"}, "scale_fmt is 'ue5m3', expected 'float' or 'ue8m0'"),
        ({"expert_dtype": "fp4"}, "expert_dtype is 'fp4', expected 'fp8'"),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert is 'lm_head', expected a list of names"),
        ({"modules_to_convert": ["ngrams"]}, r"modules_to_convert is \['ngrams'\]"),
        ({"weight_per_tensor": True}, "weight_per_tensor is True, expected False"),
        ({"bits": 8}, "bits is 8"),
    ],
)
def test_other_configs_are_refused(folders: tuple[Path, Path], tmp_path: Path, changes: Config, message: str) -> None:
    write(tmp_path, {**LLAMA, "quantization_config": QUANTIZATION | changes}, load(folders[1]))
    with pytest.raises(UnsupportedError, match=f"quantization_config of fp8 is not supported: {message}"):
        hf.read(tmp_path, [])


@pytest.mark.parametrize("quantization", [{"quant_method": ["fp8"]}, {"quant_method": "hqq"}, {}, 7])
def test_unknown_methods_are_refused(folders: tuple[Path, Path], tmp_path: Path, quantization: object) -> None:
    write(tmp_path, {**LLAMA, "quantization_config": quantization}, load(folders[1]))
    with pytest.raises(UnsupportedError, match=r"quantization_config is .*\(quantized weights; .* of fp8"):
        hf.read(tmp_path, [])


def _without_factors(tensors: Stored) -> None:
    del tensors[f"{MATRIX}_scale_inv"]


def _with_a_factor_too_few(tensors: Stored) -> None:
    kind, factors = tensors[f"{MATRIX}_scale_inv"]
    tensors[f"{MATRIX}_scale_inv"] = kind, factors[:, 1:]


def _with_integer_factors(tensors: Stored) -> None:
    _, factors = tensors[f"{MATRIX}_scale_inv"]
    tensors[f"{MATRIX}_scale_inv"] = "I32", factors.astype(np.int32)


def _with_floats(tensors: Stored) -> None:
    _, codes = tensors[MATRIX]
    tensors[MATRIX] = "F32", codes.astype(np.float32)


def _with_a_vector(tensors: Stored) -> None:
    tensors["model.norm.weight"] = "F8_E4M3", np.zeros(160, np.uint8)
    tensors["model.norm.weight_scale_inv"] = "F32", np.ones((), np.float32)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without_factors, f"missing: {MATRIX}_scale_inv, the factors of {MATRIX}"),
        (_with_a_factor_too_few, rf"misshaped: {MATRIX}_scale_inv is \(2, 2\), which does not fit .*\(160, 272\)"),
        (_with_integer_factors, f"dtype: {MATRIX}_scale_inv is i32, expected one of f64, f32, f16, bf16, f8_e8m0"),
        (_with_floats, f"dtype: {MATRIX} is f32, expected f8_e4m3, because it has"),
        (_with_a_vector, r"misshaped: model.norm.weight_scale_inv is \(\), which does not fit"),
    ],
)
def test_tensors_that_do_not_match_are_errors(
    folders: tuple[Path, Path], tmp_path: Path, damage: Callable[[Stored], None], message: str
) -> None:
    tensors = load(folders[1])
    damage(tensors)
    check_refused(tmp_path, {**LLAMA, "quantization_config": QUANTIZATION}, tensors, message)


def test_tensors_that_are_not_contiguous_are_errors(folders: tuple[Path, Path]) -> None:
    """As files of torch.save can have them."""
    stored = read_safetensors(folders[1] / "model.safetensors")
    for name, of in ((MATRIX, MATRIX), (f"{MATRIX}_scale_inv", MATRIX)):
        turned = {**stored, name: replace(stored[name], strides=stored[name].strides[::-1])}
        with pytest.raises(ExportError, match=f"strides: {of} has .* and {of}_scale_inv .*, expected contiguous"):
            Fp8((128, 128)).dequantized(turned, lambda _: False)


@pytest.mark.parametrize("factor", [0, -1, np.nan, np.inf])
def test_factors_that_scale_nothing_are_errors(folders: tuple[Path, Path], tmp_path: Path, factor: float) -> None:
    tensors = load(folders[1])
    tensors[f"{MATRIX}_scale_inv"][1][1, 2] = factor
    write(tmp_path, {**LLAMA, "quantization_config": QUANTIZATION}, tensors)
    with pytest.raises(ExportError, match=f"{MATRIX}_scale_inv has the factor {factor:g}, expected positive finite"):
        export(tmp_path, tmp_path / "m.bin", probe_source=None)


def test_numbers_that_overflow_are_errors(folders: tuple[Path, Path], tmp_path: Path) -> None:
    tensors = load(folders[1])
    tensors[f"{MATRIX}_scale_inv"][1][0, 0] = 3e38
    write(tmp_path, {**LLAMA, "quantization_config": QUANTIZATION}, tensors)
    with pytest.raises(ExportError, match=r"layers\.1\.ffn_down\.weight holds numbers that are not finite"):
        export(tmp_path, tmp_path / "m.bin", probe_source=None)


def test_codes_that_are_no_numbers_are_errors(folders: tuple[Path, Path], tmp_path: Path) -> None:
    tensors = load(folders[1])
    tensors[MATRIX][1][7, 9] = 255
    write(tmp_path, {**LLAMA, "quantization_config": QUANTIZATION}, tensors)
    with pytest.raises(ExportError, match=r"layers\.1\.ffn_down\.weight holds numbers that are not finite"):
        export(tmp_path, tmp_path / "m.bin", probe_source=None)


def test_a_file_that_is_cut_is_an_error(folders: tuple[Path, Path], tmp_path: Path) -> None:
    write(tmp_path, {**LLAMA, "quantization_config": QUANTIZATION}, load(folders[1]))
    checkpoint = hf.read(tmp_path, [])
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:9000])
    with pytest.raises(ExportError, match="was truncated while it was being read"):
        checkpoint.tensors["layers.1.ffn_down.weight"].array()
