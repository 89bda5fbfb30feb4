"""A set of weak references that threads share."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedWeakSet(Generic[T]):
    """Members that live as long as something else refers to them. One thread can add while another one iterates.

    A WeakSet alone raises a RuntimeError then.
    """

    def __init__(self) -> None:
        self._members: weakref.WeakSet[T] = weakref.WeakSet()
        self._lock = threading.RLock()  # a member's finalizer can run in a thread that iterates

    def add(self, member: T) -> None:
        """Add a member."""
        with self._lock:
            self._members.add(member)

    def __iter__(self) -> Iterator[T]:
        """Iterate over the members of this moment."""
        with self._lock:
            members = list(self._members)
        return iter(members)
