"""The weights of a model in a device's memory: the data section of its file, uploaded once, and addresses in it."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from llamac import plan_records
from llamac.errors import LlamacError, OutOfMemoryError
from llamac.sizes import size_text

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llamac.format.flatfile import FlatFile
    from llamac.gpu.driver import Driver

ALIGNMENT = 256


class Weights:
    """A model's weights on a device.

    The file's data section lies there as it lies in the file. Operands that are not in the file (replaced tensors)
    follow, each at a multiple of ALIGNMENT.
    """

    def __init__(
        self,
        driver: Driver,
        file: FlatFile,
        plans: Sequence[plan_records.Plan],
        least_kv: int,
        margin: int,
        trunk: Weights | None = None,
    ) -> None:
        """Upload the weights.

        Args:
            driver: The device. Closing it frees the weights.
            file: The model's file.
            plans: The plans of the model and of its MTP layer, or of a drafter, whose operands are needed.
            least_kv: Bytes that must stay free for KV caches.
            margin: Bytes that must stay free besides.
            trunk: Of a drafter: the weights of its trunk, which has some of the operands.

        Raises:
            DeviceError: The device fails. Nothing is left on it.
            OutOfMemoryError: The device has too little memory. The message says how much.
        """
        section = file.sections["data"]
        self._start = section.offset
        self._host = _address_of(file) + section.offset
        self._section_bytes = section.bytes
        self._elsewhere: dict[int, int] = {}  # place in the allocation, by the address on the host
        self._driver, self._trunk = driver, trunk
        self.bytes = _rounded(section.bytes)
        outside = {
            o.address: o.bytes
            for plan in plans
            for o in operands(plan)
            if o.offset is None and (trunk is None or trunk.found(o.address) is None)
        }
        for address, size in outside.items():
            self._elsewhere[address] = self.bytes
            self.bytes += _rounded(size)
        free, total = driver.memory()
        if self.bytes + least_kv + margin > free:
            raise OutOfMemoryError(
                f"the {'weights' if trunk is None else 'weights of the drafter'} need {size_text(self.bytes)}, "
                f"one KV cache {size_text(least_kv)} and the passes at least "
                f"{size_text(margin)}, but {driver.properties.name} has {size_text(free)} of {size_text(total)} free: "
                "close other programs on it, choose a smaller model, dtype or context, or compute on the CPU "
                "(device='cpu')"
            )
        self._address = driver.alloc(self.bytes)
        try:
            # not a view of the file's buffer: the traceback of an error would keep it, and the file could not be closed
            driver.upload(self._address, _host_bytes(self._host, section.bytes))
            for address, size in outside.items():
                driver.upload(self._address + self._elsewhere[address], _host_bytes(address, size))
        except BaseException:
            with contextlib.suppress(LlamacError):  # a lost device, for one
                self.close()
            raise

    def address(self, operand: plan_records.Operand | None) -> int:
        """Where an operand is on the device; 0 for None."""
        if operand is None:
            return 0
        if operand.offset is not None:
            return self._address + operand.offset - self._start
        address = self.found(operand.address)
        if address is None and self._trunk is not None:
            address = self._trunk.found(operand.address)
        assert address is not None
        return address

    def found(self, host_address: int) -> int | None:
        """Return the device address of data at a host address; None: it is not among these weights."""
        if host_address in self._elsewhere:
            return self._address + self._elsewhere[host_address]
        place = host_address - self._host
        return self._address + place if 0 <= place < self._section_bytes else None

    def close(self) -> None:
        """Free the weights before the driver is closed."""
        self._driver.free(self._address)


def operands(plan: plan_records.Plan) -> Iterator[plan_records.Operand]:
    """All operands of a plan's steps, some more than once."""
    pending: list[Any] = list(plan.steps)
    while pending:
        value = pending.pop()
        if isinstance(value, plan_records.Operand):
            yield value
        elif isinstance(value, tuple):
            pending.extend(value)


def _rounded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _address_of(file: FlatFile) -> int:
    import numpy as np

    return np.frombuffer(file.buffer, np.uint8).ctypes.data


def _host_bytes(address: int, size: int) -> NDArray[np.uint8]:
    import numpy as np

    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
