"""The draws of a batch: one call of the core for all rows that need no Python, each of which draws as if alone."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llamac
from builders import Floats, byte_ids
from llamac import SamplingParams, _core
from llamac.engine.sampling.params import resolve
from llamac.engine.sampling.sampler import Sampler, draw_rows
from llamac.errors import LlamacError

PROMPT = byte_ids("<think>")


def only_forty(ids: Any, row: Floats) -> None:
    row[:40] = -np.inf
    row[41:] = -np.inf


def broken(ids: Any, row: Floats) -> None:
    raise ZeroDivisionError("on purpose")


FREE: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "top_p": 0.9},
    {"repetition_penalty": 1.5, "banned_tokens": [3, 4]},
    {"mirostat_tau": 3.0, "mirostat_eta": 0.1},
    {"reasoning_budget": 5},  # not used up
]
IN_PYTHON: list[dict[str, Any]] = [
    {"reasoning_budget": 0},
    {"logits_processors": only_forty},
    {"logits_processors": broken},
]


@pytest.fixture
def model(tiny_llama: Path) -> Iterator[llamac.Model]:
    with llamac.load(tiny_llama) as model:
        yield model


@pytest.fixture
def drawn_rows(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The rows of each call of the core."""
    calls: list[list[int]] = []
    draw: Callable[..., Any] = _core.sample_rows

    def recorded(*arguments: Any) -> Any:
        calls.append(list(arguments[6]))
        return draw(*arguments)

    monkeypatch.setattr(_core, "sample_rows", recorded)
    return calls


def sampler(model: llamac.Model, settings: dict[str, Any], seed: int) -> Sampler:
    params = resolve(SamplingParams(**{"seed": seed, **settings}), SamplingParams())
    return Sampler(model, params, byte_ids("a") if "guide" in settings else PROMPT)  # reasoning is free of the guide


def drawn(samplers: list[Sampler], logits: Floats, n: int, threads: int = 2) -> list[str]:
    rows, positions = len(samplers), [10 + sampler.params.seed for sampler in samplers]
    found = draw_rows(samplers, memoryview(logits), n, [PROMPT] * rows, positions, threads)
    assert all(isinstance(token, int | LlamacError) for token in found)
    return [str(token) for token in found]


@pytest.mark.parametrize("seed", range(4))
def test_mixed_rows_draw_what_each_draws_alone(model: llamac.Model, drawn_rows: list[list[int]], seed: int) -> None:
    settings = [*FREE, *IN_PYTHON]
    if importlib.util.find_spec("llguidance"):
        settings.append({"guide": llamac.Regex("[a-c]+|x")})
    order = np.random.RandomState(seed).permutation(len(settings)).tolist()
    logits = np.random.RandomState(seed).standard_normal((len(order), model.n_token_ids + 3)).astype(np.float32)

    def samplers() -> list[Sampler]:
        return [sampler(model, settings[kind], kind) for kind in order]

    together = drawn(samplers(), logits, model.n_token_ids)
    in_python = range(len(FREE), len(FREE) + len(IN_PYTHON))
    assert drawn_rows == [[i for i, kind in enumerate(order) if kind not in in_python]]
    alone = [
        drawn([one], np.ascontiguousarray(logits[i : i + 1]), model.n_token_ids)[0] for i, one in enumerate(samplers())
    ]
    assert together == alone
    assert together[order.index(6)] == "40"
    assert "on purpose" in together[order.index(7)]
    assert byte_ids("<")[0] == int(together[order.index(5)])  # of the closing tag
    if len(order) > 8:
        assert int(together[order.index(8)]) in byte_ids("abcx")


def test_rows_without_restrictions_are_one_call(model: llamac.Model, drawn_rows: list[list[int]]) -> None:
    samplers = [sampler(model, settings, 1) for settings in FREE]
    drawn(samplers, np.zeros((len(FREE), model.n_token_ids), np.float32), model.n_token_ids)
    assert drawn_rows == [list(range(len(FREE)))]


def test_rows_that_python_draws_need_no_call(model: llamac.Model, drawn_rows: list[list[int]]) -> None:
    samplers = [sampler(model, settings, 1) for settings in IN_PYTHON]
    drawn(samplers, np.zeros((len(IN_PYTHON), model.n_token_ids), np.float32), model.n_token_ids)
    assert drawn_rows == []


def test_a_row_that_does_not_exist_is_an_error() -> None:
    logits: Any = np.zeros((2, 5), np.float32)
    for row in (2, -1):
        with pytest.raises(llamac.ArgumentError, match=f"there is no row {row} in 2 rows of logits"):
            _core.sample_rows(logits, 5, [_core.Sampling()], [0], None, 1, [row])
