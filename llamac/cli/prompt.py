"""The prompt of `llamac run`: from -i, from -f, from standard input, or from -i followed by standard input."""

from __future__ import annotations

import argparse
import os
import select
import stat
import sys
from typing import BinaryIO, TextIO

from llamac.engine.model import Model
from llamac.errors import ContextFullError

# Bytes of a prompt that are read before its length is compared with the context.
PROMPT_BYTES = 1 << 20
CUT_BYTES = 64 << 20  # most bytes of a prompt that may be cut to fit the context
# Seconds that -i waits for the first byte of a pipe. A program can inherit a pipe that nobody writes to or closes.
PIPE_WAIT = 10.0


def read_prompt(options: argparse.Namespace, model: Model, context: int) -> str:
    """Read the whole prompt; empty if there is none.

    -i and standard input are joined by a blank line. One line feed at the end of a file or of standard input is
    dropped.

    Raises:
        UnicodeError: If the text is not UTF-8.
        ContextFullError: If it is longer than any prompt that fits the context.
    """
    given = None if options.prompt is None else _argument(options.prompt)
    most = None if options.context_overflow in (None, "error") else CUT_BYTES
    if options.file not in (None, "-"):
        with open(options.file, "rb") as file:
            return _decode_file(_read(file, options.file, model, context, most), options.file)
    if sys.stdin is None or not (options.file == "-" or _is_readable(sys.stdin, given is not None)):
        return given or ""
    piped = _decode_file(_read(sys.stdin.buffer, "standard input", model, context, most), "standard input")
    return "\n\n".join(part for part in (given, piped) if part)


def _is_readable(stream: TextIO, after_prompt: bool) -> bool:
    """Whether standard input belongs to the prompt. after_prompt: whether -i was given.

    A terminal never does. After -i only a pipe, a socket or a file does, and an idle pipe does not.
    """
    if stream.isatty():
        return False
    try:
        number = stream.fileno()
    except OSError:  # not a file of the system
        return True
    mode = os.fstat(number).st_mode
    if not after_prompt or stat.S_ISREG(mode):
        return True
    if not stat.S_ISFIFO(mode) and not stat.S_ISSOCK(mode):
        return False
    if select.select([number], [], [], PIPE_WAIT)[0]:
        return True
    print(
        f"llamac: warning: ignored standard input, a pipe that sent nothing for {PIPE_WAIT:g} s; `-f -` waits for it, "
        "`</dev/null` skips it at once",
        file=sys.stderr,
    )
    return False


def _read(file: BinaryIO, name: str, model: Model, context: int, most: int | None = None) -> bytes:
    """Read a file that may never end: stop when it is longer than any prompt that fits the context, or than `most`."""
    data = file.read(PROMPT_BYTES + 1)
    if len(data) > PROMPT_BYTES:
        tokenizer = model.tokenizer
        longest = max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.n_ids)) if most is None else 0
        limit = max(PROMPT_BYTES, context * longest, most or 0)
        data += file.read(limit + 1 - len(data))
        if len(data) > limit and most is not None:
            raise ContextFullError(f"{name} has more than {limit} bytes, the most that is read to be cut: shorten it")
        if len(data) > limit:
            raise ContextFullError(
                f"{name} has more than {limit} bytes: no prompt of this length fits the context of {context} positions"
            )
    return data


def _argument(text: str) -> str:
    """Check -i, in which Python represents bytes that are not UTF-8 by surrogates."""
    return decoded(text.encode("utf-8", "surrogateescape"), "the prompt of -i")


def _decode_file(data: bytes, name: str) -> str:
    return decoded(data, name).removesuffix("\n")


def decoded(data: bytes, name: str) -> str:
    """Decode text.

    Raises:
        UnicodeError: If it is not UTF-8. The message has the name.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise not_text(error, name) from None


def not_text(error: UnicodeDecodeError, name: str) -> UnicodeError:
    """Return the error for a text with this name that is not UTF-8."""
    return UnicodeError(f"{name} is not UTF-8 text: byte {error.start} is 0x{error.object[error.start]:02x}")
