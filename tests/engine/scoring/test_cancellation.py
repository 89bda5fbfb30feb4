"""Embeddings, rankings and scores that another thread cancels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import llamac
from builders import checkpoint, llama_config, write_model
from llamac import Cancellation, CancelledError, Model, interrupt
from llamac.engine.scoring import cancellation, ranking
from processes import TIMEOUT

LONG = "the end of the world " * 20
MANY = 2_000  # texts that take seconds, if nothing ends them
Call = Callable[[Model, int, Cancellation, Any], object]
CALLS: dict[str, Call] = {
    "embed": lambda model, n, cancel, progress: model.embed([LONG] * n, cancel=cancel, progress=progress),
    "rerank": lambda model, n, cancel, progress: model.rerank("", [LONG] * n, cancel=cancel, progress=progress),
    "score": lambda model, n, cancel, progress: model.score(LONG, [f"{i}{LONG}" for i in range(n)], cancel=cancel),
    "perplexity": lambda model, n, cancel, progress: model.perplexity(
        [5] * (n + 1), context=256, stride=1, cancel=cancel, progress=progress
    ),
}


@pytest.fixture(params=CALLS)
def call(request: pytest.FixtureRequest) -> Call:
    return CALLS[request.param]


@pytest.fixture
def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
    """A random LLaMA that can also rank."""
    made = checkpoint(llama_config(context=1200))
    made.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    monkeypatch.setattr(ranking, "_answer_id", lambda _, word: len(word))
    with llamac.load(write_model(tmp_path / "judge.bin", made)) as model:
        yield model


def test_another_thread_ends_a_computation(judge: Model, call: Call) -> None:
    cancel = Cancellation()
    threads: list[threading.Thread] = []

    def progress(phase: str, done: int, total: int) -> None:
        if not threads:
            threads.append(threading.Thread(target=cancel.cancel))
            threads[0].start()

    if call is CALLS["score"]:  # it reports no progress
        progress("", 0, 0)
    with pytest.raises(CancelledError, match="cancelled"):
        call(judge, MANY, cancel, progress)
    threads[0].join()
    assert cancel.cancelled
    call(judge, 2, Cancellation(), False)  # the model goes on


def test_other_objects_are_refused(judge: Model, call: Call) -> None:
    wrong: Any = 5
    with pytest.raises(TypeError, match=r"cancel must be a llamac\.Cancellation, not int"):
        call(judge, 2, wrong, False)
    if call is not CALLS["score"]:
        with pytest.raises(TypeError, match="progress must be a bool or a function, not int"):
            call(judge, 2, Cancellation(), wrong)


def test_what_begins_after_a_cancel_ends_at_once(judge: Model, call: Call) -> None:
    cancel = Cancellation()
    cancel.cancel()
    reports: list[int] = []
    with pytest.raises(CancelledError):
        call(judge, 2, cancel, lambda phase, done, total: reports.append(done))
    assert not any(reports)


def test_an_eval_that_runs_is_ended(judge: Model) -> None:
    """A cancel in the middle of an eval keeps its first rows."""
    cancel = Cancellation()
    with judge.session(context=1200) as session:

        def evals() -> None:
            threading.Thread(target=cancel.cancel).start()
            while True:
                session.truncate(0)
                session.eval([5] * 1200)

        with pytest.raises(CancelledError) as raised:
            cancel.run(session, evals)
        assert session.length() == raised.value.done
        session.truncate(0)
        session.eval([5, 6, 7])  # outside of the call, the session is not cancelled


def test_one_object_ends_several_computations(judge: Model) -> None:
    cancel = Cancellation()
    ended: list[BaseException] = []

    def embed() -> None:
        try:
            judge.embed([LONG] * MANY, cancel=cancel)
        except CancelledError as error:
            ended.append(error)

    threads = [threading.Thread(target=embed) for _ in range(3)]
    for thread in threads:
        thread.start()
    cancel.cancel()
    for thread in threads:
        thread.join()
    assert len(ended) == 3


def test_a_cancel_does_not_wait_for_the_tokens_of_a_long_text(
    judge: Model, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokenizing ends by itself, later: here only after the computation has been cancelled."""
    if call is CALLS["perplexity"]:
        call = lambda model, n, cancel, progress: model.perplexity(LONG, cancel=cancel)  # noqa: E731
    begun, ended = threading.Event(), threading.Event()

    def encode(tokenizer: llamac.Tokenizer, text: str, task: Callable[[], object]) -> object:
        begun.set()
        assert ended.wait(TIMEOUT)
        return task()

    monkeypatch.setattr(cancellation, "LONG_TEXT", 1)
    monkeypatch.setattr(llamac.Tokenizer, "_guarded", encode)
    cancel = Cancellation()

    def cancel_later() -> None:
        assert begun.wait(TIMEOUT)
        cancel.cancel()

    thread = threading.Thread(target=cancel_later)
    thread.start()
    try:
        with pytest.raises(CancelledError, match="cancelled"):
            call(judge, 1, cancel, False)
        assert not ended.is_set()
    finally:
        ended.set()
        thread.join()


