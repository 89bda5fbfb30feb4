"""Computes a file's probes section (llamac.format.probes): prompts, reference logits, and the engine's own results.

The reference logits come from the source's weights before they are rounded to the file's dtype, by default through the
float64 forward pass of llamac.export.reference. They are stored rounded to 2^-17 of their largest magnitude. That is
far below any tolerance, and coarse enough that another BLAS, whose sums differ in the last bits, gives the same bytes.

When the file is complete, `measure` runs the engine on it and fills in the hash and the tolerance for both KV dtypes.
The tolerance is twice the measured error, at least 1e-4: it covers the cost of the file's dtype and of another order of
operations. In a quantized file the error is dominated by quantization, which no order of operations changes much. There
the tolerance is only a tenth above the error, so that a wrong computation, which adds to the error, still shows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from llamac.arguments import KVDtype
from llamac.engine.inspection.probe_replay import engine_logits
from llamac.engine.model import Model
from llamac.errors import ArgumentError, ExportError
from llamac.export.checkpoint import Checkpoint, LazyTensor, ModelConfig
from llamac.export.flat.model import read as read_flat
from llamac.export.reference import forward
from llamac.export.residency import bounded_residency
from llamac.format.flatfile import FlatFile
from llamac.format.probes import KV_DTYPES, EngineRecord, Probe, ProbeSet, relative_error
from llamac.progress import Progress, silent
from llamac.text.tokenizer import Tokenizer

# How a file stores the source's weights.
Fidelity = Literal["exact", "rounded", "quantized"]
SOURCES = ("llamac", "transformers")
PROMPTS = (
    "Once upon a time, there was a little girl named Lily who loved to play in the park.",
    "The answer to 17 * 23 is 391, and 1/8 = 0.125.",
    'def add(a, b):\n    return a + b  # the "sum"\n',
    "Zoë naïvely paid 5 € for the 東京 guide, très cher! 🙂",
)
RANDOM_LENGTHS = (1, 7, 24)  # probe lengths for a model without a tokenizer
MIN_TOLERANCE = 1e-4
MARGIN = 2.0
QUANTIZED_MARGIN = 1.1
# In a file that stores the source's weights exactly, engine and reference differ only by float32 arithmetic.
MAX_EXACT_ERROR = 1e-2
SUSPICIOUS_ERROR = 0.5  # rounding alone does not explain an error above this
MAX_SQUARABLE = 2.0**63  # the square of a larger number overflows float32, and norms sum squares


def make(
    checkpoint: Checkpoint,
    numerics: int,
    *,
    source: str = "llamac",
    folder: Path | None = None,
    prompts: Sequence[str] = PROMPTS,
    progress: Progress = silent,
) -> ProbeSet:
    """Make the probes of a checkpoint, without the engine's records.

    Args:
        checkpoint: The model.
        numerics: The header's version of the order of operations.
        source: "llamac" streams the checkpoint through the float64 forward pass. "transformers" loads `folder` into
            memory in float32.
        folder: The source, a Hugging Face directory.
        prompts: The texts, for a model with a tokenizer.
        progress: Called with the phase "reference logits".

    Raises:
        ExportError: If transformers is not installed or has no folder, or if a reference logit is not finite.
    """
    texts, sequences = _sequences(checkpoint, prompts)
    if source == "llamac":
        name, rows = "llamac-numpy", _numpy_logits(checkpoint, sequences, progress)
    elif source == "transformers":
        for weights in checkpoint.tensors.values():  # reading reports a tensor that is not finite by name
            for _ in weights.chunks():
                pass
        name, rows = _transformers_logits(folder, sequences, progress)
    else:
        raise ArgumentError(f"probe_source is {source!r}, expected one of {', '.join(SOURCES)}")
    probes = []
    for index, (text, ids, row) in enumerate(zip(texts, sequences, rows, strict=True)):
        if row.shape != (checkpoint.config.vocab_size,):
            raise ExportError(f"{name} gives {row.size} logits, the checkpoint has {checkpoint.config.vocab_size}")
        logits = _rounded(row)
        if not np.isfinite(logits).all():
            tensor, peak = _largest(checkpoint.tensors)
            raise ExportError(
                f"the reference logits of probe {index} ({text or 'random ids'!r}) are not finite in float32: the"
                f" largest weight is {peak:.3g}, in tensor {tensor}"
            )
        probes.append(Probe(tuple(ids), logits, text))
    return ProbeSet(name, numerics, tuple(probes), {kv: EngineRecord() for kv in KV_DTYPES})


def measure(path: Path, probe_set: ProbeSet, *, fidelity: Fidelity, progress: Progress = silent) -> ProbeSet:
    """Run the engine on the file at `path` and fill in its hashes and tolerances for both KV dtypes.

    Raises:
        ExportError: If the engine's logits are not finite, or too far from the reference for an exact file. Then the
            engine, the import or the probes' source is wrong.
    """
    records: dict[str, EngineRecord] = {}

    def report(done: int) -> None:
        count = len(probe_set.probes)
        progress("engine logits", len(records) * count + done, len(KV_DTYPES) * count)

    with Model(FlatFile(path)) as model, bounded_residency(model.file):
        for kv in KV_DTYPES:
            records[kv] = _engine_record(model, probe_set, kv, fidelity, report)
    return probe_set.with_engine(records)


def _engine_record(
    model: Model, probe_set: ProbeSet, kv: KVDtype, fidelity: Fidelity, progress: Callable[[int], None]
) -> EngineRecord:
    with model.session(context=probe_set.context, kv_dtype=kv) as session:
        digest, rows = engine_logits(session, probe_set, progress)
    pairs = zip(rows, probe_set.probes, strict=True)
    error = max(relative_error(row, probe.logits) for row, probe in pairs)
    limit = MAX_EXACT_ERROR if fidelity == "exact" and kv == "f32" else np.finfo(np.float32).max
    if error > min(limit, SUSPICIOUS_ERROR):
        name, peak = _largest(read_flat(model.file.path).tensors)
        if peak > MAX_SQUARABLE or not np.isfinite(error):
            raise ExportError(
                "the written file gives wrong logits, because the engine computes in float32, which overflows: the"
                f" largest weight is {peak:.3g}, in tensor {name}"
            )
    if error > limit:
        raise ExportError(
            f"the written file gives logits that differ from the reference ({probe_set.source}) by {error:.3g} of their"
            f" largest magnitude, expected at most {limit:.3g}: please report this model as a bug"
        )
    margin = QUANTIZED_MARGIN if fidelity == "quantized" else MARGIN
    return EngineRecord(digest, max(MIN_TOLERANCE, margin * error))


def _largest(tensors: Mapping[str, LazyTensor]) -> tuple[str, float]:
    """The name of the tensor with the largest magnitude, and that magnitude."""
    peaks = {name: max(float(np.abs(rows).max()) for _, rows in tensor.chunks()) for name, tensor in tensors.items()}
    return max(peaks.items(), key=lambda item: item[1])


def _sequences(checkpoint: Checkpoint, prompts: Sequence[str]) -> tuple[list[str | None], list[list[int]]]:
    """(prompts, token ids): tokenized as prompts, or random ids if the model has no tokenizer."""
    longest = _max_length(checkpoint.config)
    if checkpoint.tokenizer is None:
        return [None] * len(RANDOM_LENGTHS), list(_random_ids(checkpoint.config.n_token_ids, longest))
    data, special, _ = checkpoint.tokenizer
    tokenizer = Tokenizer.from_json(data, replace(special, add_eos=False))  # a prompt does not end the text
    encoded = {text: tokenizer.encode(text, add_special=True, parse_special=True)[:longest] for text in prompts}
    kept = {text: ids for text, ids in encoded.items() if ids}
    return list(kept), list(kept.values())


def _max_length(config: ModelConfig) -> int:
    """The largest number of tokens of a probe.

    If a model has a short and a long RoPE table, probes use the short one, as transformers does for short texts.
    """
    return min([config.context, *(original for original in config.rope_original_context if original)])


def _random_ids(n_token_ids: int, longest: int) -> Iterator[list[int]]:
    state = 1
    for length in RANDOM_LENGTHS:
        ids = []
        for _ in range(min(length, longest)):
            state = (state * 6364136223846793005 + 1442695040888963407) % 2**64  # Knuth's MMIX generator
            ids.append((state >> 33) % n_token_ids)
        yield ids


def _numpy_logits(checkpoint: Checkpoint, sequences: list[list[int]], progress: Progress) -> list[NDArray[np.float64]]:
    """The float64 logits after the last token of each sequence, (vocab_size) each."""
    context = max(len(ids) for ids in sequences)
    total = len(checkpoint.config.layers) + 1  # the output matrix counts as a layer

    def observe(stage: str, layer: int, values: NDArray[np.float64]) -> None:
        if stage in ("block", "logits"):
            progress("reference logits", layer + 1 if stage == "block" else total, total)

    progress("reference logits", 0, total)
    with np.errstate(over="ignore", invalid="ignore"):  # the caller rejects logits that are not finite
        found = forward(checkpoint, sequences, context=context, last_only=True, observe=observe)
    return [logits[0] for logits in found]


def _transformers_logits(
    folder: Path | None, sequences: list[list[int]], progress: Progress
) -> tuple[str, list[NDArray[np.float64]]]:
    """(name and version, float32 logits after the last token of each sequence), by transformers."""
    if folder is None:
        raise ExportError("probe_source='transformers' needs a Hugging Face directory as the source")
    try:
        import torch
        import transformers
    except ImportError as error:
        raise ExportError(
            f"probe_source='transformers' needs torch and transformers ({error}): pip install \"llamac[parity]\""
        ) from None
    load = transformers.AutoModelForCausalLM.from_pretrained
    total = 1 + len(sequences)  # loading counts as a step
    rows = []
    progress("reference logits", 0, total)
    with _quiet_transformers(), torch.inference_mode():
        model = load(folder, dtype=torch.float32, local_files_only=True)  # in evaluation mode
        progress("reference logits", 1, total)
        for ids in sequences:
            rows.append(model(torch.tensor([ids])).logits[0, -1].double().numpy())
            progress("reference logits", 1 + len(rows), total)
    return f"transformers {transformers.__version__}", rows


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Suppress the progress bars and advice that transformers prints while it loads a model."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _rounded(logits: NDArray[np.float64]) -> NDArray[np.float32]:
    """float32 logits, rounded to a multiple of a power of two that is at most 2^-16 of the largest magnitude."""
    _, exponent = np.frexp(np.abs(logits).max())
    quantum = np.ldexp(1.0, int(exponent) - 17)
    with np.errstate(over="ignore"):  # overflow becomes infinity, which the caller rejects
        rounded: NDArray[np.float32] = (np.round(logits / quantum) * quantum).astype(np.float32)
    return rounded
