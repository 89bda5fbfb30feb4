"""The tokenizer: published test vectors for every source, streaming decoding, special tokens, misuse."""

from __future__ import annotations

import base64
import dataclasses
import json
import multiprocessing
import os
import pickle
import random
import re
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from vocab_samples import (
    NO_SPECIAL,
    byte_level_gguf,
    check_vectors,
    from_gguf,
    raw_bpe_gguf,
    spm_gguf,
    tokenizer_json,
    unigram_gguf,
    vectors,
    word_piece_gguf,
    write_json,
)

from llamac.errors import ArgumentError, TokenizerError, UnsupportedError
from llamac.format.gguf_metadata import read_metadata
from llamac.text.encoding import build_library
from llamac.text.special_tokens import SpecialTokens
from llamac.text.tokenizer import LONG_TEXT, Tokenizer

VECTORS = ("llama-spm", "llama-bpe", "gpt-2", "phi-3")


@pytest.mark.parametrize("name", VECTORS)
def test_gguf_vocabularies_match_their_vectors(data_dir: Path, name: str) -> None:
    tokenizer = Tokenizer.from_file(data_dir / "tokenizers" / f"ggml-vocab-{name}.gguf")
    check_vectors(tokenizer, vectors(data_dir, name))
    assert tokenizer.kind == ("spm" if name in ("llama-spm", "phi-3") else "bpe")


def test_every_gguf_vocabulary_in_the_data_folder_matches_its_vectors(data_dir: Path) -> None:
    for path in sorted((data_dir / "tokenizers").glob("ggml-vocab-*.gguf")):
        name = path.name.removeprefix("ggml-vocab-").removesuffix(".gguf")
        if name in VECTORS or not path.with_name(path.name + ".inp").exists():
            continue
        tokenizer = Tokenizer.from_file(path)
        for text, ids in vectors(data_dir, name):
            assert tokenizer.encode(text) == ids, (name, text)


@pytest.mark.parametrize("file", ["tokenizer.model", "tokenizer.bin"])
def test_other_files_of_llama2_match_its_vectors(data_dir: Path, file: str) -> None:
    tokenizer = Tokenizer.from_file(data_dir / "llama2-tokenizer" / file)
    check_vectors(tokenizer, vectors(data_dir, "llama-spm"))
    assert tokenizer.special.bos_id == 1
    assert tokenizer.special.stop_ids == ((2,) if file == "tokenizer.model" else (1, 2))


def test_vocab_and_merges_match_their_vectors(data_dir: Path, tmp_path: Path) -> None:
    values = read_metadata(data_dir / "tokenizers" / "ggml-vocab-gpt-2.gguf").values
    tokens, merges = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.merges"]
    assert isinstance(tokens, list)
    assert isinstance(merges, list)
    write_json(tmp_path, vocab={token: index for index, token in enumerate(tokens)})
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(map(str, merges)) + "\n", encoding="utf-8")
    tokenizer = Tokenizer.from_file(tmp_path / "vocab.json")
    check_vectors(tokenizer, vectors(data_dir, "gpt-2"))
    assert tokenizer.special == SpecialTokens(50256, False, False, 50256, (50256,))
    assert tokenizer.encode("a<|endoftext|>", parse_special=True) == [64, 50256]


@pytest.fixture
def small_spm() -> Tokenizer:
    return from_gguf(spm_gguf())


@pytest.fixture
def small_bpe() -> Tokenizer:
    return from_gguf(byte_level_gguf())


@pytest.mark.parametrize("kind", ["small_spm", "small_bpe"])
@pytest.mark.parametrize("start", [True, False])
@pytest.mark.parametrize("skip_special", [True, False])
def test_streaming_gives_the_text_of_decode(
    kind: str, start: bool, skip_special: bool, request: pytest.FixtureRequest
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    rng = random.Random(9)
    for _ in range(400):  # arbitrary ids, including bytes that are not UTF-8
        ids = [rng.randrange(tokenizer.n_ids) for _ in range(rng.randrange(20))]
        decoder = tokenizer.decoder(start=start, skip_special=skip_special)
        text = "".join(decoder.push(token) for token in ids) + decoder.flush()
        assert text == tokenizer.decode(ids, start=start, skip_special=skip_special)
        if not start and not skip_special:
            assert text == b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "replace")


