"""Batch files: requests read line by line, and results appended so that a kill neither loses nor repeats one.

The id of a result names the line of the input and the line's hash. So the output alone says what is done and whether
the input has changed since.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import stat
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from llamac.errors import ArgumentError, LlamacError
from llamac.format.strict_json import parse_object

STANDARD = "-"  # the name of standard input and standard output
MAX_LINE_BYTES = 1 << 26
SYNC_INTERVAL = 1.0  # seconds between two writes to the disk
ID = re.compile(r"batch_req_([1-9][0-9]{0,17})_[0-9a-f]{16}")
BEGINNING = b'{"id": "batch_req_'  # of every line of an output


class InvalidLineError(LlamacError, ValueError):
    """A line of the input that is not a JSON object."""


class InputChangedError(ArgumentError):
    """The input has changed while it was being read."""


class Line(NamedTuple):
    """A line of the input that is not blank.

    Attributes:
        number: Its number, from 1.
        id: The id of its result.
        custom_id: Its custom_id, if it has a valid one.
        start: Where it begins in the file.
        size: Its bytes.
    """

    number: int
    id: str
    custom_id: str | None
    start: int
    size: int


class Input:
    """The lines of requests. Standard input is read to its end first.

    Attributes:
        name: The file's name in messages.
        lines: Where each line is.
    """

    def __init__(self, path: str) -> None:
        self._file: BinaryIO
        if path == STANDARD:
            self.name = "standard input"
            self._file = io.BytesIO(b"" if sys.stdin is None else sys.stdin.buffer.read())
        else:
            self.name = path
            self._file = open(path, "rb")  # noqa: SIM115  # closed by `close`
            if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                self._file.close()
                raise ArgumentError(f"{path} is not a regular file; `-` reads standard input")
        try:
            self.lines = self._scan()
        except BaseException:
            self._file.close()
            raise

    def _scan(self) -> list[Line]:
        """Find the lines.

        Raises:
            ArgumentError: If two lines have the same custom_id, or a line is too long.
        """
        lines: list[Line] = []
        first: dict[str, int] = {}
        start = number = 0
        while data := self._file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(data) > MAX_LINE_BYTES:
                raise ArgumentError(f"{self.name}: line {number} has more than {MAX_LINE_BYTES} bytes")
            if text := data.strip():
                custom_id = self._custom_id(text, number)
                if custom_id is not None and first.setdefault(custom_id, number) != number:
                    raise ArgumentError(
                        f"{self.name}: lines {first[custom_id]} and {number} have the same custom_id {custom_id!r}: "
                        "each line needs one of its own"
                    )
                lines.append(Line(number, _line_id(number, text), custom_id, start, len(data)))
            start += len(data)
        return lines

    def _custom_id(self, text: bytes, number: int) -> str | None:
        try:
            custom_id = parse_line(text, number).get("custom_id")
        except InvalidLineError:
            return None
        return custom_id if isinstance(custom_id, str) else None

    def read(self, line: Line) -> dict[str, Any]:
        """Parse a line.

        Raises:
            InvalidLineError: If it is not a JSON object.
            InputChangedError: If the file has changed since it was opened.
        """
        return parse_line(self.text(line), line.number)

    def text(self, line: Line) -> bytes:
        """A line as it is.

        Raises:
            InputChangedError: If the file has changed since it was opened.
        """
        self._file.seek(line.start)
        text = self._file.read(line.size).strip()
        if _line_id(line.number, text) != line.id:
            raise InputChangedError(f"{self.name}: line {line.number} has changed while the batch was running")
        return text

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Input:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def parse_line(text: bytes, number: int) -> dict[str, Any]:
    """Parse the line with this number.

    Raises:
        InvalidLineError: If it is not a JSON object.
    """
    return parse_object(text, f"line {number}", error=InvalidLineError, max_bytes=MAX_LINE_BYTES)


def _line_id(number: int, text: bytes) -> str:
    return f"batch_req_{number}_{hashlib.sha256(text).hexdigest()[:16]}"


class Output:
    """The lines of results.

    A regular file is locked, continued and synchronized with the disk. A pipe gets each line at once; what its reader
    has not taken when the write is interrupted is dropped.

    Attributes:
        name: The file's name in messages.
        done: The ids of the results that the file had when it was opened.
        errors: How many of these are errors.
        fingerprint: The `system_fingerprint` of its results.
    """

    def __init__(self, path: str, source: Input, fingerprint: str) -> None:
        """Open an output and check that it belongs to the input and the model.

        Args:
            path: The file, or "-".
            source: The input.
            fingerprint: The `system_fingerprint` of new results.

        Raises:
            ArgumentError: If the file is not an output of this input and model, or another process writes it.
        """
        self.name = "standard output" if path == STANDARD else path
        self.done: set[str] = set()
        self.errors = 0
        self.fingerprint = fingerprint
        self._written = time.monotonic()
        # where the next bytes go, and these bytes: one value, so that an interruption leaves no line half recorded
        self._state: tuple[int, bytes] = (0, b"")
        self._file: int | None = None  # None: standard output that is no file of the system
        self._is_regular = False
        if path == STANDARD:
            with contextlib.suppress(io.UnsupportedOperation):
                self._file = os.dup(sys.stdout.fileno())
            return
        is_new = not os.path.exists(path)
        # a process that can read a pipe is a reader of it: it would neither wait for another one nor notice its end
        access = os.O_RDWR if is_new or os.path.isfile(path) else os.O_WRONLY
        file = os.open(path, access | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            self._is_regular = stat.S_ISREG(os.fstat(file).st_mode)
            if self._is_regular:
                self._lock(file)
                self._resume(file, source, fingerprint)
                if is_new:
                    _sync_folder(Path(path).absolute().parent)
        except BaseException:
            os.close(file)
            raise
        self._file = file

    def _lock(self, file: int) -> None:
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ArgumentError(f"{self.name} is being written by another process") from None

    def _resume(self, file: int, source: Input, fingerprint: str) -> None:
        """Read the results that the file has, and drop a last line that was not written to its end."""
        expected = {line.number: line for line in source.lines}
        end, missing = 0, b""
        with open(file, "rb", closefd=False) as results:
            for number, data in enumerate(iter(results.readline, b""), 1):
                if not data.endswith(b"\n"):
                    if self._is_incomplete(number, data):
                        os.ftruncate(file, end)
                        break
                    missing = b"\n"
                self._read_result(number, data, expected, source, fingerprint)
                end += len(data)
        self._state = (end, missing)

    def _is_incomplete(self, number: int, data: bytes) -> bool:
        """Whether a last line without a line feed was not written to its end."""
        with contextlib.suppress(InvalidLineError):
            _parsed(data)
            return False
        begun = data.rstrip(b"\0")  # after a power loss, a file can end with zeros
        if begun[: len(BEGINNING)] != BEGINNING[: len(begun)] or not (begun or self.done):
            raise self._foreign(number)
        return True

    def _read_result(
        self, number: int, data: bytes, expected: Mapping[int, Line], source: Input, fingerprint: str
    ) -> None:
        try:
            result = _parsed(data)
        except InvalidLineError:
            raise self._foreign(number) from None
        identity = result.get("id")
        found = ID.fullmatch(identity) if isinstance(identity, str) else None
        if found is None or not isinstance(identity, str):
            raise self._foreign(number)
        line = expected.get(int(found[1]))
        if line is None or line.id != identity or line.custom_id != result.get("custom_id"):
            state = "is gone" if line is None else "has changed"
            raise ArgumentError(
                f"{source.name}: line {found[1]} {state} since its result was written to line {number} of "
                f"{self.name}: restore the input, or choose another output"
            )
        if identity in self.done:
            raise ArgumentError(f"{self.name}: line {number} repeats the result of line {found[1]} of {source.name}")
        body = result["response"]["body"] if _is_response(result.get("response")) else {}
        if body.get("system_fingerprint", fingerprint) != fingerprint:
            raise ArgumentError(
                f"{self.name}: line {number} was computed with another model or version of llamac: continue with that "
                "one, or choose another output"
            )
        self.done.add(identity)
        self.errors += "error" in body

    def _foreign(self, number: int) -> ArgumentError:
        foreign = "line" if self.done else "file"
        return ArgumentError(
            f"{self.name}: line {number} is not a result of `llamac batch`: choose another output, or remove this "
            f"{foreign}"
        )

    def append(self, result: Mapping[str, Any]) -> None:
        """Add a result. It reaches the disk with the next `sync` or within `SYNC_INTERVAL` of further results."""
        line = (json.dumps(result) + "\n").encode()
        if not self._is_regular:
            while line:
                line = line[self._write(line) :]
            return
        place, data = self._state
        self._state = (place, data + line)
        if time.monotonic() - self._written >= SYNC_INTERVAL:
            self.sync()

    def sync(self) -> None:
        """Write all results to the disk."""
        place, data = self._state
        if not data or self._file is None:
            return
        while data:
            # an interruption before the next assignment leads to the same bytes in the same place
            n = self._write(data, place)
            place, data = self._state = (place + n, data[n:])
        os.fsync(self._file)
        self._written = time.monotonic()

    def _write(self, data: bytes, place: int = 0) -> int:
        if self._file is None:
            sys.stdout.write(data.decode())
            sys.stdout.flush()
            return len(data)
        try:
            return os.pwrite(self._file, data, place) if self._is_regular else os.write(self._file, data)
        except OSError as error:
            error.filename = self.name
            raise

    def close(self) -> None:
        """Write all results to the disk and close the file."""
        try:
            self.sync()
        finally:
            if self._file is not None:
                os.close(self._file)

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _parsed(data: bytes) -> dict[str, Any]:
    return parse_object(data, "result", error=InvalidLineError, max_bytes=1 << 30)


def _is_response(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("body"), dict)


def _sync_folder(folder: Path) -> None:
    """Make a new file's name durable."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
