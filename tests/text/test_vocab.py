"""Vocabularies from SentencePiece, llama2.c and Hugging Face files, against independent encoders; damaged input."""

from __future__ import annotations

import contextlib
import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
from vocab_samples import (
    NO_SPECIAL,
    RUNS,
    SPM_PIECES,
    WORDS,
    category_texts,
    field,
    llama2c_encoder,
    llama2c_file,
    random_texts,
    sentencepiece_file,
    spm,
    tokenizer_json,
    write_json,
)

from llamac.errors import ExportError, LlamacError, TokenizerError, UnsupportedError
from llamac.text.decoding import byte_alphabet
from llamac.text.special_tokens import SpecialTokens
from llamac.text.tokenizer import Tokenizer
from llamac.text.vocabulary.load import Vocabulary, load_vocabulary, to_llama2c


def test_sentencepiece_matches_the_library_on_random_texts(data_dir: Path) -> None:
    import sentencepiece

    path = data_dir / "llama2-tokenizer" / "tokenizer.model"
    oracle = sentencepiece.SentencePieceProcessor(model_file=str(path))
    tokenizer = Tokenizer.from_file(path)
    words = [oracle.id_to_piece(index).replace("▁", " ") for index in range(259, 32000)]
    for text in random_texts(3000, words):
        ids = tokenizer.encode(text)
        assert ids == oracle.encode(text), text
        assert tokenizer.decode(ids) == text.replace("▁", " ")
    for char in RUNS:  # pieces with equal scores: runs of every length, next to characters that merge with them
        for count in range(1, 70):
            for text in (char * count, f"a{char * count}>", f"<!{char * count} the"):
                assert tokenizer.encode(text) == oracle.encode(text), text


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_dummy_prefix": False},
        {"add_dummy_prefix": False, "user_defined_symbols": ["▁▁", "▁▁▁", "<mask>", "ab--", "中"]},
        {"byte_fallback": False, "vocab_size": 250},
        {"split_by_whitespace": False},
        {"bos_id": -1, "eos_id": 0, "unk_id": 1},
    ],
)
def test_sentencepiece_matches_the_library_on_trained_models(options: dict[str, Any], tmp_path: Path) -> None:
    import sentencepiece

    rng = random.Random(3)
    words = ["".join(rng.choice("abcdeéñ中文жщ") for _ in range(rng.randint(1, 6))) for _ in range(300)]
    ends = ["", "  ", "--", "...", "\t", "(("]
    lines = [" ".join(rng.choice(words) + rng.choice(ends) for _ in range(12)) for _ in range(400)]
    settings: dict[str, Any] = {
        "vocab_size": 500,
        "byte_fallback": True,
        "allow_whitespace_only_pieces": True,
        "remove_extra_whitespaces": False,
        "normalization_rule_name": "identity",
        "model_type": "bpe",
        "minloglevel": 2,
    }
    path = tmp_path / "tokenizer.model"
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=file, **settings | options)
    oracle = sentencepiece.SentencePieceProcessor(model_file=str(path))
    tokenizer = Tokenizer.from_file(path)
    parts = [*words, " ", "  ", "--", "-", "<mask>", "▁", "ab", "(", "é", "ü", "\U0001f600", "\n", "."]
    for _ in range(800):
        text = "".join(rng.choice(parts) for _ in range(rng.randrange(14)))
        assert tokenizer.encode(text) == oracle.encode(text), text
    assert tokenizer.special.bos_id == (None if options.get("bos_id") == -1 else 1)


# No tokenizer.json can express these models, so the library sentencepiece encodes with them.
USER_DEFINED = {"user_defined_symbols": ["▁▁", "<mask>", "ab--", "中", "(", ". "]}
LIBRARY_OPTIONS: list[dict[str, Any]] = [
    {},
    {"normalization_rule_name": "identity"},
    {"normalization_rule_name": "nmt_nfkc_cf", "add_dummy_prefix": False},
    {"byte_fallback": False},
    {"remove_extra_whitespaces": False, "normalization_rule_name": "identity"},
    {"treat_whitespace_as_suffix": True},
    {**USER_DEFINED},
    {"model_type": "bpe"},
    {"model_type": "bpe", "normalization_rule_name": "nmt_nfkc_cf", "add_dummy_prefix": False},
    {"model_type": "bpe", "normalization_rule_name": "identity"},
    {"model_type": "bpe", **USER_DEFINED},
    {
        "model_type": "bpe",
        "remove_extra_whitespaces": False,
        "normalization_rule_name": "identity",
        "user_defined_symbols": ["<mask>", "ab--"],
    },
    {"model_type": "word", "byte_fallback": False, "vocab_size": 300},
    {"model_type": "char", "byte_fallback": False},
]


