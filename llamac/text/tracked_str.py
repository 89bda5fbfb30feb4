"""A str that records which of its characters a chat template wrote, so that data cannot impersonate special tokens.

A character counts as the template's only if it was copied, with its origin, from a literal of the template. Operations
that this file does not override return a plain str, whose characters count as data. So a missing override can turn a
special token into text, but never text into a special token.

The worker (chat_worker.py) imports this file, which therefore imports nothing else of llamac.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, SupportsIndex

# Origins of characters: the caller's data, the template, or the role of a message.
DATA, TEMPLATE, ROLE = 0, 1, 2

# A conversion of printf-style formatting. A width or precision of "*" does not match.
_CONVERSION = re.compile(r"%(?:\((?P<key>[^()]*)\))?(?P<flags>[#0\- +]*\d*(?:\.\d+)?)[hlL]?(?P<kind>[a-zA-Z%])")


class TrackedStr(str):
    """A str with an origin for each character. Its methods return the same characters as those of str."""

    __slots__ = ("_origin",)
    _origin: bytes

    def __new__(cls, text: object = "", origin: bytes | None = None) -> TrackedStr:
        self = str.__new__(cls, text)
        self._origin = bytes(len(self)) if origin is None else origin
        if len(self._origin) != len(self):
            raise ValueError("each character needs one origin")
        return self

    def __str__(self) -> TrackedStr:
        return self

    def __iter__(self) -> Iterator[TrackedStr]:
        for at, character in enumerate(str.__iter__(self)):
            yield TrackedStr(character, self._origin[at : at + 1])

    def __getitem__(self, key: SupportsIndex | slice) -> TrackedStr:
        origin = self._origin[key]
        return TrackedStr(str.__getitem__(self, key), origin if isinstance(origin, bytes) else bytes([origin]))

    # ---- joining

    def __add__(self, other: str) -> TrackedStr:
        if not isinstance(other, str):
            return NotImplemented
        return TrackedStr(str.__add__(self, other), self._origin + origin_of(other))

    def __radd__(self, other: str) -> TrackedStr:
        if not isinstance(other, str):
            return NotImplemented
        return TrackedStr(str.__add__(other, self), origin_of(other) + self._origin)

    def __mul__(self, count: SupportsIndex) -> TrackedStr:
        return TrackedStr(str.__mul__(self, count), self._origin * count)

    __rmul__ = __mul__

    def join(self, parts: Iterable[str]) -> TrackedStr:
        parts = list(parts)
        return TrackedStr(str.join(self, parts), self._origin.join(map(origin_of, parts)))

    def __mod__(self, values: Any) -> TrackedStr:
        return assemble(str.__mod__(self, values), self._conversions(values))

    def _conversions(self, values: Any) -> Iterator[str]:
        """The parts of `self % values`: the text between the conversions, and the converted values."""
        arguments = iter(values if isinstance(values, tuple) else (values,))
        at = 0
        for match in _CONVERSION.finditer(self):
            yield self[at : match.start()]
            at = match.end()
            if match["kind"] == "%":
                yield self[at - 1 : at]
                continue
            value = next(arguments, "") if match["key"] is None else values[match["key"]]
            plain = isinstance(value, str) and match["kind"] == "s" and not match["flags"]
            yield value if plain else f"%{match['flags']}{match['kind']}" % (value,)
        yield self[at:]

    # ---- slicing

    def strip(self, characters: str | None = None) -> TrackedStr:
        return self.lstrip(characters).rstrip(characters)

    def lstrip(self, characters: str | None = None) -> TrackedStr:
        return self[len(self) - len(str.lstrip(self, characters)) :]

    def rstrip(self, characters: str | None = None) -> TrackedStr:
        return self[: len(str.rstrip(self, characters))]

    def removeprefix(self, prefix: str) -> TrackedStr:
        return self[len(self) - len(str.removeprefix(self, prefix)) :]

    def removesuffix(self, suffix: str) -> TrackedStr:
        return self[: len(str.removesuffix(self, suffix))]

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[TrackedStr]:  # type: ignore[override]
        return self._parts(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[TrackedStr]:  # type: ignore[override]
        return self._parts(str.rsplit(self, sep, maxsplit), sep)

    def _parts(self, parts: list[str], sep: str | None) -> list[TrackedStr]:
        """The slices of this string that a split returned, in order. White space separates them if `sep` is None."""
        found, at = [], 0
        for part in parts:
            if sep is None:
                at = self.index(part, at)
            found.append(self[at : at + len(part)])
            at += len(part) + len(sep or "")
        return found

    def splitlines(self, keepends: bool = False) -> list[TrackedStr]:  # type: ignore[override]
        found, at = [], 0
        for line, whole in zip(str.splitlines(self), str.splitlines(self, True), strict=True):
            found.append(self[at : at + len(whole if keepends else line)])
            at += len(whole)
        return found

    def partition(self, sep: str) -> tuple[TrackedStr, TrackedStr, TrackedStr]:
        return self._three(*map(len, str.partition(self, sep)))

    def rpartition(self, sep: str) -> tuple[TrackedStr, TrackedStr, TrackedStr]:
        return self._three(*map(len, str.rpartition(self, sep)))

    def _three(self, first: int, second: int, _: int) -> tuple[TrackedStr, TrackedStr, TrackedStr]:
        return self[:first], self[first : first + second], self[first + second :]

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> TrackedStr:
        text = str.replace(self, old, new, count)
        parts = self.split(old, count) if old else []
        return assemble(text, [TrackedStr(new, origin_of(new)).join(parts)])

    # ---- changing case, padding

    def upper(self) -> TrackedStr:
        return with_other_case(str.upper(self), self)

    def lower(self) -> TrackedStr:
        return with_other_case(str.lower(self), self)

    def casefold(self) -> TrackedStr:
        return with_other_case(str.casefold(self), self)

    def capitalize(self) -> TrackedStr:
        return with_other_case(str.capitalize(self), self)

    def title(self) -> TrackedStr:
        return with_other_case(str.title(self), self)

    def swapcase(self) -> TrackedStr:
        return with_other_case(str.swapcase(self), self)

    def center(self, width: SupportsIndex, fill: str = " ") -> TrackedStr:
        left = str.center("x" * len(self), width, " ").find("x")
        return self._padded(str.center(self, width, fill), left, fill)

    def ljust(self, width: SupportsIndex, fill: str = " ") -> TrackedStr:
        return self._padded(str.ljust(self, width, fill), 0, fill)

    def rjust(self, width: SupportsIndex, fill: str = " ") -> TrackedStr:
        text = str.rjust(self, width, fill)
        return self._padded(text, len(text) - len(self), fill)

    def _padded(self, text: str, left: int, fill: str) -> TrackedStr:
        return assemble(text, [fill * left, self, fill * (len(text) - len(self) - left)])


# ---- for operations outside str


def origin_of(text: str) -> bytes:
    """The origin of each character. The characters of a plain str are data."""
    return text._origin if isinstance(text, TrackedStr) else bytes(len(text))


def literal(text: str) -> TrackedStr:
    """Mark a string as the template's."""
    return TrackedStr(text, bytes([TEMPLATE]) * len(text))


