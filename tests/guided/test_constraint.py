"""The masks of a constraint against an independent definition; forced tokens; completions; reasoning."""

from __future__ import annotations

import gc
import json
import random
import signal
import threading
import weakref
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from answer_tokens import EOS, MARKS, vocabulary

import llamac
from llamac import ArgumentError, UnsupportedError
from llamac.guided import constraint as module
from llamac.guided import guides
from llamac.guided.constraint import Constraint
from llamac.guided.guides import Guide
from llamac.guided.vocabulary import _Adapter, vocabulary_of
from llamac.text.special_tokens import SpecialTokens
from llamac.text.tokenizer import Tokenizer

regex: Any = pytest.importorskip("regex", reason="regex is not installed (extra: test)")

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "ages": {"type": "array", "items": {"type": "integer"}, "minItems": 1}},
    "required": ["name", "ages"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=["stories", "stories-gpt2"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """SentencePiece with byte fallback, which puts a space before a text; byte-level BPE."""
    with llamac.load(request.param) as model:
        return model.tokenizer


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    with llamac.load("stories-gpt2") as model:
        return model.tokenizer


def allowed(constraint: Constraint, tokenizer: Tokenizer) -> list[int]:
    """The tokens of a mask."""
    mask = constraint.mask()
    assert mask is not None
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    assert not bits[tokenizer.n_ids :].any()
    return [int(token) for token in np.flatnonzero(bits)]


def generated(constraint: Constraint, tokenizer: Tokenizer, seed: int, most: int) -> tuple[list[int], bool]:
    """Random tokens that the masks allow, at most this many; and whether they match."""
    rng = random.Random(seed)
    tokens: list[int] = []
    while len(tokens) < most and not constraint.is_complete:
        token = constraint.forced()
        if token is None:
            token = constraint.within(rng.choice(allowed(constraint, tokenizer)), most - len(tokens))
            if token in stops(tokenizer):
                break
        constraint.accept(token)
        tokens.append(token)
    return tokens, constraint.is_accepting


def stops(tokenizer: Tokenizer) -> tuple[int, ...]:
    return tokenizer.special.stop_ids


def text_of(tokens: list[int], tokenizer: Tokenizer) -> bytes:
    return b"".join(map(tokenizer.token_bytes, tokens))


# ---- masks


@pytest.mark.parametrize("pattern", [r"[a-z]+, [a-z ]*(!|\?)", r"(the |a )*cat", r"\d{2,4}(é|è)*", r"x|xyz?"])
def test_masks_are_those_of_the_definition(pattern: str, tokenizer: Tokenizer) -> None:
    """A token may come next if the text with it is the beginning of a match. Undecodable bytes are left out."""
    stop = tokenizer.special.eos_id
    assert stop is not None
    for seed in range(3):
        constraint = Constraint(llamac.Regex(pattern), tokenizer, [stop], [])
        rng, text = random.Random(seed), b""
        for _ in range(8):
            if constraint.is_complete:
                break
            found = allowed(constraint, tokenizer)
            expected = set()
            for token in range(tokenizer.n_ids):
                data = b"" if token in tokenizer._loaded.texts.special else tokenizer.token_bytes(token)
                try:
                    longer = (text + data).decode()
                except UnicodeDecodeError:
                    found = [other for other in found if other != token]
                    continue
                if data and regex.fullmatch(pattern, longer, partial=True):
                    expected.add(token)
            if regex.fullmatch(pattern, text.decode()):
                expected.add(stop)
            if len(found) == 1 and len(expected) > 1:  # one text is left: the tokenizer divides it
                assert found[0] in expected
            else:
                assert set(found) == expected
            chosen = rng.choice([token for token in found if token != stop] or [stop])
            if chosen == stop:
                break
            constraint.accept(chosen)
            text += tokenizer.token_bytes(chosen)


def test_every_text_that_masks_allow_matches(tokenizer: Tokenizer) -> None:
    for seed in range(20):
        constraint = Constraint(llamac.Json(PERSON), tokenizer, stops(tokenizer), [])
        tokens, matches = generated(constraint, tokenizer, seed, 60)
        assert matches
        found = json.loads(text_of(tokens, tokenizer).decode())
        assert list(found) == ["name", "ages"]
        assert found["ages"]


@pytest.mark.parametrize(
    ("guide", "pattern"),
    [
        (llamac.Grammar('root ::= "(" root ")" | [a-c]'), r"(\((?R)\)|[a-c])"),
        (llamac.Grammar('start: "(" start ")" | /[a-c]/'), r"(\((?R)\)|[a-c])"),
        (llamac.Grammar(r'root ::= "\u00e9\x41\u0022\U0001F600\\u" [\u0436-\u043b\u005D\u002d]'), r'éA"😀\\u[ж-л\]-]'),
        (llamac.Choice(['say "yes"\n', "é\\", "yes", "yesterday"]), 'say "yes"\n|é\\\\|yes|yesterday'),
    ],
)
def test_grammars_and_choices(guide: Guide, pattern: str, tokenizer: Tokenizer) -> None:
    for seed in range(10):
        constraint = Constraint(guide, tokenizer, stops(tokenizer), [])
        tokens, matches = generated(constraint, tokenizer, seed, 12)
        assert matches
        assert regex.fullmatch(pattern, text_of(tokens, tokenizer).decode())


def test_masks_do_not_depend_on_how_often_they_are_asked_for(bpe: Tokenizer) -> None:
    for seed in range(3):
        asked, other = (Constraint(llamac.Json(PERSON), bpe, [0], []) for _ in range(2))
        tokens, _ = generated(asked, bpe, seed, 40)
        for token in tokens:
            assert other.is_accepting is False
            other.accept(token)
        assert other.mask() == asked.mask()


def test_special_tokens_never_come_next_but_stops_do(bpe: Tokenizer) -> None:
    constraint = Constraint(llamac.Regex(".*"), bpe, [], [])
    assert not set(allowed(constraint, bpe)) & set(bpe._loaded.texts.special)
    stop_ids = {0, *bpe.encode("!")}
    constraint = Constraint(llamac.Regex("(ab)*"), bpe, stop_ids, [])
    assert stop_ids <= set(allowed(constraint, bpe))
    constraint.accept(bpe.encode("a")[0])
    assert not stop_ids & set(allowed(constraint, bpe))


@pytest.mark.parametrize(
    ("limits", "inside", "outside"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0.1", "0.5", "0.001"], ["0", "0.0", "-0"]),
        ({"exclusiveMinimum": 2.0, "exclusiveMaximum": 2.5}, ["2.1", "2.0001"], ["2", "2.0", "2.5"]),
        ({"exclusiveMaximum": 0, "exclusiveMinimum": -0.001}, ["-0.0005"], ["0", "-0", "-0.001"]),
        ({"exclusiveMaximum": -2, "minimum": -2.5}, ["-2.5", "-2.1"], ["-2", "-2.0", "-2.6"]),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 1}, ["0.5"], ["0", "1"]),
        ({"exclusiveMinimum": 0, "minimum": 0.3, "maximum": 0.5}, ["0.3", "0.5"], ["0", "0.1", "0.6"]),
        ({"exclusiveMaximum": 0, "maximum": -0.3, "minimum": -0.5}, ["-0.3", "-0.5"], ["0", "-0.1", "-0.6"]),
        ({"exclusiveMinimum": 0.5, "minimum": 0, "maximum": 0.75}, ["0.51", "0.75"], ["0", "0.5"]),
        ({"exclusiveMinimum": 91, "maximum": 91.5}, ["91.1", "91.5"], ["91", "91.0"]),
        ({"minimum": 0.9452706955539223, "maximum": 1}, ["0.9452706955539224"], ["0.9452706955539222"]),
        ({"minimum": 0, "exclusiveMinimum": False, "maximum": 0.5}, ["0", "0.2", "0.5"], ["-0.1", "0.6"]),
        ({"minimum": 0, "exclusiveMinimum": True, "maximum": 1.5}, ["0.5", "1", "1.5"], ["0", "1.6"]),
        ({"minimum": 0, "exclusiveMinimum": True, "maximum": 0.5}, ["0.1", "0.5"], ["0", "0.0"]),
        ({"minimum": -0.5, "maximum": 0.5, "exclusiveMaximum": False}, ["-0.5", "0", "0.3", "0.5"], ["0.6"]),
    ],
)
@pytest.mark.parametrize("wrap", [lambda schema: schema, lambda schema: {"anyOf": [schema, {"type": "null"}]}])
def test_excluded_limits_do_not_match(
    wrap: Any, limits: dict[str, float], inside: list[str], outside: list[str], bpe: Tokenizer
) -> None:
    check_numbers(llamac.Json(wrap({"type": "number", **limits})), inside, outside, bpe)


