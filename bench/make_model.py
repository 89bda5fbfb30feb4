"""Make a model file for benchmarks: random weights in the shape of a real model.

    python -m bench.make_model --shape tinyllama-1.1b --dtype q4 OUT          a flat file, mixed as by the exporter
    python -m bench.make_model --shape tinyllama-1.1b --dtype q4 --pure OUT   every matrix in q4
    python -m bench.make_model --shape tinyllama-1.1b --gguf Q4_K_S OUT       a GGUF file for llama.cpp
    python -m bench.make_model --shape tinyllama-1.1b --hf --dtype bf16 OUT   a folder for transformers and CTranslate2

Quantized strips are random but valid bytes, whose row scales give the weights realistic magnitudes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.shapes import SHAPES, Shape, model_config, tensors, vector
from llamac import _core
from llamac.export.checkpoint import Checkpoint
from llamac.export.dtypes import DTYPES, FEW_BITS, choose_dtypes
from llamac.export.flat.plan import Slot, make_plan
from llamac.export.flat.stream import DataStream, write_tables
from llamac.export.targets import atomic_file
from llamac.format.strips import (
    BLOCK_COLUMNS,
    CODE_BITS,
    GROUP_COLUMNS,
    LINE_BYTES,
    STRIP_ROWS,
    scale_columns,
    to_dtype,
)

GGUF_TYPES = (
    *("F16", "Q4_K_S", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"),
)
# Root mean square of random codes.
CODE_RMS = {"q8": 73.0, "q6": 18.5, "q4": 16.0, "q4s": 16.0, "q3": 9.8, "q2": 6.6, "t2": 1.2}
POOL_STRIPS = 256  # random strips per (dtype, width) that matrices are assembled from
Bytes = NDArray[np.uint8]


# ---- strips


def strip_pool(dtype: str, columns: int, rng: np.random.Generator) -> Bytes:
    """Random strips, (POOL_STRIPS, bytes of a strip), whose weights have a standard deviation of 1 / sqrt(columns)."""
    size = _core.matrix_bytes(DTYPES[dtype], STRIP_ROWS, columns)
    if dtype in ("f32", "f16", "bf16"):
        padded = columns if dtype == "f32" else columns + columns % 2
        values = rng.standard_normal((POOL_STRIPS, padded * STRIP_ROWS), np.float32) * np.float32(columns**-0.5)
        return np.ascontiguousarray(to_dtype(values, dtype)).view(np.uint8).reshape(POOL_STRIPS, size)
    strips = rng.integers(1, 256, (POOL_STRIPS, size), np.uint8)
    for start, lines in scale_lines(dtype, columns):
        magnitude = rng.integers(32, 128, (POOL_STRIPS, lines), np.int8)
        strips[:, start : start + lines] = np.where(strips[:, start : start + lines] & 1, magnitude, -magnitude).view(
            np.uint8
        )
    scales_rms = 1 if dtype == "t2" else 84
    row_scale = columns**-0.5 / (scales_rms * CODE_RMS[dtype])
    strips[:, :LINE_BYTES] = np.full((POOL_STRIPS, STRIP_ROWS), row_scale, np.float32).view(np.uint8)
    return strips


def scale_lines(dtype: str, columns: int) -> Iterator[tuple[int, int]]:
    """(offset, number of bytes) of each block's scales in a quantized strip (docs/format.md)."""
    at = LINE_BYTES
    for k in range(0, columns, BLOCK_COLUMNS):
        groups = -(-min(BLOCK_COLUMNS, columns - k) // GROUP_COLUMNS)
        scales = 0 if dtype == "t2" else STRIP_ROWS * groups * GROUP_COLUMNS // scale_columns(dtype)
        yield at, scales
        at += -(-scales // LINE_BYTES) * LINE_BYTES + groups * LINE_BYTES * CODE_BITS[dtype]


def matrix_chunks(pool: Bytes, name: str, rows: int) -> Iterator[Bytes]:
    """The strips of a matrix, drawn from the pool. The padding rows of the last strip are not zero: readers must not
    rely on it."""
    strips = -(-rows // STRIP_ROWS)
    order = np.random.default_rng(zlib.crc32(name.encode())).integers(0, len(pool), strips)
    for first in range(0, strips, 512):
        yield pool[order[first : first + 512]]


# ---- the file


def make(name: str, dtype: str, out: Path, *, pure: bool = False, shape: Shape | None = None) -> None:
    """Write a flat file. `shape` overrides the dimensions that `name` stands for."""
    shape = shape or SHAPES[name]
    metadata = {"architecture": shape.family, "dtype": dtype, "name": f"random {name}{' pure' if pure else ''}"}
    sections = {"metadata": json.dumps(metadata, separators=(",", ":")).encode()}
    described = {
        tensor: replace(vector(tensor, columns), shape=(rows, columns) if is_matrix else (columns,))
        for tensor, is_matrix, rows, columns in tensors(shape)
    }
    dtypes = choose_dtypes(described, dtype, pure=pure and dtype in (*FEW_BITS, "t2"))
    plan = make_plan(Checkpoint(model_config(shape), described), dtype, sections, dtypes)
    pools: dict[tuple[str, int], Bytes] = {}
    with atomic_file(out) as file:
        file.truncate(plan.file_bytes)
        start, hashes = plan.offsets()["data"], []
        stream = DataStream(file, start)
        for slot in plan.slots:
            digest = hashlib.sha256()
            stream.skip_to(start + slot.offset)
            for chunk in _chunks(slot, pools):
                digest.update(chunk.data)
                stream.write(chunk.data)
            hashes.append(digest.digest())
        stream.flush()
        write_tables(file, plan, hashes)


def _chunks(slot: Slot, pools: dict[tuple[str, int], Bytes]) -> Iterator[Bytes]:
    if not slot.is_matrix:
        yield slot.tensor.array().view(np.uint8)
        return
    rows, columns = slot.tensor.shape
    key = slot.dtype, columns
    if key not in pools:
        pools[key] = strip_pool(*key, np.random.default_rng(columns))
    yield from matrix_chunks(pools[key], slot.name, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument(
        "--shape",
        choices=SHAPES,
        required=True,
        help="the model's shape; qwen3-4b has only the dimensions, without the norms of q and k",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of the matrices")
    parser.add_argument("--pure", action="store_true", help="give the output head and attn_v the same dtype")
    parser.add_argument("--layers", type=int, metavar="N", help="number of layers (default: the shape's)")
    parser.add_argument("--context", type=int, metavar="N", help="context length (default: the shape's)")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--gguf", choices=GGUF_TYPES, metavar="TYPE", help=f"write a GGUF file: {', '.join(GGUF_TYPES)}")
    kind.add_argument("--hf", action="store_true", help="write a Hugging Face folder")
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    shape = replace(shape, context=options.context or shape.context, layers=options.layers or shape.layers)
    if options.gguf:
        if options.dtype:
            parser.error("--gguf TYPE sets the number format; remove --dtype")
        from bench.make_gguf import make_gguf

        make_gguf(options.shape, options.gguf, options.out, pure=options.pure, shape=shape)
    elif options.dtype is None:
        parser.error("--dtype is required without --gguf")
    elif options.hf:
        from bench.make_hf import make_hf

        if options.pure or options.dtype not in ("f32", "f16", "bf16"):
            parser.error("--hf needs --dtype f32, f16 or bf16, without --pure")
        make_hf(options.shape, options.dtype, options.out, shape=shape)
    else:
        make(options.shape, options.dtype, options.out, pure=options.pure, shape=shape)


if __name__ == "__main__":
    main()
