"""`export`: from any source to a flat file (or back to another project's format), in one call.

source -> checkpoint (canonical, lazy) -> tokenizer -> probes -> plan -> temporary file -> engine's probes -> rename
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llamac.arguments import Adapter, adapters, file_path, whole_number, wrong_type
from llamac.errors import ArgumentError, ArgumentTypeError, ExportError, LlamacError, TokenizerError, UnsupportedError
from llamac.export.calibrate import TEXT_CHARACTERS, calibrate, disk_bytes, float_model, sequences_of
from llamac.export.checkpoint import Checkpoint
from llamac.export.lfs import HEAD_BYTES, refuse_pointer
from llamac.export.quantize import FOUR_BITS, Lesson, choose_dtypes, nearest_dtypes, widen_coarse
from llamac.export.vocabulary.load import Room, Vocabulary, find_tokenizer, load_vocabulary
from llamac.export.writer import (
    Plan,
    Slot,
    check_space,
    make_plan,
    matching_tensors,
    refuse_special,
    temporary_beside,
    write,
    write_tables,
)
from llamac.flatfile import MAGIC, NUMERICS
from llamac.machine import plan_threads
from llamac.progress import Progress, silent
from llamac.sources import HF_ENDINGS, find
from llamac.strips import QUANTIZED
from llamac.tokenizer import SpecialTokens, Tokenizer

if TYPE_CHECKING:
    from llamac.export import probes

TARGETS = ("llamac", "hf", "llama2c", "gguf")
GGUF = b"GGUF"
GGUF_DTYPES = ("q8_0", "q4_0")
SOURCES = "a Hugging Face directory, a GGUF file, a llama2.c model file or a flat file"


@dataclass
class Report:
    """What an export did.

    path: what was written. bytes: of all its files. bits_per_weight: of a flat file's data, else 0. layers, dim,
    parameters: the model's size; parameters are the numbers in all tensors. source: as in the flat file's metadata.
    tokenizer: the name of the file or directory it came from, or "none". warnings: what the user should know.
    """

    path: Path
    bytes: int
    dtype: str
    bits_per_weight: float
    layers: int
    dim: int
    parameters: int
    source: dict[str, Any]
    tokenizer: str
    warnings: list[str] = field(default_factory=list)


def export(
    source: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    tokenizer: str | Path | Literal[False] | None = None,
    name: str | None = None,
    to: str = "llamac",
    pure: bool = False,
    dtype_map: Iterable[tuple[str, str]] = (),
    calibrate: str | Path | None = None,
    lora: Adapter | Iterable[Adapter] = (),
    threads: int | None = None,
    probe_source: str | None = "auto",
    overwrite: bool = False,
    partial: Path | None = None,
    progress: Progress | None = None,
) -> Report:
    """Converts a checkpoint.

    source: a Hugging Face directory, a GGUF file (any part of a split one), a llama2.c model file, a flat file, a
    built-in model's name, or hf:org/name of one on the Hugging Face Hub. dtype: of the matrices, "f32", "f16", "bf16",
    "q8", "q4" or "q4s" (default: the source's own, f32 if it is quantized); "auto", the default for GGUF files, takes
    for each matrix what is nearest to how the source stores it. With q4 and q4s the output head and attn_v are q8,
    unless `pure`; dtype_map overrides both: (pattern, dtype) pairs, the first whose pattern fits a matrix's name
    decides (* stands for any text). calibrate: for q4 and q4s, a text file, or "self" for a text that the model writes:
    the inputs it sees there decide which errors matter and where they are made up for. It takes a temporary copy of the
    weights beside `out`, and more time and memory (docs/quantization.md). lora: adapters (PEFT directories, or pairs of
    one and its strength, which multiplies what it adds) that are merged into the weights.
    threads: that quantize (default: as many as a model would use); they do not change a byte. tokenizer: a file or
    directory to use instead of the source's, or False for none. name: stored in the flat file (default: the source's).
    to: "llamac" writes a flat file, "hf" a Hugging Face directory, "llama2c" a llama2.c model (always f32) with
    tokenizer.bin beside it, "gguf" a GGUF file for llama.cpp, whose matrices may also be "q8_0" and "q4_0" (the output
    matrix then stays q8_0). probe_source: who computes the flat file's reference logits, "llamac" (what "auto" means)
    or "transformers"; None leaves the probes out. overwrite: replace an existing file `out` (of a symbolic link: its
    target), and with "llama2c" another tokenizer.bin beside it; only regular files are ever replaced. partial: what an
    unfinished flat file is called, in the folder of `out`: it stays where an export is broken off by Ctrl-C or with its
    process, and the next one goes on from there. The name must stand for this source and these arguments, and no two
    exports may use it at once. progress: called
    with (phase, done, all there is to do in this phase): "verifying" (bytes of a flat file that is read), "looking at
    scales" (rows of matrices that may be too coarse for 4 bits), "reference logits" (steps of the probes), "writing a
    text" (tokens), "calibrating" (pieces of a text), "writing" (bytes), "engine's logits" (steps of the probes, on the
    written file).

    Raises ArgumentError for an argument that would have no effect with this `to`, and ExportError or UnsupportedError
    with everything that stands against the export, before anything is written.
    """
    given, out = file_path(source, "source"), file_path(out, "out")
    progress = progress or silent
    dtype_map = _pairs(dtype_map)
    _check_arguments(to, dtype, name, probe_source, overwrite)
    if to != "llamac" and (pure or dtype_map or calibrate or threads is not None or dtype in QUANTIZED):
        raise ArgumentError(
            f"quantized dtypes, pure, dtype_map, calibrate and threads are for flat files only, not with to={to!r}"
        )
    if threads is not None and whole_number(threads, "threads") < 1:
        raise ArgumentError(f"threads is {threads}, expected at least 1")
    _check_target(out, to, overwrite)
    try:
        source, own_name = find(given, progress)
    except FileNotFoundError as error:
        raise ExportError(f"{error.filename}: {error.strerror}") from None
    warnings: list[str] = []
    checkpoint = _with_adapters(read_checkpoint(source, warnings, progress), lora, probe_source)
    checkpoint.tensors = {name: tensor.finite(name) for name, tensor in checkpoint.tensors.items()}
    attach_tokenizer(checkpoint, source, tokenizer, warnings)
    if name or own_name:
        checkpoint.metadata["name"] = name or own_name
    if dtype is None and to == "llamac" and checkpoint.metadata["source"].get("format") == "gguf":
        dtype = "auto"
    if dtype == "auto":
        dtype, others = nearest_dtypes(checkpoint.tensors)
        dtype_map += others
    dtype = dtype or ("f32" if to == "llama2c" else _own_dtype(checkpoint))
    _warn_of_quantized(checkpoint, dtype, warnings)
    if to == "hf":
        from llamac.export.hf.write import write_hf

        size = write_hf(checkpoint, out, dtype, progress)
        bits = 0.0
    elif to == "gguf":
        from llamac.export.gguf.write import write_gguf

        size = write_gguf(checkpoint, out, dtype, warnings, progress)
        bits = 0.0
    elif to == "llama2c":
        from llamac.export.llama2c.write import write_llama2c

        size = write_llama2c(checkpoint, out, warnings, progress, overwrite=overwrite)
        bits = 0.0
    else:
        probe_source = "llamac" if probe_source == "auto" else probe_source
        text = _calibration_text(calibrate)
        matrices = Matrices(dtype, pure, tuple(dtype_map), text, threads or plan_threads().threads)
        plan = _write_flat(checkpoint, source, out, partial, matrices, probe_source, progress, warnings)
        size, bits = plan.file_bytes, plan.bits_per_weight
    return Report(
        path=out,
        bytes=size,
        dtype=dtype,
        bits_per_weight=bits,
        layers=len(checkpoint.config.layers),
        dim=checkpoint.config.dim,
        parameters=sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values()),
        source=checkpoint.metadata["source"],
        tokenizer=_tokenizer_name(checkpoint),
        warnings=warnings,
    )


@dataclass(frozen=True)
class Matrices:
    """How matrices are written: `export`'s arguments of the same names."""

    dtype: str
    pure: bool
    dtype_map: tuple[tuple[str, str], ...]
    calibrate: str | None  # the text, "" for the model's own
    threads: int