@pytest.mark.parametrize("options", LIBRARY_OPTIONS)
def test_sentencepiece_matches_the_library_on_models_of_all_kinds(options: dict[str, Any], tmp_path: Path) -> None:
    import sentencepiece

    rng = random.Random(4)
    words = ["".join(rng.choice("abcdeéñ中文жщ가") for _ in range(rng.randint(1, 6))) for _ in range(300)]
    lines = [" ".join(rng.choice(words) + rng.choice(["", "--", "..."]) for _ in range(12)) for _ in range(400)]
    settings = {"vocab_size": 500, "hard_vocab_limit": False, "byte_fallback": True, "minloglevel": 2}
    path = tmp_path / "tokenizer.model"
    with path.open("wb") as file:  # a unigram model by default
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=file, **settings | options)
    oracle = sentencepiece.SentencePieceProcessor(model_file=str(path))
    tokenizer = Tokenizer.from_file(path)
    parts = [*words, " ", "  ", "--", "-", "ab", "(", "é", "ü", "\U0001f600", "\n", ".", ". ", "ﬁ", "①", "\u3000", "½"]
    parts += ["e\u0301\u0323", "\uff76\uff9e", "가각", "\u1100\u1161\u11a8", "\0", "<s>", "<mask>", "a" * 40, "-" * 17]
    for count in range(800):
        text = "".join(rng.choice(parts) for _ in range(rng.randrange(10)))
        text *= 40 if count % 100 == 0 else 1  # sums of many float32 scores
        ids = oracle.encode(text)
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids) == oracle.decode(ids) or 0 in ids
    assert tokenizer.special == SpecialTokens(1, True, False, 2, (2,))
    assert tokenizer.kind == "spm"
    again = Tokenizer.from_json(tokenizer.json, tokenizer.special)
    assert again.encode(text) == ids


def test_sentencepiece_finds_user_defined_pieces_and_added_tokens(tmp_path: Path) -> None:
    pieces = [*SPM_PIECES, ("[a]", 0.0, 4), ("[b]", 0.0, 4)]
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_file(pieces))
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
    added = {str(len(pieces) - 1): {"content": "[b]", **flags}, str(len(pieces)): {"content": "<new>", **flags}}
    write_json(tmp_path, tokenizer_config={"added_tokens_decoder": added})
    tokenizer = Tokenizer.from_file(tmp_path)
    own, listed, new = (tokenizer.id_of(name) for name in ("[a]", "[b]", "<new>"))
    # "[a]" is a user-defined piece, which is always found; "[b]" is also a special token, found only on request
    assert tokenizer.encode("ab[a]ab") == [261, own, 260]
    assert listed not in tokenizer.encode("ab[b]ab")
    assert new not in tokenizer.encode("ab<new>ab")
    # only legacy tokenizers add a space after an added token
    assert tokenizer.encode("ab[b]ab<new><s>ab", parse_special=True) == [261, listed, 260, new, 1, 260]
    write_json(tmp_path, tokenizer_config={"added_tokens_decoder": added, "legacy": True})
    legacy = Tokenizer.from_file(tmp_path)
    assert legacy.encode("ab[b]ab", parse_special=True) == [261, listed, 261]


def test_sentencepiece_with_a_damaged_charsmap_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="precompiled_charsmap"):
        spm(tmp_path, SPM_PIECES, b"", field(2, b"\4\0\0\0\xff\xff\xff\xff\0"))


# ---- llama2.c


@pytest.mark.parametrize("file", ["stories260K/tok512.bin", "llama2-tokenizer/tokenizer.bin"])
def test_llama2c_matches_its_algorithm_on_random_texts(data_dir: Path, file: str) -> None:
    data = (data_dir / file).read_bytes()
    encode = llama2c_encoder(data)
    tokenizer = Tokenizer.from_file(data_dir / file)
    for text in random_texts(800, ["Once", " upon", " a", " time", "Lily", "\n", "  ", "<s>", "</s>", "<0x41>"]):
        ids = tokenizer.encode(text)
        assert ids == encode(text), text
        assert tokenizer.decode(ids, skip_special=False) == text
    assert to_llama2c(load_vocabulary(data_dir / file)) == data


