"""Makes a model in other number formats, to measure what each costs: llamac's dtypes, and those of GGUF's types that
the `gguf` package can quantize."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llamac.arguments import DTYPES
from llamac.errors import ArgumentError
from llamac.export.checkpoint import LazyTensor
from llamac.export.convert import export
from llamac.export.flat.write import Quantization, write_flat
from llamac.export.read import read_checkpoint
from llamac.format.detect import Source
from llamac.progress import Progress, silent

GGUF_TYPES = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0")
OUTPUT_TYPE = "q8_0"  # of the output matrix, as `llamac export --to gguf` stores it
BLOCK = 32  # columns; a matrix whose width is not a multiple stays in f16
VARIANTS = (*DTYPES, *GGUF_TYPES)


def parse_variants(text: str) -> list[str]:
    """Split a list such as "q8,q4,q4_0".

    Raises:
        ArgumentError: If a number format is unknown.
    """
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in VARIANTS:
            raise ArgumentError(f"dtypes: {name!r} is not one of {', '.join(VARIANTS)}")
    return list(dict.fromkeys(names))


def write_variant(source: Source, out: Path, name: str, threads: int, progress: Progress = silent) -> None:
    """Write a model in another number format.

    Args:
        source: The model.
        out: The flat file to write. It has no probes.
        name: One of `VARIANTS`. With GGUF's types, the output matrix is q8_0.
        threads: Threads of the quantizer.
        progress: Called with the phases of `export`.
    """
    if name in DTYPES:
        export(source, out, dtype=name, threads=threads, probe_source=None, progress=progress)
        return
    checkpoint = read_checkpoint(source.path, [], progress)
    head = "output.weight" if "output.weight" in checkpoint.tensors else "token_embedding.weight"
    kinds = {}
    for matrix, tensor in checkpoint.tensors.items():
        if len(tensor.shape) == 2:
            kinds[matrix] = "f16" if tensor.shape[1] % BLOCK else OUTPUT_TYPE if matrix == head else name
    tensors = {matrix: in_blocks(tensor, kinds.get(matrix, "f16")) for matrix, tensor in checkpoint.tensors.items()}
    write_flat(
        dataclasses.replace(checkpoint, tensors=tensors),
        out,
        Quantization("f16", False, tuple(kinds.items()), None, threads),
        partial=None,
        probe_source=None,
        folder=None,
        warnings=[],
        progress=progress,
        sync=False,
    )


def in_blocks(tensor: LazyTensor, kind: str) -> LazyTensor:
    """A matrix in the blocks of one of GGUF's types; with "f16", the tensor itself."""
    if kind not in GGUF_TYPES:
        return tensor

    def blocks(first: int, last: int) -> NDArray[np.uint8]:
        import gguf

        found: NDArray[np.uint8] = gguf.quants.quantize(
            np.ascontiguousarray(tensor.read(first, last)), gguf.GGMLQuantizationType[kind.upper()]
        )
        return found

    return LazyTensor(tensor.shape, kind, tensor.read, blocks)
