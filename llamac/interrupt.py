"""Making long work interruptible by Ctrl-C.

Python runs signal handlers only in its main thread, and only between instructions; so work that may take long and was
called from the main thread is done by a helper thread while the main thread waits, ready for Ctrl-C.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

from llamac.errors import CancelledError

Result = TypeVar("Result")


def in_main_thread() -> bool:
    """Whether the caller is the thread that Ctrl-C interrupts."""
    return threading.current_thread() is threading.main_thread()


class _Helper:
    """A thread that does one work after another. It stays: a new one per pass would be put on a CPU where the core's
    threads compute, and cost a fifth of the speed (bench/LOG.md)."""

    def __init__(self) -> None:
        """RuntimeError where no more threads can be had."""
        self._works: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._serve, name="llamac-helper", daemon=True).start()

    def _serve(self) -> None:
        while work := self._works.get():
            work()
            del work  # it holds a session, and waiting for the next one may take for ever

    def begin(self, work: Callable[[], None]) -> None:
        self._works.put(work)

    def end(self) -> None:
        """After what it has begun, the thread ends."""
        self._works.put(None)


# Those that have nothing to do. More than one after a signal handler has computed, too.
_idle: list[_Helper] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)  # a child has no threads but its caller


def interruptible(work: Callable[[], Result], cancel: Callable[[], None] | None) -> Result:
    """Does work that lets other threads run, ready for Ctrl-C, and returns its result. For the main thread.

    cancel: makes the work end soon, which is waited for. Without it an interrupted work goes on unseen to its end.
    """
    results: list[Result] = []
    failures: list[BaseException] = []
    done = threading.Event()
    claim = threading.Lock()  # taken once: by the helper to begin, or by us to prevent that

    def claimed_work() -> None:
        if not claim.acquire(blocking=False):
            return
        try:
            results.append(work())
        except BaseException as error:
            failures.append(error)
        finally:
            done.set()

    helper: _Helper | None = None
    try:
        try:
            helper = _idle.pop() if _idle else _Helper()
            helper.begin(claimed_work)
        except RuntimeError:
            claimed_work()
        done.wait()
    except BaseException as interruption:
        if helper:
            helper.end()
        if claim.acquire(blocking=False) or cancel is None:
            raise
        # the helper may not have begun to heed it yet: ask until it is done
        while not done.wait(0.005):
            cancel()
        if failures and isinstance(failures[0], CancelledError):
            failures.clear()
        raise interruption from (failures[0] if failures else None)
    if helper:
        _idle.append(helper)
    if failures:
        raise failures[0]
    return results[0]
