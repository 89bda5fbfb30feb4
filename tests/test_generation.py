"""Generation: where it ends, what it reports, how it streams, and what it refuses."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import llamac
from builders import BYTES, byte_ids, checkpoint, llama_config, script_checkpoint, some_ids, write_model
from llamac import _core
from llamac.errors import ArgumentError, ArgumentTypeError, BusyError, ClosedError, ContextFullError
from llamac.generation import StopStrings

Script = Callable[..., llamac.Model]
BOS = 1


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[Script]:
    """Makes models that give the tokens of a script, one per position, from position 0 on."""
    made: list[llamac.Model] = []

    def make(script: str | list[int], **options: Any) -> llamac.Model:
        ids = byte_ids(script) if isinstance(script, str) else script
        path = tmp_path / f"script{len(made)}.bin"
        made.append(llamac.load(write_model(path, script_checkpoint(ids, **options))))
        return made[-1]

    yield make
    for model in made:
        model.close()


# ---- greedy generation and its report


def test_greedy_generation_takes_the_largest_logit_each_time(tiny: Path) -> None:
    with llamac.load(tiny) as model:
        prompt = model.tokenize("The hello world")
        result = model.generate("The hello world", max_tokens=40)
        ids, expected = list(prompt), []
        with model.session() as session:
            logits = session.eval(ids)
            for _ in range(40):
                assert logits is not None
                expected.append(int(np.argmax(logits[: model.n_token_ids])))
                logits = session.eval(expected[-1:])
        assert result.tokens == expected
        assert len(set(expected)) > 3
        assert result.text == model.tokenizer.decode(expected, start=False)
        assert (result.finish_reason, result.stopped_by) == ("length", None)
        assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (len(prompt), 40)
        assert result.timings.prefill > 0
        assert result.timings.decode > 0
        assert model.generate(prompt, max_tokens=40).tokens == expected  # ids as they are


def test_ids_without_a_token_are_never_generated(tmp_path: Path) -> None:
    ones = np.zeros((301, 48), np.float32)
    ones[290] = 1  # the row of an id that the tokenizer does not have
    config = llama_config()
    weights = {"output.weight": ones, "output_norm.weight": np.ones(48, np.float32)}
    path = write_model(tmp_path / "padded.bin", checkpoint(config, weights))
    with llamac.load(path) as model:
        rows = model.logits(some_ids(20))
        assert (np.argmax(np.abs(rows), axis=1) == 290).all()
        for seed in range(5):
            tokens = model.generate("he", max_tokens=30, temperature=1.0, seed=seed).tokens
            assert max(tokens) < model.n_token_ids == 284


def test_max_tokens_counts_new_tokens_only(scripted: Script) -> None:
    model = scripted("abcdefghijklmnop")
    for prompt in ([BOS], [BOS, 5, 6]):
        result = model.generate(prompt, max_tokens=4)
        assert len(result.tokens) == 4
        assert (result.finish_reason, result.usage.completion_tokens) == ("length", 4)
    assert result.text == "cdef"  # what stands after position 2 and on
    assert model.generate([BOS], max_tokens=1).text == "a"


def test_the_end_of_the_context_ends_the_generation(scripted: Script) -> None:
    model = scripted("abcdefghijklmnop")
    result = model.generate([BOS, 5, 6], context=8)
    assert (result.text, result.finish_reason, result.stopped_by) == ("cdefgh", "context", None)
    assert result.usage.prompt_tokens + result.usage.completion_tokens == 9  # the last token needs no position
    assert model.generate([BOS] * 8, context=8).text == "h"
    assert model.generate([BOS, 5, 6], context=8, max_tokens=6).finish_reason == "length"
    with pytest.raises(ContextFullError, match="the prompt has 9 tokens, but the context holds 8"):
        model.generate([BOS] * 9, context=8)
    with pytest.raises(ContextFullError, match="the prompt has 65 tokens, but the context holds 64"):
        model.stream([BOS] * 65)


def test_the_context_that_load_was_told_holds_for_generation(scripted: Script) -> None:
    path = scripted("abcdefghijklmnop").file.path
    with llamac.load(path, context=8) as model:
        assert model.generate([BOS, 5, 6]).text == "cdefgh"
        with pytest.raises(ContextFullError, match="the prompt has 9 tokens, but the context holds 8"):
            model.generate([BOS] * 9)


def test_stop_tokens_end_the_text_and_are_no_part_of_it(scripted: Script) -> None:
    model = scripted([*byte_ids("abc"), 2, *byte_ids("d")], stop_ids=(2, 7))
    result = model.generate([BOS])
    assert (result.text, result.tokens) == ("abc", byte_ids("abc"))
    assert (result.finish_reason, result.stopped_by, result.usage.completion_tokens) == ("stop", 2, 3)
    result = model.generate([BOS, 3, 3, 3])
    assert (result.text, result.tokens, result.finish_reason) == ("", [], "stop")


# ---- stop strings


@pytest.mark.parametrize(
    ("stop", "text", "by"),
    [
        ("gh", "abcdef", "gh"),
        (["gh"], "abcdef", "gh"),
        (["zz", "gh", "hi"], "abcdef", "gh"),
        (["hi", "defgh"], "abc", "defgh"),
        (["a"], "", "a"),
        (["efz", "bcz", "p"], "abcdefghijklmno", "p"),
        (["ghz", "p!"], "abcdefghijklmnop", None),
        ((), "abcdefghijklmnop", None),
    ],
)
def test_the_earliest_stop_string_ends_the_text(scripted: Script, stop: Any, text: str, by: str | None) -> None:
    model = scripted("abcdefghijklmnop")
    result = model.generate([BOS], stop=stop, max_tokens=16)
    assert (result.text, result.stopped_by) == (text, by)
    assert result.finish_reason == ("stop" if by else "length")
    assert result.tokens[: len(text)] == byte_ids(text)


def test_stop_strings_are_found_across_tokens_and_inside_of_one(scripted: Script) -> None:
    words = [281, 282, 283]  # whatever words of the vocabulary; their texts are asked for
    model = scripted([*words, *byte_ids("!?")])
    whole = model.generate([BOS], max_tokens=5).text
    assert whole == model.tokenizer.decode(words, start=False) + "!?"
    for first in range(len(whole)):
        for last in range(first + 1, len(whole) + 1):
            stop = whole[first:last]
            result = model.generate([BOS], max_tokens=5, stop=stop)
            assert (result.text, result.stopped_by) == (whole[: whole.index(stop)], stop)


def test_text_that_is_held_back_comes_at_the_end(scripted: Script) -> None:
    model = scripted("abcdefgh")
    stream = model.stream([BOS], stop="defghX", max_tokens=8)
    assert list(stream) == ["a", "b", "c", "defgh"]
    assert stream.completion.text == "abcdefgh"
    stream = model.stream([BOS], stop="bcX", max_tokens=8)
    assert list(stream) == ["a", "bcd", "e", "f", "g", "h"]


def test_a_stop_token_lets_held_back_text_out(scripted: Script) -> None:
    model = scripted([*byte_ids("abc"), 2], stop_ids=(2,))
    result = model.generate([BOS], stop="bcd")
    assert (result.text, result.stopped_by) == ("abc", 2)


def test_stop_strings_never_lose_or_double_text() -> None:
    text = "aabaabaaabab"
    for stops in (["aab!"], ["ab!", "aba!"], ["b!", "aabaabaab"], ["baaab"]):
        cut = min((text.index(stop) for stop in stops if stop in text), default=len(text))
        for size in (1, 2, 3, 5):
            search = StopStrings(stops)
            shown = ""
            for at in range(0, len(text), size):
                shown += search.push(text[at : at + size])
                if search.found:
                    break
            shown += "" if search.found else search.flush()
            assert shown == text[:cut]


# ---- streaming


def test_the_pieces_are_the_text(tiny: Path) -> None:
    with llamac.load(tiny) as model:
        for settings in ({}, {"temperature": 1.0, "seed": 3}, {"temperature": 1.5, "seed": 4, "stop": ["he", "\n"]}):
            options = cast("dict[str, Any]", {"max_tokens": 60, **settings})
            stream = model.stream("hello", **options)
            pieces = list(stream)
            result = model.generate("hello", **options)
            assert "".join(pieces) == result.text == stream.completion.text
            assert all(pieces)
            assert stream.completion.tokens == result.tokens


def test_characters_are_never_broken(scripted: Script) -> None:
    text = "aé東🙂z"
    model = scripted(text)
    assert list(model.stream([BOS], max_tokens=len(text.encode()))) == list(text)
    cut = model.stream([BOS], max_tokens=len(text.encode()) - 2)  # ends within the last character but one
    assert list(cut) == ["a", "é", "東", "\ufffd"]
    assert cut.completion.text == "aé東\ufffd"
    broken = scripted([BYTES + 0xC3, BYTES + ord("x"), BYTES + 0x80])
    assert broken.generate([BOS], max_tokens=3).text == "\ufffdx\ufffd"


def test_the_space_of_the_first_word_is_dropped_at_the_start_only(scripted: Script) -> None:
    space = byte_ids(" ")
    model = scripted([*space, *byte_ids("a"), *space, *byte_ids("b")])
    assert model.generate([BOS], max_tokens=4).text == "a b"
    assert model.generate([BOS, BOS, 9], max_tokens=2).text == " b"


def test_the_completion_is_there_when_the_stream_has_ended(scripted: Script) -> None:
    model = scripted("abcd")
    stream = model.stream([BOS], max_tokens=3)
    with pytest.raises(ArgumentError, match="has not ended"):
        _ = stream.completion
    assert next(stream) == "a"
    with pytest.raises(ArgumentError, match="has not ended"):
        _ = stream.completion
    assert "".join(stream) == "bc"
    assert stream.completion.text == "abc"
    with pytest.raises(StopIteration):
        next(stream)


def test_the_time_of_a_slow_consumer_does_not_count(scripted: Script) -> None:
    model = scripted("abcdeé")
    began = time.perf_counter()
    stream = model.stream([BOS], max_tokens=6)  # the last character is cut: it comes when nothing more is computed
    for _ in stream:
        time.sleep(0.1)
    assert time.perf_counter() - began > 0.6
    assert 0 < stream.completion.timings.decode < 0.1


@pytest.mark.parametrize("pieces", [0, 1, 3])
def test_closing_a_stream_frees_its_session(scripted: Script, pieces: int) -> None:
    model = scripted("abcdefgh")
    before = _core.live_objects()
    stream = model.stream([BOS], max_tokens=8)
    assert _core.live_objects() == before + 1
    with stream:
        for _ in range(pieces):
            next(stream)
    assert _core.live_objects() == before
    assert list(stream) == []
    with pytest.raises(ArgumentError, match="has not ended"):
        _ = stream.completion
    stream.close()


def test_a_stream_that_ends_or_is_dropped_frees_its_session(scripted: Script) -> None:
    model = scripted("abcdefgh")
    before = _core.live_objects()
    stream = model.stream([BOS], max_tokens=8)
    assert "".join(stream) == "abcdefgh"
    assert _core.live_objects() == before
    dropped = model.stream([BOS], max_tokens=8)
    next(dropped)
    del dropped
    assert _core.live_objects() == before


def test_closing_the_model_ends_its_streams(scripted: Script) -> None:
    model = scripted("abcdefgh")
    stream = model.stream([BOS])
    next(stream)
    model.close()
    with pytest.raises(ClosedError):
        next(stream)


def test_a_broken_stream_raises_its_error_again(scripted: Script) -> None:
    model = scripted("abcdefgh")
    stream = model.stream([BOS])
    next(stream)
    model.close()
    for _ in range(2):
        with pytest.raises(ClosedError, match="the session is closed"):
            next(stream)
        with pytest.raises(ClosedError, match="the session is closed"):
            _ = stream.completion


def test_an_interrupted_stream_says_so(scripted: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(session: llamac.Session, token: int) -> None:
        raise KeyboardInterrupt

    stream = scripted("abcdefgh").stream([BOS])
    next(stream)
    monkeypatch.setattr(llamac.Session, "step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    with pytest.raises(ClosedError, match="KeyboardInterrupt interrupted it"):
        next(stream)
    stream.close()


def test_a_stream_is_used_by_one_thread_at_a_time(scripted: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, release = threading.Event(), threading.Event()
    step = llamac.Session.step

    def step_slowly(session: llamac.Session, token: int) -> None:
        begun.set()
        assert release.wait(60)
        step(session, token)

    stream = scripted("abcdefgh").stream([BOS], max_tokens=8)
    pieces = [next(stream)]
    monkeypatch.setattr(llamac.Session, "step", step_slowly)
    other = threading.Thread(target=lambda: pieces.extend(stream))
    other.start()
    assert begun.wait(60)
    for use in (lambda: next(stream), stream.close):
        with pytest.raises(BusyError, match="the stream is in use by another thread"):
            use()
    release.set()
    other.join()
    assert "".join(pieces) == stream.completion.text == "abcdefgh"


# ---- prompts


def test_an_empty_prompt_becomes_bos(scripted: Script, tiny_llama: Path) -> None:
    model = scripted("abcd")
    assert model.generate("", max_tokens=2).text == "ab"
    assert model.generate([], max_tokens=2).usage.prompt_tokens == 1
    with llamac.load(tiny_llama) as other:
        assert other.generate([], max_tokens=9).tokens == other.generate([BOS], max_tokens=9).tokens


def test_a_model_without_bos_needs_a_prompt(tmp_path: Path) -> None:
    made = checkpoint(llama_config())
    made.tokenizer = None
    with llamac.load(write_model(tmp_path / "bare.bin", made)) as model:
        with pytest.raises(ArgumentError, match="prompt is empty, and the model has no BOS"):
            model.generate([])
        for use in (
            lambda: model.generate("text"),
            lambda: model.tokenize("text"),
            lambda: model.detokenize([5]),
            lambda: model.tokenizer,
            lambda: model.generate([5], stop="a"),
        ):
            with pytest.raises(ArgumentError, match="tokenizer"):
                use()
        result = model.generate([5, 6], max_tokens=7)
        assert (len(result.tokens), result.text) == (7, "")
        assert list(model.stream([5, 6], max_tokens=7)) == []


def test_prompts_get_bos_once(tiny_llama: Path) -> None:
    with llamac.load(tiny_llama) as model:
        ids = model.tokenize("hello")
        assert ids[0] == BOS != ids[1]
        assert model.tokenize("hello", add_special=False) == ids[1:]
        assert model.detokenize(ids) == "hello"
        assert model.generate("hello", max_tokens=1).usage.prompt_tokens == len(ids)
        assert model.generate(np.array(ids), max_tokens=3).tokens == model.generate("hello", max_tokens=3).tokens  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", [[1, 301], [-1], [1.5], b"bytes", None, 7, [[1]]])
def test_prompts_that_are_none_are_refused(tiny_llama: Path, prompt: Any) -> None:
    with llamac.load(tiny_llama) as model, pytest.raises(ArgumentError):
        model.generate(prompt, max_tokens=1)


# ---- settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": 1e-300}, "too small"),
        ({"top_p": 0.0}, "top_p is 0"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"min_p": 1.1}, "min_p is 1.1"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_k": 2**40}, "top_k is 1099511627776"),
        ({"max_tokens": 0}, "max_tokens is 0, expected at least 1"),
        ({"max_tokens": -3}, "max_tokens is -3"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"stop": ""}, "stop is ''"),
        ({"stop": ["a", ""]}, "none of them empty"),
        ({"stop": ["a", 3]}, "stop is"),
        ({"stop": b"ab"}, "stop is"),
        ({"context": 0}, "context is 0, expected 1 to 600"),
        ({"context": 601}, "context is 601"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_settings_out_of_range_are_refused(tiny_llama: Path, settings: dict[str, Any], message: str) -> None:
    with llamac.load(tiny_llama) as model:
        for make in (model.generate, model.stream):
            with pytest.raises(ArgumentError, match=message):
                make("a", **settings)


def test_bools_are_no_token_ids(tiny_llama: Path) -> None:
    with llamac.load(tiny_llama) as model:
        for use in (model.generate, model.stream, model.logits, model.detokenize):
            with pytest.raises(ArgumentError, match="whole numbers of 32 bits: 'bool' object"):
                use([1, True])


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": "1"},
        {"temperature": None},
        {"top_p": "0.5"},
        {"top_p": None},
        {"min_p": [0.5]},
        {"min_p": True},
        {"max_tokens": 2.5},
        {"max_tokens": "3"},
        {"max_tokens": True},
        {"top_k": 2.5},
        {"top_k": None},
        {"seed": 1.5},
        {"seed": "x"},
        {"stop": 5},
        {"stop": None},
        {"stop": b"ab"},
        {"stop": ["a", 3]},
        {"context": 2.5},
        {"context": "3"},
    ],
    ids=str,
)
def test_settings_of_wrong_types_are_refused_by_name(tiny_llama: Path, settings: dict[str, Any]) -> None:
    (name,) = settings
    with llamac.load(tiny_llama) as model:
        for make in (model.generate, model.stream):
            with pytest.raises(ArgumentTypeError, match=f"{name} (must be|is) ") as error:
                make("a", **settings)
            assert isinstance(error.value, TypeError)
            assert isinstance(error.value, ArgumentError)


def test_settings_that_there_are_not_are_refused(tiny_llama: Path) -> None:
    with llamac.load(tiny_llama) as model:
        for make in (model.generate, model.stream):
            for settings in ({"echo": True}, {"max_new_tokens": 5}):
                with pytest.raises(TypeError, match=r"echo|max_new_tokens"):
                    cast("Any", make)("a", **settings)


def test_numbers_of_numpy_are_numbers(tiny_llama: Path) -> None:
    with llamac.load(tiny_llama) as model:
        plain = model.generate("a", max_tokens=9, temperature=0.5, top_k=5, seed=3)
        settings: Any = {"max_tokens": np.int64(9), "temperature": np.float32(0.5), "top_k": np.uint8(5)}
        assert model.generate("a", **settings, seed=cast("int", np.int32(3))).tokens == plain.tokens


def test_a_stream_checks_its_request_before_it_is_asked_for_a_piece(tiny_llama: Path) -> None:
    with llamac.load(tiny_llama) as model:
        before = _core.live_objects()
        for ids in ([-1], [1, 301], [1, 2**31 - 1]):
            with pytest.raises(ArgumentError, match=f"the prompt holds the token id {ids[-1]}, expected 0 to 300"):
                model.stream(ids)
        for prompt in (None, 5, b"a", [1.5], ["a"]):
            with pytest.raises(ArgumentTypeError):
                model.stream(cast("Any", prompt))
        with pytest.raises(ContextFullError, match="the prompt has 601 tokens, but the context holds 600"):
            model.stream([1] * 601, max_tokens=1)
        assert _core.live_objects() == before
