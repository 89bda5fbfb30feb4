"""How the attention of passes of one shape is divided among blocks of threads, and the memory that this takes.

A kind of layer (attention_kind of steps.py) has a division for each shape. All shapes share the memory of partial
results.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from llamac.gpu import layer_launches
from llamac.gpu.layer_launches import AttentionKind, Run, Tiles
from llamac.gpu.passes import KV_PAGE, Shape

if TYPE_CHECKING:
    from llamac.gpu.driver import Driver

PARTIAL_BYTES = 64 << 20  # most memory for partial results


class Division(NamedTuple):
    """The division of one kind of layer's attention in passes of one shape, and its tiles' address."""

    tiles: Tiles
    entries: int


class _ShapeTiles(NamedTuple):
    by_kind: dict[AttentionKind, Division]
    memory: int  # an allocation
    partial_bytes: int


class AttentionTiles:
    """The divisions of the shapes so far.

    Args:
        driver: The device.
        kinds: The kinds of layers.
        kv_dtype: The number format of keys and values.

    Attributes:
        partials: The address of partial results, for the shapes that `reserve` has been called with.
    """

    def __init__(self, driver: Driver, kinds: Collection[AttentionKind], kv_dtype: str) -> None:
        self._driver = driver
        self._kinds = kinds
        self._kv_dtype = kv_dtype
        self._shapes: dict[Shape, _ShapeTiles] = {}
        self.partials, self._partial_bytes = 0, 0

    def __len__(self) -> int:
        """The number of shapes."""
        return len(self._shapes)

    def __contains__(self, shape: Shape) -> bool:
        return shape in self._shapes

    def division(self, shape: Shape, kind: AttentionKind) -> Division:
        """The division of a kind of layer, of a shape that has been reserved."""
        return self._shapes[shape].by_kind[kind]

    def reserve(self, shape: Shape) -> bool:
        """Divide the attention of a shape and give it memory. Returns whether the address of partials has changed.

        Raises:
            OutOfMemoryError: The device has too little memory.
        """
        if shape not in self._shapes:
            self._shapes[shape] = self._divided(shape)
        needed = self._shapes[shape].partial_bytes
        if needed <= self._partial_bytes:
            return False
        self._free_partials()
        self.partials, self._partial_bytes = self._driver.alloc(needed), needed
        return True

    def _divided(self, shape: Shape) -> _ShapeTiles:
        import numpy as np

        # as if the pass ended at the tables' last position: the graph then serves every shorter pass
        runs = [Run(first, end - first, shape.pages * KV_PAGE - (end - first)) for first, end in shape.runs]
        found = {
            kind: layer_launches.attention_tiles(runs, kind, self._kv_dtype, self._driver.properties, PARTIAL_BYTES)
            for kind in self._kinds
        }
        memory = self._driver.alloc(max(sum(tiles.entries.nbytes for tiles in found.values()), 1))
        by_kind, end = {}, memory
        try:
            for kind, tiles in found.items():
                self._driver.upload(end, tiles.entries.reshape(-1).view(np.uint8))
                by_kind[kind] = Division(tiles, end)
                end += tiles.entries.nbytes
        except BaseException:
            self._driver.free(memory)
            raise
        needed = max((layer_launches.partial_size(tiles, kind.heads) for kind, tiles in found.items()), default=0)
        return _ShapeTiles(by_kind, memory, needed)

    def forget(self) -> None:
        """Free the tiles of all shapes."""
        for shape in self._shapes.values():
            self._driver.free(shape.memory)
        self._shapes.clear()

    def close(self) -> None:
        """Free all memory."""
        self.forget()
        self._free_partials()

    @property
    def bytes(self) -> int:
        """The memory of partial results."""
        return self._partial_bytes

    def _free_partials(self) -> None:
        if self._partial_bytes:
            self._driver.free(self.partials)
        self.partials = self._partial_bytes = 0
