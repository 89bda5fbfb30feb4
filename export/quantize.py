"""Which dtype each matrix gets, and how it becomes quantized strips: the same bytes by any number of threads."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from llamac import _core
from llamac.errors import ArgumentError
from llamac.export.checkpoint import LazyTensor
from llamac.progress import Progress, silent
from llamac.strips import STRIP_ROWS, scale_columns

Floats = NDArray[np.float32]

DTYPES = {str(_core.dtype_name(number)): number for number in range(1, 7)}
FOUR_BITS = ("q4", "q4s")
# What stays at 8 bits: an error in the logits or in the values that attention mixes is not averaged over anything.
KEPT_AT_8_BITS = "layers.*.attn_v.weight"
ROUTERS = "layers.*.ffn_router.weight"
# A block whose largest number is this much smaller than its row's gets a scale of about 8 of 127: a coarse choice.
TINY = 1 / 16
MANY_TINY = 0.25
PIECE_STRIPS = 4
MOST_READERS = 4  # each holds some rows of a matrix


def choose_dtypes(
    tensors: Mapping[str, LazyTensor], dtype: str, *, pure: bool = False, dtype_map: Iterable[tuple[str, str]] = ()
) -> dict[str, str]:
    """The dtype of every tensor: vectors f32, matrices `dtype`; with 4 bits output head and attn_v q8, unless `pure`.

    A router has q8 instead of 4 bits always: it is small, and one wrong choice of experts costs more than any rounding.

    dtype_map: (pattern, dtype) pairs; the first whose pattern fits a matrix's name decides. In a pattern * stands for
    any text, ? for one character, [ab] for one of several. Raises ArgumentError for an unknown dtype, or a pattern that
    fits no matrix.
    """
    pairs = list(dtype_map)
    for name in (dtype, *(found for _, found in pairs)):
        if name not in DTYPES:
            raise ArgumentError(f"dtype is {name!r}, expected one of {', '.join(DTYPES)}")
    if pure and dtype not in FOUR_BITS:
        raise ArgumentError(f"pure is for dtype q4 and q4s: with {dtype!r} no tensor is kept at 8 bits")
    matrices = [name for name, tensor in tensors.items() if len(tensor.shape) == 2]
    for pattern, _ in pairs:
        if not fnmatch.filter(matrices, pattern):
            raise ArgumentError(f"dtype_map: no matrix is called {pattern!r}; there are {', '.join(_kinds(matrices))}")
    head = "output.weight" if "output.weight" in tensors else "token_embedding.weight"
    chosen = {}
    for name, tensor in tensors.items():
        kept = dtype in FOUR_BITS and not pure and (name == head or fnmatch.fnmatchcase(name, KEPT_AT_8_BITS))
        kept = kept or (dtype in FOUR_BITS and fnmatch.fnmatchcase(name, ROUTERS))
        usual = "f32" if len(tensor.shape) == 1 else "q8" if kept else dtype
        asked = [found for pattern, found in pairs if len(tensor.shape) == 2 and fnmatch.fnmatchcase(name, pattern)]
        chosen[name] = asked[0] if asked else usual
    return chosen


def nearest_dtypes(tensors: Mapping[str, LazyTensor]) -> tuple[str, list[tuple[str, str]]]:
    """(dtype of most numbers, dtype_map for the other matrices) that keep a source's quality in few bits: floats stay
    what they are, up to 4 bits become q4, more of them q8 (why: docs/gguf.md)."""
    found = {name: _nearest(tensor.dtype) for name, tensor in tensors.items() if len(tensor.shape) == 2}
    numbers: dict[str, int] = {}
    for name, dtype in found.items():
        rows, columns = tensors[name].shape
        numbers[dtype] = numbers.get(dtype, 0) + rows * columns
    most = max(numbers, key=lambda dtype: numbers[dtype], default="f32")
    return most, [(name, dtype) for name, dtype in found.items() if dtype != most]


def _nearest(dtype: str) -> str:
    """The dtype for numbers that the source stores as `dtype`, one of ours or GGUF's, whose names tell their bits."""
    if dtype in DTYPES:
        return dtype
    bits = re.search(r"\d+", dtype)
    return "q4" if bits is not None and int(bits[0]) <= 4 else "q8"


