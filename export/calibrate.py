"""Calibration: what the inputs of each matrix look like when the model reads text, and what follows for quantizing it.

The engine runs the source's weights over the text, and the stages before each product are kept in a temporary file. For
a matrix W with inputs x the error that counts is that of W x, the mean of (e x)^2 over the text for a row's error e:
e H e^T with H = mean(x x^T). With H = (I + U) diag(d) (I + U)^T, U strictly upper triangular, this is the sum over
columns k of d_k (e_k + sum_{j<k} e_j U_jk)^2: a quantizer that rounds columns one after the other, each with the share
U_jk of the errors before it added, has to care for its own rounding alone. That is GPTQ (Frantar et al.,
arXiv:2210.17323) as written by Chee et al. (QuIP, arXiv:2307.13304, "LDLQ").
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

import llamac
from llamac import _core
from llamac.errors import ExportError
from llamac.export.checkpoint import Checkpoint, LayerConfig, ModelConfig
from llamac.export.probes import few_pages
from llamac.export.quantize import Lesson
from llamac.export.writer import Plan, make_plan, write
from llamac.progress import Progress, silent
from llamac.tokenizer import Tokenizer

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

TOKENS = 4096
TEXT_CHARACTERS = 1 << 20  # of a text that are looked at
SEQUENCE = 256  # tokens; a sequence has seen too little to be typical before, and little changes after
OBSERVED = 64  # tokens whose stages of all layers are in memory together
BATCH = 16  # sequences that are generated together
# What is added to the diagonal of H, as a share of its mean: more than columns that no text has used need.
DAMPING = 0.01
# Of an expert's matrices more is added, the fewer rows there are for a column: a few rows show some directions only.
DAMPING_OF_EXPERTS = 0.2
# Inputs become whole numbers of this many bits (relative to their column's largest), so that sums of products are exact
# in float64 and do not depend on who adds them up in which order.
INPUT_BITS = 14
# What the triangular factor is rounded to: coarse enough to hide the last bits of another LAPACK.
FEEDBACK_STEP = 2.0**-14

ROWS_AT_ONCE = 1024

# The matrices whose inputs a stage is.
STAGES = {
    "attn_norm": ("attn_q", "attn_k", "attn_v"),
    "attn_mix": ("attn_out",),
    "ffn_norm": ("ffn_gate", "ffn_up"),
    "ffn_hidden": ("ffn_down",),
}
ROUTER = "ffn_router"  # the stage by which an expert's inputs are told


class Inputs(NamedTuple):
    """Where a matrix has its inputs from: a stage of a layer, and of which expert alone (-1: of all rows)."""

    stage: str
    layer: int = 0
    expert: int = -1


class Calibration:
    """The inputs of a model's matrices over a text, in a temporary file. A context manager."""

    def __init__(self, config: ModelConfig, folder: Path) -> None:
        self._config = config
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  closed by __exit__
        self._places: dict[Inputs, list[tuple[int, tuple[int, int]]]] = {}
        self._chosen: dict[int, list[NDArray[np.int16]]] = {}  # per layer each row's experts, ascending
        self._last: tuple[Inputs, Lesson] | None = None

    def __enter__(self) -> Calibration:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, stage: str, layer: int, rows: Floats) -> None:
        """Keeps inputs (n, columns), as bf16: second moments need no more. Of ROUTER's stage it keeps the choice."""
        if stage == ROUTER:
            self._chosen.setdefault(layer, []).append(chosen_experts(rows, self._config.layers[layer]))
            return
        if stage == "ffn_hidden":
            rows = rows[:, : hidden_width(self._config.layers[layer])]  # the stage is as wide as the widest layer needs
        bits = np.ascontiguousarray(rows).view(np.uint32)
        self._places.setdefault(Inputs(stage, layer), []).append((self._file.tell(), rows.shape))
        self._file.write(((bits + 0x8000) >> 16).astype("<u2").tobytes())

    def lesson(self, name: str) -> Lesson | None:
        """What the inputs of the matrix `name` teach; None for one without any: it is only looked up in, or it is a
        matrix of an expert that no row was routed to."""
        source = self._source(name)
        if source is None:
            return None
        if self._last is None or self._last[0] != source:  # matrices that share inputs lie side by side
            self._last = None
            inputs = self.inputs(name)
            if inputs is None:
                return None
            n, columns = inputs.shape
            damping = DAMPING + (DAMPING_OF_EXPERTS * columns / n if source.expert >= 0 else 0)
            self._last = (source, lesson_of(inputs, damping))
        return self._last[1]

    def inputs(self, name: str) -> Floats | None:
        """The inputs of the matrix `name` (n, columns), or None if it has none."""
        source = self._source(name)
        if source is None:
            return None
        parts = [self._rows(source, index) for index in range(len(self._places.get(source._replace(expert=-1), [])))]
        found = np.concatenate(parts) if parts else np.empty((0, 0), np.uint16)
        return (found.astype(np.uint32) << 16).view(np.float32) if len(found) else None

    def _rows(self, source: Inputs, index: int) -> NDArray[np.uint16]:
        """The bf16 numbers of the part `index` of a stage: all of it, or what an expert has of it."""
        place, shape = self._places[source._replace(expert=-1)][index]
        self._file.flush()
        kept = np.memmap(self._file, "<u2", "r", place, shape)
        if source.expert < 0:
            return np.array(kept)
        rows, turns = np.nonzero(self._chosen[source.layer][index] == source.expert)
        if source.stage == "ffn_norm":
            return np.array(kept[rows])
        width = self._config.layers[source.layer].ffn_dim  # a row holds what its experts have in it, one after another
        columns = turns[:, None] * width + np.arange(width)
        return np.array(kept[rows[:, None], columns])

    def _source(self, name: str) -> Inputs | None:
        """Where the matrix `name` has its inputs from; None for one without any that are kept."""
        head = "token_embedding.weight" if self._config.tied_output else "output.weight"
        if name == head:
            return Inputs("output_norm")
        parts = name.split(".")
        if parts[0] != "layers":
            return None
        expert = int(parts[3]) if parts[2] == "experts" else -1
        found = [stage for stage, kinds in STAGES.items() if parts[-2] in kinds]
        return Inputs(found[0], int(parts[1]), expert) if found else None


