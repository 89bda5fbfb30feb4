"""A pass: what the core gives a device to compute, and how it lies in the device's memory.

A pass is a chunk of an eval: rows, the page tables of their sequences, and the results that its caller wants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from llamac.gpu.driver import ceil_div

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llamac.gpu.driver import Driver

    Ints = NDArray[np.int32]
    Floats = NDArray[np.float32]

CHUNK_ROWS = (1024, 512, 256)  # of a chunk at most: the first number whose buffers take at most CHUNK_BYTES
CHUNK_BYTES = 128 << 20
MAX_ROWS = CHUNK_ROWS[0]
KV_PAGE = 64  # positions of a page: KV_PAGE of csrc/kv_layout.h
_ROW_ARRAYS = ("tokens", "positions", "table_of", "last_table_of", "wanted", "ends", "types", "viewpoints")  # of a pass
SEGMENT = [("first", "i4"), ("last", "i4"), ("from", "u8"), ("to", "u8")]  # llamac_segment of csrc/device.h
_SEGMENT_BYTES = 24
_ROWS_AT_A_TIME = 64  # that the memory of rows grows by


class DeviceRows(NamedTuple):
    """The address of n rows of hidden states in the memory of a device."""

    address: int
    n: int


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A chunk of an eval.

    Attributes:
        tokens: (rows) Token ids.
        positions: (rows) Positions in the sequences.
        table_of: (rows) The index of the row's page tables.
        last_table_of: (rows) A draft is stored in the tables from `table_of` to this; otherwise the same as `table_of`.
        wanted: The rows whose logits are wanted, ascending.
        ends: (rows) The end of the positions that a row sees in layers without a window.
        types: (rows) The types of the tokens.
        viewpoints: (rows) The positions from which rows see others (llamac_chunk_viewpoints of csrc/device.h).
        segments: (n) SEGMENT, those of a chain side by side (chains_of); empty without recurrent layers.
        starts: (chains + 1) The first segment of each chain.
        tables: For each group of layers the addresses of pages, (tables, pages): 0 for positions that are not held.
        logits: (wanted, vocab_size) Receives the logits; None: only the norm before them is wanted.
        inputs: (rows, width) The hidden states that rows of an MTP layer or a drafter read, or where the device has
            them; None for other rows.
        hidden: (n, width) Receives the hidden states of the last n rows, also on the device; None: they are not wanted.
        observers: Receive stages: a float32 array of (rows, width) by stage and layer; layer -1: outside the layers.
        context: Positions of the session.
        costs: (layers, steps, 2) Receives the costs, nanoseconds and bytes; None: the pass is not measured.
    """

    tokens: Ints
    positions: Ints
    table_of: Ints
    last_table_of: Ints
    wanted: Ints
    ends: Ints
    types: Ints
    viewpoints: Ints
    segments: NDArray[np.void]
    starts: Ints
    tables: Sequence[NDArray[np.uint64]]
    logits: Floats | None
    inputs: Floats | DeviceRows | None
    hidden: Floats | DeviceRows | None
    observers: Mapping[tuple[int, int], Floats]
    context: int
    costs: NDArray[np.uint64] | None = None


class LayerCache(NamedTuple):
    """Where a layer's keys and values are in the pages of its group, and its state in pages of states.

    The fields of llamac_kv_place (csrc/device.h).
    """

    group: int
    offset: int
    head_bytes: int
    value_offset: int
    state_offset: int


class CacheLayout(NamedTuple):
    """The pages of a session: the number format of keys and values, the number of groups, and the layers' places."""

    dtype: str
    groups: int
    layers: Sequence[LayerCache]


class Shape(NamedTuple):
    """What of a pass determines its launches: passes of one shape can replay one captured graph.

    Attributes:
        rows: The number of rows.
        wanted: The number of rows whose logits, or the norm before them, are computed.
        hidden: The number of rows whose hidden states are computed.
        logits: Whether the logits are.
        tables: The number of page tables of a group.
        pages: The pages of a table that there is room for: a power of two.
        runs: The (first, end) of adjacent rows of one sequence.
        chains: The number of chains of segments.
    """

    rows: int
    wanted: int
    hidden: int
    logits: bool
    tables: int
    pages: int
    runs: tuple[tuple[int, int], ...]
    chains: int


def as_bytes(numbers: Floats) -> NDArray[np.uint8]:
    """The bytes of contiguous numbers, for a copy from or to the device."""
    import numpy as np

    return numbers.reshape(-1).view(np.uint8)


def shape_of(job: Pass) -> Shape:
    """The shape of a pass."""
    pages = ceil_div(int(job.ends.max()), KV_PAGE)
    return Shape(
        len(job.tokens),
        len(job.wanted),
        0 if job.hidden is None else job.hidden.n if isinstance(job.hidden, DeviceRows) else len(job.hidden),
        job.logits is not None and len(job.wanted) > 0,
        len(job.tables[0]) if job.tables else 0,
        1 << (pages - 1).bit_length(),
        tuple(runs_of(job.table_of)),
        len(job.starts) - 1,
    )


