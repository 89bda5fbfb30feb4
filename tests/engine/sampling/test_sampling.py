"""Sampling: parameters and defaults, seeds, and every setting against a definition in NumPy."""

from __future__ import annotations

import dataclasses
import math
import pickle
import typing
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

import llamac
from builders import Floats, checkpoint, llama_config, write_model
from llamac import SamplingParams, _core
from llamac.engine.sampling.params import LIBRARY_DEFAULTS, SamplingOverrides, request_params, resolve
from llamac.errors import ArgumentError, LlamacWarning, ModelError
from llamac.guided.guides import Guide

BOS = 1


def draw(logits: Floats, sampling: _core.Sampling, position: int) -> int:
    """Sample a token from given logits."""
    return _core.sample(cast("Any", logits), sampling, position)


# ---- parameters and defaults


def test_overrides_have_the_fields_of_the_parameters() -> None:
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    assert names == list(SamplingOverrides.__annotations__)
    assert all(field.kw_only and field.default is None for field in dataclasses.fields(SamplingParams))
    names_of_types = {"Guide": Guide}
    expected = typing.get_type_hints(SamplingParams, localns=names_of_types)
    assert typing.get_type_hints(SamplingOverrides, localns=names_of_types) == expected


def test_parameters_compare_hash_and_pickle_by_value() -> None:
    params = SamplingParams(temperature=cast("float", np.float32(0.5)), top_k=cast("int", np.int64(4)), stop="x")
    assert params == SamplingParams(temperature=0.5, top_k=4, stop=["x"])
    assert hash(params) == hash(SamplingParams(temperature=0.5, top_k=4, stop=("x",)))
    assert (type(params.temperature), type(params.top_k), params.stop) == (float, int, ("x",))
    assert pickle.loads(pickle.dumps(params)) == params
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        SamplingParams(5)  # type: ignore[call-arg]


def test_parameters_show_what_is_set() -> None:
    assert repr(SamplingParams(temperature=0.5, stop="x", receipt=False)) == (
        "SamplingParams(temperature=0.5, stop=('x',), receipt=False)"
    )


@pytest.mark.parametrize("name", SamplingOverrides.__annotations__)
def test_the_request_overrides_the_model_which_overrides_the_library(name: str) -> None:
    requested: Any = {**LIBRARY_DEFAULTS, "max_tokens": 5, "temperature": 0.0, "seed": 0}
    recommended: Any = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1}
    library: Any = LIBRARY_DEFAULTS
    none, some = SamplingParams(), SamplingParams(**recommended)
    request = SamplingParams(**{name: requested[name]})
    assert getattr(resolve(request, some), name) == requested[name]  # a requested 0 counts
    if name != "seed":
        assert getattr(resolve(none, some), name) == recommended.get(name, library[name])
        assert getattr(resolve(none, none), name) == library[name]


def test_overrides_replace_parameters_unless_they_are_none() -> None:
    params = SamplingParams(temperature=0.5, stop="x", seed=3)
    assert request_params(params, {}) is params
    assert request_params(params, {"temperature": None, "stop": None}) is params
    assert request_params(params, {"temperature": 0, "stop": ()}) == SamplingParams(temperature=0.0, stop=(), seed=3)
    assert request_params(None, {"top_k": 3}) == SamplingParams(top_k=3)


def test_a_generation_uses_the_models_recommendations(tmp_path: Path) -> None:
    recommended: Any = {"temperature": 0.7, "top_k": 5, "top_p": 0.8, "min_p": 0.05}
    path = write_model(tmp_path / "m.bin", checkpoint(llama_config()), generation=recommended)
    with llamac.load(path) as model:
        assert model.sampling_defaults == SamplingParams(**recommended)
        found = model.generate("he", max_tokens=30, seed=1).tokens
        assert found == model.generate("he", max_tokens=30, seed=1, **recommended).tokens
        hot = model.generate("he", max_tokens=30, seed=1, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0).tokens
        assert hot != found
        with model.session() as session:
            assert session.generate("he", max_tokens=30, seed=1).tokens == found


def test_sample_uses_the_models_recommendations(tmp_path: Path) -> None:
    recommended: Any = {"temperature": 0.7, "top_k": 5, "top_p": 0.8, "min_p": 0.05}
    plain: Any = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    unset: Any = {}
    path = write_model(tmp_path / "m.bin", checkpoint(llama_config()), generation=recommended)
    with llamac.load(path) as model, model.session() as session:
        session.prefill(model.tokenize("he"))
        draws, expected, others = (
            [session.sample(seed=seed, **settings) for seed in range(50)] for settings in (unset, recommended, plain)
        )
    assert draws == expected
    assert draws != others


