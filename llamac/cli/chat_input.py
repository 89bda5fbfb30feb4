"""Reads the messages of `llamac chat`: with prompt_toolkit on a terminal, else line by line."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import sys
from collections.abc import Callable, Iterator, Sequence

from llamac.cli.prompt import decoded, not_text

CHECK_S = 0.1  # between two checks for a Ctrl-C that did not end a wait for input
QUOTES = '"""'
PROMPT, MORE = "> ", ". "
EXTRA = 'llamac: hint: `pip install "llamac[chat]"` adds Markdown, completion and an editor for several lines'

ReadLine = Callable[[str], str]  # raises EOFError at the end and KeyboardInterrupt at Ctrl-C


def has_editor() -> bool:
    """Whether both ends are terminals and prompt_toolkit is installed."""
    return is_interactive() and importlib.util.find_spec("prompt_toolkit") is not None


def is_interactive() -> bool:
    """Whether a person types the messages."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()


def read_message(read_line: ReadLine) -> str:
    """Read a message: a line, lines that end with a backslash and the next one, or lines between two lines of quotes.

    Raises:
        EOFError: If there is no further message.
    """
    line = read_line(PROMPT)
    if line.strip() == QUOTES:
        return "\n".join(_quoted(read_line))
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        try:
            lines.append(read_line(MORE))
        except EOFError:
            break
    return "\n".join(lines)


def _quoted(read_line: ReadLine) -> Iterator[str]:
    while True:
        try:
            line = read_line(MORE)
        except EOFError:
            return
        if line.strip() == QUOTES:
            return
        yield line


def piped_line(prompt: str) -> str:
    """Read a line of a pipe. Nothing is printed."""
    line = b"" if sys.stdin is None else sys.stdin.buffer.readline()
    if not line:
        raise EOFError
    return decoded(line, "a message").removesuffix("\n").removesuffix("\r")


def typed_line(prompt: str) -> str:
    """Read a line on a terminal. readline, where Python has it, gives it history and editing."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # importing it is enough
    with _signals_checked():
        try:
            return input(prompt)
        except UnicodeDecodeError as error:
            raise not_text(error, "a message") from None


@contextlib.contextmanager
def _signals_checked() -> Iterator[None]:
    """Make a wait for input notice a Ctrl-C that arrived just before it began: a timer interrupts the wait."""
    before = signal.signal(signal.SIGALRM, lambda number, frame: None)
    signal.setitimer(signal.ITIMER_REAL, CHECK_S, CHECK_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def make_editor(commands: Sequence[str]) -> ReadLine:
    """A line reader with history, completion of commands, and Alt-Enter for a line feed."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    def begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    keys.add("escape", "enter")(begin_line)
    session: PromptSession[str] = PromptSession(
        history=InMemoryHistory(),
        completer=WordCompleter(list(commands), sentence=True),
        complete_while_typing=False,
        key_bindings=keys,
        prompt_continuation=MORE,
    )
    return lambda prompt: session.prompt(prompt)
