"""The driver of a CUDA device: CuPy's functions of CUDA, one stream, kernels that NVRTC compiles."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from llamac.errors import ArgumentError, DeviceError, LlamacError, OutOfMemoryError, UnsupportedError
from llamac.gpu.cuda_errors import llamac_error
from llamac.gpu.cupy_modules import Modules, load_cupy
from llamac.gpu.devices import OLDEST
from llamac.gpu.driver import Properties, not_in_a_graph, packed
from llamac.gpu.early_launch import EARLY, early_launcher
from llamac.gpu.event_timer import EventTimer, Recorder, event_recorder
from llamac.gpu.nvrtc import compile_kernels, kernel_names
from llamac.gpu.pinned_ring import PinnedRing
from llamac.gpu.sources import kernel_files
from llamac.progress import Progress, silent
from llamac.sizes import size_text

if TYPE_CHECKING:
    from llamac.gpu.driver import Argument, Bytes

NOT_FOUND = 500  # CUDA_ERROR_NOT_FOUND


class Cuda:
    """A CUDA device (`Driver`).

    Args:
        device: Its number, from 0.
        cache: The folder that keeps compiled kernels; None to compile them each time, which takes seconds.
        sources: Files of kernels; by default those of the package.
        progress: Called if kernels must be compiled.
        modules: CuPy's modules; by default imported.

    Raises:
        UnsupportedError: CuPy, the driver or the device is missing or too old.
        OutOfMemoryError: The device or the host has no memory left.
        DeviceError: The device fails, or the kernels do not compile.
    """

    def __init__(
        self,
        device: int = 0,
        cache: Path | None = None,
        sources: Sequence[Path] | None = None,
        *,
        progress: Progress = silent,
        modules: Modules | None = None,
    ) -> None:
        self._cupy = load_cupy() if modules is None else modules
        self._runtime = self._cupy.runtime
        self._device = device
        self._allocations: dict[int, int] = {}  # sizes by address
        self._executables: set[int] = set()  # captured graphs
        self._modules: list[int] = []
        self._functions: dict[str, int] = {}
        self._stream = 0
        self._ring: PinnedRing | None = None
        self._capturing = False
        self._after_kernel = False  # the stream's last operation is a kernel
        self._problem: str | None = None  # why the device is lost; None: it is not
        self._guard = _Guard(self)
        self._context = self._guard.context()
        with self._guard("looking for a device"):
            self.properties = self._described()
            version = self._runtime.driverGetVersion()
        # injected modules have functions and streams that the driver does not know
        self._early = early_launcher(self.properties.capability, version) if modules is None else None
        self._recorder: Recorder | None = None if modules is None else self._record_by_runtime
        capability = self.properties.capability
        if capability < OLDEST:
            raise UnsupportedError(
                f"{self.properties.name} has compute capability {capability[0]}.{capability[1]}; llamac needs at least "
                f"{OLDEST[0]}.{OLDEST[1]}"
            )
        files = kernel_files() if sources is None else list(sources)
        codes = compile_kernels(self._cupy.nvrtc, files, capability, cache, progress)
        try:
            with self._guard("loading the kernels"):
                for code in codes:
                    self._load(code)
                self._stream = self._runtime.streamCreateWithFlags(self._runtime.streamNonBlocking)
                enter = partial(self._cupy.driver.ctxSetCurrent, self._context)
                self._ring = PinnedRing(self._runtime, self._stream, enter)
        except BaseException:
            self.close()
            raise

    def _described(self) -> Properties:
        found = self._runtime.getDeviceProperties(self._device)
        version = self._runtime.driverGetVersion()
        return Properties(
            found["name"].decode(errors="replace"),
            (found["major"], found["minor"]),
            found["multiProcessorCount"],
            found["sharedMemPerBlockOptin"],
            found["totalGlobalMem"],
            f"{version // 1000}.{version % 1000 // 10}",
        )

    def _load(self, code: bytes) -> None:
        """Load all kernels onto the device now: loading one during a graph's capture could block."""
        driver = self._cupy.driver
        module = driver.moduleLoadData(code)
        self._modules.append(module)
        for name in kernel_names(code):
            try:
                function = driver.moduleGetFunction(module, name)
            except driver.CUDADriverError as error:
                if getattr(error, "status", None) == NOT_FOUND:  # a function of kernels, not a kernel
                    continue
                raise
            static = driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function)
            most = self.properties.shared_bytes - static
            driver.funcSetAttribute(function, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, most)
            self._functions[name] = function

    # ---- memory

    def alloc(self, size: int) -> int:
        not_in_a_graph(self._capturing, "alloc")
        try:
            with self._guard("allocating memory"):
                address = self._runtime.malloc(max(size, 1))
        except OutOfMemoryError as error:
            free, total = map(size_text, self.memory())
            raise OutOfMemoryError(
                f"{self.properties.name} has {free} of {total} of memory left, and {size_text(size)} are needed: close "
                "other programs on it, or use a smaller context or fewer sequences"
            ) from error
        self._allocations[address] = size
        return address

    def free(self, address: int) -> None:
        not_in_a_graph(self._capturing, "free")
        if address not in self._allocations:
            raise ArgumentError(f"no memory was allocated at {address:#x}")
        with self._guard("freeing memory"):
            self._runtime.streamSynchronize(self._stream)
            self._runtime.free(address)
        del self._allocations[address]  # after an error above, `close` frees it

    def upload(self, address: int, source: Bytes) -> None:
        not_in_a_graph(self._capturing, "upload")
        assert self._ring is not None
        assert source.flags.c_contiguous
        with self._guard("copying to the device"):
            self._after_kernel = False
            self._ring.upload(address, source.ctypes.data, source.nbytes)

    def download(self, address: int, to: Bytes) -> None:
        not_in_a_graph(self._capturing, "download")
        assert self._ring is not None
        assert to.flags.c_contiguous
        with self._guard("copying from the device"):
            self._after_kernel = False
            self._ring.download(address, to.ctypes.data, to.nbytes)

    def copy(self, to: int, source: int, size: int) -> None:
        with self._guard("copying on the device"):
            self._after_kernel = False
            self._runtime.memcpyAsync(to, source, size, self._runtime.memcpyDeviceToDevice, self._stream)

    def fill(self, address: int, byte: int, size: int) -> None:
        with self._guard("filling memory"):
            self._after_kernel = False
            self._runtime.memsetAsync(address, byte, size, self._stream)

    def memory(self) -> tuple[int, int]:
        with self._guard("asking for the device's memory"):
            return self._runtime.memGetInfo()

    # ---- kernels

    def launch(
        self, kernel: str, grid: tuple[int, int, int], threads: int, arguments: Sequence[Argument], shared: int = 0
    ) -> None:
        if kernel not in self._functions:
            raise ArgumentError(f"no file of kernels has {kernel}; they have {', '.join(sorted(self._functions))}")
        if min(grid) == 0:
            return
        _values, addresses = packed(arguments)
        function, parameters = self._functions[kernel], ctypes.addressof(addresses)
        with self._guard(f"launching {kernel}"):
            if self._early is not None and self._after_kernel and EARLY.fullmatch(kernel):
                status = self._early.launch(function, grid, threads, shared, self._stream, parameters)
                if status:
                    raise self._cupy.driver.CUDADriverError(status)
            else:
                self._cupy.driver.launchKernel(function, *grid, threads, 1, 1, shared, self._stream, parameters, 0)
            self._after_kernel = True

    def synchronize(self) -> None:
        not_in_a_graph(self._capturing, "synchronize")
        with self._guard("computing"):
            self._runtime.streamSynchronize(self._stream)

    # ---- times

    def timer(self, marks: int) -> EventTimer:
        not_in_a_graph(self._capturing, "make a timer")
        if self._recorder is None:
            self._recorder = event_recorder(self._cupy)
        return EventTimer(self._cupy, marks, self._record, self._guard, self._close_part)

    def _record(self, event: int) -> None:
        assert self._recorder is not None
        with self._guard("recording an event"):
            self._after_kernel = False
            self._recorder(event, self._stream, self._capturing)

    def _record_by_runtime(self, event: int, stream: int, capturing: bool) -> None:
        self._runtime.eventRecord(event, stream)

    # ---- graphs

    @contextlib.contextmanager
    def capture(self) -> Iterator[_Graph]:
        not_in_a_graph(self._capturing, "capture")
        runtime = self._runtime
        graph = _Graph(self)
        with self._guard("capturing a graph"):
            runtime.streamBeginCapture(self._stream, runtime.streamCaptureModeThreadLocal)
        self._capturing, self._after_kernel = True, False
        try:
            with _garbage_kept:
                yield graph
        except BaseException:
            self._capturing = False
            with contextlib.suppress(LlamacError):
                self._close_part(runtime.graphDestroy, self._end_capture())
            raise
        self._capturing = self._after_kernel = False
        captured = self._end_capture()
        try:
            with self._guard("capturing a graph"):
                executable = runtime.graphInstantiate(captured)
        finally:
            self._close_part(runtime.graphDestroy, captured)
        try:
            with self._guard("capturing a graph"):
                runtime.graphUpload(executable, self._stream)
        except BaseException:
            self._close_part(runtime.graphExecDestroy, executable)
            raise
        self._executables.add(executable)
        graph.executable = executable

    def _end_capture(self) -> int:
        try:
            with self._guard("ending a capture"):
                return self._runtime.streamEndCapture(self._stream)
        except LlamacError:
            with contextlib.suppress(LlamacError), self._guard("ending a capture"):  # may not have been tried
                self._runtime.graphDestroy(self._runtime.streamEndCapture(self._stream))
            raise

    def replay(self, executable: int) -> None:
        """Run a captured graph."""
        with self._guard("running a graph"):
            self._after_kernel = False
            self._runtime.graphLaunch(executable, self._stream)

    def destroy(self, executable: int) -> None:
        """Free a captured graph, after the operations so far."""
        with self._guard("freeing a graph"):
            self._runtime.streamSynchronize(self._stream)
            self._runtime.graphExecDestroy(executable)
        self._executables.remove(executable)

    def close(self) -> None:
        """Free everything. What fails does not keep the rest from being freed; of a lost device, CUDA frees nothing."""
        if self._stream:
            self._close_part(self._runtime.streamSynchronize, self._stream)
        for executable in self._executables:
            self._close_part(self._runtime.graphExecDestroy, executable)
        if self._ring is not None:
            self._ring.close(self._close_part)
        for address in self._allocations:
            self._close_part(self._runtime.free, address)
        for module in self._modules:
            self._close_part(self._cupy.driver.moduleUnload, module)
        if self._stream:
            self._close_part(self._runtime.streamDestroy, self._stream)
        self._ring, self._stream = None, 0
        self._executables.clear()
        self._allocations.clear()
        self._modules.clear()
        self._functions.clear()

    def _close_part(self, free: Callable[[int], None], what: int) -> None:
        """Free something; twice if need be: CUDA's functions also report the errors of earlier operations."""
        for _ in range(2):
            with contextlib.suppress(LlamacError), self._guard("closing the device"):
                free(what)
                return


