"""Probabilities of texts: against softmax of all logits in float64, shared prefixes, windows of perplexity."""

from __future__ import annotations

import math
from array import array
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import llamac
from builders import some_ids
from llamac import ArgumentError, ContextFullError
from llamac.engine.scoring import scores
from llamac.engine.scoring.scores import Span, score_spans, windows


def log_softmax(model: llamac.Model, ids: list[int]) -> NDArray[np.float64]:
    """log softmax of the logits after each position, in float64."""
    logits = model.logits(ids).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    found: NDArray[np.float64] = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return found


def expected(model: llamac.Model, ids: list[int], start: int) -> NDArray[np.float64]:
    """The log-probabilities of ids[start:]."""
    return log_softmax(model, ids[:-1])[range(start - 1, len(ids) - 1), ids[start:]]


# ---- spans


@pytest.mark.parametrize("n_shared", [0, 1, 40, 300])
def test_spans_have_the_probabilities_of_each_alone(model: llamac.Model, n_shared: int) -> None:
    """Contexts that are equal, that share a prefix, or nothing; more spans than a pass has sequences."""
    shared = some_ids(n_shared, seed=5)
    contexts = [[*shared, *some_ids(1 + i % 9, seed=i // 3)] for i in range(90)]
    ids = [[*context, *some_ids(1 + i % 5, seed=100 + i)] for i, context in enumerate(contexts)]
    spans = [Span(array("i", both), len(context)) for both, context in zip(ids, contexts, strict=True)]
    found = score_spans(model, spans)
    for i, (both, context) in enumerate(zip(ids, contexts, strict=True)):
        np.testing.assert_allclose(found[i].logprobs, expected(model, both, len(context)), atol=2e-6)
        alone = score_spans(model, [spans[i]])[0]
        assert np.array_equal(found[i].logprobs, alone.logprobs)
        assert np.array_equal(found[i].is_best, alone.is_best)


def test_a_shared_context_is_computed_once(model: llamac.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    run = llamac.Session._run

    def counting(self: llamac.Session, packed: array[int], *rest: object) -> None:
        computed.append(len(packed) // 4)
        run(self, packed, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(llamac.Session, "_run", counting)
    context = some_ids(400)
    spans = [Span(array("i", [*context, *some_ids(3, seed=i)]), len(context)) for i in range(8)]
    score_spans(model, spans)
    assert sum(computed) <= 400 + 8 * 3


def test_windowed_models_share_what_can_be_cut(windowed: llamac.Model) -> None:
    context = some_ids(700)
    ids = [[*context, *some_ids(n, seed=n)] for n in (400, 390, 2)]
    found = score_spans(windowed, [Span(array("i", both), len(context)) for both in ids])
    for both, scored in zip(ids, found, strict=True):
        np.testing.assert_allclose(scored.logprobs, expected(windowed, both, len(context)), atol=5e-6)


def test_greedy_tokens_are_the_best_ones(source: Path) -> None:
    prompt = some_ids(20)
    with llamac.load(source) as model:  # without padding of the vocabulary, which is never generated
        greedy = model.generate(prompt, max_tokens=5, temperature=0, ignore_eos=True).tokens
        [score, other] = model.score(prompt, [greedy, [*greedy[:-1], (greedy[-1] + 1) % 284]])
    assert score.is_greedy
    assert not other.is_greedy
    assert score.tokens == greedy


# ---- continuations


def test_scores_sum_the_tokens_of_the_continuation(model: llamac.Model) -> None:
    whole = model.tokenize("hello world")
    start = len(model.tokenize("hello"))
    [score] = model.score("hello", [" world"])
    assert score.tokens == whole[start:]
    np.testing.assert_allclose(score.token_logprobs, expected(model, whole, start), atol=2e-6)
    assert score.logprob == pytest.approx(sum(score.token_logprobs), abs=1e-12)


def test_white_space_at_the_end_of_the_prompt_belongs_to_the_continuation(model: llamac.Model) -> None:
    assert model.score("hello ", ["world"]) == model.score("hello", [" world"])


def test_an_empty_prompt_is_bos(model: llamac.Model) -> None:
    [score] = model.score("", ["hello"])
    ids = model.tokenize("hello")
    assert score.tokens == ids[1:]
    np.testing.assert_allclose(score.token_logprobs, expected(model, ids, 1), atol=2e-6)
    assert model.score([], [ids[1:]]) == [score]


def test_continuations_that_cannot_be_scored_are_refused(model: llamac.Model) -> None:
    with pytest.raises(ArgumentError, match="continuation '' has no tokens"):
        model.score("hello", ["a", ""])
    with pytest.raises(TypeError, match="of the prompt's type"):
        model.score("hello", [[1, 2]])
    with pytest.raises(ContextFullError, match=r"continuations\[1\] has 70\d tokens .* 600"):
        model.score("hello", ["a", "x" * 700])
    with pytest.raises(ArgumentError, match="the prompt has the token id 900, expected 0 to"):
        model.score([1, 900], [[3]])
    with pytest.raises(ArgumentError, match="the continuation has the token id -1, expected 0 to"):
        model.score([1], [[2, -1]])
    for continuations in (" bc d", None, b"bc"):
        with pytest.raises(TypeError, match="continuations must be a list of str or of token ids"):
            model.score("a", continuations)  # type: ignore[arg-type]


def test_a_continuation_that_would_merge_with_the_prompt_has_its_own_tokens() -> None:
    for name in ("stories", "stories-gpt2"):
        with llamac.load(name) as stories:
            prompt = stories.tokenize("Once up")
            assert stories.tokenize("Once upon")[: len(prompt)] != prompt
            [score] = stories.score("Once up", ["on a time"])
            assert b"".join(map(stories.tokenizer.token_bytes, score.tokens)) == b"on a time"
            assert [score] == stories.score(prompt, [score.tokens])


# ---- perplexity


def test_windows_cover_each_id_once() -> None:
    assert list(windows(10, 4, 2)) == [(0, 4, 1), (2, 6, 4), (4, 8, 6), (6, 10, 8)]
    assert list(windows(9, 4, 4)) == [(0, 4, 1), (4, 8, 4), (8, 9, 8)]
    assert list(windows(3, 8, 8)) == [(0, 3, 1)]


@pytest.mark.parametrize(("stride", "context"), [(None, None), (None, 50), (20, 50), (50, 50), (1, 150)])
def test_perplexity_is_that_of_the_windows(model: llamac.Model, stride: int | None, context: int | None) -> None:
    """Against the procedure that transformers documents for models of fixed length."""
    ids = some_ids(170)
    size = context or 600
    step, total, count, previous_end = stride or size, 0.0, 0, 0
    for first in range(0, len(ids), step):
        end = min(first + size, len(ids))
        scored = max(previous_end, first + 1)
        if scored < end:
            total += float(expected(model, ids[first:end], scored - first).sum())
            count += end - scored
        previous_end = end
        if end == len(ids):
            break
    found = model.perplexity(ids, stride=stride, context=context)
    assert found == pytest.approx(math.exp(-total / count), rel=1e-6)


def test_ids_and_contexts_without_a_perplexity_are_refused(model: llamac.Model) -> None:
    for token in (-1, model.config["vocab_size"]):
        with pytest.raises(ArgumentError, match=f"the text has the token id {token}, expected 0 to"):
            model.perplexity([1, 2, token])
    with pytest.raises(ArgumentError, match="context is 1, expected at least 2"):
        model.perplexity("hello world", context=1)


def test_perplexity_of_text_has_bos(model: llamac.Model) -> None:
    assert model.perplexity("hello world") == model.perplexity(model.tokenize("hello world"))


def test_perplexity_refuses_bad_arguments(model: llamac.Model) -> None:
    with pytest.raises(ArgumentError, match="1 tokens, expected at least 2"):
        model.perplexity([1])
    for stride in (0, 601):
        with pytest.raises(ArgumentError, match=f"stride is {stride}, expected 1 to 600"):
            model.perplexity(some_ids(10), stride=stride)
    with pytest.raises(ArgumentError, match="context is 700"):
        model.perplexity(some_ids(10), context=700)


def test_probabilities_are_over_the_whole_vocabulary(model: llamac.Model) -> None:
    """With its padding, as in transformers."""
    total = sum(math.exp(score.logprob) for score in model.score([5], [[i] for i in range(301)]))
    assert total == pytest.approx(1, abs=1e-5)
    assert model.n_token_ids < 301


def test_pieces_bound_the_logits_in_memory(model: llamac.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = some_ids(120)
    whole = score_spans(model, [Span(array("i", ids), 1)])[0]
    monkeypatch.setattr(scores, "PASS_LOGITS", 7)
    assert np.array_equal(score_spans(model, [Span(array("i", ids), 1)])[0].logprobs, whole.logprobs)