def hidden_width(layer: LayerConfig) -> int:
    """The hidden numbers of a row: those of all its experts, one after another, or of the one network there is."""
    return layer.ffn_dim * max(1, layer.n_experts_used)


def chosen_experts(logits: Floats, layer: LayerConfig) -> NDArray[np.int16]:
    """Each row's experts (n, n_experts_used), ascending: those with the largest logits, the lowest among equals."""
    order = np.argsort(-logits[:, : layer.n_experts], axis=1, kind="stable")
    return np.sort(order[:, : layer.n_experts_used], axis=1).astype(np.int16)


def lesson_of(inputs: Floats, damping: float = DAMPING) -> Lesson:
    """The lesson of inputs (n, columns)."""
    tops = np.abs(inputs).max(axis=0)
    _, exponents = np.frexp(np.where(tops > 0, tops, 1))
    steps = np.ldexp(1.0, exponents - INPUT_BITS)
    square: Doubles = np.zeros((len(steps), len(steps)))
    for first in range(0, len(inputs), ROWS_AT_ONCE):
        whole = np.rint(inputs[first : first + ROWS_AT_ONCE] / steps)
        square += whole.T @ whole  # exact: whole numbers below 2^53
    square *= steps[:, None]
    square *= steps / len(inputs)
    diagonal = np.einsum("ii->i", square)  # a view
    mean = float(diagonal.sum()) / len(square)
    if mean == 0:
        return Lesson(np.ones(len(square), np.float32), None)
    diagonal += damping * mean
    # the factor with ones on its diagonal: H = R R^T with R upper triangular is the usual Cholesky of H turned round
    factor = np.linalg.cholesky(square[::-1, ::-1])[::-1, ::-1]
    roots = np.diag(factor).copy()
    importance = (roots / roots.max()) ** 2
    feedback = np.rint(factor / roots / FEEDBACK_STEP) * FEEDBACK_STEP
    return Lesson(_rounded(importance), np.ascontiguousarray(feedback, np.float32))


def _rounded(x: Doubles) -> Floats:
    """Numbers with 10 bits: the last bits are another LAPACK's business."""
    fractions, exponents = np.frexp(x)
    rounded: Floats = np.ldexp(np.rint(fractions * 1024) / 1024, exponents).astype(np.float32)
    return rounded


# ---- the text


