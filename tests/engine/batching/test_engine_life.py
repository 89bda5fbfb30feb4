"""The life of an engine: every request ends, whoever closes the engine or its model, and whoever waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from held_engines import held

import llamac
from processes import TIMEOUT, output_of
from waiting import wait_until


@pytest.fixture(autouse=True)
def no_thread_fails(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Check that no thread ends with an exception."""
    failures: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    yield
    assert not failures


def test_a_logits_processor_can_close_its_engine(model: llamac.Model) -> None:
    engine = llamac.Engine(model, max_sequences=2, kv_tokens=2000)

    def close(ids: object, logits: object) -> None:
        engine.close()

    with held(engine):
        requests = [engine.submit([5], max_tokens=10, ignore_eos=True, logits_processors=close) for _ in range(3)]
    assert {request.result(TIMEOUT).finish_reason for request in requests} == {"cancelled"}
    engine.close()  # waits for the thread
    assert engine.closed
    assert (engine.failure, model.kv_bytes, model.kv_budget) == (None, 0, None)


def test_a_second_close_waits_until_the_memory_is_free(model: llamac.Model) -> None:
    engine = llamac.Engine(model, kv_tokens=2000)
    with held(engine) as reached:
        request = engine.submit([5], max_tokens=10)
        assert reached.wait(TIMEOUT)
        closing = [threading.Thread(target=engine.close) for _ in range(2)]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join(0.2)
            assert thread.is_alive()
    for thread in closing:
        thread.join(TIMEOUT)
    assert (model.kv_bytes, model.kv_budget) == (0, None)
    assert request.result(TIMEOUT).finish_reason == "cancelled"


def test_a_signal_handler_can_close_an_engine_while_it_closes(
    model: llamac.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = llamac.Engine(model, kv_tokens=2000)
    free = engine._session.close

    def interrupted() -> None:  # a handler runs between two instructions of the main thread
        monkeypatch.setattr(engine._session, "close", free)
        engine.close()
        free()

    monkeypatch.setattr(engine._session, "close", interrupted)
    closing = threading.Thread(target=engine.close, daemon=True)
    closing.start()
    closing.join(TIMEOUT)
    assert not closing.is_alive()
    assert (model.kv_bytes, model.kv_budget, model._memory.engine_logits) == (0, None, 0)


@pytest.mark.parametrize("has_computed", [False, True])
def test_an_error_while_the_memory_is_freed_reaches_close(
    model: llamac.Model, monkeypatch: pytest.MonkeyPatch, has_computed: bool
) -> None:
    engine = llamac.Engine(model)
    if has_computed:
        engine.generate([[5]], max_tokens=1)

    def fail() -> None:
        raise OSError("no space left on the device")

    with monkeypatch.context() as patched:
        patched.setattr(engine._session, "close", fail)
        with pytest.raises(OSError, match="no space left"):
            engine.close()
    engine.close()
    engine._session.close()


def test_requests_end_if_the_model_closes_before_the_engine(tiny_llama: Path) -> None:
    model = llamac.load(tiny_llama)
    engine = llamac.Engine(model, max_sequences=2)
    with held(engine, 2) as reached:
        requests = [engine.submit([5], max_tokens=100, ignore_eos=True) for _ in range(3)]
        requests.append(engine.submit([5], max_tokens=100, beam_width=2))
        assert reached.wait(TIMEOUT)
        model.close()
        closing = threading.Thread(target=engine.close)
        closing.start()
        wait_until(lambda: engine.closed)
    closing.join(TIMEOUT)
    for request in requests:
        with contextlib.suppress(llamac.ClosedError):
            request.result(TIMEOUT)
        assert request.done


def test_a_closed_model_is_named_as_the_cause(tiny_llama: Path) -> None:
    model = llamac.load(tiny_llama)
    with llamac.Engine(model) as engine:
        with held(engine, 1) as reached:
            request = engine.submit([5], max_tokens=100, ignore_eos=True)
            assert reached.wait(TIMEOUT)
            model.close()
        with pytest.raises(llamac.ClosedError, match="closed"):
            request.result(TIMEOUT)
        wait_until(lambda: engine.failure is not None)
        assert isinstance(engine.failure, llamac.ClosedError)


async def awaited(request: llamac.Request) -> object:
    return await request


async def iterated(request: llamac.Request) -> object:
    return [piece async for piece in request]


@pytest.mark.parametrize(
    "wait",
    [
        lambda engine, request: engine.generate([[5]], max_tokens=1),
        lambda engine, request: engine.submit([5], max_tokens=1).result(),
        lambda engine, request: list(engine.submit([5], max_tokens=1)),
        lambda engine, request: request().result(),
        lambda engine, request: engine.generate([[5]] * 3, max_tokens=1),
        lambda engine, request: asyncio.run(awaited(engine.submit([5], max_tokens=1))),
        lambda engine, request: asyncio.run(iterated(engine.submit([5], max_tokens=1))),
    ],
)
def test_the_engines_thread_cannot_wait_for_its_own_requests(
    model: llamac.Model, wait: Callable[[llamac.Engine, Any], object]
) -> None:
    requests: list[llamac.Request] = []
    with llamac.Engine(model, max_queue=2) as engine:

        def call(ids: object, logits: object) -> None:
            wait(engine, lambda: requests[0])

        with held(engine):
            requests.append(engine.submit([5], max_tokens=2, logits_processors=call))
        with pytest.raises(llamac.LlamacError, match="the engine's own thread"):
            requests[0].result(TIMEOUT)
        assert len(engine.generate([[5]], max_tokens=2, ignore_eos=True)[0].tokens) == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_refuses_the_engine_of_its_parent(tiny_llama: Path) -> None:
    program = """
        import os, sys, llamac
        model = llamac.load(sys.argv[1])
        idle, used = llamac.Engine(model), llamac.Engine(model)
        used.generate([[5]], max_tokens=2)
        earlier = used.submit([5], max_tokens=2)
        earlier.result()
        if os.fork():
            assert os.wait()[1] == 0
            print(used.generate([[5]], max_tokens=2, ignore_eos=True)[0].finish_reason)
            sys.exit()
        try:
            used.submit([5], max_tokens=2)
        except llamac.ClosedError as error:
            print(error)
        earlier.result()
        print(idle.generate([[5]], max_tokens=2, ignore_eos=True)[0].finish_reason)
        used.close(), idle.close()
        sys.stdout.flush()
        os._exit(0)
    """
    refused, *rest = output_of(program, tiny_llama).splitlines()
    assert "forked" in refused
    assert rest == ["length", "length"]
