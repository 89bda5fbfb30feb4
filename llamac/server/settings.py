"""What an operator decides about a server: its keys, its limits, and who may call it."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from llamac.arguments import StrPath, file_path
from llamac.errors import ArgumentError

KEY_VARIABLE = "LLAMAC_API_KEY"
MAX_BODY_BYTES = 16 << 20
MAX_KEY_FILE_BYTES = 1 << 20


class Keys:
    """The API keys that a server accepts. Only their hashes are kept, and nothing prints them."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = [_digest(key) for key in keys]

    def __len__(self) -> int:
        return len(self._digests)

    def __repr__(self) -> str:
        return f"<llamac.server.Keys: {len(self)} keys>"

    def accepts(self, key: str) -> bool:
        """Whether a key is one of these. The time that this takes tells nothing about them."""
        digest = _digest(key)
        found = False
        for other in self._digests:
            found |= hmac.compare_digest(digest, other)
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_keys(path: StrPath | None, environment: Mapping[str, str] = os.environ) -> Keys:
    """The keys in a file, one per line, and the one in the environment. Blank lines and lines with "#" are skipped.

    Raises:
        ArgumentError: If the file has no keys, or a key has white space or is not ASCII.
        OSError: If the file cannot be read.
    """
    lines: list[str] = []
    if path is not None:
        file = file_path(path, "--api-key-file")
        lines = _lines(file)
        if not lines:
            raise ArgumentError(f"{file} has no API keys: expected one per line")
    from_environment = environment.get(KEY_VARIABLE, "").strip()
    keys = [*lines, *([from_environment] if from_environment else [])]
    for number, key in enumerate(keys, 1):
        if not key.isascii() or not key.isprintable() or " " in key:
            where = KEY_VARIABLE if number > len(lines) else f"{path}: key {number}"
            raise ArgumentError(f"{where} has white space or characters beyond ASCII, which headers cannot carry")
    return Keys(keys)


def _lines(file: Path) -> list[str]:
    with open(file, "rb") as opened:
        data = opened.read(MAX_KEY_FILE_BYTES + 1)
    if len(data) > MAX_KEY_FILE_BYTES:
        raise ArgumentError(f"{file} has more than {MAX_KEY_FILE_BYTES} bytes: expected API keys, one per line")
    lines = (line.strip() for line in data.decode("utf-8", "replace").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A server's settings.

    Attributes:
        keys: The API keys. Without any, every request is accepted.
        origins: Web pages of other origins that may call the server; "*": all of them.
        hosts: Names in the `Host` header that the server answers to; none: all of them. Web pages could otherwise
            reach a server without keys under a name of their own.
        max_body_bytes: The largest body of a request.
        body_seconds: Seconds in which a body must arrive.
        request_seconds: Seconds in which a request must be answered; None: no limit.
        send_seconds: Seconds in which a client must take what it is sent.
        ping_seconds: Seconds without an event after which a stream sends a comment.
        retry_seconds: What a client is told to wait if the queue is full.
        page: Whether there is a web page at `/`.
    """

    keys: Keys = field(default_factory=Keys)
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    max_body_bytes: int = MAX_BODY_BYTES
    body_seconds: float = 30.0
    request_seconds: float | None = None
    send_seconds: float = 60.0
    ping_seconds: float = 15.0
    retry_seconds: int = 1
    page: bool = True
