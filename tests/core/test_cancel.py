"""Cancelling an eval, from another thread and by Ctrl-C: it stops within 50 ms, and can resume with the same bits."""

from __future__ import annotations

import _thread
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mtp_models import attention_model

import llamac
from builders import Floats, some_ids, write_model
from llamac import interrupt
from llamac.errors import CancelledError
from llamac.export.convert import export
from openmp import needs_threads
from processes import TIMEOUT, heed_signals
from waiting import wait_until

Helpers = list[interrupt._Helper]

LIMIT = 0.050
MARGIN = 0.030  # until the operating system runs the waiting thread
EXIT = 0.100  # until the interpreter has exited
CHUNK = 256  # rows that finish together
ATTEMPTS = 12  # to measure a time; on a busy machine, most include other programs


def shortest(measure: Callable[[], float], limit: float) -> float:
    """Measure until a time is below the limit, at most ATTEMPTS times. Return the shortest."""
    times: list[float] = []
    while len(times) < ATTEMPTS and not (times and times[-1] < limit):
        times.append(measure())
    return min(times)


def cancel_during(session: llamac.Session, count: int, has_begun: Callable[[], bool]) -> tuple[float, CancelledError]:
    """Start an eval and cancel it when `has_begun` returns True.

    Args:
        session: Computes the eval.
        count: Number of tokens.
        has_begun: Whether the eval has progressed far enough.

    Returns:
        The seconds from the cancel to the eval's end, and its error.
    """
    ended: list[tuple[float, CancelledError]] = []

    def compute() -> None:
        try:
            session.eval(some_ids(count), logits=None)
        except CancelledError as error:
            ended.append((time.perf_counter(), error))

    thread = threading.Thread(target=compute)
    thread.start()
    wait_until(has_begun)
    cancelled = time.perf_counter()
    session.cancel()
    thread.join()
    assert ended, "the eval ended before it was cancelled"
    return ended[0][0] - cancelled, ended[0][1]


# ---- from another thread


@pytest.mark.parametrize(("threads", "isa"), [(1, None), pytest.param(2, None, marks=needs_threads), (1, "scalar")])
def test_cancel_takes_effect_within_50_ms(big_llama: Path, threads: int, isa: str | None) -> None:
    def measure() -> float:
        with model.session() as session:
            start = time.perf_counter()

            def has_begun() -> bool:
                return session.memory()["kv"] > 0 and time.perf_counter() > start + 0.1

            seconds, error = cancel_during(session, 8000, has_begun)
            assert session.length() == error.done
            return seconds

    with llamac.load(big_llama, threads=threads, isa=isa) as model:
        assert shortest(measure, LIMIT + MARGIN) < LIMIT + MARGIN


def test_a_cancelled_eval_keeps_finished_rows_and_can_resume(big_llama: Path) -> None:
    ids = some_ids(1500)
    with llamac.load(big_llama) as model:
        with model.session() as session:
            expected = session.eval(ids)
        with model.session() as session:
            _, error = cancel_during(session, len(ids), lambda: session.length() > 0)
            assert error.done % CHUNK == 0
            assert 0 < error.done < len(ids)
            assert str(error) == f"cancelled: {error.done} of 1500 rows were computed and kept"
            assert session.length() == error.done
            found = session.eval(ids[error.done :])
    assert expected is not None
    assert found is not None
    assert found.tobytes() == expected.tobytes()


def test_cancel_affects_only_a_running_eval(tiny: Path) -> None:
    with llamac.load(tiny) as model, model.session() as session:
        session.cancel()
        logits = session.eval(some_ids(20), logits="all")
        session.cancel()
        assert logits is not None
        assert logits.tobytes() == model.logits(some_ids(20)).tobytes()


# ---- Ctrl-C

LONG_PROMPT = """
    import sys, time
    import llamac
    with llamac.load(sys.argv[1], threads=int(sys.argv[2])) as model, model.session() as session:
        for _ in range(int(sys.argv[3])):
            session.truncate(0)
            try:
                print("begun", flush=True)
                session.eval([token % 280 for token in range(8000)], logits=None)
            except KeyboardInterrupt:
                print(time.monotonic(), session.length(), flush=True)
        session.truncate(0)
        print(session.eval([1, 2, 3], logits="all").tobytes().hex())
"""


