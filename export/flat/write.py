"""Exports a checkpoint to a flat file: chooses dtypes, calibrates, quantizes, and adds probes.

The order is chosen so that errors come early: the plan and the disk space first, then the slow steps. The engine's own
probe results need the finished weights, so they are filled in last, before the file gets its name.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO

from llamac import __version__
from llamac.errors import ArgumentError
from llamac.export import probes
from llamac.export.calibrate import calibrate, calibration_sequences, disk_bytes, float_model
from llamac.export.checkpoint import Checkpoint
from llamac.export.dtypes import FEW_BITS, choose_dtypes, name_patterns, widen_coarse
from llamac.export.flat import direct
from llamac.export.flat.plan import DEFAULT_SECTIONS, Plan, Slot, make_plan, matching_tensors
from llamac.export.flat.stream import write_file, write_tables
from llamac.export.quantize import CalibrationStats
from llamac.export.targets import atomic_file, check_space, scratch_folder
from llamac.format.flatfile import NUMERICS, UNHASHED
from llamac.format.probes import encode
from llamac.format.strips import FLOATS
from llamac.progress import Progress
from llamac.text.packed import pack
from llamac.text.special_tokens import AFTER_BOS


@dataclass(frozen=True)
class Quantization:
    """How the matrices are stored; the attributes are `llamac.export.export`'s arguments.

    Attributes:
        calibration_text: None for no calibration, "" for text that the model generates.
    """

    dtype: str
    pure: bool
    dtype_map: tuple[tuple[str, str], ...]
    calibration_text: str | None
    threads: int


def write_flat(
    checkpoint: Checkpoint,
    out: Path | None,
    quantization: Quantization,
    *,
    partial: Path | None,
    probe_source: str | None,
    folder: Path | None,
    warnings: list[str],
    progress: Progress,
    file: BinaryIO | None = None,
    sync: bool = True,
    hashed: bool = True,
) -> Plan:
    """Write a flat file.

    Args:
        checkpoint: The model.
        out: The file. None for a file in memory.
        quantization: How to quantize its matrices.
        partial: The name of the unfinished file, as in `llamac.export.export`.
        probe_source: "llamac", "transformers", or None for no probes.
        folder: The source, if it is a Hugging Face directory; transformers reads it.
        warnings: Gets messages for the user.
        progress: Called with (phase, done, total).
        file: Write to this open file instead. `out` then only names the disk whose free space is checked.
        sync: Whether to wait until the disk has the file.
        hashed: Whether to wait for the hashes of the tensors. Without them there are no probes. Tensors that do not
            only need regrouping are hashed in any case.

    Returns:
        The layout of the file.

    Raises:
        ExportError: If the model does not fit the format, or its probes or its calibration fail.
        DiskFullError: If the disk has too little space.
    """
    first = plan_flat(checkpoint, quantization)  # report what does not fit before anything slow
    sections = {name: first.sections[name] for name in DEFAULT_SECTIONS}
    chosen = {slot.name: slot.dtype for slot in first.slots}
    text = quantization.calibration_text
    sequences = calibration_sequences(checkpoint, text) if text else None
    dtypes = _widened(checkpoint, chosen, quantization, progress, warnings)
    plan = make_plan(checkpoint, quantization.dtype, sections, dtypes)
    if not any(slot.dtype in FEW_BITS for slot in plan.slots):
        quantization = replace(quantization, calibration_text=None)  # the scales of all matrices were too coarse
    _check_space(out, partial, checkpoint, plan, quantization)
    probe_set = None
    if probe_source is not None:
        probe_set = probes.make(checkpoint, NUMERICS, source=probe_source, folder=folder, progress=progress)
        plan = replace(plan, sections={**plan.sections, "probes": encode(probe_set)})
    _check_space(out, partial, checkpoint, plan, quantization)
    with _target(out, partial, file, sync) as target:
        if not hashed and probe_set is None and direct.can_write(plan):
            direct.write_unhashed(target, plan, progress, quantization.threads)
            return plan
        with contextlib.ExitStack() as stack:
            stats = _calibrated_stats(checkpoint, out, quantization, sequences, progress, stack)
            hashes = write_file(target, plan, progress, threads=quantization.threads, calibration=stats)
        if probe_set is not None:
            # the results need the finished file; their encoding has the same size as that of the empty records
            target.flush()
            measured = probes.measure(Path(target.name), probe_set, fidelity=_fidelity(plan), progress=progress)
            plan = replace(plan, sections={**plan.sections, "probes": encode(measured)})
            write_tables(target, plan, hashes)
        target.flush()
    return plan


def plan_flat(checkpoint: Checkpoint, quantization: Quantization) -> Plan:
    """Lay out the file. Matrices of few bits whose scales would be coarse become wider in the end: see `_widened`.

    Raises:
        ExportError: If the model does not fit the format.
    """
    chosen = choose_dtypes(
        matching_tensors(checkpoint), quantization.dtype, pure=quantization.pure, dtype_map=quantization.dtype_map
    )
    return make_plan(checkpoint, quantization.dtype, _sections(checkpoint, quantization.dtype), chosen)


def write_hollow(file: BinaryIO, plan: Plan) -> None:
    """Write a file with holes in the place of the tensors: it describes the whole model without their space."""
    write_tables(file, plan, [UNHASHED] * len(plan.slots))
    file.truncate(plan.file_bytes)
    file.flush()


def _target(
    out: Path | None, partial: Path | None, file: BinaryIO | None, sync: bool
) -> contextlib.AbstractContextManager[BinaryIO]:
    if file is not None:
        return contextlib.nullcontext(file)
    assert out is not None
    return atomic_file(out, partial, sync=sync)


def _sections(checkpoint: Checkpoint, dtype: str) -> dict[str, bytes]:
    metadata = {**checkpoint.metadata, "dtype": dtype, "exporter": f"llamac {__version__}"}
    tokenizer, special, spm = checkpoint.tokenizer or (b"", None, None)
    if special is not None and special.after_bos:
        metadata[AFTER_BOS] = special.after_bos
    text = json.dumps(metadata, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return {
        "metadata": text.encode(errors="replace"),  # file names can hold lone surrogates
        "tokenizer": pack(tokenizer),
        "spm": spm or b"",
        "template": checkpoint.chat_template.encode(),
    }


def _widened(
    checkpoint: Checkpoint, chosen: dict[str, str], quantization: Quantization, progress: Progress, warnings: list[str]
) -> dict[str, str]:
    """Every tensor's dtype. A matrix of few bits whose scales would be coarse becomes q8, unless dtype_map names it."""
    tensors = matching_tensors(checkpoint)
    if quantization.calibration_text is not None:
        few = [name for name, dtype in chosen.items() if dtype in FEW_BITS]
        copied = [name for name in few if tensors[name].has_strips_of(chosen[name])]
        if not few:
            raise ArgumentError(
                f"calibrate is for matrices in q4, q4s, q3 and q2; with dtype {quantization.dtype!r} the file has none"
            )
        if copied == few:
            raise ArgumentError(
                "calibrate has no effect: all matrices of few bits are copied, because the source has them in the same"
                " dtypes. Leave it out, or export from the original model"
            )
        if copied:
            warnings.append(f"calibrate has no effect on copied matrices: {', '.join(name_patterns(copied))}")

    def is_mapped(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern, _ in quantization.dtype_map)

    found, coarse = widen_coarse(tensors, chosen, is_mapped, progress, quantization.threads)
    warnings += coarse
    return found


