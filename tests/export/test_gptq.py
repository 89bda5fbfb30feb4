"""Checkpoints of GPTQ, AWQ and AutoRound: numbers follow their formulas, and stay where GGUF's blocks can hold them."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import quantized_checkpoints
from numpy.typing import NDArray
from quantized_checkpoints import (
    Quantizer,
    Stored,
    assert_same_numbers,
    awq,
    check_refused,
    gptq,
    load,
    of_layers,
    quantized_pair,
    write,
)
from vocab_samples import tokenizer_json, write_json

import llamac
from commands import GREEDY, Command
from golden.cases import GPT2
from golden.family_cases import FAMILY_CASES
from golden.make_families import family_checkpoint
from golden.tiny_checkpoints import Config, changed, random_tensor, write_checkpoint, write_config
from llamac.errors import ExportError, UnsupportedError
from llamac.export.checkpoint import LazyTensor
from llamac.export.convert import export
from llamac.export.hf import model as hf
from llamac.export.hf.integers import IntegerTensor
from llamac.export.hf.words import Words
from llamac.export.latent import rotated_first
from llamac.export.stored import StoredTensor

LLAMA = changed(
    quantized_checkpoints.LLAMA, vocab_size=259, num_hidden_layers=1, num_attention_heads=3, num_key_value_heads=1
)
MODULE = "model.layers.0.mlp.down_proj"  # (96, 160)
OUR_NAME = "layers.0.ffn_down.weight"

# As AutoGPTQ, GPTQModel, AutoAWQ and AutoRound write them.
GPTQ: Config = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 32,
    "damp_percent": 0.1,
    "desc_act": False,
    "static_groups": False,
    "sym": True,
    "true_sequential": True,
    "model_name_or_path": None,
    "is_marlin_format": False,
}
NEW_GPTQ: Config = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 32,
    "desc_act": True,
    "sym": False,
    "lm_head": False,
    "checkpoint_format": "gptq_v2",
    "pack_dtype": "int32",
    "dynamic": {"-:.*router": {}, r"+:.*down_proj": {"bits": 8, "group_size": 16}},
    "meta": {"quantizer": ["gptqmodel:2.0.0"], "damp_percent": 0.01},
}
AWQ: Config = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 32,
    "version": "gemm",
    "zero_point": True,
    "modules_to_not_convert": None,
}
AUTO_ROUND: Config = {
    "quant_method": "auto-round",
    "bits": 4,
    "group_size": 32,
    "sym": True,
    "data_type": "int",
    "packing_format": "auto_round:auto_gptq",
    "autoround_version": "0.9.1",
    "iters": 200,
    "extra_config": {"lm_head": {"bits": 16, "data_type": "float"}, MODULE: {"bits": 8}},
}


def mixed(usual: Quantizer, down: Quantizer) -> Quantizer:
    """Another kind of quantization for one module of each layer."""
    return lambda name, shape: (down if "down_proj" in name else usual)(name, shape)


# The config, the tensors, and the dtype of GGUF's blocks that hold the numbers of MODULE.
KINDS: dict[str, tuple[Config, Quantizer, str | None]] = {
    "4 bits": (GPTQ, gptq(4, 32), "q4_0"),
    "4 bits, one group": (GPTQ | {"group_size": -1}, gptq(4, 0, has_groups=False), "q4_0"),
    "4 bits, asymmetric": (GPTQ | {"sym": False}, gptq(4, 32, symmetric=False), "q5_0"),
    "8 bits": (GPTQ | {"bits": 8, "group_size": 64}, gptq(8, 64), "q8_0"),
    "8 bits, asymmetric": (GPTQ | {"bits": 8, "sym": False}, gptq(8, 32, symmetric=False), None),
    "3 bits, asymmetric": (GPTQ | {"bits": 3, "sym": False}, gptq(3, 32, symmetric=False), "q4_0"),
    "2 bits": (GPTQ | {"bits": 2}, gptq(2, 32), "q4_0"),
    "groups of 16 columns": (GPTQ | {"group_size": 16}, gptq(4, 16), None),
    "columns in another order": (GPTQ | {"desc_act": True}, gptq(4, 32, shuffled=True), None),
    "zeros as they are": (
        NEW_GPTQ,
        mixed(
            gptq(4, 32, symmetric=False, shuffled=True, less=0),
            gptq(8, 16, symmetric=False, less=0),
        ),
        None,
    ),
    "AWQ": (AWQ, awq(32), "q5_0"),
    "AutoRound": (AUTO_ROUND, mixed(gptq(4, 32, has_groups=False), gptq(8, 32)), "q8_0"),
    "AutoRound in AWQ's layout": (
        AUTO_ROUND | {"packing_format": "auto_round:auto_awq", "extra_config": {}},
        awq(32),
        "q5_0",
    ),
    "AutoRound with zeros as they are": (
        changed(AUTO_ROUND, quant_method="intel/auto-round", packing_format=None, backend="auto_round:exllamav2"),
        gptq(4, 32, symmetric=False, less=0),
        "q5_0",
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same LLaMA in float32 and in 4 bits of GPTQ."""
    root = tmp_path_factory.mktemp("gptq")
    pair = quantized_pair(root, write_checkpoint(root / "shapes", LLAMA), GPTQ, of_layers, gptq(4, 32))
    return write_json(pair[0], tokenizer=tokenizer_json()), write_json(pair[1], tokenizer=tokenizer_json())


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_differences_times_factors(tmp_path: Path, kind: str) -> None:
    """Also of any rows, and in the blocks of a flat file, without another rounding."""
    config, quantize, dtype = KINDS[kind]
    floats = write_checkpoint(tmp_path / "shapes", LLAMA)
    pair = quantized_pair(tmp_path, floats, config, of_layers, quantize)
    check_numbers(pair, OUR_NAME, dtype)


