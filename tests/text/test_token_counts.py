"""Lower bounds of token counts, and encoding with a limit."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vocab_samples import (
    ALPHABET,
    RUNS,
    SPM_PIECES,
    byte_level_gguf,
    category_texts,
    from_gguf,
    raw_bpe_gguf,
    spm,
    spm_gguf,
    tokenizer_json,
    unigram_gguf,
    vectors,
    word_piece_gguf,
    write_json,
)

from llamac.errors import ArgumentError, ContextFullError
from llamac.text.tokenizer import Tokenizer

STRIPS = {"id": 259, "content": "<x>", "special": False, "single_word": False, "normalized": False}


def from_document(folder: Path, **changes: Any) -> Tokenizer:
    return Tokenizer.from_file(write_json(folder, tokenizer=tokenizer_json(**changes)))


KINDS: dict[str, tuple[bool, Callable[[Path], Tokenizer]]] = {
    # (whether a bound is known, a function that makes the tokenizer)
    "byte level": (True, lambda _: from_gguf(byte_level_gguf())),
    "composing": (True, lambda _: from_gguf(byte_level_gguf("qwen2"))),
    "raw": (True, lambda _: from_gguf(raw_bpe_gguf())),
    "spm": (True, lambda _: from_gguf(spm_gguf())),
    "phi-3": (True, lambda _: from_gguf([*spm_gguf(), ("general.name", "Phi-3 mini")])),
    "lstrip": (True, lambda folder: from_document(folder, added_tokens=[STRIPS | {"lstrip": True, "rstrip": True}])),
    "unigram": (False, lambda _: from_gguf(unigram_gguf())),
    "word piece": (False, lambda _: from_gguf(word_piece_gguf())),
    "sentencepiece": (False, lambda folder: spm(folder, [*SPM_PIECES, ("az", -4.0, 1)])),
    "drops spaces": (False, lambda folder: from_document(folder, pre_tokenizer={"type": "WhitespaceSplit"})),
    "drops": (False, lambda folder: from_document(folder, normalizer={"type": "StripAccents"})),
    "shortens": (
        False,
        lambda folder: from_document(
            folder, normalizer={"type": "Replace", "pattern": {"String": "ab"}, "content": "c"}
        ),
    ),
    "unknown characters": (
        False,
        lambda folder: from_document(
            folder, model={"type": "BPE", "vocab": {"a": 0}, "merges": []}, added_tokens=[], post_processor=None
        ),
    ),
}


def texts() -> list[str]:
    rng = random.Random(20)
    made = ["", " ", "  ", "a" * 500, " " * 500, "<x>" + " " * 300, "e\u0301" * 100, "\u1100\u1161\u11a8" * 100]
    made += ["<|end|>" * 50, "<|end|>   " * 50, "日本" * 100, "ab" * 200, "\ufdfa" * 20]
    for _ in range(100):
        made.append("".join(rng.choice(RUNS) * rng.choice((1, 2, 16, 40)) for _ in range(5)))
        made.append("".join(rng.choice(ALPHABET) for _ in range(30)))
    return made + category_texts(100)


@pytest.mark.parametrize("kind", KINDS)
def test_the_lower_bound_never_exceeds_the_token_count(kind: str, tmp_path: Path) -> None:
    known, make = KINDS[kind]
    tokenizer = make(tmp_path)
    for text in texts():
        for parse_special in (False, True):
            assert tokenizer.min_tokens(text) <= len(tokenizer.encode(text, parse_special=parse_special)), text
    assert (tokenizer.min_tokens("x" * 10**6) > 1000) is known


@pytest.mark.parametrize("name", ["llama-spm", "llama-bpe", "gpt-2", "phi-3"])
def test_the_lower_bound_holds_for_real_tokenizers(data_dir: Path, name: str) -> None:
    tokenizer = Tokenizer.from_file(data_dir / "tokenizers" / f"ggml-vocab-{name}.gguf")
    for text, ids in vectors(data_dir, name):
        assert tokenizer.min_tokens(text) <= len(ids)
    assert tokenizer.min_tokens("word " * 10**6) > 10**4


def test_a_limit_refuses_long_texts_without_encoding_them(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = from_gguf(byte_level_gguf())
    assert tokenizer.encode("hello", limit=2) == tokenizer.encode("hello")
    with pytest.raises(ContextFullError, match="the text has 2 tokens, the limit is 1"):
        tokenizer.encode("hello", limit=1)
    assert tokenizer.encode("", limit=0) == []
    monkeypatch.setattr(tokenizer._loaded.encoder, "encode", lambda *_: pytest.fail("encoded"))
    longest = len("[PAD265]")
    with pytest.raises(ContextFullError, match="the text has at least 101 tokens, the limit is 100"):
        tokenizer.encode("x" * (100 * longest + 1), limit=100)


def test_a_limit_counts_bos_and_eos() -> None:
    tokenizer = from_gguf(spm_gguf())
    assert tokenizer.encode("ab", add_special=True, limit=2) == [1, 261]
    with pytest.raises(ContextFullError, match="2 tokens, the limit is 1"):
        tokenizer.encode("ab", add_special=True, limit=1)


@pytest.mark.parametrize("limit", [-1, 1.5, "1", True])
def test_a_limit_must_be_a_whole_number(limit: Any) -> None:
    with pytest.raises(ArgumentError, match="limit"):
        from_gguf(spm_gguf()).encode("ab", limit=limit)