@pytest.mark.parametrize(
    ("limits", "inside", "outside"),
    [
        ({"minimum": 10**15, "maximum": 10**16 - 1}, [10**15, 10**16 - 2], [10**15 - 1, 10**16 - 1, 10**16]),
        ({"minimum": 2**53 + 1, "maximum": 2**60}, [2**53 + 2, 2**60], [2**53, 2**53 + 1, 2**60 + 1]),
        ({"exclusiveMinimum": 2**53, "exclusiveMaximum": 2**54}, [2**53 + 2, 2**54 - 2], [2**53, 2**54 - 1, 2**54]),
        ({"minimum": -(10**16) + 1, "maximum": 0}, [-(10**16) + 2, 0], [-(10**16) + 1, -(10**16), 1]),
        ({"minimum": 0, "exclusiveMaximum": 1e17}, [10**17 - 16], [10**17 - 1, 10**17]),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 2**63 - 1}, [2**63 - 1024], [2**63 - 1, 2**63]),
        ({"minimum": -(2**63), "maximum": 2**63 - 1}, [1024 - 2**63, 2**63 - 1], [-(2**63) - 1, 2**63]),
        ({"minimum": 0, "exclusiveMaximum": 2**63}, [2**63 - 1], [2**63]),
    ],
)
def test_limits_that_are_no_doubles_are_rounded_inward(
    limits: dict[str, float], inside: list[int], outside: list[int], bpe: Tokenizer
) -> None:
    check_numbers(llamac.Json({"type": "integer", **limits}), list(map(str, inside)), list(map(str, outside)), bpe)


