"""Packs rows of weights into quantized strips, on several threads: the bytes do not depend on how many."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from llamac import _core
from llamac.export.dtypes import DTYPES, FEW_BITS
from llamac.format.strips import STRIP_ROWS

Floats = NDArray[np.float32]

TASK_STRIPS = 4  # how many strips a thread quantizes at a time


@dataclass(frozen=True)
class CalibrationStats:
    """What calibration measured of a matrix's inputs.

    Attributes:
        importance: (columns) How much an error of each column costs.
        feedback: (columns, columns) The share of column i's error that is added to column j > i before j is quantized,
            or None.
    """

    importance: Floats
    feedback: Floats | None


class Quantizer:
    """Packs rows on a pool of threads. A context manager.

    Args:
        threads: The size of the pool; 1 computes on the calling thread.
    """

    def __init__(self, threads: int = 1) -> None:
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def __enter__(self) -> Quantizer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def pack(self, rows: Floats, dtype: str, stats: CalibrationStats | None = None) -> bytes:
        """Pack rows (n, columns) of a matrix into strips of 16 rows; the last strip is padded."""
        rows = np.ascontiguousarray(rows, np.float32)
        out = np.empty(_core.matrix_bytes(DTYPES[dtype], *rows.shape), np.uint8)
        strip_bytes = len(out) // -(-len(rows) // STRIP_ROWS)
        importance = stats.importance.data if stats else None
        feedback = stats.feedback.data if stats and stats.feedback is not None and dtype in FEW_BITS else None

        def pack_some(first: int) -> None:
            part = rows[first : first + TASK_STRIPS * STRIP_ROWS]
            start = first // STRIP_ROWS * strip_bytes
            end = start + -(-len(part) // STRIP_ROWS) * strip_bytes
            _core.quantize(DTYPES[dtype], part.data, out[start:end].data, importance, feedback)

        starts = range(0, len(rows), TASK_STRIPS * STRIP_ROWS)
        for _ in map(pack_some, starts) if self._pool is None else self._pool.map(pack_some, starts):
            pass  # iterating re-raises what `pack_some` raised
        return out.tobytes()