def test_a_generation_without_recommendations_samples_the_plain_distribution(tiny_llama: Path) -> None:
    with llamac.load(tiny_llama) as model:
        assert model.sampling_defaults == SamplingParams()
        plain = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        expected = model.generate("he", max_tokens=30, seed=1, **cast("Any", plain)).tokens
        assert model.generate("he", max_tokens=30, seed=1).tokens == expected


@pytest.mark.parametrize(
    ("generation", "remaining", "message"),
    [
        ({"temperature": 3e38, "top_k": 5}, {"top_k": 5}, r"setting ignored: temperature is 3e\+38, expected 0"),
        ({"temperature": -1}, {}, "setting ignored: temperature is -1"),
        ({"top_p": "0.9", "min_p": 0.1}, {"min_p": 0.1}, "setting ignored: top_p must be a number, not str"),
        ({"top_k": True}, {}, "setting ignored: top_k must be an integer, not bool"),
        ([1], {}, "settings ignored: expected an object, found list"),
    ],
    ids=str,
)
def test_an_invalid_recommendation_is_ignored_with_a_warning(
    tmp_path: Path, generation: Any, remaining: dict[str, Any], message: str
) -> None:
    path = write_model(tmp_path / "m.bin", checkpoint(llama_config()), generation=generation)
    with pytest.warns(LlamacWarning, match=message) as found:
        model = llamac.load(path)
    assert [warning.filename for warning in found] == [__file__]  # the caller's file
    assert str(path) in str(found[0].message)
    with model, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model.sampling_defaults == SamplingParams(**remaining)
        model.generate("he", max_tokens=1)


def test_a_recommendation_cannot_set_other_parameters(tmp_path: Path) -> None:
    generation = {"max_tokens": 3, "seed": 4, "stop": "x", "presence_penalty": 1.1, "temperature": None}
    path = write_model(tmp_path / "m.bin", checkpoint(llama_config()), generation=generation)
    with llamac.load(path) as model:
        assert model.sampling_defaults == SamplingParams()


def test_core_and_parameters_accept_the_same_ranges() -> None:
    """Python checks the ranges so that errors can name the argument; the core checks them again."""
    extremes: list[Any] = [{"temperature": 1e6}, {"temperature": 1e-37}, {"top_p": 1e-300}, {"min_p": 1}]
    extremes += [
        {"typical_p": 1},
        {"xtc_probability": 1, "xtc_threshold": 1},
        {"mirostat_tau": 1000, "mirostat_eta": 1},
    ]
    for settings in [*extremes, {"top_k": 2**31 - 1}]:
        params = resolve(SamplingParams(**settings), SamplingParams())
        assert draw(np.array([1, 2, 3], np.float32), params.core(), 0) in (0, 1, 2)
    beyond = [{"typical_p": 1.001}, {"xtc_threshold": 1.001}, {"mirostat_tau": 1001}, {"mirostat_eta": 1.001}]
    beyond += [{"temperature": 1.001e6}, {"temperature": -1e-30}, {"top_p": 0.0}, {"min_p": 1.001}, {"top_k": -1}]
    for wrong in beyond:
        with pytest.raises(ArgumentError):
            _core.Sampling(**cast("Any", wrong))
        with pytest.raises(ArgumentError):
            SamplingParams(**cast("Any", wrong))


# ---- seeds


def test_a_seed_reproduces_a_generation_and_is_reported(tiny_llama: Path) -> None:
    with llamac.load(tiny_llama) as model:

        def tokens(seed: int | None) -> tuple[list[int], int]:
            result = model.generate("hello", max_tokens=30, temperature=1.0, seed=seed)
            return result.tokens, result.seed

        assert tokens(7) == tokens(7)
        assert tokens(7)[1] == 7
        assert tokens(7)[0] != tokens(8)[0]
        assert tokens(2**64 - 1)[0] != tokens(2**32 - 1)[0]  # all 64 bits count
        random, seed = tokens(None)
        assert tokens(seed)[0] == random
        assert tokens(None)[1] != tokens(None)[1]


def test_a_draw_depends_only_on_seed_and_position(tiny_llama: Path) -> None:
    settings: dict[str, Any] = {"temperature": 1.2, "seed": 11}
    with llamac.load(tiny_llama) as model:
        whole = model.generate([BOS, 40, 50], max_tokens=40, **settings).tokens
        for cut in (1, 7, 39):  # a prefix as the prompt: other calls, the same positions
            rest = model.generate([BOS, 40, 50, *whole[:cut]], max_tokens=40 - cut, **settings).tokens
            assert rest == whole[cut:]
        with model.session() as session:
            ids = [BOS, 40, 50, *whole]
            for length in (20, 5, 30, 5):  # longer and shorter prefixes in turn
                session.truncate(min(length - 1, session.length()))
                session.prefill(llamac.engine.rows.as_ids(ids[session.length() : length]))
                assert [session.sample(temperature=1.2, seed=11) for _ in range(3)] == [ids[length]] * 3