def test_llama2c_small_file_is_read(tmp_path: Path) -> None:
    data = llama2c_file()
    (tmp_path / "tokenizer.bin").write_bytes(data)
    tokenizer = Tokenizer.from_file(tmp_path)
    encode = llama2c_encoder(data)
    for text in random_texts(300, [*WORDS, "e", "o", "é"]):
        assert tokenizer.encode(text) == encode(text), text
    assert tokenizer.encode("") == []
    assert tokenizer.encode("", add_special=True) == [1]
    assert tokenizer.id_of("<s>") == 1
    assert tokenizer.decode([1, *tokenizer.encode(" hello"), 2]) == " hello"


def test_llama2c_file_is_written_from_sentencepiece(data_dir: Path) -> None:
    vocabulary = load_vocabulary(data_dir / "llama2-tokenizer" / "tokenizer.model")
    assert to_llama2c(vocabulary) == (data_dir / "llama2-tokenizer" / "tokenizer.bin").read_bytes()


def test_llama2c_file_is_written_without_scores(data_dir: Path) -> None:
    vocabulary = load_vocabulary(data_dir / "stories260K" / "tok512.bin")
    encode = llama2c_encoder(to_llama2c(vocabulary._replace(spm=None)))
    tokenizer = Tokenizer.from_json(vocabulary.json, vocabulary.special)
    for text in random_texts(300, ["Once", " upon", " a", " time", "Lily", "\n"]):
        assert encode(text) == tokenizer.encode(text)


def test_llama2c_refuses_other_vocabularies(tmp_path: Path) -> None:
    write_json(tmp_path, tokenizer=tokenizer_json(), tokenizer_config={"bos_token": "<s>", "eos_token": "</s>"})
    with pytest.raises(ExportError, match="the tokens 1 and 2"):
        to_llama2c(load_vocabulary(tmp_path))
    vocabulary = load_vocabulary(tmp_path)
    special = SpecialTokens(1, True, False, 2, (2,))
    with pytest.raises(ExportError, match="SentencePiece vocabularies only"):
        to_llama2c(vocabulary._replace(special=special))

    def refusal(pieces: list[Any], vocab: dict[str, int], merges: list[list[str]]) -> str:
        model = {"type": "BPE", "byte_fallback": True, "unk_token": "<unk>", "vocab": vocab, "merges": merges}
        spm_data = sentencepiece_file(pieces) if pieces else None
        with pytest.raises(ExportError) as caught:
            to_llama2c(Vocabulary(json.dumps(tokenizer_json(model=model, added_tokens=[])).encode(), special, spm_data))
        return str(caught.value)

    ids = {text: index for index, (text, _, _) in enumerate(SPM_PIECES)}
    assert "has 267 tokens, its SentencePiece model 266" in refusal(SPM_PIECES, {**ids, "more": 266}, [])
    assert "needs token ids without gaps" in refusal([], {**ids, "more": 300}, [])
    assert "no scores give this tokenizer's merges" in refusal([], ids, [["a", "b"]] * 2)
    moved = [*SPM_PIECES[:3], SPM_PIECES[4], SPM_PIECES[3], *SPM_PIECES[5:]]
    assert "byte pieces as tokens 0 to 258" in refusal(moved, ids, [])
    twice = [*SPM_PIECES, (" ", -9.0, 1)]  # a space, and the mark of one
    assert "would have the same string" in refusal(twice, {**ids, " ": 266}, [])


