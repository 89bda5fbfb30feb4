"""Reranking: the prompt that Qwen3-Reranker was trained on, scores, order, refused models."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llamac
from builders import checkpoint, llama_config, write_model
from llamac import ArgumentError, ContextFullError, UnsupportedError
from llamac.engine.scoring import ranking

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
PROMPT = (
    "<|im_start|>system\n" + ranking.JUDGE + "<|im_end|>\n<|im_start|>user\n<Instruct>: " + ranking.TASK + "\n"
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
DOCUMENTS = ["The end of the world.", "hello hello", "The end of the world.", "", "Then hell froze."]


@pytest.fixture
def reranker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[llamac.Model]:
    """A random LLaMA with a chat template, for which "lo" and "he" are the answers."""
    made = checkpoint(llama_config(context=1200))
    made.chat_template = TEMPLATE
    with llamac.load(write_model(tmp_path / "model.bin", made)) as model:
        answers = {"yes": model.tokenizer.id_of("lo"), "no": model.tokenizer.id_of("he")}
        monkeypatch.setattr(ranking, "_answer_id", lambda _, word: answers[word])
        yield model


def test_scores_are_the_probability_of_yes_against_no(reranker: llamac.Model) -> None:
    found = reranker.rerank("When does it end?", DOCUMENTS)
    assert sorted(ranked.index for ranked in found) == list(range(5))
    assert [ranked.score for ranked in found] == sorted((ranked.score for ranked in found), reverse=True)
    yes, no = reranker.tokenizer.id_of("lo"), reranker.tokenizer.id_of("he")
    assert yes is not None
    assert no is not None
    for ranked in found:
        assert ranked.document == DOCUMENTS[ranked.index]
        prompt = PROMPT.format(query="When does it end?", document=ranked.document)
        logits = reranker.logits(reranker.tokenizer.encode(prompt))[-1].astype(np.float64)
        assert ranked.score == pytest.approx(1 / (1 + math.exp(logits[no] - logits[yes])), abs=1e-6)


def test_equal_documents_keep_their_order(reranker: llamac.Model) -> None:
    places = {ranked.index: place for place, ranked in enumerate(reranker.rerank("end", DOCUMENTS))}
    assert places[2] == places[0] + 1


def test_the_task_is_part_of_the_prompt(reranker: llamac.Model) -> None:
    one, other = (reranker.rerank("end", DOCUMENTS[:1], task=task)[0].score for task in (None, "Find the end."))
    assert one != other
    assert reranker.rerank("end", []) == []


def test_documents_that_do_not_fit_are_named(reranker: llamac.Model) -> None:
    with pytest.raises(ContextFullError, match=r"1200"):
        reranker.rerank("end", ["a", "x" * 1200])
    with pytest.raises(TypeError, match=r"documents\[1\]"):
        reranker.rerank("end", ["a", 1])  # type: ignore[list-item]


@pytest.mark.parametrize("documents", ["hello", b"hello", None, 3])
def test_documents_are_a_list(reranker: llamac.Model, documents: Any) -> None:
    with pytest.raises(TypeError, match="documents must be a list of str"):
        reranker.rerank("end", documents)


def test_a_query_is_a_str(reranker: llamac.Model) -> None:
    with pytest.raises(TypeError, match="query must be a str, not int"):
        reranker.rerank(3, ["a"])  # type: ignore[arg-type]


def test_documents_of_an_iterator_are_ranked(reranker: llamac.Model) -> None:
    assert reranker.rerank("end", iter(DOCUMENTS)) == reranker.rerank("end", DOCUMENTS)  # type: ignore[arg-type]


def test_models_that_cannot_rank_are_refused(tiny_llama: Path) -> None:
    with llamac.load(tiny_llama) as model, pytest.raises(UnsupportedError, match="no token 'yes'"):
        model.rerank("a", ["b"])


@pytest.mark.parametrize("wrong", [5, "f", {"f": 1}])
def test_processors_are_functions(tiny_llama: Path, wrong: Any) -> None:
    with llamac.load(tiny_llama) as model, pytest.raises(TypeError, match="logits_processors must be a function or a"):
        model.generate("a", logits_processors=wrong)


def test_a_model_without_chat_template_cannot_rank(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranking, "_answer_id", lambda _, word: 5)
    with llamac.load(tiny_llama) as model, pytest.raises(ArgumentError, match="no chat template"):
        model.rerank("a", ["b"])
