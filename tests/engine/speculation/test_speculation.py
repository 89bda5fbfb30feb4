"""Speculation: the same tokens, texts and sessions with drafts and without, whether drafts are right or wrong."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vocab_samples import llama2c_file

import llamac
from builders import WORDS, byte_ids, checkpoint, llama_config, some_ids, write_model
from llamac.arguments import KVDtype
from llamac.engine.speculation import draft_plan, stream_drafts
from llamac.engine.speculation.draft_plan import RowCosts
from llamac.engine.speculation.lookup import Lookup
from llamac.errors import ArgumentError, ArgumentTypeError, CancelledError, ClosedError
from llamac.text.tokenizer import Tokenizer
from llamac.text.vocabulary.llama2c import from_llama2c
from prophet import Prophet, check_drafts, results

PROMPT = some_ids(70)


@pytest.fixture
def prophet(monkeypatch: pytest.MonkeyPatch) -> Prophet:
    """Drafts from the first step on, whatever they cost."""
    found = Prophet(part_right=0.75, most=9)
    found.install(monkeypatch)
    return found


def check_equal(model: llamac.Model, prophet: Prophet, **options: Any) -> llamac.Completion:
    return check_drafts(model, prophet, PROMPT, **options)


def prefer_even(ids: Any, row: Any) -> None:
    row[1::2] -= 1.0
    row[ids[-1] % len(row)] += 0.5


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.0},
    "cool": {"temperature": 0.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "repetition": {"temperature": 0.8, "repetition_penalty": 1.3},
    "penalties": {"temperature": 0, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    "dry": {"temperature": 0.5, "dry_multiplier": 0.8},
    "typical": {"temperature": 1.0, "typical_p": 0.8},
    "xtc": {"temperature": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.05},
    "mirostat": {"temperature": 1.0, "mirostat_tau": 4.0},
    "bias": {"temperature": 0.5, "logit_bias": {7: 2.0, 9: -5.0}, "banned_tokens": [11, 12]},
    "banned strings": {"temperature": 0.6, "banned_strings": ["a", "he"]},
    "processor": {"temperature": 0.7, "logits_processors": prefer_even},
    "min_tokens": {"temperature": 1.0, "min_tokens": 20, "stop_token_ids": list(range(0, 280, 5))},
    "stop tokens": {"temperature": 1.0, "stop_token_ids": [5, 50, 150]},
    "logprobs": {"temperature": 0.9, "logprobs": 3, "prompt_logprobs": 1},
    "short": {"temperature": 1.0, "max_tokens": 1},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_drafts_change_nothing(model: llamac.Model, prophet: Prophet, name: str) -> None:
    drafted = 0
    for seed in range(3):
        options = {"max_tokens": 50, "seed": seed, **SETTINGS[name]}
        drafted += check_equal(model, prophet, **options).usage.drafted_tokens
    assert drafted > 0 or name == "short"


@pytest.mark.parametrize("part_right", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("kv_dtype", ["f32", "f16", "q8"])
def test_drafts_change_nothing_in_caches_with_windows(
    windowed: llamac.Model, prophet: Prophet, kv_dtype: KVDtype, part_right: float
) -> None:
    prophet.part_right = part_right
    found = check_equal(windowed, prophet, max_tokens=120, temperature=0.8, seed=4, kv_dtype=kv_dtype)
    usage = found.usage
    if part_right == 1:
        assert usage.accepted_tokens == usage.drafted_tokens > 100
    if part_right == 0:
        assert usage.accepted_tokens == 0 < usage.drafted_tokens


@pytest.mark.parametrize("most", [1, 5, 63])
@pytest.mark.parametrize("context", [71, 72, 75, 140])
def test_drafts_stay_inside_the_context(model: llamac.Model, prophet: Prophet, context: int, most: int) -> None:
    prophet.most = most
    found = check_equal(model, prophet, context=context, seed=2)
    assert found.finish_reason in ("context", "stop")


def test_stop_strings_end_in_the_middle_of_drafts(model: llamac.Model, prophet: Prophet) -> None:
    prophet.part_right = 1.0
    text = model.generate(PROMPT, max_tokens=50, temperature=0, speculation=False).text
    for start in range(0, len(text) - 2, 5):
        found = check_equal(model, prophet, max_tokens=50, temperature=0, seed=1, stop=[text[start : start + 2]])
        assert found.finish_reason == "stop"


def test_guides_and_reasoning_budgets_hold(tiny: Path, prophet: Prophet) -> None:
    pytest.importorskip("llguidance")
    with llamac.load(tiny) as model:
        for guide in (llamac.Regex("[a-f ]{5,30}"), llamac.Choice(["hello world", "hello there"])):
            check_equal(model, prophet, max_tokens=40, temperature=1.0, seed=3, guide=guide)
        prompt, tags = PROMPT[:], byte_ids("<think>")
        PROMPT[-len(tags) :] = tags
        try:
            found = check_equal(model, prophet, max_tokens=40, temperature=1.0, seed=3, reasoning_budget=6)
            assert "</think>" in found.text
        finally:
            PROMPT[:] = prompt


def test_the_session_follows_the_text_piece_by_piece(model: llamac.Model, prophet: Prophet) -> None:
    prophet.part_right = 1.0
    with model.session() as session:
        prophet.known[tuple(PROMPT)] = model.generate(PROMPT, max_tokens=30, temperature=0, speculation=False).tokens
        stream = session.stream(PROMPT, max_tokens=30, temperature=0)
        lengths = []
        for _ in stream:
            assert session.tokens() == [*PROMPT, *prophet.known[tuple(PROMPT)]][: session.length()]
            lengths.append(session.length())
        assert lengths == sorted(set(lengths))
        assert stream.completion.usage.accepted_tokens > 20
        # a stream that is left behind does not disturb the session
        stream = session.stream(PROMPT, max_tokens=30, temperature=0)
        for _ in range(5):
            next(stream)
        expected = model.logits([*session.tokens(), 4])[-1]
        assert session.eval([4]).tobytes() == expected.tobytes()
        with pytest.raises(ClosedError, match="used for something else"):
            list(stream)


def test_a_cancelled_stream_leaves_the_same_session(model: llamac.Model, prophet: Prophet) -> None:
    prophet.known[tuple(PROMPT)] = model.generate(PROMPT, max_tokens=40, temperature=0, speculation=False).tokens
    held = []
    for is_on in (False, True):
        with model.session() as session:
            stream = session.stream(PROMPT, max_tokens=40, temperature=0, speculation=is_on)
            for _ in range(7):
                next(stream)
            stream.cancel()
            assert list(stream) == []
            assert stream.completion.finish_reason == "cancelled"
            held.append((session.tokens(), session.memory()["kv"], session.eval([3]).tobytes()))
    assert held[0] == held[1]


def test_a_cancel_during_a_pass_with_drafts_ends_it(model: llamac.Model, prophet: Prophet) -> None:
    prophet.known[tuple(PROMPT)] = model.generate(PROMPT, max_tokens=40, temperature=0, speculation=False).tokens
    with model.session() as session:
        stream = session.stream(PROMPT, max_tokens=40, temperature=0)
        next(stream)

        def cancelled(*arguments: Any) -> None:
            session.cancel()
            raise CancelledError("cancelled", 0)

        session._run_drafts = cancelled  # type: ignore[method-assign]
        assert len(list(stream)) <= 1  # the text held back
        assert stream.completion.finish_reason == "cancelled"
        assert session.tokens() == [*PROMPT, *stream.completion.tokens][: session.length()]


def test_drafts_take_no_memory_that_others_need(model: llamac.Model, prophet: Prophet) -> None:
    expected = model.generate(PROMPT, max_tokens=100, temperature=0, seed=1, speculation=False)
    prophet.known[tuple(PROMPT)], prophet.part_right = expected.tokens, 1.0
    with model.session() as session:
        _, page_bytes = session._core.page_size()
        model.kv_budget = 3 * page_bytes  # 70 + 100 positions fit three pages exactly
        found = session.generate(PROMPT, max_tokens=100, temperature=0, seed=1)
        assert results(found) == results(expected)
        assert found.usage.drafted_tokens == 0
    model.kv_budget = None


def test_a_pass_without_memory_for_drafts_is_computed_without(
    model: llamac.Model, prophet: Prophet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_drafts, "SPARE_PAGES", 0)
    expected = model.generate(PROMPT, max_tokens=100, temperature=0, seed=1, speculation=False)
    prophet.known[tuple(PROMPT)], prophet.part_right = expected.tokens, 1.0
    with model.session() as session:
        _, page_bytes = session._core.page_size()
        model.kv_budget = 3 * page_bytes
        assert results(session.generate(PROMPT, max_tokens=100, temperature=0, seed=1)) == results(expected)
    model.kv_budget = None


def test_speculation_can_be_turned_off(model: llamac.Model, prophet: Prophet) -> None:
    prophet.known[tuple(PROMPT)] = model.generate(PROMPT, max_tokens=20, temperature=0, speculation=False).tokens
    assert model.generate(PROMPT, max_tokens=20, temperature=0).usage.drafted_tokens > 0
    assert model.generate(PROMPT, max_tokens=20, temperature=0, speculation=False).usage.drafted_tokens == 0
    with pytest.raises(ArgumentTypeError, match="speculation"):
        model.generate(PROMPT, speculation="yes")  # type: ignore[arg-type]


def test_a_text_that_repeats_itself_is_drafted_without_help(model: llamac.Model) -> None:
    """Nothing is patched: costs are measured, and a loop of tokens is worth drafts."""
    cycle = [20, 30, 40, 50, 60, 70, 80]

    def follow(ids: Any, row: Any) -> None:
        row[cycle[(cycle.index(ids[-1]) + 1) % len(cycle)] if ids[-1] in cycle else cycle[0]] = 1e4

    usage = model.generate([1], max_tokens=250, temperature=0, logits_processors=follow).usage
    assert usage.completion_tokens == 250
    assert usage.accepted_tokens >= 0.9 * usage.drafted_tokens


# ---- draft models


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts whatever they cost, where there is a rate."""

    def count(rate: Any, costs: list[float], credit: float, most: int, requests: int) -> tuple[int, float]:
        return min(most, 6), 1 + rate(0)

    monkeypatch.setattr(RowCosts, "is_known", True)
    monkeypatch.setattr(RowCosts, "step", 0.01)
    monkeypatch.setattr(draft_plan, "best_count", count)
    monkeypatch.setattr(Lookup, "length", property(lambda self: 0, lambda self, value: None), raising=False)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.usefixtures("always")