def test_llama2c_damage_is_refused(tmp_path: Path) -> None:
    data = llama2c_file()
    path = tmp_path / "tokenizer.bin"

    def problem(damaged: bytes) -> str:
        path.write_bytes(damaged)
        with pytest.raises(TokenizerError) as caught:
            load_vocabulary(path)
        return str(caught.value)

    assert "'\\n<s>\\n'" in problem(data.replace(b"\n<s>\n", b"\n<t>\n"))
    assert "token 0 at byte 12 has the length -1" in problem(data[:8] + struct.pack("<i", -1) + data[12:])
    assert "token 0 at byte 12 has the length 1000000" in problem(data[:8] + struct.pack("<i", 10**6) + data[12:])
    assert "the longest has 2" in problem(struct.pack("<i", 2) + data[4:])
    assert "not a tokenizer.bin" in problem(struct.pack("<i", -5) + data[4:])
    assert "the score of token 262 is nan" in problem(llama2c_file(scores=[0, 1, 2, float("nan"), 4, 5, 6, 7]))
    assert "tokens 259 and 260 are both 'he'" in problem(llama2c_file(["he", "he"]))
    assert "truncated in the score or length of token" in problem(data + b"\0\0\0")
    for size in (0, 3, 4, 5, 11, 12, 16, 1000, *range(len(data) - 8, len(data))):  # the last token takes 9 bytes
        problem(data[:size])


# ---- scores and merges


def test_equal_scores_merge_the_leftmost_pair(tmp_path: Path) -> None:
    words = ["  ", "   ", "    ", "     "]
    data = llama2c_file(words, scores=[-5.0] * 4)  # as in Llama 2, all runs of spaces have the same score
    (tmp_path / "tokenizer.bin").write_bytes(data)
    tokenizer, encode = Tokenizer.from_file(tmp_path), llama2c_encoder(data)
    for count in range(30):
        assert tokenizer.encode(" " * count) == encode(" " * count)


def test_equal_scores_that_cannot_be_ranked_are_refused(tmp_path: Path) -> None:
    # The leftmost rule gives [ab][c], [bc][a] and [ca][b] for "abc", "bca" and "cab". No ranking of the pieces does.
    (tmp_path / "tokenizer.bin").write_bytes(llama2c_file(["ab", "bc", "ca"], scores=[-5.0] * 3))
    with pytest.raises(TokenizerError, match="equal scores"):
        load_vocabulary(tmp_path)


def test_work_on_equal_scores_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamac.text.vocabulary.spm.MAX_TIES", 1000)
    words = ["a" * count for count in range(2, 40)]
    (tmp_path / "tokenizer.bin").write_bytes(llama2c_file(words, scores=[-5.0] * len(words)))
    with pytest.raises(TokenizerError, match="equal scores"):
        load_vocabulary(tmp_path)
    (tmp_path / "tokenizer.bin").write_bytes(llama2c_file(["ab" * 600]))
    with pytest.raises(TokenizerError, match="a piece of 1200 characters"):
        load_vocabulary(tmp_path)


# ---- SentencePiece models


def test_sentencepiece_small_model_is_read(tmp_path: Path) -> None:
    tokenizer = spm(tmp_path, SPM_PIECES)
    assert [tokenizer.id_of(piece) for piece in ("▁a", "▁ab", "c", "zz")] == [259, 261, 265, None]
    assert tokenizer.encode("abc a z") == [261, 265, 259, 262, 3 + ord("z")]
    # only the start of the text gets a space
    assert tokenizer.encode("<s>ab", add_special=True, parse_special=True) == [1, 260]
    assert tokenizer.special == SpecialTokens(1, True, False, 2, (2,))
    assert tokenizer.kind == "spm"
    assert (tokenizer.vocab_size, tokenizer.n_ids) == (266, 266)


@pytest.mark.parametrize(
    ("more", "trainer", "normalizer"),
    [
        ([], field(24, 1), b""),
        ([], b"", field(5, 0)),
        ([("bc", -5.0, 5)], b"", b""),  # an unused piece is merged, then split again
        ([("az", -4.0, 1)], b"", b""),  # z is not a piece
        ([("bc", -2.0, 1), ("ca", -2.0, 1)], b"", b""),  # ties go to the leftmost, which no ranking expresses
    ],
)
def test_sentencepiece_small_models_match_the_library(
    tmp_path: Path, more: list[tuple[str, float, int]], trainer: bytes, normalizer: bytes
) -> None:
    import sentencepiece

    tokenizer = spm(tmp_path, [*SPM_PIECES, *more], trainer + field(35, 1), normalizer)
    oracle = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    assert b'"sentencepiece":{' in tokenizer.json
    rng = random.Random(6)
    for _ in range(200):
        text = "".join(rng.choice("abcz  ") for _ in range(rng.randrange(9)))
        assert tokenizer.encode(text) == oracle.encode(text), text