def _kinds(names: Iterable[str]) -> list[str]:
    """Names of tensors without their layer's and expert's numbers, each once."""
    return list(dict.fromkeys(re.sub(r"\b(layers|experts)\.\d+\.", r"\1.*.", name) for name in names))


def widen_coarse(
    tensors: Mapping[str, LazyTensor],
    dtypes: dict[str, str],
    fixed: Callable[[str], bool],
    progress: Progress = silent,
    threads: int = 1,
) -> tuple[dict[str, str], list[str]]:
    """(dtypes in which a 4-bit matrix with many tiny block scales is q8, a warning about each of them).

    fixed: whether the user has asked for a tensor's dtype by name; it stays. Reads every 4-bit matrix once, several at
    a time.
    """
    found, warnings = dict(dtypes), []
    names = [name for name, dtype in dtypes.items() if dtype in FOUR_BITS and not fixed(name)]
    total = sum(tensors[name].shape[0] for name in names)
    done = 0
    with ThreadPoolExecutor(min(threads, MOST_READERS)) as pool:
        shares = pool.map(lambda name: tiny_share(tensors[name], dtypes[name]), names)
        for name, share in zip(names, shares, strict=True):
            if share > MANY_TINY:
                found[name] = "q8"
                warnings.append(
                    f"{name} is stored as q8, not {dtypes[name]}: {share:.0%} of its blocks (limit {MANY_TINY:.0%}) are"
                    f" at most {TINY:g} of their row's largest number, and their scales would be coarse"
                )
            done += tensors[name].shape[0]
            progress("looking at scales", done, total)
    return found, warnings


def tiny_share(tensor: LazyTensor, dtype: str) -> float:
    """The share of a matrix's blocks, of those with numbers, whose largest is at most TINY of their row's."""
    columns, width = tensor.shape[1], scale_columns(dtype)
    starts = np.arange(0, columns, width)
    tiny = blocks = 0
    for _, rows in tensor.chunks(STRIP_ROWS):
        tops = np.maximum.reduceat(np.abs(rows), starts, axis=1)
        row_tops = tops.max(axis=1, keepdims=True)
        tiny += int(((tops <= TINY * row_tops) & (tops > 0)).sum())
        blocks += int((tops > 0).sum())
    return tiny / max(blocks, 1)


@dataclass(frozen=True)
class Lesson:
    """What calibration knows of a matrix's inputs.

    importance: the weight of each column's error (columns). feedback: how much of the error of column i column j > i
    takes over (columns, columns), or None.
    """

    importance: Floats
    feedback: Floats | None


class Quantizer:
    """Packs rows into quantized strips on a few threads. A context manager."""

    def __init__(self, threads: int = 1) -> None:
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def __enter__(self) -> Quantizer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def pack(self, rows: Floats, dtype: str, lesson: Lesson | None = None) -> bytes:
        """Rows (n, columns) of a matrix as strips of 16 rows, filled up."""
        rows = np.ascontiguousarray(rows, np.float32)
        out = np.empty(_core.matrix_bytes(DTYPES[dtype], *rows.shape), np.uint8)
        strip_bytes = len(out) // -(-len(rows) // STRIP_ROWS)
        importance = lesson.importance.data if lesson else None
        feedback = lesson.feedback.data if lesson and lesson.feedback is not None and dtype in FOUR_BITS else None

        def piece(first: int) -> None:
            part = rows[first : first + PIECE_STRIPS * STRIP_ROWS]
            start = first // STRIP_ROWS * strip_bytes
            end = start + -(-len(part) // STRIP_ROWS) * strip_bytes
            _core.quantize(DTYPES[dtype], part.data, out[start:end].data, importance, feedback)

        starts = range(0, len(rows), PIECE_STRIPS * STRIP_ROWS)
        for _ in map(piece, starts) if self._pool is None else self._pool.map(piece, starts):
            pass  # map hands on what a piece raises
        return out.tobytes()


def parse_dtype_map(text: str) -> list[tuple[str, str]]:
    """The pairs of "PATTERN=DTYPE,PATTERN=DTYPE". Raises ArgumentError for anything else."""
    pairs = []
    for item in text.split(","):
        pattern, equals, dtype = item.partition("=")
        if not (pattern and equals and dtype):
            raise ArgumentError(f"dtype map: {item!r} is no PATTERN=DTYPE, e.g. layers.0.*=q8")
        pairs.append((pattern.strip(), dtype.strip()))
    return pairs
