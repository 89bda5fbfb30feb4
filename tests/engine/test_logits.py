"""Adjusted logits: bias, penalties, DRY, bans and processors, against definitions in NumPy; and the rules of stops."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

import llamac
from builders import Floats, byte_ids
from llamac import SamplingParams, _core
from llamac.engine.sampling.params import resolve
from llamac.engine.sampling.sampler import Sampler, draw_rows
from llamac.errors import ArgumentError, ArgumentTypeError

Ids = NDArray[np.int32]
BOS = 1


def adjusted(
    logits: Floats, prompt: list[int], generated: list[int], banned: list[int] | None = None, **settings: Any
) -> Floats:
    """The core's adjusted logits."""
    sampling = _core.Sampling()
    sampling.adjust(**settings)
    history = _core.History(array("i", prompt))
    for token in generated:
        history.append(token)
    history.ban(array("i", banned or []))
    found: Floats = logits.copy()
    _core.adjust_logits(cast("Any", found), sampling, history)
    return found


def penalized(
    logits: Floats, prompt: list[int], generated: list[int], rep: float, presence: float, freq: float
) -> Floats:
    """The definition of the three penalties."""
    found: Floats = logits.copy()
    seen = np.isin(np.arange(len(logits)), [*prompt, *generated])
    r = np.float32(rep)
    found[seen] = np.where(found[seen] < 0, found[seen] * r, found[seen] / r)
    counts = np.bincount(generated, minlength=len(logits))[: len(logits)].astype(np.float32)
    found[counts > 0] -= np.float32(presence)
    found -= np.where(counts > 0, np.float32(freq) * counts, np.float32(0))
    return found


def dried(logits: Floats, ids: list[int], multiplier: float, base: float, allowed: int, breakers: set[int]) -> Floats:
    """The definition of DRY: compares every suffix with every place."""
    longest: dict[int, int] = {}
    for at in range(1, len(ids)):
        if ids[at] in breakers:
            continue
        for n in range(1, min(50, at) + 1):
            suffix = ids[len(ids) - n :]
            if ids[at - n : at] == suffix and not breakers & set(suffix):
                longest[ids[at]] = max(n, longest.get(ids[at], 0))
    found: Floats = logits.copy()
    for token, n in longest.items():
        if n >= allowed:
            penalty = float(np.float32(multiplier)) * float(np.float32(base)) ** (n - allowed)
            found[token] = np.float32(float(found[token]) - penalty)
    return found


@pytest.mark.parametrize("seed", range(6))
def test_penalties_are_those_of_the_definition(seed: int) -> None:
    rng = np.random.RandomState(seed)
    logits = rng.standard_normal(50).astype(np.float32)
    prompt, generated = rng.randint(0, 50, 20).tolist(), rng.randint(0, 30, 12).tolist()
    for rep, presence, freq in ((1.3, 0, 0), (0.5, 0, 0), (1, 0.7, 0), (1, 0, -0.3), (1.1, 0.4, 0.2)):
        found = adjusted(
            logits, prompt, generated, repetition_penalty=rep, presence_penalty=presence, frequency_penalty=freq
        )
        assert np.array_equal(found, penalized(logits, prompt, generated, rep, presence, freq))


@pytest.mark.parametrize("seed", range(8))
def test_dry_is_that_of_the_definition(seed: int) -> None:
    rng = np.random.RandomState(seed)
    logits = rng.standard_normal(20).astype(np.float32)
    ids = rng.randint(0, 3 + seed % 3, 60).tolist() if seed < 7 else [1, 2] * 70  # longer than 50
    for allowed, breakers in ((1, set[int]()), (2, {0}), (4, {1})):
        bits = bytes(sum(1 << i for i in range(8) if byte * 8 + i in breakers) for byte in range(3))
        found = adjusted(
            logits, ids[:30], ids[30:], dry_multiplier=0.8, dry_base=1.1, dry_allowed_length=allowed, dry_breakers=bits
        )
        expected = dried(logits, ids, 0.8, 1.1, allowed, breakers)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        assert np.array_equal(found != logits, expected != logits)


def test_bias_comes_first_and_bans_last() -> None:
    logits = np.array([1, 2, 3, 4], np.float32)
    settings: Any = {"bias_ids": array("i", [0, 1]), "bias": array("f", [-3, -np.inf]), "repetition_penalty": 2.0}
    found = adjusted(logits, [0, 2], [], [3, 99], **settings)
    assert found.tolist() == [-4, -np.inf, 1.5, -np.inf]  # (1 - 3) * 2; banned; 3 / 2; banned


def test_penalties_are_those_of_transformers() -> None:
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers").RepetitionPenaltyLogitsProcessor(1.3)
    rng = np.random.RandomState(3)
    logits, ids = rng.standard_normal(40).astype(np.float32), rng.randint(0, 40, 15).tolist()
    expected = process(torch.tensor([ids]), torch.tensor(logits[None]))[0].numpy()
    np.testing.assert_allclose(adjusted(logits, ids[:5], ids[5:], repetition_penalty=1.3), expected, rtol=1e-6)