def test_streaming_never_breaks_a_character(small_spm: Tokenizer, small_bpe: Tokenizer) -> None:
    text = "é日\U0001f600a"
    for tokenizer in (small_spm, small_bpe):
        ids = tokenizer.encode(text)
        assert len(ids) > len(text)
        decoder = tokenizer.decoder()
        shown = [decoder.push(token) for token in ids]
        assert "".join(shown) == text
        assert all(part in ("", "é", "日", "\U0001f600", "a") for part in shown)
        assert decoder.flush() == ""


def test_a_flushed_decoder_can_be_reused(small_bpe: Tokenizer) -> None:
    first, *rest = small_bpe.encode("日")
    decoder = small_bpe.decoder()
    assert decoder.push(first) == ""
    assert decoder.flush() == "\ufffd"
    assert "".join(map(decoder.push, [first, *rest])) == "日"


def test_pieces_that_only_look_like_bytes_are_text() -> None:
    texts = ["<0x-1>", "<0x+1>", "<0x  >", "<0xG0>", "<0x00", "<0x000>", "<0x\u0661\u0662>"]
    pieces = [*dict(spm_gguf())["tokenizer.ggml.tokens"][2], *texts]
    scores = [*dict(spm_gguf())["tokenizer.ggml.scores"][2], *[-2000.0] * len(texts)]
    types = [*dict(spm_gguf())["tokenizer.ggml.token_type"][2], *[4] * len(texts)]
    tokenizer = from_gguf(spm_gguf(tokens=("[", "s", pieces), scores=("[", "f", scores), token_type=("[", "i", types)))
    for text in texts:
        token = tokenizer.id_of(text)
        assert token is not None
        assert tokenizer.token_bytes(token) == text.encode()
    assert [tokenizer.token_bytes(3 + byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]


def test_the_space_of_sentencepiece_is_dropped_only_at_the_start(small_spm: Tokenizer) -> None:
    ids = small_spm.encode(" ab ab")  # SentencePiece adds a space before the text's own
    assert small_spm.decode(ids) == " ab ab"
    assert small_spm.decode(ids, start=False) == "  ab ab"
    assert small_spm.decode([1, *small_spm.encode("ab")]) == "ab"
    assert small_spm.decode([1, *small_spm.encode("ab")], skip_special=False) == "<s> ab"
    decoder = small_spm.decoder()
    assert [decoder.push(token) for token in (1, 261, 261)] == ["", "ab", " ab"]
    continued = small_spm.decoder(start=False)
    assert continued.push(261) == " ab"


def test_special_tokens_are_added_once(small_spm: Tokenizer) -> None:
    both = Tokenizer.from_json(small_spm.json, dataclasses.replace(small_spm.special, add_eos=True))
    assert both.encode("ab") == [261]
    assert both.encode("ab", add_special=True) == [1, 261, 2]
    assert both.encode("<s>ab</s>", add_special=True, parse_special=True) == [1, 261, 2]
    assert both.encode("", add_special=True) == [1, 2]


def test_special_token_names_are_text_without_parse_special(small_spm: Tokenizer, small_bpe: Tokenizer) -> None:
    for tokenizer, name in ((small_spm, "</s>"), (small_bpe, "<|end|>")):
        special, text = tokenizer.id_of(name), f"ab{name}ab"
        assert special in tokenizer.encode(text, parse_special=True)
        ids = tokenizer.encode(text)
        assert special not in ids
        assert b"".join(map(tokenizer.token_bytes, ids)).decode().strip() == text
        assert tokenizer.encode(text, parse_special=True).count(special) == 1  # the two modes do not affect each other
        assert special not in tokenizer.encode(text)
    assert small_spm.encode("<s>", add_special=True)[0] == 1 != small_spm.encode("<s>", add_special=True)[1]


def test_added_tokens_are_not_byte_level_encoded(small_bpe: Tokenizer) -> None:
    # The byte-level alphabet uses "ø" for a byte; in an added token it is the letter.
    values = byte_level_gguf()
    tokens = [*dict(values)["tokenizer.ggml.tokens"][2], "<ø>", "日"]
    types = [*dict(values)["tokenizer.ggml.token_type"][2], 4, 4]
    tokenizer = from_gguf(byte_level_gguf(tokens=("[", "s", tokens), token_type=("[", "i", types)))
    assert tokenizer.encode("<ø>日") == [266, 267]
    assert tokenizer.token_bytes(266) == "<ø>".encode()
    assert tokenizer.decode([266, 267]) == "<ø>日"


def test_wrong_arguments_are_refused(small_bpe: Tokenizer) -> None:
    bad: Any
    for bad in (b"bytes", None, ["a"]):
        with pytest.raises(ArgumentError, match="text must be a str"):
            small_bpe.encode(bad)
    with pytest.raises(ArgumentError, match="lone surrogate"):
        small_bpe.encode("a\ud800")
    for bad in (-1, 266, 2**70):
        with pytest.raises(ArgumentError, match=f"token id {bad} is out of range: .* 0 to 265"):
            small_bpe.decode([1, bad])
        with pytest.raises(ArgumentError, match="out of range"):
            small_bpe.decoder().push(bad)
        with pytest.raises(ArgumentError, match="out of range"):
            small_bpe.token_bytes(bad)
    small_bpe.decode([1])
    for bad in (True, 1.0):  # equal to an id that is cached by now
        with pytest.raises(ArgumentError, match=f"must be an integer, not {type(bad).__name__}"):
            small_bpe.decode([bad])
        with pytest.raises(ArgumentError, match="must be an integer"):
            small_bpe.decoder().push(bad)
        with pytest.raises(ArgumentError, match="must be an integer"):
            small_bpe.token_bytes(bad)
    bad = "x"
    with pytest.raises(ArgumentError, match="must be an integer, not str"):
        small_bpe.decode(bad)
    with pytest.raises(ArgumentError, match="SpecialTokens"):
        Tokenizer.from_json(b"{}", bad)
    bad = 5
    with pytest.raises(ArgumentError, match=r"data must be the text of a tokenizer\.json, not int"):
        Tokenizer.from_json(bad, NO_SPECIAL)
    with pytest.raises(ArgumentError, match="text must be a str, not int"):
        small_bpe.min_tokens(bad)
    assert small_bpe.id_of("\ud800") is None


def test_tokenizers_cannot_be_constructed_directly(small_bpe: Tokenizer) -> None:
    with pytest.raises(ArgumentError, match=r"use Tokenizer\.from_file\(path\) or Tokenizer\.from_json"):
        Tokenizer(small_bpe.json, small_bpe.special)


def test_repr_shows_the_file_and_the_kind(tmp_path: Path) -> None:
    path = write_json(tmp_path, tokenizer=tokenizer_json()) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(path)
    assert repr(tokenizer) == f"<llamac.Tokenizer {path}: {len(tokenizer.json)} bytes, not parsed yet>"
    tokenizer.encode("a")
    assert repr(tokenizer) == f"<llamac.Tokenizer {path}: bpe, 259 ids>"
    assert repr(Tokenizer.from_json("{}", NO_SPECIAL)) == "<llamac.Tokenizer tokenizer.json: 2 bytes, not parsed yet>"


def encode_in_another_process(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode("hello")


def test_pickling_stores_the_path_or_the_bytes(
    small_bpe: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json(tmp_path, tokenizer=tokenizer_json(), tokenizer_config={"eos_token": "</s>"})
    monkeypatch.chdir(tmp_path)
    from_file = Tokenizer.from_file("tokenizer.json")
    monkeypatch.chdir(tmp_path.parent)
    pickled = pickle.dumps(from_file)
    assert len(pickled) < 500
    for tokenizer, again in ((from_file, pickle.loads(pickled)), (small_bpe, pickle.loads(pickle.dumps(small_bpe)))):
        assert again.json == tokenizer.json
        assert again.special == tokenizer.special
        assert again.encode("hello") == tokenizer.encode("hello")
        assert repr(again) == repr(tokenizer)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(encode_in_another_process, [from_file, small_bpe]) == [
            from_file.encode("hello"),
            small_bpe.encode("hello"),
        ]


def test_any_path_like_object_names_a_tokenizer(tmp_path: Path) -> None:
    class Named:
        def __fspath__(self) -> str:
            return str(tmp_path)

    write_json(tmp_path, tokenizer=tokenizer_json())
    assert Tokenizer.from_file(Named()).n_ids == 259


class HandlerError(Exception):
    """An exception from a signal handler."""


@pytest.mark.parametrize("characters", [100, LONG_TEXT])
@pytest.mark.parametrize("kind", [HandlerError, ValueError, TokenizerError, KeyboardInterrupt])
def test_exceptions_of_signal_handlers_pass_through(
    kind: type[BaseException], characters: int, small_bpe: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_bpe.encode("a")
    problem = kind("of a handler")

    def handler(*_: object) -> None:
        raise problem

    def interrupted(*_: object) -> list[int]:
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.05)  # the handler runs in the main thread, even if another thread encodes
        return []

    before = signal.signal(signal.SIGUSR1, handler)
    monkeypatch.setattr(small_bpe._loaded.encoder, "encode", interrupted)
    try:
        with pytest.raises(kind) as caught:
            small_bpe.encode("a" * characters)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert caught.value is problem


def test_a_word_equal_to_a_special_token_is_text() -> None:
    """BPE with ignore_merges looks whole words up in the vocabulary, where it also finds special tokens."""
    tokens = [*dict(byte_level_gguf())["tokenizer.ggml.tokens"][2], "stop"]
    types = [*dict(byte_level_gguf())["tokenizer.ggml.token_type"][2], 3]
    changes = {"tokens": ("[", "s", tokens), "token_type": ("[", "i", types)}
    tokenizer = from_gguf(byte_level_gguf("llama-bpe", **changes))
    assert json.loads(tokenizer.json)["model"]["ignore_merges"]
    assert tokenizer.encode("stop", parse_special=True) == [266]
    assert tokenizer.encode("stop") == [tokenizer.id_of(char) for char in "stop"]
    assert tokenizer.encode("hell stop", parse_special=True)[-1] == 266


def test_the_built_library_equals_the_parsed_document(tmp_path: Path) -> None:
    import tokenizers

    documents = [json.loads(from_gguf(made).json) for made in (byte_level_gguf("qwen2"), raw_bpe_gguf(), spm_gguf())]
    documents += [json.loads(from_gguf(made).json) for made in (unigram_gguf(), word_piece_gguf())]
    vocab = {"<unk>": 0, "a": 1}
    documents.append(tokenizer_json(model={"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}, added_tokens=[]))
    documents.append(tokenizer_json(post_processor=None))
    for document in documents:
        document |= {"truncation": None, "padding": None, "post_processor": None}
        theirs = tokenizers.Tokenizer.from_str(json.dumps(document))
        assert json.loads(build_library(document).to_str()) == json.loads(theirs.to_str())


def test_ids_can_have_gaps(tmp_path: Path) -> None:
    document = tokenizer_json()
    document["model"]["vocab"]["he"] = 300
    tokenizer = Tokenizer.from_file(write_json(tmp_path, tokenizer=document))
    assert (tokenizer.vocab_size, tokenizer.n_ids) == (259, 301)
    assert tokenizer.encode("he") == [300]
    assert tokenizer.decode([300, 299, 300]) == "hehe"


def test_metaspace_and_unigram_encode_and_decode(tmp_path: Path) -> None:
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    model = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["▁", -3.0], ["▁ab", -1.0], ["c", -2.0]]}
    changes: dict[str, Any] = {
        "pre_tokenizer": metaspace,
        "decoder": metaspace,
        "post_processor": None,
        "added_tokens": [],
    }
    tokenizer = Tokenizer.from_file(write_json(tmp_path, tokenizer=tokenizer_json(model=model, **changes)))
    assert tokenizer.encode("abc ab") == [2, 3, 2]
    assert tokenizer.decode([2, 3, 2]) == "abc ab"
    assert tokenizer.kind == "spm"


def charsmap(units: list[int], texts: bytes) -> str:
    data = struct.pack(f"<I{len(units)}I", 4 * len(units), *units) + texts
    return base64.b64encode(data).decode()


def steps(*inner: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": [{"type": "NFC"}, *inner]}


WRONG_UNITS = [0] * 255 + [1 << 20]
PANICS: list[dict[str, Any]] = [  # the library `tokenizers` panics when it parses these or encodes with them
    {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    {"normalizer": {"type": "Prepend", "prepend": ""}},
    {"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "x"}},
    {"normalizer": steps({"type": "Replace", "pattern": {"Regex": "a*"}, "content": "x"})},
    {"normalizer": steps({"type": "Replace", "pattern": {"Regex": "(?=a)"}, "content": "x"})},
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "x"}},
    {"normalizer": {"type": "Precompiled"}},
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap([0] * 256, b"\0") + "\n"}},
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap([], b"\0")}},
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap([0] * 256, b"a")}},
    {"normalizer": steps({"type": "Precompiled", "precompiled_charsmap": charsmap(WRONG_UNITS, b"\0")})},
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap([0] * 255 + [1 << 31 | 9], b"a\0")}},
    {"model": {**tokenizer_json()["model"], "continuing_subword_prefix": "ab"}},
]


