"""The core's encoder equals the library `tokenizers`; packed tokenizers are exact, and damaged ones are refused."""

from __future__ import annotations

import json
import random
import struct
import time
from typing import Any

import pytest
from vocab_samples import NO_SPECIAL, byte_level_gguf, from_gguf, gguf_file, raw_bpe_gguf, spm_gguf, tokenizer_json

from fuzz.encoders import compare, compare_all, library_encoder
from llamac import _core
from llamac.errors import LlamacError, ModelError, TokenizerError
from llamac.format.gguf_metadata import parse_metadata
from llamac.models import NAMES
from llamac.text import packed
from llamac.text.decoding import byte_alphabet
from llamac.text.native_encoder import NativeEncoder
from llamac.text.packed import MAGIC, is_packed, pack
from llamac.text.tokenizer import Tokenizer
from llamac.text.vocabulary.gguf import from_metadata
from llamac.text.vocabulary.tokenizer_json import canonical_json

SPECIAL = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


def added(index: int, text: str, **flags: bool) -> dict[str, Any]:
    return {"id": index, "content": text, **SPECIAL, **flags}


def made(**changes: Any) -> Tokenizer:
    return Tokenizer.from_json(json.dumps(tokenizer_json(**changes)), NO_SPECIAL)


def grown(seed: int, letters: str, size: int, **options: Any) -> Tokenizer:
    """A random BPE over letters, with byte pieces if asked, and added tokens of every kind."""
    rng = random.Random(seed)
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] if options.get("byte_fallback") else []
    pieces += [*letters]
    merges: list[list[str]] = []
    known = [*letters]
    while len(merges) < size:
        left, right = rng.choice(known), rng.choice(known)
        if left + right not in pieces and len(left + right) < 9:
            pieces.append(left + right)
            known.append(left + right)
            merges.append([left, right])
    rng.shuffle(merges)
    model: dict[str, Any] = {
        "type": "BPE",
        "vocab": {text: index for index, text in enumerate(pieces)},
        "merges": merges,
    }
    model |= {"unk_token": letters[0], "fuse_unk": bool(seed % 2), "ignore_merges": seed % 3 == 0, **options}
    tokens = [added(pieces.index(known[-1]), known[-1]), added(len(pieces), "<s>"), added(len(pieces) + 1, "<s>x")]
    tokens += [added(len(pieces) + 2, "<left>", lstrip=True), added(len(pieces) + 3, "<right>", rstrip=True)]
    tokens += [added(len(pieces) + 4, "ab c", special=False, normalized=True), added(len(pieces) + 5, " ", rstrip=True)]
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    normalizers = [None, space, {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, space]}]
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}
    decoder = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}
    return made(
        model=model,
        normalizer=normalizers[seed % 3],
        pre_tokenizer=metaspace if seed % 3 == 0 else None,
        decoder=decoder,
        added_tokens=tokens,
    )


@pytest.mark.parametrize("seed", range(12))
def test_random_vocabularies_encode_as_the_library_does(seed: int) -> None:
    tokenizer = grown(seed, "\u2581abc -<", 60, byte_fallback=seed % 4 == 0)
    assert list(compare(tokenizer, 150, seed)) == []


SAMPLES = {"bytes": byte_level_gguf, "spm": spm_gguf, "raw": raw_bpe_gguf}


@pytest.mark.parametrize("name", SAMPLES)
def test_vocabularies_of_gguf_files_encode_as_the_library_does(name: str) -> None:
    assert list(compare(from_gguf(SAMPLES[name]()), 200, 1)) == []


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "gpt-4o", "deepseek-v3", "tekken"])
def test_pre_tokenizers_encode_as_the_library_does(pre: str) -> None:
    assert list(compare(from_gguf(byte_level_gguf(pre)), 150, 2)) == []


def test_prefix_spaces_of_byte_level_bpe() -> None:
    level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    assert list(compare(made(pre_tokenizer=level), 300, 3)) == []


def test_special_tokens_that_the_model_forms_are_found_as_the_library_does() -> None:
    """Their names are in the alphabet of bytes, so that texts do not contain them: " b", half of "\u00e9"."""
    letters = list(byte_alphabet())
    merges = [["\u0120", "b"], ["\u00c3", "\u00a9"], ["\u0120b", "c"]]
    vocab = {text: index for index, text in enumerate([*letters, *map("".join, merges)])}
    tokens = [added(vocab[text], text) for text in ("\u0120b", "\u00a9", "\u00c3\u00a9")]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": vocab, "merges": merges}
    tokenizer = made(model=model, pre_tokenizer=level, decoder={**level, "type": "ByteLevel"}, added_tokens=tokens)
    encoder, library = tokenizer._loaded.encoder, library_encoder(tokenizer.json, tokenizer.special)
    assert isinstance(encoder, NativeEncoder)
    rng = random.Random(4)
    found = 0
    for _ in range(300):
        text = "".join(
            rng.choices([" b", " bc", "b", " ", "\u00e9", "\u00e8", "x", "\u0120b", "\u00a9"], k=rng.randrange(9))
        )
        spans = encoder.special_spans(text)
        assert spans == library.special_spans(text), text
        assert encoder.encode(text, True) == library.encode(text, True)
        assert encoder.encode(text, False) == library.encode(text, False)
        found += sum(text[start:end] == " b" for start, end in spans)
    assert found > 50


