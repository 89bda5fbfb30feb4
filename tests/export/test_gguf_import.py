"""Imported GGUF files against the import of the Hugging Face checkpoint that they were converted from."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_samples import Type, metadata, spm_keys, write_gguf, write_tensors
from numpy.typing import NDArray

import llamac
from documents import table_after, text_of
from golden.cases import CASES, MIN_EFFECT, TOLERANCE
from golden.make import relative_errors
from golden.tiny_checkpoints import Config, changed, tensors, write_checkpoint
from llamac.errors import ExportError, UnsupportedError
from llamac.export.checkpoint import Checkpoint
from llamac.export.convert import export
from llamac.export.gguf import model as gguf_model
from llamac.export.gguf.drafters import DRAFTERS
from llamac.export.gguf.encoders import ENCODERS
from llamac.export.gguf.families import ARCHITECTURES
from llamac.export.gguf.file import open_gguf
from llamac.export.gguf.tensor_types import number_type
from llamac.export.hf import model as hf
from llamac.format.flatfile import FlatFile

Logits = NDArray[np.float32]
LLAMA, GPT2 = CASES["llama"].config, CASES["gpt2"].config
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}

# The cases that GGUF can express: it has no key for other activations, and supports only some kinds of RoPE.
EXPRESSIBLE = [
    *("llama", "llama-mha", "llama-mqa", "llama-wide-heads", "llama-more-heads", "llama-odd", "llama-no-biases"),
    *("llama-tie_word_embeddings", "llama-rms_norm_eps", "llama-rope_theta", "llama-linear"),
    *("llama-yarn-defaults", "llama-yarn-truncate"),
    *("llama-llama3", "llama-llama3-factor", "llama-llama3-low_freq_factor"),
    *("gpt2", "gpt2-odd", "gpt2-n_head", "gpt2-layer_norm_epsilon", "gpt2-tie_word_embeddings"),
]


def logits(path: Path, ids: list[int]) -> Logits:
    with llamac.load(path, kv_dtype="f32") as model:
        return model.logits(ids)


@pytest.fixture(scope="module")
def from_hf(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Logits]:
    """The logits of a case imported from Hugging Face's files, which test_parity compares with transformers."""
    root = tmp_path_factory.mktemp("hf")

    @functools.cache
    def found(name: str) -> Logits:
        folder = write_checkpoint(root / name, CASES[name].config)
        export(folder, root / f"{name}.bin", probe_source=None)
        return logits(root / f"{name}.bin", CASES[name].ids)

    return found


def from_gguf(folder: Path, config: Config, ids: list[int], **options: Any) -> Logits:
    write_gguf(folder / "m.gguf", config, tensors(config), **options)
    export(folder / "m.gguf", folder / "m.bin", probe_source=None, overwrite=True)
    return logits(folder / "m.bin", ids)


@pytest.mark.parametrize("name", EXPRESSIBLE)
def test_a_gguf_file_gives_the_logits_of_its_checkpoint(
    tmp_path: Path, from_hf: Callable[[str], Logits], name: str
) -> None:
    case = CASES[name]
    found = from_gguf(tmp_path, case.config, case.ids)
    assert relative_errors(found, from_hf(name)).max() <= TOLERANCE


def read(folder: Path, config: Config = LLAMA, **options: Any) -> Checkpoint:
    return gguf_model.read(write_gguf(folder / "m.gguf", config, tensors(config), **options), [])


def test_weights_equal_those_of_the_checkpoint(tmp_path: Path) -> None:
    for config in (LLAMA, GPT2):
        ours = read(tmp_path, config)
        theirs = hf.read(write_checkpoint(tmp_path / config["model_type"], config), [])
        assert ours.config == replace(theirs.config, norm_eps=float(np.float32(theirs.config.norm_eps)))
        assert ours.tensors.keys() == theirs.tensors.keys()
        for name, tensor in theirs.tensors.items():
            np.testing.assert_array_equal(ours.tensors[name].array(), tensor.array(), name)
            if len(tensor.shape) == 2:  # partial rows of heads and of fused tensors
                for first, last in ((0, 1), (3, 7), (tensor.shape[0] - 2, tensor.shape[0])):
                    rows = ours.tensors[name].read(first, last)
                    np.testing.assert_array_equal(rows, tensor.read(first, last), name)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.layer_norm_rms_epsilon", 0.5),
        ("rope.freq_base", 7.0),
        ("rope.dimension_count", 6),
        ("rope.scaling.factor", 3.0),  # without a type, scaling is linear
        ("rope.scale_linear", 3.0),
        ("rope.scaling.attn_factor", 1.5),
    ],
)
def test_every_key_changes_the_logits(
    tmp_path: Path, from_hf: Callable[[str], Logits], key: str, value: object
) -> None:
    found = from_gguf(tmp_path, LLAMA, CASES["llama"].ids, changes={key: value})
    assert relative_errors(found, from_hf("llama")).max() >= MIN_EFFECT


