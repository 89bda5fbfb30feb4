"""Fixtures of the tests of kernels: emulated devices, and the core's kernels."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gpu import reference

from llamac.gpu.emulator.emulator import Emulator
from prophet import draft_with_models


@pytest.fixture(scope="session", autouse=True)
def compilers_without_sanitizers() -> None:
    """What is preloaded in this process would only slow down a compiler that it starts.

    A fixture, because the process that starts the workers of pytest-xdist must leave it to them.
    """
    if "EMULATOR_SANITIZE" in os.environ:
        os.environ.pop("LD_PRELOAD", None)


@pytest.fixture(scope="session")
def core_kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The core's scalar kernels."""
    return reference.build(tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="session")
def nvrtc() -> Any:
    """CuPy's module, if NVRTC is also installed."""
    cuda = pytest.importorskip("cupy.cuda", reason="CuPy is not installed (extra: cuda12 or cuda13)")
    try:
        cuda.nvrtc.getVersion()
    except RuntimeError:
        pytest.skip("NVRTC is not installed (extra: cuda12 or cuda13)")
    return cuda.nvrtc


@pytest.fixture
def drafting_device(request: pytest.FixtureRequest, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device (--device). Drafters draft 4 tokens from the first step on."""
    monkeypatch.setenv("LLAMAC_CACHE", str(kernel_cache.parent))
    draft_with_models(monkeypatch, 4)
    return str(request.config.getoption("device"))


@pytest.fixture
def emulator(kernel_cache: Path) -> Iterator[Callable[..., Emulator]]:
    """Makes emulated devices with the package's kernels: emulator(seed=1), or emulator([path]) with other kernels.

    EMULATOR_CHECKED=1 in the environment checks every access to memory, EMULATOR_SEED=N runs threads in another order,
    and EMULATOR_SANITIZE=undefined looks for undefined behavior, in all tests of kernels.
    """
    defaults = {
        "checked": os.environ.get("EMULATOR_CHECKED") == "1",
        "seed": int(os.environ.get("EMULATOR_SEED", "0")),
        "sanitize": os.environ.get("EMULATOR_SANITIZE", ""),
    }
    made: list[Emulator] = []

    def make(*arguments: Any, **options: Any) -> Emulator:
        chosen = {**defaults, **options}
        if chosen["checked"]:  # which takes the place of a sanitizer
            chosen["sanitize"] = ""
        made.append(Emulator(kernel_cache, *arguments, **chosen))
        return made[-1]

    yield make
    for each in made:
        each.close()