def check_numbers(guide: Guide, inside: list[str], outside: list[str], bpe: Tokenizer) -> None:
    for text in (*inside, *outside):
        constraint = Constraint(guide, bpe, [], [])
        for token in bpe.encode(text):
            if token not in allowed(constraint, bpe):
                break
            constraint.accept(token)
        else:
            assert constraint.is_accepting == (text in inside), text
            continue
        assert text in outside, text


# ---- forced tokens


def test_forced_tokens_are_the_only_ones_in_their_masks(tokenizer: Tokenizer) -> None:
    guides = [llamac.Json(PERSON), llamac.Regex(r"Once upon a time, [a-z]+ was \d\."), llamac.Choice(["no way", "yes"])]
    forced = 0
    for guide in guides:
        for seed in range(4):
            free = Constraint(guide, tokenizer, stops(tokenizer), [], may_force=False)
            forcing = Constraint(guide, tokenizer, stops(tokenizer), [])
            rng = random.Random(seed)
            while not free.is_complete:
                choices = allowed(free, tokenizer)
                if (only := forcing.forced()) is not None:
                    assert choices == [only]
                    forced += 1
                token = rng.choice(choices)
                if token in stops(tokenizer):
                    break
                free.accept(token)
                forcing.accept(token)
    assert forced > 50


def test_forced_text_is_divided_as_the_tokenizer_divides_it(bpe: Tokenizer) -> None:
    text = " Once upon a time there was a little girl."
    constraint = Constraint(llamac.Choice([text]), bpe, [0], [])
    tokens: list[int] = []
    while (token := constraint.forced()) is not None:
        constraint.accept(token)
        tokens.append(token)
    assert tokens == bpe.encode(text)
    assert constraint.is_complete


# ---- completing a text


@pytest.mark.parametrize(
    ("guide", "most"),
    [
        (llamac.Json(PERSON), 40),
        (llamac.Json(list[list[dict[str, str]]]), 25),
        (llamac.Json({"type": "string", "minLength": 5}), 12),
        (llamac.Json({"enum": ["first", "second", 3, None]}), 14),
        (llamac.Regex(r"[a-z]+\.[0-9]{3}"), 12),
        (llamac.Regex("([a-z ]+\n)+"), 12),
        (llamac.Grammar('root ::= "(" (root | [a-z]*) ")"'), 12),
        (llamac.Json({"type": "string", "format": "email"}), 10),
        (llamac.Json({"type": "string", "format": "uri"}), 10),
        (llamac.Json({"type": "string", "format": "date-time"}), 24),
        (llamac.Json({"enum": ["ñ", "日本"]}), 9),
        (llamac.Regex("[λ-φ]+(北京|上海)"), 16),
    ],
)
def test_texts_are_completed_before_the_limit(guide: Guide, most: int, tokenizer: Tokenizer) -> None:
    for seed in range(8):
        tokens, matches = generated(Constraint(guide, tokenizer, stops(tokenizer), []), tokenizer, seed, most)
        assert matches, text_of(tokens, tokenizer)


