"""Cancelling embeddings, rankings and scores from any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from llamac import _core
from llamac.errors import CancelledError
from llamac.interrupt import interruptible
from llamac.text.tokenizer import LONG_TEXT

if TYPE_CHECKING:
    from llamac.engine.session import Session

Result = TypeVar("Result")


class Cancellation:
    """Ends the computations that have it as their argument `cancel`. Any thread may use it.

    `Model.embed`, `rerank`, `score` and `perplexity` take one. It can end several computations, and also those that
    begin later.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._scopes: set[_core.CancelScope] = set()
        self._cancelled = False

    def cancel(self) -> None:
        """End the computations: each raises CancelledError in its thread, within 50 ms.

        A long text that is being tokenized is tokenized to its end in the background.
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
        """Raise CancelledError if `cancel` has been called. For work outside of the core, between two of its parts."""
        if self._cancelled:
            raise CancelledError("the computation was cancelled")

    def convert(self, task: Callable[[], Result], characters: int) -> Result:
        """Convert a text to token ids. Nothing stops that: `cancel` ends the wait, and the result is not used.

        The model may be closed while a conversion that nobody waits for goes on: it computes with the tokenizer and
        the chat template, which do not need the model's file any more. What it has not read of the file by then, it
        no longer finds (`ClosedError`, which nobody sees). The whole process converts `MAX_UNSTOPPABLE` long texts at
        a time, so calls that are given up leave no more threads than these; others wait, and can be cancelled.

        Args:
            task: Converts the text.
            characters: The length of the text. Short ones take no time that matters.

        Raises:
            CancelledError: After `cancel`.
        """
        self.check()
        return task() if characters < LONG_TEXT else interruptible(task, None, self.check)

    def run(self, session: Session, function: Callable[[], Result]) -> Result:
        """Call a function. `cancel` stops the evals of the session in it.

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
