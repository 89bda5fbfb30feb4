"""What an operator decides about a server: its keys, its limits, and who may call it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from llamac.server.keys import Keys, Limits

MAX_BODY_BYTES = 16 << 20
CLIENT_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A server's settings.

    Attributes:
        keys: The API keys. Without any, every request is accepted.
        origins: Web pages of other origins that may call the server; "*": all of them.
        hosts: Names in the `Host` header that the server answers to; none: all of them. Web pages could otherwise
            reach a server without keys under a name of their own.
        max_body_bytes: The largest body of a request.
        header_seconds: Seconds in which the header of a request must arrive.
        body_seconds: Seconds in which a body must arrive.
        max_prompt_tokens: The most tokens of a prompt; None: as many as fit the context.
        request_seconds: Seconds in which a request must be answered; None: no limit.
        send_seconds: Seconds in which a client must take what it is sent.
        ping_seconds: Seconds without an event after which a stream sends a comment.
        retry_seconds: What a client is told to wait if the queue is full.
        page: Whether there is a web page at `/`.
        log_prompts: Whether the log has prompts and answers.
    """

    keys: Keys = field(default_factory=Keys)
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    max_body_bytes: int = MAX_BODY_BYTES
    max_prompt_tokens: int | None = None
    header_seconds: float = CLIENT_SECONDS
    body_seconds: float = CLIENT_SECONDS
    request_seconds: float | None = None
    send_seconds: float = CLIENT_SECONDS
    ping_seconds: float = 15.0
    retry_seconds: int = 1
    page: bool = True
    log_prompts: bool = False

    def within(self, limits: Limits) -> Settings:
        """These settings as they apply to a key with limits."""
        return replace(
            self,
            max_body_bytes=least(self.max_body_bytes, limits.max_body),
            max_prompt_tokens=least(self.max_prompt_tokens, limits.max_prompt_tokens),
            request_seconds=least(self.request_seconds, limits.timeout),
        )


def least(one: float | None, other: float | None) -> Any:
    """The lower one of two limits, of which None is none."""
    return other if one is None else one if other is None else min(one, other)