def start(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        preexec_fn=heed_signals,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=needs_threads)])
def test_ctrl_c_interrupts_a_long_prompt_within_50_ms(big_llama: Path, threads: int) -> None:
    times = []
    with start("-c", textwrap.dedent(LONG_PROMPT), big_llama, threads, 6) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        for _ in range(6):
            assert program.stdout.readline() == "begun\n"
            time.sleep(0.3)
            interrupted = time.monotonic()  # all processes share this clock
            program.send_signal(signal.SIGINT)
            ended, length = program.stdout.readline().split()
            times.append(float(ended) - interrupted)
            assert int(length) % CHUNK == 0
        logits = np.frombuffer(bytes.fromhex(program.stdout.readline()), np.float32)
        assert program.stderr.read() == ""
    assert program.returncode == 0
    assert min(times) < LIMIT + MARGIN
    with llamac.load(big_llama) as model:
        assert logits.tobytes() == model.logits([1, 2, 3]).tobytes()


# llamac run, announcing when it begins to read the prompt.
RUN = """
    import sys
    from llamac import __main__
    from llamac.cli import run
    prefill_progress = run.prefill_progress
    def announce(*arguments):
        print("begun", flush=True)
        return prefill_progress(*arguments)
    run.prefill_progress = announce
    sys.argv[0] = "llamac"
    __main__.main()
"""


