"""The cards of the budgets, launches without a device, and the number of warps that a multiprocessor holds.

Registers come from tests/gpu/registers.txt.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from llamac.gpu.driver import Properties, ceil_div

ROOT = Path(__file__).resolve().parents[1]
REGISTERS = ROOT / "tests" / "gpu" / "registers.txt"
Needs = dict[str, dict[str, tuple[int, int]]]  # the registers and spilled bytes of each kernel, by device


class Card(NamedTuple):
    """A GPU.

    Attributes:
        capability: The column of registers.txt.
        multiprocessors: Number of multiprocessors.
        warps: The most warps that a multiprocessor holds.
        shared: Bytes of shared memory of a multiprocessor. Each block of threads reserves 1 KB of it.
        doubles: Operations on doubles that a multiprocessor begins in a cycle.
        clock: Frequency under load in Hz.
        copy: Bytes per second that a copy reads and writes.
        starts_early: Whether it has programmatic dependent launches.
    """

    name: str
    capability: str
    multiprocessors: int
    warps: int
    shared: int
    doubles: int
    clock: float
    copy: float
    starts_early: bool


H200 = Card("H200", "sm_90", 132, 64, 228 << 10, 64, 1.755e9, 4.241e12, True)
H100 = Card("H100", "sm_90", 132, 64, 228 << 10, 64, 1.755e9, 3.0e12, True)
# A copy is assumed to reach 92% of 1,008 GB/s. Compute capability 8.9 has no programmatic dependent launches.
RTX_4090 = Card("RTX 4090", "sm_89", 128, 48, 100 << 10, 2, 2.52e9, 0.927e12, False)


class Launch(NamedTuple):
    """A launch without its arguments."""

    kernel: str
    grid: tuple[int, int, int]
    threads: int
    shared: int

    @property
    def blocks(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]


class Recorder:
    """A device that keeps its launches instead of running them."""

    def __init__(self, card: Card) -> None:
        capability = (int(card.capability[3:]) // 10, int(card.capability[3:]) % 10)
        shared = card.shared - 1024
        self.properties = Properties(card.name, capability, card.multiprocessors, shared, 1 << 34, "none")
        self.launches: list[Launch] = []

    def launch(self, kernel: str, grid: tuple[int, int, int], threads: int, _: Any, shared: int = 0) -> None:
        self.launches.append(Launch(kernel, grid, threads, shared))

    def alloc(self, size: int) -> int:
        return size

    def upload(self, address: int, source: Any) -> None:
        pass

    def download(self, address: int, to: Any) -> None:
        to[:] = 0


def registers() -> Needs:
    """Read the table."""
    _, _, header, *rows = REGISTERS.read_text("utf-8").splitlines()
    names, found = header.split()[1:], {}
    for kernel, *cells in (row.split() for row in rows):
        if not kernel.endswith(".cu"):
            pairs = (cell.partition("+") for cell in cells)
            found[kernel] = dict(zip(names, ((int(n), int(spilled or 0)) for n, _, spilled in pairs), strict=True))
    return found


def warps_held(card: Card, needs: int, threads: int = 32, shared: int = 0) -> int:
    """The warps that a multiprocessor holds, with blocks of this size and threads that need this many registers."""
    of_warp = ceil_div(32 * needs, 256) * 256
    warps, of_block = min(card.warps, 4 * ((64 << 10) // 4 // of_warp)), threads // 32
    blocks = warps // of_block
    if shared:
        blocks = min(blocks, card.shared // (shared + 1024))
    return blocks * of_block
