"""The interface to a device: memory, copies, launches of kernels, captured graphs.

Two drivers implement it: llamac/gpu/cuda.py with CuPy, llamac/gpu/emulator/ on the CPU. The graph accesses a device
only through it. Operations of a driver run in the order of their calls. A driver belongs to one thread at a time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, Protocol

from llamac.errors import ArgumentError, UnsupportedError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    # An argument of a kernel, of the parameter's size: an address, an int or a float.
    Argument = np.uint64 | np.int32 | np.float32
    Bytes = NDArray[np.uint8]


class Properties(NamedTuple):
    """What a device is and has."""

    name: str
    capability: tuple[int, int]  # compute capability, as (9, 0)
    multiprocessors: int
    shared_bytes: int  # of shared memory that a block may have at most
    memory_bytes: int  # of the device
    driver: str  # version of the driver, as "13.0", or "emulator"


class Graph(Protocol):
    """Operations that were captured, which run again as one."""

    def replay(self) -> None:
        """Run the operations again, with the same addresses and arguments."""

    def close(self) -> None:
        """Free what the graph holds. It can no longer be replayed."""


class Timer(Protocol):
    """Times between operations. Captured marks are set again by each replay."""

    def mark(self, number: int) -> None:
        """Record the time at which the operations so far end."""

    def read(self) -> NDArray[np.int64]:
        """Wait for the operations, and return the nanoseconds from each mark to the next. All were set, in order."""

    def close(self) -> None:
        """Free the timer. Close the graphs that set its marks first."""


class Driver(Protocol):
    """A device. Addresses are integers in its memory; sizes are in bytes.

    Every operation can raise DeviceError for itself or for an earlier one. If its `lost` is true, only `close` is left.
    """

    properties: Properties

    def alloc(self, size: int) -> int:
        """The address of new memory, a multiple of 256. Its content is undefined. Not in a captured graph.

        Raises:
            OutOfMemoryError: The device has less memory left.
        """

    def free(self, address: int) -> None:
        """Free memory that `alloc` returned, after the operations so far. Not in a captured graph."""

    def upload(self, address: int, source: Bytes) -> None:
        """Copy contiguous bytes from the host, which may change as soon as this returns. Not in a captured graph."""

    def download(self, address: int, to: Bytes) -> None:
        """Copy to the host, where the bytes are when this returns. Not in a captured graph."""

    def copy(self, to: int, source: int, size: int) -> None:
        """Copy inside the device. The two ranges do not overlap."""

    def fill(self, address: int, byte: int, size: int) -> None:
        """Set every byte of a range."""

    def launch(
        self, kernel: str, grid: tuple[int, int, int], threads: int, arguments: Sequence[Argument], shared: int = 0
    ) -> None:
        """Run a kernel.

        Args:
            kernel: The name of an `extern "C" __global__` function of the kernels' files.
            grid: The number of blocks along x, y and z. Nothing runs if one is 0.
            threads: The threads of a block, a multiple of 32, at most 1024.
            arguments: One for each parameter, of its exact type: np.uint64 (addresses), np.int32 or np.float32.
            shared: Bytes of dynamic shared memory, at most `properties.shared_bytes`.
        """

    def synchronize(self) -> None:
        """Wait for all operations so far, and report their errors. Not in a captured graph."""

    def memory(self) -> tuple[int, int]:
        """Free and total memory of the device, in bytes."""

    def capture(self) -> AbstractContextManager[Graph]:
        """Capture the launches, copies and fills of a `with` block, which do not run, in a graph."""

    def timer(self, marks: int) -> Timer:
        """Make a timer with this number of marks, outside of captured graphs.

        Raises:
            UnsupportedError: The device cannot measure captured operations.
        """

    def close(self) -> None:
        """Free all memory and everything else. The driver can no longer be used."""


def arguments(kinds: str, *values: float) -> tuple[Argument, ...]:
    """Values as arguments of a kernel. kinds: of its parameters, each p (an address), i (an int) or f (a float).

    Raises:
        UnsupportedError: An int has more than 32 bits.
    """
    import numpy as np

    for kind, value in zip(kinds, values, strict=True):
        if kind == "i" and not -1 << 31 <= value < 1 << 31:  # older versions of NumPy would cut it
            raise UnsupportedError(f"the GPU's kernels count in 32 bits, and cannot count to {value}: use device='cpu'")
    types: dict[str, type[Argument]] = {"p": np.uint64, "i": np.int32, "f": np.float32}
    return tuple(types[kind](value) for kind, value in zip(kinds, values, strict=True))


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up: the number of blocks of b that hold a."""
    return -(-a // b)


def packed(arguments: Sequence[Argument]) -> tuple[ctypes.Array[ctypes.c_char], ctypes.Array[ctypes.c_void_p]]:
    """The arguments of a launch as bytes, and the address of each, as CUDA expects them."""
    values = ctypes.create_string_buffer(b"".join(argument.tobytes().ljust(8, b"\0") for argument in arguments))
    first = ctypes.addressof(values)
    return values, (ctypes.c_void_p * max(len(arguments), 1))(*(first + 8 * i for i in range(len(arguments))))


def not_in_a_graph(capturing: bool, operation: str) -> None:
    """Raise an error for an operation that a graph cannot capture."""
    if capturing:
        raise ArgumentError(f"a captured graph cannot {operation}")
