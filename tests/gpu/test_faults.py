"""If any call of CUDA fails while a model loads, computes or closes, llamac raises its own error and leaks nothing.

One call of each function fails, or several with --faults N (`python -m bench.gpu --faults`).
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from gpu.faults import INVALID_VALUE, LOST, Faults

import llamac
from builders import Floats, checkpoint, llama_config, some_ids, write_model
from fake_cupy import fake_cupy
from llamac.errors import DeviceError, LlamacError, LlamacWarning, OutOfMemoryError
from llamac.gpu.cupy_modules import load_cupy
from llamac.gpu.devices import FoundDevice, FoundDevices
from llamac.gpu.sources import kernel_files

IDS = some_ids(6)
OUT_OF_MEMORY = 2


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model."""
    return write_model(tmp_path_factory.mktemp("model") / "m.bin", checkpoint(llama_config(n_layers=1)))


@pytest.fixture(scope="module")
def expected(path: Path) -> Floats:
    """What `computed` returns."""
    with llamac.load(path) as model:
        return computed(model)


@pytest.fixture
def faults(request: pytest.FixtureRequest, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Faults:
    """The modules of CuPy, or the fake ones on the emulator."""
    monkeypatch.setenv("LLAMAC_CACHE", str(kernel_cache.parent))
    if request.config.getoption("device") == "emulator":
        modules, _ = fake_cupy(kernel_cache, kernel_files())
        found = FoundDevices((FoundDevice(0, "fake", (9, 0), 132, 1 << 30),), "13.1", "cupy-cuda13x 14.2.0", None)
        monkeypatch.setattr("llamac.gpu.devices.find_devices", lambda: found)
    else:
        modules = load_cupy()
    faults = Faults(modules)
    monkeypatch.setattr("llamac.gpu.cuda.load_cupy", lambda: faults.modules)
    return faults


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """The name of the device whose calls fail."""
    name = str(request.config.getoption("device"))
    return "cuda:0" if name == "emulator" else name


@pytest.fixture
def failing(
    request: pytest.FixtureRequest, faults: Faults, path: Path, device: str
) -> Iterator[Callable[[float], list[int]]]:
    """Returns the numbers of the calls that shall fail. Afterwards a load works.

    Its argument, 0 to 1, says which of a function's calls: 0 the first, 1 the last, if one fails.
    """

    def numbers(place: float) -> list[int]:
        faults.fail(0, 0)
        with llamac.load(path, device=device) as model:
            computed(model)
        assert faults.held == []
        most: int = request.config.getoption("faults")
        found: list[int] = []
        for name in set(faults.calls):
            places = [number for number, other in enumerate(faults.calls, 1) if other == name]
            count = min(most, len(places))
            found += {places[int((i + place) * (len(places) - 1) / count)] for i in range(count)}
        return sorted(found)

    yield numbers
    faults.fail(0, 0)
    with llamac.load(path, device=device) as model:
        computed(model)
    assert faults.held == []
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("llamac-upload")]


def computed(model: llamac.Model) -> Floats:
    """Compute a prompt and some tokens, the last of which replay a captured graph."""
    with model.session(context=64) as session:
        return np.stack([session.eval(IDS[:2]), *(session.eval([each]) for each in IDS[2:])])


def error_of(path: Path, device: str, expected: Floats) -> LlamacError | None:
    """The error of loading, computing and closing. Without one, the bits are the CPU's."""
    try:
        with llamac.load(path, device=device) as model:
            found = computed(model)
    except LlamacError as error:
        return error
    np.testing.assert_array_equal(found, expected)
    return None


@pytest.mark.parametrize(("status", "place"), [(INVALID_VALUE, 0.0), (OUT_OF_MEMORY, 1.0)])
def test_a_call_that_fails_is_an_error_and_leaves_nothing(
    failing: Callable[[float], list[int]],
    faults: Faults,
    path: Path,
    device: str,
    expected: Floats,
    status: int,
    place: float,
) -> None:
    errors = []
    for number in failing(place):
        faults.fail(number, status)
        errors.append(error_of(path, device, expected))
        assert faults.held == [], number
    assert set(map(type, errors)) <= {type(None), DeviceError, OutOfMemoryError}
    assert len([error for error in errors if error is not None]) > 4


def test_a_device_that_is_lost_is_an_error_and_everything_can_be_closed(
    failing: Callable[[float], list[int]], faults: Faults, path: Path, device: str, expected: Floats
) -> None:
    errors = []
    for number in failing(0.5):
        faults.fail(number, LOST)
        errors.append(error_of(path, device, expected))
        faults.destroy_all()
    assert {error.lost for error in errors if isinstance(error, DeviceError)} == {True}
    assert set(map(type, errors)) <= {type(None), DeviceError}  # closing ignores errors


def test_auto_computes_on_the_cpu_whichever_call_fails(
    failing: Callable[[float], list[int]], faults: Faults, path: Path, expected: Floats
) -> None:
    for number in failing(0.3):
        faults.fail(number, LOST)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            with llamac.load(path, device="auto") as model:
                np.testing.assert_array_equal(computed(model), expected)
        assert len(found) <= 1
        assert all(each.category is LlamacWarning and "on the CPU" in str(each.message) for each in found)
        faults.destroy_all()
