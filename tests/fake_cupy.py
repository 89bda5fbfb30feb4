"""CuPy's modules for one device without CUDA: the emulator runs the kernels. Streams run at once, except in a capture.

A test compares the parameters of these functions with those of CuPy's. Like CUDA, the device checks the order of calls:
a current device, what a capture allows, memory that is still in use.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llamac.gpu.cupy_modules import Modules
from llamac.gpu.emulator.emulator import Emulator


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"cudaError{status}")
        self.status = status


class CUDADriverError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"CUDA_ERROR_{status}")
        self.status = status


class NVRTCError(RuntimeError):
    pass


class FakeRuntime:
    """cupy.cuda.runtime."""

    CUDARuntimeError: type[Exception] = CUDARuntimeError
    memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice = 1, 2, 3
    streamNonBlocking, streamCaptureModeThreadLocal, eventDisableTiming = 1, 1, 2

    def __init__(self, emulator: Emulator) -> None:
        self.emulator = emulator
        self.devices = 2
        self.contexts = set[int]()  # the devices that have one
        self._thread = threading.local()  # .context: its current one; 0: none
        self.fail: dict[str, int] = {}  # the error that the next call of a function reports
        self.pinned: dict[int, Any] = {}
        self.streams, self.executables = set[int](), dict[int, list[Callable[[], object]]]()
        self.events: dict[int, float] = {}  # milliseconds of the last record
        self.capturing: list[Callable[[], object]] | None = None
        self.graphs: dict[int, list[Callable[[], object]]] = {}
        self._numbers = iter(range(1, 1 << 60))

    @property
    def current(self) -> int:
        """The current context of the thread: the number of its device and 1; 0: none."""
        return getattr(self._thread, "context", 0)

    @current.setter
    def current(self, context: int) -> None:
        self._thread.context = context

    def check(self, name: str, in_capture: bool = False) -> None:
        if name in self.fail:
            raise CUDARuntimeError(self.fail.pop(name))
        if not self.current:
            self.setDevice(0)
        if self.capturing is not None and not in_capture:
            raise CUDARuntimeError(900)

    def do(self, operation: Callable[[], object]) -> None:
        if self.capturing is None:
            operation()
        else:
            self.capturing.append(operation)

    def setDevice(self, device: int) -> None:
        if "setDevice" in self.fail:
            raise CUDARuntimeError(self.fail.pop("setDevice"))
        if device >= self.devices:
            raise CUDARuntimeError(101)
        self.contexts.add(device)
        self.current = 1 + device

    def getDeviceProperties(self, device: int) -> dict[str, Any]:
        names = {"name": b"NVIDIA Fake", "major": 9, "minor": 0, "multiProcessorCount": 132}
        return {**names, "sharedMemPerBlockOptin": 99 << 10, "totalGlobalMem": self.emulator.memory()[1]}

    def driverGetVersion(self) -> int:
        return 13010

    def memGetInfo(self) -> tuple[int, int]:
        self.check("memGetInfo", in_capture=True)
        return self.emulator.memory()

    def malloc(self, size: int) -> int:
        self.check("malloc")
        if size > self.emulator.memory()[0]:
            raise CUDARuntimeError(2)
        return self.emulator.alloc(size)

    def free(self, ptr: int) -> None:
        self.check("free")
        self.emulator.free(ptr)

    def hostAlloc(self, size: int, flags: int) -> int:
        self.check("hostAlloc")
        memory = ctypes.create_string_buffer(size)
        self.pinned[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def freeHost(self, ptr: int) -> None:
        del self.pinned[ptr]

    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:
        self.check("memcpyAsync", in_capture=kind == 3)
        assert stream in self.streams
        pinned = [(start, start + len(memory)) for start, memory in self.pinned.items()]
        for host in {1: [src], 2: [dst], 3: []}[kind]:
            assert any(start <= host and host + size <= end for start, end in pinned)
        for address in {1: [dst], 2: [src], 3: [dst, src]}[kind]:
            self.emulator._check(address, size)
        self.do(lambda: ctypes.memmove(dst, src, size))

    def memsetAsync(self, ptr: int, value: int, size: int, stream: int) -> None:
        assert stream in self.streams
        self.do(lambda: self.emulator.fill(ptr, value, size))

    def streamCreateWithFlags(self, flags: int) -> int:
        self.streams.add(next(self._numbers))
        return max(self.streams)

    def streamDestroy(self, stream: int) -> None:
        self.streams.remove(stream)

    def streamSynchronize(self, stream: int) -> None:
        self.check("streamSynchronize")
        assert stream in self.streams

    def streamBeginCapture(self, stream: int, mode: int) -> None:
        self.check("streamBeginCapture")
        self.capturing = []

    def streamEndCapture(self, stream: int) -> int:
        if self.capturing is None:
            raise CUDARuntimeError(901)
        number = next(self._numbers)
        self.graphs[number], self.capturing = self.capturing, None
        return number

    def graphInstantiate(self, graph: int) -> int:
        self.check("graphInstantiate")
        number = next(self._numbers)
        self.executables[number] = self.graphs[graph]
        return number

    def graphUpload(self, graphExec: int, stream: int) -> None:
        self.check("graphUpload")
        assert graphExec in self.executables

    def graphLaunch(self, graphExec: int, stream: int) -> None:
        self.check("graphLaunch")
        for operation in self.executables[graphExec]:
            operation()

    def graphDestroy(self, graph: int) -> None:
        del self.graphs[graph]

    def graphExecDestroy(self, graphExec: int) -> None:
        del self.executables[graphExec]

    def eventCreateWithFlags(self, flags: int) -> int:
        self.events[event := next(self._numbers)] = 0.0
        return event

    def eventRecord(self, event: int, stream: int) -> None:
        assert event in self.events
        self.do(lambda: self.events.update({event: 1e3 * time.perf_counter()}))

    def eventElapsedTime(self, start: int, end: int) -> float:
        self.check("eventElapsedTime")
        return self.events[end] - self.events[start]

    def eventSynchronize(self, event: int) -> None:
        self.check("eventSynchronize")
        assert event in self.events

    def eventDestroy(self, event: int) -> None:
        del self.events[event]


class FakeDriver:
    """cupy.cuda.driver."""

    CUDADriverError: type[Exception] = CUDADriverError
    CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 1, 8

    def __init__(self, runtime: FakeRuntime) -> None:
        self.runtime = runtime
        self.modules: dict[int, bytes] = {}
        self.functions: dict[int, str] = {}
        self.most_shared: dict[int, int] = {}

    def ctxGetCurrent(self) -> int:
        if not self.runtime.contexts:  # CUDA has not started
            raise CUDADriverError(3)
        return self.runtime.current

    def ctxSetCurrent(self, ctx: int) -> None:
        self.runtime.current = ctx

    def moduleLoadData(self, image: bytes) -> int:
        self.modules[len(self.modules) + 1] = image
        return len(self.modules)

    def moduleUnload(self, module: int) -> None:
        del self.modules[module]

    def moduleGetFunction(self, module: int, funcname: str) -> int:
        if funcname not in self.runtime.emulator._kernels:
            raise CUDADriverError(500)
        self.functions[len(self.functions) + 1] = funcname
        return len(self.functions)

    def funcGetAttribute(self, attribute: int, f: int) -> int:
        return 1024

    def funcSetAttribute(self, f: int, attribute: int, value: int) -> None:
        self.most_shared[f] = value

    def launchKernel(
        self,
        f: int,
        grid_dim_x: int,
        grid_dim_y: int,
        grid_dim_z: int,
        block_dim_x: int,
        block_dim_y: int,
        block_dim_z: int,
        shared_mem_bytes: int,
        stream: int,
        kernel_params: int,
        extra: int,
    ) -> None:
        self.runtime.check("launchKernel", in_capture=True)
        if shared_mem_bytes > self.most_shared[f]:
            raise CUDADriverError(1)
        emulator, name = self.runtime.emulator, self.functions[f]
        kinds = emulator._kernels[name][1].kinds.decode()
        addresses = (ctypes.c_void_p * len(kinds)).from_address(kernel_params)
        types = {"p": np.uint64, "i": np.int32, "f": np.float32}
        arguments = []  # read now, as CUDA does
        for kind, address in zip(kinds, addresses, strict=True):
            dtype = np.dtype(types[kind])
            arguments.append(np.frombuffer(ctypes.string_at(address, dtype.itemsize), dtype)[0])
        grid = grid_dim_x, grid_dim_y, grid_dim_z
        self.runtime.do(lambda: emulator.launch(name, grid, block_dim_x, arguments, shared_mem_bytes))


class FakeNvrtc:
    """cupy.cuda.nvrtc. The code of every program has the names of all kernels, and of a function that is none."""

    NVRTCError: type[Exception] = NVRTCError

    def __init__(self, kernels: Iterable[str]) -> None:
        self.kernels = kernels
        self.programs: dict[int, str] = {}
        self.compiled = 0

    def getVersion(self) -> tuple[int, int]:
        return 13, 0

    def createProgram(self, src: str, name: str, headers: Sequence[bytes], include_names: Sequence[bytes]) -> int:
        assert len(headers) == len(include_names)
        self.programs[len(self.programs) + 1] = src
        return len(self.programs)

    def compileProgram(self, prog: int, options: Sequence[str]) -> None:
        self.compiled += 1
        if "refused" in self.programs[prog]:
            raise NVRTCError("NVRTC_ERROR_COMPILATION (6)")

    def getCUBIN(self, prog: int) -> bytes:
        return b"\0" + b"".join(b".text.%s\0" % name.encode() for name in (*self.kernels, "_Z8functionv"))

    def getProgramLog(self, prog: int) -> str:
        return "samples.cu(1): error: it is refused"

    def destroyProgram(self, prog: int) -> None:
        self.programs[prog] = ""


def fake_cupy(cache: Path, sources: Sequence[Path], memory: int = 1 << 30) -> tuple[Modules, FakeRuntime]:
    """CuPy's modules, and the runtime with what it knows."""
    runtime = FakeRuntime(Emulator(cache, sources, memory=memory))
    return Modules(runtime, FakeDriver(runtime), FakeNvrtc(runtime.emulator._kernels)), runtime
