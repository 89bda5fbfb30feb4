"""`/v1/messages` and `/v1/messages/count_tokens`, as in Anthropic's API: chat answers, whole or streamed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from llamac.engine.batching.request import Request
from llamac.engine.generation.output import Completion
from llamac.engine.generation.reading import chosen_tools
from llamac.engine.prompts.prompt_ids import ToolOptions
from llamac.errors import LlamacError
from llamac.openai.responses import error_response, new_id
from llamac.server.exchange import Answer, EventStream, HttpError, Write, event, until_gone
from llamac.server.failures import messages_error
from llamac.server.generation import collected, merged, naming, no_effect
from llamac.server.messages_request import MessagesRequest, translate
from llamac.tools.message import Delta

if TYPE_CHECKING:
    from llamac.server.call import Call
    from llamac.server.service import Service
    from llamac.server.worker import Worker

NAMES = {"response_format": "output_config.format"}  # parameters with another name in chats
DIRECT = {"caller": {"type": "direct"}}  # every call is made by the model itself
# Counters that only Anthropic's servers use.
NO_USAGE = {
    "cache_creation": None,
    "inference_geo": None,
    "output_tokens_details": None,
    "server_tool_use": None,
    "service_tier": None,
}


async def messages(service: Service, call: Call) -> Answer | EventStream:
    """Answer a conversation."""
    worker, body = await service.begin(call)

    def submit() -> tuple[MessagesRequest, list[Request]]:
        request = translate(body)
        with naming("messages", NAMES):
            return request, [request.submit(worker.engine, worker.settings.request_seconds)]

    request, [member] = await until_gone(call.receive, worker.submit(submit))
    headers = no_effect(request.without_effect(worker.engine))
    if request.stream:
        events = partial(_events, worker, member, request.shows_thoughts)
        return EventStream(events, worker.settings, headers)
    [completion] = await until_gone(call.receive, collected(worker, [member]))
    content = _content(completion, shows_thoughts=request.shows_thoughts)
    return Answer(
        {**_head(worker), "content": content, **_end(completion), "usage": _usage(completion)}, headers=headers
    )


async def count_tokens(service: Service, call: Call) -> Answer:
    """Return the number of tokens of a conversation."""
    worker, body = await service.begin(call)

    def count() -> tuple[int, tuple[str, ...]]:
        request = translate(body, counts=True)
        tools = chosen_tools(ToolOptions(**request.tools))[0]
        options = request.template_options(worker.engine)
        tokens = worker.engine.model.chat_ids(request.messages, tools=tools, **options)
        return len(tokens), request.without_effect(worker.engine)

    tokens, ignored = await until_gone(call.receive, worker.run(count))
    return Answer({"input_tokens": tokens}, headers=no_effect(ignored))


def _head(worker: Worker) -> dict[str, Any]:
    unused = {"stop_details": None, "container": None}
    return {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": worker.name, **unused}


def _end(completion: Completion) -> dict[str, Any]:
    """Return the stop reason of an answer, in Anthropic's terms."""
    calls, by = () if completion.message is None else completion.message.tool_calls, completion.stopped_by
    if isinstance(by, str) and not (calls and calls[-1].error is None):
        return {"stop_reason": "stop_sequence", "stop_sequence": by}
    if completion.finish_reason == "stop" and any(call.parsed is not None for call in calls):
        return {"stop_reason": "tool_use", "stop_sequence": None}
    reasons = {"length": "max_tokens", "context": "model_context_window_exceeded"}
    return {"stop_reason": reasons.get(completion.finish_reason, "end_turn"), "stop_sequence": None}


def _usage(completion: Completion) -> dict[str, Any]:
    """Return the token counts. As in Anthropic's API, cached tokens are counted separately."""
    usage = completion.usage
    return {
        **NO_USAGE,
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _content(completion: Completion, *, shows_thoughts: bool) -> list[dict[str, Any]]:
    message = completion.message
    if message is None:
        return [{"type": "text", "text": completion.text, "citations": None}]
    found: list[dict[str, Any]] = []
    if message.reasoning:
        thoughts = message.reasoning if shows_thoughts else ""
        found.append({"type": "thinking", "thinking": thoughts, "signature": ""})
    if message.content:
        found.append({"type": "text", "text": message.content, "citations": None})
    for call in message.tool_calls:
        if call.parsed is None:  # nothing that a client could run
            found.append({"type": "text", "text": f"{call.name}: {call.arguments}", "citations": None})
        else:
            found.append({"type": "tool_use", "id": call.id, "name": call.name, "input": call.parsed, **DIRECT})
    return found


# ---- streams


async def _events(worker: Worker, member: Request, shows_thoughts: bool, write: Write | None) -> AsyncIterator[bytes]:
    blocks = _Blocks(shows_thoughts=shows_thoughts)

    def of_piece(_: int, piece: Delta) -> bytes:
        return b"".join(blocks.of(piece))

    usage = {
        **NO_USAGE,
        "input_tokens": member.prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": 0,
    }
    start = {**_head(worker), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    try:
        yield _event("message_start", message=start)
        async for _, piece in merged([member], of_piece, write, as_deltas=True):
            if isinstance(piece, Completion):
                break
            yield of_piece(0, piece)
        for data in blocks.end():
            yield data
        [completion] = await collected(worker, [member])
        yield _event("message_delta", delta=_end(completion), usage=_usage(completion))
        yield _event("message_stop")
    except LlamacError as error:
        status = error.status if isinstance(error, HttpError) else error_response(error)[0]
        yield event(messages_error(status, str(error), worker.call.id), "error")
    finally:
        member.cancel()


class _Blocks:
    """Generates the events of a message's blocks. Each block starts, grows, and ends before the next one starts."""

    def __init__(self, *, shows_thoughts: bool) -> None:
        self._shows_thoughts = shows_thoughts
        self._index = -1
        self._kind: tuple[str, int] | None = None  # the kind of the open block, and the index of the call

    def of(self, delta: Delta) -> list[bytes]:
        """Return the events of a piece."""
        call = delta.tool_call
        if call is not None:
            block: dict[str, Any] = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}, **DIRECT}
            piece = {"type": "input_json_delta", "partial_json": call.arguments}
            return self._piece(("tool_use", call.index), block, piece, is_empty=not call.arguments)
        if delta.reasoning is not None:
            block = {"type": "thinking", "thinking": "", "signature": ""}
            piece = {"type": "thinking_delta", "thinking": delta.reasoning}
            return self._piece(("thinking", 0), block, piece, is_empty=not self._shows_thoughts)
        text = delta.content or ""
        return self._piece(
            ("text", 0), {"type": "text", "text": "", "citations": None}, {"type": "text_delta", "text": text}
        )

    def _piece(
        self, kind: tuple[str, int], block: Mapping[str, Any], piece: Mapping[str, Any], *, is_empty: bool = False
    ) -> list[bytes]:
        found = []
        if kind != self._kind:
            found += self.end()
            self._index += 1
            self._kind = kind
            found.append(_event("content_block_start", index=self._index, content_block=block))
        if not is_empty:
            found.append(_event("content_block_delta", index=self._index, delta=piece))
        return found

    def end(self) -> list[bytes]:
        """Return the events that end the open block."""
        if self._kind is None:
            return []
        self._kind = None
        return [_event("content_block_stop", index=self._index)]


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)
