"""What is left of a conversion that was broken off, and what the next attempt at the same file takes of it.

Where .NAME.journal lies beside a target, the half-written file is .NAME.partial, and both stay when the process is
ended. The journal's first line says what is converted, each further one is the SHA-256 of a tensor that is written. Who
makes it (the cache) sees to it that all attempts are at the same bytes, and that there is one at a time.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path


class Journal:
    """The journal of a target, which need not be there."""

    def __init__(self, target: Path) -> None:
        self.path = target.with_name(f".{target.name}.journal")
        self.partial = target.with_name(f".{target.name}.partial")

    def __bool__(self) -> bool:
        return self.path.is_file()

    def begin(self, what: str) -> None:
        """Makes the journal of an attempt; what is left of one at something else is removed."""
        if self._lines()[:1] != [what]:
            self.remove()
            self.path.write_text(f"{what}\n")

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
            return os.stat(self.partial).st_blocks * 512 if self else 0
        return 0

    def _lines(self) -> list[str]:
        """The lines that are whole."""
        return self.path.read_text("ascii", "replace").split("\n")[:-1] if self else []
