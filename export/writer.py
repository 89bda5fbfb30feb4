"""Writes the flat file: plans every byte's place, then streams the tensors into a temporary file, then renames it.

Nothing is written before the plan stands: all tensors that are missing, surplus or of another shape are told at once,
and the disk's free space is known to suffice. The target appears whole or not at all. A tensor's record follows its
data, so that a file that was broken off tells how far it came, and the next one can go on from there.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from llamac import _core
from llamac.errors import ArgumentError, ExportError
from llamac.export.checkpoint import Checkpoint, LazyTensor, ModelConfig, ahead
from llamac.export.quantize import DTYPES, Lesson, Quantizer, choose_dtypes
from llamac.flatfile import ALIGNMENT, MAGIC, NUMERICS, RECORD_BYTES, SECTIONS, VERSION, pack_record, unpack_record
from llamac.progress import Progress, silent
from llamac.strips import QUANTIZED, STRIP_ROWS
from llamac.tokenizer import SpecialTokens

Numbers = NDArray[np.float32] | NDArray[np.float16] | NDArray[np.uint16]

# The smallest numbers that are rounded to infinity.
F16_OVERFLOW = 65520.0
BF16_OVERFLOW = float.fromhex("0x1.ffp127")
QUANTIZED_OVERFLOW = 2.0**120
COPY_BYTES = 1 << 24
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # what a system says where a file cannot grow
# A system keeps what is written in pieces as large as the writes, and maps pieces of 2 MiB at once: weights of a file
# that was just written are read a tenth faster then (bench/LOG.md).
BLOCK_BYTES = 1 << 21


@dataclass(frozen=True)
class Slot:
    """One tensor's place in the file; offset counts from the start of the data section."""

    name: str
    tensor: LazyTensor
    dtype: str
    offset: int
    bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.bytes

    @property
    def is_matrix(self) -> bool:
        return len(self.tensor.shape) == 2


@dataclass(frozen=True)
class Plan:
    """A whole file before it is written.

    sections: the bytes of all sections but tensors and data. data_bytes: of the data section."""

    slots: tuple[Slot, ...]
    sections: dict[str, bytes]
    data_bytes: int

    def offsets(self) -> dict[str, int]:
        """Where each section starts, and under "" where the file ends."""
        sizes = {name: len(data) for name, data in self.sections.items()}
        sizes["tensors"] = RECORD_BYTES["tensor"] * len(self.slots)
        sizes["data"] = self.data_bytes
        places, end = {}, RECORD_BYTES["header"] + RECORD_BYTES["section"] * len(SECTIONS)
        for name in SECTIONS:
            places[name] = aligned(end)
            end = places[name] + sizes[name]
        return {**places, "": end}

    @property
    def file_bytes(self) -> int:
        return self.offsets()[""]

    @property
    def bits_per_weight(self) -> float:
        """Bits of the data section per number of the model."""
        numbers = sum(int(np.prod(slot.tensor.shape)) for slot in self.slots)
        return 8 * self.data_bytes / numbers