def test_draws_with_other_positions_or_seeds_are_independent() -> None:
    flat = np.zeros(2, np.float32)

    def bits(seeds: range, positions: range) -> NDArray[np.int64]:
        samplings = [_core.Sampling(temperature=1.0, seed=seed) for seed in seeds]
        return np.array([[draw(flat, s, position) for position in positions] for s in samplings])

    found = 2 * bits(range(64), range(64)) - 1
    assert abs(found.sum()) < 4.5 * 64  # 4.5 standard deviations of 4096 fair coins
    for along in (found[1:] * found[:-1], found[:, 1:] * found[:, :-1], found[1:, 1:] * found[:-1, :-1]):
        assert abs(along.sum()) < 4.5 * math.sqrt(along.size)


# ---- sampling against its definition


def definition(logits: Floats, temperature: float, top_k: int, top_p: float, min_p: float) -> NDArray[np.float64]:
    """Token probabilities after temperature, top-k, top-p and min-p, in this order; written for clarity."""
    with np.errstate(over="ignore"):
        scores = logits.astype(np.float64) / temperature
    order = np.lexsort((np.arange(len(scores)), -scores))  # descending; among equals the lowest id first
    remaining = order[: top_k or len(order)]

    def shares() -> NDArray[np.float64]:
        weights: NDArray[np.float64] = np.exp(scores[remaining] - scores[order[0]])
        weights /= weights.sum()
        return weights

    remaining = remaining[: 1 + int(np.sum(np.cumsum(shares())[:-1] < top_p))] if top_p < 1 else remaining
    remaining = remaining[shares() >= min_p * shares()[0]]
    found = np.zeros(len(scores))
    found[remaining] = shares()
    return found


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 4},
    {"temperature": 1.0, "top_k": 100},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 2.0, "top_p": 0.6},
    {"temperature": 1.0, "top_p": 1e-9},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 2.0, "min_p": 0.1},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.5, "top_k": 8, "top_p": 0.85},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.85},  # all 40 logits
    {"temperature": 1.5, "top_k": 8, "top_p": 0.95, "min_p": 0.2},
    {"temperature": 0.8, "top_k": 30, "top_p": 0.99, "min_p": 0.01},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_samples_follow_the_definition(settings: dict[str, Any]) -> None:
    logits = (np.random.RandomState(5).standard_normal(40) * 2).astype(np.float32)
    full = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **settings}
    expected = definition(logits, **full)
    draws = 20_000
    sampling = _core.Sampling(**settings, seed=99)
    counts = np.bincount([draw(logits, sampling, position) for position in range(draws)], minlength=40)
    assert not counts[expected == 0].any()
    likely = expected * draws >= 5
    assert counts[likely].all()  # every candidate occurs
    rest = ~likely & (expected > 0)
    observed = np.append(counts[likely], counts[rest].sum())
    mean = np.append(expected[likely], expected[rest].sum()) * draws
    chi_square = float((((observed - mean) ** 2)[mean > 0] / mean[mean > 0]).sum())
    degrees = max(1, int((mean > 0).sum()) - 1)
    assert chi_square < degrees + 5 * math.sqrt(2 * degrees)


def uniforms(seed: int, position: int, candidate: int) -> tuple[float, float]:
    """Philox4x32-10."""
    low = 0xFFFFFFFF
    counter, key = [position & low, position >> 32, candidate, 0], [seed & low, seed >> 32]
    for _ in range(10):
        a, b = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [(b >> 32) ^ counter[1] ^ key[0], b & low, (a >> 32) ^ counter[3] ^ key[1], a & low]
        key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
    return (counter[0] >> 8) * 2.0**-24, (counter[1] >> 8) * 2.0**-24