@pytest.mark.parametrize(("text", "message"), [("", "is not valid JSON"), ("[]", "is not a JSON object")])
def test_a_damaged_tokenizer_json_is_not_taken_for_a_tokenizer_bin(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_file(tmp_path / "tokenizer.json")


def test_sentencepiece_invalid_pieces_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="there are not 256 byte pieces"):
        spm(tmp_path, SPM_PIECES[:3] + SPM_PIECES[4:])
    with pytest.raises(TokenizerError, match="both 'ab'"):
        spm(tmp_path, [*SPM_PIECES, ("ab", -7.0, 1)])
    with pytest.raises(TokenizerError, match="the score of token 259 is nan"):
        spm(tmp_path, [(text, float("nan") if text == "▁a" else score, kind) for text, score, kind in SPM_PIECES])


def test_sentencepiece_damage_raises_only_llamac_errors(tmp_path: Path) -> None:
    data = sentencepiece_file(SPM_PIECES)
    path = tmp_path / "tokenizer.model"
    rng = random.Random(5)
    for _ in range(300):
        damaged = bytearray(data[: rng.randrange(8, len(data))])
        for _ in range(rng.randrange(4)):
            damaged[rng.randrange(4, len(damaged))] = rng.randrange(256)
        path.write_bytes(damaged)
        with contextlib.suppress(LlamacError):  # no other exception is allowed
            Tokenizer.from_file(path).encode("a")


# ---- tokenizer.json and its sidecar files


def test_json_is_read_without_truncation_and_post_processor(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(write_json(tmp_path, tokenizer=tokenizer_json()))
    assert tokenizer.special == SpecialTokens(256, True, False, None, ())
    hello = [258, *(tokenizer.id_of(char) for char in "llo")]
    assert tokenizer.encode("hello") == hello  # neither truncated nor preceded by BOS
    assert tokenizer.encode("hello", add_special=True) == [256, *hello]
    document = json.loads(tokenizer.json)
    assert document["post_processor"] is None
    assert document["truncation"] is None


def test_json_is_stored_in_a_canonical_form(tmp_path: Path) -> None:
    document = tokenizer_json()
    first = load_vocabulary(write_json(tmp_path, tokenizer=document)).json
    document["model"]["merges"] = [["h", "e"]]
    document["model"]["vocab"] = dict(reversed(document["model"]["vocab"].items()))
    document = dict(reversed(document.items()))
    assert load_vocabulary(write_json(tmp_path, tokenizer=document)).json == first
    assert Tokenizer.from_json(first, NO_SPECIAL).json == first


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config": {"eos_token": {"content": "</s>"}}}, SpecialTokens(256, True, False, 257, (257,))),
        ({"special_tokens_map": {"eos_token": "</s>"}}, SpecialTokens(256, True, False, 257, (257,))),
        (
            {"tokenizer_config": {"eos_token": "</s>"}, "generation_config": {"eos_token_id": [258, 3]}},
            SpecialTokens(256, True, False, 257, (3, 257, 258)),
        ),
        ({"generation_config": {"eos_token_id": 257}}, SpecialTokens(256, True, False, 257, (257,))),
        ({"config": {"eos_token_id": 257, "bos_token_id": 9}}, SpecialTokens(256, True, False, 257, (257,))),
        ({"tokenizer_config": {"eos_token": "nowhere"}}, SpecialTokens(256, True, False, 259, (259,))),
    ],
)
def test_json_special_tokens_come_from_the_sidecar_files(
    tmp_path: Path, files: dict[str, Any], expected: SpecialTokens
) -> None:
    assert load_vocabulary(write_json(tmp_path, tokenizer=tokenizer_json(), **files)).special == expected


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("front", [False, True])
def test_the_post_processor_alone_decides_what_is_added_to_a_text(tmp_path: Path, front: bool, back: bool) -> None:
    """transformers 5 ignores add_bos_token and add_eos_token if there is a tokenizer.json."""
    document = tokenizer_json()
    bos, text = document["post_processor"]["single"]
    document["post_processor"]["single"] = [
        *([bos] if front else []),
        text,
        *([{"SpecialToken": {"id": "</s>", "type_id": 0}}] if back else []),
    ]
    document["post_processor"]["special_tokens"]["</s>"] = {"id": "</s>", "ids": [257], "tokens": ["</s>"]}
    roles = {"bos_token": "<s>", "eos_token": "</s>"}
    for flags in ({}, dict.fromkeys(("add_bos_token", "add_eos_token"), True), {"add_bos_token": False}):
        write_json(tmp_path, tokenizer=document, tokenizer_config={**roles, **flags})
        assert load_vocabulary(tmp_path).special == SpecialTokens(256, front, back, 257, (257,))
    write_json(tmp_path, tokenizer=tokenizer_json(post_processor=None), tokenizer_config={"add_eos_token": True})
    assert load_vocabulary(tmp_path).special == SpecialTokens(None, False, False, None, ())


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model": {"type": "Letters", "vocab": {}}}, "Letters"),
        ({"decoder": {"type": "BPEDecoder", "suffix": "</w>"}}, "BPEDecoder"),
        ({"decoder": {"type": "Strip", "content": "_", "start": 1, "stop": 0}}, "Strip"),
        ({"post_processor": {"type": "Other"}}, "post-processor Other"),
    ],
)
def test_json_with_unsupported_parts_is_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(UnsupportedError, match=problem):
        load_vocabulary(write_json(tmp_path, tokenizer=tokenizer_json(**changes)))


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"type": "BPE"}},
        {"model": {"type": "BPE", "vocab": {"a": "0"}, "merges": []}},
        {"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a"]}},
        {"model": {"type": "BPE", "vocab": {"\ud800": 0}, "merges": []}},
        {"added_tokens": [{"content": "x"}]},
        {"added_tokens": 5},
        {"post_processor": {"type": "BertProcessing", "cls": []}},
        {"decoder": 5},
    ],
)
def test_json_damage_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(TokenizerError):
        load_vocabulary(write_json(tmp_path, tokenizer=tokenizer_json(**changes)))


