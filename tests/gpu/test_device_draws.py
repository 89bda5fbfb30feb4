"""Draws on the emulated device are those of the core's sampler, or none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import llamac
from builders import checkpoint, llama_config, some_ids, write_model
from device_arrays import put
from llamac import _core
from llamac.engine.rows import appended_rows, as_ids
from llamac.engine.sampling.device_draws import device_draw, drawing_on_device
from llamac.engine.sampling.params import ResolvedParams, SamplingParams, resolve
from llamac.errors import LlamacError
from llamac.gpu.draws import MOST_DRAWS, Draw, Drawing, DrawMemory
from llamac.gpu.emulator.emulator import Emulator
from llamac.gpu.sources import kernel_files

Floats = NDArray[np.float32]
FILES = [path for path in kernel_files() if path.stem == "draw"]
FILTERS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "min_p": 0.01},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.5, "top_p": 0.5, "min_p": 0.02},
    {"temperature": 0.8, "top_k": 40},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.2, "top_k": 1000, "top_p": 0.95, "min_p": 0.001},
]


@pytest.fixture(params=[{"seed": 1}, {"checked": True}], ids=["shuffled", "checked"])
def device(request: pytest.FixtureRequest, emulator: Callable[..., Emulator]) -> Emulator:
    return emulator(FILES, **request.param)


def draw_of(seed: int = 0, position: int = 0, **filters: Any) -> Draw:
    draw = device_draw(params_of(seed, **filters), position)
    assert draw is not None
    return draw


def params_of(seed: int = 0, **filters: Any) -> ResolvedParams:
    return resolve(SamplingParams(seed=seed, **filters), SamplingParams())


def drawn(device: Emulator, logits: Floats, n: int, draws: list[Draw | None]) -> tuple[list[int | None], Floats]:
    """The tokens of rows of logits, and the rows that the host receives."""
    memory, received = DrawMemory(device), np.full_like(logits, 7)
    drawing = Drawing(n, draws, [None] * len(draws))
    memory.deliver(int(put(device, logits)), received, drawing)
    memory.close()
    return drawing.tokens, received


def expected(row: Floats, n: int, draw: Draw) -> int:
    sampling = _core.Sampling(
        *(draw.temperature, draw.top_k, draw.top_p, draw.min_p, draw.seed), candidate=draw.candidate, typical_p=1
    )
    return _core.sample(row[:n].data, sampling, draw.position)


@pytest.mark.parametrize("n", [1, 5, 1024, 3001])
def test_tokens_are_those_of_the_core(device: Emulator, n: int) -> None:
    random = np.random.default_rng(n)
    draws: list[Draw | None] = [
        draw_of(seed, seed % 1000, **filters) for filters, seed in product(FILTERS, (1, 2, 1 << 63))
    ]
    logits = (4 * random.standard_normal((len(draws), n + 7), np.float32)).astype(np.float32)
    logits[:, n:] = 1e9  # padding
    tokens, received = drawn(device, logits, n, draws)
    for row, draw, token, other in zip(logits, draws, tokens, received, strict=True):
        assert draw is not None
        assert token == expected(row, n, draw)
        assert np.all(other == 7)


def test_numbers_that_are_not_drawn(device: Emulator) -> None:
    random = np.random.default_rng(3)
    logits = random.standard_normal((len(FILTERS), 2000), np.float32)
    logits[:, random.integers(0, 2000, 500)] = np.nan
    logits[:, random.integers(0, 2000, 500)] = -np.inf
    logits[:, [1500, 40]] = 9  # the first of equals
    logits[:, [7, 8, 9]] = [-0.0, 0.0, 0.0]
    draws: list[Draw | None] = [draw_of(5, 3, **filters) for filters in FILTERS]
    tokens, _ = drawn(device, logits, 2000, draws)
    assert tokens == [expected(row, 2000, draw) for row, draw in zip(logits, draws, strict=True) if draw]


def test_the_host_gets_rows_that_the_device_does_not_draw(device: Emulator) -> None:
    random = np.random.default_rng(4)
    logits = random.standard_normal((5, 4100), np.float32)
    logits[1] = 0  # too many tokens are as probable
    logits[2] = np.nan
    logits[3, 9] = np.inf
    one = draw_of(1, temperature=1.0, top_p=0.9)
    draws = [None, one, one, draw_of(temperature=0.0), draw_of(temperature=0.0)]
    tokens, received = drawn(device, logits, 4100, draws)
    assert tokens == [None, None, None, None, int(logits[4].argmax())]
    assert received[:4].tobytes() == logits[:4].tobytes()
    assert np.all(received[4] == 7)


def test_sums_that_rounding_could_decide_are_left_to_the_host(device: Emulator) -> None:
    logits = np.full((1, 64), -1000, np.float32)
    logits[0, [3, 5]] = 0  # half of the probability each
    draw = draw_of(temperature=1.0, top_p=0.5)
    tokens, received = drawn(device, logits, 64, [draw])
    assert tokens == [None]
    assert received.tobytes() == logits.tobytes()
    assert expected(logits[0], 64, draw) == 3


def test_many_draws_are_left_to_the_host(device: Emulator) -> None:
    logits = np.random.default_rng(5).standard_normal((MOST_DRAWS + 1, 9), np.float32)
    tokens, received = drawn(device, logits, 9, [draw_of(temperature=0.0)] * len(logits))
    assert tokens == [None] * len(logits)
    assert received.tobytes() == logits.tobytes()


def test_an_engine_draws_on_its_device(tmp_path: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMAC_CACHE", str(kernel_cache.parent))
    path = write_model(tmp_path / "model.bin", checkpoint(replace(llama_config(), vocab_size=300, n_token_ids=290)))
    by_device: list[list[int]] = []
    sample_rows = _core.sample_rows
    calls: list[int] = []

    def spy(logits: Any, n: int, samplings: list[_core.Sampling], *rest: Any) -> list[int | LlamacError]:
        calls.append(len(samplings))
        return sample_rows(logits, n, samplings, *rest)

    monkeypatch.setattr(_core, "sample_rows", spy)
    requests: list[dict[str, Any]] = [
        *({"seed": i, **filters} for i, filters in enumerate(FILTERS)),
        {"seed": 1, "temperature": 1.0, "repetition_penalty": 1.3},
        {"seed": 2, "temperature": 1.0, "logprobs": 1},
    ]
    for name in ("cpu", "emulator"):
        calls.clear()
        with llamac.load(path, device=name) as model, llamac.Engine(model, max_sequences=16) as engine:
            handles = [
                engine.submit(some_ids(5), SamplingParams(max_tokens=4, ignore_eos=True, **settings))
                for settings in requests
            ]
            by_device.append([token for handle in handles for token in handle.result().tokens])
        rows = sum(calls)
        assert rows == (4 * len(requests) if name == "cpu" else 4 * 2)
    assert by_device[0] == by_device[1]


def test_an_eval_of_another_session_is_not_drawn_from(
    tmp_path: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal handler can compute while a draw is in progress."""
    monkeypatch.setenv("LLAMAC_CACHE", str(kernel_cache.parent))
    path = write_model(tmp_path / "model.bin", checkpoint(llama_config()))
    with llamac.load(path, device="emulator") as model, model.session() as session, model.session() as other:
        with drawing_on_device(session, [draw_of(temperature=0.0)]) as tokens:
            logits = other.eval([3])
            assert tokens == [None]
            session._run(appended_rows(as_ids([3]), 0, 0, "last"))
        assert tokens == [int(logits[: model.n_token_ids].argmax())]


