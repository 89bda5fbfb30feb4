"""`/execute`: llamac's own API, with all sampling parameters, and results with tokens and timings."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from llamac.engine.batching.request import Request
from llamac.engine.generation.output import Completion
from llamac.engine.sampling.params import CHECKS, SamplingParams
from llamac.engine.sampling.schemas import NOT_JSON, TOKEN_ID, json_schema
from llamac.errors import LlamacError
from llamac.openai.errors import InvalidRequestError
from llamac.openai.forms import Form, Ignored
from llamac.openai.inputs import read_messages, read_prompts
from llamac.openai.requests import read_biases, updated
from llamac.openai.schemas import BOOLEAN, IDS, MESSAGES, STRING, TEXTS, array
from llamac.server.exchange import Answer, EventStream, Write, event, until_gone
from llamac.server.generation import collected, merged, naming, no_effect, stream_error

if TYPE_CHECKING:
    from llamac.server.call import Call
    from llamac.server.service import Service
    from llamac.server.worker import Worker

_BIASES = json_schema("logit_bias")
_BIAS = {"type": "array", "prefixItems": [TOKEN_ID, _BIASES["additionalProperties"]], "minItems": 2, "maxItems": 2}
SAMPLING = Form(
    {
        **{name: json_schema(name) for name in CHECKS if name not in NOT_JSON},
        "logit_bias": {"anyOf": [_BIASES, array(_BIAS)]},  # pairs, too, as in Python
    }
)
BODY = Form(
    {
        "model": STRING,
        "prompt": {"anyOf": [STRING, IDS, array({"anyOf": [STRING, IDS]}, maxItems=1)]},
        "messages": MESSAGES,
        "sampling": SAMPLING.schema,
        "priority": {"type": "integer"},
        "stream": BOOLEAN,
    },
    only_one=("prompt", "messages"),
    elsewhere={name: f"sampling.{name}" for name in CHECKS if name not in NOT_JSON},
    texts={
        **TEXTS,
        "messages": "strings, and parts of the type `text`",
        "prompt": "a string or token ids",
        "sampling": "the parameters of SamplingParams, except `guide` and `logits_processors`",
        "priority": "requests with larger numbers are computed first",
    },
)


async def execute(service: Service, call: Call) -> Answer | EventStream:
    """Answer a request."""
    worker, body = await service.begin(call)
    ignored = Ignored()
    given = BODY.read(body, "", ignored)
    stream = given.get("stream", False)
    submitting = worker.submit(lambda: (None, [_submitted(worker, given, ignored)]))
    _, [request] = await until_gone(call.receive, submitting)
    headers = no_effect(ignored.names)
    if stream and len(request.candidates) == 1:
        return EventStream(partial(_events, worker, request), worker.settings, headers)
    if stream:
        request.cancel()
        raise InvalidRequestError("a stream has one candidate: omit n", "sampling", "invalid_value")
    [completion] = await until_gone(call.receive, collected(worker, [request]))
    return Answer(_result(worker, completion), headers=headers)


def _submitted(worker: Worker, given: Mapping[str, Any], ignored: Ignored) -> Request:
    params = read_sampling(given.get("sampling", {}), ignored)
    options = {"priority": given.get("priority", 0), "deadline": worker.settings.request_seconds}
    if "messages" in given:
        messages = read_messages(given["messages"], ignored)
        with naming("messages"):
            return worker.engine.chat(messages, params, **options)
    prompts = read_prompts(given["prompt"])
    if len(prompts) > 1:
        raise InvalidRequestError("prompt has several prompts, expected one", "prompt", "invalid_value")
    with naming("prompt"):
        return worker.engine.submit(prompts[0], params, **options)


def read_sampling(sampling: Mapping[str, Any], ignored: Ignored) -> SamplingParams:
    """Parse the sampling parameters of a body.

    Raises:
        InvalidRequestError: If a parameter is wrong, unknown, or not supported over HTTP.
    """
    unusable = next((name for name in NOT_JSON if sampling.get(name) is not None), None)
    if unusable is not None:
        raise InvalidRequestError(f"sampling.{unusable} cannot be sent", f"sampling.{unusable}", "invalid_value")
    params = SamplingParams()
    for name, value in SAMPLING.read(sampling, "sampling", ignored).items():
        where = f"sampling.{name}"
        is_biases = name == "logit_bias" and isinstance(value, dict)
        params = updated(params, name, where, read_biases(value, where) if is_biases else value)
    return params


async def _events(worker: Worker, request: Request, write: Write | None) -> AsyncIterator[bytes]:
    """Yield the pieces of text, then the result."""
    try:
        async for _, piece in merged([request], _of_piece, write, as_deltas=False):
            if not isinstance(piece, Completion):
                yield _of_piece(0, piece)
        [completion] = await collected(worker, [request])
        yield event(_result(worker, completion), "result")
    except LlamacError as error:
        yield event(stream_error(error), "error")
    finally:
        request.cancel()


def _of_piece(_: int, piece: str) -> bytes:
    return event({"text": piece}, "piece")


def _result(worker: Worker, completion: Completion) -> dict[str, Any]:
    return {"request_id": worker.call.id, **result_body(completion)}


def result_body(completion: Completion) -> dict[str, Any]:
    """Convert a result to JSON, with all details."""
    found = {
        name: getattr(completion, name)
        for name in ("text", "tokens", "finish_reason", "stopped_by", "seed", "candidate", "score")
    }
    found["usage"] = asdict(completion.usage)
    found["timings"] = asdict(completion.timings)
    for name in ("logprobs", "prompt_logprobs"):
        entries = getattr(completion, name)
        if entries is not None:
            found[name] = [None if entry is None else asdict(entry) for entry in entries]
    if completion.message is not None:
        found["message"] = completion.message.to_dict()
    if completion.receipt is not None:
        found["receipt"] = completion.receipt.as_dict()
    if completion.others:
        found["others"] = [result_body(other) for other in completion.others]
    return found