def check_numbers(pair: tuple[Path, Path], name: str, dtype: str | None) -> None:
    """Check the numbers of two directories, and of a matrix in a flat file, which has blocks of `dtype` if not None."""
    assert_same_numbers(*pair)
    tensor = hf.read(pair[1], []).tensors[name]
    assert (tensor.dtype if tensor.blocks else None) == dtype
    whole = tensor.array()
    for first, last in ((0, 1), (5, 19), (95, 96), (7, 7)):
        np.testing.assert_array_equal(tensor.read(first, last), whole[first:last])
    path = pair[1].parent / "m.bin"
    export(pair[1], path, probe_source=None)
    with llamac.load(path) as model:
        assert {found.dtype for found in model.file.tensors if found.name == name} == {dtype or "q8"}
        if dtype:
            np.testing.assert_array_equal(model.file.tensor(name), whole)


def test_rows_in_another_order_keep_their_blocks(tmp_path: Path) -> None:
    """ERNIE 4.5 rotates neighboring rows of q."""
    floats = write_checkpoint(tmp_path / "shapes", LLAMA)
    config = changed(LLAMA, model_type="ernie4_5", architectures=["Ernie4_5ForCausalLM"], head_dim=32)
    write_config(floats, config)
    check_numbers(quantized_pair(tmp_path, floats, GPTQ, of_layers, gptq(4, 32)), "layers.0.attn_q.weight", "q4_0")


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "qwen3_next"])
def test_families_do_not_know_of_it(tmp_path: Path, name: str) -> None:
    """Experts in tensors of their own, rows of a matrix in two tensors, and rows in another order."""

    def is_quantized(tensor: str) -> bool:
        return of_layers(tensor) and "conv1d" not in tensor and "mlp.shared_expert_gate" not in tensor

    floats = family_checkpoint(tmp_path / "shapes", FAMILY_CASES[name])
    config = GPTQ | {"group_size": 8, "sym": False}

    def quantize(tensor: str, shape: tuple[int, ...]) -> tuple[Stored, np.ndarray]:
        is_whole = shape[0] % 8 == shape[1] % 8 == 0 and len(shape) == 2
        return gptq(4, 8, symmetric=False)(tensor, shape) if is_whole else plain_floats(tensor, shape)

    pair = quantized_pair(tmp_path, floats, config, is_quantized, quantize)
    assert_same_numbers(*pair)
    assert "u4" in {tensor.dtype for tensor in hf.read(pair[1], []).tensors.values()}


def plain_floats(name: str, shape: tuple[int, ...]) -> tuple[Stored, np.ndarray]:
    numbers = random_tensor(name, shape)
    return {name: ("F32", numbers)}, numbers


