"""Streams: pieces, cancelling, closing, and interruptions at any instruction."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

import llamac
from builders import byte_ids
from interruptions import Interruption
from llamac import _core
from llamac.engine.generation.output import Timings
from llamac.errors import ArgumentError, BusyError, ClosedError

Script = Callable[..., llamac.Model]
BOS = 1
TIMEOUT = 60


# ---- pieces


def test_pieces_add_up_to_the_text(tiny: Path) -> None:
    with llamac.load(tiny) as model:
        for settings in ({"temperature": 0}, {"seed": 3}, {"temperature": 1.5, "seed": 4, "stop": ["he", "\n"]}):
            options = cast("dict[str, Any]", {"max_tokens": 60, **settings})
            stream = model.stream("hello", **options)
            pieces = list(stream)
            result = model.generate("hello", **options)
            assert "".join(pieces) == result.text == stream.completion.text
            assert all(pieces)
            assert stream.completion.tokens == result.tokens


def test_pieces_contain_only_whole_characters(scripted: Script) -> None:
    text = "aé東🙂z"
    model = scripted(text)
    assert list(model.stream([BOS], max_tokens=len(text.encode()))) == list(text)
    cut = model.stream([BOS], max_tokens=len(text.encode()) - 2)  # ends inside the second-to-last character
    assert list(cut) == ["a", "é", "東"]
    assert cut.completion.text == "aé東"


def test_held_back_text_is_released_at_the_end(scripted: Script) -> None:
    model = scripted("abcdefgh")
    stream = model.stream([BOS], stop="defghX", max_tokens=8)
    assert list(stream) == ["a", "b", "c", "defgh"]
    assert stream.completion.text == "abcdefgh"
    stream = model.stream([BOS], stop="bcX", max_tokens=8)
    assert list(stream) == ["a", "bcd", "e", "f", "g", "h"]


def test_the_completion_is_available_after_the_end(scripted: Script) -> None:
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


def test_timings_exclude_the_consumers_time(scripted: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def prepare(session: llamac.Session, rows: int, positions: int) -> bool:
        now[0] += 3.0
        return original(session, rows, positions)

    original = llamac.Session._prepare
    monkeypatch.setattr(llamac.Session, "_prepare", prepare)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    stream = scripted("abcdeé").stream([BOS], max_tokens=6)
    for _ in stream:
        now[0] += 100.0
    assert stream.completion.timings == llamac.Timings(3.0, 15.0)  # the prompt and five steps


# ---- closing and cancelling


@pytest.mark.parametrize("pieces", [0, 1, 3])
def test_a_closed_stream_reports_what_it_generated(scripted: Script, pieces: int) -> None:
    model = scripted("abcdefgh")
    before = _core.live_objects()
    stream = model.stream([BOS], max_tokens=8)
    assert _core.live_objects() == before + 1
    with stream:
        for _ in range(pieces):
            next(stream)
    assert _core.live_objects() == before
    assert list(stream) == []
    result = stream.completion
    assert (result.text, result.tokens) == ("abcdefgh"[:pieces], byte_ids("abcdefgh"[:pieces]))
    assert (result.finish_reason, result.stopped_by) == ("cancelled", None)
    assert result.usage.completion_tokens == pieces
    stream.close()
    assert stream.completion is result


def test_closing_an_ended_stream_keeps_its_completion(scripted: Script) -> None:
    stream = scripted("abcd").stream([BOS], max_tokens=3)
    assert "".join(stream) == "abc"
    stream.close()
    stream.cancel()
    assert (stream.completion.text, stream.completion.finish_reason) == ("abc", "length")


def test_a_closed_stream_keeps_held_back_text(scripted: Script) -> None:
    stream = scripted("abcdefgh").stream([BOS], max_tokens=8, stop=["cdefX", "bX"])
    assert next(stream) == "a"
    assert next(stream) == "b"  # the step that ruled out "bX" has also generated "c"
    stream.close()
    assert (stream.completion.text, stream.completion.tokens) == ("abc", byte_ids("abc"))


def test_a_finished_or_dropped_stream_frees_its_session(scripted: Script) -> None:
    model = scripted("abcdefgh")
    before = _core.live_objects()
    stream = model.stream([BOS], max_tokens=8)
    assert "".join(stream) == "abcdefgh"
    assert _core.live_objects() == before
    dropped = model.stream([BOS], max_tokens=8)
    next(dropped)
    del dropped
    assert _core.live_objects() == before


def test_a_cancelled_stream_reports_what_it_generated(scripted: Script) -> None:
    model = scripted("abcdefgh")
    stream = model.stream([BOS], max_tokens=8, stop="cdefX")
    assert next(stream) == "a"
    assert next(stream) == "b"
    stream.cancel()
    assert list(stream) == []
    assert (stream.completion.text, stream.completion.finish_reason) == ("ab", "cancelled")


def test_a_cancelled_stream_releases_held_back_text(scripted: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = scripted("abcdefgh").stream([BOS], max_tokens=8, stop="bcdefX")
    observe = stream._speculation.observe
    steps = itertools.count()

    def cancel_after_three(rows: int, seconds: float) -> None:
        observe(rows, seconds)
        if next(steps) == 2:
            stream.cancel()

    monkeypatch.setattr(stream._speculation, "observe", cancel_after_three)
    assert list(stream) == ["a", "bcd"]
    assert (stream.completion.text, stream.completion.tokens) == ("abcd", byte_ids("abcd"))


def test_a_cancelled_stream_has_a_completion_without_further_iteration(scripted: Script) -> None:
    model = scripted("abcdefgh")
    before = _core.live_objects()
    stream = model.stream([BOS], max_tokens=8)
    next(stream)
    stream.cancel()
    assert (stream.completion.text, stream.completion.finish_reason) == ("a", "cancelled")
    assert _core.live_objects() == before


def test_cancel_before_the_first_piece_takes_effect(scripted: Script) -> None:
    stream = scripted("abcdefgh").stream([BOS], max_tokens=8)
    stream.cancel()
    assert list(stream) == []
    assert (stream.completion.tokens, stream.completion.finish_reason) == ([], "cancelled")


def test_cancel_just_before_the_prefill_takes_effect(scripted: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each eval resets the session's own flag; the stream's flag must survive that."""
    prefill = llamac.Session.prefill

    def cancel_first(session: llamac.Session, ids: Any) -> None:
        stream.cancel()
        prefill(session, ids)

    monkeypatch.setattr(llamac.Session, "prefill", cancel_first)
    with scripted("abcdefgh").session() as session:
        stream = session.stream([BOS, 5, 6], max_tokens=8)
        assert list(stream) == []
        assert (stream.completion.tokens, stream.completion.finish_reason) == ([], "cancelled")
        assert session.length() == 0
        monkeypatch.setattr(llamac.Session, "prefill", prefill)
        assert session.generate([BOS, 5, 6], max_tokens=3).text == "cde"  # the next stream is not cancelled


