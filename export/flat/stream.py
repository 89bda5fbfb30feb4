"""Streams a planned flat file to disk, tensor by tensor, and resumes an unfinished one.

Each tensor's record is written after its data. An unfinished file therefore shows which tensors are complete, and the
next export with the same plan continues after them.

Threads read, regroup and hash while the caller quantizes and writes (llamac.export.flat.pipeline).
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from llamac import _core
from llamac.errors import ExportError
from llamac.export.dtypes import BLOCK_DTYPES, DTYPES
from llamac.export.flat.packing import checked_rows, regroup
from llamac.export.flat.pipeline import Hashers, Job, in_order
from llamac.export.flat.plan import Plan, Slot
from llamac.export.quantize import CalibrationStats, Quantizer
from llamac.format.flatfile import (
    ALIGNMENT,
    MAGIC,
    NUMERICS,
    RECORD_BYTES,
    SECTIONS,
    VERSION,
    Section,
    pack_head,
    pack_record,
    unpack_record,
)
from llamac.format.strips import QUANTIZED, STRIP_ROWS, pack_strips
from llamac.progress import Progress, silent

Piece = NDArray[np.float32] | NDArray[np.uint8]

READ_BYTES = 1 << 24
# Of rows that a job reads at once, as floats or as GGUF's blocks. The writer makes up to three copies of floats.
JOB_BYTES = 4 << 20
# The page cache stores written data in pieces as large as the writes, and maps pieces of 2 MiB at once. With writes of
# this size, reading the weights of a new file is a tenth faster (bench/LOG.md).
BLOCK_BYTES = 1 << 21


class DataStream:
    """Writes data front to back, in whole 2 MiB blocks at multiples of their size.

    Attributes:
        offset: The file offset of the next byte.
    """

    def __init__(self, file: BinaryIO, offset: int) -> None:
        self._file = file
        self._pending = bytearray()
        self.offset = offset

    def skip_to(self, offset: int) -> None:
        """Write zeros up to `offset`."""
        self.write(bytes(offset - self.offset))

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        while view:
            if not self._pending and self.offset % BLOCK_BYTES == 0 and len(view) >= BLOCK_BYTES:
                self._file.seek(self.offset)
                self._file.write(view[:BLOCK_BYTES])
                self.offset += BLOCK_BYTES
                view = view[BLOCK_BYTES:]
                continue
            part = view[: BLOCK_BYTES - self.offset % BLOCK_BYTES]
            self._pending += part
            self.offset += len(part)
            view = view[len(part) :]
            if self.offset % BLOCK_BYTES == 0:
                self.flush()

    def flush(self) -> None:
        self._file.seek(self.offset - len(self._pending))
        self._file.write(self._pending)
        self._pending.clear()


def write_file(
    file: BinaryIO,
    plan: Plan,
    progress: Progress = silent,
    *,
    threads: int = 1,
    calibration: Callable[[Slot], CalibrationStats | None] = lambda slot: None,
) -> list[bytes]:
    """Write a whole flat file. Complete tensors that `file` already contains are not written again.

    Args:
        file: The open file.
        plan: The layout.
        progress: Called with the phase "writing" and byte counts.
        threads: The number of threads that quantize.
        calibration: Returns the calibration statistics of a matrix, or None.

    Returns:
        The SHA-256 of every tensor.
    """
    with Quantizer(threads) as quantizer, Hashers(threads) as hashers:
        return _write_file(file, plan, progress, quantizer, hashers, calibration, threads)


def _write_file(
    file: BinaryIO,
    plan: Plan,
    progress: Progress,
    quantizer: Quantizer,
    hashers: Hashers,
    calibration: Callable[[Slot], CalibrationStats | None],
    threads: int,
) -> list[bytes]:
    offsets = plan.offsets()
    start = offsets["data"]
    is_new = resize(file, plan.file_bytes)
    progress("writing", 0, plan.data_bytes)
    hashes = _complete_tensors(file, plan, progress)
    if not hashes and not is_new:
        clear(file, plan.file_bytes)
    stream = DataStream(file, start + (plan.slots[len(hashes) - 1].end if hashes else 0))
    missing = plan.slots[len(hashes) :]
    unfinished: deque[tuple[Slot, Future[bytes]]] = deque()

    def finish(wait: bool) -> None:
        """Write the records of tensors whose hashes are known: of all if `wait`."""
        while unfinished and (wait or unfinished[0][1].done()):
            slot, future = unfinished.popleft()
            file.seek(offsets["tensors"] + RECORD_BYTES["tensor"] * len(hashes))
            hashes.append(future.result())
            file.write(tensor_record(slot, start, hashes[-1]))

    try:
        for _, pieces in itertools.groupby(in_order(_jobs(missing), threads), key=lambda item: item[0].offset):
            slot, first = next(pieces)
            stats = calibration(slot)
            digest = hashers.start()
            stream.skip_to(start + slot.offset)
            written = 0
            for rows in itertools.chain([first], (more for _, more in pieces)):
                data = memoryview(_stored_bytes(slot, rows, quantizer, stats)).cast("B")
                digest.add(data)
                stream.write(data)
                written += len(data)
                progress("writing", slot.offset + written, plan.data_bytes)
            if written != slot.bytes:
                raise ExportError(f"tensor {slot.name} gave {written} bytes, expected {slot.bytes}")
            unfinished.append((slot, digest.finish()))
            finish(wait=False)
    finally:  # an interrupted export keeps them, too
        finish(wait=True)
    stream.flush()
    write_tables(file, plan, hashes)
    return hashes


def resize(file: BinaryIO, size: int) -> bool:
    """Set a file's size. Returns whether the file was empty."""
    is_new = not os.fstat(file.fileno()).st_size
    file.truncate(size)
    return is_new