def test_absent_keys_have_the_defaults_of_llama_cpp(tmp_path: Path) -> None:
    plain = changed(LLAMA, head_dim=None, num_key_value_heads=None, rope_theta=None)
    some = ("attention.head_count_kv", "rope.freq_base", "rope.dimension_count", "vocab_size")
    made = read(tmp_path, plain, changes=dict.fromkeys(some))
    assert made.config == read(tmp_path, plain).config
    assert made.config.n_kv_heads == 4
    np.testing.assert_allclose(made.tensors["rope.0.inv_freq"].array()[1], 10000 ** (-2 / 10), rtol=1e-6)


@pytest.mark.parametrize("key", ["context_length", "embedding_length", "block_count", "attention.head_count"])
def test_missing_keys_are_named(tmp_path: Path, key: str) -> None:
    with pytest.raises(ExportError, match=rf"llama\.{key} is missing"):
        read(tmp_path, changes={key: None})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"attention.scale": 0.9}, r"llama\.attention\.scale is 0.*could change"),  # a key of other architectures
        ({**YARN, "rope.scaling.yarn_ext_factor": 0.0}, r"yarn_ext_factor is 0\.0, expected 1"),
        ({**YARN, "rope.scaling.yarn_log_multiplier": 1.0}, r"yarn_log_multiplier is 1\.0, expected 0"),
        ({"attention.of_tomorrow": 1}, r"llama\.attention\.of_tomorrow is 1.*could change what the model computes"),
        ({"expert_count": 8}, r"llama\.expert_used_count is None, expected at least 1 and at most expert_count \(8\)"),
        ({"expert_shared_count": 1}, r"llama\.expert_shared_count is 1, expected 0"),
        ({"expert_gating_func": 2}, r"llama\.expert_gating_func is 2, expected 0 or 1"),
        ({"attention.causal": False}, r"llama\.attention\.causal is False"),
        ({"attention.value_length": 12}, r"value_length is 12, expected the same as attention\.key_length \(10\)"),
        ({"attention.head_count_kv": 3}, r"head_count_kv is 3, expected a divisor"),
        ({"attention.head_count_kv": [2, 1]}, r"head_count_kv is \[2, 1\].*the same for all layers"),
        ({"feed_forward_length": [172, 3, 4]}, r"feed_forward_length is \[172, 3, 4\].*each of 2 layers"),
        ({"rope.dimension_count": 12}, r"dimension_count is 12, expected an even number, at most 10"),
        ({"rope.dimension_count": 5}, r"dimension_count is 5"),
        ({"rope.freq_base": "big"}, r"freq_base is 'big', expected a number"),
        ({"block_count": 5000}, r"block_count is 5000"),
        ({"block_count": 3}, r"missing: blk\.2\.attn_norm\.weight"),
        ({"block_count": 1}, r"unknown: blk\.1\.attn_k\.bias"),
        ({"embedding_length": 48}, r"misshaped: token_embd\.weight is \(301, 40\), the metadata require \(301, 48\)"),
        ({"feed_forward_length": 86}, r"misshaped: blk\.0\.ffn_gate\.weight"),
    ],
)
def test_wrong_values_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ExportError, match=problem):
        read(tmp_path, changes=changes)


