"""Making long work interruptible by Ctrl-C.

Python runs signal handlers only in its main thread, and only between instructions; so work that may take long and was
called from the main thread is done by a helper thread while the main thread waits, ready for Ctrl-C.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from llamac.errors import CancelledError

Result = TypeVar("Result")


def in_main_thread() -> bool:
    """Whether the caller is the thread that Ctrl-C interrupts."""
    return threading.current_thread() is threading.main_thread()


def interruptible(work: Callable[[], Result], cancel: Callable[[], None] | None) -> Result:
    """Does work that lets other threads run, ready for Ctrl-C, and returns its result. For the main thread.

    cancel: makes the work end soon, which is waited for. Without it an interrupted work goes on unseen to its end.
    """
    results: list[Result] = []
    failures: list[BaseException] = []
    done = threading.Event()
    claim = threading.Lock()  # taken once: by the helper to begin, or by us to prevent that

    def helper() -> None:
        if not claim.acquire(blocking=False):
            return
        try:
            results.append(work())
        except BaseException as error:
            failures.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=helper, name="llamac-helper", daemon=True)
    try:
        try:
            thread.start()
        except RuntimeError:  # no more threads can be had
            helper()
        done.wait()
    except BaseException as interruption:
        if claim.acquire(blocking=False) or cancel is None:
            raise
        # the helper may not have begun to heed it yet: ask until it has gone
        while not done.wait(0.005):
            cancel()
        if failures and isinstance(failures[0], CancelledError):
            failures.clear()
        raise interruption from (failures[0] if failures else None)
    if thread.ident is not None:
        thread.join()  # it has nothing left to do: whoever looks at the threads now shall not find it
    if failures:
        raise failures[0]
    return results[0]
