"""The parts of bench/gpu.py about reliability: calls of CUDA that fail, and leaks over many cycles."""

from __future__ import annotations

import subprocess
import sys
from typing import NamedTuple

import llamac
from bench.live_server import live_bytes
from bench.stamp import ROOT
from llamac.gpu.device_names import open_driver

IDS = [1, 2, 3]
FAULTS = 4  # the most calls of each function of CUDA that fail: each takes a load, about a second on a GPU
# The most bytes that may leak: less than one allocation on a device, 256 bytes, per cycle. Caches of Python
# and of the system's libraries grow in steps.
BYTES_PER_CYCLE = {"device": 128, "host": 1024}
SLACK = {"device": 0, "host": 1 << 20}


class Leaks(NamedTuple):
    """Bytes that cycles of loading, computing and closing have leaked, on the device and in this process."""

    cycles: int
    device: int
    host: int

    @property
    def problem(self) -> str | None:
        """What leaks; None if nothing does."""
        for name in ("device", "host"):
            lost: int = getattr(self, name)
            if lost > SLACK[name] + BYTES_PER_CYCLE[name] * self.cycles:
                return f"{self.cycles} cycles of loading and closing lost {lost} bytes of the {name}'s memory"
        return None


def run_tests(device: str, *arguments: str) -> None:
    """Run tests of sessions on a device. Raises SystemExit if one fails."""
    command = [sys.executable, "-m", "pytest", "-q", *arguments, "--device", device]
    if subprocess.run(command, cwd=ROOT).returncode:
        raise SystemExit(f"tests fail on {device}: {' '.join(command)}")


def check_faults(device: str) -> None:
    """Make calls of CUDA fail. Raises SystemExit if anything is left, or if the error is not one of llamac's."""
    run_tests(device, "tests/gpu/test_faults.py", "--faults", str(FAULTS))
    print(f"{FAULTS} calls of each function of CUDA have failed: the errors were llamac's, and nothing was left")


def check_leaks(device: str, cycles: int) -> Leaks:
    """Load, compute and close many times. Raises SystemExit if memory keeps growing."""
    driver = open_driver(device)
    before = [0, 0]
    for i in range(-(cycles // 10) - 1, cycles):  # the first ones fill caches
        if i == 0:
            before = [driver.memory()[0], live_bytes()]
        with llamac.load("stories", device=device) as model, model.session() as session:
            session.eval(IDS)
            for _ in range(3):  # the last one replays a captured graph
                session.eval(IDS[:1])
    found = Leaks(cycles, before[0] - driver.memory()[0], live_bytes() - before[1])
    driver.close()
    print(f"{cycles} cycles of loading and closing: {found.device} bytes of the device lost, {found.host} of the host")
    if found.problem:
        raise SystemExit(found.problem)
    return found
