"""`/v1/responses`, as in OpenAI's API but stateless: chat answers as items, whole or streamed."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from llamac.engine.batching.request import Request
from llamac.engine.generation.output import Completion
from llamac.errors import LlamacError
from llamac.openai.requests import GenerationRequest, without_effect
from llamac.openai.responses import new_id
from llamac.server.exchange import Answer, EventStream, Write, event, until_gone
from llamac.server.generation import collected, merged, naming, no_effect, stream_error
from llamac.server.responses_request import NAMES, translate
from llamac.tools.message import Delta

if TYPE_CHECKING:
    from llamac.server.call import Call
    from llamac.server.service import Service
    from llamac.server.worker import Worker

# Parameters that an answer repeats, with their default values.
REPEATED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "prompt_cache_key": None,
    "safety_identifier": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
}
UNUSED: dict[str, Any] = {
    "background": False,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "previous_response_id": None,
    "service_tier": "default",
    "store": False,
    "top_logprobs": 0,
    "truncation": "disabled",
}


async def responses(service: Service, call: Call) -> Answer | EventStream:
    """Answer a request."""
    worker, body = await service.begin(call)

    def submit() -> tuple[tuple[GenerationRequest, tuple[str, ...]], list[Request]]:
        translated = translate(body)
        with naming("input", NAMES):
            return translated, translated[0].submit(worker.engine, worker.settings.request_seconds)

    (request, ignored), [member] = await until_gone(call.receive, worker.submit(submit))
    unread = (NAMES.get(name, name) for name in without_effect(request, worker.engine))
    headers = no_effect((*ignored, *unread))
    head = _head(worker, body, member)
    if request.stream:
        return EventStream(partial(_events, worker, member, head), worker.settings, headers)
    [completion] = await until_gone(call.receive, collected(worker, [member]))
    items = _Items()
    message = completion.message
    assert message is not None
    if message.reasoning:
        items.of(Delta(reasoning=message.reasoning))
    if message.content:
        items.of(Delta(content=message.content))
    for index, wanted in enumerate(message.tool_calls):
        items.of_call(index, wanted.id, wanted.name, wanted.arguments)
    items.end(is_whole=completion.finish_reason == "stop")
    return Answer(_ended(worker, head, completion, items.found), headers=headers)


def _head(worker: Worker, body: Mapping[str, Any], member: Request) -> dict[str, Any]:
    params = member._output.params
    given = {name: default if body.get(name) is None else body[name] for name, default in REPEATED.items()}
    if body.get("user") is not None:  # OpenAI's document does not let it be null
        given["user"] = body["user"]
    return {
        "id": new_id("resp_"),
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "model": worker.name,
        "error": None,
        "incomplete_details": None,
        **given,
        "temperature": params.temperature,  # the model's if the request has none
        "top_p": params.top_p,
        "reasoning": {"effort": None, "summary": None, **(body.get("reasoning") or {})},
        "tools": [_tool(tool) for tool in body.get("tools") or ()],
        **UNUSED,
    }


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool of the request, with all fields of a function."""
    unset = {"description": None, "parameters": None, "strict": None} if tool["type"] == "function" else {}
    return {**unset, **tool}


