"""Tokenizers that attack the encoding process: by time, memory or the number of tokens."""

from __future__ import annotations

import array
import gc
import itertools
import json
import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vocab_samples import (
    NASTY,
    NO_SPECIAL,
    byte_level_gguf,
    from_gguf,
    gguf_file,
    llama2c_file,
    spm_gguf,
    tokenizer_json,
    unigram_gguf,
    word_piece_gguf,
    write_json,
)

from llamac.errors import TokenizerError
from llamac.format.gguf_metadata import parse_metadata
from llamac.text import encode_worker, isolated_encoder
from llamac.text import tokenizer_json as limits
from llamac.text.encoding_cost import cost_problem
from llamac.text.isolated_encoder import IsolatedEncoder
from llamac.text.regex_cost import Char, Group, Part, Repeat, UnprovenError, parse, regex_problem
from llamac.text.tokenizer import Tokenizer
from llamac.text.vocabulary.pre_tokenizers import LINEAR, PRE_TOKENIZERS, PROVEN_BY_HAND

SLOW = r"(?:a|a){21}[^a]\d"
REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 2000}
GROWS = {"type": "Sequence", "normalizers": [REPLACE] * 3}


def split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def tokenizer(**changes: Any) -> Tokenizer:
    return Tokenizer.from_json(json.dumps(tokenizer_json(post_processor=None, **changes)), NO_SPECIAL)


# ---- time and memory


@pytest.mark.parametrize("length", [1000, 30_000])
def test_a_slow_regular_expression_is_stopped(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated_encoder, "SECONDS", 0.5)
    hostile = tokenizer(pre_tokenizer=split(SLOW))
    with pytest.raises(TokenizerError, match=r"the tokenizer took more than .* seconds: it was stopped"):
        hostile.encode("a" * length)
    with pytest.raises(TokenizerError, match="was stopped"):  # a new process
        hostile.encode("a" * length)
    assert hostile.decode(hostile.encode("b")) == "b"


def test_ctrl_c_stops_a_slow_regular_expression() -> None:
    hostile = tokenizer(pre_tokenizer=split(SLOW))
    hostile.encode("b")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore SIGINT in background jobs
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            hostile.encode("a" * 1000)
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_run_during_a_slow_regular_expression(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated_encoder, "SECONDS", 1.0)
    hostile = tokenizer(pre_tokenizer=split(SLOW))
    done: list[BaseException] = []

    def encode() -> None:
        try:
            hostile.encode("a" * 1000)
        except TokenizerError as error:
            done.append(error)

    thread = threading.Thread(target=encode)
    thread.start()
    wakeups = 0
    while thread.is_alive():
        thread.join(0.01)
        wakeups += 1
    assert len(done) == 1
    assert wakeups > 10


def test_a_growing_normalizer_is_stopped() -> None:
    hostile = tokenizer(normalizer=GROWS)
    with pytest.raises(TokenizerError, match=r"needs too much memory|was stopped"):
        hostile.encode("a")
    assert hostile.decode(hostile.encode("b")) == "b"


def test_added_tokens_are_not_normalized_in_this_process() -> None:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}
    hostile = tokenizer(normalizer=GROWS, added_tokens=[{"id": 259, "content": "a", **flags}])
    assert hostile.n_ids == 259
    with pytest.raises(TokenizerError, match=r"needs too much memory|was stopped"):
        hostile.encode("b")


def test_a_long_unigram_piece_does_not_overflow_the_stack() -> None:
    model = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["x" * 1_300_000, -1.0]]}
    hostile = tokenizer(model=model, added_tokens=[], pre_tokenizer=None, decoder={"type": "Fuse"})
    assert hostile.encode("x") == [0]
    assert hostile.n_ids == 2
    del hostile
    gc.collect()


