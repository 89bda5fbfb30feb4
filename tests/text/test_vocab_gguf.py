"""GGUF vocabularies: the metadata reader with damaged and hostile files, and tokenizers from metadata."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import random
import re
import struct
from pathlib import Path
from typing import Any

import pytest
from vocab_samples import (
    NASTY,
    SPM_PIECES,
    byte_level_gguf,
    category_texts,
    field,
    from_gguf,
    gguf_file,
    gguf_value,
    raw_bpe_gguf,
    sentencepiece_file,
    spm_gguf,
    tokenizer_json,
    unigram_gguf,
    word_piece_gguf,
    write_json,
)

from llamac.errors import LlamacError, ModelError, TokenizerError, UnsupportedError
from llamac.format.gguf_metadata import parse_metadata, read_metadata
from llamac.text.encoding import build_library
from llamac.text.special_tokens import SpecialTokens
from llamac.text.tokenizer import Tokenizer
from llamac.text.tokenizer_json import parse_document
from llamac.text.vocabulary import gguf as vocab_gguf
from llamac.text.vocabulary.pre_tokenizers import LINEAR, PRE_TOKENIZERS
from llamac.text.vocabulary.spm import read_model


@pytest.mark.parametrize("version", [2, 3])
def test_gguf_reads_every_type(tmp_path: Path, version: int) -> None:
    scalars = [("B", 200), ("b", -3), ("H", 60000), ("h", -300), ("I", 2**32 - 1), ("i", -5), ("f", 0.5)]
    scalars += [("Q", 2**63), ("q", -(2**62)), ("d", 0.1)]
    entries: list[tuple[str, Any]] = [(f"s.{code}", (code, value)) for code, value in scalars]
    entries += [(f"a.{code}", ("[", code, [value, value])) for code, value in scalars]
    entries += [
        ("flag", True),
        ("flags", ("[", "?", [True, False])),
        ("text", "é\0x"),
        ("texts", ("[", "s", ["", "ab"])),
    ]
    nested = ("[", "[", [("[", "i", [1, 2]), ("[", "s", ["x"]), ("[", "[", [("[", "B", [])])])
    path = tmp_path / "a.gguf"
    data = gguf_file([*entries, ("nested", nested)], version, tensors=3)
    path.write_bytes(data + b"rest")
    found = read_metadata(path)
    assert (found.version, found.tensor_count, found.end) == (version, 3, len(data))
    for code, value in scalars:
        assert found.values[f"s.{code}"] == value
        assert found.values[f"a.{code}"] == [value, value]
    assert found.values["flag"] is True
    assert found.values["flags"] == [True, False]
    assert found.values["text"] == "é\0x"
    assert found.values["texts"] == ["", "ab"]
    assert found.values["nested"] == [[1, 2], ["x"], [[]]]


def test_gguf_truncated_anywhere_is_refused() -> None:
    data = gguf_file([*byte_level_gguf(), ("nested", ("[", "[", [("[", "i", [1, 2])]))])
    parse_metadata(data)
    for size in range(len(data)):
        with pytest.raises(ModelError):
            parse_metadata(data[:size])


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "does not start with 'GGUF'"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**62), "do not fit"),
        (gguf_file([("a", 1), ("a", 2)]), "'a' appears twice"),
        (gguf_file([("", 1)]), "a key is empty"),
        (gguf_file([("a", b"\xff")]), "'a'.*UTF-8"),
        (gguf_file([("a", ("[", "s", [b"x", b"\xff"]))]), "string 1 of the array"),
        (gguf_file([("a", ("B", 7))]).replace(struct.pack("<IB", 0, 7), struct.pack("<IB", 7, 7)), "a boolean is 7"),
        (gguf_file([("a", 7)]).replace(struct.pack("<II", 4, 7), struct.pack("<II", 13, 7)), "unknown value type 13"),
    ],
)
def test_gguf_damage_is_refused(data: bytes, problem: str) -> None:
    with pytest.raises(ModelError, match=problem):
        parse_metadata(data)


def gguf_array(kind: int, count: int, rest: bytes = b"") -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + gguf_value("a")[1]
    return head + struct.pack("<IIQ", 9, kind, count) + rest


@pytest.mark.parametrize("kind", [0, 6, 8, 9, 12])
@pytest.mark.parametrize("count", [2**24, 2**40, 2**63, 2**64 - 1])
def test_gguf_counts_are_checked_against_the_size(kind: int, count: int) -> None:
    with pytest.raises(ModelError, match="'a'"):
        parse_metadata(gguf_array(kind, count, b"\0" * 64))


def test_gguf_nesting_and_lengths_are_bounded() -> None:
    with pytest.raises(ModelError, match="nested"):
        parse_metadata(gguf_array(9, 1, struct.pack("<IQ", 9, 1) * 1000))
    for length in (65, 2**62, 2**64 - 1):
        with pytest.raises(ModelError, match="'a'"):
            parse_metadata(gguf_array(8, 1, struct.pack("<Q", length) + b"\0" * 64))


def test_gguf_random_damage_raises_only_llamac_errors() -> None:
    data = gguf_file(byte_level_gguf())
    rng = random.Random(7)
    for _ in range(400):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(damaged))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        with contextlib.suppress(LlamacError):  # no other exception is allowed
            vocab_gguf.from_metadata(parse_metadata(bytes(damaged)).values)


def test_gguf_byte_level_tokenizer_is_read() -> None:
    tokenizer = from_gguf(byte_level_gguf())
    end, spaces, hell = 263, 264, tokenizer.id_of("Ġhell") or 0
    assert tokenizer.encode(" hell<|end|>  [", parse_special=True) == [hell, end, spaces, tokenizer.id_of("[")]
    assert tokenizer.encode("[PAD265]")[0] == tokenizer.id_of("[")  # the name of a gap is text
    assert tokenizer.special == SpecialTokens(end, False, False, end, (end,))
    assert tokenizer.decode([end, hell, spaces]) == " hell  "
    assert tokenizer.token_bytes(end) == b"<|end|>"


@pytest.mark.parametrize(
    ("changes", "kind", "problem"),
    [
        ({"pre": "of-tomorrow"}, UnsupportedError, "pre-tokenizer 'of-tomorrow'"),
        ({"model": "rwkv"}, UnsupportedError, "'rwkv'"),
        ({"model": "t5"}, TokenizerError, "scores' is missing"),
        ({"model": "of-tomorrow"}, UnsupportedError, "'of-tomorrow'"),
        ({"model": None}, TokenizerError, "'tokenizer.ggml.model' is missing"),
        ({"tokens": None}, TokenizerError, "tokens' is missing"),
        ({"tokens": ("[", "i", [1])}, TokenizerError, "not an array of the type str"),
        ({"merges": None}, TokenizerError, "merges' is missing"),
        ({"merges": ("[", "s", [])}, TokenizerError, "merges' is missing or empty"),
        ({"merges": ("[", "s", ["h e", "x"])}, TokenizerError, "merge 1 \\('x'\\)"),
        ({"merges": ("[", "s", ["h u"])}, TokenizerError, "merge 0"),
        ({"token_type": ("[", "i", [1])}, TokenizerError, "1 entries for 266 tokens"),
        ({"bos_token_id": 266}, TokenizerError, "bos_token_id' is 266"),
        ({"bos_token_id": "x"}, TokenizerError, "not of the type int"),
        ({"bos_token_id": None, "add_bos_token": True}, TokenizerError, "no BOS"),
    ],
)
def test_gguf_invalid_tokenizers_are_refused(changes: dict[str, Any], kind: type[Exception], problem: str) -> None:
    with pytest.raises(kind, match=problem):
        from_gguf(byte_level_gguf(**changes))


def test_gguf_pre_tokenizers_preserve_the_text() -> None:
    text = "Hello  world's 12345 x²\n\n\tÉtudes—日本語 foo_bar(); \u0623\u0644 \U0001f600!! "
    for name, rules in PRE_TOKENIZERS.items():
        tokenizer = from_gguf(raw_bpe_gguf(name) if rules.raw else byte_level_gguf(name))
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text, name


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("gpt-2", "I'm  12345!?\n\nx", ["I", "'m", " ", " 12345", "!?", "\n", "\n", "x"]),
        ("llama-bpe", "I'M  12345!?\n\nx", ["I", "'M", " ", " ", "123", "45", "!?\n\n", "x"]),
        ("qwen2", "I'M  12!?\n\nx", ["I", "'M", " ", " ", "1", "2", "!?\n\n", "x"]),
        ("smollm", "I'M  12!", ["I", "'", "M", "  ", "1", "2", "!"]),
        ("falcon", "a.b 12345", ["a", ".", "b", " ", "123", "45"]),
        ("deepseek-coder", "ab, 12\n日本", ["ab", ",", " ", "1", "2", "\n", "日本"]),
        ("deepseek-llm", "ab, x\n日本", ["ab", ",", " x", "\n", "日本"]),
        ("deepseek-v3", "ab_cd 1234", ["ab", "_cd", " ", "123", "4"]),
        ("tekken", "fooBar 12", ["foo", "Bar", " ", "1", "2"]),
        ("jais-2", "a" + " " * 9 + "b", ["a", " " * 8, " b"]),
        ("minicpm5", "ab 12345's", ["ab", " ", "123", "45", "'s"]),
        ("ufakzeka", "a's", ["a", "'s"]),
        ("laguna", "a \n\nb", ["a", " ", "\n\n", "b"]),
        ("bailingmoe", "a\n\nb'D", ["a", "\n\n", "b", "'D"]),
        ("seed-coder", "a!\n12", ["a", "!", "\n", "1", "2"]),
        ("exaone-moe", "a b. c", ["a b", ".", " c"]),
        ("chameleon", "IMGIMGABZ    a.1", ["IMGIMGABZ", "    ", "a", ".", "1"]),
        ("tiny_aya", "1234567", ["1", "234", "567"]),
        ("youtu", "한국ab、12", ["한국", "ab", "、", "1", "2"]),
        ("kimi-k2", "ab漢字cd12345", ["ab", "漢字", "cd", "123", "45"]),
        ("superbpe", "1234567", ["1", "234", "567"]),
        ("spark2_5", "a!\n\n1234", ["a", "!", "\n", "\n", "1", "2", "3", "4"]),
        ("afmoe", "ab12345日本", ["ab", "12", "345", "日本"]),
        ("gpt-4o", "fooBar's 1234", ["foo", "Bar's", " ", "123", "4"]),
    ],
)
def test_gguf_pre_tokenizers_split_known_examples(name: str, text: str, words: list[str]) -> None:
    library = build_library(parse_document(from_gguf(byte_level_gguf(name)).json, name))
    spelled = library.pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in spelled] == words


def test_gguf_pre_tokenizers_have_the_defaults_of_llama_cpp() -> None:
    assert from_gguf(byte_level_gguf("llama-bpe")).special.add_bos
    assert not from_gguf(byte_level_gguf("llama-bpe", add_bos_token=False)).special.add_bos
    assert not from_gguf(byte_level_gguf("llama-bpe", bos_token_id=None)).special.add_bos
    for name, composed in (("qwen2", True), ("command-r", True), ("mpt", True), ("gpt-2", False), ("llama-bpe", False)):
        tokenizer = from_gguf(byte_level_gguf(name))
        assert (tokenizer.encode("e\u0301") == tokenizer.encode("\xe9")) is composed


def test_gguf_pre_tokenizer_defaults_to_the_architectures() -> None:
    for architecture, composed in (("gptneox", True), ("gpt2", False), ("llama", False)):
        entries = dict(byte_level_gguf(None)) | {"general.architecture": architecture}
        tokenizer = from_gguf(entries.items())
        assert (tokenizer.encode("e\u0301") == tokenizer.encode("\xe9")) is composed


def test_gguf_sentencepiece_without_equivalent_merges_matches_the_library() -> None:
    import sentencepiece

    pieces = [*SPM_PIECES, ("az", -4.0, 1), ("bc", -2.0, 1), ("ca", -2.0, 1)]  # z is not a piece; ab, bc and ca tie
    columns = (("tokens", "s", 0), ("scores", "f", 1), ("token_type", "i", 2))
    tokenizer = from_gguf(
        spm_gguf(**{name: ("[", kind, [piece[at] for piece in pieces]) for name, kind, at in columns})
    )
    oracle = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_file(pieces, field(35, 1)))
    rng = random.Random(11)
    for _ in range(300):
        text = "".join(rng.choice("abcz  ") for _ in range(rng.randrange(12)))
        assert tokenizer.encode(text) == oracle.encode(text), text
    assert tokenizer.encode("ab</s>ab", parse_special=True) == [261, 2, 261]


def test_gguf_sentencepiece_tokenizer_is_read() -> None:
    tokenizer = from_gguf(spm_gguf())
    assert tokenizer.encode("abc<|end|> a", add_special=True, parse_special=True) == [1, 261, 265, 266, 262, 259]
    assert tokenizer.special == SpecialTokens(1, True, False, 2, (2, 266))
    assert from_gguf(spm_gguf(add_space_prefix=False)).encode("abc") == [260, 265]
    phi = from_gguf([*spm_gguf(), ("general.name", "Phi-3 mini")])
    assert phi.encode("<|end|> \na", parse_special=True) == [266, 259]  # its tokens absorb the white space after them
    with pytest.raises(TokenizerError, match=r"'tokenizer\.ggml\.scores' is missing"):
        from_gguf(spm_gguf(scores=None))
    with pytest.raises(UnsupportedError, match="remove_extra_whitespaces"):
        from_gguf(spm_gguf(remove_extra_whitespaces=True))


def test_gguf_user_defined_pieces_of_spaces_are_found() -> None:
    pieces = [*dict(spm_gguf())["tokenizer.ggml.tokens"][2], "▁▁", "▁▁▁"]
    scores = [*dict(spm_gguf())["tokenizer.ggml.scores"][2], 0.0, 0.0]
    types = [*dict(spm_gguf())["tokenizer.ggml.token_type"][2], 4, 4]
    changes = {"tokens": ("[", "s", pieces), "scores": ("[", "f", scores), "token_type": ("[", "i", types)}
    tokenizer = from_gguf(spm_gguf(**changes, add_space_prefix=False))
    two, three = tokenizer.id_of("▁▁"), tokenizer.id_of("▁▁▁")
    assert tokenizer.encode("a   a  a") == [
        tokenizer.id_of("a"),
        three,
        tokenizer.id_of("a"),
        two,
        tokenizer.id_of("a"),
    ]
    assert tokenizer.decode(tokenizer.encode("a   a  a")) == "a   a  a"


def test_gguf_raw_bpe_tokenizer_is_read() -> None:
    tokenizer = from_gguf(raw_bpe_gguf())
    ids = {text: tokenizer.id_of(text) for text in ("▁hell", "\n\n\n", "\n\n", "\n", "▁▁", "a", "<0xC3>", "<0xA9>")}
    assert tokenizer.encode(" hell") == [ids["▁hell"]]
    # words do not cross line breaks
    assert tokenizer.encode("a\n\n\n  é") == [*map(ids.get, ("a", "\n\n\n", "▁▁", "<0xC3>", "<0xA9>"))]
    assert tokenizer.decode(tokenizer.encode(" hell\n\n é")) == " hell\n\n é"
    assert tokenizer.special == SpecialTokens(0, True, False, None, (1,))
    assert tokenizer.encode("<turn|>") != tokenizer.encode("<turn|>", parse_special=True) == [1]
    no_more = from_gguf(raw_bpe_gguf("sarvam-moe"))
    assert not no_more.special.add_bos


@pytest.mark.parametrize(
    ("names", "stops"),
    [
        (["<eos>", "<|tool_call>", "<|tool_response>"], ["<eos>", "<|tool_response>"]),  # Gemma 4, after a call
        (["<|start|>", "<|end|>", "<|return|>", "<|call|>"], ["<|return|>", "<|call|>"]),  # gpt-oss
        (["<|user|>", "<|end|>", "<|endoftext|>"], ["<|end|>", "<|endoftext|>"]),  # Phi
    ],
)
def test_gguf_tokens_that_end_an_answer_are_known_by_name(names: list[str], stops: list[str]) -> None:
    values = dict(raw_bpe_gguf())
    tokens, types = (values[f"tokenizer.ggml.{key}"][2] for key in ("tokens", "token_type"))
    more: dict[str, Any] = {
        "tokens": ("[", "s", [*tokens, *names]),
        "token_type": ("[", "i", [*types, *[3] * len(names)]),
    }
    tokenizer = from_gguf(raw_bpe_gguf(**more))
    assert [tokenizer.token_bytes(token).decode() for token in tokenizer.special.stop_ids] == ["<turn|>", *stops]


def test_gguf_word_piece_tokenizer_is_read() -> None:
    tokenizer = from_gguf(word_piece_gguf())
    assert tokenizer.kind == "wpm"
    assert tokenizer.encode("Unaffable, AB! é日x", add_special=True) == [2, 4, 5, 6, 10, 7, 8, 9, 11, 12, 1, 3]
    assert tokenizer.decode([2, 4, 5, 6, 10, 7, 8, 9, 11, 3]) == "unaffable, ab! e"
    assert tokenizer.decode([2, 4], skip_special=False) == "[CLS] un"
    cased = from_gguf(word_piece_gguf(**{"normalizer.lowercase": False}))
    assert cased.encode("A a é") == [1, 7, 1]
    bare = from_gguf(word_piece_gguf(add_bos_token=False, add_eos_token=False))
    assert bare.encode("un", add_special=True) == [4]


def test_gguf_unigram_tokenizer_is_read() -> None:
    tokenizer = from_gguf(unigram_gguf())
    assert tokenizer.kind == "spm"
    assert tokenizer.special == SpecialTokens(None, False, True, 1, (1,))
    assert tokenizer.encode(" ab  aab ", add_special=True) == [3, 6, 7, 6, 1]
    assert tokenizer.decode([3, 6, 7, 6, 1]) == "ab aab"
    assert tokenizer.encode("a<extra_id_0>b") == [7, 13, 3, 5]
    assert tokenizer.encode("</s>", parse_special=True) == [1]
    assert tokenizer.encode("</s>") == [3, 2, 11, 9, 10]
    assert tokenizer.encode("[PAD12]") == [3, 2]
    with_bos = from_gguf(unigram_gguf(bos_token_id=0, add_bos_token=True, add_eos_token=False))
    assert with_bos.encode("a", add_special=True) == [0, 7]
    spaces = from_gguf(unigram_gguf(remove_extra_whitespaces=False))
    assert spaces.encode(" a  b") == [3, 7, 3, 3, 5]
    for wrong in ({"escape_whitespaces": False}, {"treat_whitespace_as_suffix": True}):
        with pytest.raises(UnsupportedError, match=r"tokenizer\.ggml"):
            from_gguf(unigram_gguf(**wrong))
    with pytest.raises(TokenizerError, match="not an array of bytes"):
        from_gguf(unigram_gguf(precompiled_charsmap=("[", "i", [300])))


def test_gguf_unigram_matches_sentencepiece() -> None:
    import sentencepiece

    rng = random.Random(8)
    words = ["".join(rng.choice("abcdeéñ中文ﬁ①жщ가") for _ in range(rng.randint(1, 6))) for _ in range(300)]
    lines = [" ".join(rng.choice(words) for _ in range(12)) for _ in range(300)]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=400, hard_vocab_limit=False, minloglevel=2
    )
    oracle = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    parsed = read_model(model.getvalue())
    charsmap = [byte - 256 if byte > 127 else byte for byte in parsed.precompiled_charsmap]
    tokenizer = from_gguf(
        unigram_gguf(
            tokens=("[", "s", [piece.text for piece in parsed.pieces]),
            scores=("[", "f", [piece.score for piece in parsed.pieces]),
            token_type=("[", "i", [piece.type for piece in parsed.pieces]),
            precompiled_charsmap=("[", "b", charsmap),
        )
    )
    for _ in range(500):
        text = "".join(rng.choice([*words, " ", "  ", "\u3000"]) for _ in range(rng.randrange(10)))
        ids, theirs = tokenizer.encode(text), oracle.encode(text)
        sums = [sum(oracle.get_score(index) for index in found) for found in (ids, theirs)]
        # the two libraries may choose differently between segmentations with the same score
        assert ids == theirs or sums[0] == pytest.approx(sums[1], abs=1e-4), text


@pytest.mark.parametrize("regex", LINEAR)
def test_linear_regular_expressions_split_like_the_originals(regex: str, tmp_path: Path) -> None:
    from tokenizers import Regex, pre_tokenizers

    cut, quickly = (pre_tokenizers.Split(Regex(one), "isolated") for one in (regex, LINEAR[regex]))
    rng = random.Random(9)
    for _ in range(3000):
        often = "0123456789" if "d" in regex or "N" in regex else " \n\u2581"
        text = "".join(rng.choice(often) if rng.random() < 0.75 else rng.choice(NASTY) for _ in range(14))
        assert cut.pre_tokenize_str(text) == quickly.pre_tokenize_str(text)
    expected = (66_667, 66_668) if "d" in regex or "N" in regex else (1,)
    assert len(quickly.pre_tokenize_str("1" * 200_000 + "!")) in expected
    for char in " \u2581":  # quadratic time would take days
        assert len(quickly.pre_tokenize_str(char * 1_000_000 + "!")) <= 2
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    write_json(tmp_path, tokenizer=tokenizer_json(pre_tokenizer=split))
    assert json.dumps(LINEAR[regex], ensure_ascii=False).encode() in Tokenizer.from_file(tmp_path).json


# The engines disagree about which numbers are part of a word, so regular expressions with \b are left out here.
WITHOUT_WORDS = {rules: name for name, rules in PRE_TOKENIZERS.items() if not any(r"\b" in cut for cut in rules.splits)}


@pytest.mark.parametrize("name", sorted(WITHOUT_WORDS.values()))
def test_gguf_pre_tokenizers_split_like_another_engine(name: str) -> None:
    """Compares the library's regular expressions with the package `regex` on characters of all categories."""
    regex = pytest.importorskip("regex")
    rules = PRE_TOKENIZERS[name]
    splits = [re.sub(r"\\x\{(\w+)\}", _escape, split) for split in rules.splits]
    patterns = [regex.compile(split, regex.V1) for split in splits]
    tokenizer = from_gguf(raw_bpe_gguf(name) if rules.raw else byte_level_gguf(name))
    library = build_library(parse_document(tokenizer.json, name))
    for text in category_texts(150):
        words = [text]
        for pattern in patterns:
            words = [part for word in words for part in _cut(pattern, word)]
        spelled = library.pre_tokenizer.pre_tokenize_str(text)
        assert [text[begin:end] for _, (begin, end) in spelled] == words, text


def _escape(code: re.Match[str]) -> str:
    return f"\\U{int(code[1], 16):08X}"


def _cut(pattern: Any, text: str) -> list[str]:
    """The matches of a regular expression and the texts between them, without empty ones."""
    edges = [edge for match in pattern.finditer(text) for edge in match.span()]
    return [text[begin:end] for begin, end in itertools.pairwise([0, *edges, len(text)]) if begin < end]