def test_a_stream_draws_on_the_device_of_its_own_session(
    tmp_path: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although a helper thread computes its passes."""
    monkeypatch.setenv("LLAMAC_CACHE", str(kernel_cache.parent))
    path = write_model(tmp_path / "model.bin", checkpoint(llama_config()))
    deliver = DrawMemory.deliver
    tokens: list[int | None] = []

    def spy(memory: DrawMemory, source: int, logits: Floats, drawing: Drawing | None) -> None:
        deliver(memory, source, logits, drawing)
        tokens.extend(drawing.tokens if drawing else [None])

    monkeypatch.setattr(DrawMemory, "deliver", spy)
    settings: dict[str, Any] = {"max_tokens": 6, "seed": 4, "temperature": 1.0, "top_p": 0.9, "ignore_eos": True}
    with llamac.load(path) as model, model.session() as session:
        expected = session.generate(some_ids(5), **settings).tokens
        following = session.sample(seed=3)
    assert not tokens
    with llamac.load(path, device="emulator") as model:
        assert model.generate(some_ids(5), **settings).tokens == expected
        assert tokens == [None, *expected[1:]]  # the prompt's logits come to the host
        tokens.clear()
        with model.session() as session:
            assert session.generate(some_ids(5), **settings).tokens == expected
            assert session.sample(seed=3) == following
        assert set(tokens) == {None}
