"""Log probabilities of generated tokens and prompts, against NumPy, in every way to generate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from held_engines import held
from numpy.typing import NDArray

import llamac
from llamac import _core
from llamac.engine.batching import batch
from llamac.engine.generation import logprobs
from llamac.errors import ArgumentError, ModelError
from processes import TIMEOUT

PROMPT = [1, 40, 50, 40, 60]


def log_softmax(logits: Any) -> NDArray[np.float64]:
    x = np.asarray(logits, np.float64)
    shifted = x - x.max(-1, keepdims=True)
    found: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return found


@pytest.mark.parametrize("n", [1, 7, 300, 5000])
def test_they_are_those_of_the_softmax(n: int) -> None:
    logits = (np.random.RandomState(n).standard_normal(n) * 4).astype(np.float32)
    expected = log_softmax(logits)
    best = np.argsort(-logits, kind="stable")[: min(5, n)].tolist()
    token = n // 2
    (chosen, value), *top = _core.logprobs(logits.data, n, token, min(5, n))
    assert chosen == token
    assert value == pytest.approx(expected[token], abs=1e-6)
    assert [other for other, _ in top] == best
    assert [value for _, value in top] == pytest.approx(expected[best], abs=1e-6)


def test_tokens_without_a_probability_have_minus_infinity() -> None:
    logits = np.array([1, -np.inf, np.nan, 2], np.float32)
    assert _core.logprobs(logits.data, 4, 1, 4)[0] == (1, -np.inf)
    assert [token for token, _ in _core.logprobs(logits.data, 4, 2, 4)] == [2, 3, 0]
    with pytest.raises(ArgumentError, match="token 4"):
        _core.logprobs(logits.data, 4, 4, 0)
    with pytest.raises(ModelError, match="none of the logits"):
        _core.logprobs(logits[1:3].copy().data, 2, 0, 0)


def test_generations_report_them_alike(tiny_llama: Path) -> None:
    settings: Any = {"max_tokens": 6, "seed": 3, "temperature": 1.5, "top_k": 9, "logprobs": 2, "prompt_logprobs": 3}
    settings |= {"repetition_penalty": 1.2, "ignore_eos": True}
    with llamac.load(tiny_llama, context=64) as model:
        found = model.generate(PROMPT, **settings)
        assert found.tokens == model.generate(PROMPT, **{**settings, "logprobs": None, "prompt_logprobs": None}).tokens
        n = model.n_token_ids
        rows = log_softmax(model.logits([*PROMPT, *found.tokens])[:, :n])
        assert found.logprobs is not None
        assert found.prompt_logprobs is not None
        assert [entry.token for entry in found.logprobs] == found.tokens
        assert found.prompt_logprobs[0] is None
        entries = [*found.prompt_logprobs[1:], *found.logprobs]
        for place, (entry, row) in enumerate(zip(entries, rows, strict=False)):
            assert entry is not None
            assert entry.logprob == pytest.approx(row[entry.token], abs=1e-5)
            assert [token for token, _ in entry.top] == np.argsort(-row, kind="stable")[: len(entry.top)].tolist()
            assert len(entry.top) == (3 if place < len(PROMPT) - 1 else 2)
        with model.session() as session:
            for _ in range(2):  # the second time the session holds the prompt already
                again = session.generate(PROMPT, **settings)
                assert (again.logprobs, again.prompt_logprobs) == (found.logprobs, found.prompt_logprobs)
            with session.stream(PROMPT, **settings) as stream:
                for _ in stream:
                    pass
                assert stream.logprobs == found.logprobs
        with llamac.Engine(model) as engine:
            for _ in range(2):
                results = engine.generate([PROMPT, [1, 5], PROMPT], **settings)
                for result in (results[0], results[2]):
                    assert (result.logprobs, result.prompt_logprobs) == (found.logprobs, found.prompt_logprobs)


def test_prompts_longer_than_a_step_are_scored_also_after_a_pause(tiny_llama: Path) -> None:
    prompt = [1, *np.random.RandomState(1).randint(3, 250, 150).tolist()]
    settings: Any = {"max_tokens": 60, "temperature": 0, "prompt_logprobs": 0, "ignore_eos": True}
    with llamac.load(tiny_llama, context=256) as model:
        alone = model.generate(prompt, **settings)
        with llamac.Engine(model, kv_tokens=384) as engine:
            with held(engine):
                requests = [engine.submit(prompt, **settings) for _ in range(3)]
            for request in requests:
                result = request.result()
                assert (result.tokens, result.prompt_logprobs) == (alone.tokens, alone.prompt_logprobs)
            assert engine.stats().preemptions > 0


def test_they_are_absent_unless_asked_for(tiny_llama: Path) -> None:
    with llamac.load(tiny_llama) as model:
        found = model.generate(PROMPT, max_tokens=2)
        assert (found.logprobs, found.prompt_logprobs) == (None, None)
        found = model.generate(PROMPT, max_tokens=2, temperature=0, logprobs=0)
        assert found.logprobs is not None
        assert [entry.top for entry in found.logprobs] == [(), ()]
        everything = model.generate(PROMPT, max_tokens=1, logprobs=10**6).logprobs
        assert everything is not None
        assert len(everything[0].top) == model.n_token_ids
        with pytest.raises(ArgumentError, match="logprobs is -1"):
            model.generate(PROMPT, logprobs=-1)


@pytest.mark.parametrize("rows", [1, 3])
def test_large_vocabularies_are_scored_in_smaller_chunks(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """So that a cancellation need not wait for 32 rows of 262,000 log probabilities."""
    prompt = [*range(3, 20)]
    settings: Any = {"max_tokens": 2, "temperature": 0, "prompt_logprobs": 1}
    with llamac.load(tiny_llama) as model:
        whole = model.generate(prompt, **settings)
        size = model.config["vocab_size"]
        assert logprobs.chunk_rows(size) == logprobs.CHUNK
        assert logprobs.chunk_rows(262_144) == 16
        assert logprobs.chunk_rows(10**8) == 1
        monkeypatch.setattr(logprobs, "CHUNK_LOGITS", rows * size + 1)
        sizes: list[int] = []
        score = logprobs.score_rows

        def note(found: Any, *arguments: Any) -> Any:
            sizes.append(len(found))
            return score(found, *arguments)

        monkeypatch.setattr(logprobs, "score_rows", note)
        monkeypatch.setattr(batch, "score_rows", note)
        assert model.generate(prompt, **settings).prompt_logprobs == whole.prompt_logprobs
        with llamac.Engine(model) as engine:
            assert engine.generate([prompt], **settings)[0].prompt_logprobs == whole.prompt_logprobs
        assert max(sizes) == rows
        assert sum(sizes) == 2 * (len(prompt) - 1)


@pytest.mark.parametrize("in_engine", [False, True])
def test_a_cancel_does_not_wait_for_the_rows_of_a_chunk(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, in_engine: bool
) -> None:
    """With thousands of alternatives, a row of a large vocabulary takes tenths of a second."""
    described: list[int] = []
    describe = logprobs.token_logprobs

    def cancel_at_the_third(row: Any, n: int, token: int, top: int) -> logprobs.TokenLogprobs:
        described.append(token)
        if len(described) == 3:
            running[0].cancel()
        return describe(row, n, token, top)

    monkeypatch.setattr(logprobs, "token_logprobs", cancel_at_the_third)
    running: list[Any] = []
    prompt, settings = list(range(3, 23)), {"max_tokens": 2, "prompt_logprobs": 1}
    with llamac.load(tiny_llama) as model, llamac.Engine(model) as engine:
        if in_engine:
            with held(engine):
                running.append(engine.submit(prompt, **settings))
            completion = running[0].result(TIMEOUT)
            assert engine.generate([prompt], max_tokens=2, temperature=0)[0].finish_reason == "length"  # it goes on
        else:
            running.append(model.stream(prompt, **settings))
            assert list(running[0]) == []
            completion = running[0].completion
    assert (completion.finish_reason, completion.tokens) == ("cancelled", [])
    assert described == prompt[1:4]
