"""The driver of a CUDA device, on a fake CuPy whose functions have the parameters of the real ones."""

from __future__ import annotations

import ctypes
import gc
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import llamac
from builders import checkpoint, llama_config, some_ids, write_model
from device_arrays import get, put
from fake_cupy import FakeDriver, FakeNvrtc, FakeRuntime, fake_cupy
from llamac.errors import ArgumentError, DeviceError, OutOfMemoryError, UnsupportedError
from llamac.gpu import cupy_modules, pinned_ring
from llamac.gpu.cuda import Cuda
from llamac.gpu.cupy_modules import Modules
from llamac.gpu.devices import FoundDevice, FoundDevices
from llamac.gpu.early_launch import EarlyLauncher, early_launcher
from llamac.gpu.event_timer import event_recorder
from llamac.gpu.sources import kernel_files

SAMPLES = [Path(__file__).parent / "samples.cu"]
Device = tuple[Cuda, FakeRuntime]


@pytest.fixture
def cupy(kernel_cache: Path) -> tuple[Modules, FakeRuntime]:
    return fake_cupy(kernel_cache, SAMPLES)


@pytest.fixture
def device(cupy: tuple[Modules, FakeRuntime]) -> Iterator[Device]:
    modules, runtime = cupy
    cuda = Cuda(1, sources=SAMPLES, modules=modules)
    yield cuda, runtime
    cuda.close()
    left = runtime.pinned, runtime.streams, runtime.events, runtime.executables, runtime.graphs
    assert not any(left)
    assert runtime.contexts == {1}  # other devices may be full, or those of other processes
    assert runtime.emulator.memory()[0] == runtime.emulator.memory()[1]
    assert not modules.driver.modules  # type: ignore[attr-defined]


def test_memory_and_kernels(device: Device) -> None:
    cuda, runtime = device
    assert cuda.properties == ("NVIDIA Fake", (9, 0), 132, 99 << 10, 1 << 30, "13.1")
    x = np.arange(300, dtype=np.float32)
    at, to = put(cuda, x), put(cuda, np.zeros(300, np.float32))
    cuda.launch("scale", (3, 1, 1), 128, [to, at, np.int32(300), np.float32(0.5)])
    cuda.launch("scale", (0, 1, 1), 128, [to, at, np.int32(300), np.float32(7)])  # no blocks
    assert (get(cuda, to, np.float32, 300) == x / 2).all()
    cuda.fill(int(to), 0, 400)
    cuda.copy(int(to) + 400, int(at), 400)
    cuda.synchronize()
    assert (get(cuda, to, np.float32, 200) == [*[0] * 100, *x[:100]]).all()
    cuda.launch("reverse", (1, 1, 1), 96, [to, at], shared=98 << 10)
    assert cuda.memory() == ((1 << 30) - 2400, 1 << 30)
    cuda.free(int(at))
    with pytest.raises(ArgumentError, match="no memory was allocated at"):
        cuda.free(int(at))
    with pytest.raises(ArgumentError, match=r"no file of kernels has scales; they have .*scale, "):
        cuda.launch("scales", (1, 1, 1), 128, [])
    assert runtime.current == 0  # no context, as before each call


