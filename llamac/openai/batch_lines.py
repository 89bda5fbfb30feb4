"""Lines of batch files on an engine: each becomes a request, and its answer or its error becomes a result."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamac.engine.batching.async_engine import RETRY_S
from llamac.engine.sampling.params import SamplingParams
from llamac.errors import ClosedError, LlamacError, QueueFullError
from llamac.openai.batch_files import InputChangedError, InvalidLineError
from llamac.openai.errors import InvalidRequestError
from llamac.openai.requests import ENDPOINTS, GenerationRequest, translate, without_effect
from llamac.openai.responses import answer_body, error_response, fingerprint, new_id

if TYPE_CHECKING:
    from llamac.engine.batching.engine import Engine
    from llamac.engine.batching.request import Request


def translate_line(entry: Mapping[str, Any], defaults: SamplingParams) -> GenerationRequest:
    """Check a line and translate its body.

    Args:
        entry: The line.
        defaults: Parameters of requests that do not set them.

    Raises:
        InvalidRequestError: If the line cannot be computed.
    """
    for name in ("custom_id", "url", "body"):
        if name not in entry:
            raise InvalidRequestError(f"the line has no {name!r}", name, "missing_required_parameter")
    if not isinstance(entry["custom_id"], str):
        raise InvalidRequestError("custom_id is not a string", "custom_id", "invalid_type")
    if entry.get("method", "POST") != "POST":
        raise InvalidRequestError(f"method is {entry['method']!r}, expected 'POST'", "method", "invalid_method")
    endpoint = ENDPOINTS.get(entry["url"]) if isinstance(entry["url"], str) else None
    if endpoint is None:
        expected = " or ".join(ENDPOINTS)
        raise InvalidRequestError(f"url is {entry['url']!r}, expected {expected}", "url", "invalid_url")
    if not isinstance(entry["body"], dict):
        raise InvalidRequestError("body is not an object", "body", "invalid_type")
    unknown = next((name for name in entry if name not in ("custom_id", "method", "url", "body")), None)
    if unknown is not None:
        raise InvalidRequestError(f"unknown field {unknown!r} of the line", unknown, "unknown_parameter")
    request = translate(endpoint, entry["body"])
    if request.stream:
        raise InvalidRequestError("a batch has no streams: omit stream", "stream", "unsupported_parameter")
    if len(request.inputs) > 1:
        message = f"prompt has {len(request.inputs)} prompts: a line of a batch has one"
        raise InvalidRequestError(message, "prompt", "unsupported_value")
    return replace(request, params=defaults.updated(vars(request.params)))


class Answering:
    """Computes lines on an engine.

    Attributes:
        name: The model's name in results.
        fingerprint: The `system_fingerprint` of results.
    """

    def __init__(self, engine: Engine, defaults: SamplingParams, *, with_receipts: bool = False) -> None:
        """Begin to answer.

        Args:
            engine: What computes.
            defaults: Parameters of requests that do not set them.
            with_receipts: Whether results have receipts.
        """
        model = engine.model
        self.name = model.name or Path(model.file.path).stem
        self.fingerprint = fingerprint(engine)
        self._engine = engine
        self._defaults = defaults
        self._with_receipts = with_receipts

    def submit(self, line_id: str, custom_id: str | None, read: Callable[[], Mapping[str, Any]]) -> Answer:
        """Queue a line. Waits while the engine's queue is full.

        Args:
            line_id: The id of its result.
            custom_id: Its custom_id, if it has a valid one.
            read: Parses it.

        Raises:
            LlamacError: If an error ends the batch and not only this line.
        """
        request: GenerationRequest | None = None
        answer = Answer(self, line_id, custom_id)
        try:
            request = translate_line(read(), self._defaults)
            if self._with_receipts:
                request = replace(request, params=request.params.updated({"receipt": True}))
            answer._request = request
            answer._running = self._queued(request)
        except (LlamacError, UnicodeError) as error:
            answer._error = self._checked(error)
        return answer

    def _queued(self, request: GenerationRequest) -> Request:
        """Queue a request as soon as there is room: each of its candidates takes a place of the queue."""
        while True:
            try:
                return request.submit(self._engine)[0]
            except QueueFullError:
                time.sleep(RETRY_S)

    def _checked(self, error: Exception) -> Exception:
        """An error of a line. One that concerns all lines is raised."""
        if isinstance(error, InputChangedError | ClosedError) or self._engine.failure is not None:
            raise error
        return error

    def _response(self, request: GenerationRequest, running: Request) -> tuple[int, dict[str, Any]]:
        completion = running.result()
        body = answer_body(request, [completion], self.name, self.fingerprint, self._engine.model)
        if completion.receipt is not None:
            body["receipt"] = completion.receipt.as_dict()
        return 200, body


class Answer:
    """A line that is being computed."""

    def __init__(self, answering: Answering, line_id: str, custom_id: str | None) -> None:
        self._answering = answering
        self._id = line_id
        self._custom_id = custom_id
        self._request: GenerationRequest | None = None
        self._running: Request | None = None
        self._error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether there is a result."""
        return self._running is None or self._running.done

    def wait(self, timeout: float) -> None:
        """Wait for the result for at most this many seconds."""
        if self._running is not None:
            with contextlib.suppress(TimeoutError, LlamacError):
                self._running.result(timeout=timeout)

    def result(self) -> tuple[dict[str, Any], bool]:
        """The line of the output, and whether it is an error. Waits for it.

        Raises:
            LlamacError: If an error ends the batch and not only this line.
        """
        error = self._error
        if error is None and self._request is not None and self._running is not None:
            try:
                return self._line(*self._answering._response(self._request, self._running)), False
            except LlamacError as failure:
                error = self._answering._checked(failure)
        if isinstance(error, InvalidLineError):
            error = InvalidRequestError(str(error), code="invalid_json_line")
        elif not isinstance(error, LlamacError):
            error = InvalidRequestError(str(error), code="invalid_value")
        return self._line(*error_response(error, self._request.input_name if self._request else None)), True

    def _line(self, status: int, body: Mapping[str, Any]) -> dict[str, Any]:
        response: dict[str, Any] = {"status_code": status, "request_id": new_id("req_"), "body": body}
        if self._request is not None and (ignored := without_effect(self._request, self._answering._engine)):
            response["no_effect"] = list(ignored)
        return {"id": self._id, "custom_id": self._custom_id, "response": response, "error": None}