def test_unknown_architectures_types_and_tensors_are_refused_by_name(tmp_path: Path) -> None:
    for more, problem in (
        ({"general.architecture": "of-tomorrow"}, "'of-tomorrow'; this version imports llama, mistral3, .*gpt2"),
        ({"general.type": "adapter"}, "its general.type is 'adapter'"),
    ):
        with pytest.raises(UnsupportedError, match=problem):
            read(tmp_path, more=more)
    with pytest.raises(UnsupportedError, match=r"rope.scaling.type is 'of-tomorrow'"):
        read(tmp_path, changes={"rope.scaling.type": "of-tomorrow"})
    with pytest.raises(ExportError, match=r"unknown: blk\.0\.attn_gate\.weight"):
        read(tmp_path, extra={"blk.0.attn_gate.weight": np.zeros((4, 40), np.float32)})
    with pytest.raises(ExportError, match=r"rope_freqs\.weight must have 5 positive elements"):
        read(tmp_path, extra={"rope_freqs.weight": np.zeros(5, np.float32)})


def test_harmless_keys_are_ignored(tmp_path: Path) -> None:
    more = {"general.file_type": 1, "quantize.imatrix.file": "x", "of.somebody": [1, 2], "llama.expert_count": 0}
    harmless = {"tensor_data_layout": "Meta AI original pth", "attention.clamp_kqv": 0.0}
    assert read(tmp_path, changes=harmless, more=more).config == read(tmp_path).config


def test_layers_can_have_different_ffn_widths(tmp_path: Path) -> None:
    extra: dict[str, Logits] = {
        "blk.1.ffn_gate.weight": np.ones((60, 40), np.float32),
        "blk.1.ffn_up.weight": np.ones((60, 40), np.float32),
        "blk.1.ffn_down.weight": np.ones((40, 60), np.float32),
        "blk.1.ffn_gate.bias": np.ones(60, np.float32),
        "blk.1.ffn_up.bias": np.ones(60, np.float32),
    }
    made = read(tmp_path, changes={"feed_forward_length": [172, 60]}, extra=extra)
    assert [layer.ffn_dim for layer in made.config.layers] == [172, 60]
    assert made.tensors["layers.1.ffn_down.weight"].shape == (40, 60)


def test_fused_tensors_are_split(tmp_path: Path) -> None:
    """Some converters store q, k and v in one tensor, and gate and up, as phi3's converter does."""
    plain = changed(LLAMA, attention_bias=None, mlp_bias=None)
    path = write_gguf(tmp_path / "m.gguf", plain, tensors(plain))
    parts = {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(path).tensors}
    for layer in range(2):
        prefix = f"blk.{layer}."
        for fused, names in (("attn_qkv", ("attn_q", "attn_k", "attn_v")), ("ffn_up", ("ffn_gate", "ffn_up"))):
            rows = [parts.pop(f"{prefix}{name}.weight") for name in names]
            parts[f"{prefix}{fused}.weight"] = np.concatenate(rows)
    arch, keys = metadata(plain)
    write_tensors(tmp_path / "fused.gguf", parts, keys={f"{arch}.{key}": value for key, value in keys.items()})
    ours, theirs = gguf_model.read(tmp_path / "fused.gguf", []), gguf_model.read(path, [])
    assert ours.config == theirs.config
    for name, tensor in theirs.tensors.items():
        np.testing.assert_array_equal(ours.tensors[name].array(), tensor.array(), name)


def test_an_output_matrix_that_repeats_the_embedding_is_tied(tmp_path: Path) -> None:
    tied = changed(LLAMA, tie_word_embeddings=True)
    extra = {"output.weight": tensors(tied)["model.embed_tokens.weight"]}
    made = read(tmp_path, tied, extra=extra)
    assert made.config.tied_output
    assert "output.weight" not in made.tensors


# ---- number types

WIDE = changed(LLAMA, hidden_size=256, intermediate_size=512, head_dim=64, vocab_size=288)


def readable() -> list[Any]:
    """The readable types: integer types and types refused by name are left out."""
    found = []
    for kind in gguf.GGMLQuantizationType:
        try:
            number_type(int(kind))
        except ExportError as error:
            assert kind.name in str(error)  # noqa: PT017  unreadable types are refused by name
        else:
            found.append(kind)
    return found


READABLE = readable()


