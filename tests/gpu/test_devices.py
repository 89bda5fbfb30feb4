"""The list of the machine's devices, with a library in place of the driver's."""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llamac.gpu.devices import find_devices

PROGRAM = "import json; from llamac.gpu.devices import find_devices; print(json.dumps(find_devices()))"
OLD = [[0, "NVIDIA First", [6, 0], 132, 1 << 33], [1, "NVIDIA Second", [6, 1], 132, 1 << 34]]
DEVICES = [[0, "NVIDIA First", [9, 0], 132, 1 << 33], [1, "NVIDIA Second", [9, 1], 132, 1 << 34]]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a fake libcuda.so.1."""
    folder = tmp_path_factory.mktemp("driver")
    source = Path(__file__).parent / "fake_libcuda.c"
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", folder / "libcuda.so.1"], check=True)
    return folder


@pytest.mark.parametrize(
    ("options", "found", "driver", "problem"),
    [
        ({}, DEVICES, "13.1", None),
        ({"FAKE_COUNT": "0"}, [], "13.1", "the driver has no device; CUDA_VISIBLE_DEVICES or"),
        ({"FAKE_INIT": "999"}, [], "13.1", "the driver does not start: CUDA_ERROR_UNKNOWN: unknown error"),
        ({"FAKE_INIT": "5"}, [], "13.1", "the driver does not start: error 5: unknown"),
        ({"FAKE_INIT": "3"}, [], "13.1", "the driver does not start: error 3: unknown. That is, CUDA cannot start"),
        ({"FAKE_MAJOR": "6"}, OLD, "13.1", "no device has compute capability 7.5 or more"),
    ],
)
def test_devices_are_listed_as_the_driver_has_them(
    library: Path, options: dict[str, str], found: list[object], driver: str, problem: str | None
) -> None:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library), **options}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    listed, version, cupy, why = json.loads(done.stdout)
    assert (listed, version) == (found, driver)
    if problem:
        assert why.startswith(problem)
    else:
        assert why == (None if cupy else "CuPy is not installed: pip install 'llamac[cuda13]'")


@pytest.mark.parametrize(
    ("package", "version", "problem"),
    [
        ("cupy-cuda13x", "13000", None),
        ("cupy-cuda12x", "13000", None),
        ("cupy-cuda12x", "12080", None),
        ("cupy-cuda13x", "12080", "the driver supports CUDA 12.8 only: pip uninstall cupy-cuda13x; pip install"),
        ("none", "12080", "CuPy is not installed: pip install 'llamac[cuda12]'"),
    ],
)
def test_the_right_cupy_for_the_driver(
    library: Path, monkeypatch: pytest.MonkeyPatch, package: str, version: str, problem: str | None
) -> None:
    def version_of(name: str) -> str:
        if name != package:
            raise importlib.metadata.PackageNotFoundError(name)
        return "14.2.0"

    load = ctypes.CDLL
    monkeypatch.setattr(importlib.metadata, "version", version_of)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: load(str(library / name)))
    monkeypatch.setenv("FAKE_VERSION", version)
    found = find_devices()
    assert found.cupy == (None if package == "none" else f"{package} 14.2.0")
    assert (found.problem or "").startswith(problem or "")
    assert bool(found.problem) == bool(problem)


def test_a_machine_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    found = find_devices()
    assert found[:3] == ((), None, found.cupy)
    assert (found.problem or "").startswith("the machine has no driver of NVIDIA (libcuda.so.1); a container")
