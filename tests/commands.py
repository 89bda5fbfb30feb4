"""The result of a command run in this process, and a fake terminal for its input."""

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
        """Check that the command printed one error line that contains these parts, and nothing else."""
        assert (self.code, self.out) == (code, "")
        assert re.fullmatch(r"llamac: error: [^\n]+\n", self.err)
        for part in parts:
            assert part in self.err

    def refuses_with(self, *parts: str) -> None:
        """Check that the command rejected its arguments with such an error line."""
        self.fails_with(*parts, code=USAGE)


Command = Callable[..., Result]


class Terminal(io.TextIOWrapper):
    """An input that claims to be a terminal."""

    def isatty(self) -> bool:
        return True
