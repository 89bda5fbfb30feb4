"""The command line's process: runs a command, prints its error, ends with its exit code (`llamac.exit_codes`)."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from llamac.cli.parser import load_command, make_parser, name_options
from llamac.exit_codes import ERROR, INTERRUPTED, OK, USAGE

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["export_main", "main", "make_parser", "run_command"]

SECONDS_TO_RAISE_AGAIN = 0.01  # after which a destructor has usually returned


def main(begin: Callable[[], object] = lambda: None) -> NoReturn:
    """Run the command in `sys.argv` and exit.

    Args:
        begin: Called once everything is imported, before the command starts its work.
    """
    _exit_with(lambda: run_command(sys.argv[1:], begin=begin))


def export_main(begin: Callable[[], object] = lambda: None) -> NoReturn:
    """Run `llamac-export`, which is `llamac export` under its own name."""
    _exit_with(lambda: run_command(["export", *sys.argv[1:]], program="llamac-export", begin=begin))


def run_command(arguments: Sequence[str], program: str = "llamac", begin: Callable[[], object] = lambda: None) -> int:
    """Run a command and return its exit code. Errors of the library and of the system become one line on stderr."""
    from llamac.errors import NO_OPENMP, ArgumentError, LlamacError, lacks_openmp

    code = OK
    names: dict[str, str] = {}
    try:
        arguments = arguments or ["--help"]
        try:
            options = make_parser(arguments, program).parse_args(arguments)
        except SystemExit:  # after the help or the version
            sys.stdout.flush()
            raise
        names = options.option_names
        command = load_command(options.command)
        begin()
        code = command.run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:  # the reader has seen enough, as `| head` does
        pass
    except (LlamacError, OSError, MemoryError, UnicodeError) as error:
        from llamac.cli.text import error_text, safe_error

        code = USAGE if isinstance(error, ArgumentError) else ERROR
        _flush_or_drop()
        shown = name_options(error_text(error), names) if isinstance(error, LlamacError) else error_text(error)
        print(f"llamac: error: {safe_error(shown)}", file=sys.stderr)
    except ImportError as error:
        if not lacks_openmp(error):
            raise
        code = ERROR
        print(f"llamac: error: {NO_OPENMP}", file=sys.stderr)
    finally:
        _flush_or_drop()
    return code


class _StandardOutput(io.FileIO):
    """Standard output, which its errors name."""

    def write(self, data: Buffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            error.filename = "standard output"
            raise


class _Terminated(BaseException):
    """A signal asked the process to end. Unwinding the stack removes half-written files."""

    def __init__(self, number: int) -> None:
        self.number = number


def _exit_with(command: Callable[[], int]) -> NoReturn:
    """Run a command and exit with its code, or by the signal that ended it."""

    def terminate(number: int, _: object) -> NoReturn:
        signal.signal(number, signal.SIG_DFL)  # a second one ends the process at once
        raise _Terminated(number)

    def raise_again(dropped: sys.UnraisableHookArgs) -> None:
        # Python drops what is raised in destructors and callbacks, also by a signal, which would then have no effect
        if isinstance(dropped.exc_value, _Terminated):
            number = dropped.exc_value.number
            signal.signal(number, terminate)
        elif isinstance(dropped.exc_value, KeyboardInterrupt):
            number = signal.SIGINT
        else:
            sys.__unraisablehook__(dropped)
            return
        timer = threading.Timer(SECONDS_TO_RAISE_AGAIN, os.kill, (os.getpid(), number))
        timer.daemon = True  # does not delay the end of the process
        timer.start()

    sys.unraisablehook = raise_again
    for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup sets SIGHUP to SIG_IGN
            signal.signal(number, terminate)
    _prepare_output()
    try:
        sys.exit(command())
    except _Terminated as terminated:
        os.kill(os.getpid(), terminated.number)
        sys.exit(128 + terminated.number)  # reached only if the signal is blocked


def _prepare_output() -> None:
    """Open closed streams on the null device, and write characters that the encoding lacks as question marks."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # stays open until the process ends
    if isinstance(sys.stdout, io.TextIOWrapper):
        if sys.stdout is sys.__stdout__:
            sys.stdout = _naming_its_errors(sys.stdout)
        # bytes of file names that are not UTF-8 are written unchanged
        sys.stdout.reconfigure(errors="surrogateescape" if sys.stdout.encoding.lower() == "utf-8" else "replace")


def _naming_its_errors(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """Return standard output with the same settings, but with errors that name it."""
    binary = stream.buffer
    if not isinstance(binary.raw if isinstance(binary, io.BufferedWriter) else binary, io.FileIO):
        return stream  # a console of Windows
    with contextlib.suppress(OSError):  # the next write reports it
        stream.flush()  # what a program has printed before it calls `main` comes first
    raw = _StandardOutput(stream.fileno(), "wb", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw) if isinstance(binary, io.BufferedWriter) else raw,
        encoding=stream.encoding,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _flush_or_drop() -> None:
    """Write buffered output. Without a reader or without disk space drop it, or every later flush fails again."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
