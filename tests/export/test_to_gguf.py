"""Export to GGUF: read back by the importer and the `gguf` package, refused models, and llama.cpp's results."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from vocab_samples import SPM_PIECES, byte_level_gguf, gguf_file, sentencepiece_file, spm_gguf, write_json

import llamac
from builders import checkpoint, gpt2_config, llama_config
from golden.cases import CASES
from golden.llama_cpp import LlamaCpp
from golden.tiny_checkpoints import write_checkpoint
from llamac.errors import ArgumentError, ExportError, UnsupportedError
from llamac.export.checkpoint import Checkpoint, LazyTensor
from llamac.export.convert import export
from llamac.export.flat.model import read as read_flat
from llamac.export.gguf import model as gguf_model
from llamac.export.gguf.file import open_gguf
from llamac.export.gguf.write import write_gguf
from llamac.export.hf import model as hf
from llamac.models import path as built_in
from llamac.text.packed import document_of, is_packed
from llamac.text.tokenizer import Tokenizer
from llamac.text.vocabulary.load import load_vocabulary

PROMPTS = ("Once upon a time", "Lily and 3 friends went to the park.", "The dog", "One day, a boy")


def written(folder: Path, source: Checkpoint, dtype: str = "f32") -> Checkpoint:
    """Write a checkpoint and read it again."""
    write_gguf(source, folder / "m.gguf", dtype, [])
    return gguf_model.read(folder / "m.gguf", [])


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "llama-odd", "llama-tie_word_embeddings", "llama-llama3", "llama-linear", "llama-longrope"),
        *("gpt2", "gpt2-odd"),
    ],
)
def test_a_checkpoint_survives_the_round_trip(tmp_path: Path, name: str) -> None:
    source = hf.read(write_checkpoint(tmp_path / "hf", CASES[name].config), [])
    again = written(tmp_path, source)
    assert again.tensors.keys() == source.tensors.keys()
    for part, tensor in source.tensors.items():
        if part.startswith("rope."):
            np.testing.assert_allclose(again.tensors[part].array(), tensor.array(), rtol=2e-6)
        else:
            np.testing.assert_array_equal(again.tensors[part].array(), tensor.array(), part)
    assert again.metadata["architecture"] == source.metadata["architecture"]


def test_names_and_shapes_match_llama_cpp(tmp_path: Path) -> None:
    for config, present in (
        (llama_config(), {"blk.1.attn_output.weight", "output.weight", "blk.0.ffn_gate.weight"}),
        (gpt2_config(), {"blk.1.attn_qkv.weight", "blk.1.attn_qkv.bias", "position_embd.weight"}),
    ):
        source = checkpoint(config)
        source.metadata["architecture"] = "llama" if config.norm == "rms" else "gpt2"
        written(tmp_path, source)
        reader = gguf.GGUFReader(tmp_path / "m.gguf")
        names = {tensor.name: tuple(tensor.shape) for tensor in reader.tensors}
        assert present <= names.keys()
        assert names["token_embd.weight"] == (config.dim, config.vocab_size)
        assert reader.fields["general.architecture"].contents() == source.metadata["architecture"]
        assert all(tensor.data_offset % 32 == 0 for tensor in reader.tensors)


@pytest.mark.parametrize("dtype", ["f16", "bf16", "q8_0", "q4_0"])
def test_quantized_numbers_match_the_gguf_package(tmp_path: Path, dtype: str) -> None:
    config = llama_config(dim=64, n_heads=4, ffn=96)  # rows of 96 are whole blocks
    source = checkpoint(config)
    source.metadata["architecture"] = "llama"
    again = written(tmp_path, source, dtype)
    for name, tensor in source.tensors.items():
        exact, found = tensor.array(), again.tensors[name].array()
        if len(exact.shape) == 1:
            np.testing.assert_allclose(found, exact, rtol=2e-6)
            continue
        kind = gguf.GGMLQuantizationType["Q8_0" if (dtype, name) == ("q4_0", "output.weight") else dtype.upper()]
        expected = gguf.quants.dequantize(gguf.quants.quantize(exact, kind), kind)
        assert again.tensors[name].dtype == kind.name.lower()
        np.testing.assert_array_equal(found, expected, name)


def test_rows_of_partial_blocks_are_stored_as_f16(tmp_path: Path) -> None:
    source = checkpoint(llama_config(dim=64, n_heads=4, ffn=76))
    source.metadata["architecture"] = "llama"
    again = written(tmp_path, source, "q4_0")
    assert again.tensors["layers.0.ffn_down.weight"].dtype == "f16"
    assert again.tensors["layers.0.ffn_up.weight"].dtype == "q4_0"


def test_models_that_gguf_cannot_express_are_refused_by_name(tmp_path: Path) -> None:
    source = checkpoint(llama_config())
    source.metadata["architecture"] = "llama"
    source.config = replace(source.config, activation="relu")
    source.tensors["layers.1.attn_q.bias"] = LazyTensor.of(np.ones(48, np.float32))
    with pytest.raises(UnsupportedError, match="activation is relu, GGUF can only express silu"):
        written(tmp_path, source)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UnsupportedError, match="dtype is 'q9', expected auto, f32, f16, bf16, q8_0, q4_0 for a GGUF"):
        written(tmp_path, source, "q9")
    source.metadata["architecture"] = "of-tomorrow"
    with pytest.raises(UnsupportedError, match=r"cannot be written as GGUF, only llama, mistral, .*ministral3"):
        written(tmp_path, source)


def test_numbers_too_large_for_a_blocks_scale_are_refused(tmp_path: Path) -> None:
    source = checkpoint(llama_config(dim=64, n_heads=4, ffn=96))
    source.metadata["architecture"] = "llama"
    source.tensors["layers.0.ffn_up.weight"] = LazyTensor.of(np.full((96, 64), 1e6, np.float32))
    with pytest.raises(ExportError, match=r"layers\.0\.ffn_up\.weight contains 1e\+06, which is out of range for Q4_0"):
        written(tmp_path, source, "q4_0")
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_exports_to_gguf(tmp_path: Path, llamac_command: Callable[..., Any]) -> None:
    out = tmp_path / "m.gguf"
    result = llamac_command("export", "stories", out, "--to", "gguf", "--dtype", "q8_0", "--name", "mine")
    assert (result.code, result.err) == (0, "")
    assert f"{out}: 3.0 MB, q8_0, tokenizer stories" in result.out
    reader = gguf.GGUFReader(out)
    assert reader.fields["general.name"].contents() == "mine"
    assert {tensor.tensor_type.name for tensor in reader.tensors} == {"F32", "Q8_0"}
    back = llamac_command("export", out, tmp_path / "m.bin", "--dtype", "q8")
    assert back.code == 0
    assert "tokenizer m.gguf" in back.out
    with llamac.load(tmp_path / "m.bin") as again, llamac.load("stories") as model:
        assert again.name == "mine"
        assert again.special == model.special
        assert again.tokenize("Once upon  a time, Zoë") == model.tokenize("Once upon  a time, Zoë")


def test_arguments_of_other_targets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"dtype 'q8_0' is for to='gguf' only"):
        export("stories", tmp_path / "m.bin", dtype="q8_0")
    with pytest.raises(ArgumentError, match="'q4' is for flat files only: to='gguf' takes f32, f16, bf16, q8_0, q4_0"):
        export("stories", tmp_path / "m.gguf", to="gguf", dtype="q4")


# ---- tokenizers


def test_all_chat_templates_and_their_tokens_are_exported(tmp_path: Path) -> None:
    source = read_flat(built_in("stories"))
    assert source.tokenizer is not None
    unknown = json.loads(source.tokenizer[0])["model"]["unk_token"]
    source.chat_template = "{{ bos_token }}{{ messages }}{{ pad_token }}"
    source.metadata |= {"chat_templates": {"tool_use": "{{ tools }}"}, "special_tokens": {"pad_token": unknown}}
    write_gguf(source, tmp_path / "m.gguf", "f16", [])
    again = gguf_model.read(tmp_path / "m.gguf", [])
    assert again.chat_template == source.chat_template
    assert again.metadata["chat_templates"] == {"tool_use": "{{ tools }}"}
    assert again.metadata["special_tokens"]["pad_token"] == unknown


def test_names_of_the_models_own_tokens_do_not_replace_stop_tokens(tmp_path: Path) -> None:
    source = read_flat(built_in("stories"))
    assert source.tokenizer is not None
    data, special, spm = source.tokenizer
    assert special.eos_id is not None
    stop_ids = tuple(sorted((special.eos_id, 300, 301)))
    source.tokenizer = (data, replace(special, stop_ids=stop_ids), spm)
    texts = {index: text for text, index in json.loads(data)["model"]["vocab"].items()}
    own = {"eot_token": texts[302], "eom_token": texts[303], "image_token": texts[304], "pad_token": texts[305]}
    source.chat_template = "{{ pad_token }}{{ image_token }}"
    source.metadata |= {"special_tokens": own}
    warnings: list[str] = []
    write_gguf(source, tmp_path / "m.gguf", "f16", warnings)
    assert warnings == [
        "a GGUF file has no place for special tokens that the chat template names (image_token): it renders other"
        " prompts"
    ]
    values = open_gguf(tmp_path / "m.gguf").values
    named = {key: values.get(f"tokenizer.ggml.{key}_token_id") for key in ("eot", "eom", "image", "padding")}
    assert named == {"eot": 300, "eom": 301, "image": None, "padding": 305}
    assert load_vocabulary(tmp_path / "m.gguf").special.stop_ids == stop_ids


def test_names_of_chat_templates_are_in_order(tmp_path: Path) -> None:
    source = read_flat(built_in("stories"))
    source.metadata |= {"chat_templates": dict.fromkeys("hcaeg", "{{ tools }}")}
    write_gguf(source, tmp_path / "m.gguf", "f16", [])
    assert open_gguf(tmp_path / "m.gguf").values["tokenizer.chat_templates"] == list("acegh")


def test_templates_whose_names_become_the_same_are_named(tmp_path: Path) -> None:
    source = read_flat(built_in("stories"))
    source.metadata |= {"chat_templates": {"a b": "one", "a-b": "two"}}
    warnings: list[str] = []
    write_gguf(source, tmp_path / "m.gguf", "f16", warnings)
    assert warnings == [
        "a GGUF file has no place for chat templates with the names 'a b'",
        "a GGUF file has no place for the names 'a-b', and stores these chat templates under other names",
    ]


def test_what_a_file_does_not_hold_is_named(tmp_path: Path) -> None:
    source = read_flat(built_in("stories"))
    source.metadata |= {"chat_templates": {"tool use": "{{ tools }}"}, "response_template": {"fields": {}}}
    source.metadata |= {"generation": {"typical_p": 0.9, "top_p": 0.9}}
    warnings: list[str] = []
    write_gguf(source, tmp_path / "m.gguf", "f16", warnings)
    renamed = "the names 'tool use', and stores these chat templates under other names"
    lost = (renamed, "the format of answers (response_template)")
    assert warnings == [f"a GGUF file has no place for {part}" for part in (*lost, "the recommended typical_p")]


@pytest.mark.parametrize("entries", [spm_gguf(), spm_gguf(add_space_prefix=False), *map(byte_level_gguf, ("gpt-2",))])
def test_tokenizers_of_gguf_files_survive_the_round_trip(tmp_path: Path, entries: list[tuple[str, Any]]) -> None:
    (tmp_path / "v.gguf").write_bytes(gguf_file(entries))
    check_tokenizer(tmp_path, tmp_path / "v.gguf")


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "smollm", "tekken", "gpt-4o", "falcon", "deepseek-v3"])
def test_the_pre_tokenizers_name_survives_the_round_trip(tmp_path: Path, pre: str) -> None:
    (tmp_path / "v.gguf").write_bytes(gguf_file(byte_level_gguf(pre)))
    check_tokenizer(tmp_path, tmp_path / "v.gguf")


@pytest.mark.parametrize("name", ["ggml-vocab-llama-spm.gguf", "ggml-vocab-llama-bpe.gguf", "ggml-vocab-gpt-2.gguf"])
def test_real_tokenizers_survive_the_round_trip(tmp_path: Path, data_dir: Path, name: str) -> None:
    check_tokenizer(tmp_path, data_dir / "tokenizers" / name)


@pytest.mark.parametrize("name", ["of mine", "Phi-3 of mine"])
def test_space_absorbing_tokens_survive_only_with_the_right_model_name(
    tmp_path: Path, data_dir: Path, name: str
) -> None:
    """GGUF has no key for this property; llama.cpp derives it from the model's name."""
    vocabulary = load_vocabulary(data_dir / "tokenizers" / "ggml-vocab-phi-3.gguf")
    swallowing = [entry["content"] for entry in json.loads(vocabulary.json)["added_tokens"] if entry["rstrip"]]
    assert "<|user|>" in swallowing
    small = replace(llama_config(dim=16, n_heads=2, n_kv_heads=1, ffn=16), vocab_size=32064, n_token_ids=1)
    source = replace(checkpoint(small), tokenizer=vocabulary, metadata={"architecture": "llama", "name": name})
    warnings: list[str] = []
    write_gguf(source, tmp_path / "m.gguf", "f16", warnings)
    again = json.loads(load_vocabulary(tmp_path / "m.gguf").json)["added_tokens"]
    kept = [entry["content"] for entry in again if entry["rstrip"]]
    assert (kept, len(warnings)) == (([], 1) if name == "of mine" else (swallowing, 0))
    assert all("absorb surrounding spaces" in line for line in warnings)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_space_only_before_the_first_text_is_lost_with_a_warning(tmp_path: Path, legacy: bool) -> None:
    """GGUF has no key for it; llama.cpp puts a space before each text after a special token."""
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_file(SPM_PIECES))
    write_json(tmp_path, tokenizer_config={"legacy": legacy, "bos_token": "<s>", "eos_token": "</s>"})
    vocabulary = load_vocabulary(tmp_path)
    ours = Tokenizer.from_json(vocabulary.data, vocabulary.special)
    small = replace(llama_config(dim=16, n_heads=2, n_kv_heads=1, ffn=16), vocab_size=ours.n_ids, n_token_ids=1)
    source = replace(checkpoint(small), tokenizer=vocabulary, metadata={"architecture": "llama", "name": "tiny"})
    warnings: list[str] = []
    write_gguf(source, tmp_path / "m.gguf", "f16", warnings)
    again = load_vocabulary(tmp_path / "m.gguf")
    theirs = Tokenizer.from_json(again.data, again.special)
    one, other = (tokenizer.encode("ab</s>ab", parse_special=True) for tokenizer in (ours, theirs))
    assert (one == other, len(warnings)) == (legacy, 0 if legacy else 1)
    assert all("no key for a tokenizer that puts a space only before the first text" in line for line in warnings)


