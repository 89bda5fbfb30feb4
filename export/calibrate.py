"""Calibration: measures the inputs of each matrix on a text, and derives which quantization errors matter.

The engine runs the source's weights over the text. The stages that feed each product are kept in a temporary file. For
a matrix W with inputs x, the error that counts is that of W x: for a row's error e it is the mean of (e x)^2 over the
text, e H e^T with H = mean(x x^T). With H = (I + U) diag(d) (I + U)^T, U strictly upper triangular, this equals the sum
over columns k of d_k (e_k + sum_{j<k} e_j U_jk)^2. So a quantizer that rounds the columns in order, and first adds the
shares U_jk of the earlier errors to each, only has to minimize its own rounding error, weighted by d_k. This is GPTQ
(Frantar et al., arXiv:2210.17323) in the form of Chee et al. (QuIP, arXiv:2307.13304, "LDLQ").
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamac import _core
from llamac.engine.model import Model, SessionDefaults
from llamac.errors import ExportError
from llamac.export.checkpoint import Checkpoint, LayerConfig, ModelConfig
from llamac.export.dtypes import exact_dtype
from llamac.export.flat.plan import Plan, make_plan
from llamac.export.flat.stream import write_file
from llamac.export.quantize import CalibrationStats
from llamac.export.residency import bounded_residency
from llamac.format.flatfile import FlatFile
from llamac.progress import Progress, silent
from llamac.text.tokenizer import Tokenizer

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

TOKENS = 4096
# Tokens per sequence: the first few positions have too little context to be typical, later ones change little.
SEQUENCE = 256
OBSERVED = 64  # tokens whose stages of all layers are in memory together
BATCH = 16  # sequences that are generated together
# Added to the diagonal of H, as a share of its mean; covers columns that the text never used.
DAMPING = 0.01
# Added for experts, times columns / rows: a few rows show only some directions.
EXPERT_DAMPING = 0.2
# Inputs are rounded to integers of this many bits, relative to their column's largest. Sums of their products are then
# exact in float64, and do not depend on the order of the additions.
INPUT_BITS = 14
# The step that the triangular factor is rounded to; coarse enough to hide differences between LAPACK implementations.
FEEDBACK_STEP = 2.0**-14

ROWS_AT_ONCE = 1024

# The matrices that each stage is the input of.
STAGES = {
    "attn_norm": ("attn_q", "attn_k", "attn_v"),
    "attn_mix": ("attn_out",),
    "ffn_norm": ("ffn_gate", "ffn_up"),
    "ffn_hidden": ("ffn_down",),
}
ROUTER = "ffn_router"  # the stage that shows which rows each expert gets


class InputSource(NamedTuple):
    """The stage that a matrix's inputs come from.

    Attributes:
        expert: The expert whose rows count, or -1 for all rows.
    """

    stage: str
    layer: int = 0
    expert: int = -1


class Calibration:
    """The inputs of a model's matrices on a text, in a temporary file. A context manager.

    Args:
        folder: Where the temporary file is created.
    """

    def __init__(self, config: ModelConfig, folder: Path) -> None:
        self._config = config
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  closed by __exit__
        # Each stage's blocks: file offset and shape.
        self._blocks: dict[InputSource, list[tuple[int, tuple[int, int]]]] = {}
        # Each layer's blocks of chosen experts, ascending in a row.
        self._chosen: dict[int, list[NDArray[np.int16]]] = {}
        self._last: tuple[InputSource, CalibrationStats] | None = None

    def __enter__(self) -> Calibration:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, stage: str, layer: int, rows: Floats) -> None:
        """Keep a stage's rows (n, columns), as bf16: second moments need no more precision.

        Of the router's stage only the choice of experts is kept.
        """
        if stage == ROUTER:
            self._chosen.setdefault(layer, []).append(chosen_experts(rows, self._config.layers[layer]))
            return
        if stage == "ffn_hidden":
            rows = rows[:, : hidden_width(self._config.layers[layer])]  # the stage is as wide as the widest layer
        bits = np.ascontiguousarray(rows).view(np.uint32)
        self._blocks.setdefault(InputSource(stage, layer), []).append((self._file.tell(), rows.shape))
        self._file.write(((bits + 0x8000) >> 16).astype("<u2").tobytes())

    def stats(self, name: str) -> CalibrationStats | None:
        """The statistics of the inputs of matrix `name`.

        None if it has no inputs: an embedding, or a matrix of an expert that no row was routed to.
        """
        source = self._source(name)
        if source is None:
            return None
        if self._last is None or self._last[0] != source:  # matrices with the same inputs are adjacent in the file
            self._last = None
            inputs = self.inputs(name)
            if inputs is None:
                return None
            n, columns = inputs.shape
            damping = DAMPING + (EXPERT_DAMPING * columns / n if source.expert >= 0 else 0)
            self._last = (source, input_stats(inputs, damping))
        return self._last[1]

    def inputs(self, name: str) -> Floats | None:
        """The inputs of matrix `name`, (n, columns); None as for `stats`."""
        source = self._source(name)
        if source is None:
            return None
        n_blocks = len(self._blocks.get(source._replace(expert=-1), []))
        parts = [self._read_block(source, index) for index in range(n_blocks)]
        found = np.concatenate(parts) if parts else np.empty((0, 0), np.uint16)
        return (found.astype(np.uint32) << 16).view(np.float32) if len(found) else None

    def _read_block(self, source: InputSource, index: int) -> NDArray[np.uint16]:
        """Block `index` of a stage as bf16: all of it, or one expert's part."""
        offset, shape = self._blocks[source._replace(expert=-1)][index]
        self._file.flush()
        kept = np.memmap(self._file, "<u2", "r", offset, shape)
        if source.expert < 0:
            return np.array(kept)
        rows, places = np.nonzero(self._chosen[source.layer][index] == source.expert)
        if source.stage == "ffn_norm":
            return np.array(kept[rows])
        width = self._config.layers[source.layer].ffn_dim  # a row holds its experts' hidden values one after another
        columns = places[:, None] * width + np.arange(width)
        return np.array(kept[rows[:, None], columns])

    def _source(self, name: str) -> InputSource | None:
        """Where the inputs of matrix `name` come from; None if its inputs are not kept."""
        head = "token_embedding.weight" if self._config.tied_output else "output.weight"
        if name == head:
            return InputSource("output_norm")
        parts = name.split(".")
        if parts[0] != "layers":
            return None
        expert = int(parts[3]) if parts[2] == "experts" else -1
        found = [stage for stage, modules in STAGES.items() if parts[-2] in modules]
        return InputSource(found[0], int(parts[1]), expert) if found else None