def _check_space(
    out: Path | None, partial: Path | None, checkpoint: Checkpoint, plan: Plan, quantization: Quantization
) -> None:
    """Raise DiskFullError unless the disk has room for the file and for calibration's temporary files."""
    if out is None:
        return
    needed = plan.file_bytes
    if quantization.calibration_text is not None:
        needed = disk_bytes(checkpoint, needed)
    check_space(out, needed, partial)


def _calibrated_stats(
    checkpoint: Checkpoint,
    out: Path | None,
    quantization: Quantization,
    sequences: list[list[int]] | None,
    progress: Progress,
    stack: contextlib.ExitStack,
) -> Callable[[Slot], CalibrationStats | None]:
    """Calibrate if requested; `stack` closes the temporary file. The result looks up a matrix's statistics."""
    if quantization.calibration_text is None:
        return lambda slot: None
    assert out is not None
    with scratch_folder(out) as folder, float_model(checkpoint, folder, quantization.threads) as model:
        calibration = stack.enter_context(calibrate(checkpoint, model, sequences, folder.parent, progress))
    return lambda slot: calibration.stats(slot.name) if slot.dtype in FEW_BITS else None


def _fidelity(plan: Plan) -> probes.Fidelity:
    """How the file stores the source's weights."""
    slots = [slot for slot in plan.slots if slot.is_matrix]
    if not all(slot.dtype in FLOATS for slot in slots):
        return "quantized"
    is_exact = all(slot.tensor.dtype == slot.dtype and slot.tensor.is_exact for slot in slots)
    return "exact" if is_exact else "rounded"