def test_json_refused_by_the_library_is_an_error() -> None:
    tokenizer = Tokenizer.from_json('{"model":{"type":"BPE","vocab":{"a":0},"merges":[["a","c"]]}}', NO_SPECIAL)
    with pytest.raises(TokenizerError, match="out of vocabulary"):
        tokenizer.encode("a")


def test_vocab_json_is_read_with_merges_and_added_tokens(tmp_path: Path) -> None:
    vocab = {char: index for index, char in enumerate(byte_alphabet())} | {"he": 256, "<|endoftext|>": 257}
    write_json(tmp_path, vocab=vocab, added_tokens={"<|more|>": 258})
    (tmp_path / "merges.txt").write_bytes(b"#version: 0.2\r\nh e\r\n\r\n")
    tokenizer = Tokenizer.from_file(tmp_path)
    assert tokenizer.encode("he<|more|><|endoftext|>", parse_special=True) == [256, 258, 257]
    assert tokenizer.special == SpecialTokens(257, False, False, 257, (257,))
    (tmp_path / "merges.txt").write_text("h e\nh u\n")
    with pytest.raises(TokenizerError, match="line 2: 'h u'"):
        load_vocabulary(tmp_path)
    (tmp_path / "merges.txt").write_text("h e\n")
    write_json(tmp_path, added_tokens={"<|more|>": 256})
    with pytest.raises(TokenizerError, match="id 256, which is 'he'"):
        load_vocabulary(tmp_path)
    flags = {"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": True, "add_eos_token": True}
    write_json(tmp_path, added_tokens={}, tokenizer_config=flags)  # it has EOS, but no BOS
    assert load_vocabulary(tmp_path).special == SpecialTokens(None, False, True, 257, (257,))
    write_json(tmp_path, added_tokens={}, tokenizer_config={"tokenizer_class": "CLIPTokenizer"})
    with pytest.raises(UnsupportedError, match="CLIPTokenizer"):
        load_vocabulary(tmp_path)
    write_json(tmp_path, vocab={"a": 0})
    with pytest.raises(TokenizerError, match="not a byte-level vocabulary"):
        load_vocabulary(tmp_path)


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "CodeGenTokenizer", "Qwen2Tokenizer", "Qwen2TokenizerFast"])
def test_vocab_json_matches_transformers(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    merges = ["h e", "l l", "he ll", "Ġ hell", "1 2", "12 3", "Ċ Ċ", "! Ċ", "Ã ©", "' S"]
    texts = [*byte_alphabet(), *(merge.replace(" ", "") for merge in merges), "<|endoftext|>"]
    write_json(tmp_path, vocab={text: index for index, text in enumerate(texts)})
    write_json(tmp_path, tokenizer_config={"tokenizer_class": kind})
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    theirs = getattr(transformers, kind).from_pretrained(tmp_path)
    tokenizer = Tokenizer.from_file(tmp_path / "vocab.json")
    assert tokenizer.special.eos_id == theirs.eos_token_id == 266
    assert tokenizer.special.bos_id == theirs.bos_token_id
    for text in category_texts(500):
        assert tokenizer.encode(text) == theirs(text, add_special_tokens=False)["input_ids"], text
    text = "hell hell\n\n!\n 123e\u0301 'S<|endoftext|>"
    assert tokenizer.encode(text, parse_special=True) == theirs(text, add_special_tokens=False)["input_ids"]


def test_paths_without_a_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="holds no tokenizer"):
        load_vocabulary(tmp_path)
    with pytest.raises(FileNotFoundError):
        load_vocabulary(tmp_path / "absent")
    write_json(tmp_path, vocab={"a": 0})
    with pytest.raises(TokenizerError, match=r"there is no merges\.txt"):
        load_vocabulary(tmp_path / "vocab.json")
    other = tmp_path / "other"
    for content, kind in ((b"IQ== 0\nIg== 1\n", UnsupportedError), (b"{", TokenizerError), (b"", TokenizerError)):
        other.write_bytes(content)
        with pytest.raises(kind, match="other"):
            load_vocabulary(other)


