"""`/v1/embeddings`, `/v1/rerank` and `/execute`: the model's own results, in the form of each path."""

from __future__ import annotations

import base64
import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx")

import llamac
from builders import checkpoint, llama_config, write_model
from http_server import ENDLESS, PATIENCE, Running, running
from llamac.engine.scoring import embedding as scoring
from llamac.engine.scoring import ranking
from llamac.server import embedding, worker
from llamac.server.worker import Worker


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running("stories") as served:
        yield served


def test_embeddings_are_numbers_or_base64(server: Running) -> None:
    texts = ["a red ball", "two dogs"]
    expected = server.engine.model.embed(texts)
    found = server.post("/v1/embeddings", {"input": texts, "model": "stories"}).json()
    assert [entry["index"] for entry in found["data"]] == [0, 1]
    assert np.array_equal(np.array([entry["embedding"] for entry in found["data"]], np.float32), expected)
    packed = server.post("/v1/embeddings", {"input": texts[0], "encoding_format": "base64"}).json()["data"]
    assert np.array_equal(np.frombuffer(base64.b64decode(packed[0]["embedding"]), "<f4"), expected[0])
    tokens = sum(len(server.engine.model.tokenizer.encode(text, add_special=True)) for text in texts)
    assert found["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    short = server.post("/v1/embeddings", {"input": texts[0], "dimensions": 8, "user": "me"})
    assert np.allclose(short.json()["data"][0]["embedding"], server.engine.model.embed(texts[0], dimensions=8))
    assert short.headers["x-llamac-no-effect"] == "user"


def test_token_ids_have_the_embedding_of_their_text(server: Running) -> None:
    texts = ["a red ball", "two dogs"]
    ids = [server.engine.model.tokenizer.encode(text, add_special=True) for text in texts]
    expected = server.post("/v1/embeddings", {"input": texts}).json()
    assert server.post("/v1/embeddings", {"input": ids}).json() == expected
    assert server.post("/v1/embeddings", {"input": [texts[0], ids[1]]}).json() == expected
    one = server.post("/v1/embeddings", {"input": ids[1]}).json()
    assert (one["data"][0]["embedding"], one["usage"]["prompt_tokens"]) == (
        expected["data"][1]["embedding"],
        len(ids[1]),
    )


def test_embeddings_end_when_the_client_goes_away(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = scoring.vectors
    begun, ended = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    def watched(*arguments: Any, **options: Any) -> Any:
        begun.set()
        try:
            return vectors(*arguments, **options)
        except llamac.CancelledError as error:
            failures.append(error)
            raise
        finally:
            ended.set()

    monkeypatch.setattr(embedding, "vectors", watched)
    body = json.dumps({"input": ["a red ball and two dogs " * 30] * 2048}).encode()  # would take minutes
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head.encode() + body)
        assert begun.wait(PATIENCE)
    assert ended.wait(PATIENCE)
    assert failures


@dataclass
class Encoding:
    """A call of `Tokenizer.encode`."""

    text: str
    limit: int | None


@pytest.fixture
def encodings(monkeypatch: pytest.MonkeyPatch) -> list[Encoding]:
    encode = llamac.Tokenizer.encode
    found: list[Encoding] = []

    def noted(self: llamac.Tokenizer, text: str, **options: Any) -> list[int]:
        found.append(Encoding(text, options.get("limit")))
        return encode(self, text, **options)

    monkeypatch.setattr(llamac.Tokenizer, "encode", noted)
    return found


def test_texts_are_tokenized_once_and_only_if_they_can_fit(server: Running, encodings: list[Encoding]) -> None:
    assert server.post("/v1/embeddings", {"input": ["a red ball", "two dogs"]}).status_code == 200
    context = server.engine.context
    assert encodings == [Encoding("a red ball", context), Encoding("two dogs", context)]


def test_tokenizing_ends_when_the_client_goes_away(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of many texts is tokenized until the client has gone. The second one is not begun."""
    encode, compute = llamac.Tokenizer.encode, Worker.compute
    begun, gone, ended = threading.Event(), threading.Event(), threading.Event()
    encoded: list[str] = []

    class Noted(llamac.Cancellation):
        def cancel(self) -> None:
            super().cancel()
            gone.set()

    def waiting(self: llamac.Tokenizer, text: str, **options: Any) -> list[int]:
        encoded.append(text)
        begun.set()
        assert gone.wait(PATIENCE)
        return encode(self, text, **options)

    def watched(self: Worker, call: Callable[[llamac.Cancellation], Any]) -> Any:
        def ending(cancel: llamac.Cancellation) -> Any:
            try:
                return call(cancel)
            finally:
                ended.set()

        return compute(self, ending)

    monkeypatch.setattr(worker, "Cancellation", Noted)
    monkeypatch.setattr(llamac.Tokenizer, "encode", waiting)
    monkeypatch.setattr(Worker, "compute", watched)
    body = json.dumps({"input": [f"ball {i}" for i in range(100)]}).encode()
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head.encode() + body)
        assert begun.wait(PATIENCE)
    assert ended.wait(PATIENCE)
    assert encoded == ["ball 0"]


ASK = [{"role": "user", "content": "?"}]
TITLE = ("documents[0].title", "unknown_parameter")


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("/v1/embeddings", {}, "input", "missing_required_parameter"),
        ("/v1/embeddings", {"input": []}, "input", "invalid_value"),
        ("/v1/embeddings", {"input": [[]]}, "input", "invalid_value"),
        ("/v1/embeddings", {"input": [1, 10**6]}, "input", "invalid_value"),
        ("/v1/embeddings", {"input": [1] * 5000}, "input", "context_length_exceeded"),
        ("/v1/embeddings", {"input": [1, "a"]}, "input", "invalid_type"),
        ("/v1/embeddings", {"input": [True]}, "input", "invalid_type"),
        ("/v1/embeddings", {"input": "a", "dimensions": 10**6}, "dimensions", "invalid_value"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "input", "invalid_value"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format", "invalid_value"),
        ("/v1/embeddings", {"input": "a", "dimensions": "8"}, "dimensions", "invalid_type"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions", "invalid_value"),
        ("/v1/embeddings", {"input": "a", "other": 1}, "other", "unknown_parameter"),
        ("/v1/embeddings", {"input": "a", "prompt_name": "query"}, "prompt_name", "invalid_value"),
        ("/v1/embeddings", {"input": [1], "prompt_name": "query"}, "prompt_name", "invalid_value"),
        ("/v1/embeddings", {"input": "a " * 5000}, "input", "context_length_exceeded"),
        ("/v1/rerank", {"documents": ["a"]}, "query", "missing_required_parameter"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents", "invalid_value"),
        ("/v1/rerank", {"query": "a", "documents": [3]}, "documents[0]", "invalid_type"),
        ("/v1/rerank", {"query": "a", "documents": [{"text": "b", "title": "c"}]}, *TITLE),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n", "invalid_value"),
        ("/execute", {}, "prompt", "missing_required_parameter"),
        ("/execute", {"prompt": ["a", "b"]}, "prompt", "invalid_value"),
        ("/execute", {"prompt": "a", "sampling": {"guide": 1}}, "sampling.guide", "invalid_value"),
        ("/execute", {"prompt": "a", "sampling": {"heat": 1}}, "sampling.heat", "unknown_parameter"),
        ("/execute", {"prompt": "a", "sampling": {"top_p": 2}}, "sampling.top_p", "invalid_value"),
        ("/execute", {"prompt": "a " * 5000}, "prompt", "context_length_exceeded"),
        ("/detokenize", {"tokens": [10**8]}, "tokens", "invalid_value"),
        ("/execute", {"prompt": "a", "stream": True, "sampling": {"n": 2}}, "sampling", "invalid_value"),
        ("/execute", {"prompt": "a", "priority": "high"}, "priority", "invalid_type"),
        ("/execute", {"prompt": "a", "sampling": {"logit_bias": {"a": 1}}}, "sampling.logit_bias", "invalid_value"),
        ("/apply-template", {"messages": ASK, "tools": [{"name": "a b"}]}, "tools", "invalid_value"),
    ],
)
def test_wrong_bodies_are_refused(server: Running, path: str, body: Any, param: str | None, code: str) -> None:
    response = server.post(path, body)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, code), error


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of a random LLaMA with a chat template, for which "lo" and "he" are the answers."""
    made = checkpoint(llama_config(context=600))
    made.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    path = write_model(tmp_path_factory.mktemp("judge") / "judge.bin", made)
    with running(path) as served, pytest.MonkeyPatch.context() as patch:
        answers = {"yes": served.engine.model.tokenizer.id_of("lo"), "no": served.engine.model.tokenizer.id_of("he")}
        patch.setattr(ranking, "_answer_id", lambda _, word: answers[word])
        yield served


def test_a_ranking_has_the_best_documents_first(judge: Running) -> None:
    documents = ["the end", "hello hello", "a world"]
    expected = judge.engine.model.rerank("q", documents)
    body = {"query": "q", "documents": [documents[0], {"text": documents[1]}, documents[2]], "return_documents": True}
    results = judge.post("/v1/rerank", body).json()["results"]
    assert len({found.score for found in expected}) == len(documents)
    assert results == [
        {"index": found.index, "relevance_score": found.score, "document": {"text": documents[found.index]}}
        for found in expected
    ]
    assert judge.post("/v1/rerank", {**body, "top_n": 1}).json()["results"] == results[:1]


def test_documents_are_tokenized_once(judge: Running, encodings: list[Encoding]) -> None:
    assert judge.post("/v1/rerank", {"query": "q", "documents": ["the end", "a world"]}).status_code == 200
    for document in ("the end", "a world"):
        assert sum(document in found.text for found in encodings) == 1


def test_a_ranking_counts_the_tokens_of_its_prompts(judge: Running) -> None:
    def counted() -> float:
        lines = judge.client.get("/metrics").text.splitlines()
        return sum(float(line.split()[1]) for line in lines if line.startswith("llamac_prompt_tokens_total "))

    before = counted()
    answer = judge.post("/v2/rerank", {"query": "q", "documents": ["the end", "a world"]}).json()
    start = f"{ranking.JUDGE}<Instruct>: {ranking.TASK}\n<Query>: q\n<Document>: "
    prompts = [start + text for text in ("the end", "a world")]
    tokens = sum(len(judge.engine.model.tokenizer.encode(prompt)) for prompt in prompts)
    assert counted() - before == tokens
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    other = judge.post("/v1/rerank", {"query": "q", "documents": ["the end", "a world"], "task": "Find it"}).json()
    difference = len(judge.engine.model.tokenizer.encode(ranking.TASK)) - len(
        judge.engine.model.tokenizer.encode("Find it")
    )
    assert tokens - other["usage"]["total_tokens"] == 2 * difference


@pytest.mark.parametrize("length", [560, 10_000])
def test_a_document_that_does_not_fit_is_named(judge: Running, length: int) -> None:
    """A long one is refused before it is tokenized, the other one after."""
    response = judge.post("/v1/rerank", {"query": "q", "documents": ["a", "x" * length]})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, "documents", "context_length_exceeded")
    assert error["message"].startswith("documents[1] ")
    assert "overflow" not in error["message"]


def test_a_model_that_cannot_rank_says_so(server: Running) -> None:
    response = server.post("/v1/rerank", {"query": "q", "documents": ["a"]})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, "documents", "invalid_value")


