"""`/v1/completions` and `/v1/chat/completions`: submits requests to the engine, and returns or streams the answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from llamac.engine.batching.request import Request
from llamac.engine.generation.output import Completion
from llamac.errors import LlamacError
from llamac.openai.chunks import Chunks
from llamac.openai.errors import InvalidRequestError
from llamac.openai.parameters import Endpoint
from llamac.openai.requests import GenerationRequest, translate, without_effect
from llamac.openai.responses import answer_body, echo_of, error_response, text_of
from llamac.server.exchange import Answer, EventStream, HttpError, Write, event, until_gone

if TYPE_CHECKING:
    from llamac.engine.generation.logprobs import TokenLogprobs
    from llamac.engine.model import Model
    from llamac.server.call import Call
    from llamac.server.service import Service
    from llamac.server.worker import Worker

DONE = event("[DONE]")
Event = tuple[int, Any]  # the index of a choice, and a piece of it or its completion


async def completions(service: Service, call: Call) -> Answer | EventStream:
    """Continue prompts."""
    return await _generate(service, call, "completions")


async def chat_completions(service: Service, call: Call) -> Answer | EventStream:
    """Answer messages."""
    return await _generate(service, call, "chat")


async def _generate(service: Service, call: Call, endpoint: Endpoint) -> Answer | EventStream:
    worker, body = await service.begin(call)
    submitting = worker.submit(lambda: _submitted(worker, endpoint, body))
    request, requests = await until_gone(call.receive, submitting)
    headers = no_effect(without_effect(request, worker.engine))
    if request.stream:
        return EventStream(partial(_events, worker, request, requests), worker.settings, headers)
    results = await until_gone(call.receive, collected(worker, requests))
    content = answer_body(request, results, worker.name, worker.fingerprint, worker.engine.model)
    return Answer(content, headers=headers)


def no_effect(names: Sequence[str]) -> dict[str, str]:
    """Return the header that lists the parameters without effect."""
    return {"x-llamac-no-effect": ", ".join(names)} if names else {}


def _submitted(worker: Worker, endpoint: Endpoint, body: dict[str, Any]) -> tuple[GenerationRequest, list[Request]]:
    """Check a body and queue its requests. Runs in a thread, because templates and long texts take time."""
    request = translate(endpoint, body)
    with naming(request.input_name):
        return request, request.submit(worker.engine, worker.settings.request_seconds)


@contextmanager
def naming(param: str, names: Mapping[str, str] | None = None) -> Iterator[None]:
    """Attribute the engine's errors in the block to a parameter of the request, unless they name one themselves.

    Args:
        param: The parameter.
        names: Names of chat parameters in this API, if they differ.
    """
    try:
        yield
    except (InvalidRequestError, HttpError):
        raise
    except LlamacError as error:
        raise refused(error, param, names) from error


def refused(error: LlamacError, param: str, names: Mapping[str, str] | None = None) -> HttpError:
    """Return the HTTP error for an error of the engine about a parameter of the body. See `naming`."""
    status, content = error_response(error, param)
    details = content["error"]
    message, found = details["message"], details["param"]
    if names and found in names:
        message, found = message.replace(found, names[found], 1), names[found]
    return HttpError(status, message, details["code"], details["type"], param=found)


async def collected(worker: Worker, requests: Sequence[Request]) -> list[Completion]:
    """Wait for the results of requests. Cancelling the task cancels all of them.

    Raises:
        HttpError: If a request has reached its time limit.
        LlamacError: The error that ended a request.
    """
    try:
        completions = [await request for request in requests]
    finally:
        for request in requests:
            request.cancel()
    for completion in completions:
        worker.record(completion)
    if any(choice.finish_reason == "deadline" for completion in completions for choice in completion.choices):
        raise worker.timed_out()
    return completions


# ---- streams


async def _events(
    worker: Worker, request: GenerationRequest, requests: Sequence[Request], write: Write | None
) -> AsyncIterator[bytes]:
    """Yield the events of a stream. Closing the iterator ends the requests."""
    chunks = Chunks(request, worker.name, worker.fingerprint, worker.engine.model)
    model = worker.engine.model
    members = [member for each in requests for member in each.candidates]
    per_input = len(members) // len(requests)
    echoes = [echo_of(request, i, model) for i in range(len(requests))] if request.echo else None
    is_chat = request.endpoint == "chat"
    entries = [_Entries(member, request, model) for member in members]
    begun = [echoes is None] * len(members)
    delayed = [""] * len(members)  # text after an echo whose log probabilities are not known before the end

    def of_piece(index: int, piece: Any) -> bytes:
        if is_chat:
            return event(chunks.delta(index, piece, entries[index].remaining()))
        return event(chunks.text(index, piece, entries[index].of(piece)))

    try:
        for index in range(len(members)) if is_chat else ():
            yield event(chunks.role(index))
        can_push = write if echoes is None else None
        async for index, piece in merged(members, of_piece, can_push, as_deltas=is_chat):
            completion = piece if isinstance(piece, Completion) else None
            if not begun[index] and echoes is not None and (completion or request.params.logprobs is None):
                begun[index] = True
                described = await members[index - index % per_input] if completion else None  # the first of its input
                yield event(chunks.echo(index, echoes[index // per_input], described))
                if delayed[index]:
                    yield event(chunks.text(index, delayed[index], entries[index].of(delayed[index])))
            if completion is not None:
                if completion.finish_reason != "deadline":  # else `collected` raises, once all have ended
                    yield event(chunks.end(index, completion, [] if request.only_echo else entries[index].remaining()))
            elif begun[index] and not request.only_echo:
                yield of_piece(index, piece)
            elif not request.only_echo:
                delayed[index] += piece
        completions = await collected(worker, requests)
        if request.include_usage:
            yield event(chunks.usage(completions))
        yield DONE
    except LlamacError as error:
        yield event(stream_error(error))
    finally:
        for each in requests:
            each.cancel()


class _Entries:
    """The log probabilities of a choice that have not been streamed yet."""

    def __init__(self, member: Request, request: GenerationRequest, model: Model) -> None:
        self._member = member
        self._is_wanted = request.params.logprobs is not None
        self._model = model
        self._sent = 0
        self._shown = self._described = 0  # number of characters in the streamed text, and in the described tokens

    def of(self, piece: str) -> list[TokenLogprobs]:
        """Return the log probabilities of the tokens that begin in a piece of text."""
        if not self._is_wanted:
            return []
        self._shown += len(piece)
        found = []
        for entry in self._member.logprobs[self._sent :]:
            if self._described >= self._shown:
                break
            self._described += len(text_of(entry.token, self._model))
            found.append(entry)
        self._sent += len(found)
        return found

    def remaining(self) -> list[TokenLogprobs]:
        """Return all remaining log probabilities."""
        found = self._member.logprobs[self._sent :] if self._is_wanted else []
        self._sent += len(found)
        return found


def stream_error(error: LlamacError) -> dict[str, Any]:
    """Return the event for an error after the start of a stream."""
    if isinstance(error, HttpError):
        return {"error": {"message": str(error), "type": error.kind, "param": None, "code": error.code}}
    return error_response(error)[1]


async def merged(
    members: Sequence[Request], encode: Callable[[int, Any], bytes], write: Write | None, *, as_deltas: bool
) -> AsyncIterator[Event]:
    """Yield the pieces of several generations as they arrive, each generation followed by its completion.

    Args:
        members: The generations.
        encode: Returns the events for a piece, given its generation's index.
        write: Sends these events. As long as it can, it gets the pieces from the engine's thread, and they are not
            yielded. None: all pieces are yielded.
        as_deltas: Whether the pieces are those of messages, not of texts.
    """
    sources: list[Any] = [member.deltas() if as_deltas else member for member in members]
    if write is not None:
        for index, source in enumerate(sources):
            source._push_to(partial(_push, partial(encode, index), write))
    if len(members) == 1:
        async for piece in sources[0]:
            yield 0, piece
        yield 0, await members[0]
        return
    queue: asyncio.Queue[Event] = asyncio.Queue(maxsize=1)

    async def read(index: int) -> None:
        try:
            async for piece in sources[index]:
                await queue.put((index, piece))
            await queue.put((index, await members[index]))
        except LlamacError as error:
            await queue.put((index, error))

    tasks = [asyncio.ensure_future(read(index)) for index in range(len(members))]
    left = len(members)
    try:
        while left:
            index, piece = await queue.get()
            if isinstance(piece, LlamacError):
                raise piece
            left -= isinstance(piece, Completion)
            yield index, piece
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _push(encode: Callable[[Any], bytes], write: Write, piece: Any) -> bool:
    data = encode(piece)
    return not data or write(data)