def aligned(offset: int) -> int:
    """The next multiple of the file's alignment."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


# ---- the plan


def make_plan(
    checkpoint: Checkpoint, dtype: str, texts: dict[str, bytes], dtypes: Mapping[str, str] | None = None
) -> Plan:
    """Places all tensors of a checkpoint. texts: the sections metadata, tokenizer, spm, template and probes.

    dtype: of the matrices; vectors are f32. dtypes: of every tensor (default: `choose_dtypes`). Raises ExportError with
    every tensor that is missing, surplus or misshaped.
    """
    if dtype not in DTYPES:
        raise ArgumentError(f"dtype is {dtype!r}, expected one of {', '.join(DTYPES)}")
    config, layers = config_records(checkpoint)
    tensors = matching_tensors(checkpoint)
    dtypes = dtypes or choose_dtypes(tensors, dtype)
    slots, offset = [], 0
    for name, tensor in tensors.items():
        size = (
            _core.matrix_bytes(DTYPES[dtypes[name]], *tensor.shape) if len(tensor.shape) == 2 else 4 * tensor.shape[0]
        )
        slots.append(Slot(name, tensor, dtypes[name], offset := aligned(offset), size))
        offset += size
    return Plan(tuple(slots), {"config": config, "layers": layers, **texts}, offset)


def config_records(checkpoint: Checkpoint) -> tuple[bytes, bytes]:
    """(the config record, the layer records) of a checkpoint. Raises ExportError for a number out of range."""
    config = checkpoint.config
    special = checkpoint.tokenizer[1] if checkpoint.tokenizer else None
    stop_ids = sorted({*checkpoint.stop_ids, *(special.stop_ids if special else ())})
    _check_special_ids(special, stop_ids, config.vocab_size)
    values = {name: getattr(config, name) for name in ModelConfig.__dataclass_fields__ if name != "layers"}
    values |= {
        "n_layers": len(config.layers),
        "tied_output": int(config.tied_output),
        "n_rope": len(config.rope_dim),
        "bos_id": special.bos_id if special and special.bos_id is not None else -1,
        "eos_id": special.eos_id if special and special.eos_id is not None else -1,
        "add_bos": int(special.add_bos) if special else 0,
        "add_eos": int(special.add_eos) if special else 0,
        "n_stop_ids": len(stop_ids),
        "stop_ids": stop_ids,
    }
    try:
        return pack_record("config", values), b"".join(pack_record("layer", vars(layer)) for layer in config.layers)
    except ArgumentError as error:
        raise ExportError(f"the model does not fit into a flat file: {error}") from None


def _check_special_ids(special: SpecialTokens | None, stop_ids: list[int], vocab_size: int) -> None:
    """ExportError with every id that the model has no logit for."""
    named = [("bos_id", special.bos_id), ("eos_id", special.eos_id)] if special else []
    named += [("a stop id", token) for token in stop_ids]
    beyond = [f"{name} is {token}" for name, token in named if token is not None and token >= vocab_size]
    if beyond:
        raise ExportError(
            f"special tokens lie beyond the model's vocabulary of {vocab_size} ids: {', '.join(beyond)}; mend them in"
            " the tokenizer's files, config.json or generation_config.json (bos_token_id, eos_token_id)"
        )


def matching_tensors(checkpoint: Checkpoint) -> dict[str, LazyTensor]:
    """The tensors in the file's order. Raises ExportError with every one that is missing, surplus or misshaped."""
    expected = _core.slots(*config_records(checkpoint))
    problems, known = [], set()
    for name, required, is_matrix, rows, columns in expected:
        known.add(name)
        shape = (rows, columns) if is_matrix else (columns,)
        tensor = checkpoint.tensors.get(name)
        if tensor is None:
            if required:
                problems.append(f"missing: {name} {shape}")
        elif tensor.shape != shape:
            problems.append(f"misshaped: {name} is {tensor.shape}, the config needs {shape}")
    surplus = sorted(set(checkpoint.tensors) - known)
    problems += [f"surplus: {name} {checkpoint.tensors[name].shape}" for name in surplus]
    if problems:
        raise ExportError("the checkpoint's tensors do not fit its config:\n  " + "\n  ".join(problems))
    return {name: checkpoint.tensors[name] for name, *_ in expected if name in checkpoint.tensors}


# ---- strips