def hidden_width(layer: LayerConfig) -> int:
    """How many hidden values a row has in all of its experts, or in the layer's one network."""
    return layer.ffn_dim * max(1, layer.n_experts_used)


def chosen_experts(logits: Floats, layer: LayerConfig) -> NDArray[np.int16]:
    """Each row's experts in ascending order, (n, n_experts_used): the largest logits, the lower index among equals."""
    order = np.argsort(-logits[:, : layer.n_experts], axis=1, kind="stable")
    return np.sort(order[:, : layer.n_experts_used], axis=1).astype(np.int16)


def input_stats(inputs: Floats, damping: float = DAMPING) -> CalibrationStats:
    """The statistics of inputs (n, columns)."""
    peaks = np.abs(inputs).max(axis=0)
    _, exponents = np.frexp(np.where(peaks > 0, peaks, 1))
    steps = np.ldexp(1.0, exponents - INPUT_BITS)
    moments: Doubles = np.zeros((len(steps), len(steps)))
    for first in range(0, len(inputs), ROWS_AT_ONCE):
        integers = np.rint(inputs[first : first + ROWS_AT_ONCE] / steps)
        moments += integers.T @ integers  # exact: integers below 2^53
    moments *= steps[:, None]
    moments *= steps / len(inputs)
    diagonal = np.einsum("ii->i", moments)  # a view
    mean = float(diagonal.sum()) / len(moments)
    if mean == 0:
        return CalibrationStats(np.ones(len(moments), np.float32), None)
    diagonal += damping * mean
    # H = R R^T with R upper triangular is the usual Cholesky factorization of H with rows and columns reversed.
    factor = np.linalg.cholesky(moments[::-1, ::-1])[::-1, ::-1]
    roots = np.diag(factor).copy()
    importance = (roots / roots.max()) ** 2
    feedback = np.rint(factor / roots / FEEDBACK_STEP) * FEEDBACK_STEP
    return CalibrationStats(_rounded(importance), np.ascontiguousarray(feedback, np.float32))


def _rounded(x: Doubles) -> Floats:
    """Round to 10 bits, which hides differences between LAPACK implementations."""
    fractions, exponents = np.frexp(x)
    rounded: Floats = np.ldexp(np.rint(fractions * 1024) / 1024, exponents).astype(np.float32)
    return rounded


# ---- the float model


def disk_bytes(checkpoint: Checkpoint, file_bytes: int) -> int:
    """The most disk space that a calibrated export takes: the inputs, and the float model or the target.

    Args:
        file_bytes: The target's size.
    """
    config = checkpoint.config
    count, length = _text_size(config)
    columns = len(config.layers) * (2 * config.dim + config.n_heads * config.head_dim) + config.dim
    columns += sum(map(hidden_width, config.layers))
    return 2 * count * length * columns + max(file_bytes, _float_plan(checkpoint).file_bytes)


