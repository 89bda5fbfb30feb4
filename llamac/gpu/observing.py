"""Observed stages of a pass: copies of what steps compute, from the device to their observers on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llamac import _core, plan_records
from llamac.gpu import layer_launches

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llamac.gpu.buffers import Buffers
    from llamac.gpu.driver import Driver
    from llamac.gpu.layer_launches import AttentionInputs, Cache, HeadShape, Rows
    from llamac.gpu.passes import Pass

_STAGES = {name: number for number, name in enumerate(_core.stages())}
_CACHE = _STAGES["cache_k"], _STAGES["cache_v"]
_SCORES = _STAGES["scores"]


class Observing:
    """The observers of a running pass.

    Args:
        driver: The device.
        job: The pass.
    """

    def __init__(self, driver: Driver, job: Pass) -> None:
        self._driver = driver
        self._observers = job.observers
        self._context = job.context
        self._memory: list[int] = []
        self._copies: dict[tuple[int, int], int] = {}  # by stage and layer: the address of what products write

    def copy(self, stage: int, layer: int) -> int:
        """The address that a product writes its stage to; 0 if it has no observer."""
        to = self._observers.get((stage, layer))
        if to is None:
            return 0
        if (stage, layer) not in self._copies:
            self._copies[stage, layer] = self._alloc(to.nbytes)
        return self._copies[stage, layer]

    def buffer(self, step: plan_records.Observe, address: int, rows: int) -> None:
        """Hand out rows of a buffer from column `first` on, with zeros after each of them. address 0: only zeros."""
        to = self._observers.get((step.stage, step.layer))
        if to is None or (not address and step.stage in (*_CACHE, _SCORES)):  # `attention` hands these out
            return
        to[:, step.first :] = 0
        if address and step.width:
            to[:, step.first : step.first + step.width] = self._floats(address, rows, step.width)

    def experts(self, step: plan_records.Observe, buffers: Buffers, used: int) -> None:
        """Hand out the hidden numbers of each row's experts, then those of the shared expert."""
        import numpy as np

        to = self._observers.get((step.stage, step.layer))
        if to is None:
            return
        rows = len(to)
        hidden = self._floats(buffers["expert_up"], rows * used, step.width)
        pair_of = self._floats(buffers["pair_of"], rows, used).view(np.int32)
        to[:] = 0
        to[:, : used * step.width] = hidden[pair_of].reshape(rows, -1)
        if step.shared_width:
            end = used * step.width + step.shared_width
            to[:, used * step.width : end] = self._floats(buffers["up"], rows, step.shared_width)

    def attention(self, rows: Rows, shape: HeadShape, inputs: AttentionInputs, cache: Cache, layer: int) -> None:
        """Hand out keys and values as the cache holds them, and scores."""
        keys, values = (self._observers.get((stage, layer)) for stage in _CACHE)
        if keys is not None or values is not None:
            width = next(to.shape[1] for to in (keys, values) if to is not None)
            read = [self._alloc(4 * rows.n * width) for _ in range(2)]
            layer_launches.read_cache(self._driver, rows, shape, cache, read[0], read[1], width)
            for to, address in zip((keys, values), read, strict=True):
                if to is not None:
                    to[:] = self._floats(address, rows.n, width)
        scores = self._observers.get((_SCORES, layer))
        if scores is not None:
            address = self._alloc(scores.nbytes)
            heads = scores.shape[1] // self._context
            layer_launches.observe_scores(self._driver, rows, shape, inputs, cache, heads, self._context, address)
            scores[:] = self._floats(address, rows.n, scores.shape[1])

    def finish(self) -> None:
        """Hand out the stages of products."""
        for place, address in self._copies.items():
            to = self._observers[place]
            to[:] = self._floats(address, *to.shape)

    def close(self) -> None:
        """Free the memory."""
        while self._memory:
            self._driver.free(self._memory.pop())

    def _alloc(self, size: int) -> int:
        self._memory.append(self._driver.alloc(size))
        return self._memory[-1]

    def _floats(self, address: int, rows: int, width: int) -> NDArray[np.float32]:
        import numpy as np

        found = np.empty((rows, width), np.float32)
        self._driver.download(address, found.reshape(-1).view(np.uint8))
        return found
