"""Arrays in the memory of a device, for tests of kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from llamac.gpu.driver import Driver


def put(device: Driver, values: NDArray[Any]) -> np.uint64:
    """The address of a copy on the device."""
    address: np.uint64 = np.uint64(device.alloc(values.nbytes))
    device.upload(int(address), np.ascontiguousarray(values).reshape(-1).view(np.uint8))
    return address


def get(device: Driver, address: int | np.uint64, dtype: DTypeLike, shape: int | tuple[int, ...]) -> NDArray[Any]:
    """A copy of an array of the device."""
    values = np.empty(shape, dtype)
    device.download(int(address), values.reshape(-1).view(np.uint8))
    return values
