"""Hardware counters: what they count, and the message where there are none.

Machines that run tests often have no hardware counters, so a counter of the kernel takes their place.
"""

from __future__ import annotations

import errno
import os
import struct
import sys
from pathlib import Path

import pytest

from llamac.engine.hardware.counters import EVENTS, PARANOID, Counters, perf_event_open

TASK_CLOCK = 1  # of PERF_TYPE_SOFTWARE: nanoseconds of the counted threads
MANY = 300_000


def task_clock(attributes: bytes) -> int:
    """Open a counter of the kernel's with the attributes of one of the processor's."""
    kind, size = struct.unpack_from("<II", attributes)
    assert (kind, size) == (0, len(attributes))
    return perf_event_open(struct.pack("<IIQ", 1, size, TASK_CLOCK) + attributes[16:])


def test_counters_count_from_their_start_on() -> None:
    if sys.platform != "linux" or not Path(PARANOID).exists():
        pytest.skip("the system has no perf_event_open")
    found = Counters(task_clock)
    if found.problem is not None:
        pytest.skip(f"perf_event_open: {found.problem}")
    sum(range(MANY))
    assert found.read() == dict.fromkeys(EVENTS, 0)
    found.start()
    sum(range(MANY))
    first = found.read()
    assert all(count > 0 for count in first.values())
    sum(range(MANY))
    assert all(count > first[name] for name, count in found.read().items())
    files = list(found._files.values())
    found.close()
    assert found.read() == {}
    for file in files:
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(file)


@pytest.mark.parametrize(
    ("code", "part"),
    [
        (errno.EACCES, "must be at most 2"),
        (errno.EPERM, "containers must allow the system call"),
        (errno.ENOENT, "this machine, or the virtual machine, has no hardware counters"),
        (errno.ENOSYS, "Function not implemented"),
    ],
)
def test_a_reason_is_given_where_there_are_none(code: int, part: str) -> None:
    def refuse(attributes: bytes) -> int:
        raise OSError(code, os.strerror(code))

    found = Counters(refuse)
    assert found.problem is not None
    assert part in found.problem
    found.start()
    assert found.read() == {}
    found.close()


def test_other_processors_and_systems_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "s390x")
    assert Counters().problem == "this system has no perf_event_open"
