"""Cancelling embeddings, rankings and scores from any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from llamac import _core
from llamac.arguments import wrong_type
from llamac.errors import CancelledError
from llamac.interrupt import interruptible
from llamac.text.tokenizer import LONG_TEXT

if TYPE_CHECKING:
    from llamac.engine.session import Session

Result = TypeVar("Result")


class Cancellation:
    """Cancels the computations that received it as their argument `cancel`. Any thread may use it.

    `Model.embed`, `rerank`, `score` and `perplexity` accept one. It can cancel several computations, including those
    that begin later.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._scopes: set[_core.CancelScope] = set()
        self._cancelled = False

    def cancel(self) -> None:
        """Cancel the computations: each raises CancelledError in its thread within 50 ms.

        If a long text is being tokenized, the tokenization continues in the background.
        """
        with self._lock:
            self._cancelled = True
            for scope in self._scopes:
                scope.cancel()

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` has been called."""
        return self._cancelled

    def check(self) -> None:
        """Raise CancelledError if `cancel` has been called. For checks between parts of work outside the core."""
        if self._cancelled:
            raise CancelledError("the computation was cancelled")

    def convert(self, task: Callable[[], Result], characters: int) -> Result:
        """Convert a text to token ids. The conversion itself cannot be stopped: `cancel` only ends the wait for it.

        The model may be closed while an abandoned conversion continues. The conversion uses the tokenizer and the chat
        template, which no longer need the model's file. If it still has to read the file, it fails with a
        `ClosedError` that is ignored. A process converts at most `MAX_UNSTOPPABLE` long texts at a time, which bounds
        the number of threads of abandoned conversions. Further ones wait, and can be cancelled while they wait.

        Args:
            task: Converts the text.
            characters: The length of the text. Short texts are converted directly.

        Raises:
            CancelledError: After `cancel`.
        """
        self.check()
        return task() if characters < LONG_TEXT else interruptible(task, None, self.check)

    def run(self, session: Session, function: Callable[[], Result]) -> Result:
        """Call a function. `cancel` stops the session's evals in it.

        Raises:
            CancelledError: After `cancel`.
        """
        scope = _core.CancelScope(session._core)
        with self._lock:
            self.check()
            self._scopes.add(scope)
        try:
            return scope.run(function)
        finally:
            with self._lock:
                self._scopes.discard(scope)


def cancellation(cancel: Cancellation | None) -> Cancellation:
    """The object for an argument `cancel`: a new one, which nobody cancels, for None."""
    if cancel is not None and not isinstance(cancel, Cancellation):
        raise wrong_type("cancel", cancel, "a llamac.Cancellation")
    return cancel or Cancellation()
