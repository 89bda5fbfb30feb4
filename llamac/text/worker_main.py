"""The program of a worker process (worker.py): imports a module, drops privileges, and answers requests.

A request can harm only this process, which has a memory limit and cannot open files or sockets after its start. The
parent kills the process when a request takes too long. If the parent no longer exists, a timer ends it.

The module has a constant MEMORY, the limit of the address space in bytes, and a function `prepare(setup)`. This
function imports everything that requests need, because no file can be opened later, and returns a function that maps a
request to bytes.

Standard input carries frames of an 8-byte length and that many bytes of `marshal` data: first (module search path,
module's name, setup), then requests (seconds, request). Standard output carries frames of an 8-byte length and an
answer. The first answer is the version of Python.
"""

from __future__ import annotations

import importlib
import marshal
import signal
import struct
import sys
import types
from pathlib import Path
from typing import Any, BinaryIO

GRACE = 2.0  # seconds after a request's time limit until the timer ends this process


def main() -> None:
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    sys.path[:], name, setup = _receive(source)
    package = types.ModuleType("llamac")  # instead of the package's __init__, because only a few files are needed
    package.__path__ = [str(Path(__file__).parents[1])]
    sys.modules["llamac"] = package
    module = importlib.import_module(name)
    answer = module.prepare(setup)
    _limit(module.MEMORY)
    _send(sink, ".".join(map(str, sys.version_info[:2])).encode())
    while True:
        try:
            seconds, request = _receive(source)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_REAL, seconds + GRACE)  # its signal ends the process
        data = answer(request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(sink, data)


def _limit(memory: int) -> None:
    """Limit the process as far as the system supports it. Open files stay open."""
    try:
        import resource
    except ImportError:
        return
    for name, value in (("AS", memory), ("NOFILE", 0), ("FSIZE", 0), ("CORE", 0)):
        try:
            kind = getattr(resource, f"RLIMIT_{name}")
            _, most = resource.getrlimit(kind)
            value = value if most == resource.RLIM_INFINITY else min(value, most)
            resource.setrlimit(kind, (value, value))
        except (AttributeError, OSError, ValueError):
            continue


def _receive(source: BinaryIO) -> Any:
    head = source.read(8)
    if len(head) < 8:
        raise EOFError
    (size,) = struct.unpack("<Q", head)
    return marshal.loads(source.read(size))


def _send(sink: BinaryIO, data: bytes) -> None:
    sink.write(struct.pack("<Q", len(data)) + data)
    sink.flush()


if __name__ == "__main__":
    main()
