"""Budgets of all kernels of a decode step but products: Llama 3 8B, one sequence, a KV cache in f16.

Their data fit into the L2 cache, so what counts is how long a thread waits: for the previous kernel, for loads whose
addresses come from other loads, at barriers, and for chains of operations. Waits were counted in the sources, and
instructions in machine code for compute capability 9.0, along the path of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

from bench.gpu_cards import Card, Launch, Recorder
from llamac import _core
from llamac.gpu import launches, layer_launches
from llamac.gpu.draws import Draw, Drawing, DrawMemory
from llamac.gpu.driver import ceil_div
from llamac.gpu.early_launch import EARLY
from llamac.gpu.launches import Embedding, Form, Matrix, input_row_bytes
from llamac.gpu.layer_launches import (
    ATTENTION_BLOCK,
    NO_HEAD_NORMS,
    AttentionInputs,
    AttentionKind,
    Cache,
    HeadShape,
    Norm,
    Packed,
    Rows,
    Run,
)

if TYPE_CHECKING:
    from llamac.gpu.driver import Driver

WIDTH, HIDDEN, VOCABULARY, N_LAYERS = 4096, 14336, 128256, 32
HEADS = HeadShape(32, 8, 128, 128)
# Microseconds. LOAD: from the L2 cache, as the comment above norm_rows says. BARRIER: assumed. START: from the end of
# the previous kernel to the first load, fitted to `heads` in MEASURED, whose loads and instructions are known. LATE:
# the delay of a kernel that cannot start early, from 84 us for 8 layers with 8 such kernels each on an H100 ("Kernels
# that overlap, on an H100").
LOAD, BARRIER, START, LATE = 0.4, 0.1, 1.9, 1.3
# Microseconds on an H200, in q8, over 20 positions: "Products of one row, on an H200".
MEASURED_POSITIONS = 20
MEASURED = {"norm_rows": 5.4, "heads_f16": 2.9, "attend_f16_x4": 12.2, "activate": 5.5}


class Counted(NamedTuple):
    """What a launch does.

    Attributes:
        bytes: Bytes that it reads and writes.
        instructions: Instructions of a warp.
        loads: Loads that wait for each other.
        barriers: Barriers of a block of threads.
        cycles: Cycles of the longest chain of a thread.
        doubles: Operations on doubles of a thread.
        is_streaming: Whether the bytes come from the memory, not from the L2 cache.
    """

    bytes: int
    instructions: int
    loads: int
    barriers: int
    cycles: int
    doubles: int = 0
    is_streaming: bool = False


class Small(NamedTuple):
    """A launch of a step, and how often the step runs it."""

    launch: Launch
    counted: Counted
    times: int

    @property
    def name(self) -> str:
        return self.launch.kernel

    def microseconds(self, card: Card) -> float:
        """The time from the end of the previous kernel to the end of this one."""
        counted, launch = self.counted, self.launch
        is_late = not card.starts_early or not EARLY.fullmatch(launch.kernel)
        blocks = ceil_div(launch.blocks, card.multiprocessors)  # of the busiest multiprocessor
        issue = blocks * ceil_div(launch.threads // 32, 4) * counted.instructions
        doubles = blocks * launch.threads * counted.doubles / card.doubles
        reading = 1e6 * counted.bytes / card.copy if counted.is_streaming else 0.0
        waits = START + is_late * LATE + LOAD * counted.loads + BARRIER * counted.barriers
        return waits + max(counted.cycles, issue, doubles) / card.clock * 1e6 + reading


class Step:
    """Launches each kernel of a step over this many positions once, and records what it does."""

    def __init__(self, card: Card, dtype: str, positions: int) -> None:
        self._recorder = Recorder(card)
        self._driver = cast("Driver", self._recorder)
        self._number = dict(_core.dtypes())[dtype]
        self._form = launches.form_of(self._number, fast=False)
        self._packed = [] if self._form is Form.F32 else [Packed(self._form, 1)]
        # of a block of 128 columns, instructions and cycles: a maximum, a scale, codes, sums
        self._packing = 250 * len(self._packed)
        self._rows, self._positions = Rows(1, 0, 0, 0, 0), positions
        self._cache = Cache("f16", 0, ceil_div(positions, 64), 0, 0, 0)
        self.found: list[Small] = []
        self._embed()
        self._norms()
        self._heads()
        self._attend()
        self._activate()
        self._draw()

    def _add(self, times: int, launch: Callable[[], object], *counted: Counted) -> None:
        first = len(self._recorder.launches)
        launch()
        self.found += [Small(*each, times) for each in zip(self._recorder.launches[first:], counted, strict=True)]

    def _packed_bytes(self, columns: int) -> int:
        return input_row_bytes(self._form, columns) * len(self._packed)

    def _embed(self) -> None:
        angles = partial(layer_launches.rope_angles, self._driver, self._rows, 0, HEADS.dim // 2, 1.0, 0)
        self._add(1, angles, Counted(6 * HEADS.dim, 143, 1, 0, 400))
        tokens = Embedding(Matrix(0, self._number, VOCABULARY, WIDTH))
        row = _core.matrix_bytes(self._number, launches.STRIP_ROWS, WIDTH) // launches.STRIP_ROWS
        embed = partial(launches.embed, self._driver, tokens, None, None, 1, 0, 0, 0, 1.0, 0)
        self._add(1, embed, Counted(4 * WIDTH + row, 150, 2, 0, 300))

    def _norms(self) -> None:
        weights, instructions = Norm(1, 0, 1e-5, True), 700 + 2 * self._packing
        counted = Counted(
            20 * WIDTH + self._packed_bytes(WIDTH), instructions, loads=2, barriers=3, cycles=2150 + self._packing
        )
        add = partial(layer_launches.add_and_norm, self._driver, 1, WIDTH, 0, 1, 1.0, None, 0, weights, 0, 0)
        self._add(2 * N_LAYERS, partial(add, self._packed), counted)
        last = partial(layer_launches.norm, self._driver, 1, WIDTH, weights, 0, 0, 1, self._packed)
        self._add(1, last, counted._replace(loads=3))  # the row's number comes first

    def _heads(self) -> None:
        numbers, stored = HEADS.dim * (HEADS.n + 2 * HEADS.n_kv), HEADS.dim * 2 * HEADS.n_kv
        launch = partial(layer_launches.heads, self._driver, self._rows, HEADS, NO_HEAD_NORMS, 0, 1, 1, 1)
        counted = Counted(8 * numbers + 2 * stored, 400, 2, 0, 250)
        self._add(N_LAYERS, partial(launch, HEADS.dim, self._cache), counted)

    def _attend(self) -> None:
        """In blocks of positions side by side if there are several, which are merged then."""
        kind, runs = AttentionKind(HEADS, 0, False), [Run(0, 1, self._positions - 1)]
        tiles = layer_launches.attention_tiles(runs, kind, "f16", self._recorder.properties, 1 << 30)
        values, partials = 4 * HEADS.n * HEADS.dim, tiles.blocks * HEADS.n * 4 * (16 + HEADS.dim)
        # the tile, its row, the page; then keys, 16 dimensions at a time, and values, 16 positions at a time
        of_keys, of_values = ceil_div(HEADS.dim, 16), ceil_div(min(self._positions, ATTENTION_BLOCK), 16)
        packing = 0 if tiles.blocks else self._packing
        attend = Counted(
            4 * HEADS.n_kv * HEADS.dim * self._positions + values + (partials or values),
            950 + 223 * of_keys + 165 * of_values + packing,
            loads=3 + of_keys + 1 + of_values,
            barriers=4,
            cycles=1100 + packing,
            is_streaming=True,
        )
        merge = Counted(partials + values, 600 + self._packing, 4, 4, 500 + self._packing)
        inputs = AttentionInputs(0, 1.0, 0, 0, 0.0)
        launch = partial(layer_launches.attend, self._driver, self._rows, kind, inputs, self._cache, tiles, 0, 0, 0, 1)
        self._add(N_LAYERS, partial(launch, *self._packed), *((attend, merge) if tiles.blocks else (attend,)))

    def _activate(self) -> None:
        packed = self._packed[0] if self._packed else None
        launch = partial(layer_launches.activate, self._driver, 1, HIDDEN, 2, 1, 1, packed=packed)
        size, of_a_block = 12 * HIDDEN + self._packed_bytes(HIDDEN), 200 + self._packing
        self._add(N_LAYERS, launch, Counted(size, of_a_block, 1, 0, of_a_block))

    def _draw(self) -> None:
        """Of a token at temperature 1, of all tokens."""
        import numpy as np

        logits, chunks = 4 * VOCABULARY, ceil_div(VOCABULARY, 1024)
        drawing = Drawing(VOCABULARY, [Draw(0, 0, 0, 0, 1.0, 1.0, 0.0)], [None])
        self._add(
            1,
            lambda: DrawMemory(self._driver).deliver(0, np.empty((1, VOCABULARY), np.float32), drawing),
            Counted(logits, 250, 2, 4, 500),
            Counted(2 * logits, 1700, 3, 6, 1700, doubles=470),  # exp of 4 numbers, and sums
            # the sums of all chunks are added one after the other, then on average half of them again
            Counted(8 * chunks + 4 * 1024, 1700, 12, 12, 8 * chunks + 60 * chunks // 2 + 1500),
        )


def kernels(card: Card, dtype: str, positions: int) -> list[Small]:
    """The launches of a step, each once."""
    return Step(card, dtype, positions).found


def of_a_layer(card: Card, dtype: str, positions: int) -> float:
    """Microseconds of a layer's small kernels."""
    found = [each for each in kernels(card, dtype, positions) if each.times > 1]
    return sum(each.times * each.microseconds(card) for each in found) / N_LAYERS


def once(card: Card, dtype: str, positions: int, *, draws: bool = True) -> float:
    """Microseconds of the kernels that run once per step. `draws` adds those that draw its token."""
    found = [each for each in kernels(card, dtype, positions) if each.times == 1]
    return sum(each.microseconds(card) for each in found if draws or not each.name.startswith("draw_"))