# ---- generations

SETTINGS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.8, "frequency_penalty": 0.3},
    {"dry_multiplier": 9.0, "dry_allowed_length": 1, "logit_bias": {40: 20, 50: 20, 60: 20}},
    {"logit_bias": {40: 3.0, 41: -np.inf}},
    {"banned_tokens": [40, 50, 60], "min_tokens": 20},
    {"banned_strings": ["e", "a", "é", "\ufffd"]},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_streams_sessions_and_engines_draw_the_same_tokens(tiny_llama: Path, settings: dict[str, Any]) -> None:
    common: dict[str, Any] = {"temperature": 0.3, "seed": 5, "ignore_eos": True}
    with llamac.load(tiny_llama, context=64) as model:
        prompt = [BOS, 40, 50, 40]
        tokens = model.generate(prompt, max_tokens=30, **common, **settings).tokens
        plain = model.generate(prompt, max_tokens=30, **common).tokens
        assert tokens != plain
        with model.session() as session:
            session.prefill(prompt)
            found = []
            for _ in tokens:
                found.append(session.sample(**common, **settings))
                session.step(found[-1])
        assert found == tokens
        processors: Any = [lambda ids, row: None]
        assert (
            model.generate(prompt, max_tokens=30, logits_processors=processors, **common, **settings).tokens == tokens
        )
        with llamac.Engine(model) as engine:
            requests = [
                engine.submit(prompt, max_tokens=30, **common, **settings),
                engine.submit(prompt, max_tokens=30, **common),
                engine.submit(prompt, max_tokens=30, logits_processors=processors, **common, **settings),
            ]
            assert [request.result().tokens for request in requests] == [tokens, plain, tokens]


def test_a_banned_string_does_not_occur_however_tokens_divide_it(scripted: Any) -> None:
    model = scripted("--bcabcabc")
    assert model.generate("a", max_tokens=6).text == "bcabca"
    found = model.generate("a", max_tokens=6, banned_strings=["cab", "zz"])
    assert "cab" not in found.text
    assert found.text.startswith("bca")
    assert "b" not in model.generate("a", max_tokens=6, banned_strings="b").text


def test_stop_tokens_end_a_generation_unless_it_is_too_short_or_ignores_them(scripted: Any) -> None:
    model = scripted("--bcdefghi")
    ids = model.generate("a", max_tokens=5).tokens
    stopped = model.generate("a", max_tokens=5, stop_token_ids=[ids[2]])
    assert (stopped.tokens, stopped.finish_reason, stopped.stopped_by) == (ids[:2], "stop", ids[2])
    late = model.generate("a", max_tokens=5, stop_token_ids=[ids[2]], min_tokens=3)
    assert late.tokens[:2] == ids[:2]
    assert late.tokens[2] != ids[2]
    assert model.generate("a", max_tokens=5, stop="c", min_tokens=2).text == "bcdef"
    assert model.generate("a", max_tokens=5, stop="d", min_tokens=2).text == "bc"


def test_ignore_eos_goes_on_after_the_models_stop_tokens(scripted: Any) -> None:
    model = scripted([*byte_ids("--bc"), 2, *byte_ids("def")], stop_ids=(2,))
    assert model.generate("a", max_tokens=6).stopped_by == 2
    ignoring = model.generate("a", ignore_eos=True, max_tokens=6)
    assert (ignoring.tokens[2], ignoring.text[:2], ignoring.text[-3:]) == (2, "bc", "def")
    assert 2 not in model.generate("a", min_tokens=5, max_tokens=5).tokens
    other = model.generate("a", ignore_eos=True, stop_token_ids=[2], max_tokens=6)
    assert (other.text, other.stopped_by) == ("bc", 2)


# ---- processors


def test_processors_see_all_ids_and_change_the_row_in_order(tiny_llama: Path) -> None:
    seen: list[list[int]] = []

    def only_seven(ids: Ids, row: Floats) -> None:
        seen.append(ids.tolist())
        row[:] = -np.inf
        row[7] = 0

    def one_more(ids: Ids, row: Floats) -> Floats:
        assert row[7] == 0
        row[8] = 1
        return row

    with llamac.load(tiny_llama) as model:
        prompt = [BOS, 40]
        settings: dict[str, Any] = {"temperature": 0, "max_tokens": 2}
        assert model.generate(prompt, logits_processors=only_seven, **settings).tokens == [7, 7]
        assert seen == [[BOS, 40], [BOS, 40, 7]]
        assert model.generate(prompt, logits_processors=[only_seven, one_more], **settings).tokens == [8, 8]


def broken(ids: Ids, row: Floats) -> None:
    raise ZeroDivisionError("on purpose")


def nothing_left(ids: Ids, row: Floats) -> None:
    row[:] = np.nan


def infinite(ids: Ids, row: Floats) -> None:
    row[3] = np.inf


def a_copy(ids: Ids, row: Floats) -> Floats:
    return row + 1


def cancelled(ids: Any, row: Any) -> None:
    raise llamac.CancelledError("another computation")


