"""The public function `export`: converts any source to a flat file, or to another project's format.

source -> checkpoint (canonical, lazy) -> adapters merged -> tokenizer -> dtype -> one writer per format
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from llamac.arguments import Adapter, StrPath, file_path
from llamac.engine.hardware.machine import plan_threads
from llamac.errors import ArgumentError, ExportError, UnsupportedError
from llamac.export.attach_tokenizer import attach_tokenizer, tokenizer_name
from llamac.export.checkpoint import Checkpoint
from llamac.export.dtypes import CODED, choose_dtypes, exact_dtype, nearest_dtypes
from llamac.export.options import ExportOptions
from llamac.export.read import read_checkpoint
from llamac.export.targets import check_space, check_target, scratch_folder
from llamac.format.detect import HUB, Source, local_source
from llamac.format.strips import FLOATS, QUANTIZED
from llamac.progress import Progress, reporter, silent
from llamac.text.tokenizer import Tokenizer
from llamac.text.vocabulary.gguf import ReadAhead

# What quantizing GGUF's types a second time costs: the rise of SmolLM2-135M's perplexity (docs/gguf.md).
AGAIN = {"q8": "0.4%", "q8_0": "0.4%", "q6": "4%", "q4": "6%", "q4_0": "6% or more", "q4s": "14%"}
AGAIN |= {"q3": "59%", "q2": "more than 1,000%"}


@dataclass
class Report:
    """What an export did.

    Attributes:
        path: What was written.
        bytes: The size of all written files.
        dtype: The dtype of most matrices.
        bits_per_weight: Of a flat file's data; 0 for other formats.
        layers: The model's layers.
        dim: The model's width.
        parameters: The number of elements in all tensors.
        source: As in the flat file's metadata.
        tokenizer: The name of the file or directory that the tokenizer came from, or "none".
        dtype_map: The (pattern, dtype) pairs that decided.
        warnings: What the user should know.
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
    dtype_map: tuple[tuple[str, str], ...] = ()
    warnings: list[str] = field(default_factory=list)


class Converted(NamedTuple):
    """The result of a conversion for a program that opens it at once.

    Attributes:
        dtype: As in `Report`.
        warnings: As in `Report`.
        tokenizer: The model's tokenizer, or None.
    """

    dtype: str
    warnings: list[str]
    tokenizer: Tokenizer | None


