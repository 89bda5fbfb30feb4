"""llamac's commands run in this process: what they did, and the input of a person who types."""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Callable

GREEDY = ("-t", "0")


@dataclasses.dataclass(frozen=True)
class Result:
    """What a command did."""

    code: int | str | None
    out: str
    err: str

    def fails_with(self, *parts: str, code: int = 1) -> None:
        """It failed with one line that holds these parts, and printed nothing else."""
        assert (self.code, self.out) == (code, "")
        assert re.fullmatch(r"llamac: error: [^\n]+\n", self.err)
        for part in parts:
            assert part in self.err


Command = Callable[..., Result]


class Terminal(io.TextIOWrapper):
    """An input without end that a person might type into."""

    def isatty(self) -> bool:
        return True
