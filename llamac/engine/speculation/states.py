"""Hidden states of a text, for drafters: rows of floats in the memory of the host or, on a device, in the device's.

Passes write them there, and drafters read them there: states of a device never travel to the host.
"""

from __future__ import annotations

import copy
import weakref
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from llamac.engine.session import Session
    from llamac.gpu.device_model import DeviceModel
    from llamac.gpu.passes import DeviceRows

    Place = memoryview | DeviceRows  # of rows, as evals read and write them


class States:
    """Rows of hidden states, whose content is undefined at first.

    Attributes:
        n: The number of rows.
        device: The device that has them; None: the host.
    """

    def __init__(self, n: int, width: int, device: DeviceModel | None) -> None:
        """Allocate rows of `width` floats.

        Raises:
            DeviceError: The device fails.
            OutOfMemoryError: It has too little memory.
        """
        self.n, self.device, self._row_bytes = n, device, 4 * width
        self._memory = bytearray(n * self._row_bytes) if device is None else _DeviceMemory(device, n * self._row_bytes)

    def first(self, n: int) -> States:
        """The first n rows, in the same memory."""
        part = copy.copy(self)
        part.n = n
        return part

    def place(self, first: int, n: int) -> Place:
        """Where n rows are, for an eval."""
        begin, size = first * self._row_bytes, n * self._row_bytes
        if isinstance(self._memory, _DeviceMemory):
            from llamac.gpu.passes import DeviceRows

            return DeviceRows(self._memory.address + begin, n)
        rows = memoryview(self._memory)[begin : begin + size]
        return cast("memoryview", rows.cast("f", (n, self._row_bytes // 4)))

    def take(self, at: int, source: States, first: int, n: int) -> None:
        """Copy n rows of the same device into this, to row `at`. The rows do not overlap.

        Raises:
            DeviceError: The device fails.
        """
        to, begin, size = at * self._row_bytes, first * self._row_bytes, n * self._row_bytes
        if isinstance(self._memory, _DeviceMemory):
            assert isinstance(source._memory, _DeviceMemory)
            if size:
                self._memory.device.copy(self._memory.address + to, source._memory.address + begin, size)
        else:
            assert not isinstance(source._memory, _DeviceMemory)
            self._memory[to : to + size] = memoryview(source._memory)[begin : begin + size]


class _DeviceMemory:
    """Memory of a device, freed with the last object that has it."""

    def __init__(self, device: DeviceModel, size: int) -> None:
        self.device = device
        self.address = device.alloc_states(size)
        weakref.finalize(self, device.free, self.address).atexit = False


def room_for(n: int, width: int, device: DeviceModel | None, states: States | None) -> States:
    """`states`, or others if these have fewer than n rows or are not on the device.

    Raises as `States`.
    """
    if states is not None and states.n >= n and states.device is device:
        return states
    return States(1 << (n - 1).bit_length(), width, device)


def device_of(session: Session) -> DeviceModel | None:
    """The device where a session computes now; None: the CPU."""
    return None if session.device == "cpu" else session.model._device


def place_in(session: Session, states: States | None) -> Place | None:
    """Where a pass of a session writes all rows of `states`; None if it has left the device that has them."""
    return None if states is None or states.device is not device_of(session) else states.place(0, states.n)
