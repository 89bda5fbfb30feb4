"""Budgets of the GPU kernels on paper: what each needs of a multiprocessor, and a decode step of an 8B model.

python -m bench.gpu_budgets    writes bench/GPU_BUDGETS.md

Registers come from tests/gpu/registers.txt, and grids, threads and shared memory from the launches themselves.
Instructions were counted in machine code. The rest follows from measurements of LOG.md: MEASURED and what is below it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, cast

from llamac import _core
from llamac.gpu import launches
from llamac.gpu.driver import Driver, Properties, ceil_div
from llamac.gpu.launches import Matrix, Part

ROOT = Path(__file__).resolve().parents[1]
REGISTERS = ROOT / "tests" / "gpu" / "registers.txt"
DOCUMENT = ROOT / "bench" / "GPU_BUDGETS.md"
DTYPES = dict(_core.dtypes())


class Card(NamedTuple):
    """A GPU.

    Attributes:
        capability: The column of registers.txt.
        multiprocessors: Their number.
        warps: That a multiprocessor holds at most.
        shared: The bytes of its shared memory, of which each block of threads has 1 KB for itself.
        clock: In Hz, while it computes.
        copy: The bytes per second that a copy reads and writes.
        late: The microseconds per layer that kernels take longer because they cannot start early.
    """

    name: str
    capability: str
    multiprocessors: int
    warps: int
    shared: int
    clock: float
    copy: float
    late: float


H200 = Card("H200", "sm_90", 132, 64, 228 << 10, 1.755e9, 4.241e12, 0)
H100 = Card("H100", "sm_90", 132, 64, 228 << 10, 1.755e9, 3.0e12, 0)
# A copy is assumed to reach 92% of 1,008 GB/s. Compute capability 8.9 has no programmatic dependent launches.
RTX_4090 = Card("RTX 4090", "sm_89", 128, 48, 100 << 10, 2.52e9, 0.927e12, 10)

COLUMNS = 4096
Shape = tuple[tuple[int, ...], int]  # the rows of the matrices of a launch, and their columns
LAYER: tuple[Shape, ...] = (
    ((4096, 1024, 1024), COLUMNS),
    ((4096,), COLUMNS),
    ((14336, 14336), COLUMNS),
    ((4096,), 14336),
)
HEAD: Shape = ((128256,), COLUMNS)
N_LAYERS = 32
# Instructions of a warp for a block of 128 columns of a strip, and those of the integer unit: 16 lanes of a quarter of
# a multiprocessor, so each takes two cycles. Counted for compute capability 9.0.
INSTRUCTIONS = {"q8": (152, 66), "q4": (142, 66)}
# The same of the kernels that MEASURED is of, which it has to be compared with.
MEASURED_INSTRUCTIONS = {"q8": (167, 77), "q4": (173, 102)}
# Microseconds of one row for LAYER's products on an H200: "Products of one row, on an H200".
MEASURED = {"q8": (9.6, 8.2, 31.3, 17.2), "q4": (8.7, 6.5, 23.2, 15.5), "bf16": (20.1, 14.8, 63.2, 41.7)}
MEASURED_HEAD = {"q8": 127.0, "q4": 88.2, "bf16": 248.7}  # the same for HEAD
MEASURED_TOKENS = {"q8": 316, "q4": 364, "bf16": 183}  # per second, of the captured graph of the whole model there
VISIBLE = 0.25  # the part of the time of instructions that reading does not hide: of q4 and 128256 x 4096 there
CHAIN_CYCLES = 4.5  # of a fused multiply-add of a chain whose operands come from shared memory
GOALS = {"q8": 75, "bf16": 75, "q4": 65}


class Recorder:
    """A device that keeps the last launch: kernel, grid, threads, shared memory."""

    def __init__(self, card: Card) -> None:
        shared = card.shared - 1024 if card.capability == "sm_90" else 99 << 10
        self.properties = Properties(card.name, (9, 0), card.multiprocessors, shared, 1 << 34, "none")
        self.last: tuple[str, tuple[int, int, int], int, int] = ("", (0, 0, 0), 0, 0)

    def launch(self, kernel: str, grid: tuple[int, int, int], threads: int, _: Any, shared: int = 0) -> None:
        self.last = kernel, grid, threads, shared


class Product(NamedTuple):
    """A launch of a product of one row: what it reads, and how long instructions or a chain take at least."""

    kernel: str
    blocks: int
    threads: int
    shared: int
    bytes: int
    cycles: float  # of the slowest unit of a quarter of a multiprocessor, or of a chain


def product(card: Card, dtype: str, rows: Iterable[int], columns: int, counted: dict[str, tuple[int, int]]) -> Product:
    recorder = Recorder(card)
    parts = [Part(Matrix(0, DTYPES[dtype], n, columns), 0) for n in rows]
    launches.products(cast("Driver", recorder), parts, 0, 1, launches.form_of(DTYPES[dtype], fast=False))
    kernel, grid, threads, shared = recorder.last
    size = sum(_core.matrix_bytes(DTYPES[dtype], n, columns) for n in rows)
    if dtype not in counted:
        return Product(kernel, grid[0] * grid[1], threads, shared, size, CHAIN_CYCLES * columns)
    issued, integer = counted[dtype]
    warps = sum(ceil_div(n, launches.STRIP_ROWS) for n in rows) * ceil_div(columns, launches.BLOCK_COLUMNS)
    cycles = max(issued, 2 * integer) * warps / (4 * card.multiprocessors)
    return Product(kernel, grid[0] * grid[1], threads, shared, size, cycles)


def microseconds(card: Card, dtype: str, each: Product) -> float:
    """Without the beginning and the end: reading hides most instructions, and a chain hides reading."""
    reading, computing = each.bytes / card.copy * 1e6, each.cycles / card.clock * 1e6
    return max(reading, computing) if dtype == "bf16" else reading + VISIBLE * computing


def ends(dtype: str) -> float:
    """What a product's beginning and end take on average: the rest of what was measured."""
    found = [product(H200, dtype, *shape, MEASURED_INSTRUCTIONS) for shape in LAYER]
    rest = sum(MEASURED[dtype]) - sum(microseconds(H200, dtype, each) for each in found)
    return rest / len(found)