def disk_bytes(checkpoint: Checkpoint, dtype: str, file_bytes: int) -> int:
    """What a calibrated export to a file of `file_bytes` takes of the disk at most: the inputs, and beside them first
    the float model with matrices in `dtype`, then the file."""
    config = checkpoint.config
    count, length = _size(config)
    columns = len(config.layers) * (2 * config.dim + config.n_heads * config.head_dim) + config.dim
    columns += sum(map(hidden_width, config.layers))
    return 2 * count * length * columns + max(file_bytes, _float_plan(checkpoint, dtype).file_bytes)


def _float_plan(checkpoint: Checkpoint, dtype: str) -> Plan:
    texts = dict.fromkeys(("tokenizer", "spm", "template", "probes"), b"")
    return make_plan(checkpoint, dtype, {"metadata": b"{}", **texts})


def _size(config: ModelConfig) -> tuple[int, int]:
    """(how many sequences are read, their tokens)."""
    length = min(SEQUENCE, config.context)
    return max(1, TOKENS // length), length


@contextlib.contextmanager
def float_model(checkpoint: Checkpoint, folder: Path, dtype: str, threads: int) -> Iterator[llamac.Model]:
    """The engine over the checkpoint's weights, in a temporary file in `folder`, with matrices in `dtype`."""
    with tempfile.TemporaryDirectory(prefix=".llamac-calibration.", dir=folder) as place:
        with open(Path(place, "model.bin"), "w+b") as file:
            write(file, _float_plan(checkpoint, dtype))
        with llamac.load(Path(place, "model.bin"), kv="f32", threads=threads) as model:
            yield model


def calibrate(
    checkpoint: Checkpoint,
    model: llamac.Model,
    sequences: list[list[int]] | None,
    folder: Path,
    progress: Progress = silent,
) -> Calibration:
    """Runs `model`, which holds the checkpoint's weights, over sequences of tokens or, without them, over TOKENS tokens
    of its own. folder: where the temporary file lies."""
    if sequences is None:
        sequences = _own_text(checkpoint, model, progress)
    length = len(sequences[0])
    made = Calibration(checkpoint.config, folder)
    try:
        routers = [(ROUTER, index) for index, layer in enumerate(checkpoint.config.layers) if layer.ffn == "experts"]
        stages: list[str | tuple[str, int]] = [*STAGES, *routers, "output_norm"]
        with model.session(context=length) as session, few_pages(model.file):
            for done, ids in enumerate(sequences):
                progress("calibrating", done, len(sequences))
                session.rewind(0)
                for first in range(0, length, OBSERVED):
                    for (stage, layer), rows in session.observe(ids[first : first + OBSERVED], stages).items():
                        made.add(stage, layer, rows)
        progress("calibrating", len(sequences), len(sequences))
    except BaseException:
        made.__exit__(None, None, None)
        raise
    return made


def sequences_of(checkpoint: Checkpoint, text: str) -> list[list[int]]:
    """TOKENS tokens of a text, or what it has of them, in sequences spread evenly over it, each with BOS by the model's
    rule. Raises ExportError if there is no tokenizer, or too little text."""
    count, length = _size(checkpoint.config)
    if checkpoint.tokenizer is None:
        raise ExportError("calibration on a text needs a tokenizer: give one, or let the model write its own text")
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


def _own_text(checkpoint: Checkpoint, model: llamac.Model, progress: Progress) -> list[list[int]]:
    """Sequences that the model writes, drawn from its own probabilities: the same on every machine."""
    config = checkpoint.config
    count, length = _size(config)
    bos = checkpoint.tokenizer[1].bos_id if checkpoint.tokenizer is not None else None
    done: list[list[int]] = []
    for first in range(0, count, BATCH):
        group = range(first, min(first + BATCH, count))
        # without a BOS a text begins with any token
        texts = [[bos if bos is not None else number * 7919 % config.n_token_ids] for number in group]
        with model.session(sequences=len(group), context=length) as session, few_pages(model.file):
            for position in range(length - 1):
                progress("writing a text", first * (length - 1) + len(group) * position, count * (length - 1))
                rows = [(text[-1], i, position, True) for i, text in enumerate(texts)]
                logits = session.eval_rows(rows)[:, : config.n_token_ids]
                for number, row, text in zip(group, logits, texts, strict=True):
                    draw = _core.Sampling(temperature=1.0, seed=number)
                    text.append(_core.sample(np.ascontiguousarray(row).data, draw, position))
        done += texts
    progress("writing a text", count * (length - 1), count * (length - 1))
    return done
