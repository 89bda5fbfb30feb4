"""`llamac serve`, which also reports its memory in use for each line on its standard input.

    PYTHONMALLOC=malloc python -m bench.live_server serve MODEL [OPTION]...

The server answers each line with the number of bytes that glibc's allocator has handed out and not taken back. Unlike
resident memory, this number does not depend on fragmentation. PYTHONMALLOC=malloc makes Python allocate its small
objects with glibc too, instead of its own allocator.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading

from llamac.__main__ import main


class MemoryInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc 2.33 and later."""

    _fields_ = [
        *[(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")],
        *[(name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")],
    ]


def live_bytes() -> int:
    """Bytes that the allocator has handed out, in its heaps and as separate mappings."""
    read = ctypes.CDLL(None).mallinfo2
    read.restype = MemoryInfo
    gc.collect()
    info = read()
    return int(info.uordblks + info.hblkhd)


def answer() -> None:
    """Print the bytes in use for each line of the standard input."""
    for _ in sys.stdin:
        print(live_bytes(), flush=True)


if __name__ == "__main__":
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        sys.exit("the memory in use cannot be measured: the C library is not glibc 2.33 or later")
    threading.Thread(target=answer, daemon=True).start()
    main()
