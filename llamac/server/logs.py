"""A server's log: lines of text or JSON on standard error, from `logging.getLogger("llamac")`."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator
from typing import Literal

LogFormat = Literal["text", "json"]
FORMATS: tuple[LogFormat, ...] = ("text", "json")
MAX_LINES = 10_000  # maximum number of lines waiting to be written
FINISH_SECONDS = 1.0


class Lines(logging.Formatter):
    """A line of text per event, with its fields as NAME=VALUE. Control characters are escaped."""

    def format(self, record: logging.LogRecord) -> str:
        """Format an event as a line, followed by the traceback of an error."""
        fields = "".join(f" {name}={_word(value)}" for name, value in _fields(record).items())
        text = f"{_time(record)} {record.levelname.lower()} {_printable(record.getMessage())}{fields}"
        return text if record.exc_info is None else f"{text}\n{self.formatException(record.exc_info)}"


class JsonLines(logging.Formatter):
    """A JSON object per event, in one line of ASCII."""

    def format(self, record: logging.LogRecord) -> str:
        """Format an event as a line."""
        event: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        event.update(_fields(record))
        if record.exc_info is not None:
            event["traceback"] = self.formatException(record.exc_info)
        return json.dumps(event, default=str)


class StandardError(logging.Handler):
    """Writes lines to standard error in a thread, so that a full disk or a slow reader does not delay requests."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_LINES)
        self._lost = 0
        self._thread = threading.Thread(target=self._write, name="llamac-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the line of an event."""
        self.put(self.format(record))

    def put(self, line: str) -> None:
        """Queue a line. If the queue is full, the line is dropped, and a later line reports it."""
        try:
            self._lines.put_nowait(line + "\n")
        except queue.Full:
            self._lost += 1

    def finish(self) -> None:
        """Write the queued lines, for at most a second."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
        self._thread.join(FINISH_SECONDS)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            if self._lost and self._lines.empty():
                line += f"llamac: {self._lost} lines of the log were lost: nothing took them\n"
                self._lost = 0
            data = line.encode("utf-8", "backslashreplace")
            with contextlib.suppress(OSError, ValueError):  # the disk is full, or standard error is closed
                while data:  # bypasses sys.stderr, whose lock this thread could hold when the process exits
                    data = data[os.write(sys.stderr.fileno(), data) :]


@contextlib.contextmanager
def writing_logs(form: LogFormat, *, verbose: bool) -> Iterator[StandardError]:
    """Write the log to standard error: warnings and errors, and each request if `verbose`."""
    handler = StandardError()
    handler.setFormatter(JsonLines() if form == "json" else Lines())
    levels = {
        "llamac": logging.INFO if verbose else logging.WARNING,
        "uvicorn": logging.ERROR,
        "asyncio": logging.ERROR,
    }
    for name, level in levels.items():
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level)
    try:
        yield handler
    finally:
        handler.finish()


def _fields(record: logging.LogRecord) -> dict[str, object]:
    found = getattr(record, "fields", None)
    return found if isinstance(found, dict) else {}


def _time(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03}Z"


def _word(value: object) -> str:
    text = _printable(str(value))
    return json.dumps(text) if not text or " " in text else text


def _printable(text: str) -> str:
    return text if text.isprintable() else ascii(text)[1:-1]