def export(
    source: StrPath | Source,
    out: StrPath,
    *,
    dtype: str | None = None,
    tokenizer: StrPath | Literal[False] | None = None,
    name: str | None = None,
    to: str = "llamac",
    pure: bool = False,
    dtype_map: Iterable[tuple[str, str]] | Literal["auto"] = (),
    bits: float | None = None,
    bits_text: StrPath | None = None,
    calibrate: StrPath | None = None,
    lora: Adapter | Iterable[Adapter] = (),
    threads: int | None = None,
    probe_source: str | None = "auto",
    overwrite: bool = False,
    partial: StrPath | None = None,
    progress: Progress | bool | None = None,
) -> Report:
    """Convert a model.

    Args:
        source: A Hugging Face directory, a GGUF file (any part of a split one), a llama2.c model file, a flat file, a
            built-in model's name, or the result of `llamac.resolve`, which downloads models from the Hugging Face Hub.
        out: The file to write, or with to="hf" the directory.
        dtype: The dtype of the matrices: "f32", "f16", "bf16", "q8", "q6", "q4", "q4s", "q3", "q2" or "t2". The default
            is the source's own; f32 if the source is a quantized flat file (auto copies its matrices); that of the
            embedding (bf16 if it is quantized, too) if other matrices of another source are quantized. "auto", the
            default for flat files of GGUF files and of checkpoints with quantized weights, keeps each matrix's dtype if
            flat files have it, and stores other quantized ones as q8. With q4, q4s, q3 and q2, the output matrix is q6
            and attn_v is q8 unless `pure`. For to="gguf" also "q8_0" and "q4_0" (the output matrix then stays q8_0);
            there "auto" writes the source's own blocks, and is the default if it has some.
        tokenizer: A file or directory to use instead of the source's tokenizer, or False for none.
        name: The model's name in the file; default: the source's.
        to: "llamac" writes a flat file, "hf" a Hugging Face directory, "llama2c" a llama2.c model (always f32) with
            tokenizer.bin next to it, "gguf" a GGUF file for llama.cpp.
        pure: With q4, q4s, q3, q2 and t2, store no matrix wider.
        dtype_map: (pattern, dtype) pairs that override `dtype` and `pure`: the first pattern that matches a matrix's
            name decides (* matches any string). "auto" measures what each matrix costs and chooses its dtype.
        bits: For dtype_map="auto", the most bits per weight of the file's data.
        bits_text: For dtype_map="auto", the text file to measure costs on; default: English prose.
        calibrate: For q4, q4s, q3 and q2, a text file, or "self" for text that the model generates. The inputs measured
            on the text decide which errors matter and how later columns compensate them. Takes more time and memory,
            and temporary files next to `out` (docs/quantization.md).
        lora: Adapters to merge into the weights: PEFT directories, or pairs of one and its strength.
        threads: How many threads quantize; default: as many as a model would use. They do not change a byte.
        probe_source: What computes the flat file's reference logits: "llamac" ("auto"), "transformers", or None for a
            file without probes.
        overwrite: Replace an existing file `out` (the target of a symbolic link), and with "llama2c" another
            tokenizer.bin next to it. Only regular files are ever replaced.
        partial: The name of the unfinished flat file, in the folder of `out`. If the export is interrupted or its
            process ends, the file stays and the next export resumes it. The name must be unique to this source and
            these arguments, and no two exports may use it at once.
        progress: True shows progress bars. A function is called with (phase, done, total): "verifying" (bytes of a flat
            file that is read), "evaluating the base" (tokens) and "measuring costs" (matrices) for dtype_map="auto",
            "checking scales" (rows of matrices of few bits), "reference logits" (steps), "generating text" (tokens),
            "calibrating" (sequences), "writing" (bytes), "engine logits" (steps, on the written file).

    Raises:
        ArgumentError: If an argument is wrong, or has no effect with this `to`.
        ExportError, UnsupportedError: If the model cannot be converted. The message lists every problem; nothing has
            been written.
    """
    out = file_path(out, "out")
    options = ExportOptions.parse(
        to=to,
        dtype=dtype,
        tokenizer=tokenizer,
        name=name,
        pure=pure,
        dtype_map=dtype_map,
        bits=bits,
        bits_text=bits_text,
        calibrate=calibrate,
        lora=lora,
        threads=threads,
        probe_source=probe_source,
        overwrite=overwrite,
        partial=None if partial is None else file_path(partial, "partial"),
    )
    check_target(out, to, overwrite)
    with reporter(progress) as report:
        return _export(_locate(source), out, options, report)[0]


def export_resumable(
    source: Source,
    path: Path,
    *,
    dtype: str,
    tokenizer: Literal[False] | None,
    progress: Progress,
    hashed: bool = True,
    ahead: ReadAhead | None = None,
) -> Converted:
    """Convert a model to a flat file without probes, or resume doing so. Does not wait until the disk has the file.

    Args:
        source: As in `export`, like `dtype`, `tokenizer` and `progress`.
        path: The file, also while it is unfinished. If the export is interrupted or its process ends, the file stays.
        hashed: False leaves out the hashes of the tensors if they are all copied or regrouped. What was written before
            an interruption is then trusted.
        ahead: What has been read of a GGUF file.
    """
    options = ExportOptions(dtype=dtype, tokenizer=tokenizer, probe_source=None, partial=path, overwrite=True)
    check_target(path, options.to, options.overwrite)
    report, opened = _export(source, path, replace(options, sync=False, hashed=hashed), progress, ahead=ahead)
    return Converted(report.dtype, report.warnings, opened)