def test_a_token_of_spaces_is_not_found_in_those_that_another_took() -> None:
    tokens = [added(300, "b", rstrip=True), added(301, "\n\n", lstrip=True, rstrip=True), added(302, "\t", lstrip=True)]
    tokenizer = made(added_tokens=tokens)
    assert isinstance(tokenizer._loaded.encoder, NativeEncoder)
    library = library_encoder(tokenizer.json, tokenizer.special)
    for text in ("b\n\nx", "\n\n\n\n", "a\n\n \n\n\n\nb\tb", "b\tx"):
        assert tokenizer.encode(text, parse_special=True) == library.encode(text, True), text


def test_built_in_models_encode_as_the_library_does(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compare_all(NAMES, 50) == 0
    encode = NativeEncoder.encode
    monkeypatch.setattr(NativeEncoder, "encode", lambda self, text, parse: encode(self, text, parse)[:5])
    assert compare_all(NAMES[:1], 50) > 5  # differences are found and counted


def test_unsupported_tokenizers_are_left_to_the_library() -> None:
    word = added(300, "word", single_word=True)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    metaspace = {"type": "Metaspace", "replacement": "_", "prepend_scheme": "first", "split": False}
    fallback = {**tokenizer_json()["model"], "byte_fallback": True}
    removed = {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}
    for changes in (
        {"added_tokens": [word]},
        {"normalizer": {"type": "Lowercase"}},
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": False}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [level, metaspace]}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "UnicodeScripts"}, metaspace]}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [removed, metaspace]}},
        {"pre_tokenizer": level, "model": fallback},
        {"pre_tokenizer": {**metaspace, "split": True}},
        {"pre_tokenizer": metaspace, "normalizer": {"type": "Prepend", "prepend": "_"}},
        {"model": fallback, "added_tokens": [added(300, "<0x0A>")]},
    ):
        tokenizer = made(**changes)
        library = library_encoder(tokenizer.json, tokenizer.special)
        assert tokenizer.encode(" a word") == library.encode(" a word", False)
        assert not isinstance(tokenizer._loaded.encoder, NativeEncoder), changes


@pytest.mark.parametrize("text", ["a" * 300_000, " " * 300_000, "\u00e9" * 100_000, "ab" * 150_000])
@pytest.mark.parametrize("name", ["bytes", "spm"])
def test_long_words_take_little_time(name: str, text: str) -> None:
    tokenizer = from_gguf(SAMPLES[name]())
    started = time.process_time()
    ids = tokenizer.encode(text)
    assert time.process_time() - started < 5
    assert tokenizer.decode(ids) == text


def test_a_long_word_is_merged_as_the_library_merges_it() -> None:
    tokenizer = grown(1, "\u2581abc", 60)
    library = library_encoder(tokenizer.json, tokenizer.special)
    rng = random.Random(1)
    for size in (39, 40, 41, 42, 500, 3000):
        text = "".join(rng.choices("abc", k=size))
        assert tokenizer.encode(text) == library.encode(text, False)


# ---- the packed form


@pytest.mark.parametrize("name", SAMPLES)
def test_packing_is_exact(name: str) -> None:
    vocabulary = from_metadata(parse_metadata(gguf_file(SAMPLES[name]())).values)
    assert is_packed(vocabulary.data)
    assert pack(vocabulary.json) == vocabulary.data
    assert pack(vocabulary.data) == vocabulary.data
    assert canonical_json(json.loads(vocabulary.json)) == vocabulary.json


def test_a_packed_tokenizer_equals_its_document() -> None:
    whole = Tokenizer.from_json(canonical_json(tokenizer_json()), NO_SPECIAL)
    narrow = Tokenizer.from_json(pack(whole.json), NO_SPECIAL)
    for index in range(whole.n_ids):
        assert narrow.token_bytes(index) == whole.token_bytes(index)
    assert (narrow.vocab_size, narrow.kind, narrow.special_names) == (whole.vocab_size, whole.kind, whole.special_names)
    assert narrow.min_tokens("abc def") == whole.min_tokens("abc def")
    assert narrow.encode("Hello abc </s>", parse_special=True) == whole.encode("Hello abc </s>", parse_special=True)


def test_other_models_are_not_packed() -> None:
    words = {"type": "WordLevel", "vocab": {"a": 0, "?": 1}, "unk_token": "?"}
    for document in (tokenizer_json(model=words), {**tokenizer_json(), "x": 1, "sentencepiece": {}}):
        data = canonical_json(document)
        assert pack(data) is data
    assert pack(b"") == b""


@pytest.mark.parametrize(
    "model",
    [
        {"vocab": {}, "merges": []},
        {"vocab": {"a": 0, "b": 0}, "merges": []},
        {"vocab": {"": 0, "a": 1}, "merges": []},
        {"vocab": {"a": -1}, "merges": []},
        {"vocab": {"a": 10**6}, "merges": []},
        {"vocab": {"a": True}, "merges": []},
        {"vocab": {"\ud800": 0}, "merges": []},
        {"vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]},
        {"vocab": {"a": 0, "aa": 1}, "merges": [["a", "a"], ["a", "a"]]},
        {"vocab": {"a": 0}, "merges": [5]},
    ],
)
def test_models_that_tables_cannot_hold_are_not_packed(model: dict[str, Any]) -> None:
    assert packed.tables({"model": {"type": "BPE", **model}}) is None


def repacked(rest: bytes) -> bytes:
    """The sample with another JSON beside its tables."""
    data = packed_sample()
    counts = struct.unpack_from("<4I", data, 8)
    return data[:20] + struct.pack("<I", len(rest)) + data[24 : len(data) - counts[3]] + rest


@pytest.mark.parametrize("rest", [b"{}", b'{"model": []}', b'{"model": {"type": "BPE", "merges": []}}'])
def test_the_json_of_a_packed_tokenizer_has_to_fit_its_tables(rest: bytes) -> None:
    with pytest.raises(TokenizerError, match="the JSON of the packed tokenizer has no BPE model without 'vocab'"):
        Tokenizer.from_json(repacked(rest), NO_SPECIAL).encode("a")


def test_packed_tokenizers_need_a_little_endian_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    data = packed_sample()
    monkeypatch.setattr(packed, "_NATIVE", False)
    with pytest.raises(TokenizerError, match="a packed tokenizer needs a little-endian machine"):
        packed.rest_of(data)
    assert pack(canonical_json(tokenizer_json())) == canonical_json(tokenizer_json())


def test_gaps_between_ids_are_packed() -> None:
    model = {"type": "BPE", "vocab": {"a": 0, "b": 3, "ab": 5}, "merges": [["a", "b"]]}
    tokenizer = Tokenizer.from_json(pack(canonical_json(tokenizer_json(model=model, added_tokens=[]))), NO_SPECIAL)
    assert tokenizer.encode("ab") == [5]
    assert (tokenizer.n_ids, tokenizer.vocab_size, tokenizer.token_bytes(1)) == (6, 3, b"")
    assert json.loads(tokenizer.json)["model"]["vocab"] == model["vocab"]


def packed_sample() -> bytes:
    return pack(canonical_json(tokenizer_json()))


@pytest.mark.parametrize("size", [0, 8, 63, 64, 100, -1])
def test_truncated_packed_tokenizers_are_refused(size: int) -> None:
    data = packed_sample()[:size] if size else MAGIC
    with pytest.raises(TokenizerError, match="packed tokenizer"):
        Tokenizer.from_json(data, NO_SPECIAL).encode("a")


def test_damaged_packed_tokenizers_raise_an_error_or_work() -> None:
    data = packed_sample()
    rng = random.Random(1)
    refused = 0
    for _ in range(400):
        damaged = bytearray(data)
        at = rng.randrange(len(data)) if rng.random() < 0.5 else rng.randrange(8, 600)
        damaged[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, damaged[at] ^ 1))
        tokenizer = Tokenizer.from_json(bytes(damaged), NO_SPECIAL)
        try:
            tokenizer.decode(tokenizer.encode("Hello abc </s> abcabc", parse_special=True))
        except LlamacError:
            refused += 1
    assert refused > 100


def tables(texts: list[bytes], merges: list[int]) -> tuple[bytes, int, int, int]:
    ends = [sum(map(len, texts[: index + 1])) for index in range(len(texts))]
    data = struct.pack(f"<{len(ends)}I{len(merges)}I", *ends, *merges) + b"".join(texts)
    return data, len(texts), len(merges) // 3, ends[-1]


@pytest.mark.parametrize(
    ("texts", "merges", "message"),
    [
        ([b"a", b"a"], [], "same string"),
        ([b"a", b"b", b"ab"], [0, 1, 3], "token 3"),
        ([b"\xc3", b"\xa9"], [], "inside a character"),
        ([b"\xff"], [], "not UTF-8"),
    ],
)
def test_damaged_tables_are_refused(texts: list[bytes], merges: list[int], message: str) -> None:
    data, *counts = tables(texts, merges)
    with pytest.raises(ModelError, match=message):
        _core.Vocabulary(data, 0, *counts)


def test_equal_merges_are_refused() -> None:
    data, *counts = tables([b"a", b"b", b"ab"], [0, 1, 2, 0, 1, 2])
    vocabulary = _core.Vocabulary(data, 0, *counts)
    for _ in range(2):
        with pytest.raises(ModelError, match="merges 0 and 1 are equal"):
            vocabulary.index()


def test_tables_beyond_the_data_are_refused() -> None:
    with pytest.raises(ModelError, match="data ends"):
        _core.Vocabulary(b"1234", 0, 1 << 40, 0, 0)


def test_a_failed_allocation_is_an_error() -> None:
    data = packed_sample()
    for count in range(1, 6):
        _core.fail_allocation(count)
        try:
            Tokenizer.from_json(data, NO_SPECIAL).encode("abc" * 50)
        except LlamacError:
            pass
        finally:
            _core.fail_allocation(0)