def test_an_execution_has_everything_that_is_known_of_it(server: Running) -> None:
    sampling = {"max_tokens": 6, "seed": 4, "logprobs": 1, "logit_bias": [[5, 1.5]], "n": 2}
    answer = server.post("/execute", {"prompt": "Once", "sampling": sampling}, headers={"x-request-id": "mine"})
    found = answer.json()
    assert found["request_id"] == answer.headers["x-request-id"] == "mine"
    alone = server.engine.model.generate("Once", max_tokens=6, seed=4, logit_bias=[(5, 1.5)], n=2)
    assert (found["text"], found["tokens"], found["finish_reason"]) == (alone.text, alone.tokens, "length")
    assert [other["tokens"] for other in found["others"]] == [alone.others[0].tokens]
    assert found["usage"]["completion_tokens"] == len(found["logprobs"]) == 6
    assert set(found["timings"]) == {"prefill", "decode", "queued"}


def test_an_execution_takes_biases_by_token_or_as_pairs(server: Running) -> None:
    """-100 is a bias as in SamplingParams, and no ban as in OpenAI's API."""
    model = server.engine.model
    for value in ({"5": 100}, [[5, 100]]):
        found = server.post("/execute", {"prompt": "Once", "sampling": {"max_tokens": 2, "logit_bias": value}})
        assert found.json()["tokens"] == [5, 5]
    only_two = {str(token): -200 for token in range(model.config["vocab_size"]) if token not in (5, 6)}
    biases = {**only_two, "5": -100, "6": -101}
    sampling = {"max_tokens": 2, "temperature": 0, "logit_bias": biases}
    alone = model.generate(
        "Once", max_tokens=2, temperature=0, logit_bias={int(token): biases[token] for token in biases}
    )
    assert server.post("/execute", {"prompt": "Once", "sampling": sampling}).json()["tokens"] == alone.tokens
    assert set(alone.tokens) <= {5, 6}


def test_an_execution_can_say_that_there_is_no_guide(server: Running) -> None:
    body = {"prompt": "Once", "sampling": {"guide": None, "logits_processors": None, "max_tokens": 1}}
    assert server.post("/execute", body).status_code == 200


def test_an_execution_is_streamed_with_its_result_at_the_end(server: Running) -> None:
    body = {"prompt": "Once", "sampling": {"max_tokens": 9, "seed": 4}, "stream": True}
    with server.client.stream("POST", "/execute", json=body) as response:
        lines = [line for line in response.iter_lines() if line]
    names, values = lines[::2], [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert set(names[:-1]) == {"event: piece"}
    assert names[-1] == "event: result"
    assert "".join(value["text"] for value in values[:-1]) == values[-1]["text"]
    assert len(values[-1]["tokens"]) == 9
    with server.client.stream("POST", "/execute", json={**body, "sampling": ENDLESS}) as response:
        lines_left = response.iter_lines()
        next(lines_left)
    server.wait_until_idle()
