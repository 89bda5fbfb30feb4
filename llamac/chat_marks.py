"""Keeps what people write apart from what a chat template writes, so that names of special tokens in it stay text.

A name is marked before a template sees it; in the template's text the marks tell which names are the template's own.
They are letters and digits, which templates write as they are, in JSON, too, and drawn anew, so that nobody knows them.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


class Marks:
    """Marks for the values that a template gets. names: of special tokens, the longest first."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = re.compile("|".join(map(re.escape, names))) if names else None
        self._begin, self._end = (f"{letter}{secrets.token_hex(8)}" for letter in "be")

    def put(self, value: Any) -> Any:
        """A plain value with marks around all names in its texts."""
        if self._names is None:
            return value
        if isinstance(value, str):
            return self._names.sub(f"{self._begin}\\g<0>{self._end}", value)
        if isinstance(value, Mapping):
            return {key: self.put(item) for key, item in value.items()}
        return type(value)(map(self.put, value)) if isinstance(value, list | tuple) else value

    def runs(self, text: str) -> Iterator[tuple[str, bool]]:
        """A template's text in runs, without marks, and whether special tokens are to be found in them.

        They are not where a marked name is, up to the template's own names around it.
        """
        if self._names is None:
            yield text, True
            return
        open_run, closed_run, guarded = "", "", False
        for index, piece in enumerate(re.split(f"{self._begin}({self._names.pattern}){self._end}", text)):
            if index % 2:
                closed_run, guarded = closed_run + piece, True
                continue
            clean = piece.replace(self._begin, "").replace(self._end, "")  # marks that the template tore apart
            own = list(self._names.finditer(clean))
            if guarded and own:
                yield open_run, True
                yield closed_run + clean[: own[0].start()], False
                open_run, closed_run, guarded, clean = "", "", False, clean[own[0].start() :]
                own = list(self._names.finditer(clean))
            if own:
                open_run, closed_run = open_run + closed_run + clean[: own[-1].end()], clean[own[-1].end() :]
            else:
                closed_run += clean
        yield (open_run, True) if guarded else (open_run + closed_run, True)
        yield (closed_run, False) if guarded else ("", True)
