"""Exports of flat files that another program wrote: missing fields have defaults, wrong ones are named in errors."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_samples import PREFIX, small_adapter
from vocab_samples import tokenizer_json

from builders import checkpoint, gpt2_config, llama_config, write_model
from fuzz.mutate import mutated_json
from llamac.errors import LlamacError, TokenizerError, UnsupportedError
from llamac.export.checkpoint import Checkpoint
from llamac.export.convert import export
from llamac.export.flat.model import read
from llamac.models import path as built_in
from llamac.text.vocabulary.load import load_vocabulary

TARGETS = {"gguf": "out.gguf", "hf": "out", "llama2c": "out.bin", "llamac": "out.bin"}
SMALL = llama_config(dim=16, n_layers=1, n_heads=2, n_kv_heads=2, ffn=20, context=64)
Json = dict[str, Any]


def with_tokenizer(document: Json, folder: Path) -> Path:
    """A flat file with this tokenizer.json, unchecked."""
    made = checkpoint(SMALL)
    assert made.tokenizer is not None
    tokenizer = (json.dumps(document).encode(), made.tokenizer[1], None)
    return write_model(folder / "model.bin", replace(made, tokenizer=tokenizer))


def document_of(made: Checkpoint) -> Json:
    assert made.tokenizer is not None
    document: Json = json.loads(made.tokenizer[0])
    return document


def byte_level_document(folder: Path) -> Json:
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    document: Json = json.loads(load_vocabulary(folder / "tokenizer.json").json)
    return document


def export_all(source: Path, folder: Path) -> list[str]:
    """Export a file to every format, and return the formats that accept it."""
    done = []
    for to, name in TARGETS.items():
        with contextlib.suppress(LlamacError):
            export(source, folder / name, to=to, probe_source=None if to == "llamac" else "auto")
            done.append(to)
        shutil.rmtree(folder / name, ignore_errors=True)
        for path in (folder / name, folder / "tokenizer.bin"):
            path.unlink(missing_ok=True)
    return done


def test_absent_fields_of_a_tokenizer_have_their_defaults(tmp_path: Path) -> None:
    made = read(built_in("stories-gpt2"))
    document = document_of(made)
    for name in ("ignore_merges", "byte_fallback", "unk_token"):
        assert not document["model"].pop(name)
    del document["normalizer"]
    document["model"]["merges"] = [" ".join(pair) for pair in document["model"]["merges"]]
    assert made.tokenizer is not None
    data = json.dumps(document).encode()
    source = write_model(tmp_path / "m.bin", replace(made, tokenizer=(data, *made.tokenizer[1:])), architecture="gpt2")
    export(source, tmp_path / "m.gguf", to="gguf")
    again, expected = load_vocabulary(tmp_path / "m.gguf"), document_of(made)
    assert json.loads(again.json)["model"]["merges"] == expected["model"]["merges"]
    assert json.loads(again.json)["model"]["ignore_merges"] is False


def set_merges(document: Json) -> None:
    document["model"]["merges"][0] = ["a"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda document: document["model"].update(ignore_merges=0), "model.ignore_merges is 0, expected true or"),
        (lambda document: document["model"].pop("merges"), "model.merges is missing, expected an array"),
        (set_merges, r"model.merges\[0\] is \['a'\], expected two strings"),
        (lambda document: document.update(added_tokens={}), "added_tokens is {}, expected an array"),
        (lambda document: document.update(decoder=[1]), r"decoder is \[1\], expected an object or null"),
        (lambda document: document.pop("model"), "model is missing, expected an object"),
        (lambda document: document.update({"\ud800": 1}), "contains a lone surrogate"),
    ],
)
@pytest.mark.parametrize("to", ["gguf", "hf", "llama2c"])
def test_errors_name_file_field_and_expected_value(
    tmp_path: Path, change: Callable[[Json], Any], problem: str, to: str
) -> None:
    document = byte_level_document(tmp_path)
    change(document)
    source = with_tokenizer(document, tmp_path)
    with pytest.raises(TokenizerError, match=rf"model\.bin: its tokenizer\.json:? {problem}.*--no-tokenizer"):
        export(source, tmp_path / TARGETS[to], to=to)
    export(source, tmp_path / "without.gguf", to="gguf", tokenizer=False)


@pytest.mark.parametrize(
    ("architecture", "config", "problem"),
    [
        ("gpt2", llama_config(), "'gpt2', but its config has norm 'rms', expected 'layer'"),
        ("llama", gpt2_config(), "'llama', but its config has norm 'layer', expected 'rms'"),
        ("stablelm", gpt2_config(), "'stablelm', but its config has position 'learned', expected 'rope'"),
        ("llama", replace(gpt2_config(), norm="rms"), "'llama', but its config has position 'learned', expected"),
    ],
)
def test_gguf_refuses_an_architecture_that_contradicts_the_config(
    tmp_path: Path, architecture: str, config: Any, problem: str
) -> None:
    source = write_model(tmp_path / "m.bin", checkpoint(config), architecture=architecture)
    with pytest.raises(UnsupportedError, match=f"its architecture is {problem}"):
        export(source, tmp_path / "m.gguf", to="gguf")


def test_metadata_of_wrong_types_are_left_out(tmp_path: Path) -> None:
    entries: dict[str, Any] = {"special_tokens": {"pad_token": {"content": "<s>"}}, "x": "\ud800"}
    entries["chat_templates"] = {"\ud800": "x"}
    source = write_model(tmp_path / "m.bin", checkpoint(SMALL), **entries)
    assert export_all(source, tmp_path) == ["gguf", "hf", "llamac"]


def test_a_list_of_merged_adapters_of_a_wrong_type_is_left_out(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m.bin", checkpoint(SMALL), architecture="llama", adapters=5)
    name = f"{PREFIX}model.layers.0.self_attn.q_proj.lora"
    factors = {
        f"{name}_{factor}.weight": np.ones(shape, np.float32) for factor, shape in (("A", (2, 16)), ("B", (16, 2)))
    }
    adapter = small_adapter(tmp_path / "style", tensors=factors)
    export(source, tmp_path / "out.bin", lora=adapter, probe_source=None)
    assert read(tmp_path / "out.bin").metadata["adapters"] == [{"name": "style", "strength": 1.0}]


def test_bos_without_a_token_is_refused(tmp_path: Path) -> None:
    document = byte_level_document(tmp_path)
    document["model"]["vocab"] = {
        text: index + 1000 * (index == 1) for text, index in document["model"]["vocab"].items()
    }
    document["added_tokens"] = []
    document["model"]["merges"] = []
    made = checkpoint(replace(SMALL, vocab_size=1200))
    assert made.tokenizer is not None
    made.tokenizer = (json.dumps(document).encode(), made.tokenizer[1], None)
    source = write_model(tmp_path / "m.bin", made)
    with pytest.raises(UnsupportedError, match="BOS is the id 1, for which the tokenizer has no token"):
        export(source, tmp_path / "out", to="hf")


@pytest.mark.parametrize("kind", ["spm", "byte-level"])
def test_mutated_tokenizers_raise_only_llamac_errors(tmp_path: Path, kind: str) -> None:
    document = document_of(checkpoint(SMALL)) if kind == "spm" else byte_level_document(tmp_path)
    rng = random.Random(kind)
    done = 0
    for _ in range(60):
        changed = json.loads(json.dumps(document))
        large = {key: changed["model"].pop(key) for key in ("vocab", "merges")}  # mutations rarely hit them
        changed = mutated_json(changed, rng)
        if isinstance(changed, dict) and isinstance(changed.get("model"), dict):
            changed["model"].update(large)
        with contextlib.suppress(LlamacError):
            done += len(export_all(with_tokenizer(changed, tmp_path), tmp_path))
    assert done > 20


def test_mutated_metadata_raise_only_llamac_errors(tmp_path: Path) -> None:
    entries = {
        "special_tokens": {"bos_token": "<s>"},
        "chat_templates": {"tool_use": "b"},
        "generation": {"temperature": 1.0, "top_k": 3},
        "tokenizer": {"source": "x"},
        "config": {"model_type": "llama", "rope_theta": 10000.0, "hidden_act": "silu"},
    }
    rng = random.Random(1)
    done = 0
    for _ in range(40):
        changed = mutated_json(entries, rng)
        if isinstance(changed, dict):
            changed = {key: value for key, value in changed.items() if "\0" not in key}
            source = write_model(tmp_path / "model.bin", checkpoint(SMALL), **changed)
            done += len(export_all(source, tmp_path))
    assert done > 20
