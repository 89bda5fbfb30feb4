"""Checkpoints of the library compressed-tensors: every number is its code times its factor, and damage is reported."""

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
    packed,
    plain,
    quantized_pair,
    words_of_three_bits,
    write,
)

import llamac
from commands import Command
from golden.cases import GPT2
from golden.family_cases import FAMILY_CASES
from golden.make_families import family_checkpoint
from golden.tiny_checkpoints import Config, write_checkpoint
from llamac.errors import ExportError, UnsupportedError
from llamac.export.convert import export
from llamac.export.hf import compressed
from llamac.export.hf import model as hf

MATRIX = "model.layers.1.mlp.down_proj.weight"  # (96, 160)


def quantization(form: str, weights: Config, **others: object) -> Config:
    """A quantization_config as the library writes it."""
    args = {"symmetric": True, "dynamic": False, "actorder": None, "block_structure": None, "group_size": None}
    group = {"targets": ["Linear"], "weights": {**args, "observer": "minmax", **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "input_activations": None, "output_activations": None}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": 1.8,
        "sparsity_config": {},
        **others,
    }


FLOAT4: Config = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
FLOAT8: Config = FLOAT4 | {"num_bits": 8}
INT4: Config = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
BLOCKS: Config = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [64, 48]}
W4A16 = quantization("pack-quantized", INT4)
KINDS: dict[str, tuple[Config, Quantizer]] = {
    "W4A16": (W4A16, packed(4, 32)),
    "W4A16 with one group": (
        quantization("pack-quantized", INT4 | {"strategy": "channel", "group_size": None}),
        packed(4, 0, "F16"),
    ),
    "W4A16, asymmetric": (quantization("pack-quantized", INT4 | {"symmetric": False}), packed(4, 32, symmetric=False)),
    "W4A16 with groups of columns in another order": (
        quantization("pack-quantized", INT4 | {"actorder": "group"}),
        packed(4, 32, shuffled=True),
    ),
    "W3A16": (quantization("pack-quantized", INT4 | {"num_bits": 3}), packed(3, 32, pack=words_of_three_bits)),
    "W3A16, not split": (quantization("pack-quantized", INT4 | {"num_bits": 3}), packed(3, 32)),
    "NVFP4": (
        quantization(
            "nvfp4-pack-quantized",
            FLOAT4 | {"strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"},
        ),
        fp4(16, ("_packed", "_scale", "_global_scale"), divides=True),
    ),
    "MXFP4": (quantization("mxfp4-pack-quantized", FLOAT4), fp4(32, ("_packed", "_scale"))),
    "MXFP8": (quantization("mxfp8-quantized", FLOAT8), plain("F8_E4M3", (1, 32), "U8")),
    "W8A16": (quantization("pack-quantized", {"num_bits": 8, "strategy": "group", "group_size": 16}), packed(8, 16)),
    "W8A8": (quantization("int-quantized", {"num_bits": 8, "strategy": "channel"}), plain("I8", (1, 0))),
    "FP8": (
        quantization("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
        plain("F8_E4M3", (1, 0)),
    ),
    "FP8 of tensors": (
        quantization("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
        plain("F8_E4M3", (0, 0), "F32"),
    ),
    "FP8 of blocks": (
        quantization("float-quantized", BLOCKS),
        plain("F8_E4M3", (64, 48)),
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same LLaMA in float32 and in W4A16."""
    root = tmp_path_factory.mktemp("compressed")
    return quantized_pair(root, write_checkpoint(root / "shapes", LLAMA), W4A16, of_layers, packed(4, 32))


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_codes_times_factors(tmp_path: Path, kind: str) -> None:
    config, quantize = KINDS[kind]
    floats = write_checkpoint(tmp_path / "shapes", LLAMA)
    assert_same_numbers(*quantized_pair(tmp_path, floats, config, of_layers, quantize))


def test_the_last_word_of_a_row_can_be_partial(tmp_path: Path) -> None:
    """And latent attention takes rows of its matrices apart, as in Kimi K2 Thinking."""
    config = quantization("pack-quantized", INT4 | {"group_size": 6})
    floats = family_checkpoint(tmp_path / "shapes", FAMILY_CASES["deepseek_v3"])
    assert_same_numbers(*quantized_pair(tmp_path, floats, config, of_layers, packed(4, 6)))


def test_any_rows_are_read(folders: tuple[Path, Path]) -> None:
    tensor = hf.read(folders[1], []).tensors["layers.1.ffn_down.weight"]
    assert tensor.dtype == "q4_0"
    whole = tensor.array()
    for first, last in ((0, 1), (5, 9), (95, 96), (7, 7)):
        np.testing.assert_array_equal(tensor.read(first, last), whole[first:last])


@pytest.mark.parametrize("order", [1, -1])
def test_zeros_and_groups_choose_among_groups_of_the_same_bits(tmp_path: Path, order: int) -> None:
    def quantize(name: str, shape: tuple[int, ...]) -> tuple[Stored, np.ndarray]:
        return packed(4, 32, symmetric="mlp" in name, shuffled="o_proj" in name)(name, shape)

    differences: list[Config] = [{}, {"symmetric": False}, {"symmetric": False, "actorder": "group"}]
    groups = {str(i): {"weights": INT4 | one} for i, one in enumerate(differences[::order])}
    floats = write_checkpoint(tmp_path / "shapes", LLAMA)
    assert_same_numbers(*quantized_pair(tmp_path, floats, W4A16 | {"config_groups": groups}, of_layers, quantize))


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("kind", ["words", "blocks"])
def test_targets_choose_among_groups_with_as_many_factors(tmp_path: Path, order: int, kind: str) -> None:
    """Names come before patterns, and patterns before classes. 160 columns are 4 groups of all these sizes."""
    sizes = {"layers.0.mlp.down_proj": 40, "layers.1.mlp.down_proj": 46}

    def quantize(name: str, shape: tuple[int, ...]) -> tuple[Stored, np.ndarray]:
        size = next((size for module, size in sizes.items() if module in name), 48)
        return (packed(4, size) if kind == "words" else plain("F8_E4M3", (64, size)))(name, shape)

    targets = {48: "Linear", 40: "re:.*layers.\\d.mlp.d", 46: "model.layers.1.mlp.down_proj"}
    block: Config = {"num_bits": 8, "type": "float", "strategy": "block"}
    groups = {
        str(size): {
            "targets": [target],
            "weights": INT4 | {"group_size": size} if kind == "words" else block | {"block_structure": [64, size]},
        }
        for size, target in list(targets.items())[::order]
    }
    form = "pack-quantized" if kind == "words" else "float-quantized"
    floats = write_checkpoint(tmp_path / "shapes", LLAMA)
    config = quantization(form, {}, config_groups=groups)
    assert_same_numbers(*quantized_pair(tmp_path, floats, config, of_layers, quantize))
    groups["40"]["targets"] = ["re:(?=a)"]
    with pytest.raises(UnsupportedError, match=r"the pattern '\(\?:\(\?=a\)\)\.\*' is not supported"):
        hf.read(quantized_pair(tmp_path / "other", floats, config, of_layers, quantize)[1], [])


@pytest.mark.parametrize("kind", ["NVFP4", "MXFP4"])
@pytest.mark.parametrize("end", ["_zero_point", "_g_idx"])
def test_matrices_in_fp4_have_neither_zeros_nor_groups(tmp_path: Path, kind: str, end: str) -> None:
    config, quantize = KINDS[kind]

    def with_more(name: str, shape: tuple[int, ...]) -> tuple[Stored, np.ndarray]:
        stored, numbers = quantize(name, shape)
        return stored | {f"{name}{end}": ("I8", np.ones(1, np.int8))}, numbers

    pair = quantized_pair(
        tmp_path, write_checkpoint(tmp_path / "shapes", LLAMA), config, lambda name: name == MATRIX, with_more
    )
    with pytest.raises(ExportError, match=f"surplus: {MATRIX}{end}, which no matrix in FP4 has"):
        hf.read(pair[1], [])


@pytest.mark.parametrize("kind", ["W4A16", "MXFP4", "NVFP4", "W8A8", "FP8"])
def test_matrices_by_inputs_are_right_or_refused(tmp_path: Path, kind: str) -> None:
    """GPT-2's."""
    config, quantize = KINDS[kind]
    sizes = {"n_embd": 32, "n_head": 4, "n_layer": 1, "n_inner": 64}
    floats = write_checkpoint(tmp_path / "shapes", GPT2 | sizes)
    pair = quantized_pair(tmp_path, floats, config, lambda name: name.endswith(".weight") and ".c_" in name, quantize)
    if kind in ("W4A16", "MXFP4"):
        with pytest.raises(ExportError, match=r"unsupported: \S*h\.0\.attn\.c_attn\.weight has .* \(inputs, outputs\)"):
            hf.read(pair[1], [])
    else:
        assert_same_numbers(*pair)


@pytest.mark.parametrize(("bits", "dynamic"), [(4, "local"), (8, False)])
def test_inputs_that_are_not_rounded_are_a_warning(bits: int, dynamic: object) -> None:
    config = json.loads(json.dumps(KINDS["NVFP4"][0]))
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": bits, "dynamic": dynamic}
    warnings: list[str] = []
    compressed.parse(config, warnings)
    assert f"inputs of {bits} bits" in warnings[0]


def test_the_size_of_blocks_can_be_a_string() -> None:
    """Earlier versions of the library wrote one."""
    found = compressed.parse(quantization("float-quantized", BLOCKS | {"block_structure": "64x48"}), [])
    assert found == compressed.parse(quantization("float-quantized", BLOCKS), [])


def test_a_quantized_cache_is_a_warning(tmp_path: Path) -> None:
    """Of RedHat's FP8-KV models. The scales belong to the cache only."""

    def quantize(name: str, shape: tuple[int, ...]) -> tuple[Stored, np.ndarray]:
        stored, numbers = packed(4, 32)(name, shape)
        for old, new in (("k_proj.weight", "k_scale"), ("v_proj.weight", "v_scale"), ("q_proj.weight", "k_zero_point")):
            if name.endswith(old):
                stored[name.replace(old, new)] = "F32", np.ones(1, np.float32)
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            stored[name.replace("weight", "output_scale")] = "F32", np.ones(1, np.float32)
        return stored, numbers

    config = W4A16 | {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}}
    pair = quantized_pair(tmp_path, write_checkpoint(tmp_path / "shapes", LLAMA), config, of_layers, quantize)
    assert_same_numbers(*pair)
    warnings: list[str] = []
    hf.read(pair[1], warnings)
    assert ["a quantized cache (kv_cache_scheme)" in warning for warning in warnings] == [True]


def test_groups_can_differ_and_inputs_are_not_rounded(tmp_path: Path) -> None:
    def quantize(name: str, shape: tuple[int, ...]) -> tuple[Stored, np.ndarray]:
        stored, numbers = (packed(4, 32) if "mlp" in name else plain("I8", (1, 0)))(name, shape)
        stored[name.removesuffix("weight") + "input_scale"] = "F32", np.ones(1, np.float32)
        return stored, numbers

    groups = {
        name: {
            "weights": W4A16["config_groups"]["group_0"]["weights"] | weights,
            "format": form,
            "input_activations": {"num_bits": 8, "dynamic": False},
        }
        for name, form, weights in (
            ("one", "pack-quantized", {}),
            ("two", "int-quantized", {"num_bits": 8, "strategy": "channel", "group_size": None}),
        )
    }
    config = {**W4A16, "format": "mixed-precision", "config_groups": groups}
    pair = quantized_pair(tmp_path, write_checkpoint(tmp_path / "shapes", LLAMA), config, of_layers, quantize)
    assert_same_numbers(*pair)
    warnings: list[str] = []
    hf.read(pair[1], warnings)
    assert "inputs are not rounded" in warnings[0]


@pytest.mark.parametrize(
    ("config", "quantize", "dtype"),
    [
        (W4A16, packed(4, 32, exact=True), "q4_0"),
        (
            quantization("pack-quantized", INT4 | {"symmetric": False}),
            packed(4, 32, symmetric=False, exact=True),
            "q5_0",
        ),
        (*KINDS["MXFP4"], "mxfp4"),
    ],
)
def test_blocks_keep_codes_and_factors(tmp_path: Path, config: Config, quantize: Quantizer, dtype: str) -> None:
    """Their products are not rounded to the dtype of the factors."""
    floats = write_checkpoint(tmp_path / "shapes", LLAMA)
    plain, quantized = quantized_pair(tmp_path, floats, config, of_layers, quantize)
    assert export(quantized, tmp_path / "m.bin", probe_source=None).dtype == dtype
    name = "layers.1.ffn_down.weight"
    with llamac.load(tmp_path / "m.bin") as model:
        np.testing.assert_array_equal(model.file.tensor(name), hf.read(plain, []).tensors[name].array())


def test_export_and_the_engine(folders: tuple[Path, Path], tmp_path: Path) -> None:
    export(folders[0], tmp_path / "floats.bin", dtype="f32", probe_source=None)
    export(folders[1], tmp_path / "f32.bin", dtype="f32", probe_source=None)
    assert export(folders[1], tmp_path / "auto.bin", probe_source=None).dtype == "q4_0"
    with llamac.load(tmp_path / "floats.bin") as one, llamac.load(tmp_path / "f32.bin") as other:
        np.testing.assert_array_equal(one.logits([3, 1, 4, 1, 5]), other.logits([3, 1, 4, 1, 5]))
    export(folders[1], tmp_path / "hf", to="hf")
    assert_same_numbers(folders[0], tmp_path / "hf")


# The library of today has no groups of columns in another order, and splits integers of 3 bits among words.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "another order" not in kind and "not split" not in kind])
def test_numbers_and_stages_are_transformers(llamac_command: Command, tmp_path: Path, kind: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    for module in ("accelerate", "compressed_tensors"):
        pytest.importorskip(module)
    config, quantize = KINDS[kind]
    floats = write_checkpoint(tmp_path / "shapes", LLAMA)
    _, quantized = quantized_pair(tmp_path, floats, config, of_layers, quantize)
    chosen = transformers.AutoConfig.from_pretrained(quantized)
    chosen.quantization_config["run_compressed"] = False
    loaded = transformers.AutoModelForCausalLM.from_pretrained(quantized, dtype=torch.float32, config=chosen)
    found = hf.read(quantized, []).tensors["layers.1.ffn_down.weight"].array()
    np.testing.assert_array_equal(found, loaded.state_dict()[MATRIX].numpy())
    export(quantized, tmp_path / "m.bin", dtype="f32", probe_source=None)
    assert llamac_command("check", tmp_path / "m.bin", "--against", quantized).code == 0


# ---- what is refused


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (W4A16 | {"format": "mxfp6-pack-quantized"}, "format is 'mxfp6-pack-quantized', expected 'float-quantized' or"),
        (quantization("nvfp4-pack-quantized", FLOAT4), "type 'float' with num_bits 4 in the format 'nvfp4-pack-"),
        (W4A16 | {"kv_cache_scheme": 8}, "kv_cache_scheme is 8, expected an object"),
        (quantization("float-quantized", BLOCKS | {"block_structure": "16x32x2"}), "block_structure '16x32x2'"),
        (W4A16 | {"sparsity_config": {"format": "sparse-24"}}, "sparsity_config is {'format': 'sparse-24'}"),
        (W4A16 | {"transform_config": {"R1": {}}}, "transform_config is {'R1': {}}"),
        (W4A16 | {"quantization_status": "calibration"}, "quantization_status is 'calibration', expected 'compressed'"),
        (W4A16 | {"sparsity_config": 3}, "sparsity_config is 3"),
        (
            W4A16 | {"config_groups": {f"{n}": {"weights": {**INT4, "group_size": n}} for n in range(1, 66)}},
            "config_groups has 65 kinds of groups, expected at most 64",
        ),
        (W4A16 | {"config_groups": {}}, "config_groups is {}, expected an object"),
        (W4A16 | {"config_groups": {"a": 3}}, "a.weights is None, expected an object"),
        (quantization("int-quantized", {"num_bits": 8, "symmetric": False}), "symmetric False in the format 'int-"),
        (quantization("pack-quantized", INT4 | {"actorder": "rows"}), "group_0.weights.actorder is 'rows', expected"),
        (quantization("pack-quantized", INT4 | {"num_bits": 9}), "type 'int' with num_bits 9 in the format 'pack-"),
        (quantization("int-quantized", INT4), "type 'int' with num_bits 4 in the format 'int-quantized'"),
        (quantization("pack-quantized", INT4 | {"group_size": 0}), "strategy 'group' with group_size 0"),
        (quantization("pack-quantized", INT4 | {"strategy": "token"}), "strategy 'token'"),
        (quantization("pack-quantized", INT4 | {"scale_bits": 2}), "group_0.weights.scale_bits is 2"),
    ],
)
def test_other_configs_are_refused(folders: tuple[Path, Path], tmp_path: Path, config: Config, message: str) -> None:
    write(tmp_path, {**LLAMA, "quantization_config": config}, load(folders[1]))
    with pytest.raises(UnsupportedError, match=f"compressed-tensors is not supported: .*{message}"):
        hf.read(tmp_path, [])


def _without_factors(tensors: Stored) -> None:
    del tensors[f"{MATRIX}_scale"]


def _without_a_shape(tensors: Stored) -> None:
    del tensors[f"{MATRIX}_shape"]


def _with_another_shape(tensors: Stored) -> None:
    tensors[f"{MATRIX}_shape"][1][1] = 152


def _with_a_negative_shape(tensors: Stored) -> None:
    tensors[f"{MATRIX}_shape"][1][0] = -96


def _with_a_factor_too_few(tensors: Stored) -> None:
    kind, factors = tensors[f"{MATRIX}_scale"]
    tensors[f"{MATRIX}_scale"] = kind, factors[:, 1:]


def _with_zeros(tensors: Stored) -> None:
    _with_plain_codes(tensors)
    _with_zeros_of_words(tensors)


def _with_floats_as_a_shape(tensors: Stored) -> None:
    tensors[f"{MATRIX}_shape"] = "F32", np.array([96, 160], np.float32)


def _with_zeros_of_words(tensors: Stored) -> None:
    tensors[f"{MATRIX}_zero_point"] = "I32", np.zeros((12, 5), np.int32)


def _with_plain_codes(tensors: Stored) -> None:
    for end in ("_packed", "_shape"):
        del tensors[f"{MATRIX}{end}"]
    tensors[MATRIX] = "I8", np.zeros((96, 160), np.int8)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without_factors, f"missing: {MATRIX}_scale, the factors of {MATRIX}"),
        (_without_a_shape, f"missing: {MATRIX}_shape, two integers"),
        (
            _with_another_shape,
            rf"misshaped: {MATRIX}_packed is i32 \(96, 20\), which .* \(96, 152\): expected i32 \(96, 19\)",
        ),
        (_with_a_negative_shape, rf"misshaped: {MATRIX}_packed is i32 \(96, 20\), which does not fit .*\(-96, 160\)"),
        (_with_a_factor_too_few, rf"misshaped: {MATRIX}_scale is \(96, 4\), which does not fit"),
        (_with_zeros, rf"(.*\n  )?unsupported: {MATRIX}_zero_point: only integers in words have zeros"),
        (_with_floats_as_a_shape, rf"misshaped: {MATRIX}_shape is f32 \(2,\), expected two integers"),
        (_with_zeros_of_words, f"surplus: {MATRIX}_zero_point, which no fitting group"),
        (_with_plain_codes, f"dtype: {MATRIX} is i8, expected i32"),
    ],
)
def test_tensors_that_do_not_match_are_errors(
    folders: tuple[Path, Path], tmp_path: Path, damage: Callable[[Stored], None], message: str
) -> None:
    tensors = load(folders[1])
    damage(tensors)
    check_refused(tmp_path, {**LLAMA, "quantization_config": W4A16}, tensors, message)


