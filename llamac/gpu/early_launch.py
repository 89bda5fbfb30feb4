"""Launches of kernels that start while the kernels before them still run (CUDA's programmatic dependent launches).

CuPy has no function for them, so this module calls the driver's library. A kernel in EARLY itself waits for the end of
the kernels before it (wait_for_earlier in kernels/device.cuh). Until then it loads weights, which never change, so that
neither the launch nor the first loads take time of their own. Products of floats do not start early: their blocks would
pile up on the multiprocessors that are idle first, and few of them run at a time.
"""

from __future__ import annotations

import ctypes
import re
from typing import Any

OLDEST = (9, 0)  # the compute capability with such launches
OLDEST_DRIVER = 12040  # of CUDA 12.4, which captures them in graphs
# Kernels that wait. A test compares this with their code (tests/gpu/test_machine_code.py).
EARLY = re.compile(
    r"product_(?!b?f\d)\w+_(one|few)(_fast)?|(round_and_)?pack_\w+|heads_\w+|norm_rows|activate|scale_numbers"
)
_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, whose value has 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("n_attributes", ctypes.c_uint),
    )


class EarlyLauncher:
    """The driver's function that launches kernels early, cuLaunchKernelEx."""

    def __init__(self, function: Any) -> None:
        self._launch = function
        self._attribute = _Attribute(_STREAM_SERIALIZATION, 0, (ctypes.c_int * 16)(1))

    def launch(
        self, function: int, grid: tuple[int, int, int], threads: int, shared: int, stream: int, parameters: int
    ) -> int:
        """Launch a kernel; the driver's status (CUresult). parameters: the addresses of its arguments."""
        one = ctypes.pointer(self._attribute)
        config = _Config((ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(threads, 1, 1), shared, stream, one, 1)
        status: int = self._launch(ctypes.addressof(config), function, parameters, None)
        return status


def early_launcher(capability: tuple[int, int], driver_version: int) -> EarlyLauncher | None:
    """What launches kernels early on a device; None if it or its driver (version: 1000 major + 10 minor) cannot."""
    if capability < OLDEST or driver_version < OLDEST_DRIVER:
        return None
    try:
        function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    except (OSError, AttributeError):  # the driver's library has another name here
        return None
    function.argtypes = (ctypes.c_void_p,) * 4
    return EarlyLauncher(function)
