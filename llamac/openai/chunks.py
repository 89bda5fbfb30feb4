"""The chunks of a streamed answer, as in OpenAI's API."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llamac.openai.responses import (
    Echo,
    echo_entries,
    finish_reason,
    logprobs_body,
    new_id,
    text_of,
    usage_body,
)

if TYPE_CHECKING:
    from llamac.engine.generation.logprobs import TokenLogprobs
    from llamac.engine.generation.output import Completion
    from llamac.engine.model import Model
    from llamac.openai.requests import GenerationRequest
    from llamac.tools.message import Delta


class Chunks:
    """Makes the chunks of one answer."""

    def __init__(self, request: GenerationRequest, name: str, system: str, model: Model) -> None:
        """Begin an answer. The arguments are those of `answer_body`."""
        self._request = request
        self._model = model
        self._is_chat = request.endpoint == "chat"
        self._head = {
            "id": new_id("chatcmpl-" if self._is_chat else "cmpl-"),
            "object": "chat.completion.chunk" if self._is_chat else "text_completion",
            "created": int(time.time()),
            "model": name,
            "system_fingerprint": system,
        }
        self._offsets: dict[int, int] = {}  # of each choice: characters of its tokens so far

    def role(self, index: int) -> dict[str, Any]:
        """The first chunk of a message."""
        return self._chunk(index, {"delta": {"role": "assistant", "content": ""}})

    def echo(self, index: int, echo: Echo, completion: Completion | None) -> dict[str, Any]:
        """The prompt. Its log probabilities, if requested, are part of the completion's."""
        logprobs = None
        if completion is not None and self._request.params.logprobs is not None:
            logprobs = self._logprobs(index, echo_entries(echo, completion), echo.hidden)
        return self._chunk(index, {"text": echo.text}, logprobs)

    def text(self, index: int, text: str, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """A piece of text."""
        return self._chunk(index, {"text": text}, self._logprobs(index, entries))

    def delta(self, index: int, delta: Delta, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """A piece of a message."""
        return self._chunk(index, {"delta": delta.to_dict()}, self._logprobs(index, entries))

    def end(self, index: int, completion: Completion, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The last chunk of a choice."""
        content: dict[str, Any] = {"delta": {}} if self._is_chat else {"text": ""}
        return self._chunk(index, content, self._logprobs(index, entries), finish_reason(completion))

    def usage(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The last chunk of the answer, if requested."""
        usage = usage_body(completions, only_echo=self._request.only_echo)
        return {**self._head, "choices": [], "usage": usage}

    def _chunk(
        self, index: int, content: dict[str, Any], logprobs: dict[str, Any] | None = None, reason: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}
        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._request.include_usage:
            chunk["usage"] = None
        return chunk

    def _logprobs(self, index: int, entries: Sequence[TokenLogprobs | int], hidden: int = 0) -> dict[str, Any] | None:
        if self._request.params.logprobs is None or not entries:
            return None
        offset = self._offsets.get(index, 0)
        if not self._is_chat:
            ids = (entry if isinstance(entry, int) else entry.token for entry in entries)
            self._offsets[index] = offset + sum(len(text_of(token, self._model)) for token in ids) - hidden
        return logprobs_body(self._request.endpoint, entries, self._model, offset, hidden)
