"""A server's log: lines of text or of JSON on standard error, from `logging.getLogger("llamac")`."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Literal

LogFormat = Literal["text", "json"]
FORMATS: tuple[LogFormat, ...] = ("text", "json")


class Lines(logging.Formatter):
    """A line of text per event, with its fields as NAME=VALUE. Control characters are escaped."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of an event; the traceback of an error follows it."""
        fields = "".join(f" {name}={_word(value)}" for name, value in _fields(record).items())
        text = f"{_time(record)} {record.levelname.lower()} {_printable(record.getMessage())}{fields}"
        return text if record.exc_info is None else f"{text}\n{self.formatException(record.exc_info)}"


class JsonLines(logging.Formatter):
    """A JSON object per event, in one line of ASCII."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of an event."""
        event: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        event.update(_fields(record))
        if record.exc_info is not None:
            event["traceback"] = self.formatException(record.exc_info)
        return json.dumps(event, default=str)


def set_up_logs(form: LogFormat, *, verbose: bool) -> None:
    """Write the log to standard error: warnings and errors, and each request if `verbose`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else Lines())
    for name in ("llamac", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(logging.INFO if verbose and name == "llamac" else logging.WARNING)


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