def test_another_thread_can_cancel_a_running_prefill(big_llama: Path) -> None:
    with llamac.load(big_llama, threads=1) as model, model.session() as session:
        stream = session.stream([1, 2] * 3000, max_tokens=4)
        thread = threading.Thread(target=lambda: list(stream))
        thread.start()
        while session.memory()["kv"] == 0:  # until the eval has begun
            assert thread.is_alive()
        with pytest.raises(ArgumentError, match="has not ended"):
            _ = stream.completion
        stream.cancel()
        thread.join(TIMEOUT)
        assert not thread.is_alive()
        assert (stream.completion.finish_reason, stream.completion.tokens) == ("cancelled", [])
        assert session.length() < 6000


def test_a_cancelled_eval_ends_the_stream_with_the_held_back_text(
    scripted: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = llamac.Session._prepare
    evals = itertools.count()  # the prompt, then the tokens

    def cancel_the_second(session: llamac.Session, rows: int, positions: int) -> bool:
        if next(evals) == 2:
            session.cancel()  # the scope's flag, which the eval reads
        return prepare(session, rows, positions)

    monkeypatch.setattr(llamac.Session, "_prepare", cancel_the_second)
    stream = scripted("abcdefgh").stream([BOS], max_tokens=8, stop="bcX")
    assert list(stream) == ["a", "b"]
    assert (stream.completion.text, stream.completion.finish_reason) == ("ab", "cancelled")


# ---- errors


def test_a_stream_of_a_closed_model_raises_the_same_error_each_time(scripted: Script) -> None:
    model = scripted("abcdefgh")
    stream = model.stream([BOS])
    next(stream)
    model.close()
    for _ in range(2):
        with pytest.raises(ClosedError, match="the session is closed"):
            next(stream)
        with pytest.raises(ClosedError, match="the session is closed"):
            _ = stream.completion


def test_a_stream_in_use_refuses_other_threads(scripted: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, release = threading.Event(), threading.Event()
    prepare = llamac.Session._prepare

    def prepare_slowly(session: llamac.Session, rows: int, positions: int) -> bool:
        begun.set()
        assert release.wait(TIMEOUT)
        return prepare(session, rows, positions)

    stream = scripted("abcdefgh").stream([BOS], max_tokens=8)
    pieces = [next(stream)]
    monkeypatch.setattr(llamac.Session, "_prepare", prepare_slowly)
    other = threading.Thread(target=lambda: pieces.extend(stream))
    other.start()
    assert begun.wait(TIMEOUT)
    for use in (lambda: next(stream), stream.close):
        with pytest.raises(BusyError, match="the stream is in use by another thread"):
            use()
    release.set()
    other.join()
    assert "".join(pieces) == stream.completion.text == "abcdefgh"


def test_a_session_in_use_by_a_stream_refuses_other_streams(scripted: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = llamac.Session._prepare
    errors: list[BusyError] = []

    def use_the_other(session: llamac.Session, rows: int, positions: int) -> bool:
        with pytest.raises(BusyError, match="in use by another stream") as error:
            next(second)
        errors.append(error.value)
        return prepare(session, rows, positions)

    with scripted("abcdefgh").session() as session:
        first, second = session.stream([BOS]), session.stream([BOS])
        next(first)
        monkeypatch.setattr(llamac.Session, "_prepare", use_the_other)
        assert next(first) == "b"
        assert len(errors) == 1


def test_streams_cannot_be_constructed_directly(tiny_llama: Path) -> None:
    with pytest.raises(llamac.ArgumentTypeError, match=r"use model\.stream"):
        llamac.Stream(tiny_llama, cast("Any", [1]), cast("Any", None), owns_session=True)  # type: ignore[arg-type]


def test_repr_shows_progress(scripted: Script) -> None:
    stream = scripted("abcdefgh").stream([BOS], max_tokens=2)
    assert repr(stream) == "<llamac.Stream: 0 tokens, generating>"
    next(stream)
    assert repr(stream) == "<llamac.Stream: 1 token, generating>"
    next(stream)
    assert repr(stream) == "<llamac.Stream: 2 tokens, length>"


# ---- interruptions


def test_an_interrupted_stream_reports_the_interruption_and_keeps_its_tokens(
    scripted: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(session: llamac.Session, rows: int, positions: int) -> bool:
        raise KeyboardInterrupt

    stream = scripted("abcdefgh").stream([BOS])
    next(stream)
    monkeypatch.setattr(llamac.Session, "_prepare", interrupt)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    with pytest.raises(ClosedError, match="KeyboardInterrupt interrupted it"):
        next(stream)
    assert (stream.completion.text, stream.completion.finish_reason) == ("a", "cancelled")
    stream.close()


@pytest.mark.parametrize("stop", [None, "bcX"])
@pytest.mark.parametrize("pieces", [0, 1])
def test_an_interruption_at_any_instruction_leaves_a_stream_usable(
    scripted: Script, pieces: int, stop: str | None
) -> None:
    """No instruction of `__next__` leaves the stream locked, loses a token or leaks the session's memory."""
    model = scripted("abcdefgh")
    model.generate([BOS], max_tokens=2)  # complete lazy imports and caches
    gc.collect()  # what earlier tests left behind
    before = _core.live_objects()
    for n in itertools.count():
        interruption = Interruption(n)
        stream = model.stream([BOS], max_tokens=3, stop=stop)
        for _ in range(pieces):
            next(stream)
        interruption.during(partial(next, stream))
        rest: list[str] = []
        with contextlib.suppress(ClosedError):  # if the interruption occurred inside `__next__`
            rest.extend(stream)
        stream.close()
        found = stream.completion
        assert found.text == "abc"[: len(found.tokens)]
        assert found.tokens == byte_ids("abc")[: len(found.tokens)]
        assert len(found.tokens) >= pieces
        assert "abc".endswith("".join(rest))
        assert found.finish_reason in ("cancelled", "length")
        assert _core.live_objects() == before
        if not interruption.happened:
            break
    assert n > 100


def test_an_interruption_at_any_instruction_leaves_a_session_usable(scripted: Script) -> None:
    model = scripted("abcdefgh")
    with model.session() as session:
        session.generate([BOS, 5], max_tokens=2)
        for n in itertools.count():
            interruption = Interruption(n)
            session.truncate(0)
            stream = session.stream([BOS, 5, 6], max_tokens=3)
            interruption.during(partial(next, stream))
            assert session.generate([BOS, 5, 6], max_tokens=3).text == "cde"
            if not interruption.happened:
                break
    assert n > 100


def test_an_interruption_at_any_instruction_of_close_leaves_a_stream_closable(scripted: Script) -> None:
    model = scripted("abcdefgh")
    before = _core.live_objects()
    for n in itertools.count():
        interruption = Interruption(n)
        stream = model.stream([BOS], max_tokens=3)
        next(stream)
        interruption.during(stream.close)
        stream.close()
        assert (stream.completion.text, stream.completion.finish_reason) == ("a", "cancelled")
        assert _core.live_objects() == before
        if not interruption.happened:
            break


def test_a_result_that_is_read_before_the_last_token_is_cancelled(tiny_llama: Path) -> None:
    """Another thread can read the result while the generation ends."""
    with llamac.load(tiny_llama) as model, model.stream([5], max_tokens=4, ignore_eos=True) as stream:
        output = stream._output

        class Ending(list[int]):
            def __iter__(self) -> Iterator[int]:
                yield from self[:3]
                output.end("length")

        output.tokens = Ending([5, 6, 7, 8])
        completion = output.completion(Timings(0.0, 0.0))
        assert (completion.tokens, completion.finish_reason) == ([5, 6, 7], "cancelled")
