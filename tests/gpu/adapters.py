"""Adapters of random numbers, for models and drafters on devices."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from llamac import _core
from llamac.format.flatfile import FlatFile

F32 = dict(_core.dtypes())["f32"]


def adapted(path: Path, ranks: dict[str, int]) -> FlatFile:
    """A file with adapters of these matrices."""
    file, random = FlatFile(path), np.random.default_rng(4)
    for name, rank in ranks.items():
        rows, columns = file.tensor(name).shape
        sizes = _core.matrix_bytes(F32, rank, columns), _core.matrix_bytes(F32, rows, rank)
        a, b = ((random.standard_normal(n // 4) / 9).astype(np.float32).data for n in sizes)
        file.core.adapt(name, rank, a, b, None)
    return file
