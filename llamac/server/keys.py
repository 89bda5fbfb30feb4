"""The API keys of a server, and their limits."""

from __future__ import annotations

import hashlib
import hmac
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from llamac.arguments import StrPath, file_path
from llamac.errors import ArgumentError
from llamac.server.exchange import HttpError
from llamac.server.models_file import nearest
from llamac.sizes import counted, parse_size

KEY_VARIABLE = "LLAMAC_API_KEY"
MAX_FILE_BYTES = 1 << 20
CODE = "rate_limit_exceeded"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a key. None: only the server's limits apply.

    Attributes:
        max_requests: Concurrent requests, including waiting ones.
        requests_per_minute: Requests per minute.
        tokens_per_minute: Tokens of prompts and answers per minute.
        max_prompt_tokens: Tokens of a prompt.
        max_body: Bytes of a body.
        timeout: Seconds in which a request must be answered.
        models: Names of the models that the key may use.
    """

    max_requests: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_prompt_tokens: int | None = None
    max_body: int | None = None
    timeout: float | None = None
    models: frozenset[str] | None = None


LIMITS = tuple(field.name for field in fields(Limits))


class Allowance:
    """A rate limit per minute (a token bucket that refills evenly)."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._left = float(per_minute)
        self._at = clock()

    def wait(self, n: int = 1) -> float:
        """Return the seconds until n units are available; 0: now."""
        now = self._clock()
        self._left = min(self._per_minute, self._left + max(0.0, now - self._at) * self._per_minute / 60)
        self._at = now
        return max(0.0, (n - self._left) * 60 / self._per_minute)

    def use(self, n: int) -> None:
        """Use n units. Using more than are available delays later requests."""
        self._left -= n


class Key:
    """A key: its hash, its name in the log, its limits, and its current use.

    Attributes:
        name: The key's name.
        limits: The key's limits.
    """

    def __init__(self, key: str, name: str, limits: Limits = Limits()) -> None:
        self.name = name
        self.limits = limits
        self.digest = _digest(key)
        self._running = 0
        self._requests = _allowance(limits.requests_per_minute)
        self._tokens = _allowance(limits.tokens_per_minute)

    def __repr__(self) -> str:
        return f"<llamac.server.Key {self.name!r}>"

    def begin(self) -> None:
        """Count the start of a request. The caller must call `end` at its end.

        Raises:
            HttpError: If the key has reached a limit.
        """
        limits = self.limits
        if limits.max_requests is not None and self._running >= limits.max_requests:
            raise self._refusal(f"{counted(limits.max_requests, 'request')} at a time", 1)
        for allowance, what in (
            (self._requests, counted(limits.requests_per_minute or 0, "request")),
            (self._tokens, counted(limits.tokens_per_minute or 0, "token")),
        ):
            seconds = 0.0 if allowance is None else allowance.wait()
            if seconds:
                raise self._refusal(f"{what} per minute", math.ceil(seconds))
        self._running += 1
        if self._requests is not None:
            self._requests.use(1)

    def end(self, tokens: int) -> None:
        """Count the end of a request, and the tokens of its prompt and its answer."""
        self._running -= 1
        if self._tokens is not None:
            self._tokens.use(tokens)

    def _refusal(self, limit: str, seconds: int) -> HttpError:
        message = f"the key {self.name!r} may use {limit}: try again in {counted(seconds, 'second')}"
        return HttpError(429, message, CODE, "rate_limit_error", {"retry-after": str(seconds)})


