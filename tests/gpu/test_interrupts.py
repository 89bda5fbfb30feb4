"""Signals that arrive while the main thread uses a device: Ctrl-C, and handlers that compute with other sessions."""

from __future__ import annotations

import faulthandler
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu.failing_device import FailingDevice

import llamac
from builders import checkpoint, llama_config, some_ids, write_model
from fake_cupy import FakeRuntime, fake_cupy
from llamac.gpu.devices import FoundDevice, FoundDevices
from llamac.gpu.sources import kernel_files

IDS = some_ids(70)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model."""
    return write_model(tmp_path_factory.mktemp("model") / "m.bin", checkpoint(llama_config()))


@pytest.fixture
def runtime(kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    """The runtime of the fake CuPy that models for "cuda" use."""
    modules, runtime = fake_cupy(kernel_cache, kernel_files())
    found = FoundDevices((FoundDevice(0, "fake", (9, 0), 132, 1 << 30),), "13.1", "cupy-cuda13x 14.2.0", None)
    monkeypatch.setattr("llamac.gpu.devices.find_devices", lambda: found)
    monkeypatch.setattr("llamac.gpu.cuda.load_cupy", lambda: modules)
    monkeypatch.setenv("LLAMAC_CACHE", str(kernel_cache.parent))
    return runtime


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Install Python's handler. Python does not if the tests run as a background job, where shells ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def alarm() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Sets what SIGALRM calls. A test that hangs ends the process."""

    def set_call(call: Callable[[], object]) -> None:
        signal.signal(signal.SIGALRM, lambda number, frame: call())

    before = signal.getsignal(signal.SIGALRM)
    faulthandler.dump_traceback_later(300, exit=True)
    yield set_call
    faulthandler.cancel_dump_traceback_later()
    signal.signal(signal.SIGALRM, before)


def evaluate(session: llamac.Session, *texts: list[int]) -> None:
    """Eval texts, one after another."""
    for ids in texts:
        session.eval(ids)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("function", ["streamBeginCapture", "free", "graphInstantiate", "malloc"])
def test_a_model_works_after_ctrl_c_in_any_call_of_cuda(path: Path, runtime: FakeRuntime, function: str) -> None:
    """The signal arrives during the call. Python would raise KeyboardInterrupt right after it."""
    call: Callable[..., Any] = getattr(runtime, function)

    def interrupted(*arguments: Any) -> Any:
        setattr(runtime, function, call)
        found = call(*arguments)
        signal.raise_signal(signal.SIGINT)
        return found

    with llamac.load(path) as cpu, llamac.load(path, device="cuda") as model, model.session() as session:
        session.eval(IDS[:3])
        setattr(runtime, function, interrupted)
        with pytest.raises(KeyboardInterrupt):
            evaluate(session, *[IDS[:2], IDS[:40]] * 3)
        session.truncate(0)
        for _ in range(3):
            np.testing.assert_array_equal(session.eval(IDS), cpu.logits(IDS)[-1])
            session.truncate(0)
    assert runtime.emulator.memory()[0] == runtime.emulator.memory()[1]
    assert not runtime.executables


@pytest.mark.parametrize("function", ["launch", "upload", "download", "copy", "memory"])
def test_a_signal_handler_computes_while_its_thread_uses_the_device(
    path: Path,
    kernel_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    alarm: Callable[[Callable[[], object]], None],
    function: str,
) -> None:
    """During an eval, copies of pages, and questions for memory. Another session computes meanwhile."""
    device = FailingDevice(kernel_cache)
    monkeypatch.setattr("llamac.gpu.device_model.open_driver", lambda name, progress: device)
    call: Callable[..., Any] = getattr(device, function)

    def interrupted(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(device, function, call)
        signal.raise_signal(signal.SIGALRM)
        return call(*arguments, **options)

    with llamac.load(path, device="emulator") as model, model.session() as session, model.session() as other:
        found = [other.eval(IDS[:2])]
        other.truncate(0)
        alarm(lambda: found.append(other.eval(IDS[:2])))
        session.eval(IDS[:9])
        monkeypatch.setattr(device, function, interrupted)
        if function == "launch":
            session.eval(IDS[9:12])
        with session.fork() as fork:
            fork.eval(IDS[:2])
            session.shift(2, 4)
        model.memory()
        assert len(found) == 2
        np.testing.assert_array_equal(found[0], found[1])
