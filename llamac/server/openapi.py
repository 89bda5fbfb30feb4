"""`/openapi.json`: the server's API as an OpenAPI document.

The paths come from the application, and the parameters of bodies from the forms that validate them. A path's summary is
its endpoint's docstring.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llamac import __version__
from llamac.openai import schemas
from llamac.openai.forms import Form, Schema, fields
from llamac.openai.parameters import body_form
from llamac.openai.schemas import STRING, ref
from llamac.server import conversions, embedding, execution, messages_request, responses_request, status
from llamac.server import openapi_answers as answers
from llamac.server.call import MESSAGES
from llamac.server.exchange import JSON_TYPE, Answer
from llamac.server.guard import OPEN
from llamac.server.metrics import CONTENT_TYPE

if TYPE_CHECKING:
    from llamac.server.call import Call
    from llamac.server.service import Service

VERSION = "3.1.0"
TEMPLATE = "#/components/schemas/{name}"
EVENTS_TYPE = "text/event-stream"
# Errors of every path, of paths with a body, and of paths that compute.
ERRORS = {403: "Another origin or name of the server, or a key that may not", 500: "The server failed"}
BODY_ERRORS = {400: "The body is wrong", 404: "No such model", 408: "Too slow", 413: "The body is too large"}
BUSY_ERRORS = {429: "Too many requests wait", 503: "No connection or memory is left, or the engine has stopped"}


@dataclass(frozen=True)
class Operation:
    """The description of a path, besides its summary.

    Attributes:
        answer: The form of its answers, or their media type if they are not JSON.
        body: The form of the body; None: no body.
        chunks: The forms of the data of a stream's events, if answers can be streamed.
        links: Paths that take a value of this path's answer.
        status: Additional statuses.
        query: The schemas of the query parameters.
    """

    answer: Any
    body: Form | None = None
    chunks: Sequence[Any] = ()
    links: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    status: Mapping[int, str] = field(default_factory=dict)
    query: Mapping[str, Schema] = field(default_factory=dict)

    @property
    def ends_with_done(self) -> bool:
        """Whether a stream ends with an event whose data is not JSON."""
        return any(form in (answers.TextCompletionChunk, answers.ChatCompletionChunk) for form in self.chunks)


_OF_PROMPT = {"prompt": "$response.body#/prompt"}

_TEXT_CHUNKS = (answers.TextCompletionChunk, answers.Error)
_CHAT_CHUNKS = (answers.ChatCompletionChunk, answers.Error)
_PIECES = (answers.Piece, answers.Execution, answers.Error)

OPERATIONS: dict[str, Operation] = {
    "/openapi.json": Operation(dict),
    "/health": Operation(answers.Status),
    "/ready": Operation(answers.Status),
    "/metrics": Operation(CONTENT_TYPE),
    "/v1/models": Operation(
        answers.Models,
        links={"/v1/models/{name}": {"name": "$response.body#/data/0/id"}},
        status={400: "A parameter is wrong"},
        query={
            "limit": {"type": "integer", "minimum": 1, "maximum": status.MAX_MODELS},
            "after_id": ref("ModelName"),
            "before_id": ref("ModelName"),
        },
    ),
    "/v1/models/{name}": Operation(answers.Model, status={404: "No such model"}),
    "/v1/completions": Operation(answers.TextCompletion, body_form("completions"), chunks=_TEXT_CHUNKS),
    "/v1/chat/completions": Operation(answers.ChatCompletion, body_form("chat"), chunks=_CHAT_CHUNKS),
    "/v1/responses": Operation(answers.Response, responses_request.BODY, chunks=(dict,)),
    MESSAGES: Operation(answers.AnsweredMessage, messages_request.BODY, chunks=(dict,)),
    f"{MESSAGES}/count_tokens": Operation(answers.CountedTokens, messages_request.COUNT_BODY),
    "/v1/embeddings": Operation(answers.Embeddings, embedding.EMBEDDINGS),
    "/v1/rerank": Operation(answers.Ranking, embedding.RERANK),
    "/v2/rerank": Operation(answers.Ranking, embedding.RERANK),
    "/execute": Operation(answers.Execution, execution.BODY, chunks=_PIECES),
    "/tokenize": Operation(
        answers.Tokens, conversions.TOKENIZE, links={"/detokenize": {"tokens": "$response.body#/tokens"}}
    ),
    "/detokenize": Operation(answers.PromptText, conversions.DETOKENIZE, links={"/tokenize": _OF_PROMPT}),
    "/apply-template": Operation(
        answers.PromptText,
        conversions.APPLY_TEMPLATE,
        links={"/tokenize": _OF_PROMPT, "/v1/completions": _OF_PROMPT},
    ),
}


async def openapi(service: Service, call: Call) -> Answer:
    """Return this document."""
    names = [name for name, entry in service.models.names.items() if call.allows(entry)]
    made = await asyncio.to_thread(document, names, has_keys=bool(service.settings.keys))
    return Answer(made)


def document(models: Sequence[str], *, has_keys: bool) -> dict[str, Any]:
    """Create the document of a server.

    Args:
        models: The names of its models.
        has_keys: Whether it requires an API key.
    """
    import msgspec

    from llamac.server.app import ENDPOINTS

    types = [answers.Error, answers.MessagesError]
    types += [form for operation in OPERATIONS.values() for form in (operation.answer, *operation.chunks)]
    classes = [form for form in types if isinstance(form, type) and form is not dict]
    _, forms = msgspec.json.schema_components(classes, ref_template=TEMPLATE)
    components = {
        **{name: _exact(form) for name, form in forms.items()},
        **schemas.COMPONENTS,
        **messages_request.COMPONENTS,
        **responses_request.COMPONENTS,
        "ModelName": {"enum": list(models)},
    }
    paths = {}
    for path, (method, place) in ENDPOINTS.items():
        written = path.replace(":path}", "}")
        operation = OPERATIONS.get(written, Operation("text/html"))
        paths[written] = {method.lower(): _operation(written, operation, _summary(place), has_keys=has_keys)}
    found: dict[str, Any] = {
        "openapi": VERSION,
        "info": {"title": "llamac", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }
    if has_keys:
        found["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    # copy via JSON, so that the result has no shared parts and no tuples
    copy: dict[str, Any] = json.loads(json.dumps(found))
    return copy


def _summary(place: str) -> str:
    module, _, name = place.partition(".")
    function = getattr(importlib.import_module(f"llamac.server.{module}"), name)
    return (function.__doc__ or "").partition("\n")[0].rstrip(".")


def _id(path: str) -> str:
    return path.replace("/v1/", "").strip("/").replace("{name}", "one").replace("/", "_").replace("-", "_")


def _operation(path: str, operation: Operation, summary: str, *, has_keys: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"operationId": _id(path), "summary": summary}
    errors = ERRORS | dict(operation.status)
    if path in OPEN:
        errors = errors | BUSY_ERRORS
    if "{name}" in path:
        found["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": ref("ModelName")}]
    if operation.query:
        found["parameters"] = [
            {"name": name, "in": "query", "required": False, "schema": schema}
            for name, schema in operation.query.items()
        ]
    if operation.body is not None:
        errors = errors | BODY_ERRORS | BUSY_ERRORS
        found["requestBody"] = {"required": True, "content": {JSON_TYPE: {"schema": _body(operation.body)}}}
    if has_keys and path not in OPEN:
        errors = errors | {401: "An API key is missing or wrong"}
        found["security"] = [{"bearer": []}, {"key": []}]
    form = ref("MessagesError" if path.startswith(MESSAGES) else "Error")
    found["responses"] = {"200": _answer(operation)} | {
        str(status): {"description": text, "content": {JSON_TYPE: {"schema": form}}}
        for status, text in sorted(errors.items())
    }
    return found


def _body(form: Form) -> Schema:
    """Return the schema of a body."""
    model = {**form.schemas["model"], **ref("ModelName")}
    del model["type"]
    return form.schema_with({"model": model})


def _answer(operation: Operation) -> dict[str, Any]:
    if isinstance(operation.answer, str):
        return {"description": "The answer", "content": {operation.answer.partition(";")[0]: {"schema": STRING}}}
    content: dict[str, Any] = {JSON_TYPE: {"schema": _form(operation.answer)}}
    if operation.chunks:
        forms = [_form(form) for form in operation.chunks]
        data = {**STRING, "contentMediaType": JSON_TYPE, "contentSchema": {"anyOf": forms}}
        either = {"anyOf": [{"const": "[DONE]"}, data]} if operation.ends_with_done else data
        content[EVENTS_TYPE] = {"schema": fields({"event": STRING, "data": either}, ("data",))}  # of each event
    links = {}
    for path, values in operation.links.items():
        given = {"parameters": values} if "{name}" in path else {"requestBody": values}
        links[_id(path)] = {"operationId": _id(path), **given}
    return {"description": "The answer", "content": content, **({"links": links} if links else {})}


def _form(form: Any) -> Schema:
    return {"type": "object"} if form is dict else ref(form.__name__)


def _exact(form: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of an answer: no other fields, and fields with a default are optional."""
    properties = {
        name: {key: value for key, value in part.items() if key != "default"}
        for name, part in form.get("properties", {}).items()
    }
    description = form.get("description", "").partition("\n")[0]
    return {**form, "description": description, "properties": properties, "additionalProperties": False}