def test_calls_that_are_given_up_leave_few_threads(judge: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their conversions go on, no more than a few, and those that have not begun never do."""
    most, ended = interrupt.MAX_UNSTOPPABLE, threading.Event()
    texts: list[str] = []
    expected = judge.tokenize(LONG)

    def encode(tokenizer: llamac.Tokenizer, text: str, task: Callable[[], object]) -> object:
        texts.append(text)
        assert ended.wait(TIMEOUT)
        return task()

    class Impatient(Cancellation):
        """Gives up a call whose conversion runs, or, if none can begin any more, waits."""

        looks = 0

        def check(self) -> None:
            self.looks += 1
            if self.looks > 2 and len(texts) >= min(number + 1, most):
                self.cancel()
            super().check()

    def helpers() -> int:
        return sum(thread.name == "llamac-helper" for thread in threading.enumerate())

    monkeypatch.setattr(cancellation, "LONG_TEXT", 1)
    with monkeypatch.context() as patch:
        patch.setattr(llamac.Tokenizer, "_guarded", encode)
        try:
            for number in range(most + 5):
                with pytest.raises(CancelledError):
                    judge.embed(f"{number}{LONG}", cancel=Impatient())
                if number == most - 1:
                    before = helpers()
            assert helpers() == before
        finally:
            ended.set()
        assert Cancellation().convert(lambda: judge.tokenize(LONG), len(LONG)) == expected
    assert sorted(texts) == sorted([*(f"{number}{LONG}" for number in range(most)), LONG])


def test_a_model_is_closed_while_a_call_that_was_given_up_converts(
    judge: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended, done = threading.Event(), threading.Event(), threading.Event()
    expected = judge.tokenize(LONG, add_special=False)
    found: list[object] = []

    def encode(tokenizer: llamac.Tokenizer, text: str, task: Callable[[], object]) -> object:
        begun.set()
        assert ended.wait(TIMEOUT)
        ids = task()
        found.append(list(ids) if isinstance(ids, list) else ids)  # the caller puts BOS in front of the same list
        done.set()
        return ids

    monkeypatch.setattr(cancellation, "LONG_TEXT", 1)
    monkeypatch.setattr(llamac.Tokenizer, "_guarded", encode)
    cancel = Cancellation()
    timer = threading.Timer(0, lambda: begun.wait(TIMEOUT) and cancel.cancel())
    timer.start()
    with pytest.raises(CancelledError):
        judge.perplexity(LONG, cancel=cancel)
    timer.join()
    judge.close()
    assert judge.closed
    ended.set()
    assert done.wait(TIMEOUT)
    assert found == [expected]


def test_errors_of_long_texts_are_those_of_short_ones(judge: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = judge.embed(LONG)
    monkeypatch.setattr(cancellation, "LONG_TEXT", 1)
    assert (judge.embed(LONG) == expected).all()
    with pytest.raises(llamac.ContextFullError, match=r"texts\[0\]"):
        judge.embed([LONG * 100])
    with pytest.raises(llamac.ArgumentError, match="surrogate"):
        judge.perplexity("a\ud800b")