def test_ctrl_c_during_the_prompt_ends_llamac_run_quietly(big_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("The hello world " * 800)

    def measure() -> float:
        with start("-c", textwrap.dedent(RUN), "run", big_llama, "-f", tmp_path / "prompt.txt", "-n", 1) as program:
            assert program.stdout is not None
            assert program.stderr is not None
            assert program.stdout.readline() == "begun\n"
            time.sleep(0.3)
            interrupted = time.monotonic()
            program.send_signal(signal.SIGINT)
            program.wait(TIMEOUT)
            seconds = time.monotonic() - interrupted
            assert (program.stdout.read(), program.stderr.read()) == ("", "")
        assert program.returncode == 130
        return seconds

    assert shortest(measure, LIMIT + MARGIN + EXIT) < LIMIT + MARGIN + EXIT


def test_ctrl_c_between_tokens_ends_llamac_run_quietly(tiny_llama: Path) -> None:
    arguments = ("-m", "llamac", "run", tiny_llama, "-i", "he", "-n", 0, "--no-echo", "-t", 1)
    with start(*arguments) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        assert program.stdout.read(1)
        os.kill(program.pid, signal.SIGINT)
        program.stdout.read()
        program.wait(TIMEOUT)
        text = program.stderr.read()
    # the program may end before the signal arrives
    assert (program.returncode, text) == (130, "") or (program.returncode == 0 and text.startswith("prompt "))


# ---- the helper thread


@pytest.fixture(autouse=True)
def no_idle_helpers() -> Iterator[None]:
    """End the helper threads that a test has left."""
    yield
    for helper in interrupt._idle:
        helper.end()
    interrupt._idle.clear()


@pytest.fixture(autouse=True)
def default_sigint_handler() -> Iterator[None]:
    """Install Python's handler. Python does not if the tests run as a background job, where shells ignore SIGINT."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


# Moments of an interruption: a method, and whether it comes before or after the call.
MOMENTS: dict[str, tuple[type, str, bool]] = {
    "before the thread starts": (threading.Thread, "start", True),
    "after the thread started": (threading.Thread, "start", False),
    "before the helper begins": (interrupt._Helper, "begin", True),
    "after the helper began": (interrupt._Helper, "begin", False),
}


def interrupted_eval(session: llamac.Session, monkeypatch: pytest.MonkeyPatch, moment: str) -> Floats:
    """Evaluate 300 tokens, with KeyboardInterrupt at a moment of the helper's start; return the last logits."""
    owner, name, before = MOMENTS[moment]
    original = getattr(owner, name)

    def raise_interrupt(*arguments: object) -> None:
        if not before:
            original(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            session.eval(some_ids(300))
    rest = session.eval(some_ids(300)[session.length() :])
    assert rest is not None
    return rest


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_interruption_while_the_helper_starts_leaves_the_session_usable(
    big_llama: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    with llamac.load(big_llama) as model, model.session() as session:
        found = interrupted_eval(session, monkeypatch, moment)
        session.truncate(0)
        expected = session.eval(some_ids(300))
    assert expected is not None
    assert found.tobytes() == expected.tobytes()


@pytest.fixture
def helpers(monkeypatch: pytest.MonkeyPatch) -> Helpers:
    """The helper of each call that a helper thread computed."""
    begin, used = interrupt._Helper.begin, []

    def begin_and_record(helper: interrupt._Helper, work: Callable[[], None]) -> None:
        used.append(helper)
        begin(helper, work)

    monkeypatch.setattr(interrupt._Helper, "begin", begin_and_record)
    return used


@pytest.mark.parametrize("isa", [None, "scalar"])
def test_attention_alone_can_make_a_pass_long(tiny_llama: Path, helpers: Helpers, isa: str | None) -> None:
    """A row after many positions takes long even if the model is small."""
    with llamac.load(tiny_llama, isa=isa) as model, model.session(sequences=2) as session:
        session.eval(some_ids(400), sequence=1, logits=None)
        helpers.clear()
        session._long_work = model.weight_bytes + 200 * session._work.position
        session.eval([1])
        session.step(2)
        session.eval_rows([(1, 0, 2, True)])
        assert helpers == []
        session.eval([1], sequence=1)
        session.observe([1], ["q"], sequence=1)
        session.eval_rows([(1, 1, 402, True), (1, 0, 3, True)])
        assert len(helpers) == 3


def test_attention_of_all_sequences_counts(tiny_llama: Path, helpers: Helpers) -> None:
    """Each row attends to the positions of its own sequence."""
    with llamac.load(tiny_llama) as model, model.session(sequences=64) as session:
        for position in range(20):
            session.eval_rows([(1, s, position, False) for s in range(64)])
        helpers.clear()
        without_attention = model.weight_bytes + 2 * 63 * model._multiply_adds
        session._long_work = without_attention + 64 * 20 * session._work.position + 1
        session.eval_rows([(1, s, 20, False) for s in range(64)])
        assert helpers == []
        session._long_work = without_attention + 64 * 21 * session._work.position
        session.eval_rows([(1, s, 21, False) for s in range(64)])
        assert len(helpers) == 1


def test_a_row_of_an_mtp_layer_reads_that_layer_and_the_output(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.bin", attention_model())
    with llamac.load(path) as model, model.session() as session:
        assert model.config["tied_output"]
        parts = "mtp.", f"layers.{model.config['n_layers']}.", "token_embedding.weight"
        tensors = [tensor for tensor in model.file.tensors if tensor.name.startswith(parts)]
        weights = sum(tensor.bytes for tensor in tensors)
        numbers = sum(t.shape[0] * t.shape[1] for t in tensors if len(t.shape) == 2)
        own_attention = session._work.position // model.config["n_layers"]
        assert weights < model.weight_bytes
        assert session._head is not None
        for rows, positions, work in (1, 0, weights), (5, 60, weights + 2 * 4 * numbers + 60 * own_attention):
            session._long_work = work
            assert session._head._prepare(rows, positions)
            session._long_work += 1
            assert not session._head._prepare(rows, positions)


def test_quantized_weights_do_not_make_a_long_prompt_short(tiny_llama: Path, tmp_path: Path, helpers: Helpers) -> None:
    """The cost of rows after the first is multiply-adds, not bytes read."""
    export(tiny_llama, tmp_path / "q4.bin", dtype="q4", probe_source=None)
    for path in (tiny_llama, tmp_path / "q4.bin"):
        with llamac.load(path) as model, model.session() as session:
            numbers = sum(t.shape[0] * t.shape[1] for t in model.file.tensors if len(t.shape) == 2)
            helpers.clear()
            session._long_work = model.weight_bytes + 2 * 99 * numbers
            session.eval(some_ids(50))
            assert helpers == []
            session.truncate(0)
            session.eval(some_ids(100))
            assert len(helpers) == 1


def test_steps_become_long_as_the_session_grows(tiny_llama: Path, helpers: Helpers) -> None:
    with llamac.load(tiny_llama) as model, model.session() as session:
        session._long_work = model.weight_bytes + 200 * session._work.position
        for _ in range(400):
            session.step(1)
    assert len(helpers) == 200
    assert len(set(helpers)) == 1  # one thread for all of them


def test_a_signal_handler_can_eval_during_a_long_pass(big_llama: Path, tiny_llama: Path, helpers: Helpers) -> None:
    """The handler's eval needs a second helper because the first one is busy."""
    found: list[Floats | None] = []
    big, tiny = llamac.load(big_llama), llamac.load(tiny_llama)
    with big, tiny, big.session() as session, tiny.session() as inner:
        inner._long_work = 0
        expected = inner.eval([1, 2, 3])
        inner.truncate(0)
        helpers.clear()
        previous = signal.signal(signal.SIGUSR1, lambda *_: found.append(inner.eval([1, 2, 3])))
        timer = threading.Timer(0.02, lambda: os.kill(os.getpid(), signal.SIGUSR1))
        try:
            timer.start()
            session.eval(some_ids(4000), logits=None)
        finally:
            timer.join()
            signal.signal(signal.SIGUSR1, previous)
    assert expected is not None
    assert found[0] is not None
    assert found[0].tobytes() == expected.tobytes()
    assert len(helpers) == len(set(helpers)) == 2


def test_an_idle_helper_keeps_no_reference_to_its_work(tiny_llama: Path, helpers: Helpers) -> None:
    """A session that nobody closes is freed with its last reference although the helper thread lives on."""
    model = llamac.load(tiny_llama)
    session = model.session()
    session._long_work = 0
    session.eval([1, 2, 3])
    assert len(helpers) == 1
    reference = weakref.ref(session)
    del session, model

    def is_gone() -> bool:
        gc.collect()
        return reference() is None

    wait_until(is_gone)


def test_a_forked_child_starts_its_own_helper(tiny_llama: Path, helpers: Helpers) -> None:
    with llamac.load(tiny_llama, threads=1) as model, model.session() as session:
        session._long_work = 0
        session.eval([1])
        child = os.fork()
        if not child:
            signal.alarm(20)  # ends a child that hangs
            session.eval([2])
            os._exit(len(set(helpers)))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
        session.eval([2])
    assert len(set(helpers)) == 1


def test_the_calling_thread_computes_if_no_thread_can_be_started(
    big_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with llamac.load(big_llama, threads=1) as model, model.session() as session:
        expected = session.eval(some_ids(300))
        session.truncate(0)
        monkeypatch.setattr(threading.Thread, "start", refuse)
        found = session.eval(some_ids(300))
        with pytest.raises(llamac.ContextFullError):
            session.eval([1] * 9000)
    assert expected is not None
    assert found is not None
    assert found.tobytes() == expected.tobytes()


# ---- tokenizing long texts


def test_ctrl_c_interrupts_tokenizing(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, helpers: Helpers) -> None:
    """The interrupted call ends in the background, and the next task does not wait for it."""
    release = threading.Event()

    with llamac.load(tiny_llama) as model, model.session() as session:
        session._long_work = 0
        encoder = type(model.tokenizer._loaded.encoder)
        encode = encoder.encode

        def encode_slowly(*arguments: Any) -> list[int]:
            os.kill(os.getpid(), signal.SIGINT)
            assert release.wait(TIMEOUT)
            return encode(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(encoder, "encode", encode_slowly)
            with pytest.raises(KeyboardInterrupt):
                model.tokenize("hello world " * 20_000)
        timer = threading.Timer(20, release.set)
        timer.start()
        session.eval([1])
        assert not release.is_set()
        timer.cancel()
        release.set()
    assert len(helpers) == len(set(helpers)) == 2


def test_ctrl_c_just_before_the_wait_is_not_lost() -> None:
    """The signal is noticed although it does not wake the waiting thread."""
    ended = threading.Event()

    def task() -> None:
        time.sleep(0.1)  # the main thread waits now
        _thread.interrupt_main()
        ended.wait(TIMEOUT)

    timer = threading.Timer(20, ended.set)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        interrupt.interruptible(task, ended.set)
    assert ended.is_set()
    assert timer.is_alive()
    timer.cancel()


def test_a_helper_tokenizes_long_texts(tiny_llama: Path, helpers: Helpers) -> None:
    with llamac.load(tiny_llama) as model:
        short = model.tokenize("hello world", add_special=False)
        assert helpers == []
        long = model.tokenize("hello world" + " hello world" * 20_000)
        assert len(helpers) == 1
    assert long[: 1 + len(short)] == [1, *short]
    assert len(long) >= 20_000
    assert model.tokenizer.decode(long) == "hello world" + " hello world" * 20_000


def test_a_forked_child_tokenizes_long_texts(tiny_llama: Path) -> None:
    """With threads of its own: those of the parent do not exist in it."""
    text = "hello world " * 20_000
    with llamac.load(tiny_llama) as model:
        expected = model.tokenize(text)
        child = os.fork()
        if not child:
            signal.alarm(20)  # ends a child that hangs
            os._exit(model.tokenize(text) != expected)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_other_threads_run_while_a_long_text_is_tokenized(tiny_llama: Path) -> None:
    def steps_meanwhile() -> int:
        begun, ended = threading.Event(), threading.Event()

        def tokenize() -> None:
            begun.set()
            model.tokenize("hello world " * 40_000)
            ended.set()

        threading.Thread(target=tokenize).start()
        begun.wait(TIMEOUT)
        steps = 0
        while not ended.wait(0.001):
            steps += 1
        return steps

    with llamac.load(tiny_llama) as model:
        model.tokenize("a")
        assert any(steps_meanwhile() > 10 for _ in range(ATTEMPTS))


def test_errors_of_the_helper_thread_reach_the_caller(big_llama: Path) -> None:
    with llamac.load(big_llama) as model, model.session(context=20) as session:
        with pytest.raises(llamac.ContextFullError, match="position 20"):
            session.eval_rows([(1, 0, position, False) for position in range(21)])
        assert session.length() == 0