def _float_plan(checkpoint: Checkpoint) -> Plan:
    return make_plan(checkpoint, exact_dtype(checkpoint.tensors))


@contextlib.contextmanager
def float_model(checkpoint: Checkpoint, folder: Path, threads: int) -> Iterator[Model]:
    """The engine over the checkpoint's unquantized weights, in a temporary file in `folder`."""
    path = folder / "float.bin"
    try:
        with open(path, "w+b") as file:
            write_file(file, _float_plan(checkpoint))
        with Model(FlatFile(path), SessionDefaults(kv_dtype="f32", threads=threads)) as model:
            yield model
    finally:
        path.unlink(missing_ok=True)


def calibrate(
    checkpoint: Checkpoint,
    model: Model,
    sequences: list[list[int]] | None,
    folder: Path,
    progress: Progress = silent,
) -> Calibration:
    """Run `model` over sequences of tokens and keep the inputs of its matrices.

    Args:
        model: The checkpoint's weights, opened.
        sequences: Token ids, of equal length. None: TOKENS tokens that the model generates.
        folder: Where the temporary file is created.
    """
    if sequences is None:
        sequences = _generated_sequences(checkpoint, model, progress)
    length = len(sequences[0])
    calibration = Calibration(checkpoint.config, folder)
    try:
        routers = [(ROUTER, index) for index, layer in enumerate(checkpoint.config.layers) if layer.ffn == "experts"]
        stages: list[str | tuple[str, int]] = [*STAGES, *routers, "output_norm"]
        with model.session(context=length) as session, bounded_residency(model.file):
            for done, ids in enumerate(sequences):
                progress("calibrating", done, len(sequences))
                session.truncate(0)
                for first in range(0, length, OBSERVED):
                    for (stage, layer), rows in session.observe(ids[first : first + OBSERVED], stages).items():
                        calibration.add(stage, layer, rows)
        progress("calibrating", len(sequences), len(sequences))
    except BaseException:
        calibration.__exit__(None, None, None)
        raise
    return calibration


# ---- the text


def _text_size(config: ModelConfig) -> tuple[int, int]:
    """(number of sequences, tokens per sequence)."""
    length = min(SEQUENCE, config.context)
    return max(1, TOKENS // length), length


def calibration_sequences(checkpoint: Checkpoint, text: str) -> list[list[int]]:
    """Up to TOKENS tokens of a text, in sequences spread evenly over it. Each starts as the tokenizer starts a prompt.

    Raises:
        ExportError: If the checkpoint has no tokenizer, or the text is too short for one sequence.
    """
    count, length = _text_size(checkpoint.config)
    if checkpoint.tokenizer is None:
        raise ExportError("calibration on a text needs a tokenizer: pass one, or use --calibrate self")
    data, special, _ = checkpoint.tokenizer
    tokenizer = Tokenizer.from_json(data, replace(special, add_eos=False))
    ids = tokenizer.encode(text, add_special=False)
    start = tokenizer.encode("", add_special=True)
    body = length - len(start)
    if body < 1 or len(ids) < body:
        raise ExportError(
            f"the calibration text has {len(ids)} tokens, expected at least {body}, better {count * body}"
        )
    count = min(count, len(ids) // body)
    gap = (len(ids) - body) / max(count - 1, 1)
    return [start + ids[first : first + body] for first in (int(i * gap) for i in range(count))]


def _generated_sequences(checkpoint: Checkpoint, model: Model, progress: Progress) -> list[list[int]]:
    """Sequences sampled from the model at temperature 1: the same ones on every machine."""
    config = checkpoint.config
    count, length = _text_size(config)
    bos = checkpoint.tokenizer[1].bos_id if checkpoint.tokenizer is not None else None
    sequences: list[list[int]] = []
    for first in range(0, count, BATCH):
        group = range(first, min(first + BATCH, count))
        # without a BOS, each sequence starts with another arbitrary token
        batch = [[bos if bos is not None else number * 7919 % config.n_token_ids] for number in group]
        with model.session(sequences=len(group), context=length) as session, bounded_residency(model.file):
            for position in range(length - 1):
                progress("generating text", first * (length - 1) + len(group) * position, count * (length - 1))
                rows = [(ids[-1], i, position, True) for i, ids in enumerate(batch)]
                logits = session.eval_rows(rows)[:, : config.n_token_ids]
                for number, row, ids in zip(group, logits, batch, strict=True):
                    sampling = _core.Sampling(temperature=1.0, seed=number)
                    ids.append(_core.sample(np.ascontiguousarray(row).data, sampling, position))
        sequences += batch
    progress("generating text", count * (length - 1), count * (length - 1))
    return sequences
