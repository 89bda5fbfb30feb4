"""Separate Python processes for computations that untrusted input controls, with limits on memory and time.

A `Worker` runs a module of this package in its own process (worker_main.py). It serves all threads, one request at a
time. The first request starts it; it ends with the `Worker` object or with this process.
"""

from __future__ import annotations

import contextlib
import errno
import marshal
import os
import select
import shutil
import struct
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from llamac.errors import LlamacError, UnsupportedError

STARTING = 60.0  # time limit for starting a process, in seconds
PROGRAM = Path(__file__).with_name("worker_main.py")
# After these errors it is pointless to try another interpreter.
_EXHAUSTED = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


class Worker:
    """A process that answers requests with a module (worker_main.py). Any thread can use it."""

    def __init__(self, module: str, subject: str, error: type[LlamacError], setup: Any = None) -> None:
        """
        Args:
            module: The module's name.
            subject: The untrusted input's name in error messages, such as "the chat template".
            error: The class of errors that the input causes.
            setup: The argument of the module's `prepare`, plain data.
        """
        self._subject = subject
        self._error = error
        self._module, self._setup = module, setup
        self._lock = threading.Lock()
        self._process = _Process()
        weakref.finalize(self, self._process.stop)
        _workers.add(self)

    def ask(self, request: Any, seconds: float, max_bytes: int) -> bytes:
        """Send a request and return the answer.

        Args:
            request: Plain data.
            seconds: Time limit. A process that exceeds it is killed.
            max_bytes: Size limit of the answer.

        Raises:
            LlamacError: Of the class `error`, if the process took too long, ended, or sent too long an answer.
            UnsupportedError: If no Python interpreter was found for the process.
        """
        with self._lock:
            try:
                if not self._process.is_alive():
                    self._start()
                return self._exchange(_frame((seconds, request)), seconds, max_bytes)
            except BaseException:  # also Ctrl-C: the next request must not get this answer
                self._process.stop()
                raise

    def stop(self) -> None:
        """Kill the process. The next request starts another one."""
        with self._lock:
            self._process.stop()

    @property
    def child(self) -> subprocess.Popen[bytes] | None:
        """The running process, or None."""
        return self._process.child

    def bad_answer(self) -> LlamacError:
        """The error for a malformed answer."""
        return self._error(f"the process of {self._subject} sent a malformed answer")

    def _exchange(self, frame: bytes, seconds: float, max_bytes: int) -> bytes:
        until = time.monotonic() + seconds
        try:
            self._process.write(frame, until)
            (size,) = struct.unpack("<Q", self._process.read(8, until))
            if size > max_bytes:
                raise self.bad_answer()
            return self._process.read(size, until)
        except TimeoutError:
            raise self._error(f"{self._subject} took more than {seconds:g} seconds: it was stopped") from None
        except EOFError:
            raise self._error(
                f"{self._subject} ended its process: it needs too much memory or is nested too deeply"
            ) from None

    def _start(self) -> None:
        """Start the process with the first interpreter that works."""
        failures = []
        version = ".".join(map(str, sys.version_info[:2]))
        for program in _interpreters():
            self._process.stop()
            try:
                self._process.start(program)
                first = _frame(([entry for entry in sys.path if entry], self._module, self._setup))
                answer = self._exchange(first, STARTING, 100).decode(errors="replace")
                if answer == version:
                    return
                failures.append(f"{program}: it is another version of Python, {answer!r}")
            except self._error:
                child = self._process.child
                self._process.stop()
                failures.append(f"{program}: it ended or did not answer (exit code {child and child.returncode})")
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    raise self._error(
                        f"{self._subject} needs a separate process, which cannot be started: {error}"
                    ) from None
                failures.append(f"{program}: {error.strerror}")
        raise UnsupportedError(
            f"{self._subject} needs a separate Python {version} process, which cannot be started"
            f" ({'; '.join(failures) or f'sys.executable is {sys.executable!r}'}):"
            " set sys.executable to the path of the interpreter, and check the memory limit (ulimit -v)"
        )


class _Process:
    """The process of a worker, if it is running, and the pipes to it."""

    def __init__(self) -> None:
        self.child: subprocess.Popen[bytes] | None = None
        _processes.add(self)

    def start(self, program: str) -> None:
        self.child = subprocess.Popen(
            [program, "-I", "-S", str(PROGRAM)],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C must interrupt only this process
        )
        assert self.child.stdin is not None
        os.set_blocking(self.child.stdin.fileno(), False)

    def is_alive(self) -> bool:
        return self.child is not None and self.child.poll() is None

    def write(self, data: bytes, until: float) -> None:
        """Write to the process. Raises TimeoutError after `until`, EOFError if the process has ended."""
        assert self.child is not None
        assert self.child.stdin is not None
        pipe, rest = self.child.stdin.fileno(), memoryview(data)
        poll = select.poll()
        poll.register(pipe, select.POLLOUT)
        while rest:
            _wait(poll, until)
            try:
                rest = rest[os.write(pipe, rest[: 1 << 20]) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise EOFError from None

    def read(self, size: int, until: float) -> bytes:
        """Read `size` bytes. Raises TimeoutError after `until`, EOFError if the process has ended."""
        assert self.child is not None
        assert self.child.stdout is not None
        pipe, data = self.child.stdout.fileno(), bytearray()
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        while len(data) < size:
            _wait(poll, until)
            part = os.read(pipe, min(size - len(data), 1 << 20))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    def stop(self) -> None:
        if self.child is not None:
            self.child.kill()
            self.child.wait()
            self.forget()

    def forget(self) -> None:
        """Close the pipes without ending the process."""
        if self.child is not None:
            for pipe in (self.child.stdin, self.child.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        self.child = None


def _wait(poll: select.poll, until: float) -> None:
    left = until - time.monotonic()
    if left <= 0 or not poll.poll(left * 1000):
        raise TimeoutError


def _frame(content: Any) -> bytes:
    data = marshal.dumps(content)
    return struct.pack("<Q", len(data)) + data


# ---- interpreters


def _interpreters() -> list[str]:
    """Paths where the interpreter of this Python may be.

    In an embedded Python, `sys.executable` can be empty or another program. Starting that program could do anything, so
    only files with an interpreter's name count.
    """
    name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    folders = [os.path.join(prefix, "bin") for prefix in (sys.prefix, sys.exec_prefix, sys.base_prefix)]
    found = [sys.executable or "", *(os.path.join(folder, file) for folder in folders for file in (name, "python3"))]
    found.append(shutil.which(name) or "")
    return [path for path in dict.fromkeys(found) if _is_interpreter(path)]


def _is_interpreter(path: str) -> bool:
    name = os.path.basename(path)
    return ("python" in name or "pypy" in name) and os.path.isfile(path) and os.access(path, os.X_OK)


# ---- fork

_workers: weakref.WeakSet[Worker] = weakref.WeakSet()
_processes: weakref.WeakSet[_Process] = weakref.WeakSet()


def _after_fork() -> None:
    """Make a forked child start its own processes: those of the parent answer the parent."""
    for worker in _workers:
        worker._lock = threading.Lock()
    for process in _processes:
        if process.child is not None:
            process.child.returncode = 0  # it is not a child of this process
        process.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
