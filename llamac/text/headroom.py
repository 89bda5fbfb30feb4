"""Checks for enough memory before a library allocates it that would abort the process on failure.

The tokenizers library is written in Rust, where a failed allocation ends the process. Allocations fail only under a
limit of the process (RLIMIT_AS, RLIMIT_DATA): without one, the system hands out memory that it may not have.
"""

from __future__ import annotations

import contextlib
import mmap

from llamac.errors import OutOfMemoryError


def require_memory(size: int, purpose: str) -> None:
    """Raise OutOfMemoryError if the process's limits do not leave `size` bytes."""
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