def test_vocabulary_is_a_tuple_of_three(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.bin").write_bytes(llama2c_file())
    data, special, original = load_vocabulary(tmp_path)
    assert isinstance(data, bytes)
    assert isinstance(special, SpecialTokens)
    assert original == llama2c_file()
    assert isinstance(load_vocabulary(tmp_path), Vocabulary)


def test_json_word_piece_matches_the_library(tmp_path: Path) -> None:
    import tokenizers

    vocab = {
        text: index for index, text in enumerate(["[UNK]", "[CLS]", "[SEP]", "un", "##aff", "##able", ",", "n't", "a"])
    }
    library = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]"))
    library.normalizer = tokenizers.normalizers.BertNormalizer()
    library.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    library.decoder = tokenizers.decoders.WordPiece()
    around = [("[CLS]", 1), ("[SEP]", 2)]
    library.post_processor = tokenizers.processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=around)
    library.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_file(tmp_path)
    for text in ("Unaffable, a", "a[SEP]a x", "ÜN un,a", ""):
        ids = tokenizer.encode(text, add_special=True, parse_special=True)
        assert ids == library.encode(text).ids
        assert tokenizer.decode(ids) == library.decode(ids)
    assert tokenizer.decode([3, 7, 8]) == library.decode([3, 7, 8]) == "unn't a"


@pytest.mark.parametrize(
    ("settings", "ids"),
    [
        ({"tokenizer_class": "BertTokenizer"}, [1, 4, 4]),
        ({"tokenizer_class": "BertTokenizerFast", "do_lower_case": False, "strip_accents": True}, [2, 4, 4]),
        ({"tokenizer_class": "DistilBertTokenizer", "tokenize_chinese_chars": False}, [1, 3]),
        ({"do_lower_case": False}, [0, 4, 4]),  # config.json names the model
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, [0, 3]),
    ],
)
def test_berts_settings_replace_its_normalizer_as_in_transformers(
    settings: dict[str, Any], ids: list[int], tmp_path: Path
) -> None:
    vocab = {text: index for index, text in enumerate(["[UNK]", "e", "E", "\u4e2d\u4e2d", "\u4e2d"])}
    normalizer = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": False, "lowercase": False}
    document = tokenizer_json(
        normalizer={**normalizer, "strip_accents": None},
        pre_tokenizer={"type": "BertPreTokenizer"},
        model={"type": "WordPiece", "vocab": vocab, "unk_token": "[UNK]", "max_input_chars_per_word": 100},
        decoder={"type": "WordPiece", "prefix": "##", "cleanup": True},
        post_processor=None,
        added_tokens=[],
        truncation=None,
    )
    document["model"]["continuing_subword_prefix"] = "##"
    write_json(tmp_path, tokenizer=document, tokenizer_config=settings, config={"model_type": "bert"})
    assert Tokenizer.from_file(tmp_path).encode("\u00c9 \u4e2d\u4e2d") == ids
