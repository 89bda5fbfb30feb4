"""Draws of a batch's rows on several threads, and the order in which large lists are sorted: no number changes."""

from __future__ import annotations

from array import array
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from llamac import _core
from llamac.errors import LlamacError

Settings = dict[str, Any]
SETTINGS: list[Settings] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.9, "typical_p": 0.9},
    {"temperature": 1.0, "top_k": 2000},
    {"temperature": 1.0, "mirostat_tau": 4.0, "mirostat_eta": 0.1},
]


@pytest.mark.parametrize("rows", [1, 2, 7, 24])
@pytest.mark.parametrize("n", [50, 40000])
def test_the_tokens_of_rows_do_not_depend_on_the_threads(rows: int, n: int) -> None:
    logits = np.random.RandomState(rows).standard_normal((rows, n + 16)).astype(np.float32)
    logits[:, n:] = 100  # padding, which no draw may return
    if rows > 4:
        logits[3] = np.nan

    def drawn(threads: int) -> tuple[list[object], list[float]]:
        samplings = [_core.Sampling(seed=i, **SETTINGS[i % len(SETTINGS)]) for i in range(rows)]
        for sampling in samplings[::3]:
            sampling.adjust(repetition_penalty=1.3, presence_penalty=0.5)
        histories: list[Any] = [_core.History(array("i", range(i + 5))) for i in range(rows)]
        for history in histories:
            history.mu = 8.0
        positions = [100 + i for i in range(rows)]
        found = _core.sample_rows(cast("Any", logits), n, samplings, positions, histories, threads)
        if threads == 1:
            for i in range(rows):
                if not isinstance(found[i], LlamacError):
                    history = _core.History(array("i", range(i + 5)))
                    history.mu = 8.0
                    assert _core.sample(cast("Any", logits[i, :n]), samplings[i], positions[i], history) == found[i]
        return [str(token) for token in found], [history.mu for history in histories]

    expected = drawn(1)
    assert all(0 <= int(token) < n for i, token in enumerate(expected[0]) if i != 3 or rows <= 4)  # type: ignore[call-overload]
    if rows > 4:
        assert "none of the logits is a number" in str(expected[0][3])
    for threads in (2, 3, 8, 100):
        assert drawn(threads) == expected


def top_p_then_typical(logits: NDArray[np.float32], top_p: float, typical_p: float, uniform: float) -> int:
    """The definition, one candidate after another: each sum has the order of the list before it."""
    exact = logits.astype(np.float64) - float(logits.max())
    p = np.exp(exact).astype(np.float32)
    order = np.lexsort((np.arange(len(p)), -p))
    total = np.cumsum(p.astype(np.float64))[-1]
    sums = np.cumsum(p[order].astype(np.float64))
    kept = order[: 1 + int((sums[:-1] < np.float64(np.float32(top_p)) * total).sum())]
    masses = p[kept].astype(np.float64)
    total = np.cumsum(masses)[-1]
    surprise = np.cumsum(masses * -exact[kept])[-1] / total
    distance = np.abs((-exact[kept] - surprise).astype(np.float32))
    nearest = np.argsort(distance, kind="stable")
    sums = np.cumsum(masses[nearest])
    n = 1 + int((sums[:-1] < np.float64(np.float32(typical_p)) * total).sum())
    left = np.sort(nearest[:n])  # in the order of the list
    masses = masses[left]
    target = uniform * np.cumsum(masses)[-1]
    return int(kept[left[min(int((np.cumsum(masses) <= target).sum()), n - 1)]])


@pytest.mark.parametrize("n", [3, 900, 1500, 20000, 131072])
@pytest.mark.parametrize("kind", ["even", "usual", "sharp", "equal", "steps"])
def test_typical_p_after_top_p_draws_the_token_of_the_definition(n: int, kind: str) -> None:
    """More than a thousand candidates are sorted by the bits of their probabilities."""
    scale = {"even": 0.01, "usual": 1.0, "sharp": 6.0, "equal": 0.0, "steps": 1.0}[kind]
    logits = (np.random.RandomState(n).standard_normal(n) * scale).astype(np.float32)
    if kind == "steps":
        logits = (np.round(logits * 2) / 2).astype(np.float32)  # many candidates of one probability
    # without filters, the draw from equal logits shows the random number of a seed and a position
    ruler = np.zeros(1 << 16, np.float32)
    for position in range(4):
        for top_p, typical_p in ((0.9, 0.8), (0.5, 0.3)):
            sampling = _core.Sampling(temperature=1.0, seed=3, top_p=top_p, typical_p=typical_p)
            uniform = _core.sample(cast("Any", ruler), _core.Sampling(temperature=1.0, seed=3), position) / (1 << 16)
            found = _core.sample(cast("Any", logits), sampling, position)
            # the ruler has 16 of the 24 bits: the token lies between the tokens of the ends of the range
            ends = [top_p_then_typical(logits, top_p, typical_p, uniform + more) for more in (0.0, 2.0**-16 - 2.0**-24)]
            assert found in ends or is_between(logits, ends[0], found, ends[1])


def is_between(logits: NDArray[np.float32], first: int, token: int, last: int) -> bool:
    """Whether a token ranks between two others."""
    keys = [(-float(logits[i]), i) for i in (first, token, last)]
    return keys[0] <= keys[1] <= keys[2]
