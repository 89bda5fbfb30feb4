"""`export`: from any source to a flat file (or back to another project's format), in one call.

source -> checkpoint (canonical, lazy) -> tokenizer -> probes -> plan -> temporary file -> engine's probes -> rename
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llamac.errors import ArgumentError, ExportError, TokenizerError
from llamac.export.checkpoint import Checkpoint
from llamac.export.writer import Plan, Progress, check_space, make_plan, temporary_beside, write, write_tables

TARGETS = ("llamac", "hf", "llama2c")
SOURCES = "a Hugging Face directory, a llama2.c model file or a flat file"
NUMERICS = 1


@dataclass
class Report:
    """What an export did. path: what was written. bits_per_weight: of a flat file's data, else 0.

    warnings: what the user should know."""

    path: Path
    bytes: int
    dtype: str
    bits_per_weight: float
    source: dict[str, Any]
    tokenizer: str
    warnings: list[str] = field(default_factory=list)


def export(
    source: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    tokenizer: str | Path | None = None,
    name: str | None = None,
    to: str = "llamac",
    probe_source: str | None = "llamac",
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Converts a checkpoint.

    source: a Hugging Face directory, a llama2.c model file or a flat file. dtype: of the matrices, "f32", "f16" or
    "bf16" (default: the source's own). tokenizer: a file or directory to use instead of the source's. name: stored in
    the flat file (default: the source's). to: "llamac" writes a flat file, "hf" a Hugging Face directory, "llama2c" a
    llama2.c model (always f32) with tokenizer.bin beside it. probe_source: who computes the flat file's reference
    logits, "llamac" or "transformers"; None leaves the probes out. overwrite: replace an existing file `out`; a folder
    is never replaced. progress: called with (bytes done, bytes in all).

    Raises ExportError or UnsupportedError with everything that stands against it, before anything is written.
    """
    source, out = Path(source), Path(out)
    if to not in TARGETS:
        raise ArgumentError(f"to is {to!r}, expected one of {', '.join(TARGETS)}")
    if to != "llamac" and name is not None:
        raise ArgumentError(f"name is stored in flat files only, not with to={to!r}")
    if to == "llama2c" and dtype not in (None, "f32"):
        raise ArgumentError(f"dtype is {dtype!r}, but llama2.c's checkpoint of version 0 is always f32")
    if not source.exists():
        raise ExportError(f"{source} does not exist")
    _check_target(out, to, overwrite)
    warnings: list[str] = []
    checkpoint = read_checkpoint(source, warnings)
    _attach_tokenizer(checkpoint, source, tokenizer, warnings)
    if name is not None:
        checkpoint.metadata["name"] = name
    dtype = dtype or ("f32" if to == "llama2c" else _own_dtype(checkpoint))
    if to == "hf":
        from llamac.export.to_hf import write_hf

        size = write_hf(checkpoint, out, dtype, progress)
        bits = 0.0
    elif to == "llama2c":
        from llamac.export.to_llama2c import write_llama2c

        size = write_llama2c(checkpoint, out, progress, overwrite=overwrite)
        bits = 0.0
    else:
        plan = _write_flat(checkpoint, source, out, dtype, probe_source, progress)
        size, bits = plan.file_bytes, plan.bits_per_weight
    kind = checkpoint.metadata.get("tokenizer", {}).get("source", "none")
    return Report(out, size, dtype, bits, checkpoint.metadata["source"], kind, warnings)


def _check_target(out: Path, to: str, overwrite: bool) -> None:
    if not out.parent.is_dir():
        raise ExportError(f"the folder {out.parent} does not exist")
    if to == "hf":
        if out.exists() and (not out.is_dir() or any(out.iterdir())):  # a directory is never replaced: it may hold more
            raise ExportError(f"{out} exists and is no empty directory: choose another name")
    elif out.is_dir():
        raise ExportError(f"{out} is a directory: the target is a file")
    elif out.exists() and not overwrite:
        raise ExportError(f"{out} exists: choose another name, or allow it to be overwritten")


def read_checkpoint(source: Path, warnings: list[str]) -> Checkpoint:
    """The checkpoint of any source, told by its content. Raises ExportError for what it cannot be."""
    if source.is_dir():
        from llamac.export.hf import read as read_hf

        return read_hf(source, warnings)
    with open(source, "rb") as file:
        head = file.read(16)
    if head[:8] == b"\x89llamac\n":
        from llamac.export.flat import read as read_flat

        return read_flat(source)
    from llamac.export.llama2c import looks_like_llama2c
    from llamac.export.llama2c import read as read_llama2c

    if head[:4] == b"GGUF":
        raise ExportError(f"{source} is a GGUF file; this version imports Hugging Face directories and llama2.c files")
    if not looks_like_llama2c(source) and head[:4] != b"24ka":
        raise ExportError(f"{source} is no checkpoint this version knows: expected {SOURCES}")
    return read_llama2c(source)