def export_unnamed(
    source: Source,
    file: BinaryIO,
    folder: Path | None,
    *,
    dtype: str,
    tokenizer: Literal[False] | None,
    progress: Progress,
    ahead: ReadAhead | None = None,
) -> Converted:
    """Convert a model to a flat file without probes, into an open file that need not have a name.

    The hashes of the tensors are left out if they are all copied or regrouped.

    Args:
        file: The open file, which must be empty.
        folder: A folder on the disk of `file`, whose free space is checked; None for a file in memory.
        source: As in `export`, like `dtype`, `tokenizer` and `progress`.
        ahead: What has been read of a GGUF file.
    """
    options = ExportOptions(dtype=dtype, tokenizer=tokenizer, probe_source=None, hashed=False)
    report, opened = _export(source, folder, options, progress, file, ahead)
    return Converted(report.dtype, report.warnings, opened)


def export_hollow(source: Source, file: BinaryIO, *, dtype: str, tokenizer: Literal[False] | None) -> None:
    """Write the flat file of a conversion into an open file, with holes in the place of the weights.

    It opens as the real one does, and says what memory the model will need. Only the source's headers and tokenizer
    are read. So matrices whose scales turn out to be coarse are counted in their few bits, although they become q8.

    Args:
        source: As in `export`, like `dtype` and `tokenizer`.
        file: The open file, which must be empty.

    Raises:
        ExportError, UnsupportedError: As in `export`.
    """
    from llamac.export.flat.write import Quantization, plan_flat, write_hollow

    options = ExportOptions(dtype=dtype, tokenizer=tokenizer, probe_source=None)
    checkpoint = _checkpoint(source, options, [], silent, None)
    options = _with_dtype(options, checkpoint)
    assert options.dtype is not None
    write_hollow(file, plan_flat(checkpoint, Quantization(options.dtype, options.pure, options.dtype_map, None, 1)))


def _locate(source: StrPath | Source) -> Source:
    if isinstance(source, Source):
        return source
    if str(source).startswith(HUB):
        raise ArgumentError(
            f"source is {str(source)!r}, a model on the Hugging Face Hub, which export does not download: pass"
            f" llamac.resolve({str(source)!r})"
        )
    try:
        return local_source(source)
    except FileNotFoundError as error:
        raise ExportError(f"{error.filename}: {error.strerror}") from None


def _checkpoint(
    source: Source, options: ExportOptions, warnings: list[str], progress: Progress, ahead: ReadAhead | None
) -> Checkpoint:
    """Read the checkpoint with its adapters and its tokenizer. Its tensors read the source later."""
    checkpoint = read_checkpoint(source.path, warnings, progress, ahead.head if ahead else None)
    if options.lora:
        checkpoint = _merge_adapters(checkpoint, options)
    checkpoint.tensors = {name: tensor.finite(name) for name, tensor in checkpoint.tensors.items()}
    tokenizer = options.tokenizer
    if checkpoint.config.drafter != "none":
        if tokenizer:
            raise ArgumentError(
                f"the tokenizer {tokenizer} has no effect: a drafter has none, because its token ids are those of the "
                "model that it drafts for. Leave out tokenizer (--tokenizer)"
            )
        tokenizer = False
    attach_tokenizer(checkpoint, source.path, tokenizer, warnings, ahead.vocabulary if ahead else None)
    if name := options.name or source.name:
        checkpoint.metadata["name"] = name
    return checkpoint