ISOLATED: dict[str, dict[str, Any]] = {
    "an expression": {"pre_tokenizer": split(SLOW)},
    "an expression in a normalizer": {
        "normalizer": {"type": "Replace", "pattern": {"Regex": "(a+)+b"}, "content": "x"}
    },
    "growth": {"normalizer": GROWS},
    "a long prefix": {"normalizer": {"type": "Prepend", "prepend": "x" * 1000}},
    "an unknown step": {"pre_tokenizer": {"type": "Unheard"}},
    "a step without a type": {"pre_tokenizer": {"pretokenizers": [split(SLOW)]}},
    "a step that hides": {
        "pre_tokenizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}], "pretokenizers": [split(SLOW)]}
    },
    "many steps": {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 65}},
    "a long unknown token": {"model": {**tokenizer_json()["model"], "unk_token": "x" * 1000}},
    "long words": {"model": {"type": "WordPiece", "vocab": {"a": 0}, "max_input_chars_per_word": 10**9}},
    "long pieces": {"model": {"type": "Unigram", "vocab": [["a" * 129, 0.0]]}},
    "many bytes of pieces": {"model": {"type": "Unigram", "vocab": [["\u20ac" * 128, 0.0]] * 50_000}},
}


@pytest.mark.parametrize("name", ISOLATED)
def test_tokenizers_not_proven_linear_are_isolated(name: str) -> None:
    assert cost_problem(tokenizer_json(**ISOLATED[name]))


def test_known_tokenizers_are_not_isolated() -> None:
    for name, rules in PRE_TOKENIZERS.items():
        if not rules.raw:
            assert cost_problem(json.loads(from_gguf(byte_level_gguf(name)).json)) == "", name
    for made in (spm_gguf(), unigram_gguf(), word_piece_gguf()):
        assert cost_problem(json.loads(from_gguf(made).json)) == ""


def test_an_isolated_tokenizer_encodes_as_the_library_does() -> None:
    ours = tokenizer(pre_tokenizer={"type": "Sequence", "pretokenizers": [split(r"a*b"), BYTES]})
    assert isinstance(ours._loaded.encoder, IsolatedEncoder)
    import tokenizers

    theirs = tokenizers.Tokenizer.from_str(ours.json.decode())
    theirs.no_truncation()
    rng = random.Random(3)
    for _ in range(300):
        text = "".join(rng.choice([*NASTY, "a", "b", "he", "<s>"]) for _ in range(rng.randrange(12)))
        assert ours.encode(text, parse_special=True) == theirs.encode(text, add_special_tokens=False).ids
    assert ours.encode("<s>") != [256] == ours.encode("<s>", parse_special=True)
    assert ours.id_of("<s>") == 256


