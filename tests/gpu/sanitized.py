"""Runs the tests of kernels on the emulated device under AddressSanitizer and UBSan. Fails if a kernel never ran.

    python tests/gpu/sanitized.py [argument of pytest]...

It is also the plugin of pytest that records the launched kernels, with `-n` in every worker of pytest-xdist.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llamac.gpu.emulator.build import compiler
from llamac.gpu.emulator.emulator import Emulator

TESTS = Path(__file__).parents[1]
FILES = (
    *("test_layer_kernels.py", "test_recurrent_kernels.py", "test_drafter_kernels.py", "test_device_draws.py"),
    "test_products.py",
)
SANITIZERS = {"address": "libasan.so", "undefined": "libubsan.so"}

launched: set[str] = set()


def main(arguments: list[str]) -> int:
    libraries = [path for path in map(library, SANITIZERS) if path]
    if len(libraries) < len(SANITIZERS):
        sys.exit(f"{compiler()[0][0]} has no sanitizers in shared libraries, which g++ has (CXX=g++)")
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "gpu.sanitized"),
        "--capture=sys",  # sanitizers report to the process's own stderr
        *("-k", "not checked and not benchmark and not draws_on"),  # these are without sanitizers
        *(str(Path(__file__).with_name(name)) for name in FILES),
        *arguments,
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH")))),
        "EMULATOR_SANITIZE": ",".join(SANITIZERS),
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python leaves memory to the end of the process
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    return subprocess.run(command, env=environment).returncode


def library(sanitizer: str) -> str | None:
    """The compiler's library, which must be in the process before Python loads kernels; None if it has none."""
    command = [*compiler()[0], f"-print-file-name={SANITIZERS[sanitizer]}"]
    path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return path if os.path.isabs(path) else None


# ---- the plugin


def pytest_configure() -> None:
    launch = Emulator.launch

    def recorded_launch(self: Emulator, kernel: str, *arguments: Any, **options: Any) -> None:
        launched.add(kernel)
        launch(self, kernel, *arguments, **options)

    Emulator.launch = recorded_launch  # type: ignore[method-assign]


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, in the process that started the worker
def pytest_testnodedown(node: Any) -> None:
    launched.update(getattr(node, "workeroutput", {}).get("launched", ()))  # a worker that crashed has no output


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["launched"] = sorted(launched)
        return
    if exitstatus or session.config.option.collectonly:
        return
    cache = session.config.cache
    assert cache is not None
    device = Emulator(Path(cache.mkdir("kernels")), sanitize=os.environ["EMULATOR_SANITIZE"])
    missing = sorted(set(device.kernels()) - launched)
    print(f"\nunder sanitizers ran {len(launched)} kernels; these did not: {', '.join(missing) or 'none'}")
    if missing:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
