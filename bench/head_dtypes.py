"""What the dtype of the output head costs: KL divergence against the bytes of the head.

    python -m bench.head_dtypes MODEL.gguf [--windows 4] [--only LABEL] [--result NAME]

The reference is the float model that the GGUF file describes. All other matrices are q4, or what the row says: q4s
shows what a byte is worth there, f32 what the head alone costs. The exporter has no quantizer for GGUF's types: "like
q6_k" and so on are heads that NumPy rounds to what the type can represent, with a least-squares search for each scale,
stored as f32. In both models, the head is also the embedding. The text is export/classics.txt in windows of 512
tokens; the KV caches are f32.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import llamac
from bench.gguf_model import Row, windows
from bench.stamp import save
from llamac.export.checkpoint import LazyTensor
from llamac.export.flat.write import Quantization, write_flat
from llamac.export.read import read_checkpoint
from llamac.progress import silent

Floats = NDArray[np.float32]
HEAD = "token_embedding.weight"
SUPER = 256  # columns of a super-block; a row's last one may be shorter
ROWS = 2048  # rows of the head that are rounded at once


def like_q6_k(rows: Floats) -> Floats:
    """Codes -32 .. 31, an int8 scale per 16 columns, an f16 scale per 256."""
    spans = rows.reshape(len(rows), -1, 16)
    peak = np.take_along_axis(spans, np.abs(spans).argmax(axis=2)[..., None], 2)
    best, least = np.zeros_like(peak), np.full(peak.shape, np.inf, np.float32)
    for step in np.arange(-8, 9, dtype=np.float32):
        inverse = np.divide(-(32 + step / 2), peak, out=np.zeros_like(peak), where=peak != 0)
        codes = np.clip(np.rint(spans * inverse), -32, 31)
        squares = (codes * codes).sum(axis=2, keepdims=True)
        scale = np.divide(
            (spans * codes).sum(axis=2, keepdims=True), squares, out=np.zeros_like(peak), where=squares > 0
        )
        error = ((spans - scale * codes) ** 2).sum(axis=2, keepdims=True)
        best, least = np.where(error < least, scale, best), np.minimum(error, least)
    scales = _rounded(best, SUPER // 16, 127)
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)
    found: Floats = (np.clip(np.rint(spans * inverse), -32, 31) * scales).reshape(rows.shape)
    return found


def like_k(bits: int) -> Callable[[Floats], Floats]:
    """q4_k or q5_k: a 6-bit scale and minimum per 32 columns, two f16 scales per 256."""
    last = (1 << bits) - 1

    def rounded(rows: Floats) -> Floats:
        spans = rows.reshape(len(rows), -1, 32)
        low = np.minimum(spans.min(axis=2, keepdims=True), 0)
        width = spans.max(axis=2, keepdims=True) - low
        best, shift = np.zeros_like(low), np.zeros_like(low)
        least = np.full(low.shape, np.inf, np.float32)
        mean = spans.mean(axis=2, keepdims=True)
        for step in np.arange(-8, 9, dtype=np.float32):
            inverse = np.divide(last + step / 8, width, out=np.zeros_like(width), where=width > 0)
            codes = np.clip(np.rint((spans - low) * inverse), 0, last)
            center = codes.mean(axis=2, keepdims=True)
            spread = ((codes - center) ** 2).sum(axis=2, keepdims=True)
            product = ((codes - center) * (spans - mean)).sum(axis=2, keepdims=True)
            scale = np.divide(product, spread, out=np.zeros_like(low), where=spread > 0)
            minimum = np.minimum(mean - scale * center, 0)
            error = ((spans - scale * codes - minimum) ** 2).sum(axis=2, keepdims=True)
            better = error < least
            best, shift = np.where(better, scale, best), np.where(better, minimum, shift)
            least = np.minimum(error, least)
        scales, minimums = _rounded(best, SUPER // 32, 63), _rounded(shift, SUPER // 32, 63)
        inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)
        found: Floats = (np.clip(np.rint((spans - minimums) * inverse), 0, last) * scales + minimums).reshape(
            rows.shape
        )
        return found

    return rounded


def _rounded(scales: Floats, per_super: int, last: int) -> Floats:
    """Scales (rows, spans, 1) as integers up to `last` times an f16 number of each super-block."""
    found = np.empty_like(scales)
    for first in range(0, scales.shape[1], per_super):
        part = scales[:, first : first + per_super]
        unit = (np.abs(part).max(axis=1, keepdims=True) / last).astype(np.float16).astype(np.float32)
        inverse = np.divide(1, unit, out=np.zeros_like(unit), where=unit != 0)
        found[:, first : first + per_super] = np.clip(np.rint(part * inverse), -last, last) * unit
    return found


# Each row: label, dtype of the other matrices, dtype of the head, how NumPy rounds the head, its bits per weight.
VARIANTS: list[tuple[str, str, str, Callable[[Floats], Floats] | None, float]] = [
    ("f32", "q4", "f32", None, 32),
    ("q8", "q4", "q8", None, 8.25),
    ("q6", "q4", "q6", None, 6.25),
    ("like q6_k", "q4", "f32", like_q6_k, 6.5625),
    ("like q5_k", "q4", "f32", like_k(5), 5.5),
    ("like q4_k", "q4", "f32", like_k(4), 4.5),
    ("q4", "q4", "q4", None, 4.5),
    ("q4s", "q4", "q4s", None, 4.25),
    ("q8, others q4s", "q4s", "q8", None, 8.25),
    ("q4, others q4s", "q4s", "q4", None, 4.5),
    ("q8, others f32", "f32", "q8", None, 8.25),
    ("like q6_k, others f32", "f32", "f32", like_q6_k, 6.5625),
    ("q6, others f32", "f32", "q6", None, 6.25),
    ("q4, others f32", "f32", "q4", None, 4.5),
]


def with_head(source: Path, out: Path, dtype: str, head: str, rounding: Callable[[Floats], Floats] | None) -> int:
    """Write a flat file. Returns the bytes of its data."""
    checkpoint = read_checkpoint(source, [])
    tensor = checkpoint.tensors[HEAD]
    if rounding is not None:
        rows = tensor.shape[0]
        numbers = np.concatenate(
            [rounding(tensor.read(first, min(first + ROWS, rows))) for first in range(0, rows, ROWS)]
        )
        checkpoint.tensors[HEAD] = LazyTensor.of(numbers)
    plan = write_flat(
        checkpoint,
        out,
        Quantization(dtype, False, ((HEAD, head),), None, 2),
        partial=None,
        probe_source=None,
        folder=None,
        warnings=[],
        progress=silent,
        sync=False,
    )
    return plan.data_bytes


def measure(source: Path, folder: Path, limit: int, only: list[str] | None) -> dict[str, Any]:
    """All rows of one model, or only those with these labels."""
    llamac.export.export(source, folder / "f32.bin", dtype="f32", probe_source=None)
    found = []
    with llamac.load(folder / "f32.bin", kv_dtype="f32", threads=2) as reference:
        texts = windows(reference)[:limit]
        parameters = int(np.prod(read_checkpoint(source, []).tensors[HEAD].shape))
        for label, dtype, head, rounding, bits in VARIANTS:
            if only and label not in only:
                continue
            path = folder / "variant.bin"
            total = with_head(source, path, dtype, head, rounding)
            row = Row(label, bits)
            with llamac.load(path, kv_dtype="f32", threads=2) as model:
                for ids in texts:
                    row.add(ids, reference.logits(ids), model.logits(ids))
            path.unlink()
            head_bytes = round(parameters * bits / 8)
            stored = round(parameters * (32 if rounding or head == "f32" else bits) / 8)
            sizes = {"head_mb": head_bytes / 1e6, "other_mb": (total - stored) / 1e6}
            found.append({**row.result(), **{name: round(size, 2) for name, size in sizes.items()}})
            print(json.dumps(found[-1]), flush=True)
    return {"model": source.name, "tokens": sum(map(len, texts)), "rows": found}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", type=Path, help="a GGUF file with tied embeddings")
    parser.add_argument("--windows", type=int, default=4, help="number of windows of text (default: %(default)s)")
    parser.add_argument("--only", action="append", metavar="LABEL", help="only this row of the table; repeatable")
    parser.add_argument("--result", metavar="NAME")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options.model, Path(folder), options.windows, options.only)
    if options.result:
        save(options.result, found)


if __name__ == "__main__":
    main()
