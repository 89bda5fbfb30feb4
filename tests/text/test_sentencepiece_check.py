"""ModelProtos in flat files: the library sentencepiece gets only those that have the form llamac writes."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vocab_samples import SPM_PIECES, field, sentencepiece_file

from builders import checkpoint, llama_config, write_model
from llamac import Tokenizer, load
from llamac.errors import TokenizerError
from llamac.text.sentencepiece_check import check_model_proto
from llamac.text.tokenizer_json import MAX_TOKENS
from llamac.text.vocabulary.load import Vocabulary, load_vocabulary
from processes import output_of

NAN = b"\0\0\xc0\x7f"
PIECE = field(1, b"x") + b"\x15\0\0\0\0" + field(3, 1)


@pytest.fixture
def vocabulary(tmp_path: Path) -> Vocabulary:
    """A vocabulary that the library encodes: it removes extra spaces."""
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_file(SPM_PIECES, b"", field(4, 1)))
    found = load_vocabulary(tmp_path / "tokenizer.model")
    assert "sentencepiece" in json.loads(found.json)
    return found


def changed(vocabulary: Vocabulary, change: Callable[[bytes], bytes]) -> bytes:
    """The vocabulary's tokenizer.json with another ModelProto."""
    document = json.loads(vocabulary.json)
    settings = document["sentencepiece"]
    settings["model"] = base64.b64encode(change(base64.b64decode(settings["model"]))).decode()
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda data: data[:-1], "its settings, at byte .*, are malformed"),
        (lambda data: data[:5], "piece 0 is malformed"),
        (lambda data: b"", "its settings, at byte 0, are malformed"),
        (lambda data: b"\x0a\xff\xff\xff\xff\xff" + data, "piece 0 is malformed"),
        (lambda data: field(1, PIECE) + data, r"has \d+ pieces, its tokenizer\.json \d+"),
        (lambda data: field(1, PIECE.replace(b"\0\0\0\0", NAN)) + data, "piece 0 is malformed"),
        (lambda data: field(1, PIECE.replace(b"x", b"\xff")) + data, "piece 0 is malformed"),
        (lambda data: field(1, PIECE[:-1] + b"\x09") + data, "piece 0 is malformed"),
        (lambda data: field(1, PIECE + b"\x18\x01") + data, "piece 0 is malformed"),
        (lambda data: data + field(5, field(2, b"\xff" * 8)), "its settings, at byte .*, are malformed"),
        (lambda data: data + field(4, b""), "its settings, at byte .*, are malformed"),
        (lambda data: data + b"\x0b", "its settings, at byte .*, are malformed"),
    ],
)
def test_damaged_model_protos_are_refused(
    vocabulary: Vocabulary, change: Callable[[bytes], bytes], problem: str
) -> None:
    with pytest.raises(TokenizerError, match=problem):
        Tokenizer.from_json(changed(vocabulary, change), vocabulary.special).encode("a")


def test_the_number_of_pieces_is_limited() -> None:
    for number in (0, MAX_TOKENS + 1):
        with pytest.raises(TokenizerError, match=f"the vocabulary has {number} pieces, expected 1 to {MAX_TOKENS}"):
            check_model_proto(b"", number)


@pytest.mark.parametrize("size", [127, 128, 200])
def test_pieces_can_have_more_than_127_bytes(size: int, tmp_path: Path) -> None:
    pieces = [*SPM_PIECES, ("x" * size, 0.0, 4)]  # defined by the user, so that no merges are needed
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_file(pieces, b"", field(4, 1)))
    assert Tokenizer.from_file(tmp_path / "tokenizer.model").encode("x" * size)[-1] == len(SPM_PIECES)


NO_IDS = {"model": "", "replacements": "", "prefix": "first", "found_by_model": ["a"]}


@pytest.mark.parametrize("settings", [[], {}, {"model": 1}, NO_IDS])
def test_malformed_settings_are_refused(vocabulary: Vocabulary, settings: Any) -> None:
    document = json.loads(vocabulary.json) | {"sentencepiece": settings}
    with pytest.raises(TokenizerError, match=r"sentencepiece\.\w+ (is None|is 1|must list token ids)"):
        Tokenizer.from_json(json.dumps(document), vocabulary.special).encode("a")


def test_a_flat_file_with_a_damaged_model_proto_does_not_crash(vocabulary: Vocabulary, tmp_path: Path) -> None:
    small = replace(llama_config(dim=16, n_layers=1, n_heads=2, n_kv_heads=2, ffn=16), vocab_size=300)
    program = """
        import sys
        import llamac
        with llamac.load(sys.argv[1]) as model:
            try:
                print(model.tokenize("a  b"))
            except llamac.TokenizerError as error:
                print("refused:", error)
    """
    for number, change in enumerate((lambda data: data, lambda data: data[:7] + b"\xff" + data[8:])):
        made = replace(checkpoint(small), tokenizer=(changed(vocabulary, change), vocabulary.special, None))
        path = write_model(tmp_path / f"{number}.bin", made)
        found = output_of(program, path)
        if number:
            assert found.startswith("refused: ")
            assert "the SentencePiece model is damaged: piece 0 is malformed" in found
        else:
            with load(path) as model:
                assert found == f"{model.tokenize('a  b')}\n"
