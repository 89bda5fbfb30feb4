"""Runs chat templates in a process of their own (chat_worker.py), and ends it where a template does not end.

One such process serves all threads. It is started by the first rendering, takes some 15 MB, and ends with this process.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import marshal
import os
import select
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

from llamac.errors import ChatTemplateError, UnsupportedError

SECONDS = 5.0  # that a rendering may take; real templates take milliseconds
STARTING = 60.0  # seconds until the process must be ready
MAX_CHARACTERS = 1 << 24  # of a rendered text
PROGRAM = Path(__file__).with_name("chat_worker.py")


def render(template: str, variables: dict[str, Any], seconds: float = SECONDS, characters: int = MAX_CHARACTERS) -> str:
    """The text that a template makes of `variables` (plain data). Any thread may call it.

    Raises ChatTemplateError where the template is wrong, refuses the variables, or goes beyond what it may use.
    """
    request = _frame((template, variables, characters, seconds))
    with _lock:
        try:
            process = _running()
            answer = process.ask(request, seconds, 6 * characters + MAX_CHARACTERS)
        except BaseException:  # also Ctrl-C: its answer must not become the next one's
            _stop()
            raise
        if answer.get("kind") == "MemoryError":
            _stop()
    if "text" in answer:
        return str(answer["text"])
    raise ChatTemplateError(_message(answer))


def _message(answer: dict[str, Any]) -> str:
    kind, text = answer.get("kind"), answer.get("error")
    if kind == "TemplateError":  # by the template's raise_exception
        return f"the chat template refuses these messages: {text}"
    if kind == "MemoryError":
        return "the chat template needs too much memory: it was stopped"
    if kind == "OverflowError":
        return f"the chat template does too much: {text}"
    return f"the chat template failed: {kind}: {text}"


class _Process:
    """A worker that is ready."""

    def __init__(self) -> None:
        if not sys.executable:
            raise UnsupportedError("chat templates need a Python program to run in, and sys.executable is empty")
        try:
            self.child = subprocess.Popen(
                [sys.executable, "-I", "-S", str(PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for this process
            )
        except OSError as error:  # too many processes or files, or no memory
            raise ChatTemplateError(
                f"chat templates are rendered in a process of its own, which cannot be started: {error}"
            ) from None
        try:
            self.ask(_frame([entry for entry in sys.path if entry]), STARTING, MAX_CHARACTERS)
        except BaseException:
            self.stop()
            raise

    def ask(self, request: bytes, seconds: float, most: int) -> dict[str, Any]:
        """The answer to a frame."""
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        until = time.monotonic() + seconds
        try:
            self.child.stdin.write(request)
            self.child.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        (size,) = struct.unpack("<Q", self._read(self.child.stdout, 8, until, seconds))
        if size > most:
            raise ChatTemplateError("the chat template's process does not answer as it should")
        answer = json.loads(self._read(self.child.stdout, size, until, seconds).decode("utf-8", "surrogatepass"))
        if not isinstance(answer, dict):
            raise ChatTemplateError("the chat template's process does not answer as it should")
        return answer

    def _read(self, pipe: IO[bytes], size: int, until: float, seconds: float) -> bytes:
        data = bytearray()
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        while len(data) < size:
            left = until - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                raise ChatTemplateError(f"the chat template took more than {seconds:g} seconds: it was stopped")
            part = os.read(pipe.fileno(), min(size - len(data), 1 << 20))
            if not part:
                raise self._ended()
            data += part
        return bytes(data)

    def _ended(self) -> ChatTemplateError:
        return ChatTemplateError(
            "the chat template ended its process: it needs too much memory or is nested too deeply"
        )

    def stop(self) -> None:
        """Ends the process."""
        self.child.kill()
        self.child.wait()
        self.forget()

    def forget(self) -> None:
        """Closes what leads to the process."""
        for pipe in (self.child.stdin, self.child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


_lock = threading.Lock()
_process: _Process | None = None


def _running() -> _Process:
    global _process
    if _process is not None and _process.child.poll() is not None:
        _stop()
    if _process is None:
        _process = _Process()
    return _process


def _stop() -> None:
    global _process
    if _process is not None:
        _process.stop()
        _process = None


def _after_fork() -> None:
    """A child has a process of its own: the parent's answers the parent."""
    global _process, _lock
    if _process is not None:
        _process.child.returncode = 0  # it is not this process's child
        _process.forget()
        _process = None
    _lock = threading.Lock()


def _frame(content: Any) -> bytes:
    data = marshal.dumps(content)
    return struct.pack("<Q", len(data)) + data


atexit.register(_stop)
os.register_at_fork(after_in_child=_after_fork)
