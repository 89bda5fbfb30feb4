"""A person at a pseudo-terminal, for tests of interactive commands."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import textwrap
import time

from processes import heed_signals

TIMEOUT = 60  # seconds; only a hang takes so long


def screen_of(shown: str, width: int = 40) -> list[str]:
    """The lines of a terminal that has shown a text, without those at the end that are empty.

    It knows what rich writes: erased lines, the cursor moved up, colors. Like xterm, it begins a new line with the
    first character that does not fit.
    """
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[\??[\d;]*[A-Za-z]|\x1b.|[^\x1b]", shown, re.DOTALL):
        if part == "\r":
            column = 0
        elif part == "\n":
            row += 1
        elif part.endswith("A") and part.startswith("\x1b["):
            row = max(0, row - int(part[2:-1] or 1))
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part[0] != "\x1b" and part.isprintable():
            if column == width:
                row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
            lines[row] = lines[row].ljust(column)[:column] + part + lines[row][column + 1 :]
            column += 1
        lines += [""] * (row + 1 - len(lines))
    found = [line.rstrip() for line in lines]
    while found and not found[-1]:
        found.pop()
    return found


class Person:
    """Types at a pseudo-terminal of 40 columns and reads what it shows."""

    def __init__(self, *arguments: object, slow: bool = False, prompt: str = "> ") -> None:
        self.prompt = prompt
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
        delay = "original = s.Session._prepare\ns.Session._prepare = lambda *a: (time.sleep(0.05), original(*a))[1]"
        program = f"import time\nimport llamac.cli as c, llamac.engine.session as s\n{delay if slow else ''}\nc.main()"

        def begin() -> None:
            heed_signals()
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program), "chat", *map(str, arguments)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            preexec_fn=begin,
            env={**os.environ, "TERM": "xterm", "PYTHONIOENCODING": "utf-8:strict"},  # as in most locales
        )
        os.close(slave)
        self.shown = ""
        self._seen = 0  # where the last text ends that a test waited for

    def type(self, text: str) -> None:
        os.write(self._master, text.encode(errors="surrogateescape"))

    def wait_for(self, text: str) -> str:
        """Read until a text is shown after the last one; return what is shown up to it."""
        start, limit = self._seen, time.monotonic() + TIMEOUT
        while text not in self.shown[start:] and time.monotonic() < limit and self._read():
            pass
        assert text in self.shown[start:], self.shown
        self._seen = self.shown.index(text, start) + len(text)
        return self.shown[start : self._seen]

    def _read(self) -> bool:
        if not select.select([self._master], [], [], TIMEOUT)[0]:
            return False
        try:
            data = os.read(self._master, 65536)
        except OSError:  # the other end is closed
            return False
        if b"\x1b[6n" in data:  # prompt_toolkit asks where the cursor is
            self.type("\x1b[1;1R")
        self.shown += data.decode(errors="replace")
        return bool(data)

    def leave(self) -> int:
        """Press Ctrl-D at the next prompt; return the exit code."""
        self.wait_for(self.prompt)
        self.type("\x04")
        while self._read():
            pass
        os.close(self._master)
        return self.process.wait(TIMEOUT)
