"""One HTTP request on its way through the server: its id, its caller's settings, and what ends with it."""

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

MESSAGES = "/v1/messages"  # has errors and ids as in Anthropic's API
REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


class Call:
    """A request and its answer.

    Attributes:
        id: The id that its client has given, else a new one.
        path: The path of its address, without escapes.
        headers: Its headers; their names are in lower case.
        receive: Waits for the next part of its body, or for the end of its connection.
        name: What follows in its path where a path's end is open.
        settings: The server's settings, as they apply to its caller.
        body_bytes: The size of its body, once that has been read.
        status: The status of the answer, once it has begun.
        extra: Further headers of the answer.
        fields: What the log says about it, besides its path, status and seconds.
        requests: What it has asked of an engine.
        model: The model that answers it, once that is open.
        key: The API key of its caller, if the server has any.
        computed: Tokens that were computed without a request to an engine.
        at_end: Called when it has been answered, or its client has gone.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, settings: Settings) -> None:
        self.scope = scope
        self.path: str = scope["path"]
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
        self.at_end: list[Callable[[], object]] = []
        self.key: Key | None = None
        self.model: str | None = None
        self.computed = 0
        self._send = send

    @property
    def query(self) -> dict[str, str]:
        """The parameters in its address."""
        return dict(parse_qsl(self.scope["query_string"].decode("latin-1"), keep_blank_values=True))

    def use(self, key: Key) -> None:
        """Belong to a key. What asks the server to compute counts for its limits.

        Raises:
            HttpError: If the key may not send a request now.
        """
        self.key = key
        self.fields["key"] = key.name
        self.settings = self.settings.within(key.limits)
        if self.scope["method"] == "POST":
            key.begin()
            self.at_end.append(lambda: key.end(self.prompt_tokens + self.new_tokens))

    def allows(self, entry: Entry) -> bool:
        """Whether its caller may use a model."""
        allowed = None if self.key is None else self.key.limits.models
        return allowed is None or not allowed.isdisjoint(entry.names)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of its prompts, cached ones too."""
        return self.computed + sum(request.prompt_tokens for request in self.requests)

    @property
    def new_tokens(self) -> int:
        """Tokens that were generated for it so far."""
        return sum(request.new_tokens for request in self.requests)

    def check_prompt(self, tokens: int) -> None:
        """Refuse a prompt that is too long.

        Raises:
            ContextFullError: If it is.
        """
        limit = self.settings.max_prompt_tokens
        if limit is not None and tokens > limit:
            raise ContextFullError(f"the prompt has {tokens} tokens, more than the {limit} that this server takes")

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Send a part of the answer; its beginning gets the headers that every answer has."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            extra = [(name.encode(), value.encode("latin-1", "replace")) for name, value in self.extra.items()]
            message = {**message, "headers": [*message["headers"], *extra]}
        await self._send(message)

    def note(self, completion: Completion) -> None:
        """Have the log say how long a result has waited, and what ended it."""
        self.fields["cached_tokens"] = completion.usage.cached_tokens
        self.fields["finish_reason"] = completion.finish_reason
        self.fields["queued"] = round(completion.timings.queued, 4)

    def end(self) -> None:
        """Call what waits for the end."""
        while self.at_end:
            self.at_end.pop()()
