"""Writes a flat file whose matrices only need regrouping, without the hashes of its tensors.

Threads regroup and write whole blocks of the file, each at its own offset. The hashes of all tensors are UNHASHED in
the file. `FlatFile` computes them when somebody needs them, and `llamac.sources.finishing` stores them later.

Each tensor's record is written after its data, as in `stream`, so an unfinished file can be resumed. Nothing can verify
the data then: the caller resumes only a file that no other program and no crash of the system can have changed.
"""

from __future__ import annotations

import bisect
import functools
import os
import threading
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from llamac.export.dtypes import BLOCK_DTYPES
from llamac.export.flat.packing import checked_rows, regroup_into
from llamac.export.flat.pipeline import Job, in_order
from llamac.export.flat.plan import Plan, Slot
from llamac.export.flat.stream import BLOCK_BYTES, clear, resize, tensor_record, write_tables
from llamac.format.flatfile import RECORD_BYTES, UNHASHED
from llamac.format.strips import STRIP_ROWS
from llamac.progress import Progress

# A multiple of the page cache's largest pieces. A strip that two blocks share is regrouped twice.
JOB_BYTES = 2 * BLOCK_BYTES

_buffers = threading.local()  # each thread reuses one: new memory would cost as much as regrouping


def can_write(plan: Plan) -> bool:
    """Whether every matrix of a plan only needs regrouping."""
    return all(slot.dtype in BLOCK_DTYPES for slot in plan.slots if slot.is_matrix)


def write_unhashed(file: BinaryIO, plan: Plan, progress: Progress, threads: int) -> None:
    """Write a whole flat file. Complete tensors that `file` already contains are not written again.

    Args:
        file: The open file.
        plan: The layout, for which `can_write` is true.
        progress: Called with the phase "writing" and byte counts.
        threads: The number of threads.
    """
    offsets = plan.offsets()
    start, slots = offsets["data"], plan.slots
    records = [tensor_record(slot, start, UNHASHED) for slot in slots]
    is_new = resize(file, plan.file_bytes)
    progress("writing", 0, plan.data_bytes)
    file.seek(offsets["tensors"])
    present = file.read(len(slots) * RECORD_BYTES["tensor"])
    done = next((i for i, record in enumerate(records) if not present.startswith(record, i * len(record))), len(slots))
    if not done and not is_new:
        clear(file, plan.file_bytes)
    first = start + (slots[done - 1].end if done else 0)
    for end in in_order(_jobs(file.fileno(), plan, start, first), threads):
        complete = bisect.bisect_right(slots, end - start, key=lambda slot: slot.end)
        file.seek(offsets["tensors"] + done * RECORD_BYTES["tensor"])
        file.write(b"".join(records[done:complete]))
        file.flush()
        done = complete
        progress("writing", end - start, plan.data_bytes)
    write_tables(file, plan, [UNHASHED] * len(slots))
    file.flush()


def _jobs(descriptor: int, plan: Plan, start: int, first: int) -> Iterator[Job[int]]:
    """Jobs that write the data section from offset `first` on. Each returns the offset at which it ends."""
    while first < plan.file_bytes:
        last = min((first // JOB_BYTES + 1) * JOB_BYTES, plan.file_bytes)
        yield Job(functools.partial(_write_block, descriptor, plan, start, first, last), last - first)
        first = last


def _write_block(descriptor: int, plan: Plan, start: int, first: int, last: int) -> int:
    """Write the bytes [first, last) of the file, which are data of tensors and zeros between them."""
    if not hasattr(_buffers, "block"):
        _buffers.block = np.empty(JOB_BYTES, np.uint8)
    block = _buffers.block[: last - first]
    end = 0
    for slot in plan.slots[bisect.bisect_right(plan.slots, first - start, key=lambda slot: slot.end) :]:
        offset = start + slot.offset
        if offset >= last:
            break
        begin = max(offset, first) - first
        block[end:begin] = 0
        end = min(offset + slot.bytes, last) - first
        _fill(block[begin:end], slot, first + begin - offset)
    block[end:] = 0
    view = memoryview(block)
    while view:
        count = os.pwrite(descriptor, view, last - len(view))
        view = view[count:]
    return last


def _fill(out: NDArray[np.uint8], slot: Slot, first: int) -> None:
    """Write a tensor's bytes from `first` on to `out`."""
    last, rows = first + len(out), slot.tensor.shape[0]
    if not slot.is_matrix:
        floats = np.ascontiguousarray(checked_rows(slot.name, slot.tensor, slot.dtype, 0, rows), np.float32)
        out[:] = floats.view(np.uint8)[first:last]
        return
    strip_bytes = slot.bytes // -(-rows // STRIP_ROWS)
    begin, end = first // strip_bytes, -(-last // strip_bytes)
    is_whole = (begin * strip_bytes, end * strip_bytes) == (first, last)
    strips = out if is_whole else np.empty((end - begin) * strip_bytes, np.uint8)
    regroup_into(strips, slot.name, slot.tensor, begin * STRIP_ROWS, min(end * STRIP_ROWS, rows))
    if not is_whole:
        out[:] = strips[first - begin * strip_bytes : last - begin * strip_bytes]
