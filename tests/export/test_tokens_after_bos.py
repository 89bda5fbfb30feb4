"""Tokenizers that put more tokens than BOS before a text, as GLM-4 does: in Python, flat files and exports."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from vocab_samples import tokenizer_json, write_json

import llamac
from builders import checkpoint, llama_config, write_model
from golden.family_cases import FAMILY_CASES
from golden.make_families import family_checkpoint
from llamac import ModelError, SpecialTokens, Tokenizer
from llamac.export.flat.model import read
from llamac.export.gguf.write import write_gguf
from llamac.export.hf.write import write_hf
from llamac.text.vocabulary.load import load_vocabulary
from llamac.text.vocabulary.tokenizer_json import Vocabulary

MASK, START, A = 259, 260, 64
TEMPLATE = "[gMASK]<sop>{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A GLM-4 whose tokenizer begins texts with two tokens."""
    document = tokenizer_json()
    flags = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    names = {"[gMASK]": MASK, "<sop>": START}
    document["added_tokens"] += [{"id": token, "content": name, **flags} for name, token in names.items()]
    around = [{"SpecialToken": {"id": name, "type_id": 0}} for name in names]
    template = {
        "type": "TemplateProcessing",
        "single": [*around, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [*around, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {name: {"id": name, "ids": [token], "tokens": [name]} for name, token in names.items()},
    }
    document |= {"truncation": None}
    document["post_processor"] = {"type": "Sequence", "processors": [document["pre_tokenizer"], template]}
    made = family_checkpoint(tmp_path / "glm", FAMILY_CASES["glm"], vocab_size=264, eos_token_id=257, pad_token_id=257)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "chat_template": TEMPLATE}
    return write_json(made, tokenizer=document, tokenizer_config=config)


@pytest.fixture
def vocabulary(folder: Path) -> Vocabulary:
    return load_vocabulary(folder)


@pytest.fixture
def file(folder: Path, tmp_path: Path) -> Path:
    llamac.export.export(folder, tmp_path / "model.bin")
    return tmp_path / "model.bin"


def test_texts_begin_with_all_tokens(folder: Path, vocabulary: Vocabulary) -> None:
    assert vocabulary.special == SpecialTokens(MASK, True, False, 257, (257,), after_bos=(START,))
    tokenizer = Tokenizer.from_file(folder)
    assert tokenizer.encode("a", add_special=True) == [MASK, START, A]
    assert tokenizer.encode("[gMASK]<sop>a", add_special=True, parse_special=True) == [MASK, START, A]
    assert tokenizer.encode("a") == [A]


def test_ids_are_those_of_transformers(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), Tokenizer.from_file(folder)
    for text in ("", "a", "Hello there"):
        assert theirs(text)["input_ids"] == ours.encode(text, add_special=True)


def test_a_flat_file_keeps_them(file: Path) -> None:
    with llamac.load(file) as model:
        assert model.metadata["after_bos"] == [START]
        assert model.special.front == (MASK, START)
        assert model.tokenize("a") == [MASK, START, A]
        assert model.chat_ids([{"role": "user", "content": "a"}]) == [MASK, START, A]
        assert [token.id for token in model.explain("a").tokens] == [MASK, START, A]
        assert [token.id for token in model.explain("").tokens] == [MASK, START]
        first, second = (model.generate(prompt, max_tokens=3, temperature=0) for prompt in ("", [MASK, START]))
        assert first.tokens == second.tokens
        [score] = model.score("", ["a"])
        assert score.tokens == [A]
    assert "after_bos" not in read(file).metadata


@pytest.mark.parametrize("wrong", [{"a": 1}, [1 << 20], [-1], [True], ["<sop>"], 260, None])
def test_wrong_metadata_is_an_error(tmp_path: Path, wrong: object) -> None:
    path = write_model(tmp_path / "wrong.bin", checkpoint(llama_config()), after_bos=wrong)
    with pytest.raises(ModelError, match=r"wrong\.bin: metadata: after_bos is .*, expected a list of token ids below"):
        llamac.load(path)


def test_another_tokenizer_has_its_own(file: Path, folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write_json(other, tokenizer=tokenizer_json())
    llamac.export.export(file, tmp_path / "other.bin", tokenizer=other)
    with llamac.load(tmp_path / "other.bin") as model:
        assert model.special.front == (256,)
    with llamac.load(file, tokenizer=other) as model:
        assert model.tokenize("a") == [256, A]
    shutil.copy(folder / "tokenizer.json", other)
    with llamac.load(tmp_path / "other.bin", tokenizer=other) as model:
        assert model.tokenize("a") == [MASK, START, A]


def test_a_hugging_face_directory_keeps_them(file: Path, tmp_path: Path, vocabulary: Vocabulary) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    write_hf(read(file), tmp_path / "hf", "f32")
    assert load_vocabulary(tmp_path / "hf").special == vocabulary.special
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "hf" / "tokenizer.json"))
    assert library.encode("a").ids == [MASK, START, A]


def test_a_gguf_file_has_no_place_for_them(vocabulary: Vocabulary, tmp_path: Path) -> None:
    made = checkpoint(replace(llama_config(), vocab_size=264, n_token_ids=261))
    warnings: list[str] = []
    write_gguf(
        replace(made, tokenizer=vocabulary, metadata={"architecture": "llama"}), tmp_path / "m.gguf", "f32", warnings
    )
    [warning] = [line for line in warnings if "BOS" in line]
    assert warning == (
        "GGUF has no place for tokens after BOS: a text begins neither with BOS (259) nor with those after it (260)"
    )
    special = load_vocabulary(tmp_path / "m.gguf").special
    assert (special.bos_id, special.add_bos, special.after_bos) == (MASK, False, ())


def test_more_than_one_token_after_the_text_is_refused(tmp_path: Path) -> None:
    document = tokenizer_json()
    first, text = document["post_processor"]["single"]
    document["post_processor"]["single"] = [text, first, first]
    with pytest.raises(llamac.UnsupportedError, match="puts more than one token after the text"):
        load_vocabulary(write_json(tmp_path, tokenizer=document))