class Keys:
    """All keys. Only hashes are stored, and they are never printed."""

    def __init__(self, keys: Iterable[str | Key] = ()) -> None:
        """Store keys. Keys given as strings get numbers as names, and have no limits."""
        self._keys = [Key(key, str(i)) if isinstance(key, str) else key for i, key in enumerate(keys, 1)]

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        return f"<llamac.server.Keys: {len(self)} keys>"

    def find(self, text: str) -> Key | None:
        """Find the key with a text. Takes the same time for every text, so that timing reveals nothing."""
        digest = _digest(text)
        found = None
        for key in self._keys:
            if hmac.compare_digest(digest, key.digest):
                found = key
        return found

    def check_models(self, names: Collection[str]) -> None:
        """Check that all models named in limits exist.

        Raises:
            ArgumentError: If a model does not exist.
        """
        for key in self._keys:
            for name in sorted(key.limits.models or ()):
                if name not in names:
                    hint = nearest(name, tuple(names))
                    raise ArgumentError(f"the key {key.name!r}: models: no model has the name {name!r}{hint}")

    def replace(self, other: Keys) -> None:
        """Replace the keys. Unchanged keys keep their current use."""
        before = {(key.digest, key.name, key.limits): key for key in self._keys}
        self._keys = [before.get((key.digest, key.name, key.limits), key) for key in other._keys]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _allowance(per_minute: int | None) -> Allowance | None:
    return None if per_minute is None else Allowance(per_minute)


# ---- the file


def read_keys(path: StrPath | None, environment: Mapping[str, str] = os.environ) -> Keys:
    """Read the keys in a file, and the key in the environment.

    A line of the file contains a key, followed by its name and limits as NAME=VALUE, separated by spaces. Blank lines
    and lines with "#" are skipped.

    Raises:
        ArgumentError: If the file has no keys, a key or a name occurs twice or is not ASCII, or a limit is wrong. The
            message never contains a key.
        OSError: If the file cannot be read.
    """
    keys: list[Key] = []
    if path is not None:
        file = file_path(path, "--api-key-file")
        keys = [_read_line(line, f"{file}, line {number}", number) for number, line in _lines(file)]
        if not keys:
            raise ArgumentError(f"{file} has no API keys: expected one per line")
    from_environment = environment.get(KEY_VARIABLE, "").strip()
    if from_environment:
        _check_key(from_environment, KEY_VARIABLE)
        keys.append(Key(from_environment, KEY_VARIABLE))
    seen: dict[object, Key] = {}
    for key in keys:
        for what, value in (("key", key.digest), ("name", key.name)):
            if value in seen:
                raise ArgumentError(f"two API keys have the same {what}: {seen[value].name!r} and {key.name!r}")
            seen[value] = key
    return Keys(keys)


def _lines(file: Path) -> list[tuple[int, str]]:
    with open(file, "rb") as opened:
        data = opened.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ArgumentError(f"{file} has more than {MAX_FILE_BYTES} bytes: expected API keys, one per line")
    lines = (line.strip() for line in data.decode("utf-8", "replace").splitlines())
    return [(number, line) for number, line in enumerate(lines, 1) if line and not line.startswith("#")]


def _read_line(line: str, where: str, number: int) -> Key:
    text, *settings = line.split()
    _check_key(text, where)
    name = f"line {number}"
    limits: dict[str, object] = {}
    for setting in settings:
        option, equals, value = setting.partition("=")
        if not equals:
            raise ArgumentError(f"{where}: after the key, expected NAME=VALUE with name, {', '.join(LIMITS)}")
        if option == "name":
            name = value
        elif option not in LIMITS:
            hint = nearest(option, ("name", *LIMITS))
            raise ArgumentError(f"{where}: there is no limit {option!r}{hint}")
        elif option in limits:
            raise ArgumentError(f"{where}: {option} is given twice")
        else:
            limits[option] = _limit(option, value, where)
    if not name.isprintable() or not name:
        raise ArgumentError(f"{where}: the name of a key has printable characters")
    return Key(text, name, Limits(**limits))  # type: ignore[arg-type]


def _limit(option: str, value: str, where: str) -> object:
    if option == "models":
        return frozenset(value.split(","))
    if option == "max_body":
        return parse_size(value, f"{where}: max_body")
    try:
        number = float(value) if option == "timeout" else int(value)
    except ValueError:
        number = 0
    if not 0 < number < math.inf:
        kind = "a number" if option == "timeout" else "an integer"
        raise ArgumentError(f"{where}: {option} is {value!r}, expected {kind} greater than 0")
    return number


def _check_key(key: str, where: str) -> None:
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ArgumentError(f"{where}: the key has white space or characters beyond ASCII, which headers cannot carry")
