"""Runs llamac's commands in this process: their results, and the input of a person at a terminal."""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Callable

from llamac.exit_codes import ERROR, USAGE

GREEDY = ("-t", "0")


@dataclasses.dataclass(frozen=True)
class Result:
    """A command's exit code and output."""

    code: int | str | None
    out: str
    err: str

    def fails_with(self, *parts: str, code: int = ERROR) -> None:
        """Check that the command printed one error line with these parts, and nothing else."""
        assert (self.code, self.out) == (code, "")
        assert re.fullmatch(r"llamac: error: [^\n]+\n", self.err)
        for part in parts:
            assert part in self.err

    def refuses_with(self, *parts: str) -> None:
        """The same for arguments that cannot be used."""
        self.fails_with(*parts, code=USAGE)


Command = Callable[..., Result]


class Terminal(io.TextIOWrapper):
    """An input without end that a person might type into."""

    def isatty(self) -> bool:
        return True
