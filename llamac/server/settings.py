"""The settings of a server: keys, limits, and access rules."""

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
        keys: The API keys. Without keys, every request is accepted.
        origins: Origins of web pages that may call the server; "*": all.
        hosts: Accepted names in the `Host` header; empty: all. This keeps web pages from reaching a server without keys
            through DNS rebinding.
        max_body_bytes: Maximum size of a request's body.
        header_seconds: Seconds in which the header of a request must arrive.
        body_seconds: Seconds in which a body must arrive.
        max_prompt_tokens: Maximum number of tokens of a prompt; None: as many as fit the context.
        request_seconds: Seconds in which a request must be answered; None: no limit.
        send_seconds: Seconds in which a client must read what was sent.
        ping_seconds: Seconds without an event after which a stream sends a comment.
        retry_seconds: The `Retry-After` delay if the queue is full.
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
        """Return these settings, restricted by the limits of a key."""
        return replace(
            self,
            max_body_bytes=least(self.max_body_bytes, limits.max_body),
            max_prompt_tokens=least(self.max_prompt_tokens, limits.max_prompt_tokens),
            request_seconds=least(self.request_seconds, limits.timeout),
        )


def least(one: float | None, other: float | None) -> Any:
    """Return the lower of two limits; None means no limit."""
    return other if one is None else one if other is None else min(one, other)