def test_kernels_start_early_after_other_kernels(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's function gets what CuPy's gets; its errors are llamac's."""
    cuda, _ = device
    driver: Any = cuda._cupy.driver
    calls, status = [], 0

    def launch(config: int, function: int, parameters: int, extra: int | None) -> int:
        grid, (threads, *_) = (ctypes.c_uint * 3).from_address(config), (ctypes.c_uint * 3).from_address(config + 12)
        shared, stream = ctypes.c_uint.from_address(config + 24).value, ctypes.c_void_p.from_address(config + 32).value
        attributes, count = (ctypes.c_size_t * 2).from_address(config + 40)
        kind, allowed = (ctypes.c_int * 3).from_address(attributes)[::2]
        assert (kind, allowed, count & 0xFFFFFFFF, extra) == (6, 1, 1, None)
        calls.append(function)
        if not status:
            driver.launchKernel(function, *grid, threads, 1, 1, shared, stream or 0, parameters, 0)
        return status

    monkeypatch.setattr(cuda, "_early", EarlyLauncher(launch))
    monkeypatch.setattr("llamac.gpu.cuda.EARLY", re.compile("scale"))
    at, to = put(cuda, np.arange(300, dtype=np.float32)), put(cuda, np.zeros(300, np.float32))
    arguments = [to, at, np.int32(300), np.float32(0.5)]
    cuda.launch("scale", (3, 1, 1), 128, arguments)  # after a copy: it waits as usual
    assert not calls
    cuda.launch("scale", (3, 1, 1), 128, [*arguments[:3], np.float32(2)])
    assert len(calls) == 1
    cuda.launch("reverse", (1, 1, 1), 96, [to, at], shared=98 << 10)  # waits for nothing itself
    assert len(calls) == 1
    with cuda.capture() as graph:
        cuda.launch("scale", (3, 1, 1), 128, [*arguments[:3], np.float32(4)])
        cuda.launch("scale", (3, 1, 1), 128, [*arguments[:3], np.float32(3)])
    assert len(calls) == 2
    graph.replay()
    cuda.synchronize()
    assert (get(cuda, to, np.float32, 300) == 3 * np.arange(300)).all()
    graph.close()
    cuda.launch("scale", (3, 1, 1), 128, arguments)
    status = 1
    with pytest.raises(DeviceError, match="launching scale"):
        cuda.launch("scale", (3, 1, 1), 128, arguments)


def test_operations_are_timed_also_in_graphs(device: Device) -> None:
    cuda, runtime = device
    at = put(cuda, np.ones(300, np.float32))
    timer = cuda.timer(3)

    def marked() -> None:
        for number in range(3):
            timer.mark(number)
            cuda.fill(int(at), number, 4)

    marked()
    first = timer.read()
    with cuda.capture() as graph:
        with pytest.raises(ArgumentError, match="a captured graph cannot make a timer"):
            cuda.timer(1)
        marked()
    assert (timer.read() == first).all()  # nothing has run
    graph.replay()
    found = timer.read()
    assert found.shape == (2,)
    assert (found > 0).all()
    assert (found != first).any()
    runtime.fail["eventElapsedTime"] = 801
    with pytest.raises(DeviceError, match="measuring"):
        timer.read()
    graph.close()
    timer.close()


def test_the_drivers_library_records_events(cupy: tuple[Modules, FakeRuntime], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int, int]] = []

    def called(event: int, stream: int, flags: int) -> int:
        calls.append((event, stream, flags))
        return 1 if event == 9 else 0

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuEventRecordWithFlags=called))
    record = event_recorder(cupy[0])
    record(7, 5, False)
    record(8, 5, True)
    with pytest.raises(cupy[0].driver.CUDADriverError):
        record(9, 5, True)
    assert calls == [(7, 5, 0), (8, 5, 1), (9, 5, 1)]
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    with pytest.raises(UnsupportedError, match="the driver cannot measure captured graphs, so nothing is profiled"):
        event_recorder(cupy[0])


def test_early_launches_need_a_device_and_a_driver_that_have_them() -> None:
    assert early_launcher((8, 9), 13000) is None
    assert early_launcher((9, 0), 12030) is None


