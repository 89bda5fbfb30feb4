"""Drafters from GGUF files: equality with those of Hugging Face directories, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from eagle3_models import CONFIG, head_tensors, write_head
from gguf_drafter_samples import assistant_of, head_of, write

import hf_reading
import llamac
from builders import checkpoint, llama_config, write_model
from golden import assistant
from golden.assistant import CLUSTERED, PLAIN, PROMPT, TRUNK
from golden.tiny_checkpoints import Config, Tensors, changed
from llamac.errors import ExportError, UnsupportedError
from llamac.export.checkpoint import Checkpoint
from llamac.export.convert import export
from llamac.export.gguf.model import read
from prophet import draft_with_models, results

LAYERS = "eagle_aux_hidden_state_layer_ids"
HEAD = changed(CONFIG, **{LAYERS: [2, 2, 1]})
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}


def check_equal(found: Checkpoint, expected: Checkpoint) -> None:
    assert found.config == expected.config
    assert found.tensors.keys() == expected.tensors.keys()
    for name in expected.tensors:
        ours, theirs = found.tensors[name].array(), expected.tensors[name].array()
        # a file divides RoPE's frequencies by float32 factors
        np.testing.assert_allclose(ours, theirs, rtol=2e-7 if name.startswith("rope.") else 0, err_msg=name)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (HEAD, "extract_layers"),
        (changed(HEAD, hidden_size=36, target_hidden_size=48, norm_before_residual=True), "target_layers"),
        (changed(HEAD, norm_before_fc=True, **{LAYERS: [0, 3, 5]}), "target_layers"),
        (changed(HEAD, draft_vocab_size=CONFIG["vocab_size"]), "target_layers"),
        (changed(HEAD, rope_scaling=LLAMA3), "target_layers"),
    ],
    ids=["early file", "other width", "normed input", "all tokens", "llama3"],
)
def test_a_head_equals_that_of_its_directory(config: Config, key: str, tmp_path: Path) -> None:
    tensors = head_tensors(config, embedding=config["hidden_size"] != 48)
    if config["draft_vocab_size"] == config["vocab_size"]:
        del tensors["d2t"], tensors["t2d"]
    expected = hf_reading.read(write_head(tmp_path / "head", config, tensors))
    keys, stored = head_of(config, tensors, config[LAYERS])
    keys[key] = keys.pop("target_layers")
    warnings: list[str] = []
    found = read(write(tmp_path / "head.gguf", "eagle3", keys, stored), warnings)
    check_equal(found, expected)
    assert found.metadata["architecture"] == expected.metadata["architecture"]
    assert warnings == []


def test_the_tokens_of_a_file_tell_the_size_of_its_vocabulary(tmp_path: Path) -> None:
    keys, stored = head_of(HEAD, head_tensors(HEAD), [2, 2, 1])
    del keys["vocab_size"]
    path = write(tmp_path / "head.gguf", "eagle3", keys, stored)
    with pytest.raises(ExportError, match=r"eagle3.vocab_size is None, expected the number of the model's tokens"):
        read(path, [])
    tokens = {"tokenizer.ggml.tokens": [f"{i}" for i in range(HEAD["vocab_size"])]}
    found = read(write(path, "eagle3", keys, stored, tokens), [])
    assert found.config == read(write(path, "eagle3", {**keys, "vocab_size": HEAD["vocab_size"]}, stored), []).config


@pytest.mark.parametrize("config", [PLAIN, CLUSTERED], ids=["plain", "clustered"])
def test_an_assistant_equals_that_of_its_directory(config: Config, tmp_path: Path) -> None:
    """llama.cpp computes the logits of all tokens, as with an assistant that has no clusters."""
    exact = changed(PLAIN["text_config"], rms_norm_eps=2**-16)  # in float32
    expected = hf_reading.read(assistant.write(tmp_path / "plain", changed(PLAIN, text_config=exact)))
    keys, stored = assistant_of(changed(config, text_config=exact), assistant.tensors(config))
    found = read(write(tmp_path / "a.gguf", "gemma4-assistant", keys, stored), [])
    check_equal(found, expected)


@pytest.mark.parametrize("kind", ["head", "assistant"])
def test_a_file_drafts_as_a_directory_does(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft_with_models(monkeypatch, 3)
    if kind == "head":
        model = write_model(tmp_path / "model.bin", checkpoint(llama_config(n_layers=4)))
        tensors = head_tensors(HEAD)
        folder = write_head(tmp_path / "folder", HEAD, tensors)
        path = write(tmp_path / "head.gguf", "eagle3", *head_of(HEAD, tensors, [2, 2, 1]))
    else:
        model = tmp_path / "model.bin"
        export(assistant.write(tmp_path / "trunk", TRUNK), model, probe_source=None)
        folder = assistant.write(tmp_path / "folder", PLAIN)
        path = write(tmp_path / "a.gguf", "gemma4-assistant", *assistant_of(PLAIN, assistant.tensors(PLAIN)))
    texts = []
    for draft in (folder, path):
        with llamac.load(model, draft_model=draft, kv_dtype="f32", cache_dir=False) as opened:
            found = opened.generate(PROMPT, max_tokens=12, temperature=0, seed=1)
            plain = opened.generate(PROMPT, max_tokens=12, temperature=0, seed=1, speculation=False)
            assert results(found) == results(plain)
            texts.append((found.tokens, found.usage.drafted_tokens, found.usage.accepted_tokens))
    assert texts[0] == texts[1]
    assert texts[0][1] > 0


Change = Callable[[dict[str, Any], Tensors], None]


def with_key(name: str, value: object) -> Change:
    return lambda keys, tensors: keys.update({name: value})


def with_tensor(name: str, change: Callable[[Any], Any]) -> Change:
    return lambda keys, tensors: tensors.update({name: change(tensors[name])})


def without(name: str) -> Change:
    return lambda keys, tensors: tensors.__delitem__(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_key("block_count", 2), "eagle3.block_count is 2, expected 1"),
        (with_key("target_layers", [2, 3]), "eagle3.target_layers is [2, 3], expected the numbers of 3 layers"),
        (with_key("target_layers", None), "eagle3.target_layers is None, expected the numbers of 3 layers"),
        (with_key("target_layers", [2, 3, 1 << 20]), "expected the numbers of 3 layers"),
        (with_key("target_hidden_size", None), "eagle3.target_hidden_size is missing"),
        (with_key("norm_before_fc", 2), "eagle3.norm_before_fc is 2, expected true or false"),
        (with_key("norm_before_fc", True), "missing: enc.output_norm.weight (144,)"),
        (with_key("norm_output", True), "eagle3.norm_output is True: llamac does not know this key"),
        (with_key("vocab_size", "many"), "eagle3.vocab_size is 'many', expected the number of the model's tokens"),
        (with_tensor("d2t", lambda ids: ids[::-1]), "d2t: the 97 ids that it encodes do not ascend"),
        (with_tensor("d2t", lambda ids: ids + 300), "d2t: the 97 ids that it encodes do not ascend"),
        (with_tensor("d2t", lambda ids: ids.astype(np.float32)), "d2t is F32 (97,), expected a vector of I64"),
        (with_tensor("d2t", lambda ids: ids[:-1]), "misshaped: output.weight is (97, 48)"),
        (with_tensor("fc.weight", lambda matrix: matrix[:, 1:]), "misshaped: fc.weight is (48, 143)"),
        (with_tensor("output_norm.weight", lambda norm: norm.astype(np.int64)), "its type is I64, which cannot be"),
        (without("output.weight"), "missing: output.weight (97, 48)"),
        (without("blk.0.attn_norm_2.weight"), "missing: blk.0.attn_norm_2.weight (48,)"),
    ],
)
def test_heads_that_are_not_computed_are_refused_by_name(change: Change, message: str, tmp_path: Path) -> None:
    keys, tensors = head_of(HEAD, head_tensors(HEAD), [2, 2, 1])
    change(keys, tensors)
    path = write(tmp_path / "head.gguf", "eagle3", keys, tensors)
    with pytest.raises(ExportError) as caught:
        read(path, [])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_key("attention.shared_kv_layers", 1), "attention.shared_kv_layers is 1, expected block_count (3)"),
        (with_key("embedding_length_out", None), "gemma4-assistant.embedding_length_out is missing"),
        (with_key("embedding_length_per_layer_input", 8), "the assistant has layer embeddings or experts"),
        (without("nextn.post_projection.weight"), "missing: nextn.post_projection.weight (24, 20)"),
        (without("token_embd.weight"), "has no tensor token_embd.weight"),
        (lambda keys, tensors: tensors.update(d2t=np.arange(3)), "unknown: d2t (3,)"),
    ],
)
def test_assistants_that_are_not_computed_are_refused_by_name(change: Change, message: str, tmp_path: Path) -> None:
    keys, tensors = assistant_of(PLAIN, assistant.tensors(PLAIN))
    change(keys, tensors)
    path = write(tmp_path / "a.gguf", "gemma4-assistant", keys, tensors)
    with pytest.raises((ExportError, UnsupportedError)) as caught:
        read(path, [])
    assert message in str(caught.value)