@pytest.mark.parametrize("changes", PANICS)
def test_documents_that_make_the_library_panic_are_errors_of_one_line(
    changes: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    document = tokenizer_json(**changes)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: ") as caught:
        Tokenizer.from_file(write_json(tmp_path, tokenizer=document))
    assert "\n" not in str(caught.value)
    with pytest.raises(TokenizerError, match="cannot be used: "):  # a model file bypasses the importer's checks
        Tokenizer.from_json(json.dumps(document), NO_SPECIAL).encode("Once upon a time")
    assert capfd.readouterr() == ("", "")


def test_an_unexpected_panic_is_a_tokenizer_error(small_bpe: Tokenizer) -> None:
    class PanicException(BaseException):
        """Like pyo3's, not a subclass of Exception."""

    def fail(*_: object, **__: object) -> None:
        raise PanicException("index out\nof bounds")

    small_bpe.encode("a")
    library = type("Library", (), {"encode": fail})()
    small_bpe._loaded.encoder = library
    with pytest.raises(TokenizerError, match="the library tokenizers failed: index out of bounds"):
        small_bpe.encode("a")


def test_a_valid_precompiled_charsmap_is_used(tmp_path: Path) -> None:
    document = tokenizer_json(normalizer={"type": "Precompiled", "precompiled_charsmap": charsmap([0] * 256, b"\0")})
    tokenizer = Tokenizer.from_file(write_json(tmp_path, tokenizer=document))
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"


def test_a_tokenizer_with_dropout_is_refused(tmp_path: Path) -> None:
    document = tokenizer_json(model={**tokenizer_json()["model"], "dropout": 0.5})
    with pytest.raises(UnsupportedError, match="dropout"):
        Tokenizer.from_file(write_json(tmp_path, tokenizer=document))


def test_errors_of_the_library_name_the_file(tmp_path: Path) -> None:
    document = tokenizer_json(normalizer={"type": "Unheard"})
    problem = f"{tmp_path}: the tokenizer cannot encode this text: it cannot be used: "
    with pytest.raises(TokenizerError, match=re.escape(problem)):
        Tokenizer.from_file(write_json(tmp_path, tokenizer=document)).encode("a")


def test_creating_a_tokenizer_imports_no_tokenizer_library() -> None:
    program = (
        "import sys; from llamac import SpecialTokens, Tokenizer\n"
        "t = Tokenizer.from_json(b'{}', SpecialTokens(None, False, False, None, ()))\n"
        "assert t.special.stop_ids == ()\n"
        "assert not {'tokenizers', 'sentencepiece', 'llamac.export'} & set(sys.modules), sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def decoders() -> list[Any]:
    mark = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    return [
        None,
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "WordPiece", "prefix": "@@", "cleanup": False},
        mark,
        mark | {"prepend_scheme": "never"},
        {"type": "Fuse"},
        {"type": "Sequence", "decoders": [mark, {"type": "ByteFallback"}, {"type": "Fuse"}]},
    ]


@pytest.mark.parametrize("decoder", decoders())
def test_decoding_matches_the_library(decoder: Any, tmp_path: Path) -> None:
    import tokenizers

    texts = ["a", "▁a", "▁▁", "▁", "##b", "@@b", "##", ".", ".5", "n't", "'", "'s", "' '", "do", "do not", "!", " "]
    texts += ["<0x41>", "<0x0A>"]
    vocab = {text: index for index, text in enumerate(["<unk>", "<s>", "</s>", *texts])}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": index, "content": name, "special": True, **flags} for name, index in list(vocab.items())[:3]]
    added.append({"id": len(vocab), "content": " new ", "special": False, **flags})
    changes = {"model": model, "added_tokens": added, "decoder": decoder, "pre_tokenizer": {"type": "WhitespaceSplit"}}
    write_json(tmp_path, tokenizer=tokenizer_json(**changes, post_processor=None))
    ours = Tokenizer.from_file(tmp_path)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    library.no_truncation()
    rng = random.Random(10)
    for _ in range(2000):
        ids = [rng.randrange(ours.n_ids) for _ in range(rng.randrange(7))]
        for skip in (False, True):
            text = library.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids, skip_special=skip) == text, ids
            stream = ours.decoder(skip_special=skip)
            assert "".join(map(stream.push, ids)) + stream.flush() == text
    for text in ("a . do <s> xx", "<s>", " new a"):
        assert ours.encode(text, parse_special=True) == library.encode(text, add_special_tokens=False).ids
    assert ours.encode("<s> a") == [0, 3]  # without parse_special, a name is text