def test_what_cannot_be_completed_goes_on_to_the_limit(bpe: Tokenizer) -> None:
    tokens, matches = generated(Constraint(llamac.Regex("[a-z]{40}"), bpe, [0], []), bpe, 1, 5)
    assert (len(tokens), matches) == (5, False)


def test_where_no_completion_fits_each_state_is_searched_once(bpe: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[int] = []
    monkeypatch.setattr(Constraint, "_completion", lambda self, matcher, most: searched.append(most))
    constraint = Constraint(llamac.Regex("[a-z]{40}"), bpe, [0], [])
    constraint.mask()
    searched.clear()
    for left in (9, 8, 7):
        token = bpe.encode("a")[0]
        assert constraint.within(token, left) == token
        constraint.accept(token)
    assert searched == [8, 9, 7, 6]
    constraint.accept(bpe.encode("b")[0])
    assert constraint.within(token, 5) == token
    assert searched == [8, 9, 7, 6, 4, 5]


# ---- reasoning


@pytest.fixture(scope="module")
def thinking(bpe: Tokenizer) -> Tokenizer:
    """The tokenizer with tokens for the tags of reasoning."""
    document = json.loads(bpe.json)
    tags = [{"id": bpe.n_ids + i, "content": tag} for i, tag in enumerate(("<think>", "</think>"))]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    document["added_tokens"] += [{**tag, **flags} for tag in tags]
    return Tokenizer.from_json(json.dumps(document), bpe.special)


def test_reasoning_is_free_and_the_guide_begins_after_it(thinking: Tokenizer) -> None:
    opening, closing = thinking.id_of("<think>"), thinking.id_of("</think>")
    assert opening is not None
    assert closing is not None
    constraint = Constraint(llamac.Choice(["yes"]), thinking, [0], [])
    assert constraint.openings == [opening]
    assert opening not in allowed(constraint, thinking)
    assert constraint.forced() is None
    constraint.accept(opening)
    for token in thinking.encode(" Is it so? Yes."):
        assert constraint.is_free
        assert constraint.mask() is None
        assert constraint.within(token, 1) == token
        assert not constraint.is_complete
        constraint.accept(token)
    constraint.accept(closing)
    assert not constraint.is_free
    assert constraint.forced() == thinking.encode("yes")[0]
    while (only := constraint.forced()) is not None:
        constraint.accept(only)
    assert constraint.is_complete


@pytest.mark.parametrize(("end", "is_free"), [("<think>", True), ("<think>\n", True), ("<think></think>\n\n", False)])
def test_prompts_can_open_and_close_the_reasoning(end: str, is_free: bool, thinking: Tokenizer) -> None:
    prompt = thinking.encode(f"Is it so?{end}")
    constraint = Constraint(llamac.Choice(["yes"]), thinking, [0], prompt)
    assert constraint.is_free == is_free
    if not is_free:
        assert constraint.forced() is not None
    for token in thinking.encode("So it is.</think>") if is_free else []:
        constraint.accept(token)
    assert constraint.forced() == thinking.encode("yes")[0]


@pytest.mark.parametrize(
    ("form", "begin", "reasoning", "end"),
    [
        ("mistral", "[THINK]", "Is it so?", "[/THINK]"),
        ("gemma4", "<|channel>", "thought\nIs it so?", "<channel|>"),
        ("harmony", "<|channel|>", "final", "<|message|>"),
        ("harmony", "<|channel|>", "final <|constrain|>json", "<|message|>"),
        (
            "harmony",
            "<|channel|>",
            "analysis<|message|>Is it so?<|end|><|start|>assistant<|channel|>final",
            "<|message|>",
        ),
    ],
)
def test_reasoning_between_special_tokens_is_free(form: str, begin: str, reasoning: str, end: str) -> None:
    tokenizer = vocabulary((*MARKS[form], "[THINK]", "[/THINK]"))
    constraint = Constraint(llamac.Choice(["yes"]), tokenizer, [EOS], [])
    opening = tokenizer.id_of(begin)
    assert opening is not None
    is_head = form == "harmony"  # the token also begins the head of the answer
    assert (opening in allowed(constraint, tokenizer)) == is_head
    assert (opening in constraint.openings) == (not is_head)
    constraint.accept(opening)
    assert constraint.openings == []
    for token in tokenizer.encode(reasoning + end, parse_special=True):
        assert constraint.is_free
        constraint.accept(token)
    assert not constraint.is_free
    assert constraint.forced() == tokenizer.encode("yes")[0]


@pytest.mark.parametrize(
    ("form", "begin", "stop", "closing"),
    [
        ("hermes", "<think>", "</s>", "</think>"),
        ("gemma4", "<|channel>", "</s>", "<channel|>"),
        ("harmony", "<|channel|>", "<|return|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
    ],
)
def test_a_token_that_would_end_the_text_ends_the_reasoning(form: str, begin: str, stop: str, closing: str) -> None:
    tokenizer = vocabulary((*MARKS[form], "<think>", "</think>"))
    stops = [tokenizer.encode(name, parse_special=True)[0] for name in (stop, "<|call|>")]
    constraint = Constraint(llamac.Choice(["yes"]), tokenizer, stops, [])
    for token in tokenizer.encode(f"{begin}So", parse_special=True):
        constraint.accept(constraint.within(token, 99))
    other = constraint.fork()
    found = [constraint.within(stops[0], 99)]
    constraint.accept(found[0])
    while constraint.is_free:
        forced = constraint.forced()
        assert forced is not None
        found.append(forced)
        constraint.accept(forced)
    assert tokenizer.decode(found, skip_special=False) == closing
    assert constraint.forced() == tokenizer.encode("yes")[0]
    assert other.forced() is None
    if form == "harmony":  # it can have a call in place of the text
        assert other.within(stops[1], 99) == stops[1]


def test_reasoning_can_be_forbidden() -> None:
    tokenizer = vocabulary(("<think>", "</think>"))
    constraint = Constraint(llamac.Choice(["yes"]), tokenizer, [EOS], [], may_reason=False)
    assert constraint.forced() == tokenizer.encode("yes")[0]


def test_tags_that_are_no_tokens_begin_no_reasoning() -> None:
    constraint = Constraint(llamac.Choice(["yes"]), vocabulary(()), [EOS], [])
    assert constraint.forced() == vocabulary(()).encode("yes")[0]


def test_an_answer_without_reasoning_forbids_it_later(thinking: Tokenizer) -> None:
    opening = thinking.id_of("<think>")
    constraint = Constraint(llamac.Regex("(yes|no)+"), thinking, [0], [])
    constraint.accept(thinking.encode("n")[0])
    constraint.accept(thinking.encode("o")[0])
    assert opening not in allowed(constraint, thinking)


# ---- errors and life


def test_a_token_that_does_not_match_is_an_error(bpe: Tokenizer) -> None:
    constraint = Constraint(llamac.Regex("[0-9]+"), bpe, [0], [])
    with pytest.raises(ArgumentError, match="does not match the guide"):
        constraint.accept(bpe.encode("a")[0])


@pytest.mark.parametrize("guide", [llamac.Grammar("start: start"), llamac.Json({"$ref": "#"})])
def test_a_grammar_without_texts_is_an_error(bpe: Tokenizer, guide: Guide) -> None:
    with pytest.raises(ArgumentError, match=r"^no text matches the guide$"):
        Constraint(guide, bpe, [0], []).mask()


def test_text_that_is_forced_without_end_is_an_error_in_one_line(bpe: Tokenizer) -> None:
    constraint = Constraint(llamac.Regex("((a{100}){100}){100}"), bpe, [0], [])
    assert len(constraint._forced or []) < 50_000  # it is computed in one step, during which no other thread runs
    with pytest.raises(UnsupportedError, match=r"grammar is too complex or forces too long a text: [a-z: ]+$"):
        constraint.accept(bpe.encode("a")[0])


def test_a_large_grammar_compiles_although_its_forced_text_is_limited(bpe: Tokenizer) -> None:
    words = [f"{i * 2654435761 % 2**32:x}" for i in range(20_000)]
    for guide in (llamac.Choice(words), llamac.Regex("|".join(words[:2_000]))):
        constraint = Constraint(guide, bpe, [], [])
        text = b""
        while not constraint.is_complete:
            token = allowed(constraint, bpe)[-1]
            text += bpe.token_bytes(token)
            constraint.accept(token)
        assert text.decode() in words


def test_many_options_are_followed_as_few_are(bpe: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["a", "ab", 'abc"\n', "b"]
    by_rows = llamac.Choice(options)
    monkeypatch.setattr(guides, "MAX_ROWS", 1)
    assert llamac.Choice(options) != by_rows
    constraints = [Constraint(guide, bpe, [0], []) for guide in (by_rows, llamac.Choice(options))]
    for text in ("a", "b", "c"):
        few, many = (allowed(constraint, bpe) for constraint in constraints)
        assert few == many
        assert constraints[0].is_accepting == constraints[1].is_accepting
        for constraint in constraints:
            constraint.accept(bpe.encode(text)[0])


@pytest.mark.parametrize("most", [99, 12])
def test_ctrl_c_while_the_library_encodes_a_text_is_raised(
    most: int, bpe: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in the library's call of the tokenizer would become one of the library's, or end the text early."""
    guide = llamac.Json({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]})
    encode, at, calls = _Adapter.__call__, 0, 0

    def interrupted(self: _Adapter, text: str) -> list[int]:
        nonlocal calls
        calls += not threading.current_thread().name.startswith("llamac-guide")  # which prepare the next draw
        if calls == at:
            signal.raise_signal(signal.SIGINT)
        return encode(self, text)

    def run(interrupt_at: int) -> tuple[list[int], bool]:
        nonlocal at, calls
        at, calls = interrupt_at, 0
        return generated(Constraint(guide, bpe, stops(bpe), []), bpe, 1, most)

    vocabulary_of(bpe)  # calls it, too
    monkeypatch.setattr(_Adapter, "__call__", interrupted)
    wanted, n = run(0), calls
    assert n > 2
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore SIGINT in background jobs
    try:
        for interrupt_at in range(1, n + 1):
            with pytest.raises(KeyboardInterrupt):
                run(interrupt_at)
    finally:
        signal.signal(signal.SIGINT, before)
    assert run(0) == wanted


def test_stop_tokens_change_nothing(bpe: Tokenizer) -> None:
    constraint = Constraint(llamac.Regex("[0-9]+"), bpe, [0], [])
    before = bytes(constraint.mask() or b"")
    constraint.accept(0)
    assert bytes(constraint.mask() or b"") == before


def test_a_grammar_beyond_the_limits_is_an_error(bpe: Tokenizer) -> None:
    guide = llamac.Regex("(a|b)*c(a|b){100}")
    constraint = Constraint(guide, bpe, [0], [])

    def run() -> None:
        rng = random.Random(1)
        for _ in range(3000):
            constraint.mask()
            constraint.accept(bpe.encode(rng.choice("abc"))[0])

    with pytest.raises((UnsupportedError, ArgumentError)):
        run()


def test_word_piece_tokenizers_are_refused(monkeypatch: pytest.MonkeyPatch, bpe: Tokenizer) -> None:
    monkeypatch.setattr(Tokenizer, "kind", "wpm")
    fresh = Tokenizer.from_json(bpe.json, bpe.special)
    with pytest.raises(UnsupportedError, match="guides do not work with WordPiece tokenizers"):
        vocabulary_of(fresh)


def test_vocabularies_are_built_once_and_live_as_long_as_their_tokenizer(bpe: Tokenizer) -> None:
    fresh = Tokenizer.from_json(bpe.json, bpe.special)
    vocabulary = weakref.ref(vocabulary_of(fresh))
    assert vocabulary_of(fresh) is vocabulary()
    constraint: Any = Constraint(llamac.Json(), fresh, [0], [])
    constraint.mask()
    del fresh, constraint
    gc.collect()
    assert vocabulary() is None


@pytest.fixture
def slow_worker(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Masks that are computed only when a test runs them."""
    waiting: list[Any] = []

    class Pool:
        def submit(self, function: Any) -> Future[None]:
            future: Future[None] = Future()
            waiting.append((future, function))
            return future

    monkeypatch.setattr(module, "_workers", Pool)
    return waiting


def test_readiness_is_that_of_the_mask(slow_worker: list[Any], bpe: Tokenizer) -> None:
    constraint = Constraint(llamac.Regex("[0-9]+"), bpe, [0], [])
    assert not constraint.is_ready(0)
    assert not constraint.is_ready(0.001)
    future, function = slow_worker.pop()
    function()
    future.set_result(None)
    assert constraint.is_ready(0)
    assert allowed(constraint, bpe)


def test_a_tokenizer_without_special_tokens_works(bpe: Tokenizer) -> None:
    none = SpecialTokens(bos_id=None, add_bos=False, add_eos=False, eos_id=None, stop_ids=())
    bare = Tokenizer.from_json(bpe.json, none)
    tokens, matches = generated(Constraint(llamac.Regex("[ab]{3}"), bare, [], []), bare, 1, 9)
    assert matches
    assert regex.fullmatch(b"[ab]{3}", text_of(tokens, bare))