def _export(
    source: Source,
    out: Path | None,
    options: ExportOptions,
    progress: Progress,
    file: BinaryIO | None = None,
    ahead: ReadAhead | None = None,
) -> tuple[Report, Tokenizer | None]:
    """(what was done, the tokenizer if it has been opened)."""
    warnings: list[str] = []
    checkpoint = _checkpoint(source, options, warnings, progress, ahead)
    if checkpoint.config.two_sided or checkpoint.config.scores_pairs:
        options = _without_logits(options, "an encoder" if checkpoint.config.two_sided else "a reranker")
    if checkpoint.config.drafter != "none":
        options = _without_logits(options, "a drafter")
    requested = options.dtype
    if options.bits is not None:
        assert out is not None
        options = _within_budget(options, checkpoint, out, progress)
    options = _with_dtype(options, checkpoint)
    assert options.dtype is not None
    _warn_of_quantized(checkpoint, requested, options, warnings)
    size, bits = _write(checkpoint, source, out, options, warnings, progress, file)
    report = Report(
        path=source.path if out is None else out,
        bytes=size,
        dtype=options.dtype,
        bits_per_weight=bits,
        layers=len(checkpoint.config.layers),
        dim=checkpoint.config.dim,
        parameters=checkpoint.n_parameters,
        source=checkpoint.metadata["source"],
        tokenizer=tokenizer_name(checkpoint),
        dtype_map=options.dtype_map,
        warnings=warnings,
    )
    return report, checkpoint.opened_tokenizer


def _merge_adapters(checkpoint: Checkpoint, options: ExportOptions) -> Checkpoint:
    from llamac.export.lora import merge, read_adapter

    model = checkpoint.metadata.get("architecture"), checkpoint.config, checkpoint.metadata.get("config")
    return merge(checkpoint, [(read_adapter(folder, *model), scale) for folder, scale in options.lora])


def _within_budget(options: ExportOptions, checkpoint: Checkpoint, out: Path, progress: Progress) -> ExportOptions:
    """The options with the dtypes that the budget of bits buys."""
    from llamac.export.calibrate import float_bytes
    from llamac.export.quality.budget import Budget, allocate, dtype_map, most_common

    assert options.bits is not None
    budget, text = Budget(checkpoint), options.budget_text()
    spare = budget.check(options.bits)
    check_space(out, float_bytes(checkpoint))
    with scratch_folder(out) as folder:
        choices = budget.measure(text, folder, options.threads or plan_threads().threads, progress)
    chosen = allocate(choices, spare)
    pairs = tuple(dtype_map(budget, chosen))
    return replace(options, dtype=most_common(budget, chosen), dtype_map=pairs)


def _with_dtype(options: ExportOptions, checkpoint: Checkpoint) -> ExportOptions:
    """The options with a dtype, and a dtype_map if "auto" chose several."""
    dtype = options.dtype
    has_blocks = any(tensor.blocks for tensor in checkpoint.tensors.values())
    is_quantized = any(tensor.dtype in ("t2", *CODED) for tensor in checkpoint.tensors.values())
    is_gguf = checkpoint.metadata["source"].get("format") == "gguf"
    if dtype is None and options.to == "llamac" and (has_blocks or is_gguf or is_quantized):
        dtype = "auto"
    if options.to == "gguf" and (dtype == "auto" or (dtype is None and has_blocks)):
        return replace(options, dtype="auto")
    if dtype == "auto":
        if options.pure:
            raise ArgumentError("pure has no effect with dtype 'auto', which chooses each matrix's dtype: name a dtype")
        dtype, others = nearest_dtypes(checkpoint.tensors)
        return replace(options, dtype=dtype, dtype_map=(*options.dtype_map, *others))
    if dtype is None:
        dtype = "f32" if options.to == "llama2c" else exact_dtype(checkpoint.tensors)
    return replace(options, dtype=dtype)