def _calibration_text(calibrate: str | Path | None) -> str | None:
    if calibrate is None or calibrate == "self":
        return None if calibrate is None else ""
    try:
        with open(file_path(calibrate, "calibrate"), encoding="utf-8") as file:
            text = file.read(TEXT_CHARACTERS)
    except (OSError, UnicodeDecodeError) as error:
        raise ExportError(f"the calibration text {calibrate} cannot be read: {error}") from None
    if not text:
        raise ExportError(f"the calibration text {calibrate} is empty")
    return text


def _pairs(dtype_map: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """ArgumentTypeError for anything but pairs of texts."""
    pairs = list(dtype_map) if isinstance(dtype_map, Iterable) and not isinstance(dtype_map, str) else [None]
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            raise ArgumentTypeError(f"dtype_map is {dtype_map!r}, expected pairs (pattern of names, dtype)")
    return pairs


def _check_arguments(to: str, dtype: str | None, name: str | None, probe_source: str | None, overwrite: bool) -> None:
    """ArgumentError for a target that there is not, or an argument that has no effect with this one."""
    for label, value in (("to", to), ("dtype", dtype), ("name", name), ("probe_source", probe_source)):
        if not isinstance(value, str | None):
            raise wrong_type(label, value, "a text")
    if to not in TARGETS:
        raise ArgumentError(f"to is {to!r}, expected one of {', '.join(TARGETS)}")
    if to not in ("llamac", "gguf") and name is not None:
        raise ArgumentError(f"name is stored in flat files and GGUF files only, not with to={to!r}")
    if to != "gguf" and dtype in GGUF_DTYPES:
        raise ArgumentError(f"dtype {dtype!r} is for to='gguf' only")
    if to != "llamac" and probe_source != "auto":
        raise ArgumentError(f"probe_source is for flat files only: to={to!r} writes no probes")
    if to != "llamac" and dtype == "auto":
        raise ArgumentError(f"dtype 'auto' is for flat files only, not with to={to!r}")
    if to == "hf" and overwrite:
        raise ArgumentError("overwrite (--force) replaces files only: to='hf' needs a directory that is new or empty")
    if to == "llama2c" and dtype not in (None, "f32"):
        raise ArgumentError(f"dtype is {dtype!r}, but llama2.c's checkpoint of version 0 is always f32")


def _check_target(out: Path, to: str, overwrite: bool) -> None:
    if not out.parent.is_dir():
        raise ExportError(f"the folder {out.parent} does not exist")
    if out.is_symlink() and not (real := Path(os.path.realpath(out))).parent.is_dir():
        raise ExportError(f"{out} is a link to {real}, but the folder {real.parent} does not exist")
    if to == "hf":
        if out.exists() and (not out.is_dir() or any(out.iterdir())):  # a directory is never replaced: it may hold more
            raise ExportError(f"{out} exists and is no empty directory: choose another name")
        return
    if out.is_dir():
        raise ExportError(f"{out} is a directory: the target is a file")
    refuse_special(out)
    if out.exists() and not overwrite:
        raise ExportError(f"{out} exists: choose another name, or allow it to be overwritten (--force)")


def read_checkpoint(source: Path, warnings: list[str], progress: Progress = silent) -> Checkpoint:
    """The checkpoint of any source, told by its content. Raises ExportError for what it cannot be."""
    if source.is_dir():
        from llamac.export.hf.model import read as read_hf

        return read_hf(source, warnings)
    head = _head(source)
    if head.startswith(MAGIC):
        from llamac.export.flat import read as read_flat

        return read_flat(source, progress)
    refuse_pointer(source, head)
    if head.startswith(GGUF):
        from llamac.export.gguf.model import read as read_gguf

        return read_gguf(source, warnings)
    from llamac.export.llama2c.header import looks_like_llama2c
    from llamac.export.llama2c.model import read as read_llama2c

    if not looks_like_llama2c(source) and head[:4] != b"24ka":
        if source.name.endswith(HF_ENDINGS) or head[:4] == b"PK\x03\x04" or head[:1] == b"\x80":
            raise ExportError(_advice(source))
        raise ExportError(f"{source} is no checkpoint this version knows: expected {SOURCES}")
    return read_llama2c(source)


def _with_adapters(
    checkpoint: Checkpoint, lora: Adapter | Iterable[Adapter], probe_source: str | None
) -> Checkpoint:
    found = adapters(lora)
    if not found:
        return checkpoint
    if probe_source == "transformers":
        raise ArgumentError("probe_source='transformers' computes what the source's directory holds, without adapters")
    from llamac.export.lora import merge, read_adapter

    architecture, config = checkpoint.metadata.get("architecture"), checkpoint.config
    return merge(checkpoint, [(read_adapter(folder, architecture, config), strength) for folder, strength in found])


def _advice(source: Path) -> str:
    """What to do with a file that makes a checkpoint together with others only."""
    if (source.parent / "config.json").is_file():
        return f"{source} is one of several files of a Hugging Face directory: give the directory, {source.parent}"
    return (
        f"{source} holds weights only: give a Hugging Face directory, in which config.json lies beside them"
        " (and the tokenizer's files)"
    )


def _named(place: Path) -> str:
    """The name of a file or directory, also of "." and ".."."""
    return os.path.basename(os.path.abspath(place))


def _head(source: Path) -> bytes:
    with open(source, "rb") as file:
        return file.read(HEAD_BYTES)


def _own_dtype(checkpoint: Checkpoint) -> str:
    """The dtype that stores every matrix of the source exactly, or f32 if none does."""
    kinds = {tensor.dtype for tensor in checkpoint.tensors.values() if len(tensor.shape) == 2}
    return kinds.pop() if len(kinds) == 1 and kinds <= {"f32", "f16", "bf16"} else "f32"


def _warn_of_quantized(checkpoint: Checkpoint, dtype: str, warnings: list[str]) -> None:
    """A flat file with quantized weights may be a source of anything, but what was lost stays lost."""
    kinds = {tensor.dtype for tensor in checkpoint.tensors.values()} & set(QUANTIZED)
    if kinds:
        again = "and are quantized once more" if dtype in QUANTIZED else "which a wider dtype does not undo"
        warnings.append(
            f"the source's weights are {', '.join(sorted(kinds))} already, {again}: better start from its source"
        )


# ---- tokenizer

IDS_ONLY = "without one it takes and gives token ids only (`export --tokenizer` adds one, `run -z` uses one)"


def attach_tokenizer(
    checkpoint: Checkpoint, source: Path, given: str | Path | Literal[False] | None, warnings: list[str]
) -> None:
    """Reads the tokenizer that is given, or the source's own; where there is none, there is a warning."""
    if given is False:
        checkpoint.tokenizer = None
        checkpoint.metadata.pop("tokenizer", None)
    elif given is not None:
        place = file_path(given, "tokenizer")
        try:
            checkpoint.tokenizer = load_vocabulary(place, Room(checkpoint.config.vocab_size, warnings))
        except FileNotFoundError:
            raise ExportError(f"the tokenizer {place} does not exist") from None
        checkpoint.metadata["tokenizer"] = {"source": _named(place)}
    elif source.is_dir():
        _attach_tokenizer_inside(checkpoint, source, warnings)
    elif _head(source).startswith(GGUF):
        _attach_tokenizer_of_gguf(checkpoint, source.with_name(checkpoint.metadata["source"]["files"][0]), warnings)
    elif not _head(source).startswith(MAGIC):
        _attach_tokenizer_beside(checkpoint, source, warnings)
    elif checkpoint.tokenizer is None:
        warnings.append(f"no tokenizer was found: {IDS_ONLY}")
    if checkpoint.tokenizer is not None:
        _fit_tokenizer(checkpoint)


def _attach_tokenizer_inside(checkpoint: Checkpoint, folder: Path, warnings: list[str]) -> None:
    if find_tokenizer(folder) is None:
        warnings.append(f"{folder} holds no tokenizer: {IDS_ONLY}")
        return
    _attach_tokenizer_in(checkpoint, folder, warnings)


def _attach_tokenizer_of_gguf(checkpoint: Checkpoint, path: Path, warnings: list[str]) -> None:
    from llamac.export.gguf.model import has_tokenizer

    if not has_tokenizer(path):
        warnings.append(f"{path} holds no tokenizer: {IDS_ONLY}")
        return
    _attach_tokenizer_in(checkpoint, path, warnings)


def _attach_tokenizer_in(checkpoint: Checkpoint, place: Path, warnings: list[str]) -> None:
    try:
        checkpoint.tokenizer = load_vocabulary(place, Room(checkpoint.config.vocab_size, warnings))
    except (TokenizerError, UnsupportedError) as error:
        raise type(error)(f"{error}; --no-tokenizer leaves it out, --tokenizer takes another one") from None
    checkpoint.metadata["tokenizer"] = {"source": _named(place)}


def _attach_tokenizer_beside(checkpoint: Checkpoint, source: Path, warnings: list[str]) -> None:
    """llama2c's models lie beside their tokenizer: one of the tok*.bin, which has as many ids as the model has."""
    size = checkpoint.config.vocab_size
    fitting: list[tuple[Path, Vocabulary]] = []
    others: list[str] = []
    for path in sorted(path for path in source.parent.glob("tok*.bin") if path.is_file() and path != source):
        try:
            vocabulary = load_vocabulary(path)
        except LlamacError:
            others.append(f"{path.name} is no tokenizer")
            continue
        n_ids = _count_ids(vocabulary, path.name)
        if n_ids == size:
            fitting.append((path, vocabulary))
        else:
            others.append(f"{path.name} has {n_ids} ids")
    if len({vocabulary for _, vocabulary in fitting}) > 1:
        names = ", ".join(path.name for path, _ in fitting)
        raise ExportError(f"several tokenizers that fit lie beside {source.name}: {names}; choose one with --tokenizer")
    if fitting:
        place, checkpoint.tokenizer = fitting[0]
        checkpoint.metadata["tokenizer"] = {"source": place.name}
    elif others:
        warnings.append(f"no tokenizer with the model's {size} ids lies beside it ({', '.join(others)}): {IDS_ONLY}")
    else:
        warnings.append(f"no tokenizer was found: {IDS_ONLY}")


def _tokenizer_name(checkpoint: Checkpoint) -> str:
    """What metadata say of the tokenizer's origin, if there is one."""
    if checkpoint.tokenizer is None:
        return "none"
    return str(checkpoint.metadata.get("tokenizer", {}).get("source", "unknown"))


def _count_ids(vocabulary: tuple[bytes, SpecialTokens, bytes | None], where: str) -> int:
    return Tokenizer(vocabulary[0], vocabulary[1], f"{where}: the tokenizer").n_ids


def _fit_tokenizer(checkpoint: Checkpoint) -> None:
    """Notes how many ids the tokenizer knows, and what else the source's kind says of special tokens."""
    assert checkpoint.tokenizer is not None
    data, special, spm = checkpoint.tokenizer
    n_ids = _count_ids(checkpoint.tokenizer, _tokenizer_name(checkpoint))
    if n_ids > checkpoint.config.vocab_size:
        raise ExportError(
            f"the tokenizer has {n_ids} ids, but the model's vocabulary has {checkpoint.config.vocab_size}:"
            " they do not belong together"
        )
    checkpoint.config = replace(checkpoint.config, n_token_ids=n_ids)
    if checkpoint.metadata["source"].get("format") == "llama2c":
        special = replace(special, add_bos=special.bos_id is not None, add_eos=False)
    stop_ids = tuple(sorted({*checkpoint.stop_ids, *special.stop_ids}))
    checkpoint.tokenizer = (data, replace(special, stop_ids=stop_ids), spm)


# ---- the flat file


def _write_flat(
    checkpoint: Checkpoint,
    source: Path,
    out: Path,
    partial: Path | None,
    matrices: Matrices,
    probe_source: str | None,
    progress: Progress,
    warnings: list[str],
) -> Plan:
    from llamac import __version__
    from llamac.export import probes
    from llamac.probes import encode

    metadata = {**checkpoint.metadata, "dtype": matrices.dtype, "exporter": f"llamac {__version__}"}
    tokenizer, _, spm = checkpoint.tokenizer or (b"", None, None)
    text = json.dumps(metadata, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    texts = {
        "metadata": text.encode(errors="replace"),  # names of files may hold what is no character
        "tokenizer": tokenizer,
        "spm": spm or b"",
        "template": checkpoint.chat_template.encode(),
        "probes": b"",
    }
    make_plan(checkpoint, matrices.dtype, texts)  # what does not fit is told before anything else costs time
    sequences = sequences_of(checkpoint, matrices.calibrate) if matrices.calibrate else None
    dtypes = _dtypes(checkpoint, matrices, progress, warnings)
    plan = make_plan(checkpoint, matrices.dtype, texts, dtypes)
    if not any(slot.dtype in FOUR_BITS for slot in plan.slots):
        matrices = replace(matrices, calibrate=None)  # all were too coarse for 4 bits: there is nothing left to learn
    _check_room(out, partial, checkpoint, plan, matrices)
    probe_set = None
    if probe_source is not None:
        folder = source if source.is_dir() else None
        probe_set = probes.make(checkpoint, NUMERICS, source=probe_source, folder=folder, progress=progress)
        plan = replace(plan, sections={**plan.sections, "probes": encode(probe_set)})
    _check_room(out, partial, checkpoint, plan, matrices)
    with temporary_beside(out, partial) as file, contextlib.ExitStack() as stack:
        teach = _teacher(checkpoint, matrices, sequences, Path(file.name).parent, progress, stack)
        hashes = write(file, plan, progress, threads=matrices.threads, teach=teach)
        stack.close()
        if probe_set is not None:
            # the engine's own logits need the finished file; their records have the same size as the empty ones
            file.flush()
            measured = probes.measure(Path(file.name), probe_set, kind=_kind(plan), progress=progress)
            plan = replace(plan, sections={**plan.sections, "probes": encode(measured)})
            write_tables(file, plan, hashes)
    return plan


def _dtypes(checkpoint: Checkpoint, matrices: Matrices, progress: Progress, warnings: list[str]) -> dict[str, str]:
    """Every tensor's dtype; a 4-bit matrix whose scales would be coarse is q8, unless dtype_map names it."""
    tensors = matching_tensors(checkpoint)
    chosen = choose_dtypes(tensors, matrices.dtype, pure=matrices.pure, dtype_map=matrices.dtype_map)
    if matrices.calibrate is not None and not any(dtype in FOUR_BITS for dtype in chosen.values()):
        raise ArgumentError(f"calibrate is for matrices in q4 and q4s; with dtype {matrices.dtype!r} there is none")

    def fixed(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern, _ in matrices.dtype_map)

    found, coarse = widen_coarse(tensors, chosen, fixed, progress, matrices.threads)
    warnings += coarse
    return found


def _check_room(out: Path, partial: Path | None, checkpoint: Checkpoint, plan: Plan, matrices: Matrices) -> None:
    """ExportError if the disk has no room for the file, and for what calibration keeps beside it meanwhile."""
    needed = plan.file_bytes
    if matrices.calibrate is not None:
        needed = disk_bytes(checkpoint, _own_dtype(checkpoint), needed)
    check_space(out, needed, partial)


def _teacher(
    checkpoint: Checkpoint,
    matrices: Matrices,
    sequences: list[list[int]] | None,
    folder: Path,
    progress: Progress,
    stack: contextlib.ExitStack,
) -> Callable[[Slot], Lesson | None]:
    """What calibration knows of the slots, where it was asked for; `stack` lets go of its temporary file."""
    if matrices.calibrate is None:
        return lambda slot: None
    with float_model(checkpoint, folder, _own_dtype(checkpoint), matrices.threads) as model:
        calibration = stack.enter_context(calibrate(checkpoint, model, sequences, folder, progress))

    def teach(slot: Slot) -> Lesson | None:
        return calibration.lesson(slot.name) if slot.dtype in FOUR_BITS else None

    return teach


def _kind(plan: Plan) -> probes.Kind:
    """What the probes may expect of a file: that it stores the source's weights exactly, rounded, or quantized."""
    slots = [slot for slot in plan.slots if slot.is_matrix]
    if any(slot.dtype in QUANTIZED for slot in slots):
        return "quantized"
    return "exact" if all(slot.tensor.dtype == slot.dtype for slot in slots) else "rounded"
