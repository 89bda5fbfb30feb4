"""Paper budgets of the GPU kernels: a decode step of an 8B model, and what each kernel needs of a multiprocessor.

python -m bench.gpu_budgets    writes bench/GPU_BUDGETS.md

This file has the products and the page; gpu_small_kernels.py has the other kernels. Registers come from
tests/gpu/registers.txt, and grids, threads and shared memory from the launches themselves. Instructions were counted in
machine code. The rest follows from measurements of LOG.md: MEASURED and what is below it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, cast

from bench import gpu_small_kernels as small
from bench.gpu_cards import H100, H200, ROOT, RTX_4090, Card, Needs, Recorder, registers, warps_held
from llamac import _core
from llamac.gpu import launches
from llamac.gpu.driver import Driver, ceil_div
from llamac.gpu.launches import Matrix, Part

DOCUMENT = ROOT / "bench" / "GPU_BUDGETS.md"
DTYPES = dict(_core.dtypes())

COLUMNS = 4096
Shape = tuple[tuple[int, ...], int]  # the rows of the matrices of a launch, and their columns
LAYER: tuple[Shape, ...] = (
    ((4096, 1024, 1024), COLUMNS),
    ((4096,), COLUMNS),
    ((14336, 14336), COLUMNS),
    ((4096,), 14336),
)
HEAD: Shape = ((128256,), COLUMNS)
POSITIONS = 1024  # to which the step's row attends
# Instructions of a warp for a block of 128 columns of a strip, and those of the integer unit, which has 16 lanes per
# quarter of a multiprocessor, so that each takes two cycles. Counted for compute capability 9.0.
INSTRUCTIONS = {"q8": (152, 66), "q4": (142, 66)}
# The same for the earlier kernels that MEASURED refers to.
MEASURED_INSTRUCTIONS = {"q8": (167, 77), "q4": (173, 102)}
# Microseconds of one row for LAYER's products on an H200: "Products of one row, on an H200".
MEASURED = {"q8": (9.6, 8.2, 31.3, 17.2), "q4": (8.7, 6.5, 23.2, 15.5), "bf16": (20.1, 14.8, 63.2, 41.7)}
MEASURED_HEAD = {"q8": 127.0, "q4": 88.2, "bf16": 248.7}  # the same for HEAD
MEASURED_TOKENS = {"q8": 316, "q4": 364, "bf16": 183}  # per second, of the captured graph of the whole model there
VISIBLE = 0.25  # the share of instruction time that reading does not hide: from q4 and 128256 x 4096 there
CHAIN_CYCLES = 4.5  # per fused multiply-add of a chain whose operands come from shared memory
GOALS = {"q8": 75, "bf16": 75, "q4": 65}


class Product(NamedTuple):
    """A launch of a product of one row: what it reads, and the least time of its instructions or its chain."""

    kernel: str
    blocks: int
    threads: int
    shared: int
    bytes: int
    cycles: float  # of the busiest unit of a quarter of a multiprocessor, or of a chain


def product(card: Card, dtype: str, rows: Iterable[int], columns: int, counted: dict[str, tuple[int, int]]) -> Product:
    recorder = Recorder(card)
    parts = [Part(Matrix(0, DTYPES[dtype], n, columns), 0) for n in rows]
    launches.products(cast("Driver", recorder), parts, 0, 1, launches.form_of(DTYPES[dtype], fast=False))
    (launch,) = recorder.launches
    size = sum(_core.matrix_bytes(DTYPES[dtype], n, columns) for n in rows)
    if dtype not in counted:
        return Product(launch.kernel, launch.blocks, launch.threads, launch.shared, size, CHAIN_CYCLES * columns)
    issued, integer = counted[dtype]
    warps = sum(ceil_div(n, launches.STRIP_ROWS) for n in rows) * ceil_div(columns, launches.BLOCK_COLUMNS)
    cycles = max(issued, 2 * integer) * warps / (4 * card.multiprocessors)
    return Product(launch.kernel, launch.blocks, launch.threads, launch.shared, size, cycles)


def microseconds(card: Card, dtype: str, each: Product) -> float:
    """The time without the beginning and the end: reading hides most instructions, and a chain hides reading."""
    reading, computing = each.bytes / card.copy * 1e6, each.cycles / card.clock * 1e6
    return max(reading, computing) if dtype == "bf16" else reading + VISIBLE * computing


def ends(dtype: str) -> float:
    """The average time of a product's beginning and end: the remainder of the measured times."""
    found = [product(H200, dtype, *shape, MEASURED_INSTRUCTIONS) for shape in LAYER]
    return (sum(MEASURED[dtype]) - sum(microseconds(H200, dtype, each) for each in found)) / len(found)


