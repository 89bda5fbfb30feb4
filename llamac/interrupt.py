"""Makes long computations interruptible, by Ctrl-C and by other threads.

Python runs signal handlers only in its main thread and only between instructions. A computation that can take long and
was called from the main thread therefore runs in a helper thread while the main thread waits. So does what an open
model does with a device, between whose calls no signal handler must run. A computation that nothing can stop runs in a
helper thread whichever thread calls it: an interruption then ends only the wait for it. A few threads run all
computations of this kind, which bounds the number of those that nobody still waits for.
"""

from __future__ import annotations

import contextvars
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

from llamac.errors import CancelledError

Result = TypeVar("Result")

# A signal that arrives just before its thread begins to wait does not end the wait. So waits are no longer than this.
WAIT_S = 0.04

MAX_UNSTOPPABLE = 4  # tasks that nothing can stop and that run at a time, in the whole process; others wait


def in_main_thread() -> bool:
    """Whether the caller runs in the thread that Ctrl-C interrupts."""
    return threading.current_thread() is threading.main_thread()


class _Helper:
    """One thread, or several, that run tasks in their order.

    It is reused: the system would often start a new thread on a CPU where the core's threads compute, at the cost of a
    fifth of the speed (bench/LOG.md).
    """

    def __init__(self, most_threads: int = 1) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._most_threads = most_threads
        self._n_threads = 0
        self._lock = threading.RLock()  # a signal handler can begin a task, too

    def _serve(self) -> None:
        while task := self._tasks.get():
            task()
            del task  # it refers to a session, and the next task may never come

    def begin(self, task: Callable[[], None]) -> None:
        """Queue a task. Raises RuntimeError if the system refuses even the first thread."""
        with self._lock:
            if self._n_threads < self._most_threads:
                try:
                    threading.Thread(target=self._serve, name="llamac-helper", daemon=True).start()
                    self._n_threads += 1
                except RuntimeError:
                    if not self._n_threads:
                        raise
        self._tasks.put(task)

    def end(self) -> None:
        """Make the threads end after the tasks in the queue."""
        for _ in range(self._most_threads):
            self._tasks.put(None)


# Usually at most one. There are more after several threads, or a signal handler, have computed at the same time.
_idle: list[_Helper] = []
_unstoppable = _Helper(MAX_UNSTOPPABLE)


def _forget_threads() -> None:
    """Begin with no helper threads in a child process: they do not survive a fork."""
    global _unstoppable
    _idle.clear()
    _unstoppable = _Helper(MAX_UNSTOPPABLE)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


def _idle_helper() -> _Helper:
    try:
        return _idle.pop()
    except IndexError:
        return _Helper()


def interruptible(
    task: Callable[[], Result], cancel: Callable[[], None] | None, check: Callable[[], None] = lambda: None
) -> Result:
    """Run a task so that Ctrl-C, in the main thread, can interrupt it.

    The task sees the caller's context variables.

    Args:
        task: The task. It must release the GIL.
        cancel: Makes the task end soon; an interruption waits for that. None: an interrupted task runs to its end in
            the background, unless it still waits for others of its kind. It must not begin another one itself.
        check: Raises an error to interrupt the task, like Ctrl-C. It is called every `WAIT_S` seconds.

    Returns:
        The task's result. Exceptions of the task and of `check`, and KeyboardInterrupt, are raised.
    """
    results: list[Result] = []
    failures: list[BaseException] = []
    done = threading.Event()
    claim = threading.Lock()  # acquired once: by the helper to begin the task, or by an interruption to prevent that
    context = contextvars.copy_context()
    work = [task]  # empty after either: what is still queued then keeps nothing alive

    def run_once() -> None:
        if not claim.acquire(blocking=False):
            return
        try:
            results.append(context.run(work.pop()))
        except BaseException as error:
            failures.append(error)
        finally:
            done.set()

    helper: _Helper | None = None
    try:
        try:
            helper = _unstoppable if cancel is None else _idle_helper()
            helper.begin(run_once)
        except RuntimeError:
            run_once()
        while not done.wait(WAIT_S):
            check()
    except BaseException as interruption:
        if helper and cancel is not None:
            helper.end()
        if claim.acquire(blocking=False):
            work.clear()
            raise
        if cancel is None:
            raise
        # the task may not react to `cancel` yet, so repeat it
        while not done.wait(0.005):
            cancel()
        if failures and isinstance(failures[0], CancelledError):
            failures.clear()
        raise interruption from (failures[0] if failures else None)
    if helper and cancel is not None:
        _idle.append(helper)
    if failures:
        raise failures[0]
    return results[0]
