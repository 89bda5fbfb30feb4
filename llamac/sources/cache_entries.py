"""What listing and pruning the cache of converted models report."""

from __future__ import annotations

from dataclasses import dataclass

ID_DIGITS = 8


@dataclass(frozen=True)
class Entry:
    """A model in the cache.

    Attributes:
        key: The name of its files in the cache, without their endings.
        source: The path or hub name it was converted from.
        dtype: The number format of most of its matrices.
        bytes: Bytes of its file, or of the part that is written.
        used: Time of the last use, in seconds since 1970.
        problem: Why it will never be used, or None.
    """

    key: str
    source: str
    dtype: str
    bytes: int
    used: float
    problem: str | None

    @property
    def id(self) -> str:
        """The key's first digits, for people."""
        return self.key[:ID_DIGITS]


@dataclass(frozen=True)
class Removal:
    """Something that was deleted, or would be in a dry run.

    Attributes:
        what: A model's source, a note's subject, or a file's name.
        reason: Empty if the user named the model.
        bytes: Bytes that it occupied.
    """

    what: str
    reason: str
    bytes: int
