"""Merges adapters into a checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from llamac.export.checkpoint import Checkpoint, LazyTensor
from llamac.export.lora.adapter import EMBEDDING, OUTPUT, Adapter, Factors

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]


def merge(checkpoint: Checkpoint, adapters: Sequence[tuple[Adapter, float]]) -> Checkpoint:
    """Merge adapters into a checkpoint.

    An output matrix that is tied to the embedding is untied if an adapter changes only one of the two, or both
    differently.

    Args:
        checkpoint: The model.
        adapters: Pairs of an adapter and its strength, which multiplies what the adapter adds to matrices and biases.
            Replaced tensors and rows do not depend on the strength, except that 0 means no adapter.

    Returns:
        The changed checkpoint. Reading its tensors reads the adapters' tensors as well.
    """
    tensors, config = dict(checkpoint.tensors), checkpoint.config
    entries = [{"name": adapter.name, "strength": strength} for adapter, strength in adapters]
    adapters = [(adapter, strength) for adapter, strength in adapters if strength != 0]
    tied = config.tied_output and not (config.two_sided or config.scores_pairs)  # those have no output matrix
    if tied and any(adapter.unties for adapter, _ in adapters):
        tensors[OUTPUT] = tensors[EMBEDDING]
        config = replace(config, tied_output=False)
    for adapter, _ in adapters:
        for name, tensor in adapter.replaced.items():
            if name != OUTPUT or not config.tied_output:
                tensors[name] = tensor
    for adapter, _ in adapters:
        rows_by_name = dict(adapter.replaced_rows)
        if tied and EMBEDDING in rows_by_name:
            rows_by_name.setdefault(OUTPUT, rows_by_name[EMBEDDING])
        for name, (ids, rows) in rows_by_name.items():
            if name in tensors:
                tensors[name] = _with_rows(tensors[name], ids, rows.finite(f"{name} (rows of an adapter)"))
    changes: dict[str, list[tuple[Factors, float]]] = {}
    for adapter, strength in adapters:
        for name, factors in adapter.factors.items():
            changes.setdefault(name, []).append((factors, strength))
    for name, found in changes.items():
        tensors[name] = _with_factors(name, tensors[name], found)
    for adapter, strength in adapters:
        for name, (bias, scale) in adapter.biases.items():
            tensors[name] = _with_bias(tensors.get(name), bias.finite(name), scale * strength)
    metadata = {**checkpoint.metadata, "adapters": [*checkpoint.metadata.get("adapters", []), *entries]}
    return replace(checkpoint, config=config, tensors=tensors, metadata=metadata)


def _with_factors(name: str, base: LazyTensor, changes: Sequence[tuple[Factors, float]]) -> LazyTensor:
    """A matrix plus its changes, in order. DoRA's norms are those of the matrix with only that change."""
    parts = []
    for factors, strength in changes:
        a = factors.a.finite(f"{name} (an adapter's A)").array().astype(np.float64) * (factors.scale * strength)
        b = factors.b.finite(f"{name} (an adapter's B)")

        def added(first: int, last: int, a: Doubles = a, b: LazyTensor = b) -> Doubles:
            return b.read(first, last).astype(np.float64) @ a

        norms = _column_norms(base, added) if factors.by_column and factors.magnitudes else None
        parts.append((added, factors.magnitudes, norms))

    def read(first: int, last: int) -> Floats:
        rows = base.read(first, last)
        total = rows.astype(np.float64)
        for added, magnitudes, column_norms in parts:
            change = added(first, last)
            total += change
            if magnitudes is None:
                continue
            if column_norms is not None:
                total *= magnitudes.array() / column_norms()
            else:
                norms = np.linalg.norm(rows + change, axis=1, keepdims=True)
                total *= magnitudes.read(first, last)[:, None] / norms
        return total.astype(np.float32)

    dtype = "f32" if base.dtype == "t2" else base.dtype  # three values cannot hold the sums
    return LazyTensor(base.shape, dtype, read, is_exact=dtype == "f32")


def _column_norms(base: LazyTensor, added: Callable[[int, int], Doubles]) -> Callable[[], Doubles]:
    @functools.cache
    def norms() -> Doubles:
        squares = np.zeros(base.shape[1])
        for first, rows in base.chunks():
            squares += np.square(rows + added(first, first + len(rows))).sum(axis=0)
        return np.sqrt(squares)

    return norms


def _with_rows(base: LazyTensor, ids: list[int], rows: LazyTensor) -> LazyTensor:
    """A matrix with some rows replaced. Its dtype represents the rows exactly, unless the matrix is quantized."""

    def read(first: int, last: int) -> Floats:
        result: Floats = base.read(first, last).copy()
        inside = [index for index, token in enumerate(ids) if first <= token < last]
        result[[ids[index] - first for index in inside]] = rows.array()[inside]
        return result

    narrow = base.dtype in ("f16", "bf16", "t2")
    return LazyTensor(base.shape, "f32" if narrow and rows.dtype != base.dtype else base.dtype, read)


def _with_bias(base: LazyTensor | None, bias: LazyTensor, scale: float) -> LazyTensor:
    def read(first: int, last: int) -> Floats:
        total: Doubles = bias.read(first, last).astype(np.float64) * scale
        if base is not None:
            total += base.read(first, last)
        return total.astype(np.float32)

    return LazyTensor(bias.shape, "f32", read)
