"""A server of an encoder: embeddings and rankings, and an error that names them for all else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx")

import llamac
from builders import bert_config, encoder, write_model
from golden.reranker import DOCUMENTS, PAIR_SCORES, QUERY, make_scorer
from http_server import running

MESSAGES = [{"role": "user", "content": "hello"}]


def test_an_encoder_answers_embeddings_only(tmp_path: Path) -> None:
    path = write_model(tmp_path / "bert.bin", encoder(bert_config()), pooling="mean", prompts={"query": "a "})
    with running(path) as server:
        prompted = server.post("/v1/embeddings", {"input": ["hello"], "prompt_name": "query"}).json()
        assert np.array_equal(
            np.array(prompted["data"][0]["embedding"], np.float32), server.engine.model.embed("a hello")
        )
        expected = server.engine.model.embed(["hello", "the end"])
        found = server.post("/v1/embeddings", {"input": ["hello", "the end"]}).json()["data"]
        assert np.array_equal(np.array([entry["embedding"] for entry in found], np.float32), expected)
        for where, body in (
            ("/v1/completions", {"prompt": "hello"}),
            ("/v1/chat/completions", {"messages": MESSAGES}),
            ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ):
            response = server.post(where, body)
            assert response.status_code == 400, response.text
            assert "embed" in response.json()["error"]["message"]
        assert server.post("/v1/embeddings", {"input": "hello"}).status_code == 200


def test_a_cross_encoder_answers_rankings_only(tmp_path: Path) -> None:
    config = bert_config(scores_pairs=1, pooled_dim=(40, 1), pooled_activation=("tanh", "sigmoid"))
    with running(write_model(tmp_path / "scores.bin", encoder(config), pooling="cls")) as server:
        documents = ["the end", "hello hello", "a world"]
        expected = server.engine.model.rerank("q", documents)
        results = server.post("/v1/rerank", {"query": "q", "documents": documents}).json()["results"]
        assert [(entry["index"], entry["relevance_score"]) for entry in results] == [
            (found.index, found.score) for found in expected
        ]
        response = server.post("/v1/embeddings", {"input": "hello"})
        assert response.status_code == 400
        assert "use rerank" in response.json()["error"]["message"]
        response = server.post("/v1/rerank", {"query": "q", "documents": documents, "task": "Find it"})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "task")


def test_a_decoder_that_scores_answers_rankings_only(tmp_path: Path) -> None:
    llamac.export.export(make_scorer(tmp_path, "template"), tmp_path / "scores.bin")
    expected = PAIR_SCORES["template", None]
    with running(tmp_path / "scores.bin") as server:
        body = {"query": QUERY, "documents": list(DOCUMENTS)}
        results = server.post("/v1/rerank", body).json()["results"]
        assert [entry["index"] for entry in results] == sorted(range(len(expected)), key=lambda i: -expected[i])
        for entry in results:
            assert entry["relevance_score"] == pytest.approx(expected[entry["index"]], abs=1e-5)
        for where, other in (
            ("/v1/completions", {"prompt": "hello"}),
            ("/v1/chat/completions", {"messages": MESSAGES}),
            ("/v1/embeddings", {"input": "hello"}),
        ):
            response = server.post(where, other)
            assert response.status_code == 400, response.text
            assert "rerank" in response.json()["error"]["message"]
        response = server.post("/v1/rerank", {"query": QUERY, "documents": ["a", "word " * 2000]})
        assert response.status_code == 400, response.text
        assert "documents[1] does not fit the context" in response.json()["error"]["message"]