def test_pieces_can_have_the_same_text(tmp_path: Path) -> None:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    pieces = [["<unk>", 0.0], ["a", -1.0], ["b", -2.0], ["a", -3.0]]
    document = tokenizer_json(
        model={"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": False},
        added_tokens=[{"id": 4, "content": "<x>", **flags}],
        pre_tokenizer=None,
        post_processor=None,
        decoder={"type": "Fuse"},
    )
    tokenizer = Tokenizer.from_file(write_json(tmp_path, tokenizer=document))
    assert tokenizer.encode("b<x>") == [2, 4]
    assert tokenizer.decode([1, 2, 3, 4]) == "aba<x>"


def test_scores_are_rounded_as_the_library_reads_them(tmp_path: Path) -> None:
    """Its parser rounds some decimals to a neighboring number, so that other sums are equal."""
    tokenizers = pytest.importorskip("tokenizers")
    for score in (-5.872712135314941, -9.932890709584585, -5.5475543852164035):
        document = tokenizer_json(
            model={"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", score], ["aa", 2 * score]]},
            added_tokens=[],
            pre_tokenizer=None,
            post_processor=None,
            truncation=None,
            decoder={"type": "Fuse"},
        )
        folder = write_json(tmp_path, tokenizer=document)
        library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        assert Tokenizer.from_file(folder).encode("aa" * 9) == library.encode("aa" * 9).ids