def defined_draw(
    logits: Floats,
    position: int,
    seed: int,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1,
    min_p: float = 0,
    typical_p: float = 1,
    xtc_probability: float = 0,
    xtc_threshold: float = 0,
    candidate: int = 0,
) -> int:
    """The draw as it is defined, operation by operation: everything is sorted, and sums are added up one by one."""
    ids = np.flatnonzero(logits > -np.inf)
    values = logits[ids]
    is_sorted = 0 < top_k < len(ids)
    if is_sorted:
        ids = ids[np.lexsort((ids, -values))[:top_k]]
    with np.errstate(over="ignore"):
        x = (logits[ids] - values.max()).astype(np.float64) / np.float64(np.float32(temperature))
    x = np.maximum(x, -700)
    n = np.rint(x * float.fromhex("0x1.71547652b82fep0"))
    r = (x - n * float.fromhex("0x1.62e42fefp-1")) - n * float.fromhex("0x1.473de6af278edp-34")
    p = np.ones_like(r)
    for i in range(13, 0, -1):
        p = 1.0 + p * r / i
    weights = np.ldexp(p, n.astype(int)).astype(np.float32)
    weights[x <= -700] = 0
    total = np.cumsum(weights, dtype=np.float64)[-1]
    if top_p < 1:
        if not is_sorted:
            order = np.lexsort((ids, -weights))
            ids, weights = ids[order], weights[order]
        sums = np.cumsum(weights, dtype=np.float64)
        kept = 1 + int(np.sum(sums[:-1] < np.float64(np.float32(top_p)) * total))
        ids, weights, total = ids[:kept], weights[:kept], sums[kept - 1]
    if min_p > 0:
        ids, weights = ids[weights >= np.float32(min_p)], weights[weights >= np.float32(min_p)]
        total = np.cumsum(weights, dtype=np.float64)[-1]
    target, coin = uniforms(seed, position, candidate)
    if typical_p < 1:
        differences = logits[ids].astype(np.float64) - np.float64(values.max())
        surprise = -differences / np.float64(np.float32(temperature))
        terms = np.where(weights > 0, weights.astype(np.float64) * surprise, 0)
        expected = np.cumsum(terms)[-1] / total
        distances = np.abs((surprise - expected).astype(np.float32))
        order = np.lexsort((np.arange(len(ids)), distances))
        sums = np.cumsum(weights[order], dtype=np.float64)
        kept = 1 + int(np.sum(sums[:-1] < np.float64(np.float32(typical_p)) * total))
        left = np.sort(order[:kept])
        ids, weights = ids[left], weights[left]
        total = np.cumsum(weights, dtype=np.float64)[-1]
    if coin < np.float64(np.float32(xtc_probability)):
        choices = np.flatnonzero(weights >= np.float64(np.float32(xtc_threshold)) * total)
        if len(choices) > 1:
            last = choices[np.lexsort((ids[choices], -weights[choices]))[-1]]
            left = np.setdiff1d(np.arange(len(ids)), choices[choices != last])
            ids, weights = ids[left], weights[left]
            total = np.cumsum(weights, dtype=np.float64)[-1]
    above = np.flatnonzero(np.cumsum(weights, dtype=np.float64) > target * total)
    return int(ids[above[0]] if len(above) else ids[-1])


LARGE_VOCABULARIES: dict[str, Floats] = {
    "text": np.float32(2) * np.random.RandomState(1).standard_normal(20_000).astype(np.float32),
    "flat": np.float32(0.05) * np.random.RandomState(2).standard_normal(20_000).astype(np.float32),
    "wide": np.float32(40) * np.random.RandomState(3).standard_normal(20_000).astype(np.float32),
    "equal": np.zeros(5_000, np.float32),
    "few values": np.random.RandomState(4).randint(-3, 3, 20_000).astype(np.float32),
    "masked": np.where(np.arange(9_000) % 70, -np.inf, np.arange(9_000) / 3000).astype(np.float32),
    "masked with numbers": np.where(np.arange(9_000) % 7, -1e9, np.arange(9_000) / 3000).astype(np.float32),
    "one": np.array([3], np.float32),
    # half of the sum is reached between two candidates, and the sum is not exact: only the definition can decide
    "a sum at its threshold": np.repeat(np.array([0, -30], np.float32), 100),
    "negative and both zeros": np.array([-0.0, 0.0, -1.0, 0.0, -0.0, -2.0, np.nan, -3e38] * 50, np.float32),
}