class _GarbageKept:
    """Suspends the garbage collector: a capture fails if its thread frees memory, even that of another driver.

    The collector is the process's, so it is suspended until no thread captures any more.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._captures = 0
        self._was_enabled = False

    def __enter__(self) -> None:
        with self._lock:
            if not self._captures:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._captures += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._captures -= 1
            if not self._captures and self._was_enabled:
                gc.enable()


_garbage_kept = _GarbageKept()


class _Graph:
    """A captured graph. It contains addresses of device memory, which must outlive it."""

    def __init__(self, device: Cuda) -> None:
        self._device = device
        self.executable = 0

    def replay(self) -> None:
        if not self.executable:
            raise ArgumentError("the graph is closed, or its capture failed")
        self._device.replay(self.executable)

    def close(self) -> None:
        if self.executable:
            executable, self.executable = self.executable, 0
            self._device.destroy(executable)


class _Guard:
    """Makes a driver's context the thread's current one in a `with` block, and CuPy's exceptions llamac's.

    The context, because setting the current device back would create a context on a device that is not the driver's.
    """

    def __init__(self, driver: Cuda) -> None:
        self._driver = driver
        self._what = ""
        self._before = 0

    def __call__(self, what: str) -> _Guard:
        """The guard of a block that does `what`."""
        self._what = what
        return self

    def context(self) -> int:
        """The context of the driver's device, which a thread of its own creates: the caller's keeps its device."""
        cupy, device = self._driver._cupy, self._driver._device

        def create() -> int:
            cupy.runtime.setDevice(device)
            return cupy.driver.ctxGetCurrent()

        self._what = "looking for a device"
        try:
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(create).result()
        except Exception as error:
            self._raise(error)

    def __enter__(self) -> None:
        driver = self._driver
        if driver._problem is not None:
            raise DeviceError(f"{self._what}: the device is lost: {driver._problem}", lost=True)
        try:
            self._before = driver._cupy.driver.ctxGetCurrent()
            driver._cupy.driver.ctxSetCurrent(driver._context)
        except Exception as error:
            self._raise(error)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(Exception):  # what the block did has worked
            self._driver._cupy.driver.ctxSetCurrent(self._before)
        if isinstance(error, Exception) and not isinstance(error, LlamacError):
            self._raise(error)

    def _raise(self, error: Exception) -> NoReturn:
        cupy = self._driver._cupy
        if not isinstance(error, cupy.runtime.CUDARuntimeError | cupy.driver.CUDADriverError):
            raise error
        found = llamac_error(error, self._what, has_started=bool(self._driver._stream))
        if isinstance(found, DeviceError) and found.lost:
            self._driver._problem = str(found)
        try:
            raise found
        finally:
            del found  # breaks the cycle of the error, its traceback and this frame
