"""Applies adapters to an opened flat file. The core adds their products to those of the file's matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llamac.errors import ArgumentError, UnsupportedError
from llamac.export.checkpoint import Checkpoint, LazyTensor
from llamac.export.dtypes import DTYPES
from llamac.export.flat.model import lazy_tensors, model_config
from llamac.export.lora.adapter import EMBEDDING, OUTPUT, Factors
from llamac.export.lora.merge import merge
from llamac.export.lora.read import read_adapter
from llamac.format.flatfile import FlatFile
from llamac.format.strips import pack_strips

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]


def attach(file: FlatFile, adapters: Sequence[tuple[Path, float]]) -> None:
    """Apply adapters to an opened file, before the first session.

    Args:
        file: The file. It does not change: the core stores the adapters' weights separately.
        adapters: Pairs of a directory and a strength.

    Raises:
        UnsupportedError: If an adapter can only be merged, because it has DoRA on an embedding; or as in
            `read_adapter`.
        ExportError: As in `read_adapter`.
    """
    config, metadata = model_config(file), file.metadata
    model = metadata.get("architecture"), config, metadata.get("config")
    read = [(read_adapter(folder, *model), strength) for folder, strength in adapters]
    found = [(adapter, strength) for adapter, strength in read if strength != 0]
    buffer = file.buffer
    base = Checkpoint(config, lazy_tensors(file, lambda offset, count: buffer[offset : offset + count]))
    # Merge everything except the factors, and replace the tensors that change. Merging also unties the output if
    # necessary, so its factors get the right base.
    changed = merge(base, [(replace(adapter, factors={}), strength) for adapter, strength in found])
    unchanged = {*map(id, base.tensors.values())}
    for name, tensor in changed.tensors.items():
        if id(tensor) not in unchanged:
            _replace(file, name, tensor.finite(name))
            if name == EMBEDDING and changed.config.tied_output and not file.config["two_sided"]:
                _replace(file, OUTPUT, tensor)
    changes: dict[str, list[tuple[Factors, float]]] = {}
    for adapter, strength in found:
        for name, factors in adapter.factors.items():
            if factors.magnitudes is not None and factors.by_column:
                raise UnsupportedError(
                    f"the adapter {adapter.name} cannot be applied to a loaded model, because of DoRA in {name}: "
                    "merge it (llamac export MODEL OUT --lora ...)"
                )
            changes.setdefault(name, []).append((factors, strength))
    for name, parts in changes.items():
        tied = changed.config.tied_output and name == OUTPUT
        _adapt(file, name, changed.tensors[EMBEDDING if tied else name], parts)


def _replace(file: FlatFile, name: str, tensor: LazyTensor) -> None:
    if len(tensor.shape) == 1:
        file.core.replace(name, DTYPES["f32"], tensor.array().astype(np.float32).tobytes())
    else:
        dtype = tensor.dtype if tensor.dtype in ("f32", "f16", "bf16") else "f32"
        data = b"".join(pack_strips(rows, dtype) for _, rows in tensor.chunks())
        file.core.replace(name, DTYPES[dtype], data)


def _adapt(file: FlatFile, name: str, base: LazyTensor, changes: Sequence[tuple[Factors, float]]) -> None:
    """Combine all changes of a matrix into one for the core, with the a's stacked and the b's side by side.

    DoRA multiplies the matrix and all earlier changes by a factor per row. The earlier b's are multiplied here. The
    core multiplies the products of the matrix itself.
    """
    a, b = [], []
    scales = np.ones(base.shape[0])
    for factors, strength in changes:
        a.append(factors.a.finite(f"{name} (an adapter's A)").array())
        b.append(_scaled(factors, strength, name))
        if factors.magnitudes is not None:
            factor = factors.magnitudes.finite(name).array() / _row_norms(base, a[-1], b[-1])
            scales *= factor
            b = [part * factor[:, None] for part in b]
    all_a, all_b = np.concatenate(a), np.concatenate(b, axis=1).astype(np.float32)
    is_embedding = name in (EMBEDDING, "position_embedding.weight", "layer_embedding.weight")
    strips = _strips(all_a.T if is_embedding else all_a), _strips(all_b)
    has_scales = any(factors.magnitudes is not None for factors, _ in changes)
    row_scales = memoryview(scales.astype(np.float32).tobytes()).cast("f") if has_scales else None
    file.core.adapt(name, len(all_a), *strips, row_scales)


def _scaled(factors: Factors, strength: float, name: str) -> Doubles:
    """The B of an adapter times its strength."""
    scale = np.float64(factors.scale * strength)
    with np.errstate(over="ignore", invalid="ignore"):
        scaled: Doubles = factors.b.finite(f"{name} (an adapter's B)").array() * scale
        if not np.isfinite(scaled.astype(np.float32)).all():
            raise ArgumentError(
                f"{name}: an adapter's B times its strength is beyond the range of f32: use a strength near 1"
            )
    return scaled


def _row_norms(base: LazyTensor, a: Floats, b: Doubles) -> Doubles:
    """The norms of the rows of base + b a."""
    a_double = a.astype(np.float64)
    parts = [np.linalg.norm(rows + b[first : first + len(rows)] @ a_double, axis=1) for first, rows in base.chunks()]
    return np.concatenate(parts)


def _strips(matrix: Floats) -> memoryview[float]:
    return memoryview(pack_strips(np.ascontiguousarray(matrix, np.float32), "f32")).cast("f")
