"""`/v1/embeddings`, `/v1/rerank` and `/v2/rerank`: vectors of texts, and the relevance of documents to a query."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

from llamac.engine.sampling.schemas import TOKEN_ID
from llamac.engine.scoring.embedding import check_embeds, kept_dimensions, text_tokens, vectors
from llamac.engine.scoring.pooled import pooling_of
from llamac.engine.scoring.prompts import chosen_prompt
from llamac.engine.scoring.ranking import prepare, rank
from llamac.errors import ArgumentError, ContextFullError
from llamac.openai.errors import InvalidRequestError, wrong_type
from llamac.openai.forms import Form, Ignored
from llamac.openai.inputs import read_prompts
from llamac.openai.responses import new_id
from llamac.openai.schemas import BOOLEAN, COUNT, STRING, TEXTS, array
from llamac.progress import silent
from llamac.server.exchange import Answer, until_gone
from llamac.server.generation import naming, no_effect, refused

if TYPE_CHECKING:
    from llamac.engine.scoring.cancellation import Cancellation
    from llamac.engine.scoring.ranking import Ranked
    from llamac.server.call import Call
    from llamac.server.service import Service

MAX_TEXTS = 2048  # maximum number of texts per request, as in OpenAI's API
USER = ("user",)
DOCUMENT = Form({"text": STRING}, ("text",))
_IDS = array(TOKEN_ID, minItems=1)
EMBEDDINGS = Form(
    {
        "model": STRING,
        "input": {"anyOf": [STRING, _IDS, array({"anyOf": [STRING, _IDS]}, minItems=1, maxItems=MAX_TEXTS)]},
        "encoding_format": {"enum": ["float", "base64"]},
        "dimensions": COUNT,
        "prompt_name": STRING,
    },
    ("input",),
    no_effect=USER,
    elsewhere=dict.fromkeys(("texts", "prompt", "content"), "input"),
    texts={
        **TEXTS,
        "encoding_format": "`float` or `base64`",
        "input": "a string or token ids, or an array of these",
        "dimensions": "keeps the first dimensions, for models trained for this",
        "prompt_name": "one of the model's prompts, which precedes each string; not part of OpenAI's API",
    },
)
RERANK = Form(
    {
        "model": STRING,
        "query": STRING,
        "documents": array({"anyOf": [STRING, DOCUMENT.schema]}, minItems=1, maxItems=MAX_TEXTS),
        "top_n": COUNT,
        "return_documents": BOOLEAN,
        "task": STRING,
    },
    ("query", "documents"),
    no_effect=USER,
    texts={
        **TEXTS,
        "query": "a string",
        "documents": "strings, or objects with a `text`",
        "top_n": "the number of results, the best first",
        "return_documents": "whether results include their documents",
        "task": "the purpose of the query, for models with a chat template",
    },
)


async def embeddings(service: Service, call: Call) -> Answer:
    """Answer a request for embeddings."""
    worker, body = await service.begin(call)
    ignored = Ignored()
    given = EMBEDDINGS.read(body, "", ignored)
    texts = read_prompts(given["input"], "input", MAX_TEXTS)
    if texts == [[]]:
        raise InvalidRequestError("input is empty: expected some text", "input", "invalid_value")
    form = given.get("encoding_format", "float")
    dimensions, prompt_name = given.get("dimensions"), given.get("prompt_name")
    if prompt_name is not None and not all(isinstance(text, str) for text in texts):
        raise InvalidRequestError("prompt_name is for strings, and input has token ids", "prompt_name", "invalid_value")

    def compute(cancel: Cancellation) -> tuple[list[Any], int]:
        model = worker.engine.model
        check_embeds(model)
        pooling = pooling_of(model, None)
        kept = kept_dimensions(model, pooling, dimensions)
        tokens = text_tokens(model, texts, cancel, prompt=chosen_prompt(model, None, prompt_name))
        counts = [len(text.ids) for text in tokens]
        worker.call.check_prompt(max(counts))
        worker.count(sum(counts))  # now, because the client may leave before the end
        found = vectors(model, tokens, pooling, None, kept, silent, cancel)
        return [_written(vector, form) for vector in found], sum(counts)

    try:
        written, count = await until_gone(call.receive, worker.compute(compute))
    except (ArgumentError, ContextFullError) as error:
        message = str(error).replace("texts[", "input[", 1)
        param = next((name for name in ("dimensions", "prompt_name") if message.startswith(name)), "input")
        raise refused(type(error)(message), param) from error
    data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(written)]
    return Answer(
        {"object": "list", "data": data, "model": worker.name, "usage": _usage(count)},
        headers=no_effect(ignored.names),
    )


def _written(vector: Any, form: str) -> str | list[float]:
    """Encode a vector as numbers, or as base64 of little-endian floats."""
    if form == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers


async def rerank(service: Service, call: Call) -> Answer:
    """Answer a request for a ranking."""
    worker, body = await service.begin(call)
    ignored = Ignored()
    given = RERANK.read(body, "", ignored)
    query, task = given["query"], given.get("task")
    documents = _documents(given["documents"], ignored)
    top, with_texts = given.get("top_n", len(documents)), given.get("return_documents", False)

    def compute(cancel: Cancellation) -> tuple[list[Ranked], int]:
        model = worker.engine.model
        prepared = prepare(model, query, documents, task, cancel)
        worker.call.check_prompt(max(prepared.counts))
        worker.count(sum(prepared.counts))
        return rank(documents, prepared), sum(prepared.counts)

    with naming("documents"):
        try:
            ranked, tokens = await until_gone(call.receive, worker.compute(compute))
        except ArgumentError as error:
            if str(error).startswith("task "):
                raise refused(error, "task") from error
            raise
    results = []
    for found in ranked[:top]:
        text = {"document": {"text": found.document}} if with_texts else {}
        results.append({"index": found.index, "relevance_score": found.score, **text})
    return Answer(
        {
            "object": "list",
            "id": new_id("rerank-"),
            "model": worker.name,
            "results": results,
            "usage": _usage(tokens),
        },
        headers=no_effect(ignored.names),
    )


def _usage(tokens: int) -> dict[str, int]:
    """The number of tokens of texts, in the form of OpenAI's API."""
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def _documents(value: list[Any], ignored: Ignored) -> list[str]:
    if not 1 <= len(value) <= MAX_TEXTS:
        message = f"documents has {len(value)} texts, expected 1 to {MAX_TEXTS}"
        raise InvalidRequestError(message, "documents", "invalid_value")
    texts = []
    for index, document in enumerate(value):
        where = f"documents[{index}]"
        if not isinstance(document, str | dict):
            raise wrong_type(where, document, "a string, or an object with a text")
        texts.append(document if isinstance(document, str) else DOCUMENT.read(document, where, ignored)["text"])
    return texts
