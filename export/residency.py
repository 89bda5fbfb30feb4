"""Bounds the resident memory of a process that runs the engine over a large mapped file."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from llamac.format.flatfile import FlatFile

# The exporter promises a peak of the largest tensor plus 300 MB, whatever the file's size.
MAX_RESIDENT_BYTES = 64 << 20
# In seconds. Threads that read the file map up to 20 MB in this time, and many times that while the system runs other
# processes instead of the releasing thread.
INTERVAL = 0.001


@contextlib.contextmanager
def bounded_residency(file: FlatFile) -> Iterator[None]:
    """Release the pages of `file` continuously during the block, if its weights exceed MAX_RESIDENT_BYTES.

    A pass touches every weight once, and touched pages count as this process's memory. Releasing them costs little: the
    next pass finds them in the page cache.
    """
    done = threading.Event()

    def release() -> None:
        while not done.wait(INTERVAL):
            file.release_pages()

    thread = threading.Thread(target=release, daemon=True)
    try:
        if file.sections["data"].bytes > MAX_RESIDENT_BYTES:
            thread.start()
        yield
    finally:
        done.set()
        if thread.ident is not None:
            thread.join()