def test_an_equal_draft_model_draws_the_same_tokens(tiny_llama: Path, temperature: float) -> None:
    with llamac.load(tiny_llama) as draft, llamac.load(tiny_llama, draft_model=draft) as model:
        options: dict[str, Any] = {"max_tokens": 60, "temperature": temperature, "seed": 5}
        expected = draft.generate(PROMPT, **options)
        found = model.generate(PROMPT, **options)
        assert results(found) == results(expected)
        assert found.usage.accepted_tokens == found.usage.drafted_tokens >= 48


@pytest.mark.usefixtures("always")
def test_any_draft_model_leaves_the_tokens_unchanged(tiny: Path, tmp_path: Path) -> None:
    config = llama_config(dim=24, n_heads=2, n_kv_heads=1, n_layers=1)
    path = write_model(tmp_path / "small.bin", checkpoint(config))
    with llamac.load(path) as draft, llamac.load(tiny) as model, model.session(draft_model=draft) as session:
        for seed in range(2):
            options: dict[str, Any] = {"max_tokens": 40, "temperature": 0.8, "seed": seed}
            expected = model.generate(PROMPT, **options)
            found = session.generate(PROMPT, **options)
            assert results(found) == results(expected)
            assert found.usage.drafted_tokens > 0
        assert session.tokens() == [*PROMPT, *expected.tokens[:-1]]
        forked = session.fork()
        assert results(forked.generate(PROMPT, **options)) == results(expected)
        forked.close()
    assert session.closed