def test_a_ring_of_pinned_memory_carries_copies_of_any_size(
    device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Even of a file that is mapped for reading only."""
    cuda, _ = device
    monkeypatch.setattr(pinned_ring, "CAPACITY", 1 << 14)
    monkeypatch.setattr(pinned_ring, "PIECE", 3000)
    generator = np.random.default_rng(0)
    monkeypatch.setattr(pinned_ring, "SMALLEST_PIECE", 500)
    for size in (1, 255, 3000, 3001, 100_001, 7):
        (tmp_path / "file").write_bytes(generator.bytes(size + 3))
        source = np.memmap(tmp_path / "file", np.uint8, "r", 3)
        assert (get(cuda, put(cuda, source), np.uint8, size) == source).all()


@pytest.mark.parametrize("size", [4, 100_001])
def test_copies_that_are_done_keep_no_events(device: Device, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """All are when a download is."""
    cuda, runtime = device
    monkeypatch.setattr(pinned_ring, "PIECE", 3000)
    at, numbers = put(cuda, np.zeros(size, np.uint8)), []
    for _ in range(3):
        for _ in range(4):
            cuda.upload(int(at), np.zeros(4, np.uint8))
        assert get(cuda, at, np.uint8, size).shape == (size,)
        numbers.append(len(runtime.events))
    assert numbers[0] == numbers[1] == numbers[2]


def test_garbage_is_not_collected_in_a_capture(device: Device, cupy: tuple[Modules, FakeRuntime]) -> None:
    """It may have memory of another driver, and a capture fails if its thread frees memory."""
    cuda, runtime = device
    other = Cuda(1, sources=SAMPLES, modules=cupy[0])

    class Garbage:
        def __init__(self) -> None:
            self.itself, self.address = self, other.alloc(8)

        def __del__(self) -> None:
            during.append(runtime.capturing is not None)
            other.free(self.address)

    during: list[bool] = []
    threshold = gc.get_threshold()
    gc.collect()
    Garbage()
    with cuda.capture() as graph:
        gc.set_threshold(1)
        assert len([[i] for i in range(1000)]) == 1000
        gc.set_threshold(*threshold)
        assert not during
    assert gc.isenabled()
    gc.collect()
    assert during == [False]
    graph.close()
    other.close()


def test_garbage_is_not_collected_while_any_of_several_drivers_captures(device: Device, kernel_cache: Path) -> None:
    cuda, _ = device
    other = Cuda(sources=SAMPLES, modules=fake_cupy(kernel_cache, SAMPLES)[0])
    first, second = cuda.capture(), other.capture()
    for kept, step in (
        (True, first.__enter__),
        (True, second.__enter__),
        (True, lambda: first.__exit__(None, None, None)),
        (False, lambda: second.__exit__(None, None, None)),
    ):
        step()
        assert gc.isenabled() is not kept
    gc.disable()
    try:
        with cuda.capture():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
    other.close()


def test_a_graph_replays_what_was_captured(device: Device) -> None:
    cuda, runtime = device
    x = put(cuda, np.arange(64, dtype=np.float32))
    with cuda.capture() as graph:
        cuda.launch("scale", (1, 1, 1), 64, [x, x, np.int32(64), np.float32(2)])
        cuda.fill(int(x), 0, 8)
        for name, operation in {
            "upload": lambda: put(cuda, np.zeros(1)),
            "alloc": lambda: cuda.alloc(1),
            "free": lambda: cuda.free(int(x)),
            "download": lambda: get(cuda, x, np.float32, 1),
            "synchronize": cuda.synchronize,
        }.items():
            with pytest.raises(ArgumentError, match=f"a captured graph cannot {'alloc' if name == 'upload' else name}"):
                operation()
    assert get(cuda, x, np.float32, 3).tolist() == [0, 1, 2]
    graph.replay()
    graph.replay()
    assert get(cuda, x, np.float32, 4).tolist() == [0, 0, 8, 12]
    graph.close()
    with pytest.raises(ArgumentError, match="closed"):
        graph.replay()
    with pytest.raises(ZeroDivisionError), cuda.capture() as graph:
        raise ZeroDivisionError
    assert runtime.capturing is None
    for function in ("graphInstantiate", "graphUpload"):
        runtime.fail[function] = 2
        with pytest.raises(OutOfMemoryError), cuda.capture() as graph:
            pass
        assert not runtime.executables
        with pytest.raises(ArgumentError, match="its capture failed"):
            graph.replay()


def test_memory_that_the_device_does_not_have(device: Device) -> None:
    cuda, _ = device
    with pytest.raises(
        OutOfMemoryError, match=r"Fake has 1\.1 GB of 1\.1 GB of memory left, and 2\.1 GB are needed: close"
    ):
        cuda.alloc(1 << 31)


def test_a_device_that_is_lost_says_so_from_then_on(cupy: tuple[Modules, FakeRuntime]) -> None:
    modules, runtime = cupy
    cuda = Cuda(sources=SAMPLES, modules=modules)
    runtime.fail["streamSynchronize"] = 1  # of one operation
    with pytest.raises(DeviceError, match=r"^computing: cudaError1$") as caught:
        cuda.synchronize()
    assert not caught.value.lost
    runtime.fail["streamSynchronize"] = 700
    with pytest.raises(
        DeviceError, match=r"cudaError700\. That is, a kernel used an address that is not the device's; "
    ) as caught:
        cuda.synchronize()
    assert caught.value.lost
    with pytest.raises(DeviceError, match="allocating memory: the device is lost: computing: cudaError700") as caught:
        cuda.alloc(1)
    assert caught.value.lost
    cuda.close()


@pytest.mark.parametrize(
    ("status", "problem"),
    [
        (220, "NVLink failed; this process can no longer use its devices: restart it"),
        (226, "hardware, or a connection between devices, failed; this process"),
        (810, "MPS.* ended; this process"),
        (911, "failed; this process"),
        (3, "CUDA cannot start in a process that was forked"),
        (46, "another process has the device"),
    ],
)
def test_after_these_errors_a_device_is_lost(cupy: tuple[Modules, FakeRuntime], status: int, problem: str) -> None:
    """Those of a driver that cannot start as well, once it has started: in a process that was forked later, say."""
    modules, runtime = cupy
    cuda = Cuda(sources=SAMPLES, modules=modules)
    runtime.fail["streamSynchronize"] = status
    with pytest.raises(DeviceError, match=rf"^computing: cudaError{status}\. That is, .*{problem}") as caught:
        cuda.synchronize()
    assert caught.value.lost
    cuda.close()


@pytest.mark.parametrize(
    ("status", "advice"), [(35, "install a newer driver, or llamac"), (100, "there is no device"), (803, "restart")]
)
def test_why_a_device_cannot_be_used(cupy: tuple[Modules, FakeRuntime], status: int, advice: str) -> None:
    modules, runtime = cupy
    runtime.fail["setDevice"] = status
    with pytest.raises(UnsupportedError, match=f"^looking for a device: cudaError{status}. That is, .*{advice}"):
        Cuda(sources=SAMPLES, modules=modules)
    with pytest.raises(UnsupportedError, match="no device has this number; `llamac inspect` lists devices"):
        Cuda(2, sources=SAMPLES, modules=modules)


def test_a_device_that_is_too_old(cupy: tuple[Modules, FakeRuntime], monkeypatch: pytest.MonkeyPatch) -> None:
    modules, runtime = cupy
    old = {**runtime.getDeviceProperties(0), "major": 7}
    monkeypatch.setattr(runtime, "getDeviceProperties", lambda device: old)
    with pytest.raises(UnsupportedError, match=r"NVIDIA Fake has compute capability 7.0; llamac needs at least 7\.5"):
        Cuda(sources=SAMPLES, modules=modules)


def test_a_driver_that_fails_to_start_frees_what_it_has(cupy: tuple[Modules, FakeRuntime]) -> None:
    modules, runtime = cupy
    runtime.fail["hostAlloc"] = 2
    with pytest.raises(OutOfMemoryError, match="loading the kernels: cudaError2"):
        Cuda(sources=SAMPLES, modules=modules)
    assert not runtime.streams
    assert not modules.driver.modules  # type: ignore[attr-defined]


# ---- compiled kernels


def test_compiled_kernels_are_kept(cupy: tuple[Modules, FakeRuntime], tmp_path: Path) -> None:
    modules, _ = cupy
    nvrtc = modules.nvrtc
    assert isinstance(nvrtc, FakeNvrtc)
    phases: list[tuple[str, int, int]] = []
    for count, damage in ((1, False), (1, True), (2, False)):
        Cuda(sources=SAMPLES, cache=tmp_path / "a", modules=modules, progress=lambda *step: phases.append(step)).close()
        assert nvrtc.compiled == count
        [kept] = (tmp_path / "a").iterdir()
        assert re.fullmatch(r"samples-[0-9a-f]{32}\.cubin", kept.name)
        if damage:
            kept.write_bytes(kept.read_bytes()[:-1])
    assert phases == [("compiling kernels", 0, 1), ("compiling kernels", 1, 1)] * 2
    (tmp_path / "file").touch()  # no folder: nothing is kept
    Cuda(sources=SAMPLES, cache=tmp_path / "file", modules=modules).close()


@pytest.mark.parametrize(("version", "package"), [((13, 0), "nvidia-cuda-nvrtc"), ((12, 6), "nvidia-cuda-nvrtc-cu12")])
def test_a_kernel_that_does_not_compile(
    cupy: tuple[Modules, FakeRuntime],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: tuple[int, int],
    package: str,
) -> None:
    monkeypatch.setattr(cupy[0].nvrtc, "getVersion", lambda: version)
    (tmp_path / "wrong.cu").write_text("refused")
    advice = rf"a newer device needs a newer NVRTC \(pip install -U {package}\)"
    number = rf"{version[0]}\.{version[1]}"
    with pytest.raises(
        DeviceError,
        match=rf"NVRTC {number} does not compile wrong\.cu for compute capability 9\.0; {advice}: (.|\n)*refused",
    ):
        Cuda(sources=[tmp_path / "wrong.cu"], modules=cupy[0])


# ---- the real CuPy


def parameters(function: Any) -> list[str]:
    """The names of the parameters of one of CuPy's functions, whose first line of documentation has them."""
    found = re.match(r"\w+\((.*?)\)", function.__doc__ or "")
    assert found, function
    return [re.split(r"[ *]", part.split("=")[0].strip())[-1] for part in found[1].split(",") if part.strip()]


@pytest.mark.parametrize(("name", "fake"), [("runtime", FakeRuntime), ("driver", FakeDriver), ("nvrtc", FakeNvrtc)])
def test_the_fake_has_the_parameters_of_cupy(name: str, fake: type) -> None:
    """The fake, in turn, is checked against the types that the driver is checked with."""
    cuda = pytest.importorskip("cupy.cuda", reason="CuPy is not installed (extra: cuda12 or cuda13)")
    real, types = getattr(cuda, name), getattr(cupy_modules, name.capitalize())
    names = [each for each in (*vars(types), *types.__annotations__) if not each.startswith("_")]
    assert len(names) > 5
    for each in names:
        if inspect.isfunction(getattr(fake, each)):
            assert list(inspect.signature(getattr(fake, each)).parameters)[1:] == parameters(getattr(real, each))
        elif isinstance(getattr(fake, each), int):
            assert getattr(fake, each) == getattr(real, each)
        else:
            assert issubclass(getattr(real, each), RuntimeError)


# ---- a model


def test_a_model_has_the_bits_of_the_cpu_and_leaves_nothing_behind(
    tmp_path: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the driver of CUDA: uploads, launches, captured graphs, pages of a cache."""
    modules, runtime = fake_cupy(kernel_cache, kernel_files())
    listed = FoundDevices((FoundDevice(0, "NVIDIA Fake", (9, 0), 132, 1 << 30),), "13.1", "cupy-cuda13x 14.2.0", None)
    monkeypatch.setattr("llamac.gpu.devices.find_devices", lambda: listed)
    monkeypatch.setattr("llamac.gpu.cuda.load_cupy", lambda: modules)
    device = FoundDevice(0, "fake", (8, 0), 4, 1 << 30)
    monkeypatch.setattr("llamac.gpu.devices.find_devices", lambda: FoundDevices((device,), "13.0", None, None))
    monkeypatch.setenv("LLAMAC_CACHE", str(tmp_path))
    ids = some_ids(16)
    with llamac.load(write_model(tmp_path / "m.bin", checkpoint(llama_config()))) as model:
        found = []
        for name in ("cpu", "cuda"):
            with model.session(device=name) as session:
                found.append([session.eval(ids[:12]), *(session.eval([each]) for each in ids[12:])])
        assert runtime.executables  # steps of one token were captured
        assert (np.array(found[0]).view(np.uint32) == np.array(found[1]).view(np.uint32)).all()
    assert not any([runtime.pinned, runtime.streams, runtime.events, runtime.executables, runtime.graphs])
    assert runtime.emulator.memory()[0] == runtime.emulator.memory()[1]