def small(dtype: str) -> float:
    """What the other kernels of a layer take: the rest of what a step took."""
    return (1e6 / MEASURED_TOKENS[dtype] - MEASURED_HEAD[dtype]) / N_LAYERS - sum(MEASURED[dtype])


# ---- occupancy


def registers() -> dict[str, dict[str, tuple[int, int]]]:
    """The registers and spilled bytes of each kernel, by device."""
    _, _, header, *rows = REGISTERS.read_text("utf-8").splitlines()
    names, found = header.split()[1:], {}
    for kernel, *cells in (row.split() for row in rows):
        if not kernel.endswith(".cu"):
            pairs = (cell.partition("+") for cell in cells)
            found[kernel] = dict(zip(names, ((int(n), int(spilled or 0)) for n, _, spilled in pairs), strict=True))
    return found


def warps_held(card: Card, needs: int, threads: int = 32, shared: int = 0) -> int:
    """The warps of blocks of this size that a multiprocessor holds, if threads need so many registers."""
    of_warp = ceil_div(32 * needs, 256) * 256
    warps, of_block = min(card.warps, 4 * ((64 << 10) // 4 // of_warp)), threads // 32
    blocks = warps // of_block
    if shared:
        blocks = min(blocks, card.shared // (shared + 1024))
    return blocks * of_block


# ---- the document


def table(header: str, rows: Iterable[Iterable[object]]) -> str:
    lines = [f"| {header} |", "|" + "---|" * (header.count("|") + 1)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)]) + "\n"


def products_of_a_step(card: Card, needs: dict[str, dict[str, tuple[int, int]]]) -> str:
    rows = []
    for dtype in GOALS:
        for shape in (*LAYER, HEAD):
            each = product(card, dtype, *shape, INSTRUCTIONS)
            held = warps_held(card, needs[each.kernel][card.capability][0], each.threads, each.shared)
            issued = INSTRUCTIONS.get(dtype, (0, 0))[0]
            per_byte = f"{issued / (_core.matrix_bytes(DTYPES[dtype], 16, 1280) / 10):.3f}" if issued else "a chain"
            name = f"{' + '.join(map(str, shape[0]))} x {shape[1]}"
            reading = each.bytes / card.copy * 1e6
            computing = each.cycles / card.clock * 1e6
            total = microseconds(card, dtype, each) + ends(dtype)
            numbers = f"{each.bytes / 1e6:.1f}", per_byte, f"{each.blocks} x {each.threads}", f"{held} of {card.warps}"
            rows.append((f"`{each.kernel}`", name, *numbers, f"{reading:.1f}", f"{computing:.1f}", f"{total:.1f}"))
    header = "kernel | matrices | MB read | instructions per byte | blocks x threads | warps held"
    return table(f"{header} | reading, us | computing, us | with its ends, us", rows)


def steps(card: Card) -> str:
    rows = []
    for dtype, goal in GOALS.items():
        found = [product(card, dtype, *shape, INSTRUCTIONS) for shape in (*LAYER, HEAD)]
        *layer, head = (microseconds(card, dtype, each) + ends(dtype) for each in found)
        size = N_LAYERS * sum(each.bytes for each in found[:-1]) + found[-1].bytes
        others = small(dtype) + card.late
        step = N_LAYERS * (sum(layer) + others) + head
        share = 100 * size / card.copy * 1e6 / step
        times = f"{sum(layer):.1f}", f"{others:.1f}", f"{head:.0f}", f"{step / 1000:.2f}"
        rows.append((dtype, f"{size / 1e9:.2f}", *times, f"{1e6 / step:.0f}", f"{share:.0f}%", f"{goal}%"))
    header = "dtype | GB read | products of a layer, us | its other kernels, us | output matrix, us | step, ms"
    return table(f"{header} | tokens/s | share of a copy | goal", rows)


def all_kernels(needs: dict[str, dict[str, tuple[int, int]]]) -> str:
    rows = []
    for kernel, by_device in sorted(needs.items()):
        cells = []
        for card in H100, RTX_4090:
            n, spilled = by_device[card.capability]
            cells += [f"{n}+{spilled}" if spilled else n, warps_held(card, n)]
        rows.append((f"`{kernel}`", *cells))
    return table("kernel | registers, 9.0 | warps, 9.0 | registers, 8.9 | warps, 8.9", rows)


def document() -> str:
    """The text of bench/GPU_BUDGETS.md."""
    needs = registers()
    rests = ", ".join(f"{ends(dtype):.1f} and {small(dtype):.1f} us in {dtype}" for dtype in GOALS)
    return f"""# Budgets of the GPU kernels

`python -m bench.gpu_budgets` writes this page, from the numbers in that file. No RTX 4090 has been measured.

## A decode step of Llama 3 8B, one sequence

A product of one row takes the time of reading its weights at the rate of a copy; the part of the time of its
instructions that reading does not hide, {VISIBLE}; and its ends. In bf16, it takes its ends and the longer of reading
and a chain of one multiply-add per column, {CHAIN_CYCLES} cycles each. Instructions take the longer of the issue of all
and the time of the integer unit. The ends, and the other kernels of a layer, are the rests of what an H200
[measured](LOG.md#products-of-one-row-on-an-h200) with earlier kernels:
{rests}. On a card whose kernels cannot start early,
a layer takes {RTX_4090.late:.0f} us more, as on an H100 before they could.

With earlier kernels, an H100 reached 259 tokens/s in q8, 319 in q4 and 132 in bf16
([LOG.md](LOG.md#kernels-that-overlap-on-an-h100)): this page expects too little of it in q8 and q4.

### H100, a copy of {H100.copy / 1e9:,.0f} GB/s

{products_of_a_step(H100, needs)}
{steps(H100)}
### RTX 4090, a copy of {RTX_4090.copy / 1e9:,.0f} GB/s, assumed

{products_of_a_step(RTX_4090, needs)}
{steps(RTX_4090)}
## What each kernel needs

Registers of a thread, `+` bytes that it spills, and the warps of a multiprocessor that they allow: at most
{H100.warps} and {RTX_4090.warps}. Shared memory, which depends on the launch, can allow fewer. The comment above each
kernel says what limits its speed.

{all_kernels(needs)}"""


def main(write: Callable[[str], object] = lambda text: DOCUMENT.write_text(text, "utf-8")) -> None:
    write(document())


if __name__ == "__main__":
    main()
