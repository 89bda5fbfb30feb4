"""The driver whose device is emulated: its memory is the host's, its kernels are libraries that build.py compiles.

It checks what a device does not: the type of each argument, bounds of copies, the threads at each barrier.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from llamac.errors import ArgumentError, DeviceError, OutOfMemoryError
from llamac.gpu.driver import Properties, not_in_a_graph, packed
from llamac.gpu.emulator.build import build
from llamac.gpu.sources import kernel_files

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llamac.gpu.driver import Argument, Bytes

ALIGNMENT = 256
POISON = 0xFF  # NaN in every float type
KINDS = {"p": "uint64", "i": "int32", "f": "float32"}  # types of parameters by cuda.h's letters

_launching = threading.Lock()  # a library has one set of fibers


class _Kernel(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("kinds", ctypes.c_char_p), ("call", ctypes.c_void_p)]


class _Launch(ctypes.Structure):  # the struct Launch of runtime.cpp
    _fields_ = [
        ("kernel", ctypes.POINTER(_Kernel)),
        ("arguments", ctypes.c_void_p),
        ("grid", ctypes.c_uint32 * 3),
        ("threads", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint64),
        ("ranges", ctypes.c_void_p),
        ("n_ranges", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("error", ctypes.c_char * 1024),
    ]


class Emulator:
    """An emulated device (`Driver`).

    Args:
        cache: The folder that keeps compiled kernels.
        sources: Files of kernels; by default those of the package.
        seed: 0 runs blocks and threads in their order. Any other number runs them in a random order that it
            determines: kernels whose results depend on it have a race.
        sanitize: For the compiler's option -fsanitize, as "undefined"; "" for none.
        checked: Whether launches raise DeviceError for accesses outside of memory and for accesses that nothing orders,
            which are races. A launch then takes some 10 times longer.
        memory: Bytes of the device's memory.

    Raises:
        UnsupportedError: There is no C++ compiler, or it refuses a file.
    """

    def __init__(
        self,
        cache: Path,
        sources: Sequence[Path] | None = None,
        *,
        seed: int = 0,
        sanitize: str = "",
        checked: bool = False,
        memory: int = 4 << 30,
    ) -> None:
        self.properties = Properties("emulated device", (8, 0), 4, 99 << 10, memory, "emulator")
        self.seed = seed
        self._sizes: dict[int, int] = {}  # of allocations by address
        self._libc = ctypes.CDLL(None)  # finds the functions of a sanitizer that replace the system's
        self._recording: list[Callable[[], object]] | None = None
        self._kernels: dict[str, tuple[ctypes.CDLL, _Kernel]] = {}
        files = kernel_files() if sources is None else list(sources)
        with ThreadPoolExecutor() as pool:
            libraries = list(pool.map(lambda source: build(source, cache, sanitize, checked), files))
        for path in libraries:
            library = ctypes.CDLL(str(path))
            first = ctypes.addressof(ctypes.c_char.in_dll(library, "emulator_kernels"))
            for at in range(first, 1 << 64, ctypes.sizeof(_Kernel)):
                kernel = _Kernel.from_address(at)
                if kernel.name is None:
                    break
                self._kernels[kernel.name.decode()] = library, kernel

    # ---- memory

    def alloc(self, size: int) -> int:
        not_in_a_graph(self._recording is not None, "alloc")
        free, _ = self.memory()
        address = ctypes.c_void_p()
        if size > free or self._libc.posix_memalign(ctypes.byref(address), ALIGNMENT, ctypes.c_size_t(max(size, 1))):
            raise OutOfMemoryError(f"the emulated device has {free} bytes of memory left, but {size} are needed")
        assert address.value is not None
        ctypes.memset(address.value, POISON, size)
        self._sizes[address.value] = size
        return address.value

    def free(self, address: int) -> None:
        not_in_a_graph(self._recording is not None, "free")
        if self._sizes.pop(address, None) is None:
            raise ArgumentError(f"no memory was allocated at {address:#x}")
        self._libc.free(ctypes.c_void_p(address))

    def upload(self, address: int, source: Bytes) -> None:
        not_in_a_graph(self._recording is not None, "upload")
        self._check(address, source.nbytes)
        ctypes.memmove(address, source.ctypes.data, source.nbytes)

    def download(self, address: int, to: Bytes) -> None:
        not_in_a_graph(self._recording is not None, "download")
        self._check(address, to.nbytes)
        ctypes.memmove(to.ctypes.data, address, to.nbytes)

    def copy(self, to: int, source: int, size: int) -> None:
        self._check(to, size)
        self._check(source, size)
        if to < source + size and source < to + size:
            raise ArgumentError(f"the ranges of {size} bytes at {to:#x} and {source:#x} overlap")
        self._do(partial(ctypes.memmove, to, source, size))

    def fill(self, address: int, byte: int, size: int) -> None:
        self._check(address, size)
        self._do(partial(ctypes.memset, address, byte, size))

    def memory(self) -> tuple[int, int]:
        total = self.properties.memory_bytes
        return total - sum(self._sizes.values()), total

    def _check(self, address: int, size: int) -> None:
        """Raise an error unless one allocation has the range."""
        if not any(start <= address and address + size <= start + length for start, length in self._sizes.items()):
            raise ArgumentError(f"no allocation has all of the {size} bytes at {address:#x}")

    # ---- kernels

    def launch(
        self, kernel: str, grid: tuple[int, int, int], threads: int, arguments: Sequence[Argument], shared: int = 0
    ) -> None:
        if kernel not in self._kernels:
            raise ArgumentError(f"no file of kernels has {kernel}; they have {', '.join(self.kernels())}")
        if threads % 32 or not 32 <= threads <= 1024:
            raise ArgumentError(f"{kernel}: a block has a multiple of 32 threads, at most 1024, not {threads}")
        if min(grid) < 0 or grid[0] >= 1 << 31 or max(grid[1:]) >= 1 << 16:
            raise ArgumentError(f"{kernel}: the grid {grid} is too large")
        if not 0 <= shared <= self.properties.shared_bytes:
            raise ArgumentError(f"{kernel}: a block has at most {self.properties.shared_bytes} bytes of shared memory")
        library, described = self._kernels[kernel]
        kinds = self.parameters(kernel)
        given = [argument.dtype.name for argument in arguments]
        if given != kinds:
            raise ArgumentError(f"{kernel} has parameters {', '.join(kinds)}; the arguments are {', '.join(given)}")
        if min(grid) > 0:
            self._do(partial(self._run, library, described, grid, threads, tuple(arguments), shared))

    def kernels(self) -> list[str]:
        """The names of all kernels."""
        return sorted(self._kernels)

    def parameters(self, kernel: str) -> list[str]:
        """The types of a kernel's parameters, as numpy names them."""
        return [KINDS.get(kind, "another type") for kind in self._kernels[kernel][1].kinds.decode()]

    def _run(
        self,
        library: ctypes.CDLL,
        kernel: _Kernel,
        grid: tuple[int, int, int],
        threads: int,
        arguments: Sequence[Argument],
        shared: int,
    ) -> None:
        _values, addresses = packed(arguments)
        ends = [end for start, size in sorted(self._sizes.items()) for end in (start, start + size)]
        ranges = (ctypes.c_uint64 * max(len(ends), 1))(*ends)
        launch = _Launch(
            *(ctypes.pointer(kernel), ctypes.addressof(addresses), grid, (threads, 1, 1), shared),
            *(ctypes.addressof(ranges), len(ends) // 2, self.seed),
        )
        with _launching:
            failed = library.emulator_launch(ctypes.byref(launch))
        if failed:
            raise DeviceError(_with_lines(launch.error.decode(errors="replace"), library._name))

    def synchronize(self) -> None:
        not_in_a_graph(self._recording is not None, "synchronize")

    # ---- graphs

    @contextlib.contextmanager
    def capture(self) -> Iterator[_Graph]:
        not_in_a_graph(self._recording is not None, "capture")
        graph = _Graph()
        self._recording = graph.operations
        try:
            yield graph
        finally:
            self._recording = None

    def timer(self, marks: int) -> _Timer:
        not_in_a_graph(self._recording is not None, "make a timer")
        return _Timer(self, marks)

    def _do(self, operation: Callable[[], object]) -> None:
        """Run an operation, or record it while a graph is captured."""
        if self._recording is None:
            operation()
        else:
            self._recording.append(operation)

    def close(self) -> None:
        for address in list(self._sizes):
            self.free(address)
        self._kernels.clear()


class _Graph:
    """The operations of a captured graph."""

    def __init__(self) -> None:
        self.operations: list[Callable[[], object]] = []

    def replay(self) -> None:
        for operation in self.operations:
            operation()

    def close(self) -> None:
        self.operations = []


class _Timer:
    """Times by the host's clock, because the operations run on the host."""

    def __init__(self, device: Emulator, marks: int) -> None:
        self._device = device
        self._times = [0] * marks

    def mark(self, number: int) -> None:
        self._device._do(partial(self._note, number))

    def _note(self, number: int) -> None:
        self._times[number] = time.perf_counter_ns()

    def read(self) -> NDArray[np.int64]:
        import numpy as np

        times = np.array(self._times, np.int64)
        return times[1:] - times[:-1]

    def close(self) -> None:
        self._times = []


def _with_lines(text: str, library: str) -> str:
    """A message with files and lines in place of offsets in a library; the offsets if addr2line does not find them."""

    def line(found: re.Match[str]) -> str:
        command = ["addr2line", "-i", "-e", library, f"0x{found[1]}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError:
            return found[0]
        places = [each.split(" ")[0].rpartition("/")[2] for each in done.stdout.splitlines()]  # the inlined ones first
        places = [each for each in places if not each.startswith("?")]
        of_kernel = [each for each in places if not each.startswith("device.cuh:")]
        return found[0] if done.returncode or not places else [*of_kernel, places[0]][0]

    return re.sub(r"\{pc:(\w+)\}", line, text)