@pytest.mark.parametrize("answer", [b"+abc", b"?", b"x+"])
def test_a_malformed_answer_of_the_process_is_an_error(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = tokenizer(pre_tokenizer=split(SLOW))._loaded.encoder
    assert isinstance(encoder, IsolatedEncoder)
    monkeypatch.setattr(encoder._worker, "ask", lambda *_: answer)
    with pytest.raises(TokenizerError, match="the process of the tokenizer sent a malformed answer"):
        encoder.encode("a", False)


@pytest.mark.parametrize(
    ("changes", "answer"),
    [
        ({}, b"+" + array.array("I", [39, 256, 72]).tobytes()),
        ({"pre_tokenizer": {"type": "Unheard"}}, b"tit cannot be used: "),
        (
            {"model": {"type": "Unheard", "vocab": {}}},
            b"uit cannot be used: a Unheard tokenizer is not supported, only",
        ),
    ],
)
def test_the_process_answers_with_ids_or_the_error(changes: dict[str, Any], answer: bytes) -> None:
    """In this process: a debugger and coverage do not see the other."""
    ask = encode_worker.prepare("sentencepiece")
    assert ask(("encode", b"a", True)) == b""  # asks for the tokenizer
    document = json.dumps(tokenizer_json(**changes)).encode()
    loaded = ask(("load", document, [256]))
    if loaded == b"+":
        assert ask(("encode", b"H<s>i", True)) == answer
        assert ask(("encode", b"<s>", False)) != b"+" + array.array("I", [256]).tobytes()
        assert ask(("spans", b"H<s>i", True)) == b"+" + array.array("I", [1, 4]).tobytes()
        assert ask(("encode", b"\xff", True)).startswith(b"tit cannot encode this text: ")
    else:
        assert loaded.startswith(answer)


def test_pieces_with_the_same_text_are_refused() -> None:
    document = tokenizer_json(model={"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0], ["a", 0.0]]})
    with pytest.raises(TokenizerError, match="two tokens have the same text"):
        IsolatedEncoder(document, b"", set())


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


# ---- numbers of tokens

FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def test_many_special_tokens_are_found_in_linear_time() -> None:
    added = [{"id": 259 + index, "content": f"<|{index}|>", **FLAGS} for index in range(100_000)]
    many = tokenizer(added_tokens=added)
    assert many.encode("<|5|>a<|99999|>" * 1000, parse_special=True)[::3] == [264] * 1000
    assert 264 not in many.encode("<|5|>a<|99999|>" * 1000)


@pytest.mark.parametrize("where", ["tokenizer", "tokenizer_config", "added_tokens"])
def test_too_many_added_tokens_are_refused(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_ADDED_TOKENS", 1000)
    names = {f"<|{index}|>": 259 + index for index in range(1001)}
    added = [{"id": index, "content": name, **FLAGS} for name, index in names.items()]
    files: dict[str, dict[str, Any]] = {
        "tokenizer": {"tokenizer": tokenizer_json(added_tokens=added)},
        "tokenizer_config": {
            "tokenizer_config": {"added_tokens_decoder": {str(entry["id"]): entry for entry in added}}
        },
        "added_tokens": {"added_tokens": names},
    }
    write_json(tmp_path, **{"tokenizer": tokenizer_json(), **files[where]})
    with pytest.raises(TokenizerError, match="there are 1001 added tokens, the limit is 1000"):
        Tokenizer.from_file(tmp_path)


def test_the_limits_apply_to_tokenizers_in_model_files() -> None:
    added = [{"id": 259 + index, "content": f"<|{index}|>", **FLAGS} for index in range(500_000)]
    with pytest.raises(TokenizerError, match="there are 500000 added tokens, the limit is 131072"):
        tokenizer(added_tokens=added).encode("a")
    too_long = {"id": 259, "content": "x" * (limits.MAX_ADDED_CHARACTERS + 1), **FLAGS}
    with pytest.raises(TokenizerError, match="the added tokens have more than 2097152 characters"):
        tokenizer(added_tokens=[too_long]).encode("a")


def test_vocabularies_of_millions_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TokenizerError, match="has more than 8388608 values"):
        limits.parse_document(b'{"a":[' + b"0," * 10_000_000 + b"0]}", "it")
    for module in ("tokenizer_json", "vocabulary.spm", "vocabulary.llama2c"):
        monkeypatch.setattr(f"llamac.text.{module}.MAX_TOKENS", 200)
    with pytest.raises(TokenizerError, match="the vocabulary has 259 tokens, the limit is 200"):
        tokenizer().encode("a")
    (tmp_path / "tokenizer.bin").write_bytes(llama2c_file())
    with pytest.raises(TokenizerError, match="more than 200 tokens"):
        Tokenizer.from_file(tmp_path)
    from vocab_samples import SPM_PIECES, sentencepiece_file

    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_file(SPM_PIECES))
    with pytest.raises(TokenizerError, match="more than 200 pieces"):
        Tokenizer.from_file(tmp_path)
    assert parse_metadata(gguf_file(spm_gguf())).values
    with pytest.raises(TokenizerError, match=r"the vocabulary has \d+ tokens, the limit is 200"):
        from_gguf(spm_gguf())


# ---- regular expressions

HOSTILE = [SLOW, "(a+)+b", "(a|a)*b", "a*a*b", "a+b", r"\s+$", r"\d+x", "(?:.?){100}Z", "(.*)*" * 12 + "Z", "x*(?=y)"]
HOSTILE += [r"\s*[\r\n]+|\s|\s+", "(?=(\\d{3})+(?!\\d))", r"(a)\1", "a{1000,}", "a*?b", "(?:a{1,30}){1,30}b", r"\X"]
HOSTILE += ["(?<n>a)+", "[a", "a**", "(?:a{9}){9}(?:a?){9}", "x{2,3}+", "(" * 30 + "a" + ")" * 30, "a" * 20_000]


@pytest.mark.parametrize("regex", HOSTILE, ids=lambda regex: regex[:20])
def test_hostile_regular_expressions_are_refused(regex: str) -> None:
    assert regex_problem(regex)


def test_regular_expressions_of_known_models_are_accepted() -> None:
    known = {LINEAR.get(cut, cut) for rules in PRE_TOKENIZERS.values() for cut in rules.splits}
    cl100k = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|"
    known |= {cl100k + r"\s*[\r\n]|\s+(?!\S)|\s+", cl100k + r"\s++$|\s*[\r\n]|\s+(?!\S)|\s", " {2,}", r"\s+", r"\A +"}
    for regex in known - PROVEN_BY_HAND:
        assert regex_problem(regex) == ""


class Counter:
    """A backtracking matcher that counts its steps."""

    def __init__(self, text: str) -> None:
        self.text, self.steps = text, 0

    def search_all(self, group: Group) -> None:
        at = 0
        while at < len(self.text):
            end = self.group(group, at, lambda end: end)
            at = end if end is not None and end > at else at + 1

    def group(self, group: Group, at: int, then: Callable[[int], int | None]) -> int | None:
        for branch in group.branches:
            end = self.sequence(branch, at, then)
            if end is not None:
                return end
        return None

    def sequence(self, parts: tuple[Part, ...], at: int, then: Callable[[int], int | None]) -> int | None:
        self.steps += 1
        if not parts:
            return then(at)
        part, rest = parts[0], parts[1:]
        if isinstance(part, Char):
            return self.sequence(rest, at + 1, then) if self.text[at : at + 1] in set(part.text) - {"", *"[]"} else None
        if isinstance(part, Group):
            return self.group(part, at, lambda end: self.sequence(rest, end, then))
        assert isinstance(part, Repeat)
        assert isinstance(part.part, Char | Group)
        if isinstance(part.part, Char):  # no recursion, because runs are long
            ends = [at]
            while part.most is None or len(ends) <= part.most:
                self.steps += 1
                if self.text[ends[-1] : ends[-1] + 1] not in set(part.part.text) - {"", *"[]"}:
                    break
                ends.append(ends[-1] + 1)
            for end in reversed(ends[part.least :]):
                found = self.sequence(rest, end, then)
                if found is not None:
                    return found
            return None
        if part.most != 0:
            once = Repeat(part.part, max(0, part.least - 1), None if part.most is None else part.most - 1)
            after = self.sequence((part.part, once, *rest), at, then)
            if after is not None:
                return after
        return None if part.least else self.sequence(rest, at, then)


def random_expression(rng: random.Random, depth: int = 0) -> str:
    def part() -> str:
        inner = rng.choice(["a", "b", "[ab]", "c", "[bc]"])
        if depth < 2 and rng.random() < 0.25:
            inner = f"(?:{random_expression(rng, depth + 1)})"
        return inner + rng.choice(["", "", "?", "*", "+", "{1,3}", "{2}"])

    return "|".join("".join(part() for _ in range(rng.randint(1, 3))) for _ in range(rng.randint(1, 3)))


def test_accepted_regular_expressions_take_linear_time() -> None:
    rng = random.Random(7)
    accepted = 0
    for _ in range(150):
        regex = random_expression(rng)
        if regex_problem(regex):
            continue
        accepted += 1
        group = parse(regex)
        for first, second in itertools.product("abc", repeat=2):
            for text in (first * 200 + second, (first + second) * 100, first + second * 200):
                counter = Counter(text)
                counter.search_all(group)
                assert counter.steps < 150 * len(text), (regex, text)
    assert accepted > 10


def test_the_step_counter_detects_quadratic_time() -> None:
    for regex, size, steps in (("a+b", 300, 100), ("a*a*b", 100, 150), ("(?:a|a){9}b", 100, 150)):
        counter = Counter("a" * size)
        counter.search_all(parse(regex))
        assert counter.steps > steps * size
    with pytest.raises(UnprovenError):
        parse("(?<n>a)")
