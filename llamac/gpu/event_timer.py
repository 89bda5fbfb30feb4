"""Measures times on a CUDA device with events, which captured graphs record again with each replay.

CuPy's function records events only outside of graphs: in a capture, CUDA treats it as a dependency between streams.
This module therefore calls the driver's library.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from llamac.errors import UnsupportedError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llamac.gpu.cupy_modules import Modules

# Records an event: (event, stream, whether in a capture). Raises CuPy's errors.
Recorder = Callable[[int, int, bool], None]
_EXTERNAL = 1  # CU_EVENT_RECORD_EXTERNAL: the graph records the event


def event_recorder(cupy: Modules) -> Recorder:
    """Return a function that records events with the driver's library.

    Raises:
        UnsupportedError: The driver is older than CUDA 11.1, or its library has another name on this system.
    """
    try:
        function: Any = ctypes.CDLL("libcuda.so.1").cuEventRecordWithFlags
    except (OSError, AttributeError) as error:
        raise UnsupportedError(f"the driver cannot measure captured graphs, so nothing is profiled: {error}") from error
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)

    def record(event: int, stream: int, capturing: bool) -> None:
        status = function(event, stream, _EXTERNAL if capturing else 0)
        if status:
            raise cupy.driver.CUDADriverError(status)

    return record


class EventTimer:
    """A timer (`Timer`) of a stream.

    Args:
        cupy: CuPy's modules.
        marks: The number of marks.
        record: Records one of the timer's events on the stream.
        guard: Guards calls of CuPy, as `Cuda` does.
        close_part: Frees an event, as `Cuda` frees what it holds.
    """

    def __init__(
        self,
        cupy: Modules,
        marks: int,
        record: Callable[[int], None],
        guard: Callable[[str], AbstractContextManager[object]],
        close_part: Callable[[Callable[[int], None], int], None],
    ) -> None:
        self._runtime = cupy.runtime
        self._record, self._guard, self._close_part = record, guard, close_part
        self._events: list[int] = []
        try:
            with guard("making events"):
                for _ in range(marks):
                    self._events.append(self._runtime.eventCreateWithFlags(0))
        except BaseException:
            self.close()
            raise

    def mark(self, number: int) -> None:
        self._record(self._events[number])

    def read(self) -> NDArray[np.int64]:
        import numpy as np

        with self._guard("measuring"):
            self._runtime.eventSynchronize(self._events[-1])
            return np.array([round(1e6 * ms) for ms in self._elapsed()], np.int64)

    def _elapsed(self) -> Iterator[float]:
        for start, end in zip(self._events, self._events[1:], strict=False):
            yield self._runtime.eventElapsedTime(start, end)

    def close(self) -> None:
        while self._events:
            self._close_part(self._runtime.eventDestroy, self._events.pop())
