"""The error of an invalid body."""

from __future__ import annotations

from llamac.errors import LlamacError


class InvalidRequestError(LlamacError, ValueError):
    """A body that cannot be computed.

    Attributes:
        param: The parameter that is wrong, or None.
        code: What is wrong with it, in a word that programs can compare.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


def wrong_type(name: str, value: object, expected: str) -> InvalidRequestError:
    """The error for a value of the wrong type."""
    found = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    kind = str(value) if isinstance(value, float) else found.get(type(value), "a number")
    return InvalidRequestError(f"{name} is {kind}, expected {expected}", name, "invalid_type")