def lateness(card: Card, dtype: str) -> float:
    """The delay of a product on a card on which it cannot start early. Products of floats never do (EARLY)."""
    return 0 if card.starts_early or dtype == "bf16" else small.LATE


def rest(dtype: str) -> float:
    """The time of a layer's other kernels: the remainder of a measured step, which drew no token."""
    once = MEASURED_HEAD[dtype] + small.once(H200, dtype, small.MEASURED_POSITIONS, draws=False)
    return (1e6 / MEASURED_TOKENS[dtype] - once) / small.N_LAYERS - sum(MEASURED[dtype])


# ---- the document


def table(header: str, rows: Iterable[Iterable[object]]) -> str:
    lines = [f"| {header} |", "|" + "---|" * (header.count("|") + 1)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)]) + "\n"


def products_of_a_step(card: Card, needs: Needs) -> str:
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
            total = microseconds(card, dtype, each) + ends(dtype) + lateness(card, dtype)
            numbers = f"{each.bytes / 1e6:.1f}", per_byte, f"{each.blocks} x {each.threads}", f"{held} of {card.warps}"
            rows.append((f"`{each.kernel}`", name, *numbers, f"{reading:.1f}", f"{computing:.1f}", f"{total:.1f}"))
    header = "kernel | matrices | MB read | instructions per byte | blocks x threads | warps that fit"
    return table(f"{header} | reading, us | computing, us | with its ends, us", rows)


def small_kernels(card: Card, needs: Needs) -> str:
    rows = []
    for each in small.kernels(card, "q4", POSITIONS):
        counted, launch = each.counted, each.launch
        held = warps_held(card, needs[each.name][card.capability][0], launch.threads, launch.shared)
        per_byte = counted.instructions * launch.blocks * launch.threads // 32 / counted.bytes
        waits = f"{counted.bytes / 1e3:.0f}", f"{per_byte:.2f}", counted.loads, counted.barriers, counted.cycles
        grid = f"{launch.blocks} x {launch.threads}", f"{held} of {card.warps}"
        rows.append((f"`{each.name}`", each.times, *waits, *grid, f"{each.microseconds(card):.1f}"))
    header = "kernel | times | KB | instructions per byte | loads | barriers | cycles | blocks x threads"
    return table(f"{header} | warps that fit | us", rows)


def steps(card: Card) -> str:
    rows = []
    for dtype, goal in GOALS.items():
        found = [product(card, dtype, *shape, INSTRUCTIONS) for shape in (*LAYER, HEAD)]
        late = lateness(card, dtype)
        *layer, head = (microseconds(card, dtype, each) + ends(dtype) + late for each in found)
        weights = small.N_LAYERS * sum(each.bytes for each in found[:-1]) + found[-1].bytes
        for positions in (small.MEASURED_POSITIONS, POSITIONS):
            others, once = small.of_a_layer(card, dtype, positions), head + small.once(card, dtype, positions)
            step = small.N_LAYERS * (sum(layer) + others) + once
            size = weights + small.N_LAYERS * 4 * small.HEADS.n_kv * small.HEADS.dim * positions
            times = f"{sum(layer):.1f}", f"{others:.1f}", f"{once:.0f}", f"{step / 1000:.2f}", f"{1e6 / step:.0f}"
            share = f"{100 * size / card.copy * 1e6 / step:.0f}%"
            rows.append((dtype, f"{positions:,}", f"{size / 1e9:.2f}", *times, share, f"{goal}%"))
    header = (
        "dtype | positions | GB read | products of a layer, us | its other kernels, us | once per step, us | step, ms"
    )
    return table(f"{header} | tokens/s | share of a copy | goal", rows)


