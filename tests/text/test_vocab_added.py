"""Tokens added by files next to a tokenizer: the same ids, texts and flags as in transformers, or an error by name."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vocab_samples import SPM_PIECES, sentencepiece_file, tokenizer_json, write_json

import llamac
from builders import checkpoint, llama_config, write_model
from llamac.errors import TokenizerError
from llamac.export.convert import export
from llamac.text.decoding import byte_alphabet
from llamac.text.tokenizer import Tokenizer

PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
FLAGS = tuple(PLAIN)
NEW = ("<x>", "<y>", "new word", "zz")


def spm_folder(folder: Path) -> Path:
    """A directory with a tokenizer.model of 266 pieces."""
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.model").write_bytes(sentencepiece_file(SPM_PIECES))
    return folder


def json_folder(folder: Path) -> Path:
    """A directory with a tokenizer.json of 259 ids."""
    folder.mkdir(exist_ok=True)
    return write_json(folder, tokenizer=tokenizer_json(truncation=None))


def gpt2_folder(folder: Path) -> Path:
    """A directory with vocab.json and merges.txt, of 259 ids."""
    folder.mkdir(exist_ok=True)
    vocab = {char: index for index, char in enumerate(byte_alphabet())}
    (folder / "merges.txt").write_text("#version: 0.2\nh e\n")
    return write_json(folder, vocab=vocab | {"he": 256, "<|endoftext|>": 257, "<s>": 258})


KINDS = {"json": (json_folder, 259), "spm": (spm_folder, 266), "gpt2": (gpt2_folder, 259)}


def listed(start: int, **changes: Any) -> dict[str, Any]:
    """An added_tokens_decoder with two special chat tokens, starting at the id `start`."""
    tokens = ("<|im_start|>", "<|im_end|>")
    return {str(start + i): {"content": text, **PLAIN, "special": True, **changes} for i, text in enumerate(tokens)}


@pytest.mark.parametrize("kind", KINDS)
def test_added_tokens_of_the_config_are_read(kind: str, tmp_path: Path) -> None:
    make, size = KINDS[kind]
    config = {"added_tokens_decoder": listed(size), "eos_token": "<|im_end|>"}
    tokenizer = Tokenizer.from_file(write_json(make(tmp_path), tokenizer_config=config))
    assert tokenizer.n_ids == size + 2
    ids = tokenizer.encode("a<|im_end|><|im_start|>", parse_special=True)
    assert ids[1:] == [size + 1, size]
    assert tokenizer.special.eos_id == size + 1
    assert tokenizer.special.stop_ids == (size + 1,)
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.decode(ids, skip_special=False) == "a<|im_end|><|im_start|>"


@pytest.mark.parametrize("kind", KINDS)
def test_added_tokens_of_older_files_are_read(kind: str, tmp_path: Path) -> None:
    make, size = KINDS[kind]
    folder = write_json(
        make(tmp_path),
        added_tokens={"<|im_end|>": size + 1, "<|im_start|>": size, "word": size + 2},
        special_tokens_map={"eos_token": "<|im_end|>"},
        tokenizer_config={"eos_token": "</s>", "additional_special_tokens": ["<|im_start|>"]},
    )
    tokenizer = Tokenizer.from_file(folder)
    ids = tokenizer.encode("<|im_start|>word<|im_end|>", parse_special=True)
    assert ids == [size, size + 2, size + 1]
    assert tokenizer.special.eos_id == size + 1
    assert tokenizer.decode(ids) == "word"


def test_only_legacy_tokenizers_add_a_space_after_an_added_token(tmp_path: Path) -> None:
    folder = spm_folder(tmp_path)
    for legacy, after in ((False, 260), (True, 261)):
        config = {"added_tokens_decoder": listed(266), "legacy": legacy}
        tokenizer = Tokenizer.from_file(write_json(folder, tokenizer_config=config))
        assert tokenizer.encode("ab<|im_end|>ab<|im_start|>", parse_special=True) == [261, 267, after, 266]
        assert tokenizer.encode("<|im_end|>ab", parse_special=True) == [267, after]
        assert tokenizer.encode(" ab") == [262, 261]  # as in SentencePiece, a space is added before the text's own
        assert tokenizer.encode("a b") == Tokenizer.from_file(spm_folder(tmp_path / "plain")).encode("a b")
    without = Tokenizer.from_file(write_json(folder, tokenizer_config={"add_prefix_space": False}))
    assert without.encode("ab") == [260]


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"added_tokens": {"<x>": 300}}, "'<x>' is listed with the id 300, but .* gives it the id 259"),
        ({"added_tokens": {"<x>": 258}}, "'<x>' is listed with the id 258, which is 'he'"),
        ({"added_tokens": {"he": 259}}, "'he' is listed with the id 259, but .* gives it the id 258"),
        ({"added_tokens": {"<x>": "259"}}, r"added_tokens\.json: the token '<x>' has the id '259'"),
        (
            {"tokenizer_config": {"added_tokens_decoder": {"x": {"content": "<x>"}}}},
            "added_tokens_decoder: x: expected",
        ),
        ({"tokenizer_config": {"added_tokens_decoder": {"259": {}}}}, "259 has no string"),
        ({"tokenizer_config": {"added_tokens_decoder": {"259": "<x>"}}}, "259 is '<x>', expected an object"),
        ({"tokenizer_config": {"added_tokens_decoder": [1]}}, r"added_tokens_decoder is \[1\], expected an object"),
        ({"tokenizer_config": {"added_tokens_decoder": listed(259, lstrip=1)}}, "lstrip is 1, expected true or false"),
        ({"tokenizer_config": {"eos_token": 5}}, "eos_token is 5, expected a token.s string"),
        ({"tokenizer_config": {"additional_special_tokens": "<x>"}}, "'<x>', expected a list"),
        (
            {"special_tokens_map": {"additional_special_tokens": [7]}},
            "additional_special_tokens is 7, expected a token.s string",
        ),
    ],
)
def test_malformed_files_are_refused_by_name(files: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=problem):
        Tokenizer.from_file(write_json(json_folder(tmp_path), **files))


def test_ids_that_the_library_would_not_assign_are_refused(tmp_path: Path) -> None:
    document = tokenizer_json()
    document["added_tokens"].append({"id": 300, "content": "<x>", **PLAIN})
    with pytest.raises(TokenizerError, match=r"'<x>' is listed with the id 300, but the library .* the id 259"):
        Tokenizer.from_file(write_json(tmp_path, tokenizer=document))


def model_of(size: int, path: Path) -> Path:
    """A flat file with `size` ids and no tokenizer."""
    made = checkpoint(replace(llama_config(), vocab_size=size))
    return write_model(path, replace(made, config=replace(made.config, n_token_ids=size), tokenizer=None))


def test_added_tokens_are_exported(tmp_path: Path) -> None:
    for kind, (make, size) in KINDS.items():
        folder = make(tmp_path / kind)
        config = {"added_tokens_decoder": listed(size), "eos_token": "<|im_end|>"}
        write_json(folder, tokenizer_config=config, added_tokens={"<|im_start|>": size, "<|im_end|>": size + 1})
        out = tmp_path / f"{kind}.bin"
        model = model_of(size + 2, tmp_path / f"{kind}-plain.bin")
        report = export(model, out, tokenizer=folder, probe_source=None)
        assert report.warnings == []
        with llamac.load(out) as loaded:
            assert loaded.tokenize("a<|im_end|>")[-1] == size + 1 == loaded.special.eos_id
            assert loaded.n_token_ids == size + 2
        with llamac.load(out, tokenizer=folder) as loaded:
            assert loaded.tokenize("a<|im_end|>")[-1] == size + 1


def test_a_named_token_without_an_id_is_left_out_of_a_model_without_room(tmp_path: Path) -> None:
    folder = write_json(spm_folder(tmp_path / "t"), tokenizer_config={"pad_token": "<pad>", "eos_token": "</s>"})
    assert Tokenizer.from_file(folder).encode("<pad>", parse_special=True) == [266]  # as in transformers
    model = model_of(266, tmp_path / "plain.bin")
    report = export(model, tmp_path / "out.bin", tokenizer=folder, probe_source=None)
    assert len(report.warnings) == 1
    assert "'<pad>'" in report.warnings[0]
    assert "left out" in report.warnings[0]
    with llamac.load(tmp_path / "out.bin") as loaded:
        assert loaded.n_token_ids == 266


@pytest.mark.parametrize("kind", KINDS)
def test_random_files_match_transformers(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    if kind == "spm":
        pytest.importorskip("google.protobuf", reason="transformers reads a tokenizer.model with protobuf")
    transformers.logging.set_verbosity_error()
    names = {"json": "PreTrainedTokenizerFast", "spm": "LlamaTokenizer", "gpt2": "GPT2Tokenizer"}
    rng = random.Random(f"added to {kind}")
    make, size = KINDS[kind]
    compared = 0
    for number in range(60):
        folder = make(tmp_path / str(number))
        write_json(folder, **random_files(rng, kind, size))
        theirs = getattr(transformers, names[kind]).from_pretrained(folder)
        try:
            ours = Tokenizer.from_file(folder)
        except TokenizerError:  # transformers gives a token another id than the files
            assert set(theirs.get_added_vocab().items()) != set(json.loads((folder / "ids.json").read_text()).items())
            continue
        compared += 1
        assert ours.n_ids == len(theirs), folder
        for _ in range(20):
            parts = [*NEW, "<new>", " ", "  ", "a", "b", "c", "ab", "New Word", "\n", "he", "</s>"]
            text = "a" + "".join(rng.choice(parts) for _ in range(rng.randint(1, 6)))
            ids = ours.encode(text, parse_special=True)
            assert ids == theirs(text, add_special_tokens=False)["input_ids"], (folder, text)
            for skip in (True, False):
                assert ours.decode(ids, skip_special=skip) == theirs.decode(ids, skip_special_tokens=skip), (
                    folder,
                    text,
                )
    assert compared > 40


def random_files(rng: random.Random, kind: str, size: int) -> dict[str, Any]:
    """Random files next to a tokenizer. One in twelve has an impossible id. `ids` is for the test only."""

    def flags() -> dict[str, bool]:
        return {flag: rng.random() < 0.3 for flag in FLAGS}

    def token() -> object:
        text = rng.choice([*NEW, "<new>"])
        return text if rng.random() < 0.7 else {"__type": "AddedToken", "content": text, **flags()}

    ids = {text: size + index for index, text in enumerate(rng.sample(NEW, rng.randint(0, 4)))}
    if ids and rng.random() < 1 / 12:
        ids[rng.choice(list(ids))] += rng.choice((-1, 7))
    config: dict[str, Any] = {key: token() for key in ("eos_token", "pad_token", "image_token") if rng.random() < 0.3}
    if kind != "spm" and rng.random() < 0.3:
        config["additional_special_tokens"] = [rng.choice(NEW) for _ in range(rng.randint(0, 3))]
    if rng.random() < 0.6:
        config["added_tokens_decoder"] = {str(index): {"content": text, **flags()} for text, index in ids.items()}
    files = {"tokenizer_config": config, "added_tokens": ids, "ids": ids}
    if rng.random() < 0.3:
        files["special_tokens_map"] = {"pad_token": rng.choice(NEW)}
    return files