def test_biases_of_zeros_are_left_out(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """AutoGPTQ gave all modules biases."""
    tensors = load(folders[1]) | {f"{MODULE}.bias": ("F16", np.zeros(96, np.float16))}
    assert_same_numbers(folders[0], write(tmp_path / "zeros", {**LLAMA, "quantization_config": GPTQ}, tensors))
    tensors[f"{MODULE}.bias"][1][7] = 1
    with pytest.raises(ExportError, match=rf"unknown: {MODULE}\.bias \(96,\)"):
        hf.read(write(tmp_path / "ones", {**LLAMA, "quantization_config": GPTQ}, tensors), [])


def test_the_command_and_the_engine(llamac_command: Command, folders: tuple[Path, Path], tmp_path: Path) -> None:
    """A model in q4_0 computes what the same numbers in f32 do, up to rounded inputs; a GGUF file keeps the blocks."""
    for folder, dtype in zip(folders, ("f32", "auto"), strict=True):
        assert llamac_command("export", folder, tmp_path / f"{dtype}.bin", "--dtype", dtype).code == 0
    assert llamac_command("export", folders[1], tmp_path / "m.gguf", "--to", "gguf").code == 0
    assert llamac_command("export", tmp_path / "m.gguf", tmp_path / "gguf.bin").code == 0
    logits = []
    for name in ("f32", "auto", "gguf"):
        with llamac.load(tmp_path / f"{name}.bin") as model:
            logits.append(model.logits([3, 1, 4, 1, 5]))
    np.testing.assert_allclose(logits[1], logits[0], atol=1e-3 * np.abs(logits[0]).max())
    np.testing.assert_array_equal(logits[2], logits[1])
    options = ("-i", "ab", *GREEDY, "-n", 5, "-q")
    done = llamac_command("run", folders[1], "--cache-dir", tmp_path / "cache", *options)
    assert (done.code, done.out) == (0, llamac_command("run", tmp_path / "auto.bin", *options).out)
    assert llamac_command("check", tmp_path / "auto.bin").code == 0


def test_hf_directories_have_the_dtype_of_the_embedding(folders: tuple[Path, Path], tmp_path: Path) -> None:
    tensors = load(folders[1])
    name = "model.embed_tokens.weight"
    tensors[name] = "BF16", (tensors[name][1].view(np.uint32) >> 16).astype(np.uint16)
    source = write(tmp_path / "source", {**LLAMA, "quantization_config": GPTQ}, tensors)
    assert export(source, tmp_path / "hf", to="hf").dtype == "bf16"
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config


def test_factors_must_fit_float16(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Otherwise no block holds the numbers, and the matrix is one of 8 bits like other quantized ones."""
    tensors = load(folders[1])
    factors = tensors[f"{MODULE}.scales"][1].astype(np.float32)
    for factor, dtype in ((np.float32(0.25), "q4_0"), (np.float32(1) / 3, "u4"), (np.float32(1e6), "u4")):
        factors[2, 5] = factor
        tensors[f"{MODULE}.scales"] = "F32", factors
        folder = write(tmp_path, {**LLAMA, "quantization_config": GPTQ}, tensors)
        assert hf.read(folder, []).tensors[OUR_NAME].dtype == dtype


@pytest.mark.parametrize(
    ("bits", "zero", "dtype"),
    [
        *((4, 8, "q4_0"), (4, 7, "q5_0"), (4, 9, "q5_0"), (4, 16, "q5_0"), (4, 17, "q8_0")),
        *((5, 16, "q5_0"), (5, 15, "q8_0"), (5, 17, "q8_0"), (8, 128, "q8_0"), (8, 127, "u8"), (8, 129, "u8")),
    ],
)
def test_blocks_hold_every_difference(tmp_path: Path, bits: int, zero: int, dtype: str) -> None:
    """The smallest type whose range has the differences of all codes with a zero."""
    codes = np.arange(256, dtype=np.uint64).reshape(8, 32) % (1 << bits)
    packed = [sum(int(code) << bits * i for i, code in enumerate(row)).to_bytes(4 * bits, "little") for row in codes]
    (tmp_path / "codes").write_bytes(b"".join(packed))
    np.full((8, 1), 0.5, np.float16).tofile(tmp_path / "scales")
    words = Words(StoredTensor(tmp_path / "codes", "i32", (8, bits), (bits, 1), 0), (8, 32), bits, spills=True)
    scales = StoredTensor(tmp_path / "scales", "f16", (8, 1), (1, 1), 0)
    tensor = IntegerTensor(tmp_path, "f32", (8, 32), (32, 1), 0, "scales", words, zero, scales, 32).lazy()
    expected = (codes.astype(np.float32) - zero) / 2
    assert tensor.dtype == dtype
    np.testing.assert_array_equal(tensor.array(), expected)
    if tensor.blocks:
        kind = gguf.GGMLQuantizationType[dtype.upper()]
        np.testing.assert_array_equal(gguf.dequantize(tensor.blocks(0, 8), kind), expected)


@pytest.mark.parametrize("along_rows", [False, True])
def test_some_rows_take_the_memory_of_these(tmp_path: Path, along_rows: bool) -> None:
    """Their words are runs all over a tensor that is stored by inputs."""
    (tmp_path / "words").write_bytes(bytes(4096 * 1024 // 2))
    shape = (4096, 128) if along_rows else (512, 1024)
    tensor = StoredTensor(tmp_path / "words", "i32", shape, (shape[1], 1), 0)
    words = Words(tensor, (1024, 4096), 4, by_columns=True, along_rows=along_rows, spills=True)
    assert words.problem("words") is None
    tracemalloc.start()
    assert words.read(500, 508).shape == (8, 4096)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4096 * 1024 // 4  # bytes, and a number of the matrix takes one


# ---- what is refused


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            GPTQ | {"checkpoint_format": "marlin"},
            "gptq is not supported: checkpoint_format is 'marlin', expected 'gptq' or",
        ),
        (GPTQ | {"bits": 1}, "bits is 1, expected 2, 3, 4, 5, 6, 7, 8"),
        (GPTQ | {"bits": True}, "bits is True"),
        (changed(GPTQ, bits=None), "bits is None"),
        (GPTQ | {"group_size": 0}, "group_size is 0, expected -1 or a size"),
        (GPTQ | {"rotation": "hadamard"}, "rotation is 'hadamard'"),
        (GPTQ | {"pack_dtype": "int64"}, "pack_dtype is 'int64', expected 'int32'"),
        (GPTQ | {"dynamic": {"+:lm_head": {"bits": 9}}}, r"dynamic.\+:lm_head.bits is 9"),
        (GPTQ | {"dynamic": [4]}, r"dynamic is \[4\], expected an object"),
        (
            AWQ | {"version": "gemv"},
            "awq is not supported: version is 'gemv', expected 'gemm' or 'GEMM'; export from the orig",
        ),
        (AWQ | {"bits": 8}, "awq is not supported: bits is 8, expected 4; export from the orig"),
        (
            AUTO_ROUND | {"packing_format": "auto_round:auto_awq"},
            rf"auto-round is not supported: extra_config\.{MODULE}\.bits is 8, expected 4; export",
        ),
        (
            AUTO_ROUND | {"packing_format": "auto_round:rrq"},
            "auto-round is not supported: packing_format is 'auto_round:rrq'",
        ),
        (AUTO_ROUND | {"data_type": "nv_fp"}, "data_type is 'nv_fp', expected 'int'"),
    ],
)
def test_other_configs_are_refused(folders: tuple[Path, Path], tmp_path: Path, config: Config, message: str) -> None:
    write(tmp_path, {**LLAMA, "quantization_config": config}, load(folders[1]))
    with pytest.raises(UnsupportedError, match=message):
        hf.read(tmp_path, [])


def test_unknown_keys_are_named(folders: tuple[Path, Path], tmp_path: Path) -> None:
    # GPTQModel 5 writes "method", too
    write(tmp_path, {**LLAMA, "quantization_config": GPTQ | {"luck": 7, "method": "gptq"}}, load(folders[1]))
    warnings: list[str] = []
    hf.read(tmp_path, warnings)
    assert warnings == ["config.json: quantization_config has keys that llamac does not know: luck"]


def without(end: str) -> Callable[[Stored], None]:
    def damage(tensors: Stored) -> None:
        del tensors[MODULE + end]

    return damage


def cut(end: str) -> Callable[[Stored], None]:
    def damage(tensors: Stored) -> None:
        kind, values = tensors[MODULE + end]
        tensors[MODULE + end] = kind, values[:-1]

    return damage


def _without_inputs(tensors: Stored) -> None:
    tensors[f"{MODULE}.qweight"] = "I32", np.zeros((0, 96), np.int32)
    without(".g_idx")(tensors)


def _with_words_of_floats(tensors: Stored) -> None:
    tensors[f"{MODULE}.qweight"] = "F32", tensors[f"{MODULE}.qweight"][1].astype(np.float32)


def _with_integers_as_factors(tensors: Stored) -> None:
    tensors[f"{MODULE}.scales"] = "I32", tensors[f"{MODULE}.scales"][1].astype(np.int32)


def _with_other_bits(tensors: Stored) -> None:
    tensors[f"{MODULE}.qzeros"] = "I32", np.zeros((5, 24), np.int32)


def _with_floats_too(tensors: Stored) -> None:
    tensors[f"{MODULE}.weight"] = "F32", np.zeros((96, 160), np.float32)


def _with_a_group_too_few(tensors: Stored) -> None:
    for end in (".qzeros", ".scales"):
        cut(end)(tensors)
    without(".g_idx")(tensors)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without(".scales"), rf"missing: {MODULE}\.scales, of {MODULE}\.qweight"),
        (without(".qzeros"), rf"missing: {MODULE}\.qzeros, of {MODULE}\.qweight"),
        (without(".qweight"), rf"missing: {MODULE}\.qweight, which {MODULE}\.(g_idx|qzeros|scales) belongs to"),
        (cut(".qweight"), rf"misshaped: {MODULE}\.g_idx is i32 \(160,\), expected integers \(152\)"),
        (_without_inputs, rf"misshaped: {MODULE}\.qweight is \(0, 96\) and .*, expected matrices"),
        (cut(".scales"), rf"misshaped: {MODULE}\.qzeros is i32 \(5, 12\), expected i32 \(4, 12\)"),
        (cut(".g_idx"), rf"misshaped: {MODULE}\.g_idx is i32 \(159,\), expected integers \(160\)"),
        (_with_words_of_floats, rf"misshaped: {MODULE}\.qweight is f32 \(20, 96\), expected i32 \(20, 96\)"),
        (_with_integers_as_factors, rf"misshaped: {MODULE}\.scales is i32 \(5, 96\), expected floats"),
        (_with_other_bits, rf"misshaped: {MODULE}\.qzeros has 8 bits for each of 96 outputs, expected 4"),
        (_with_floats_too, rf"duplicate: {MODULE}\.weight, although {MODULE}\.qweight is the same matrix"),
        (
            _with_a_group_too_few,
            rf"misshaped: {MODULE}\.scales has 4 groups of 160 inputs, which no group_size gives \(32\)",
        ),
    ],
)
def test_tensors_that_do_not_match_are_errors(
    folders: tuple[Path, Path], tmp_path: Path, damage: Callable[[Stored], None], message: str
) -> None:
    tensors = load(folders[1])
    damage(tensors)
    config = GPTQ | {"group_size": -1} if damage is _without_inputs else GPTQ
    check_refused(tmp_path, {**LLAMA, "quantization_config": config}, tensors, message)


@pytest.mark.parametrize(
    ("end", "value", "message"),
    [
        (".scales", np.nan, r"scales has the factor nan, expected finite numbers: the file is damaged"),
        (".g_idx", 5, r"a column of .*down_proj\.scales belongs to group 5, expected 0 to 4: the file is damaged"),
        (".g_idx", -1, r"belongs to group -1, expected 0 to 4"),
    ],
)
def test_damaged_numbers_are_errors(
    folders: tuple[Path, Path], tmp_path: Path, end: str, value: float, message: str
) -> None:
    tensors = load(folders[1])
    tensors[MODULE + end][1].flat[3] = value
    write(tmp_path, {**LLAMA, "quantization_config": GPTQ}, tensors)
    with pytest.raises(ExportError, match=message):
        export(tmp_path, tmp_path / "m.bin", probe_source=None)


def test_a_file_that_is_cut_is_an_error(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Where whole rows of words are read, and where runs of them are."""
    write(tmp_path, {**LLAMA, "quantization_config": GPTQ}, load(folders[1]))
    tensor = hf.read(tmp_path, []).tensors["layers.0.attn_q.weight"]
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:30000])
    for last in (96, 50):
        with pytest.raises(ExportError, match="was truncated while it was being read"):
            tensor.read(0, last)