@pytest.mark.parametrize(
    ("weights", "groups", "message"),
    [
        ({"symmetric": False}, None, "missing: .*_zero_point, the zeros of"),
        ({"actorder": "group"}, None, "missing: .*_g_idx, the groups of"),
        ({}, 160, f"(.*\n  )*surplus: {MATRIX}_g_idx"),
        ({"actorder": "group"}, 159, rf"(.*\n  )*misshaped: {MATRIX}_g_idx is i32 \(159,\), expected 160 integers"),
    ],
)
def test_zeros_and_groups_that_do_not_match_are_errors(
    folders: tuple[Path, Path], tmp_path: Path, weights: Config, groups: int | None, message: str
) -> None:
    tensors = load(folders[1])
    if groups is not None:
        tensors[f"{MATRIX}_g_idx"] = "I32", np.zeros(groups, np.int32)
    config = quantization("pack-quantized", INT4 | weights)
    check_refused(tmp_path, {**LLAMA, "quantization_config": config}, tensors, message)


def test_factors_that_are_no_numbers_are_errors(folders: tuple[Path, Path], tmp_path: Path) -> None:
    tensors = load(folders[1])
    tensors[f"{MATRIX}_scale"][1][5, 2] = 0x7FC0  # NaN
    write(tmp_path, {**LLAMA, "quantization_config": W4A16}, tensors)
    with pytest.raises(ExportError, match=f"{MATRIX}_scale has the factor nan, expected finite numbers"):
        export(tmp_path, tmp_path / "m.bin", probe_source=None)


def test_a_file_that_is_cut_is_an_error(folders: tuple[Path, Path], tmp_path: Path) -> None:
    write(tmp_path, {**LLAMA, "quantization_config": W4A16}, load(folders[1]))
    checkpoint = hf.read(tmp_path, [])
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:9000])
    with pytest.raises(ExportError, match="was truncated while it was being read"):
        checkpoint.tensors["layers.1.ffn_down.weight"].array()
