"""If any allocation of the core fails in an engine, an error says so, nothing leaks, and the engine goes on.

Some allocations fail in each test; all of them with `--failing-allocations 0`, which takes minutes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from failing_allocations import Failing, numbers_of
from held_engines import held

import llamac
from builders import checkpoint, llama_config, some_ids, write_model
from llamac import _core
from llamac.engine.batching import engine as engine_module
from llamac.errors import OutOfMemoryError
from processes import TIMEOUT
from prophet import Prophet, draft_at_any_cost
from waiting import wait_until

SEQUENCES, STATES = 6, 4
SHARED = some_ids(80)
# Prompts and settings of requests that use all that an engine has, most of them at the same time.
REQUESTS: list[tuple[list[int], dict[str, Any]]] = [
    ([*SHARED, 5], {}),
    ([*SHARED, 6, 7], {"logprobs": 2, "repetition_penalty": 1.1}),
    (some_ids(20, 2), {"n": 2}),
    (some_ids(21, 3), {"beam_width": 2, "temperature": 0}),
    (some_ids(12, 4), {"guide": llamac.Regex("[a-z]{3,9}")} if importlib.util.find_spec("llguidance") else {}),
    (some_ids(40, 5), {"prompt_logprobs": 2}),
    (some_ids(126, 6), {"context_overflow": "shift"}),
]
Found = list[list[int] | OutOfMemoryError]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer."""
    return write_model(tmp_path_factory.mktemp("model") / "m.bin", checkpoint(llama_config(n_layers=1)))


@pytest.fixture(autouse=True)
def few_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few cached prefixes: opening an engine allocates two lists for each, and these allocations are all alike."""
    monkeypatch.setattr(engine_module, "CACHED_STATES", STATES)


@pytest.fixture(params=["no prefixes", "prefixes", "prefixes on disk", "drafts", "draft model"])
def opened(
    request: pytest.FixtureRequest, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[llamac.Model], llamac.Engine]]:
    """A function that opens an engine for a model."""
    settings: dict[str, Any] = {"prefix_cache": request.param != "no prefixes"}
    if request.param == "prefixes on disk":
        settings["prefix_dir"] = tmp_path
    elif request.param == "draft model":
        draft_at_any_cost(monkeypatch, most=3)
        settings["draft_model"] = llamac.load(path)
    elif request.param == "drafts":
        prophet = Prophet(part_right=0.7, most=4)
        prophet.install(monkeypatch)
        with llamac.load(path) as model, model.session() as session:
            for prompt, chosen in REQUESTS:
                if "n" not in chosen and "beam_width" not in chosen:
                    found = session.generate(prompt, speculation=False, **options(chosen))
                    prophet.known[tuple(prompt)] = found.tokens

    yield lambda model: llamac.Engine(model, max_sequences=SEQUENCES, context=128, threads=1, **settings)
    if "draft_model" in settings:
        assert settings["draft_model"].kv_bytes == 0
        settings["draft_model"].close()


def options(chosen: dict[str, Any]) -> dict[str, Any]:
    return {"max_tokens": 6, "temperature": 0.9, "seed": 1, "ignore_eos": True, **chosen}


def results(engine: llamac.Engine) -> Found:
    """The tokens of all requests together, then those of the first two again, alone; or their errors."""
    requests: list[llamac.Request | OutOfMemoryError] = []
    with held(engine):
        for prompt, chosen in REQUESTS:
            try:
                requests.append(engine.submit(prompt, **options(chosen)))
            except OutOfMemoryError as error:
                requests.append(error)
    found = [tokens_of(request) for request in requests]
    for prompt, chosen in REQUESTS[:2]:
        try:
            found.append(engine.submit(prompt, **options(chosen)).result(TIMEOUT).tokens)
        except OutOfMemoryError as error:
            found.append(error)
    return found


def tokens_of(request: llamac.Request | OutOfMemoryError) -> list[int] | OutOfMemoryError:
    """The tokens of a request, or its error."""
    try:
        return request if isinstance(request, OutOfMemoryError) else request.result(TIMEOUT).tokens
    except OutOfMemoryError as error:
        return error


def assert_nothing_is_left(engine: llamac.Engine) -> None:
    """Check that no request has a sequence or pages, and that only cached prefixes have some."""
    assert engine.failure is None
    wait_until(lambda: engine.stats().running == engine.stats().waiting == 0)
    free, cache = engine._batch._admission._free_sequences, engine._cache
    assert sorted(free) == list(range(SEQUENCES))
    assert [engine._session.length(sequence) for sequence in free] == [0] * SEQUENCES
    if cache is not None:
        assert sorted([*cache._free, *map(cache._slot, cache._owners)]) == list(range(STATES))
    wait_until(lambda: engine.model.kv_bytes == engine.stats().prefix.bytes)  # reads from disk that went on have ended


@pytest.mark.parametrize("sign", [1, -1], ids=["once", "from then on"])
def test_any_allocation_of_an_engine_can_fail(
    request: pytest.FixtureRequest, path: Path, opened: Callable[[llamac.Model], llamac.Engine], sign: int
) -> None:
    most = request.config.getoption("failing_allocations")
    errors: list[OutOfMemoryError] = []

    with llamac.load(path) as model:
        with Failing(0) as whole, opened(model) as engine:
            expected = results(engine)
            assert (engine.stats().drafted_tokens > 0) == ("draft" in request.node.callspec.id)
        gc.collect()
        objects = _core.live_objects()
        for number in numbers_of(whole.count, most):
            with contextlib.ExitStack() as closing:
                with Failing(sign * number):
                    try:
                        engine = closing.enter_context(opened(model))
                    except OutOfMemoryError as error:
                        errors.append(error)
                        continue
                    found = results(engine)
                errors += [each for each in found if isinstance(each, OutOfMemoryError)]
                for each, wanted in zip(found, expected, strict=True):
                    assert each == wanted or isinstance(each, OutOfMemoryError), number
                assert_nothing_is_left(engine)
                assert results(engine) == expected, number
                assert_nothing_is_left(engine)
            assert model.kv_bytes == 0
    assert len(errors) > 1
    assert {"out of memory" in str(error) for error in errors} == {True}
    errors.clear()
    gc.collect()
    assert _core.live_objects() <= objects
