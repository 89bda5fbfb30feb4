"""Sessions: results of evals, the same bits in every grouping, refused arguments, closed and busy sessions."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pytest

import llamac
from builders import Floats, some_ids
from llamac.errors import (
    ArgumentError,
    ArgumentTypeError,
    BusyError,
    CancelledError,
    ClosedError,
    ContextFullError,
    LlamacError,
)
from openmp import up_to
from processes import output_of
from waiting import wait_until

CONTEXT = 600
IDS = some_ids(311)  # more than one chunk of rows and more than one block of attention


def evaluate(session: llamac.Session, ids: Any, logits: Literal["last", "all"] = "all", sequence: int = 0) -> Floats:
    return session.eval(ids, logits=logits, sequence=sequence)


def same_bits(one: Floats, other: Floats) -> bool:
    return one.shape == other.shape and one.tobytes() == other.tobytes()


@pytest.fixture
def model(tiny: Path) -> Iterator[llamac.Model]:
    with llamac.load(tiny) as opened:
        yield opened


@pytest.fixture
def session(model: llamac.Model) -> Iterator[llamac.Session]:
    with model.session() as opened:
        yield opened


# ---- eval


def test_eval_returns_logits_of_all_tokens_the_last_or_none(model: llamac.Model) -> None:
    with model.session() as session:
        every = evaluate(session, IDS)
    assert every.shape == (len(IDS), 301)
    assert every.dtype == np.float32
    assert np.isfinite(every).all()
    assert len(np.unique(every[:, 5])) > 300  # rows differ
    with model.session() as session:
        last = evaluate(session, IDS, "last")
        assert last.shape == (301,)
        assert last.dtype == np.float32
        assert same_bits(last, every[-1])
    with model.session() as session:
        assert session.eval(IDS[:-1], logits=None) is None
        assert session.length() == len(IDS) - 1
        assert same_bits(evaluate(session, IDS[-1:], "last"), every[-1])


def test_model_logits_match_a_session(model: llamac.Model, session: llamac.Session) -> None:
    assert same_bits(model.logits(IDS), evaluate(session, IDS))


@pytest.mark.parametrize("kv", ["f32", "f16", "q8"])
def test_any_chunking_gives_the_same_bits(model: llamac.Model, kv: Literal["f32", "f16", "q8"]) -> None:
    with model.session(kv_dtype=kv) as session:
        whole = evaluate(session, IDS)
    for sizes in ([len(IDS)], [1, 5, 6, 7, 12, 64, 216], [255, 2, 54], [1] * len(IDS)):
        assert sum(sizes) == len(IDS)
        with model.session(kv_dtype=kv) as session:
            parts, at = [], 0
            for size in sizes:
                parts.append(evaluate(session, IDS[at : at + size]))
                at += size
        assert same_bits(np.concatenate(parts), whole), sizes


def test_a_batch_of_sequences_gives_the_bits_of_each_alone(model: llamac.Model) -> None:
    texts = [some_ids(count, seed) for seed, count in enumerate((90, 3, 270, 41))]
    alone = [model.logits(ids) for ids in texts]
    with model.session(sequences=4) as session:
        starts = (7, 0, 120, 41)  # some sequences have cached positions, the last one is not in the batch
        for number, start in enumerate(starts):
            if start:
                session.eval(texts[number][:start], sequence=number, logits=None)
        rows, expected = [], []
        for position in range(300):
            for number in (2, 0, 1):
                if starts[number] <= position < len(texts[number]):
                    want = position % 3 != 1
                    rows.append((texts[number][position], number, position, want))
                    if want:
                        expected.append(alone[number][position])
        found = session.eval_rows(rows)
        assert same_bits(found, np.stack(expected))
        assert [session.length(number) for number in range(4)] == [90, 3, 270, 41]


def test_rows_without_requested_logits_return_an_empty_array(session: llamac.Session) -> None:
    assert session.eval_rows([(4, 0, 0, False), (5, 0, 1, False)]).shape == (0, 301)
    assert session.length() == 2
    with pytest.raises(ArgumentError, match="no rows to eval"):
        session.eval_rows([])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (3, "rows must be a list of rows, not int"),
        ([7], "a row must be (token, sequence, position, whether to return its logits), not int"),
        ([(7, 0, 0)], "a row must be (token, sequence, position, whether to return its logits), not tuple"),
    ],
)
def test_malformed_rows_are_refused(session: llamac.Session, rows: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        session.eval_rows(rows)
    assert session.length() == 0


def test_ids_can_be_any_iterable_of_integers(model: llamac.Model) -> None:
    expected = model.logits([1, 2, 3])
    for ids in ((1, 2, 3), range(1, 4), iter([1, 2, 3]), np.array([1, 2, 3]), np.array([1, 2, 3], np.uint16)):
        assert same_bits(model.logits(cast("Any", ids)), expected)


# ---- truncate and the end of the context


def test_eval_after_truncate_gives_the_bits_of_a_fresh_session(model: llamac.Model, session: llamac.Session) -> None:
    first = evaluate(session, IDS)
    for length in (300, 256, 17, 0):
        session.truncate(length)
        assert session.length() == length
        session.eval(some_ids(9, seed=5), logits=None)
        session.truncate(length)
        assert same_bits(evaluate(session, IDS[length:]), first[length:])
    with pytest.raises(ArgumentError, match="length 312: expected 0 to 311"):
        session.truncate(312)
    with pytest.raises(ArgumentError, match="length -1: expected 0 to 311"):
        session.truncate(-1)
    assert session.length() == 311


def test_truncate_affects_one_sequence(model: llamac.Model) -> None:
    with model.session(sequences=2) as session:
        for number in (0, 1):
            session.eval(IDS[:20], sequence=number, logits=None)
        session.truncate(5, sequence=1)
        assert (session.length(0), session.length(1)) == (20, 5)
        assert same_bits(evaluate(session, IDS[20:30]), model.logits(IDS[:30])[20:])


def test_tokens_beyond_the_context_are_refused_and_change_nothing(model: llamac.Model) -> None:
    with model.session(context=40) as session:
        session.eval(IDS[:30], logits=None)
        before = session.memory()
        with pytest.raises(ContextFullError, match="11 tokens do not fit: 30 of the context's 40 positions are taken"):
            session.eval(IDS[30:41])
        with pytest.raises(ContextFullError, match="row 10: position 40 does not fit the context of 40 positions"):
            session.eval_rows([(1, 0, position, False) for position in range(30, 41)])
        assert (session.length(), session.memory()) == (30, before)
        assert same_bits(evaluate(session, IDS[30:40]), model.logits(IDS[:40])[30:])
        assert session.length() == 40
        with pytest.raises(ContextFullError):
            session.eval([1])
        with pytest.raises(ContextFullError):
            model.logits([1] * (CONTEXT + 1))


# ---- refused arguments


def test_malformed_ids_are_refused_and_change_nothing(model: llamac.Model, session: llamac.Session) -> None:
    session.eval(IDS[:30], logits=None)
    before = session.memory()
    wrong: list[tuple[Any, str]] = [
        ([], "no tokens"),
        (np.array([], np.int64), "no tokens"),
        ("text", "text: use model.tokenize"),
        (b"bytes", "token ids must be a sequence of integers, not bytes"),
        (bytearray(8), "not bytearray"),
        ({1, 2}, "not set"),  # without an order
        ({1: 2}, "not dict"),
        ([1, 2.0], "integers"),
        ([1, None], "integers"),
        ([1, True], "32-bit integers: 'bool' object"),
        (np.array([True, False]), "32-bit integers: 'bool' object"),
        (np.array([True, False], object), "32-bit integers: 'bool' object"),
        ([1, np.True_], "integers"),
        (["1"], "integers"),
        (np.array([1.0, 2.0]), "integers"),
        (np.ones((2, 3), np.int64), "integers"),
        (np.array(3), "integers"),
        (5, "integers"),
        ([2**31], "32-bit integers"),
        (np.array([2**40]), "32-bit integers"),
        ([1, 2, 301], "row 2: token is 301, expected 0 to 300"),
        ([1, -1], "row 1: token is -1, expected 0 to 300"),
    ]
    for ids, message in wrong:
        with pytest.raises(ArgumentError, match=message):
            session.eval(ids)
        with pytest.raises(ArgumentError, match=message):
            session.observe(ids, ["logits"])
    assert (session.length(), session.memory()) == (30, before)
    assert same_bits(evaluate(session, IDS[30:33]), model.logits(IDS[:33])[30:])


def test_malformed_rows_are_refused_and_change_nothing(model: llamac.Model) -> None:
    with model.session(sequences=2) as session:
        session.eval(IDS[:4], logits=None)
        good = (1, 0, 4, True)
        for row, message in (
            ((1, 0, 6, True), "row 1: position is 6, but sequence 0 continues at 5"),
            ((1, 0, 4, True), "row 1: position is 4, but sequence 0 continues at 5"),
            ((1, 1, 1, True), "row 1: position is 1, but sequence 1 continues at 0"),
            ((1, 2, 0, True), "row 1: sequence is 2, expected 0 to 1"),
            ((1, -1, 0, True), "row 1: sequence is -1, expected 0 to 1"),
            ((999, 0, 5, True), "row 1: token is 999, expected 0 to 300"),
            ((1.5, 0, 5, True), "integers"),
            ((True, 0, 5, True), "32-bit integers: 'bool' object"),
        ):
            with pytest.raises(ArgumentError, match=message):
                session.eval_rows(cast("Any", [good, row]))
        assert (session.length(0), session.length(1)) == (4, 0)
        assert same_bits(session.eval_rows([good])[0], model.logits([*IDS[:4], 1])[-1])


def test_invalid_arguments_of_session_methods_are_refused(session: llamac.Session) -> None:
    anything = cast("Any", session)
    with pytest.raises(ArgumentError, match="logits is 'first', expected 'last', 'all' or None"):
        anything.eval([1], logits="first")
    for sequence in (1, -1, 2**40):
        for use in (
            lambda n: session.eval([1], sequence=n),
            lambda n: session.length(n),
            lambda n: session.truncate(0, sequence=n),
            lambda n: session.observe([1], ["q"], sequence=n),
        ):
            with pytest.raises(ArgumentError, match="sequence"):
                use(sequence)
    with pytest.raises(ArgumentError, match="length"):
        session.truncate(2**40)
    with pytest.raises(ArgumentTypeError, match="length must be an integer, not float"):
        anything.truncate(1.0)
    with pytest.raises(ArgumentTypeError, match="sequence must be an integer, not str"):
        anything.eval([1], sequence="a")
    for stages in (5, None, "q", ["q", 5], [("q",)], [("q", 0, 1)], [(0, "q")], [b"q"]):
        with pytest.raises(ArgumentTypeError, match="stages"):
            anything.observe([1], stages)
    with pytest.raises(ArgumentTypeError, match="a stage's layer must be an integer, not str"):
        anything.observe([1], [("q", "0")])
    assert session.length() == 0


INVALID_OPTIONS: list[tuple[dict[str, Any], type[LlamacError], str]] = [
    ({"kv_dtype": "q4"}, ArgumentError, "kv_dtype is 'q4', expected 'f32', 'f16', 'q8' or None"),
    ({"kv_dtype": ""}, ArgumentError, "kv_dtype is ''"),
    ({"threads": 0}, ArgumentError, "threads is 0, expected 1 to 1024"),
    ({"threads": -2}, ArgumentError, "threads is -2"),
    ({"threads": 2**40}, ArgumentError, "threads is 1099511627776"),
    ({"isa": "x"}, ArgumentError, "isa is 'x'; this build has .*scalar"),
    ({"isa": ""}, ArgumentError, "isa is ''"),
    ({"context": 0}, ArgumentError, "context is 0, expected 1 to 600"),
    ({"context": -1}, ArgumentError, "context is -1, expected 1 to 600"),
    ({"context": 601}, ArgumentError, "context is 601, expected 1 to 600"),
    ({"context": 2**40}, ArgumentError, "context is 1099511627776"),
]


@pytest.mark.parametrize(("options", "error", "message"), INVALID_OPTIONS, ids=[str(row[0]) for row in INVALID_OPTIONS])
def test_invalid_options_are_refused_by_load_and_by_sessions(
    tiny: Path, options: dict[str, Any], error: type[LlamacError], message: str
) -> None:
    with pytest.raises(error, match=message):
        llamac.load(tiny, **options)
    with llamac.load(tiny) as model, pytest.raises(error, match=message):
        model.session(**options)


def test_unknown_and_mistyped_options_are_refused(tiny_llama: Path, model: llamac.Model) -> None:
    for name in ("kv", "cache"):
        with pytest.raises(TypeError, match=name):
            llamac.load(tiny_llama, **{name: "cpu"})  # type: ignore[arg-type]
    for sequences in (0, -1, 65537, 2**40):
        with pytest.raises(ArgumentError, match=f"^sequences is {sequences}"):
            model.session(sequences=sequences)
    for name in ("sequences", "context", "threads"):
        for wrong in (1.5, "1", True):
            with pytest.raises(ArgumentTypeError, match=f"{name} must be an integer, not {type(wrong).__name__}"):
                model.session(**{name: wrong})  # type: ignore[arg-type]
    for name in ("kv_dtype", "isa"):
        with pytest.raises(ArgumentTypeError, match=f"{name} must be a str, not list"):
            model.session(**{name: ["f16"]})  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        model.session(batch=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        llamac.load(tiny_llama, n_ctx=3)  # type: ignore[call-arg]


# ---- settings and memory


def test_sessions_inherit_the_options_of_load_unless_overridden(tiny_llama: Path) -> None:
    with llamac.load(tiny_llama, context=50, kv_dtype="f16", threads=up_to(2), isa="scalar") as model:
        with model.session() as session:
            assert (session.context, session.kv_dtype, session.threads, session.isa) == (50, "f16", up_to(2), "scalar")
            assert session.model is model
        with model.session(context=600, kv_dtype="f32", threads=1) as session:
            assert (session.context, session.kv_dtype, session.threads, session.isa) == (600, "f32", 1, "scalar")
        with pytest.raises(ContextFullError):
            model.logits([1] * 51)


def test_kv_dtype_defaults_to_the_files_precision(tiny_llama: Path, tiny_gpt2: Path) -> None:
    found = {}
    for path in (tiny_llama, tiny_gpt2):
        with llamac.load(path) as model, model.session() as session:
            found[path] = session.kv_dtype
    assert found == {tiny_llama: "f32", tiny_gpt2: "f16"}


def test_caches_in_f16_and_q8_are_close_to_f32_and_smaller(model: llamac.Model) -> None:
    logits: dict[str, Any] = {}
    bytes_held: dict[str, int] = {}
    for kv in ("f32", "f16", "q8"):
        with model.session(kv_dtype=kv) as session:
            assert session.kv_dtype == kv
            logits[kv] = evaluate(session, IDS)
            bytes_held[kv] = session.memory()["kv"]
    assert bytes_held["f16"] * 2 == bytes_held["f32"]
    # of 64 positions: keys in strips of 16, with scales in lines of 64 bytes and heads padded to 32; scales, values
    config = model.config
    groups, width = -(-config["head_dim"] // 32), -(-config["head_dim"] // 16) * 16
    page = 4 * (-(-groups // 2) * 64 + groups * 512) + 128 + 64 * width
    assert bytes_held["q8"] == config["n_layers"] * config["n_kv_heads"] * page * -(-len(IDS) // 64)
    for name, limit in {"f16": 0.05, "q8": 0.5}.items():
        assert same_bits(logits[name][:1], logits["f32"][:1]) is False
        error = np.abs(logits[name] - logits["f32"]).max() / np.abs(logits["f32"]).max()
        assert 0 < error < limit, (name, error)


def test_memory_reports_the_allocated_pages(tiny_llama: Path) -> None:
    with llamac.load(tiny_llama) as model, model.session(sequences=2) as session:
        assert session.memory()["kv"] == 0
        small = session.memory()["activations"]
        session.eval([1], logits=None)
        page = session.memory()["kv"]  # 64 positions; values may be padded
        least = 64 * model.config["n_layers"] * 2 * model.config["n_kv_heads"] * model.config["head_dim"] * 4
        assert least <= page < 2 * least
        for length, pages in ((64, 1), (65, 2), (300, 5)):
            session.eval([1] * (length - session.length()), logits=None)
            assert session.memory()["kv"] == pages * page
        assert 0 < small < session.memory()["activations"] < 1_000_000
        session.eval([1], sequence=1, logits=None)
        assert session.memory()["kv"] == 6 * page
        session.truncate(64)
        assert session.memory()["kv"] == 2 * page


# ---- closed


def test_every_use_of_a_closed_session_is_a_closed_error(model: llamac.Model) -> None:
    session = model.session()
    session.eval([1])
    session.close()
    session.close()
    assert session.closed
    for use in (
        lambda: session.eval([1]),
        lambda: session.eval_rows([(1, 0, 0, True)]),
        lambda: session.observe([1], ["q"]),
        lambda: session.truncate(0),
        lambda: session.length(),
        lambda: session.memory(),
        lambda: session.context,
        lambda: session.kv_dtype,
        lambda: session.threads,
        lambda: session.isa,
        lambda: session.cancel(),
        lambda: session.__enter__(),
    ):
        with pytest.raises(ClosedError, match="the session is closed"):
            use()


def test_closing_a_model_closes_its_sessions_and_file(tiny: Path) -> None:
    model = llamac.load(tiny)
    session = model.session()
    tokenizer = model.tokenizer
    model.close()
    model.close()
    assert model.closed
    assert session.closed
    for use in (
        lambda: session.eval([1]),
        lambda: model.session(),
        lambda: model.logits([1]),
        lambda: model.generate("a"),
        lambda: model.stream([1]),
        lambda: model.tokenize("a"),
        lambda: model.detokenize([4]),
        lambda: model.__enter__(),
        lambda: model.file.section("tokenizer"),
        lambda: model.file.tensor("token_embedding.weight"),
    ):
        with pytest.raises(ClosedError, match="closed"):
            use()
    assert "closed" in repr(model)
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"  # a tokenizer outlives its model
    assert model.config["vocab_size"] == 301


def test_a_model_can_be_closed_while_other_threads_open_sessions(tiny_llama: Path) -> None:
    """Frequent thread switches make the race likely at every Python instruction."""
    program = """
        import sys, threading, llamac
        sys.setswitchinterval(1e-6)
        def make(model):
            try:
                while True:
                    model.session().length()
            except llamac.ClosedError:
                pass
        for _ in range(20):
            model = llamac.load(sys.argv[1])
            threads = [threading.Thread(target=make, args=(model,), daemon=True) for _ in range(3)]
            for thread in threads:
                thread.start()
            model.close()
            for thread in threads:
                thread.join()
    """
    assert output_of(program, tiny_llama) == ""


# ---- busy


@pytest.fixture
def busy(big_llama: Path) -> Iterator[tuple[llamac.Model, llamac.Session]]:
    """A session in which another thread computes until the test ends."""
    outcomes: list[BaseException | None] = []
    with llamac.load(big_llama, threads=1) as model, model.session() as session:

        def compute() -> None:
            try:
                session.eval(some_ids(8000), logits=None)
                outcomes.append(None)
            except CancelledError as error:
                outcomes.append(error)

        thread = threading.Thread(target=compute)
        thread.start()
        wait_until(lambda: session.memory()["kv"])  # reserved when the eval begins
        yield model, session
        session.cancel()
        thread.join()
    assert isinstance(outcomes[0], CancelledError)  # the eval was still running when the test ended


def test_a_busy_session_refuses_a_second_thread(busy: tuple[llamac.Model, llamac.Session]) -> None:
    model, session = busy
    uses: tuple[Callable[[], object], ...] = (
        lambda: session.eval([1]),
        lambda: session.eval_rows([(1, 0, 0, True)]),
        lambda: session.truncate(0),
        session.tokens,
        session.close,
        model.close,
    )
    for use in uses:
        with pytest.raises(BusyError, match="another thread"):
            use()
    assert not session.closed
    with model.session() as other:  # the model itself is not busy
        assert evaluate(other, [1], "last").shape == (301,)


def test_other_python_threads_run_during_an_eval(busy: tuple[llamac.Model, llamac.Session]) -> None:
    """While the eval runs, which `busy` checks in the end, this thread gets time to compute."""
    end = time.thread_time() + 0.05
    while time.thread_time() < end:
        pass