@pytest.mark.parametrize(
    ("process", "message"),
    [
        (cancelled, "a logits processor failed: CancelledError: another computation"),
        (broken, "a logits processor failed: ZeroDivisionError: on purpose"),
        (nothing_left, "none of the logits is a number, after the logits processors"),
        (infinite, "a logit is infinite, after the logits processors"),
        (a_copy, "must change the row of logits in place and return None, not ndarray"),
    ],
)
def test_a_wrong_processor_fails_its_own_request_only(tiny_llama: Path, process: Any, message: str) -> None:
    with llamac.load(tiny_llama, context=64) as model:
        with pytest.raises(ArgumentError, match=message):
            model.generate("he", max_tokens=3, logits_processors=process)
        with llamac.Engine(model) as engine:
            wrong = engine.submit("he", max_tokens=3, logits_processors=process)
            right = engine.submit("he", max_tokens=3, seed=1, ignore_eos=True)
            with pytest.raises(ArgumentError, match=message):
                wrong.result()
            assert len(right.result().tokens) == 3


def test_bans_of_everything_are_an_error_of_the_request(tiny_llama: Path) -> None:
    with (
        llamac.load(tiny_llama) as model,
        pytest.raises(ArgumentError, match="bias, penalties and bans of the request"),
    ):
        model.generate("he", max_tokens=3, banned_tokens=range(model.n_token_ids))


# ---- bad values


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"repetition_penalty": 0}, "repetition_penalty is 0, expected more than 0 and at most 1e6"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty is nan"),
        ({"presence_penalty": 2e6}, r"presence_penalty is 2e\+06, expected -1e6 to 1e6"),
        ({"dry_base": 0.5}, "dry_base is 0.5, expected 1 to 1e6"),
        ({"dry_allowed_length": 0}, "dry_allowed_length is 0, expected 1 to"),
        ({"logit_bias": {5: float("inf")}}, "logit_bias is inf for token 5"),
        ({"logit_bias": {5: float("nan")}}, "logit_bias is nan for token 5"),
        ({"logit_bias": {-1: 0.5}}, "logit_bias has the token id -1, expected 0 or more"),
        ({"banned_strings": ["a", ""]}, "expected strings that are not empty"),
        ({"banned_strings": "\ud800"}, "not valid Unicode text"),
        ({"min_tokens": -1}, "min_tokens is -1, expected at least 0"),
    ],
    ids=str,
)
def test_values_out_of_range_are_errors(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        SamplingParams(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"logit_bias": 5}, "logit_bias must be a dict from token ids to numbers, not int"),
        ({"logit_bias": {"a": 1}}, "each token id of logit_bias must be an integer, not str"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, not int"),
        ({"stop_token_ids": "ab"}, "stop_token_ids must be a sequence of token ids, not str"),
        ({"logits_processors": [5]}, "each of logits_processors must be a function, not int"),
    ],
    ids=str,
)
def test_values_of_a_wrong_type_are_errors(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentTypeError, match=message):
        SamplingParams(**settings)


def test_ids_that_the_model_does_not_have_are_errors_before_anything_is_computed(tiny_llama: Path) -> None:
    with llamac.load(tiny_llama) as model:
        n = model.n_token_ids
        wrong: list[dict[str, Any]] = [{"logit_bias": {n: 1}}, {"banned_tokens": [n]}, {"stop_token_ids": [n]}]
        for settings in wrong:
            with pytest.raises(ArgumentError, match=f"has the token id {n}, expected 0 to {n - 1}"):
                model.stream("he", **settings)


def test_parameters_with_a_bias_compare_and_hash_by_value() -> None:
    one, other = SamplingParams(logit_bias={5: 1, 2: -np.inf}), SamplingParams(logit_bias=[(2, -np.inf), (5, 1.0)])
    assert one == other
    assert hash(one) == hash(other)
    assert one.updated({"seed": 1}).logit_bias == ((2, -np.inf), (5, 1.0))


def test_a_mask_lets_only_its_tokens_come_next(tiny_llama: Path) -> None:
    seen: list[NDArray[np.float32]] = []
    for processors in ([], [lambda ids, row: seen.append(row.copy())]):
        params = resolve(SamplingParams(temperature=0, logits_processors=processors), SamplingParams())
        with llamac.load(tiny_llama) as model:
            sampler = Sampler(model, params, [BOS])
            logits = np.arange(model.n_token_ids, dtype=np.float32)[None]
            assert draw_rows([sampler], logits, model.n_token_ids, [[BOS]], [0]) == [model.n_token_ids - 1]
            sampler.allow(bytes([0b1010]))
            assert draw_rows([sampler], logits, model.n_token_ids, [[BOS]], [0]) == [3]
            sampler.allow(None)
            assert draw_rows([sampler], logits, model.n_token_ids, [[BOS]], [0]) == [model.n_token_ids - 1]
            with pytest.raises(ArgumentError, match="empty"):
                sampler.allow(b"")
    assert np.flatnonzero(seen[1] > -np.inf).tolist() == [1, 3]
