"""What is left of a conversion that was broken off, and what the next attempt at the same file takes of it.

Beside the target, .NAME.partial is half-written, and .NAME.journal tells how far: its first line says what is
converted, each further one is the SHA-256 of a tensor that is written. Both stay when the process is ended. Who keeps a
journal (the cache) sees to it that all attempts are at the same bytes, one at a time, in a folder of its own.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path


class Journal:
    """The journal of a target; its files need not be there."""

    def __init__(self, target: Path) -> None:
        self.target = target = Path(os.path.realpath(target))
        self.path = target.with_name(f".{target.name}.journal")
        self.partial = target.with_name(f".{target.name}.partial")

    @contextlib.contextmanager
    def kept(self, what: str) -> Iterator[None]:
        """An attempt at the target. What is left of one at something else is removed first."""
        if self._lines()[:1] != [what]:
            self.remove()
            self.path.write_text(f"{what}\n")
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def hashes(self) -> list[bytes]:
        """The hashes of the tensors that are written, the first ones of the file."""
        return [bytes.fromhex(line) for line in self._lines()[1:] if re.fullmatch(r"[0-9a-f]{64}", line)]

    def keep(self, count: int) -> None:
        """Forgets all tensors but the first ones."""
        self.path.write_text("".join(f"{line}\n" for line in self._lines()[: count + 1]))

    def add(self, digest: bytes) -> None:
        """Notes that one more tensor is written."""
        with open(self.path, "a") as file:
            file.write(f"{digest.hex()}\n")

    def remove(self) -> None:
        """Removes it and the half-written file."""
        self.partial.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    def bytes_on_disk(self) -> int:
        """What the half-written file takes already."""
        with contextlib.suppress(OSError, AttributeError):
            return os.stat(self.partial).st_blocks * 512
        return 0

    def _lines(self) -> list[str]:
        """The lines that are whole."""
        try:
            return self.path.read_text("ascii", "replace").split("\n")[:-1]
        except FileNotFoundError:
            return []


_current: ContextVar[Journal | None] = ContextVar("journal", default=None)


def journal_of(target: Path) -> Journal | None:
    """The journal that is kept of a target now."""
    journal = _current.get()
    return journal if journal is not None and journal.target == Path(os.path.realpath(target)) else None
