"""The exceptions and the warning of this library.

Each exception derives from `LlamacError` and from the built-in class that fits; callers can catch either.
"""

from __future__ import annotations

import sys
import warnings

NO_OPENMP = (
    "llamac's core needs libgomp, the library of OpenMP, and this system lacks it: install it with "
    "`apt install libgomp1` (Debian, Ubuntu), `dnf install libgomp` (Fedora, RHEL) or `apk add libgomp` (Alpine)"
)


def lacks_openmp(error: ImportError) -> bool:
    """Whether the core could not be imported because the system lacks the library of OpenMP."""
    return "libgomp" in str(error)


class LlamacError(Exception):
    """Base of all errors of this library."""


class ArgumentError(LlamacError, ValueError):
    """An argument is out of range, malformed, or conflicts with another one."""


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument has the wrong type."""


class UnsupportedError(LlamacError, NotImplementedError):
    """The request is understood, but this version or this machine cannot do it."""


class ModelError(LlamacError, ValueError):
    """A model file is damaged, incomplete or of another kind."""


class TokenizerError(LlamacError, ValueError):
    """A tokenizer is damaged, of an unknown kind, or cannot be represented exactly."""


class ChatTemplateError(LlamacError, ValueError):
    """A chat template is wrong, refuses the messages, or exceeds its time or memory limit."""


class ExportError(LlamacError, ValueError):
    """A checkpoint cannot be converted."""


class HubError(LlamacError, OSError):
    """A model on the Hugging Face Hub does not exist, is not accessible, arrives damaged, or cannot be reached."""


class SessionFileError(LlamacError, ValueError):
    """A session file is damaged, or belongs to another model or another kind of session."""


class ContextFullError(LlamacError, RuntimeError):
    """The request needs more positions than the context has."""


class OutOfMemoryError(LlamacError, MemoryError):
    """An allocation failed or would fail. The message names its purpose and size."""


class DeviceError(LlamacError, RuntimeError):
    """A graphics processor failed. The message says what to do.

    Attributes:
        lost: Whether this process can no longer use its graphics processors.
    """

    def __init__(self, message: str, lost: bool = False) -> None:
        super().__init__(message)
        self.lost = lost


class BusyError(LlamacError, RuntimeError):
    """Another thread is using the session or stream, or an engine's thread would wait for itself."""


class QueueFullError(LlamacError, RuntimeError):
    """An engine has as many waiting requests as it allows."""


class ClosedError(LlamacError, RuntimeError):
    """The model, session, stream or engine has been closed, or the engine belongs to another process."""


class CancelledError(LlamacError, RuntimeError):
    """A computation was cancelled.

    Attributes:
        done: Positions that were computed and kept.
    """

    def __init__(self, message: str, done: int = 0) -> None:
        super().__init__(message)
        self.done = done


def wrapped(failure: BaseException, what: str) -> LlamacError:
    """An exception as an error of this library; itself if it is one.

    Args:
        failure: The exception. Panics of Rust's libraries do not derive from Exception.
        what: What failed.
    """
    if isinstance(failure, LlamacError):
        return failure
    text = f"{what} failed: {type(failure).__name__}: {failure}"
    error = OutOfMemoryError(text) if isinstance(failure, MemoryError) else LlamacError(text)
    error.__cause__ = failure
    return error


class LlamacWarning(UserWarning):
    """The category of every warning of this library."""


def warn(message: str) -> None:
    """Issue a `LlamacWarning` that points to the code that called into this library."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "llamac":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, LlamacWarning, stacklevel=level)
