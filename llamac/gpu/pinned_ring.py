"""Copies between the host and a CUDA device, through pinned memory that the device reads while the host writes.

CUDA copies other memory, such as a mapped file, at a fraction of the speed, or not at all.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

from llamac.gpu.cupy_modules import Runtime

CAPACITY = 64 << 20
PIECE = 8 << 20  # of a large copy; the ring has room for more than COPIERS of them
COPIERS = 3  # threads that copy into the ring at the same time: one reads page cache at 5 to 10 GB/s
SMALLEST_PIECE = 1 << 20  # of a download that several threads share
ALIGNMENT = 256


class _Part(NamedTuple):
    """Part of the ring that a copy of the device uses until its event."""

    start: int  # counts the bytes since the ring began
    event: int


class PinnedRing:
    """A ring of pinned memory for one stream.

    Args:
        runtime: CuPy's module.
        stream: The stream of the copies.
        enter: Makes the stream's context the current one of the ring's threads.
    """

    def __init__(self, runtime: Runtime, stream: int, enter: Callable[[], None]) -> None:
        self._runtime = runtime
        self._stream = stream
        self._enter = enter
        self._memory = runtime.hostAlloc(CAPACITY, 0)
        self._end = 0  # counts bytes like _Part.start
        self._parts: deque[_Part] = deque()  # that the device may still use
        self._events: list[int] = []  # free ones
        self._copiers = ThreadPoolExecutor(COPIERS, thread_name_prefix="llamac-upload")

    def upload(self, address: int, source: int, size: int) -> None:
        """Copy `size` bytes at `source` to the device. They may change when this returns."""
        copying: deque[tuple[Future[int], int, int, int]] = deque()
        try:
            for done in range(0, size, PIECE):
                if len(copying) == COPIERS:
                    self._send(*copying.popleft())
                start, length = self._take(min(PIECE, size - done)), min(PIECE, size - done)
                if size <= PIECE:
                    ctypes.memmove(self._at(start), source, size)
                    self._send(None, start, address, size)
                else:
                    task = self._copiers.submit(ctypes.memmove, self._at(start), source + done, length)
                    copying.append((task, start, address + done, length))
            while copying:
                self._send(*copying.popleft())
        finally:  # after a failure: the source may be gone when this returns
            wait([task for task, *_ in copying])

    def download(self, address: int, to: int, size: int) -> None:
        """Copy `size` bytes of the device to `to`, where they are when this returns."""
        runtime = self._runtime
        piece = min(PIECE, max(SMALLEST_PIECE, size // COPIERS))
        if size <= piece:
            at = self._at(self._take(size))
            runtime.memcpyAsync(at, address, size, runtime.memcpyDeviceToHost, self._stream)
            runtime.streamSynchronize(self._stream)
            self._forget_parts()
            ctypes.memmove(to, at, size)
            return
        copying: deque[Future[None]] = deque()  # out of the ring, while the device copies into it
        try:
            for done in range(0, size, piece):
                if len(copying) == COPIERS:  # the ring has room for more, so no part is overwritten
                    copying.popleft().result()
                length = min(piece, size - done)
                at = self._at(self._take(length))
                runtime.memcpyAsync(at, address + done, length, runtime.memcpyDeviceToHost, self._stream)
                event = self._event()
                runtime.eventRecord(event, self._stream)
                copying.append(self._copiers.submit(self._receive, event, to + done, at, length))
            while copying:
                copying.popleft().result()
            self._forget_parts()
        finally:  # after a failure: the destination may be gone when this returns
            wait(copying)

    def _receive(self, event: int, to: int, at: int, size: int) -> None:
        """Copy part of the ring to the host once an event has happened."""
        try:
            self._enter()
            self._runtime.eventSynchronize(event)
        finally:
            self._events.append(event)
        ctypes.memmove(to, at, size)

    def close(self, free: Callable[[Callable[[int], None], int], None]) -> None:
        """End the threads, and free the memory, after the stream's operations.

        Args:
            free: Calls a function that frees something, and ignores its errors.
        """
        self._copiers.shutdown()
        for event in [*self._events, *(part.event for part in self._parts)]:
            free(self._runtime.eventDestroy, event)
        free(self._runtime.freeHost, self._memory)

    def _at(self, start: int) -> int:
        return self._memory + start % CAPACITY

    def _take(self, size: int) -> int:
        """Room for a copy: waits for the copies that used it before."""
        start = self._end
        if start % CAPACITY + size > CAPACITY:  # does not fit before the end: wraps around
            start += CAPACITY - start % CAPACITY
        self._end = start + -(-size // ALIGNMENT) * ALIGNMENT
        while self._parts and self._end - self._parts[0].start > CAPACITY:
            self._wait_for_oldest()
        return start

    def _send(self, copied: Future[int] | None, start: int, address: int, size: int) -> None:
        """Copy part of the ring to the device."""
        if copied is not None:
            copied.result()
        runtime = self._runtime
        runtime.memcpyAsync(address, self._at(start), size, runtime.memcpyHostToDevice, self._stream)
        event = self._event()
        self._parts.append(_Part(start, event))
        runtime.eventRecord(event, self._stream)

    def _event(self) -> int:
        runtime = self._runtime
        return self._events.pop() if self._events else runtime.eventCreateWithFlags(runtime.eventDisableTiming)

    def _forget_parts(self) -> None:
        """Reuse the events of the copies so far, which the device has done."""
        self._events += (part.event for part in self._parts)
        self._parts.clear()

    def _wait_for_oldest(self) -> None:
        part = self._parts.popleft()
        self._events.append(part.event)
        self._runtime.eventSynchronize(part.event)