def clear(file: BinaryIO, size: int) -> None:
    """Remove leftovers of another file: the gaps between sections must be zeros.

    A new file needs no clearing. When a file that was truncated is closed, ext4 waits until it has begun to write it.
    """
    file.truncate(0)
    file.truncate(size)


def _jobs(slots: Iterable[Slot]) -> Iterator[Job[tuple[Slot, Piece]]]:
    """Jobs that read some rows of a tensor each, in order. Rows of GGUF's blocks become strips there."""
    for slot in slots:
        is_regrouped = slot.dtype in BLOCK_DTYPES
        columns = slot.tensor.shape[1] if slot.is_matrix else 1
        row_bytes = _core.gguf_row_bytes(DTYPES[slot.dtype], columns) if is_regrouped else 4 * columns
        step = max(STRIP_ROWS, JOB_BYTES // row_bytes // STRIP_ROWS * STRIP_ROWS)
        for first in range(0, slot.tensor.shape[0], step):
            last = min(first + step, slot.tensor.shape[0])
            yield Job(functools.partial(_read, slot, first, last), (last - first) * row_bytes)


def _read(slot: Slot, first: int, last: int) -> tuple[Slot, Piece]:
    if slot.dtype in BLOCK_DTYPES:
        return slot, regroup(slot.name, slot.tensor, first, last)
    rows = checked_rows(slot.name, slot.tensor, slot.dtype, first, last)
    if slot.tensor.strips is not None and slot.tensor.has_strips_of(slot.dtype):
        return slot, np.frombuffer(slot.tensor.strips(first, last), np.uint8)
    return slot, rows


def _stored_bytes(slot: Slot, rows: Piece, quantizer: Quantizer, stats: CalibrationStats | None) -> bytes | memoryview:
    """The bytes of some rows in the file. Strips of GGUF's blocks, and of another flat file, are complete."""
    if rows.dtype == np.uint8:
        return rows.data
    floats = rows.astype(np.float32, copy=False)
    if not slot.is_matrix:
        return np.ascontiguousarray(floats).data
    return quantizer.pack(floats, slot.dtype, stats) if slot.dtype in QUANTIZED else pack_strips(floats, slot.dtype)


def _complete_tensors(file: BinaryIO, plan: Plan, progress: Progress) -> list[bytes]:
    """The hashes of the leading tensors that the file already contains: with this plan's record and intact data."""
    offsets = plan.offsets()
    hashes: list[bytes] = []
    for slot in plan.slots:
        file.seek(offsets["tensors"] + RECORD_BYTES["tensor"] * len(hashes))
        record = file.read(RECORD_BYTES["tensor"])
        digest = unpack_record("tensor", record)["sha256"]
        if record != tensor_record(slot, offsets["data"], digest):
            break
        file.seek(offsets["data"] + slot.offset)
        if digest != _hash_next(file, slot.bytes):
            break
        hashes.append(digest)
        progress("writing", slot.end, plan.data_bytes)
    return hashes


def _hash_next(file: BinaryIO, count: int) -> bytes:
    """The SHA-256 of the next `count` bytes."""
    digest = hashlib.sha256()
    while count and (data := file.read(min(count, READ_BYTES))):
        digest.update(data)
        count -= len(data)
    return digest.digest()


def write_tables(file: BinaryIO, plan: Plan, tensor_hashes: list[bytes]) -> None:
    """Write everything but the tensor data: header, section table and sections, with their hashes."""
    offsets = plan.offsets()
    sections = dict(plan.sections)
    sections["tensors"] = b"".join(
        tensor_record(slot, offsets["data"], digest) for slot, digest in zip(plan.slots, tensor_hashes, strict=True)
    )
    found = {name: Section(offsets[name], len(data), hashlib.sha256(data).digest()) for name, data in sections.items()}
    found["data"] = Section(offsets["data"], plan.data_bytes, hashlib.sha256(b"".join(tensor_hashes)).digest())
    values = {
        "magic": MAGIC,
        "version": VERSION,
        "numerics": NUMERICS,
        "file_bytes": plan.file_bytes,
        "alignment": ALIGNMENT,
    }
    file.seek(0)
    file.write(pack_head({name: found[name] for name in SECTIONS}, values))
    for name, data in sections.items():
        file.seek(offsets[name])
        file.write(data)


def tensor_record(slot: Slot, data_offset: int, digest: bytes) -> bytes:
    """Pack the record of a tensor with this hash."""
    values = {
        "name": slot.name,
        "dtype": slot.dtype,
        "n_dims": len(slot.tensor.shape),
        "shape": list(slot.tensor.shape),
        "offset": data_offset + slot.offset,
        "bytes": slot.bytes,
        "sha256": digest,
    }
    return pack_record("tensor", values)
