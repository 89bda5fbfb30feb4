"""Names of devices, and what loading for a device does without one."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import llamac
from builders import checkpoint, llama_config, write_model
from commands import Command
from llamac.errors import (
    ArgumentError,
    ArgumentTypeError,
    DeviceError,
    LlamacWarning,
    OutOfMemoryError,
    UnsupportedError,
)
from llamac.gpu import device_names, devices
from llamac.gpu.devices import FoundDevice, FoundDevices

NO_DRIVER = FoundDevices((), None, None, "the machine has no driver of NVIDIA (libcuda.so.1)")
GPU = FoundDevice(0, "a GPU", (9, 0), 132, 80 << 30)
NO_CUPY = "CuPy is not installed: pip install 'llamac[cuda13]'"


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a driver."""
    monkeypatch.setattr(devices, "find_devices", lambda: NO_DRIVER)


@pytest.mark.parametrize(("name", "canonical"), [("cuda", "cuda:0"), ("cuda:3", "cuda:3"), ("cpu", "cpu")])
def test_names_have_one_form(name: str, canonical: str) -> None:
    assert device_names.check_name(name) == canonical


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:01", "cuda:-1", "CUDA", "cuda:0 ", ""])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match="expected 'cpu', 'cuda', 'cuda:N' or 'auto'"):
        llamac.load("stories", device=name)


def test_a_name_is_a_str() -> None:
    with pytest.raises(ArgumentTypeError, match="device must be a str"):
        llamac.load("stories", device=0)  # type: ignore[arg-type]


def test_a_missing_device_is_an_error_and_auto_warns(no_gpu: None) -> None:
    with pytest.raises(DeviceError, match="there is no cuda:1: the machine has no driver"):
        llamac.load("stories", device="cuda:1")
    with pytest.warns(LlamacWarning, match="computing on the CPU: there is no cuda:0"):
        model = llamac.load("stories", device="auto")
    with model, model.session() as session:
        assert session.device == "cpu"


@pytest.mark.parametrize(("count", "has"), [(1, "only cuda:0"), (2, "cuda:0 to cuda:1")])
def test_a_number_beyond_the_last_device_is_an_error(monkeypatch: pytest.MonkeyPatch, count: int, has: str) -> None:
    monkeypatch.setattr(devices, "find_devices", lambda: FoundDevices((GPU,) * count, "13.0", None, NO_CUPY))
    with pytest.raises(DeviceError, match=f"there is no cuda:2: the machine has {has}$"):
        device_names.open_driver("cuda:2")


@pytest.mark.parametrize(
    ("problem", "why"),
    [
        (NO_CUPY, f"cuda:0 cannot be used: {NO_CUPY}"),
        (None, "through CuPy and NVRTC, of which one is missing or broken: pip install .*: CuPy failed to load"),
    ],
)
def test_without_cupy_or_its_compiler_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, problem: str | None, why: str
) -> None:
    def broken() -> None:
        raise RuntimeError("CuPy failed to load libnvrtc.so.13")

    cuda = ModuleType("cupy.cuda")
    vars(cuda).update(driver=None, runtime=None, nvrtc=SimpleNamespace(getVersion=broken))
    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.setattr(devices, "find_devices", lambda: FoundDevices((GPU,), "13.0", None, problem))
    with pytest.raises(UnsupportedError, match=why.replace("[", r"\[")):
        llamac.load("stories", device="cuda")
    with pytest.warns(LlamacWarning, match="computing on the CPU: "), llamac.load("stories", device="auto") as model:
        assert model.memory().device is None


def test_the_command_line_reports_devices(no_gpu: None, llamac_command: Command) -> None:
    llamac_command("run", "-i", "x", "--device", "cuda").fails_with("there is no cuda:0")
    done = llamac_command("run", "-i", "x", "-n", "1", "--device", "auto")
    assert done.code == 0
    assert "warning: computing on the CPU: there is no cuda:0" in done.err


def test_a_model_is_on_one_device(tmp_path: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMAC_CACHE", str(kernel_cache.parent))
    with llamac.load(write_model(tmp_path / "m.bin", checkpoint(llama_config())), device="emulator") as model:
        with pytest.raises(ArgumentError, match="the model is on emulator: load it again for cuda:0"):
            model.session(device="cuda")
        with model.session() as session:
            session.eval([1, 2, 3], logits=None)
            assert "emulator" in repr(session)
            memory = model.memory().device
            assert memory is not None
            assert memory.weights >= model.weight_bytes
            assert min(memory.kv, memory.activations, memory.free) > 0
        after = model.memory().device
        assert after is not None
        assert (after.name, after.kv) == ("emulator", 0)


def test_weights_that_do_not_fit_are_refused_with_sizes(
    tmp_path: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llamac.gpu.emulator.emulator import Emulator

    monkeypatch.setattr(device_names, "open_driver", lambda name, progress: Emulator(kernel_cache, memory=100_000))
    monkeypatch.setattr("llamac.gpu.device_model.open_driver", device_names.open_driver)
    path = write_model(tmp_path / "m.bin", checkpoint(llama_config()))
    with pytest.raises(OutOfMemoryError, match=r"the weights need .* but emulated device has .* free"):
        llamac.load(path, device="emulator")
    gc.collect()
    with llamac.load(path) as model:  # the file is usable
        assert model.logits([1]).shape == (1, 301)