@pytest.mark.usefixtures("always")
def test_a_draft_model_with_a_short_context_stops_drafting(tiny_llama: Path, tmp_path: Path) -> None:
    path = write_model(tmp_path / "short.bin", checkpoint(replace(llama_config(), context=80)))
    with llamac.load(path) as draft, llamac.load(tiny_llama, draft_model=draft) as model:
        expected = model.generate(PROMPT, max_tokens=60, temperature=0, seed=1, speculation=False)
        found = model.generate(PROMPT, max_tokens=60, temperature=0, seed=1)
        assert results(found) == results(expected)
        assert 0 < found.usage.drafted_tokens <= 80


@pytest.mark.usefixtures("always")
def test_a_draft_model_can_be_named_and_is_closed_with_the_model(tiny_llama: Path) -> None:
    model = llamac.load(tiny_llama, draft_model=tiny_llama)
    expected = model.generate(PROMPT, max_tokens=20, temperature=0, speculation=False)
    with pickle.loads(pickle.dumps(model)) as again:
        assert results(again.generate(PROMPT, max_tokens=20, temperature=0, seed=expected.seed)) == results(expected)
        draft = again._session_defaults.draft_model
        assert draft is not None
        assert not draft.closed
    assert draft.closed
    model.close()
    with pytest.raises(FileNotFoundError):
        llamac.load(tiny_llama, draft_model="nothing-here.bin")