def test_models_with_weights_by_inputs_are_refused(tmp_path: Path) -> None:
    """GPT-2's tensors are transposed, and GPTQ's are not."""
    floats = write_checkpoint(tmp_path / "shapes", GPT2 | {"quantization_config": GPTQ})
    with pytest.raises(UnsupportedError, match=r"the matrices of the family gpt2 are \(inputs, outputs\)"):
        hf.read(floats, [])


def test_rows_of_rope_pairs_are_read_once() -> None:
    """Each read of words unpacks columns of all rows, so rows of pairs that are neighbors are not read one by one."""
    stored = np.arange(3 * 40 * 5, dtype=np.float32).reshape(120, 5)
    spans: list[tuple[int, int]] = []

    def read(first: int, last: int) -> NDArray[np.float32]:
        spans.append((first, last))
        return stored[first:last]

    order = rotated_first(40, 16, 120, neighbors=True)
    tensor = LazyTensor(stored.shape, "f32", read).in_order(order)
    for first, last, expected in ((0, 120, [(0, 120)]), (0, 8, [(24, 39)]), (10, 50, [(0, 24), (29, 40), (64, 79)])):
        spans.clear()
        np.testing.assert_array_equal(tensor.read(first, last), stored[order[first:last]])
        assert spans == expected
