"""`/v1/embeddings` and `/v1/rerank`: vectors of texts, and the relevance of documents to a query."""

from __future__ import annotations

import base64
from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any

from llamac.openai.errors import InvalidRequestError, wrong_type
from llamac.openai.responses import new_id
from llamac.openai.schemas import ANY, BOOLEAN, COUNT, STRING, Schema, array, fields
from llamac.server.exchange import Answer, until_gone
from llamac.server.generation import no_effect

if TYPE_CHECKING:
    from starlette.requests import Request

    from llamac.engine.scoring.cancellation import Cancellation
    from llamac.engine.scoring.ranking import Ranked
    from llamac.server.service import Service

MAX_TEXTS = 2048  # of a request, as in OpenAI's API
FORMATS = ("float", "base64")
WITHOUT_EFFECT: dict[str, Schema] = {"user": ANY}
# The parameters of each path, with the schemas of their values.
EMBEDDING_FIELDS: dict[str, Schema] = {
    "input": {"anyOf": [STRING, array(STRING, minItems=1, maxItems=MAX_TEXTS)]},
    "encoding_format": {"enum": list(FORMATS)},
    "dimensions": COUNT,
    **WITHOUT_EFFECT,
}
RERANK_FIELDS: dict[str, Schema] = {
    "query": STRING,
    "documents": array({"anyOf": [STRING, fields({"text": STRING}, ("text",))]}, minItems=1, maxItems=MAX_TEXTS),
    "top_n": COUNT,
    "return_documents": BOOLEAN,
    **WITHOUT_EFFECT,
}


async def embeddings(service: Service, http: Request) -> Answer:
    """Answer a request for embeddings."""
    worker, body = await service.begin(http)
    given = checked_fields(body, EMBEDDING_FIELDS)
    texts = _texts(given.get("input"))
    form = given.get("encoding_format", "float")
    if form not in FORMATS:
        message = f"encoding_format is {form!r}, expected {' or '.join(FORMATS)}"
        raise InvalidRequestError(message, "encoding_format", "invalid_value")
    dimensions = given.get("dimensions")
    if not isinstance(dimensions, int | None) or isinstance(dimensions, bool):
        raise wrong_type("dimensions", dimensions, "a whole number")

    def compute(cancel: Cancellation) -> tuple[list[Any], int]:
        model = worker.engine.model
        counts = [len(model.tokenizer.encode(text, add_special=True)) for text in texts]
        worker.call.check_prompt(max(counts))
        vectors = model.embed(texts, dimensions=dimensions, cancel=cancel)
        return [_written(vector, form) for vector in vectors], sum(counts)

    vectors, tokens = await until_gone(http.receive, worker.compute(compute))
    worker.count(tokens)
    data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return Answer({"object": "list", "data": data, "model": worker.name, "usage": usage}, headers=_ignored(body))


def _texts(value: object) -> list[str]:
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(isinstance(text, str) for text in listed):
        raise wrong_type("input", value, "a string or an array of strings")
    if not 1 <= len(listed) <= MAX_TEXTS:
        raise InvalidRequestError(f"input has {len(listed)} texts, expected 1 to {MAX_TEXTS}", "input", "invalid_value")
    return listed


def _written(vector: Any, form: str) -> str | list[float]:
    """A vector as numbers, or as the bytes of little-endian floats in base64."""
    if form == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers


async def rerank(service: Service, http: Request) -> Answer:
    """Answer a request for a ranking."""
    worker, body = await service.begin(http)
    given = checked_fields(body, RERANK_FIELDS)
    query = given.get("query")
    if not isinstance(query, str):
        raise wrong_type("query", query, "a string")
    documents = _documents(given.get("documents"))
    top, with_texts = given.get("top_n", len(documents)), given.get("return_documents", False)
    if not isinstance(top, int) or isinstance(top, bool):
        raise wrong_type("top_n", top, "a whole number")
    if top < 1:
        raise InvalidRequestError(f"top_n is {top}, expected at least 1", "top_n", "invalid_value")
    if not isinstance(with_texts, bool):
        raise wrong_type("return_documents", with_texts, "a boolean")

    def compute(cancel: Cancellation) -> tuple[list[Ranked], int]:
        model = worker.engine.model
        asked = len(model.tokenizer.encode(query))
        counts = [asked + len(model.tokenizer.encode(document)) for document in documents]
        worker.call.check_prompt(max(counts))
        return model.rerank(query, documents, cancel=cancel), sum(counts)

    ranked, tokens = await until_gone(http.receive, worker.compute(compute))
    worker.count(tokens)
    results = []
    for found in ranked[:top]:
        text = {"document": {"text": found.document}} if with_texts else {}
        results.append({"index": found.index, "relevance_score": found.score, **text})
    return Answer({"id": new_id("rerank-"), "model": worker.name, "results": results}, headers=_ignored(body))


def _documents(value: object) -> list[str]:
    if not isinstance(value, list):
        raise wrong_type("documents", value, "an array of texts")
    if not 1 <= len(value) <= MAX_TEXTS:
        message = f"documents has {len(value)} texts, expected 1 to {MAX_TEXTS}"
        raise InvalidRequestError(message, "documents", "invalid_value")
    texts: list[Any] = [document.get("text") if isinstance(document, dict) else document for document in value]
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise wrong_type(f"documents[{index}]", text, "a string, or an object with a text")
    return texts


def checked_fields(body: Mapping[str, Any], known: Container[str]) -> dict[str, Any]:
    """The parameters of a body that are not null. Unknown ones are refused.

    Raises:
        InvalidRequestError: If a parameter does not exist.
    """
    given = {name: value for name, value in body.items() if value is not None}
    for name in given:
        if name not in known and name != "model":
            raise InvalidRequestError(f"unknown parameter {name!r}", name, "unknown_parameter")
    return given


def _ignored(body: Mapping[str, Any]) -> dict[str, str]:
    return no_effect([name for name in WITHOUT_EFFECT if body.get(name) is not None])