def document(data: bytes) -> dict[str, Any]:
    """A tokenizer.json as objects. For a packed one, writing and parsing its text would take seconds."""
    found: dict[str, Any] = document_of(data) if is_packed(data) else json.loads(data)
    return found


def check_tokenizer(folder: Path, path: Path) -> None:
    vocabulary = load_vocabulary(path)
    ours = document(vocabulary.data)
    size = len(ours["model"]["vocab"]) + 40  # more rows than tokens
    source = checkpoint(replace(llama_config(dim=16, n_heads=2, n_kv_heads=1, ffn=16), vocab_size=size, n_token_ids=1))
    source = replace(source, tokenizer=vocabulary, metadata={"architecture": "llama", "name": "tiny"})
    warnings: list[str] = []
    write_gguf(source, folder / "m.gguf", "f16", warnings)
    assert warnings == []
    again = load_vocabulary(folder / "m.gguf")
    theirs = document(again.data)
    assert again.special == vocabulary.special
    assert set(map(tuple, ours["model"]["merges"])) == set(map(tuple, theirs["model"]["merges"]))
    assert ours["model"]["vocab"].items() <= theirs["model"]["vocab"].items()
    assert ours["added_tokens"] == theirs["added_tokens"]


def test_a_tokenizer_unknown_to_gguf_is_refused(tmp_path: Path) -> None:
    source = read_flat(built_in("stories-gpt2"))
    assert source.tokenizer is not None
    data, special, _ = source.tokenizer
    document = json.loads(data) | {"pre_tokenizer": {"type": "Whitespace"}}
    source.tokenizer = (json.dumps(document).encode(), special, None)
    with pytest.raises(UnsupportedError, match="GGUF has no name for its pre-tokenizer"):
        write_gguf(source, tmp_path / "m.gguf", "f16", [])
    source.tokenizer = None
    write_gguf(source, tmp_path / "m.gguf", "f16", [])
    assert gguf_model.has_tokenizer(open_gguf(tmp_path / "m.gguf").values) is False


# ---- llama.cpp


@pytest.mark.parametrize("dtype", ["f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("name", ["stories", "stories-gpt2"])
def test_llama_cpp_generates_the_same_tokens(tmp_path: Path, llama_cpp: LlamaCpp, name: str, dtype: str) -> None:
    """llama.cpp rounds the inputs of quantized products to 8 bits, so its token need only be close to our best."""
    path = tmp_path / "m.gguf"
    export(name, path, to="gguf", dtype=dtype)
    export(path, tmp_path / "m.bin", dtype="f32", probe_source=None)
    with llamac.load(tmp_path / "m.bin", kv_dtype="f32") as model:
        for prompt in PROMPTS:
            ids = llama_cpp.tokenize(path, prompt)
            assert ids == model.tokenize(prompt, add_special=True)
            taken = llama_cpp.continue_greedily(path, ids, 60)
            if dtype == "f16":
                assert taken == model.generate(prompt, max_tokens=60, temperature=0).tokens
            rows = model.logits(ids + taken)[len(ids) - 1 : -1]
            gap = rows.max(axis=1) - rows[np.arange(len(taken)), taken]
            assert gap.max() <= (0 if dtype == "f16" else 0.1)
