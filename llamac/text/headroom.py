"""Checks for enough memory before calling a library that aborts the process if an allocation fails.

The library tokenizers is written in Rust, where a failed allocation ends the process. Allocations fail only if the
process has a limit (RLIMIT_AS, RLIMIT_DATA); otherwise the system overcommits memory.
"""

from __future__ import annotations

import contextlib
import mmap

from llamac.errors import OutOfMemoryError


def require_memory(size: int, purpose: str) -> None:
    """Check that the process's limits leave enough memory.

    Args:
        size: The number of bytes.
        purpose: What needs them, for the error message.

    Raises:
        OutOfMemoryError: If the limits do not leave `size` bytes.
    """
    if _is_limited() and not _can_map(size):
        raise OutOfMemoryError(
            f"{purpose} needs about {-(-size >> 20)} MiB of memory, which the limits of this process do not leave: "
            "raise them (ulimit -v, ulimit -d)"
        )


def _is_limited() -> bool:
    try:
        import resource
    except ImportError:
        return False
    limits = (resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0] for name in ("AS", "DATA"))
    return any(limit != resource.RLIM_INFINITY for limit in limits)


def _can_map(size: int) -> bool:
    with contextlib.suppress(OSError, ValueError, OverflowError, MemoryError):
        mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
        return True
    return False
