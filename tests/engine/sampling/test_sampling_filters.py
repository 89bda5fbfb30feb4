"""Typical-p, XTC and mirostat against definitions in NumPy, and as state of generations."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from held_engines import held
from numpy.typing import NDArray

import llamac
from builders import Floats
from llamac import SamplingParams, _core
from llamac.errors import ArgumentError

BOS = 1


def draws(logits: Floats, n: int, **settings: Any) -> NDArray[np.int64]:
    """How often each token is drawn."""
    sampling = _core.Sampling(temperature=1.0, seed=3, **settings)
    found = [_core.sample(cast("Any", logits), sampling, position) for position in range(n)]
    return np.bincount(found, minlength=len(logits))


def softmax(logits: Floats) -> NDArray[np.float64]:
    p: NDArray[np.float64] = np.exp(logits.astype(np.float64) - logits.max())
    p /= p.sum()
    return p


def typical(p: NDArray[np.float64], mass: float) -> NDArray[np.float64]:
    """What locally typical sampling leaves of a distribution."""
    kept = np.flatnonzero(p)
    surprise = -np.log(p[kept])
    order = kept[np.argsort(np.abs(surprise - (p[kept] * surprise).sum()), kind="stable")]
    order = order[: 1 + int((np.cumsum(p[order])[:-1] < mass).sum())]
    found = np.zeros_like(p)
    found[order] = p[order]
    found /= found.sum()
    return found


def is_likely(counts: NDArray[np.int64], p: NDArray[np.float64]) -> bool:
    """A chi-square test, and nothing outside the distribution."""
    mean = p * counts.sum()
    used = mean > 0
    chi = (((counts - mean) ** 2)[used] / mean[used]).sum()
    degrees = max(1, int(used.sum()) - 1)
    return not counts[~used].any() and bool(chi < degrees + 5 * np.sqrt(2 * degrees))


@pytest.mark.parametrize("mass", [0.1, 0.5, 0.9, 0.99])
def test_typical_p_leaves_the_defined_distribution(mass: float) -> None:
    logits = (np.random.RandomState(1).standard_normal(20) * 1.5).astype(np.float32)
    assert is_likely(draws(logits, 8000, typical_p=mass), typical(softmax(logits), mass))
    top = softmax(np.where(np.argsort(np.argsort(-logits)) < 6, logits, -np.inf).astype(np.float32))
    assert is_likely(draws(logits, 8000, typical_p=mass, top_k=6), typical(top, mass))


def test_typical_p_keeps_what_transformers_keeps() -> None:
    torch = pytest.importorskip("torch")
    logits = (np.random.RandomState(2).standard_normal(30) * 2).astype(np.float32)
    warp = pytest.importorskip("transformers").TypicalLogitsWarper(0.7)
    left = warp(None, torch.tensor(logits[None]))[0].numpy()
    assert np.array_equal(np.isfinite(left), typical(softmax(logits), 0.7) > 0)


def test_xtc_excludes_all_but_the_least_of_the_top_choices() -> None:
    p = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
    logits = np.log(p).astype(np.float32)
    without = np.array([0, 0, 0.15, 0.1, 0.05]) / 0.3
    assert is_likely(draws(logits, 5000, xtc_probability=1, xtc_threshold=0.12), without)
    assert is_likely(draws(logits, 5000, xtc_probability=0.5, xtc_threshold=0.12), (p + without) / 2)
    assert is_likely(draws(logits, 5000, xtc_probability=1, xtc_threshold=0.35), p)  # a single one stays
    assert is_likely(draws(logits, 5000, xtc_probability=1, xtc_threshold=0), np.array([0, 0, 0, 0, 1.0]))


def test_mirostat_truncates_at_mu_and_follows_the_surprise() -> None:
    rng = np.random.RandomState(4)
    tau, eta = 2.0, 0.3
    sampling = _core.Sampling(temperature=1.0, seed=3, top_k=1, mirostat_tau=tau, mirostat_eta=eta)
    history = _core.History(array("i", [1]))
    history.mu = mu = 2 * tau
    surprises = []
    for position in range(300):
        logits = (rng.standard_normal(200) * 2).astype(np.float32)
        p = softmax(logits)
        kept = -np.log2(p) <= mu
        kept[p.argmax()] = True
        token = _core.sample(cast("Any", logits), sampling, position, history)
        assert kept[token]
        surprises.append(-np.log2(p[token] / p[kept].sum()))
        mu -= float(np.float32(eta)) * (surprises[-1] - tau)
        assert history.mu == pytest.approx(mu, abs=1e-4)
        history.mu = mu
    assert np.mean(surprises) == pytest.approx(tau, abs=0.3)


@pytest.mark.parametrize(
    "settings",
    [{"typical_p": 0.8}, {"xtc_probability": 0.5, "xtc_threshold": 0.02}, {"mirostat_tau": 3.0, "mirostat_eta": 0.5}],
    ids=str,
)
def test_streams_sessions_and_engines_draw_the_same_tokens(tiny_llama: Path, settings: dict[str, Any]) -> None:
    common: dict[str, Any] = {"temperature": 1.0, "seed": 5, "ignore_eos": True}
    with llamac.load(tiny_llama, context=64) as model:
        prompt = [BOS, 40, 50, 40]
        tokens = model.generate(prompt, max_tokens=20, **common, **settings).tokens
        assert tokens != model.generate(prompt, max_tokens=20, **common).tokens
        processor: Any = {"logits_processors": lambda ids, row: None}
        assert model.generate(prompt, max_tokens=20, **processor, **common, **settings).tokens == tokens
        with model.session() as session:
            session.prefill(prompt)
            found = []
            for _ in tokens:
                found.append(session.sample(**common, **settings))
                session.step(found[-1])
        assert found == tokens
        with llamac.Engine(model) as engine:
            requests = [engine.submit(prompt, max_tokens=20, **common, **settings) for _ in range(2)]
            assert [request.result().tokens for request in requests] == [tokens, tokens]


def test_mirostat_continues_after_an_engine_has_paused_a_request(tiny_llama: Path) -> None:
    settings: Any = {"max_tokens": 60, "mirostat_tau": 3.0, "mirostat_eta": 0.5, "seed": 5, "ignore_eos": True}
    prompts = [[BOS, *np.random.RandomState(i).randint(3, 250, 100).tolist()] for i in range(3)]
    with llamac.load(tiny_llama, context=256) as model:
        alone = [model.generate(prompt, **settings).tokens for prompt in prompts]
        with llamac.Engine(model, kv_tokens=256, prefix_cache=False) as engine:
            with held(engine):
                requests = [engine.submit(prompt, **settings) for prompt in prompts]
            assert [request.result().tokens for request in requests] == alone
            assert engine.stats().preemptions > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"typical_p": 0}, "typical_p is 0, expected more than 0 and at most 1"),
        ({"xtc_probability": 1.5}, "xtc_probability is 1.5, expected 0"),
        ({"xtc_threshold": -1}, "xtc_threshold is -1, expected 0 to 1"),
        ({"mirostat_tau": -1}, "mirostat_tau is -1, expected 0"),
        ({"mirostat_eta": float("nan")}, "mirostat_eta is nan, expected 0 to 1"),
    ],
    ids=str,
)
def test_values_out_of_range_are_errors(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        SamplingParams(**settings)