def test_every_type_of_the_package_is_read() -> None:
    named = "F32 F16 BF16 F64 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S"
    named += " IQ3_XXS IQ3_S IQ4_NL IQ4_XS TQ1_0 TQ2_0 MXFP4"
    assert set(named.split()) <= {kind.name for kind in READABLE}


def expected_numbers(kind: Any, raw: NDArray[np.uint8], columns: int) -> Logits:
    if kind.name == "Q8_K":
        blocks = raw.reshape(-1, 292)
        scales = np.frombuffer(blocks[:, :4].tobytes(), "<f4")
        codes = np.frombuffer(blocks[:, 4:260].tobytes(), np.int8).reshape(-1, 256)
        return (scales[:, None] * codes.astype(np.float32)).reshape(-1, columns)
    numbers: Logits = gguf.quants.dequantize(raw, kind)
    return numbers


@pytest.mark.parametrize("kind", [kind for kind in READABLE if kind.name not in ("F32", "F64")], ids=lambda k: k.name)
def test_every_type_is_dequantized_exactly(tmp_path: Path, kind: Any) -> None:
    rows, columns = 288, 256
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.RandomState(int(kind)).randint(0, 256, (rows, columns // block * size)).astype(np.uint8)
    with np.errstate(all="ignore"):  # random bits include infinities and NaN
        expected = expected_numbers(kind, raw, columns)
    write_tensors(tmp_path / "m.gguf", {"one": np.zeros(3, np.float32), "two": raw}, {"two": kind})
    tensor = open_gguf(tmp_path / "m.gguf").tensors["two"].matrix()
    assert tensor.shape == (rows, columns)
    assert tensor.dtype == kind.name.lower()
    np.testing.assert_array_equal(tensor.array(), expected)
    np.testing.assert_array_equal(tensor.read(17, 50), expected[17:50])


def test_f64_is_rounded_once(tmp_path: Path) -> None:
    values = np.random.RandomState(0).randn(4, 8)
    write_tensors(tmp_path / "m.gguf", {"x": values})
    found = open_gguf(tmp_path / "m.gguf").tensors["x"].matrix()
    np.testing.assert_array_equal(found.array(), values.astype(np.float32))


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_0, Type.Q5_1, Type.F16, Type.BF16], ids=lambda k: k.name)
def test_a_quantized_file_gives_the_logits_of_its_dequantized_weights(tmp_path: Path, kind: Any) -> None:
    """The importer reorders rows of q and k block by block, so the converter alone does not decide this."""
    ids = list(range(20))
    quantized = write_gguf(tmp_path / "q.gguf", WIDE, tensors(WIDE), kind=kind)
    dequantized = {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        for tensor in gguf.GGUFReader(quantized).tensors
        if len(tensor.shape) == 2
    }
    write_gguf(tmp_path / "f.gguf", WIDE, tensors(WIDE), extra=dequantized)
    found = []
    for name in ("q", "f"):
        export(tmp_path / f"{name}.gguf", tmp_path / f"{name}.bin", dtype="f32", probe_source=None)
        found.append(logits(tmp_path / f"{name}.bin", ids))
    np.testing.assert_array_equal(found[0], found[1])


# ---- a whole file