def pack_strips(rows: NDArray[np.float32], dtype: str) -> bytes:
    """Rows of a matrix (n, columns) as strips of 16 rows (docs/format.md), filled up with zeros."""
    n, columns = rows.shape
    strips = -(-n // STRIP_ROWS)
    numbers = to_dtype(rows, dtype)  # first, because the narrower numbers are transposed faster
    padded_columns = columns if dtype == "f32" else columns + columns % 2
    padded = np.zeros((strips * STRIP_ROWS, padded_columns), numbers.dtype)
    padded[:n, :columns] = numbers
    return np.ascontiguousarray(padded.reshape(strips, STRIP_ROWS, padded_columns).transpose(0, 2, 1)).tobytes()


def to_dtype(numbers: NDArray[np.float32], dtype: str) -> Numbers:
    """Numbers rounded to nearest even; bf16 as its 16 bits."""
    if dtype == "f32":
        return numbers
    if dtype == "f16":
        with np.errstate(over="ignore"):  # told by the caller, with the tensor's name
            return numbers.astype(np.float16)
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def checked_chunks(name: str, tensor: LazyTensor, dtype: str) -> Iterator[NDArray[np.float32]]:
    """A tensor some rows at a time. Raises ExportError for a number that is not finite or does not fit `dtype`."""
    limits = {"f16": F16_OVERFLOW, "bf16": BF16_OVERFLOW} | dict.fromkeys(QUANTIZED, QUANTIZED_OVERFLOW)
    largest = limits.get(dtype, np.inf)
    for _, rows in tensor.chunks(STRIP_ROWS):
        peak = max(float(rows.max(initial=0.0)), -float(rows.min(initial=0.0)))
        if not np.isfinite(peak):
            raise ExportError(f"tensor {name} holds numbers that are not finite")
        if peak >= largest:
            wider = "f32" if peak >= BF16_OVERFLOW else "f32 or bf16"
            raise ExportError(f"tensor {name} holds {peak:g}, which does not fit {dtype}: use --dtype {wider}")
        yield rows


def _rows_of(slots: Iterable[Slot]) -> Iterator[tuple[Slot, NDArray[np.float32]]]:
    """The tensors' numbers, some rows at a time."""
    for slot in slots:
        for rows in checked_chunks(slot.name, slot.tensor, slot.dtype):
            yield slot, rows


def _as_stored(slot: Slot, rows: NDArray[np.float32], quantizer: Quantizer, lesson: Lesson | None) -> bytes:
    """Rows of the slot as they lie in the file."""
    if not slot.is_matrix:
        return np.ascontiguousarray(rows, np.float32).tobytes()
    return quantizer.pack(rows, slot.dtype, lesson) if slot.dtype in QUANTIZED else pack_strips(rows, slot.dtype)


# ---- the file


def refuse_special(target: Path) -> None:
    """ExportError if the target is a device, a pipe or the like, which a file would take the place of."""
    if target.exists() and not target.is_file():
        raise ExportError(f"{target} is not a regular file, and nothing else is ever replaced: choose another name")


@contextlib.contextmanager
def temporary_beside(target: Path, partial: Path | None = None) -> Iterator[BinaryIO]:
    """A new file in the target's folder; it becomes the target when the block ends well, else it vanishes.

    A target that is a symbolic link stays one: the file it leads to is replaced. Permissions stay what they were.
    partial: the file's name until then, in the same folder. It is opened as it is if it is there already, and stays
    where the block is broken off from outside, by Ctrl-C or with the process."""
    target = Path(os.path.realpath(target))
    temporary = partial or target.parent / _temporary_name(target)
    try:
        with _errors_name(target):
            opened = open(temporary, "r+b" if partial and partial.exists() else "x+b")  # noqa: SIM115  closed below
        with opened as file:
            with contextlib.suppress(FileNotFoundError):
                os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
            with _errors_name(target, *NO_ROOM):
                yield file
                file.flush()
                os.fsync(file.fileno())
        with _errors_name(target):
            os.replace(temporary, target)
    except BaseException as error:
        if partial is None or isinstance(error, Exception):
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise


@contextlib.contextmanager
def temporary_folder(target: Path) -> Iterator[Path]:
    """A new folder; the files written to it are the target's when the block ends well, else they vanish.

    The target must not exist, or be an empty folder. Such a folder stays, and the files move into it one by one: it may
    be where a disk is mounted, or where a shell is."""
    target = Path(os.path.realpath(target))
    is_there = target.is_dir()
    folder = (target if is_there else target.parent) / _temporary_name(target)
    moved: list[Path] = []
    try:
        with _errors_name(target):
            folder.mkdir()
        with _errors_name(target, *NO_ROOM):
            yield folder
        with _errors_name(target):
            if not is_there:
                os.replace(folder, target)
                return
            for path in sorted(folder.iterdir()):
                moved.append(target / path.name)
                os.rename(path, moved[-1])
            folder.rmdir()
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        for path in moved:
            path.unlink(missing_ok=True)
        raise


def _temporary_name(target: Path) -> str:
    return f".{target.name}.{secrets.token_hex(4)}.partial"


@contextlib.contextmanager
def _errors_name(target: Path, *kinds: int) -> Iterator[None]:
    """Errors of the system, all or those of some kinds, speak of the target: nobody knows the temporary file's name."""
    try:
        yield
    except OSError as error:
        if kinds and error.errno not in kinds:
            raise
        raise OSError(error.errno, error.strerror, str(target)) from None


class NoRoomError(ExportError):
    """The disk has no room for what is to be written."""


def check_space(target: Path, needed: int, partial: Path | None = None) -> None:
    """NoRoomError if the target's disk has less room than `needed` bytes, of which `partial` may hold some already."""
    place = Path(os.path.realpath(target))
    folder = place if place.is_dir() else place.parent
    free = shutil.disk_usage(folder).free
    if partial is not None and partial.exists():
        free += 512 * partial.stat().st_blocks
    if free < needed:
        raise NoRoomError(f"the disk of {folder} has {free / 1e6:.1f} MB free, the export needs {needed / 1e6:.1f} MB")


class DataStream:
    """Writes a file's data from front to back, in whole blocks of 2 MiB that lie at multiples of their size."""

    def __init__(self, file: BinaryIO, offset: int) -> None:
        self._file = file
        self._pending = bytearray()
        self.offset = offset  # of the file, where the next byte goes

    def skip_to(self, offset: int) -> None:
        """Fills with zeros."""
        self.write(bytes(offset - self.offset))

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        while view:
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


def write(
    file: BinaryIO,
    plan: Plan,
    progress: Progress = silent,
    *,
    threads: int = 1,
    teach: Callable[[Slot], Lesson | None] = lambda slot: None,
) -> list[bytes]:
    """Writes the whole file and returns the tensors' hashes. Tensors go from source to file some rows at a time.

    threads: that quantize. teach: what calibration knows of a slot's inputs.
    """
    with Quantizer(threads) as quantizer:
        return _write(file, plan, progress, quantizer, teach)


def _write(
    file: BinaryIO, plan: Plan, progress: Progress, quantizer: Quantizer, teach: Callable[[Slot], Lesson | None]
) -> list[bytes]:
    places = plan.offsets()
    start = places["data"]
    file.truncate(plan.file_bytes)
    progress("writing", 0, plan.data_bytes)
    hashes = _hashes_there(file, plan, progress)
    if not hashes:  # whatever is there is of no use, and between the sections there are zeros
        file.truncate(0)
        file.truncate(plan.file_bytes)
    stream = DataStream(file, start + (plan.slots[len(hashes) - 1].end if hashes else 0))
    todo = plan.slots[len(hashes) :]
    for _, group in itertools.groupby(ahead(_rows_of(todo)), key=lambda item: item[0].offset):
        slot, first = next(group)
        lesson = teach(slot)
        digest = hashlib.sha256()
        stream.skip_to(start + slot.offset)
        written = 0
        for rows in itertools.chain([first], (more for _, more in group)):
            data = _as_stored(slot, rows, quantizer, lesson)
            digest.update(data)
            stream.write(data)
            written += len(data)
            progress("writing", slot.offset + written, plan.data_bytes)
        if written != slot.bytes:
            raise ExportError(f"tensor {slot.name} gave {written} bytes, expected {slot.bytes}")
        file.seek(places["tensors"] + RECORD_BYTES["tensor"] * len(hashes))
        file.write(_tensor_record(slot, start, digest.digest()))
        hashes.append(digest.digest())
    stream.flush()
    write_tables(file, plan, hashes)
    return hashes


def _hashes_there(file: BinaryIO, plan: Plan, progress: Progress) -> list[bytes]:
    """The hashes of the first tensors, as far as the file holds them already: with their records, and true to these."""
    places = plan.offsets()
    hashes: list[bytes] = []
    for slot in plan.slots:
        file.seek(places["tensors"] + RECORD_BYTES["tensor"] * len(hashes))
        record = file.read(RECORD_BYTES["tensor"])
        digest = unpack_record("tensor", record)["sha256"]
        if record != _tensor_record(slot, places["data"], digest):
            break
        file.seek(places["data"] + slot.offset)
        if digest != _hash_of(file, slot.bytes):
            break
        hashes.append(digest)
        progress("writing", slot.end, plan.data_bytes)
    return hashes


def _hash_of(file: BinaryIO, count: int) -> bytes:
    """The SHA-256 of the next so many bytes of a file."""
    digest = hashlib.sha256()
    while count and (data := file.read(min(count, COPY_BYTES))):
        digest.update(data)
        count -= len(data)
    return digest.digest()


def write_tables(file: BinaryIO, plan: Plan, tensor_hashes: list[bytes]) -> None:
    """Writes everything but the data: sections, section table, header, with their hashes."""
    places = plan.offsets()
    sections = dict(plan.sections)
    sections["tensors"] = b"".join(
        _tensor_record(slot, places["data"], digest) for slot, digest in zip(plan.slots, tensor_hashes, strict=True)
    )
    digests = {name: hashlib.sha256(data).digest() for name, data in sections.items()}
    digests["data"] = hashlib.sha256(b"".join(tensor_hashes)).digest()
    sizes = {name: len(data) for name, data in sections.items()} | {"data": plan.data_bytes}
    table = b"".join(
        pack_record("section", {"name": name, "offset": places[name], "bytes": sizes[name], "sha256": digests[name]})
        for name in SECTIONS
    )
    values = {
        "magic": MAGIC,
        "version": VERSION,
        "numerics": NUMERICS,
        "file_bytes": plan.file_bytes,
        "alignment": ALIGNMENT,
        "n_sections": len(SECTIONS),
        "id": hashlib.sha256(b"".join(digests[name] for name in SECTIONS)).digest(),
    }
    values["sha256"] = hashlib.sha256(pack_record("header", values) + table).digest()
    file.seek(0)
    file.write(pack_record("header", values) + table)
    for name, data in sections.items():
        file.seek(places[name])
        file.write(data)


def _tensor_record(slot: Slot, data_offset: int, digest: bytes) -> bytes:
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