def chains_of(segments: NDArray[np.void]) -> tuple[NDArray[np.void], Ints]:
    """Order segments by chain: one belongs to the chain of the segment whose state it continues from.

    A chain is a sequence, or the drafts that continue a draft. Different chains do not depend on each other.

    Returns:
        The segments, and the first of each chain (chains + 1).
    """
    import numpy as np

    chains: dict[int, int] = {}  # by the address of the state that the last segment so far ends with
    found, count = [], 0
    for source, to in zip(segments["from"].tolist(), segments["to"].tolist(), strict=True):
        chain = chains.get(source, count)
        count = max(count, chain + 1)
        chains[to] = chain
        found.append(chain)
    order = np.argsort(np.array(found, np.int32), kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(np.array(found, np.int64), minlength=count))])
    return segments[order], starts.astype(np.int32)


def runs_of(table_of: Ints) -> list[tuple[int, int]]:
    """The (first, end) of adjacent rows of one sequence."""
    import numpy as np

    ends = [*(np.flatnonzero(np.diff(table_of)) + 1).tolist(), len(table_of)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


class RowMemory:
    """The rows, states and page tables of the current pass, in one piece of the device's memory.

    First come the _ROW_ARRAYS of `room` int32; in passes with states, their segments and starts; then for each group
    its tables, `pages` addresses each. The room depends on the shape alone, so graphs of one shape have the same
    addresses.
    """

    def __init__(self, driver: Driver, groups: int) -> None:
        self._driver = driver
        self._groups = groups
        self.bytes = 0
        self.address = 0
        self._room = 0  # rows

    def reserve(self, shape: Shape) -> bool:
        """Make room for passes of this shape, the next one's. Returns whether addresses have changed."""
        self._room = ceil_div(shape.rows, _ROWS_AT_A_TIME) * _ROWS_AT_A_TIME
        size = self._states_end(shape) + 8 * self._groups * shape.tables * shape.pages
        if size <= self.bytes:
            return False
        self.close()
        capacity = 1 << (size - 1).bit_length()
        self.address = self._driver.alloc(capacity)
        self.bytes = capacity
        return True

    def upload(self, job: Pass, shape: Shape) -> None:
        """Write a pass of this shape."""
        import numpy as np

        rows = np.zeros((len(_ROW_ARRAYS), self._room), np.int32)
        for array, name in zip(rows, _ROW_ARRAYS, strict=True):
            values = getattr(job, name)
            array[: len(values)] = values
        tables = np.zeros((self._groups, shape.tables, shape.pages), np.uint64)
        for table, pages in zip(tables, job.tables, strict=True):
            used = min(pages.shape[1], shape.pages)
            table[:, :used] = pages[:, :used]
        states = np.zeros(self._states_end(shape) - rows.nbytes, np.uint8)
        if shape.chains:
            states[: job.segments.nbytes] = job.segments.view(np.uint8)
            states[_SEGMENT_BYTES * self._room :][: job.starts.nbytes] = job.starts.view(np.uint8)
        parts = [array.reshape(-1).view(np.uint8) for array in (rows, states, tables)]
        self._driver.upload(self.address, np.concatenate(parts))

    def _array(self, name: str) -> int:
        return self.address + 4 * _ROW_ARRAYS.index(name) * self._room

    @property
    def tokens(self) -> int:
        """The address of the tokens."""
        return self._array("tokens")

    @property
    def positions(self) -> int:
        """The address of the positions."""
        return self._array("positions")

    @property
    def table_of(self) -> int:
        """The address of the indices of page tables."""
        return self._array("table_of")

    @property
    def last_table_of(self) -> int:
        """The address of the last page tables of drafts."""
        return self._array("last_table_of")

    @property
    def wanted(self) -> int:
        """The address of the rows whose logits are wanted."""
        return self._array("wanted")

    @property
    def ends(self) -> int:
        """The address of the ends of the positions that rows see without a window."""
        return self._array("ends")

    @property
    def types(self) -> int:
        """The address of the tokens' types."""
        return self._array("types")

    @property
    def viewpoints(self) -> int:
        """The address of the positions from which rows see others."""
        return self._array("viewpoints")

    @property
    def segments(self) -> int:
        """The address of the segments."""
        return self.address + 4 * len(_ROW_ARRAYS) * self._room

    @property
    def starts(self) -> int:
        """The address of the first segment of each chain."""
        return self.segments + _SEGMENT_BYTES * self._room

    def _states_end(self, shape: Shape) -> int:
        states = _SEGMENT_BYTES * self._room + 4 * (self._room + 2) if shape.chains else 0  # a start more, and padding
        return 4 * len(_ROW_ARRAYS) * self._room + states

    def tables(self, group: int, shape: Shape) -> int:
        """The address of a group's page tables."""
        return self.address + self._states_end(shape) + 8 * group * shape.tables * shape.pages

    def close(self) -> None:
        """Free the memory."""
        if self.bytes:
            self._driver.free(self.address)
        self.bytes = 0