@pytest.mark.usefixtures("always")
def test_a_closed_draft_model_ends_the_drafts_and_not_the_text(tiny_llama: Path) -> None:
    with llamac.load(tiny_llama) as draft, llamac.load(tiny_llama, draft_model=draft) as model:
        expected = model.generate(PROMPT, max_tokens=40, temperature=0, seed=1, speculation=False)
        stream = model.stream(PROMPT, max_tokens=40, temperature=0, seed=1)
        for _ in range(9):
            next(stream)
        draft.close()
        list(stream)
        assert results(stream.completion) == results(expected)
        assert 0 < stream.completion.usage.drafted_tokens < 30
        assert results(model.generate(PROMPT, max_tokens=40, temperature=0, seed=1)) == results(expected)


@pytest.mark.usefixtures("always")
def test_a_cancel_ends_the_draft_models_passes_too(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with llamac.load(tiny_llama) as draft, llamac.load(tiny_llama, draft_model=draft) as model:
        before = llamac.Session._run

        def cancel_then(session: llamac.Session, *arguments: Any) -> None:
            if session.model is draft:
                stream.cancel()
            before(session, *arguments)

        monkeypatch.setattr(llamac.Session, "_run", cancel_then)
        stream = model.stream(PROMPT, max_tokens=40, temperature=0)
        assert len(list(stream)) <= 1
        assert stream.completion.finish_reason == "cancelled"
        assert len(stream.completion.tokens) == 1


def with_words(path: Path, words: list[str]) -> Path:
    """A model whose tokenizer has other words."""
    data, special, spm = from_llama2c(llama2c_file(words))
    made = replace(checkpoint(llama_config()), tokenizer=(data, special, spm))
    made.config = replace(made.config, n_token_ids=Tokenizer.from_json(data, special).n_ids)
    return write_model(path, made)


def test_a_draft_model_with_another_vocabulary_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    renamed = with_words(tmp_path / "renamed.bin", [WORDS[1], WORDS[0], *WORDS[2:]])
    shorter = with_words(tmp_path / "shorter.bin", list(WORDS[:-1]))
    with llamac.load(tiny_llama) as model, llamac.load(renamed) as other, llamac.load(shorter) as short:
        differ = r"token \d+ is b'll' in the draft model, but b'he' in the model: a draft"
        with pytest.raises(ArgumentError, match=differ):
            model.session(draft_model=other)
        with pytest.raises(
            ArgumentError, match=r"the draft model has \d+ tokens, but the model has 284: a draft model"
        ):
            llamac.Session(model, draft_model=short)
        with pytest.raises(ArgumentError, match="a draft model needs the vocabulary"):
            llamac.load(tiny_llama, draft_model=short)
        with pytest.raises(ArgumentTypeError, match="draft_model"):
            model.session(draft_model=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("context", [72, 90])
def test_drafts_change_nothing_where_the_context_is_shifted(
    model: llamac.Model, prophet: Prophet, context: int
) -> None:
    prophet.part_right = 0.9
    options: dict[str, Any] = {"max_tokens": 150, "temperature": 0.8, "seed": 3, "context_overflow": "shift"}
    found = check_equal(model, prophet, context=context, context_keep=5, **options)
    assert found.usage.shifted_tokens > 0
    assert found.usage.accepted_tokens > 30
