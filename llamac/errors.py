"""Every exception that llamac raises on purpose.

Each derives from `LlamacError` and from the built-in class that fits, so that callers can catch either.
The command line prints them as one line and turns them into its exit code.
"""

from __future__ import annotations


class LlamacError(Exception):
    """Base of all errors of this library."""


class ArgumentError(LlamacError, ValueError):
    """An argument is out of range, of the wrong form, or does not go with another one."""


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument is of a wrong type."""


class UnsupportedError(LlamacError, NotImplementedError):
    """The request is understood, but this version (or this machine) cannot do it."""


class ModelError(LlamacError, ValueError):
    """A model file is damaged, incomplete or not a llamac file."""


class TokenizerError(LlamacError, ValueError):
    """A tokenizer is damaged, of an unknown kind, or cannot be represented exactly."""


class ChatTemplateError(LlamacError, ValueError):
    """A chat template is wrong, refuses the messages, or takes more time or memory than it may."""


class ExportError(LlamacError, ValueError):
    """A checkpoint cannot be converted."""


class HubError(LlamacError, OSError):
    """A model on the Hugging Face Hub is not there, is not given, comes damaged, or cannot be reached."""


class ContextFullError(LlamacError, RuntimeError):
    """The request needs more positions than the context has."""


class OutOfMemoryError(LlamacError, MemoryError):
    """An allocation of the core failed; the message names its purpose and size."""


class BusyError(LlamacError, RuntimeError):
    """The session is being used by another thread."""


class ClosedError(LlamacError, RuntimeError):
    """The model or session has been closed."""


class CancelledError(LlamacError, RuntimeError):
    """A computation was cancelled. `done` positions of it were kept."""

    def __init__(self, message: str, done: int = 0) -> None:
        super().__init__(message)
        self.done = done