def _ended(
    worker: Worker, head: Mapping[str, Any], completion: Completion, items: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the complete answer."""
    usage, message = completion.usage, completion.message
    thoughts = message.reasoning if message is not None else None
    reasoning = len(worker.engine.model.tokenize(thoughts, add_special=False, parse_special=False)) if thoughts else 0
    is_whole = completion.finish_reason == "stop"
    return {
        **head,
        "completed_at": int(time.time()) if is_whole else None,
        "status": "completed" if is_whole else "incomplete",
        "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
        "output": items,
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        },
    }


async def _events(worker: Worker, member: Request, head: dict[str, Any], write: Write | None) -> AsyncIterator[bytes]:
    number = 0

    def written(kind: str, fields: Mapping[str, Any]) -> bytes:
        nonlocal number
        number += 1
        return event({"type": kind, "sequence_number": number - 1, **fields}, kind)

    items = _Items()

    def of_piece(_: int, piece: Delta) -> bytes:
        return b"".join(written(kind, fields) for kind, fields in items.of(piece))

    begun = {**head, "status": "in_progress", "output": [], "usage": None}
    try:
        yield written("response.created", {"response": begun})
        yield written("response.in_progress", {"response": begun})
        async for _, piece in merged([member], of_piece, write, as_deltas=True):
            if isinstance(piece, Completion):
                for kind, fields in items.end(is_whole=piece.finish_reason == "stop"):
                    yield written(kind, fields)
                break
            yield of_piece(0, piece)
        [completion] = await collected(worker, [member])
        ended = _ended(worker, head, completion, items.found)
        yield written(f"response.{ended['status']}", {"response": ended})
    except LlamacError as error:
        details = stream_error(error)["error"]
        failed = {"code": "server_error", "message": details["message"]}
        yield written("response.failed", {"response": {**begun, "status": "failed", "error": failed}})
    finally:
        member.cancel()


class _Items:
    """Generates the items of an answer and their events. Each item starts, grows, and ends before the next one starts.

    Attributes:
        found: The items so far.
    """

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []
        self._kind: tuple[str, int] | None = None  # the kind of the open item, and the index of the call
        self._text = ""

    def of(self, delta: Delta) -> list[tuple[str, dict[str, Any]]]:
        """Return the events of a piece."""
        call = delta.tool_call
        if call is not None:
            return self.of_call(call.index, call.id, call.name, call.arguments)
        if delta.reasoning is not None:
            item = {"type": "reasoning", "id": new_id("rs_"), "summary": [], "content": []}
            return self._grown(("reasoning_text", 0), item, delta.reasoning)
        item = {"type": "message", "id": new_id("msg_"), "role": "assistant", "content": []}
        return self._grown(("output_text", 0), item, delta.content or "")

    def of_call(
        self, index: int, call_id: str | None, name: str | None, arguments: str
    ) -> list[tuple[str, dict[str, Any]]]:
        """Return the events of a piece of a call."""
        item = {"type": "function_call", "id": new_id("fc_"), "call_id": call_id, "name": name, "arguments": ""}
        return self._grown(("function_call_arguments", index), item, arguments)

    def _grown(self, kind: tuple[str, int], item: dict[str, Any], text: str) -> list[tuple[str, dict[str, Any]]]:
        events: list[tuple[str, dict[str, Any]]] = []
        if kind != self._kind:
            events += self.end()
            self._kind, self._text = kind, ""
            self.found.append({**item, "status": "in_progress"})
            added = {"output_index": len(self.found) - 1, "item": {**self.found[-1]}}
            events.append(("response.output_item.added", added))
            if "content" in item:
                events.append(("response.content_part.added", {**self._place(), "part": self._part()}))
        if text:
            self._text += text
            extra: dict[str, Any] = {"logprobs": []} if kind[0] == "output_text" else {}
            events.append((f"response.{kind[0]}.delta", {**self._place(), "delta": text, **extra}))
        return events

    def end(self, *, is_whole: bool = True) -> list[tuple[str, dict[str, Any]]]:
        """Return the events that end the open item, which is incomplete unless `is_whole`."""
        if self._kind is None:
            return []
        name, item = self._kind[0], self.found[-1]
        events: list[tuple[str, dict[str, Any]]] = []
        if name == "function_call_arguments":
            item["arguments"] = self._text
            done = {"arguments": self._text, "name": item["name"]}
            events.append((f"response.{name}.done", {**self._place(), **done}))
        else:
            extra: dict[str, Any] = {"logprobs": []} if name == "output_text" else {}
            events.append((f"response.{name}.done", {**self._place(), "text": self._text, **extra}))
            events.append(("response.content_part.done", {**self._place(), "part": self._part()}))
            item["content"] = [self._part()]
        item["status"] = "completed" if is_whole else "incomplete"
        events.append(("response.output_item.done", {"output_index": len(self.found) - 1, "item": item}))
        self._kind = None
        return events

    def _place(self) -> dict[str, Any]:
        content = {} if self.found[-1]["type"] == "function_call" else {"content_index": 0}
        return {"item_id": self.found[-1]["id"], "output_index": len(self.found) - 1, **content}

    def _part(self) -> dict[str, Any]:
        assert self._kind is not None
        extra: dict[str, Any] = {"annotations": [], "logprobs": []} if self._kind[0] == "output_text" else {}
        return {"type": self._kind[0], "text": self._text, **extra}