def _own_dtype(checkpoint: Checkpoint) -> str:
    """The dtype that stores every matrix of the source exactly, or f32 if none does."""
    kinds = {tensor.dtype for tensor in checkpoint.tensors.values() if len(tensor.shape) == 2}
    return kinds.pop() if len(kinds) == 1 and kinds <= {"f32", "f16", "bf16"} else "f32"


# ---- tokenizer

IDS_ONLY = "the file takes and gives token ids only (--tokenizer adds one)"


def _attach_tokenizer(checkpoint: Checkpoint, source: Path, given: str | Path | None, warnings: list[str]) -> None:
    from llamac.export.vocab import load_vocabulary

    place = Path(given) if given is not None else _tokenizer_beside(source)
    if place is None and checkpoint.tokenizer is None:
        warnings.append(f"no tokenizer was found: {IDS_ONLY}")
        return
    if place is not None:
        try:
            checkpoint.tokenizer = load_vocabulary(place)
        except FileNotFoundError:
            raise ExportError(f"the tokenizer {place} does not exist") from None
        except TokenizerError:
            if given is not None:
                raise
            warnings.append(f"{place} holds no tokenizer: {IDS_ONLY}")
            return
        checkpoint.metadata["tokenizer"] = {"source": place.name}
    _fit_tokenizer(checkpoint)


def _tokenizer_beside(source: Path) -> Path | None:
    """The tokenizer of a source: the directory itself, or the one tok*.bin beside a llama2.c model."""
    if source.is_dir():
        return source
    with open(source, "rb") as file:
        if file.read(8) == b"\x89llamac\n":
            return None
    found = [path for path in sorted(source.parent.glob("tok*.bin")) if path.is_file() and path != source]
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise ExportError(f"several tokenizers lie beside {source.name}: {names}; choose one with --tokenizer")
    return found[0] if found else None


def _fit_tokenizer(checkpoint: Checkpoint) -> None:
    """Notes how many ids the tokenizer knows, and what else the source's kind says of special tokens."""
    from llamac.tokenizer import Tokenizer

    assert checkpoint.tokenizer is not None
    data, special, spm = checkpoint.tokenizer
    n_ids = Tokenizer.from_json(data, special).n_ids
    if n_ids > checkpoint.config.vocab_size:
        raise ExportError(
            f"the tokenizer has {n_ids} ids, but the model's vocabulary has {checkpoint.config.vocab_size}:"
            " they do not belong together"
        )
    checkpoint.config = replace(checkpoint.config, n_token_ids=n_ids)
    if checkpoint.metadata["source"]["format"] == "llama2c" and special.bos_id is not None:
        # llama2.c's models were trained on texts that follow one another: BOS begins the next, so it ends this one
        stop_ids = tuple(sorted({special.bos_id, *special.stop_ids}))
        checkpoint.tokenizer = (data, replace(special, add_bos=True, add_eos=False, stop_ids=stop_ids), spm)


# ---- the flat file


def _write_flat(
    checkpoint: Checkpoint, source: Path, out: Path, dtype: str, probe_source: str | None, progress: Progress | None
) -> Plan:
    from llamac import __version__
    from llamac.export import probes
    from llamac.probes import encode

    metadata = {**checkpoint.metadata, "dtype": dtype, "exporter": f"llamac {__version__}"}
    tokenizer, _, spm = checkpoint.tokenizer or (b"", None, None)
    texts = {
        "metadata": json.dumps(metadata, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode(),
        "tokenizer": tokenizer,
        "spm": spm or b"",
        "template": checkpoint.chat_template.encode(),
        "probes": b"",
    }
    make_plan(checkpoint, dtype, texts)  # what does not fit is told before the probes cost any time
    probe_set = None
    if probe_source is not None:
        folder = source if source.is_dir() else None
        probe_set = probes.make(checkpoint, NUMERICS, source=probe_source, folder=folder)
        texts["probes"] = encode(probe_set)
    plan = make_plan(checkpoint, dtype, texts)
    check_space(out.parent, plan.file_bytes)
    with temporary_beside(out) as file:
        hashes = write(file, plan, progress)
        if probe_set is not None:
            # the engine's own logits need the finished file; their records have the same size as the empty ones
            file.flush()
            exact = all(slot.tensor.dtype == slot.dtype for slot in plan.slots if slot.is_matrix)
            measured = encode(probes.measure(Path(file.name), probe_set, exact=exact))
            plan = replace(plan, sections={**plan.sections, "probes": measured})
            write_tables(file, plan, hashes)
    return plan