def role(text: str) -> TrackedStr:
    """Mark a message's role. It can be part of a special token's name, but not its first or last character."""
    return TrackedStr(text, bytes([ROLE]) * len(text))


def tracked(value: Any) -> Any:
    """Convert every str in plain data, including keys, to a TrackedStr of data. Other values do not change."""
    if isinstance(value, str):
        return TrackedStr(value, origin_of(value))
    if isinstance(value, Mapping):
        return {tracked(key): tracked(item) for key, item in value.items()}
    return type(value)(map(tracked, value)) if isinstance(value, list | tuple) else value


def assemble(text: str, parts: Iterable[str]) -> TrackedStr:
    """Return `text` with the origins of `parts` if they concatenate to it; otherwise all of it is data."""
    joined = TrackedStr().join(parts)
    return joined if joined == text else TrackedStr(text)


def with_other_case(text: str, source: str) -> TrackedStr:
    """Return `text` with the origins of `source`, from which it differs only in case.

    Changing the case turns a character into one or more, so if the lengths are equal, the characters correspond.
    """
    return TrackedStr(text, origin_of(source) if len(text) == len(source) else None)


def with_other_spaces(text: str, source: str) -> TrackedStr:
    """Return `text` with the origins of `source` if they differ only in white space, which becomes data."""
    origin = bytearray(len(text))
    if "".join(str.split(text)) == "".join(str.split(source)):
        characters = zip(str.__iter__(source), origin_of(source), strict=True)
        origins = (source_origin for character, source_origin in characters if not character.isspace())
        for at, character in enumerate(str.__iter__(text)):
            if not character.isspace():
                origin[at] = next(origins)
    return TrackedStr(text, bytes(origin))


def to_json(value: Any, **options: Any) -> TrackedStr:
    """Return `json.dumps(value, **options)` with the origins of the strings in `value`. JSON's own syntax is data."""
    text = json.dumps(value, **options)
    origin = bytearray(len(text))
    at = 0
    for string in _strings(value, options.get("sort_keys", False)):
        encoded = json.dumps(string, ensure_ascii=options.get("ensure_ascii", True))
        at = text.index('"', at)
        if not text.startswith(encoded, at):
            return TrackedStr(text)
        if any(origin_of(string)):
            place = at + 1
            for character, source in zip(str.__iter__(string), origin_of(string), strict=True):
                size = len(json.dumps(character, ensure_ascii=options.get("ensure_ascii", True))) - 2
                origin[place : place + size] = bytes([source]) * size
                place += size
        at += len(encoded)
    return TrackedStr(text, bytes(origin))


def _strings(value: Any, sort_keys: bool) -> Iterator[str]:
    """The strings of a value in the order in which JSON writes them, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key in sorted(value) if sort_keys else value:
            yield key if isinstance(key, str) else json.dumps(key)
            yield from _strings(value[key], sort_keys)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item, sort_keys)