def predictions() -> str:
    """The times of a layer's small kernels on an H200, predicted and measured."""
    found = {
        each.name: (each.microseconds(H200), each.times // small.N_LAYERS)
        for each in small.kernels(H200, "q8", small.MEASURED_POSITIONS)
        if each.times > 1
    }
    rows = [
        (f"`{name}`", times, f"{predicted:.1f}", f"{small.MEASURED[name]:.1f}")
        for name, (predicted, times) in found.items()
    ]
    return table("kernel | in a layer | predicted, us | measured, us", rows)


def all_kernels(needs: Needs) -> str:
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
    of_ends = ", ".join(f"{ends(dtype):.1f} us in {dtype}" for dtype in GOALS)
    rests = ", ".join(
        f"{small.of_a_layer(H200, dtype, small.MEASURED_POSITIONS):.1f} and {rest(dtype):.1f} us in {dtype}"
        for dtype in GOALS
    )
    profiled = small.MEASURED["norm_rows"] + sum(small.MEASURED.values())  # a layer has two norms
    return f"""# Budgets of the GPU kernels

`python -m bench.gpu_budgets` writes this page, from the numbers in that file and in `gpu_small_kernels.py`. No RTX 4090
has been measured.

## A decode step of Llama 3 8B, one sequence

*Products.* The time of a product of one row has three parts: reading its weights at the rate of a copy, the share of
its instruction time that reading does not hide ({VISIBLE}), and its ends. In bf16, it has two: the ends, and the longer
of reading and a chain of one multiply-add per column, {CHAIN_CYCLES} cycles each. Instructions take as long as issuing
all of them, or as the integer unit if that is longer. The ends are the remainder of the times
[measured](LOG.md#products-of-one-row-on-an-h200) on an H200 with earlier kernels:
{of_ends}. On a card without programmatic dependent launches, a quantized
product takes {small.LATE} us more.

*Other kernels.* Their data fit into the L2 cache. A kernel begins {small.START} us after the previous kernel ends, and
{small.LATE} us later if it cannot start early. Then it waits {small.LOAD} us for each load whose address comes from
another load, and {small.BARRIER} us at each barrier. To this it adds the longest of three times: a thread's chain of
operations, the issue of all instructions, and the operations on doubles. Attention also reads keys and values at the
rate of a copy, in f16. "Cycles" are those of the chain. "Times" is the number of launches per step.

On the H200, in q8 and over {small.MEASURED_POSITIONS} positions:

{predictions()}
The time of the beginning was fitted to `heads_f16`, so that row tests nothing. Why an activation takes longer than
predicted is unknown. All kernels of a layer except products take, predicted and as the remainder of a measured step:
{rests}.
The kernels above, each measured in a profile, take {profiled:.1f} us: the two measurements differ.

With earlier kernels, an H100 reached 259 tokens/s in q8, 319 in q4 and 132 in bf16, over few positions
([LOG.md](LOG.md#kernels-that-overlap-on-an-h100)). The table below underestimates q8 and overestimates bf16. "GB read"
and the share count the weights, without the embeddings, and the keys and values.

### H100, a copy of {H100.copy / 1e9:,.0f} GB/s

{steps(H100)}
{products_of_a_step(H100, needs)}
In q4, over {POSITIONS:,} positions, the other kernels:

{small_kernels(H100, needs)}
### RTX 4090, a copy of {RTX_4090.copy / 1e9:,.0f} GB/s, assumed

{steps(RTX_4090)}
{products_of_a_step(RTX_4090, needs)}
In q4, over {POSITIONS:,} positions, the other kernels. A multiprocessor begins {RTX_4090.doubles} operations on doubles
per cycle, so draws take long:

{small_kernels(RTX_4090, needs)}
## What each kernel needs

The table has the registers of a thread, after `+` the bytes that it spills, and the warps that these registers allow
on a multiprocessor: at most {H100.warps} and {RTX_4090.warps}. Shared memory, which depends on the launch, can allow
fewer. The comment above each kernel says what limits its speed.

{all_kernels(needs)}"""


def main(write: Callable[[str], object] = lambda text: DOCUMENT.write_text(text, "utf-8")) -> None:
    write(document())


if __name__ == "__main__":
    main()
