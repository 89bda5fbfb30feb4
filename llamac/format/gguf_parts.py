"""File names of the parts of a split GGUF model: NAME-00001-of-00003.gguf."""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_PARTS = 9999
_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


class PartName(NamedTuple):
    """A parsed file name.

    Attributes:
        stem: NAME.
        n_parts: The number of parts.
    """

    stem: str
    n_parts: int

    def all_names(self) -> list[str]:
        """List the file names of all parts in order, at most MAX_PARTS."""
        count = min(self.n_parts, MAX_PARTS)
        return [f"{self.stem}-{number:05}-of-{self.n_parts:05}.gguf" for number in range(1, count + 1)]


def parse_part_name(name: str) -> PartName | None:
    """Parse a file name. Returns None if it is not the name of a part."""
    found = _NAME.fullmatch(name)
    return PartName(found[1], int(found[3])) if found else None