@pytest.mark.parametrize("name", LARGE_VOCABULARIES)
def test_draws_are_those_of_the_definition(name: str) -> None:
    """The sampler sorts only what can decide; the tokens are those of sorting everything."""
    logits = LARGE_VOCABULARIES[name].copy()
    if name == "text":
        logits[[5, 6, 19_999]] += np.array([12, 9, 10], np.float32)
    settings: list[dict[str, Any]] = [
        *SETTINGS,
        {"temperature": 1.0, "top_p": 0.5},
        {"temperature": 1.0, "top_p": 0.9, "min_p": 0.05},
        {"temperature": 1.0, "top_k": 3_000, "top_p": 0.9},
        {"temperature": 0.7, "top_k": 3_000, "min_p": 1e-4},
        {"temperature": 1e6, "top_k": 50, "top_p": 0.5},
        {"temperature": 1e6, "top_p": 0.3},
        {"temperature": 1e-37, "top_p": 0.3},
        {"temperature": 1.0, "candidate": 3},
        {"temperature": 1.0, "top_p": 0.8, "candidate": 2**32 - 1},
        {"temperature": 1.0, "typical_p": 0.5},
        {"temperature": 0.8, "typical_p": 0.95, "top_p": 0.9, "min_p": 1e-3},
        {"temperature": 1.0, "typical_p": 0.7, "top_k": 300},
        {"temperature": 1.0, "typical_p": 0.999},
        {"temperature": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.001},
        {"temperature": 1.0, "xtc_probability": 1.0, "xtc_threshold": 0.05, "top_p": 0.9},
        {"temperature": 1.0, "xtc_probability": 0.7, "xtc_threshold": 0.0001, "typical_p": 0.9, "top_k": 50},
    ]
    for number, setting in enumerate(settings):
        for position in range(number, 100 * number + 3, 30 * number + 1):
            drawn = draw(logits, _core.Sampling(**setting, seed=7), position)
            assert drawn == defined_draw(logits, position, seed=7, **setting), (setting, position)


def test_the_filters_apply_in_the_documented_order() -> None:
    """In another order, the filters would leave other candidates of these logits."""
    logits = np.log(np.array([0.4, 0.3, 0.15, 0.1, 0.05], np.float32))

    def candidates(**settings: Any) -> set[int]:
        sampling = _core.Sampling(seed=1, **settings)
        return {draw(logits, sampling, position) for position in range(500)}

    assert candidates(temperature=1.0, top_p=0.6) == {0, 1}
    assert candidates(temperature=2.0, top_p=0.6) == {0, 1, 2}  # the temperature flattens before top-p counts
    # top-k applies first: the first two are 0.82 of 0.4 + 0.3 + 0.15
    assert candidates(temperature=1.0, top_k=3, top_p=0.8) == {0, 1}
    assert candidates(temperature=1.0, top_p=0.8) == {0, 1, 2}
    assert candidates(temperature=1.0, min_p=0.3) == {0, 1, 2}
    # the square roots of the ratios are 1, 0.87, 0.61, 0.5 and 0.35
    assert candidates(temperature=2.0, min_p=0.45) == {0, 1, 2, 3}
    assert candidates(temperature=1.0, top_k=2, min_p=0.3) == {0, 1}


def test_equal_logits_are_ordered_by_id() -> None:
    equal = np.zeros(50, np.float32)
    for settings, expected in (
        ({"temperature": 0.0}, {0}),
        ({"temperature": 1.0, "top_k": 3}, {0, 1, 2}),
        ({"temperature": 1.0, "top_p": 0.0999}, {0, 1, 2, 3, 4}),
        ({"temperature": 1.0, "min_p": 1.0}, set(range(50))),
    ):
        sampling = _core.Sampling(seed=4, **cast("dict[str, Any]", settings))
        assert {draw(equal, sampling, position) for position in range(1000)} == expected


def test_infinite_and_nan_logits_are_never_sampled() -> None:
    inf, nan = np.float32(np.inf), np.float32(np.nan)
    warm = _core.Sampling(temperature=1.0, seed=1)
    greedy = _core.Sampling()
    partial = np.array([-inf, nan, 3e38, -3e38], np.float32)
    assert {draw(partial, warm, position) for position in range(50)} == {2}
    assert draw(partial, greedy, 0) == 2
    hidden = np.array([-inf, 1, -inf, 1], np.float32)
    assert {draw(hidden, warm, position) for position in range(50)} == {1, 3}
    for sampling in (warm, greedy):
        with pytest.raises(ModelError, match="none of the logits is a number"):
            draw(np.array([nan, -inf], np.float32), sampling, 0)
        with pytest.raises(ModelError, match="a logit is infinite"):
            draw(np.array([1, inf], np.float32), sampling, 0)
        with pytest.raises(ArgumentError, match="no logits"):
            draw(np.array([], np.float32), sampling, 0)


def test_a_higher_temperature_gives_more_distinct_tokens(tiny_llama: Path) -> None:
    with llamac.load(tiny_llama) as model:
        kinds = [
            len({model.generate("he", max_tokens=1, temperature=t, seed=seed).tokens[0] for seed in range(60)})
            for t in (0.1, 5.0, 50.0)
        ]
    assert all(one < other for one, other in pairwise(kinds))
