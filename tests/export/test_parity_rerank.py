"""Reranking against transformers, on a tiny checkpoint like Qwen3-Reranker.

The scores are stored in golden/reranker.py, so this runs without torch. Where it is installed, they are computed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import llamac
from golden.reranker import DOCUMENTS, QUERY, SCORES, TASK, make_folder, transformers_scores

TOLERANCE = 1e-5  # of a probability


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("rerank"))


@pytest.fixture(scope="module")
def reranker(folder: Path) -> Iterator[llamac.Model]:
    path = folder.with_suffix(".bin")
    llamac.export.export(folder, path, dtype="f32")
    with llamac.load(path, kv_dtype="f32") as model:
        yield model


@pytest.mark.parametrize("task", SCORES)
def test_scores_and_order_are_those_of_transformers(reranker: llamac.Model, task: str) -> None:
    ranked = reranker.rerank(QUERY, DOCUMENTS, task=None if task == TASK else task)
    scores = {found.index: found.score for found in ranked}
    assert [scores[i] for i in range(len(DOCUMENTS))] == pytest.approx(SCORES[task], abs=TOLERANCE)
    assert [found.index for found in ranked] == sorted(range(len(DOCUMENTS)), key=lambda i: -SCORES[task][i])
    assert [found.document for found in ranked] == [DOCUMENTS[found.index] for found in ranked]


@pytest.mark.parametrize("task", SCORES)
def test_stored_scores_are_current(folder: Path, task: str) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    assert transformers_scores(folder, task) == pytest.approx(SCORES[task], abs=TOLERANCE)