def _warn_of_quantized(
    checkpoint: Checkpoint, requested: str | None, options: ExportOptions, warnings: list[str]
) -> None:
    """Warn if weights that are quantized already are quantized a second time, or become wider without a benefit.

    Args:
        checkpoint: The source.
        requested: The dtype that the user named.
        options: The options, with the dtype of most matrices in the result.
        warnings: Gets the message.
    """
    dtype, matrices = options.dtype, {name: each for name, each in checkpoint.tensors.items() if len(each.shape) == 2}
    assert dtype is not None
    chosen = {}  # of a flat file, which can have copies
    if options.to == "llamac":
        chosen = choose_dtypes(matrices, dtype, pure=options.pure, dtype_map=options.dtype_map)
    own = {each.dtype for name, each in matrices.items() if not each.has_strips_of(chosen.get(name, ""))}
    own &= set(QUANTIZED) - ({"t2"} if dtype == "t2" else set())  # ternary weights keep their numbers
    packed = {each.dtype for each in matrices.values()} - {*FLOATS, *CODED, *QUANTIZED}  # GGUF's types
    if packed and requested in AGAIN:
        warnings.append(
            f"the source's weights are quantized already ({', '.join(sorted(own | packed))}), and {requested} quantizes"
            f" them a second time. On a small model this raised the perplexity by {AGAIN[requested]} (docs/gguf.md)."
            " Without --dtype most types keep every number; for a smaller file, export from the original model"
        )
    elif own:
        effect = "which are quantized again" if dtype in QUANTIZED else "which a wider dtype does not restore"
        warnings.append(
            f"the source has quantized weights ({', '.join(sorted(own))}), {effect}: export from the original instead"
        )


def _write(
    checkpoint: Checkpoint,
    source: Source,
    out: Path | None,
    options: ExportOptions,
    warnings: list[str],
    progress: Progress,
    file: BinaryIO | None,
) -> tuple[int, float]:
    """(bytes written, bits per weight of a flat file or 0). `out` is None for a file in memory."""
    assert options.dtype is not None
    if options.to == "llamac":
        return _write_flat(checkpoint, source, out, options, warnings, progress, file)
    assert out is not None
    if options.to == "hf":
        from llamac.export.hf.write import write_hf

        return write_hf(checkpoint, out, options.dtype, progress, warnings), 0.0
    if options.to == "gguf":
        from llamac.export.gguf.write import write_gguf

        return write_gguf(checkpoint, out, options.dtype, warnings, progress), 0.0
    from llamac.export.llama2c.write import write_llama2c

    return write_llama2c(checkpoint, out, warnings, progress, overwrite=options.overwrite), 0.0


def _without_logits(options: ExportOptions, kind: str) -> ExportOptions:
    """The options for an encoder, a reranker or a drafter, which have no logits of texts: without probes.

    Raises:
        UnsupportedError: If an option needs logits, or the other format cannot hold the model.
    """
    needs = [name for name in ("calibrate", "bits") if getattr(options, name) is not None]
    if options.probe_source == "transformers":
        needs.append("probe_source")
    if needs:
        raise UnsupportedError(f"{needs[0]} needs a model's logits, and {kind} has none")
    if options.to != "llamac":
        raise UnsupportedError(f"to={options.to!r} writes language models, and this is {kind}")
    return replace(options, probe_source=None)


def _write_flat(
    checkpoint: Checkpoint,
    source: Source,
    out: Path | None,
    options: ExportOptions,
    warnings: list[str],
    progress: Progress,
    file: BinaryIO | None,
) -> tuple[int, float]:
    """(bytes written, bits per weight)."""
    from llamac.export.flat.write import Quantization, write_flat

    assert options.dtype is not None
    plan = write_flat(
        checkpoint,
        out,
        Quantization(
            options.dtype,
            options.pure,
            options.dtype_map,
            options.calibration_text(),
            options.threads or plan_threads().threads,
        ),
        partial=options.partial,
        probe_source="llamac" if options.probe_source == "auto" else options.probe_source,
        folder=source.path if source.path.is_dir() else None,
        warnings=warnings,
        progress=progress,
        file=file,
        sync=options.sync,
        hashed=options.hashed,
    )
    return plan.file_bytes, plan.bits_per_weight