def test_a_converted_file_has_name_tokenizer_and_template(tmp_path: Path) -> None:
    more = spm_keys() | {"general.name": "Tiny of mine", "tokenizer.chat_template": "{{ messages }}"}
    path = write_gguf(tmp_path / "m.gguf", WIDE, tensors(WIDE), more=more)
    report = export(path, tmp_path / "m.bin")
    assert report.source == {"format": "gguf", "architecture": "llama", "files": ["m.gguf"]}
    assert report.tokenizer == "m.gguf"
    assert report.warnings == []
    file = FlatFile(tmp_path / "m.bin")
    assert file.text("template") == "{{ messages }}"
    with llamac.load(tmp_path / "m.bin") as model:
        assert model.name == "Tiny of mine"
        assert model.tokenize("ab") == [1, 261]
        assert model.special.eos_id == 2
        assert model.special.stop_ids == (2,)
        assert model.n_token_ids == 266


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (Type.F16, "f16"),
        (Type.BF16, "bf16"),
        (Type.F32, "f32"),
        (Type.Q8_0, "q8_0"),
        (Type.Q5_0, "q5_0"),
        (Type.Q4_1, "q4_1"),
        (Type.Q4_0, "q4_0"),
    ],
    ids=str,
)
def test_by_default_matrices_keep_their_type(tmp_path: Path, kind: Any, dtype: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", WIDE, tensors(WIDE), kind=kind)
    report = export(path, tmp_path / "m.bin", probe_source=None)
    file = FlatFile(tmp_path / "m.bin")
    assert report.dtype == dtype
    assert {tensor.dtype for tensor in file.tensors if len(tensor.shape) == 2} == {dtype}
    assert not [line for line in report.warnings if "tokenizer" not in line]


def test_each_tensors_type_decides_in_mixed_files(tmp_path: Path) -> None:
    values = tensors(WIDE)
    mixed = {
        name: gguf.quants.quantize(values, kind)
        for name, kind, values in (
            ("blk.0.ffn_down.weight", Type.Q8_0, values["model.layers.0.mlp.down_proj.weight"]),
            ("blk.1.ffn_down.weight", Type.F16, values["model.layers.1.mlp.down_proj.weight"]),
        )
    }
    base = write_gguf(tmp_path / "m.gguf", WIDE, values, kind=Type.Q4_0)
    raw = {tensor.name: (np.array(tensor.data), tensor.tensor_type) for tensor in gguf.GGUFReader(base).tensors}
    raw |= {"blk.0.ffn_down.weight": (mixed["blk.0.ffn_down.weight"], Type.Q8_0)}
    raw |= {"blk.1.ffn_down.weight": (mixed["blk.1.ffn_down.weight"], Type.F16)}
    arch, keys = metadata(WIDE)
    write_tensors(
        tmp_path / "mixed.gguf",
        {name: data for name, (data, _) in raw.items()},
        {name: kind for name, (_, kind) in raw.items() if kind not in (Type.F32, Type.F16)},
        keys={f"{arch}.{key}": value for key, value in keys.items()},
    )
    export(tmp_path / "mixed.gguf", tmp_path / "m.bin", probe_source=None)
    found = {tensor.name: tensor.dtype for tensor in FlatFile(tmp_path / "m.bin").tensors}
    assert found["layers.0.ffn_down.weight"] == "q8_0"
    assert found["layers.1.ffn_down.weight"] == "f16"
    assert found["layers.0.ffn_up.weight"] == "q4_0"
    export(tmp_path / "mixed.gguf", tmp_path / "m.bin", dtype="q8", probe_source=None, overwrite=True)
    assert {tensor.dtype for tensor in FlatFile(tmp_path / "m.bin").tensors} == {"f32", "q8"}


def test_the_page_lists_the_architectures() -> None:
    rows = table_after(text_of("gguf.md"), "From a model with images, llamac imports only the language model.")
    listed = [name for row in rows for name in re.findall(r"`([^`]+)`", row[1])]
    assert sorted(listed) == sorted([*ARCHITECTURES, *ENCODERS, *DRAFTERS])


@pytest.mark.parametrize("dtype", ["q8", "q6", "q4", "q4s"])
def test_quantizing_a_second_time_warns(tmp_path: Path, dtype: str) -> None:
    """The warning has the figure of the documentation."""
    imports = table_after(text_of("gguf.md"), "from the blocks dequantized to f32:")
    (perplexity,) = (row[3] for row in imports if row[0] == dtype)
    cost = float(perplexity.partition("(+")[2].rstrip("%)"))
    source = write_gguf(tmp_path / "m.gguf", WIDE, tensors(WIDE), kind=Type.Q4_1, more=spm_keys())
    flat = tmp_path / "exact.bin"
    assert export(source, flat).warnings == []
    for first in (source, flat):
        (text,) = export(first, tmp_path / "again.bin", dtype=dtype, overwrite=True).warnings
        assert text.startswith(
            f"the source's weights are quantized already (q4_1), and {dtype} quantizes them a second"
        )
        assert f"by {round(cost) or cost}% (docs/gguf.md)" in text
        assert "Without --dtype most types keep every number" in text
    assert export(source, tmp_path / "wide.bin", dtype="f32").warnings == []
