"""The state of one HTTP request: its id, its caller's settings, its answer, and its cleanup."""

from __future__ import annotations

import re
from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from llamac.errors import ContextFullError
from llamac.openai.responses import new_id

if TYPE_CHECKING:
    from llamac.engine.batching.request import Request
    from llamac.engine.generation.output import Completion
    from llamac.server.exchange import Receive, Scope, Send
    from llamac.server.keys import Key
    from llamac.server.models import Entry
    from llamac.server.settings import Settings

MESSAGES = "/v1/messages"  # errors and ids are in the format of Anthropic's API
ORIGIN = re.compile(r"\Ahttps?://[^/]*", re.IGNORECASE)  # proxies send whole URLs
REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


class Call:
    """A request and its answer.

    Attributes:
        id: The client's id for the request, or a new one.
        path: The decoded path of the URL.
        headers: The headers, with lower-case names.
        receive: Waits for the next part of the body, or for a disconnect.
        name: The variable suffix of the path, if the endpoint has one.
        settings: The server's settings for this caller.
        body_bytes: The size of the body, once it has been read.
        status: The status of the answer, once it has begun.
        extra: Additional headers of the answer.
        fields: Additional fields of the log line.
        requests: The requests that it has submitted to an engine.
        recorded: The number of their results in the metrics.
        model: The model that answers it, once the model is open.
        key: The caller's API key, if the server has keys.
        computed: Tokens that were computed without a request to an engine.
        at_end: Callbacks for the end of the request: it has been answered, or the client has disconnected.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, settings: Settings) -> None:
        self.scope = scope
        self.path: str = ORIGIN.sub("", scope["path"]) or "/"
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        given = self.headers.get("x-request-id", "")
        self.id = given if REQUEST_ID.fullmatch(given) else new_id("req_")
        self.receive = receive
        self.name = ""
        self.settings = settings
        self.body_bytes = 0
        self.status: int | None = None
        self.extra = {"x-request-id": self.id, "x-content-type-options": "nosniff"}
        if self.path.startswith(MESSAGES):
            self.extra["request-id"] = self.id
        self.fields: dict[str, object] = {}
        self.requests: list[Request] = []
        self.recorded = 0
        self.at_end: list[Callable[[], object]] = []
        self.key: Key | None = None
        self.model: str | None = None
        self.computed = 0
        self._send = send

    @property
    def query(self) -> dict[str, str]:
        """The parameters in the URL."""
        return dict(parse_qsl(self.scope["query_string"].decode("latin-1"), keep_blank_values=True))

    def use(self, key: Key) -> None:
        """Assign the request to a key. Requests that compute count towards the key's limits.

        Raises:
            HttpError: If the key has reached a limit.
        """
        self.key = key
        self.fields["key"] = key.name
        self.settings = self.settings.within(key.limits)
        if self.scope["method"] == "POST":
            key.begin()
            self.at_end.append(lambda: key.end(self.prompt_tokens + self.new_tokens))

    def allows(self, entry: Entry) -> bool:
        """Return whether the caller may use a model."""
        allowed = None if self.key is None else self.key.limits.models
        return allowed is None or not allowed.isdisjoint(entry.names)

    @property
    def prompt_tokens(self) -> int:
        """The number of prompt tokens, including cached ones."""
        return self.computed + sum(request.prompt_tokens for request in self.requests)

    @property
    def new_tokens(self) -> int:
        """The number of tokens generated so far."""
        return sum(request.new_tokens for request in self.requests)

    def check_prompt(self, tokens: int) -> None:
        """Check the length of a prompt.

        Raises:
            ContextFullError: If the prompt is longer than the server or the key allows.
        """
        limit = self.settings.max_prompt_tokens
        if limit is not None and tokens > limit:
            raise ContextFullError(f"the prompt has {tokens} tokens, more than the {limit} that this server accepts")

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Send a part of the answer, and add the common headers to its start."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            extra = [(name.encode(), value.encode("latin-1", "replace")) for name, value in self.extra.items()]
            message = {**message, "headers": [*message["headers"], *extra]}
        await self._send(message)

    def note(self, completion: Completion) -> None:
        """Add a result's queueing time and finish reason to the log line."""
        self.fields["cached_tokens"] = completion.usage.cached_tokens
        self.fields["finish_reason"] = completion.finish_reason
        self.fields["queued"] = round(completion.timings.queued, 4)

    def end(self) -> None:
        """Call the callbacks for the end of the request."""
        while self.at_end:
            self.at_end.pop()()
