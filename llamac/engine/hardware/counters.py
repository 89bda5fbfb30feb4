"""Counters of the processor through perf_event_open(2): cycles, instructions, misses of the last cache."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Callable

SYSCALL = {"x86_64": 298, "aarch64": 241, "riscv64": 241}  # perf_event_open
# The name of each counter and its number among the generalized hardware events (PERF_TYPE_HARDWARE).
EVENTS = {"cycles": 0, "instructions": 1, "LLC misses": 3}
# struct perf_event_attr, version 0: type, size, config, sample_period, sample_type, read_format, flags, three more
ATTRIBUTES = "<IIQQQQQIIQ"
DISABLED, INHERIT, EXCLUDE_KERNEL, EXCLUDE_HYPERVISOR = 1 << 0, 1 << 1, 1 << 5, 1 << 6
ENABLE = 0x2400  # PERF_EVENT_IOC_ENABLE
CLOSE_ON_EXEC = 8  # PERF_FLAG_FD_CLOEXEC
PARANOID = "/proc/sys/kernel/perf_event_paranoid"

Open = Callable[[bytes], int]
"""Opens a counter with these attributes. Returns its file descriptor. Raises OSError."""


def perf_event_open(attributes: bytes) -> int:
    """Open a counter of this process, on any processor."""
    number = SYSCALL.get(platform.machine())
    if number is None or not os.path.exists(PARANOID):
        raise OSError(0, "this system has no perf_event_open")
    library = ctypes.CDLL(None, use_errno=True)
    library.syscall.restype = ctypes.c_long
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    arguments = (ctypes.c_long(0), ctypes.c_long(-1), ctypes.c_long(-1), ctypes.c_long(CLOSE_ON_EXEC))
    found = int(library.syscall(ctypes.c_long(number), buffer, *arguments))
    if found < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return found


class Counters:
    """Counts what this thread, and the threads that it creates from now on, execute in user space.

    Attributes:
        problem: Why there are no counters, or None.

    Args:
        open_event: Opens a counter.
    """

    def __init__(self, open_event: Open = perf_event_open) -> None:
        self.problem: str | None = None
        self._files: dict[str, int] = {}
        flags = DISABLED | INHERIT | EXCLUDE_KERNEL | EXCLUDE_HYPERVISOR
        for name, config in EVENTS.items():
            attributes = struct.pack(ATTRIBUTES, 0, struct.calcsize(ATTRIBUTES), config, 0, 0, 0, flags, 0, 0, 0)
            try:
                self._files[name] = open_event(attributes)
            except OSError as error:
                self.problem = self.problem or f"{error.strerror}{_advice(error.errno)}"

    def start(self) -> None:
        """Begin to count."""
        import fcntl

        for file in self._files.values():
            fcntl.ioctl(file, ENABLE, 0)

    def read(self) -> dict[str, int]:
        """The counts since `start`, by name. Counters that the machine lacks are missing."""
        return {name: struct.unpack("<Q", os.read(file, 8))[0] for name, file in self._files.items()}

    def close(self) -> None:
        """Stop counting."""
        while self._files:
            os.close(self._files.popitem()[1])


def _advice(code: int | None) -> str:
    import errno

    if code in (errno.EACCES, errno.EPERM):
        return f": the system forbids it; {PARANOID} must be at most 2, and containers must allow the system call"
    if code in (errno.ENOENT, errno.EOPNOTSUPP, errno.ENODEV):
        return ": this machine, or the virtual machine, has no hardware counters"
    return ""
