"""Calibration: measures the inputs of each matrix on sample text, and derives which quantization errors matter.

The engine runs the source's weights over the text and writes the inputs of each product to a temporary file. For a
matrix W with inputs x, the error that matters is that of W x. If a row of W has the error e, it is the mean of (e x)^2
over the text, e H e^T with H = mean(x x^T). With H = (I + U) diag(d) (I + U)^T, U strictly upper triangular, it equals
the sum over columns k of d_k (e_k + sum_{j<k} e_j U_jk)^2. So the quantizer rounds the columns in order. Before it
rounds a column, it adds the shares U_jk of the earlier errors; then it only has to minimize the column's own rounding
error, weighted by d_k. This is GPTQ (Frantar et al., arXiv:2210.17323) in the form of Chee et al. (QuIP,
arXiv:2307.13304, "LDLQ").
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamac.engine.model import Model
from llamac.engine.session_defaults import SessionDefaults
from llamac.errors import ExportError
from llamac.export.checkpoint import Checkpoint, LayerConfig, ModelConfig
from llamac.export.dtypes import exact_dtype
from llamac.export.equations import chosen_experts
from llamac.export.flat.plan import Plan, make_plan
from llamac.export.flat.stream import write_file
from llamac.export.quantize import CalibrationStats
from llamac.export.residency import bounded_residency
from llamac.export.texts import generated
from llamac.format.flatfile import FlatFile
from llamac.progress import Progress, silent
from llamac.text.tokenizer import Tokenizer

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

TOKENS = 4096
# Tokens per sequence. The first few positions have too little context to be typical; more than this changes little.
SEQUENCE = 256
OBSERVED = 64  # tokens whose stages of all layers are in memory at once
# Added to the diagonal of H, as a share of its mean, for columns that the text never used.
DAMPING = 0.01
# Added for experts, times columns / rows, because few rows span only some directions.
EXPERT_DAMPING = 0.2
# Inputs are rounded to integers of this many bits, relative to their column's largest. Sums of their products are then
# exact in float64, and do not depend on the order of the additions.
INPUT_BITS = 14
# The triangular factor is rounded to multiples of this, which hides differences between LAPACK implementations.
FEEDBACK_STEP = 2.0**-14

FEEDBACK_ROWS = 64  # of the triangular factor that are rounded at once, in the processor's cache

# The matrices that each stage is the input of.
STAGES = {
    "attn_norm": ("attn_q", "attn_k", "attn_v", "attn_q_a", "attn_kv_a", "mamba_z", "mamba_xbc", "mamba_dt"),
    "attn_mix": ("attn_out", "mamba_out"),
    "ffn_norm": ("ffn_gate", "ffn_up", "shared_ffn_gate", "shared_ffn_up"),
    "ffn_hidden": ("ffn_down", "shared_ffn_down"),
}
ROUTER = "ffn_router"  # the stage that shows which rows each expert gets
ALL_ROWS, SHARED, OF_STATE = -1, -2, -3  # instead of an expert's number


class InputSource(NamedTuple):
    """The stage that a matrix's inputs come from.

    Attributes:
        stage: A key of STAGES, or "output_norm", which is of no layer.
        layer: The layer's number.
        expert: The expert whose rows count; ALL_ROWS; SHARED, for the hidden values of the shared expert; or
            OF_STATE, for the results of Mamba 2, which follow those of attention.
    """

    stage: str
    layer: int = 0
    expert: int = ALL_ROWS


class Calibration:
    """The inputs of a model's matrices on sample text, in a temporary file. A context manager.

    Args:
        checkpoint: The model. Of its tensors only biases of routers are read.
        folder: Where to create the temporary file.
    """

    def __init__(self, checkpoint: Checkpoint, folder: Path) -> None:
        self._config = checkpoint.config
        self._choice_biases = {
            layer: checkpoint.tensors[f"layers.{layer}.ffn_router_choice.bias"].array()
            for layer, record in enumerate(checkpoint.config.layers)
            if record.router_choice_bias
        }
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
        """Write rows of a stage to the file as bf16, which is precise enough for second moments.

        Args:
            stage: The stage. For the router's, only the choice of experts is stored.
            layer: The layer.
            rows: Shape (n, columns).
        """
        if stage == ROUTER:
            self._chosen.setdefault(layer, []).append(self._experts(layer, rows))
            return
        # a stage is as wide as the widest layer
        if stage == "ffn_hidden":
            rows = rows[:, : hidden_width(self._config.layers[layer])]
        if stage == "attn_mix":
            rows = rows[:, : sum(mix_widths(self._config, self._config.layers[layer]))]
        bits = np.ascontiguousarray(rows).view(np.uint32)
        self._blocks.setdefault(InputSource(stage, layer), []).append((self._file.tell(), rows.shape))
        self._file.write(((bits + 0x8000) >> 16).astype("<u2").tobytes())

    def _experts(self, layer: int, logits: Floats) -> NDArray[np.int16]:
        """The experts of each row in ascending order, (n, n_experts_used). logits: padded to the widest layer's."""
        record = self._config.layers[layer]
        chosen = chosen_experts(
            logits[:, : record.n_experts],
            record.n_experts_used,
            router=record.router,
            choice_bias=self._choice_biases.get(layer),
            groups=(record.n_expert_groups, record.n_expert_groups_used),
        )
        return np.nonzero(chosen)[1].reshape(len(chosen), -1).astype(np.int16)

    def stats(self, name: str) -> CalibrationStats | None:
        """Compute the statistics of a matrix's inputs.

        Returns:
            The statistics, or None if there are no inputs: for an embedding, or an expert that got no rows.
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
        """Read the inputs of a matrix.

        Returns:
            The inputs, shape (n, columns), or None as for `stats`.
        """
        source = self._source(name)
        if source is None:
            return None
        n_blocks = len(self._blocks.get(source._replace(expert=ALL_ROWS), []))
        parts = [self._read_block(source, index) for index in range(n_blocks)]
        found = np.concatenate(parts) if parts else np.empty((0, 0), np.uint16)
        return (found.astype(np.uint32) << 16).view(np.float32) if len(found) else None

    def _read_block(self, source: InputSource, index: int) -> NDArray[np.uint16]:
        """Block `index` of a stage as bf16: all of it, or one expert's part."""
        offset, shape = self._blocks[source._replace(expert=ALL_ROWS)][index]
        self._file.flush()
        block = np.memmap(self._file, "<u2", "r", offset, shape)
        layer = self._config.layers[source.layer]
        if source.expert == SHARED:  # follows the row's other experts
            return np.array(block[:, layer.ffn_dim * layer.n_experts_used :])
        if source.stage == "attn_mix":
            first = mix_widths(self._config, layer)[0]
            return np.array(block[:, first:] if source.expert == OF_STATE else block[:, : first or None])
        if source.expert == ALL_ROWS:
            return np.array(block)
        rows, slots = np.nonzero(self._chosen[source.layer][index] == source.expert)
        if source.stage == "ffn_norm":
            return np.array(block[rows])
        width = layer.ffn_dim  # a row has the hidden values of its experts consecutively
        columns = slots[:, None] * width + np.arange(width)
        return np.array(block[rows[:, None], columns])

    def _source(self, name: str) -> InputSource | None:
        """Where the inputs of matrix `name` come from, or None if they are not stored."""
        head = "token_embedding.weight" if self._config.tied_output else "output.weight"
        if name == head:
            return InputSource("output_norm")
        parts = name.split(".")
        if parts[0] != "layers" or int(parts[1]) >= len(self._config.layers):  # the MTP layer computes nothing here
            return None
        kinds = {"shared_ffn_down": SHARED, "mamba_out": OF_STATE}
        expert = int(parts[3]) if parts[2] == "experts" else kinds.get(parts[2], ALL_ROWS)
        if parts[2] == "attn_q" and self._config.layers[int(parts[1])].q_lora_rank:
            return None  # no stage shows the latent of q
        found = [stage for stage, modules in STAGES.items() if parts[-2] in modules]
        has_own_inputs = self._config.expert_dim or self._config.layers[int(parts[1])].expert_norms
        if expert >= 0 and found[0] == "ffn_norm" and has_own_inputs:
            return None  # a latent, or rows with a norm of their own; the stage has the rows of the whole layer
        return InputSource(found[0], int(parts[1]), expert) if found else None


def hidden_width(layer: LayerConfig) -> int:
    """The number of hidden values of a row, in all of its experts or in the layer's only network."""
    return layer.ffn_dim * max(1, layer.n_experts_used) + layer.shared_ffn_dim


def mix_widths(config: ModelConfig, layer: LayerConfig) -> tuple[int, int]:
    """The inputs of a layer's attn_out, and those of its mamba_out or of what another mixer has in its place."""
    of_attention = (layer.n_heads or config.n_heads) * (layer.v_head_dim or layer.head_dim or config.head_dim)
    of_state = config.dim if layer.mixer == "short_conv" else layer.state_heads * layer.state_value_dim
    return of_attention if layer.mixer.startswith("attention") else 0, of_state


def input_stats(inputs: Floats, damping: float = DAMPING) -> CalibrationStats:
    """Compute the statistics of a matrix's inputs.

    Args:
        inputs: Shape (n, columns).
        damping: The share of the diagonal's mean that is added to the diagonal.
    """
    peaks = np.abs(inputs).max(axis=0)
    _, exponents = np.frexp(np.where(peaks > 0, peaks, 1))
    steps = np.ldexp(1.0, exponents - INPUT_BITS)
    # one product of all rows: it takes half the time of four products of a quarter of them and their sum
    moments = _squares(inputs, steps)  # exact: integers below 2^53
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
    return CalibrationStats(_rounded(importance), _feedback(factor, roots))


def _squares(inputs: Floats, steps: Doubles) -> Doubles:
    """The sums of products of each two columns, in units of their steps."""
    integers = inputs / steps
    np.rint(integers, out=integers)
    products: Doubles = integers.T @ integers
    return products


def _feedback(factor: NDArray[np.floating[Any]], roots: NDArray[np.floating[Any]]) -> Floats:
    """The triangular factor with a diagonal of 1, rounded to multiples of FEEDBACK_STEP."""
    feedback = np.empty(factor.shape, np.float32)
    for first in range(0, len(factor), FEEDBACK_ROWS):
        rows = slice(first, first + FEEDBACK_ROWS)
        feedback[rows] = np.rint(factor[rows] / roots / FEEDBACK_STEP) * FEEDBACK_STEP
    return feedback


def _rounded(x: Doubles) -> Floats:
    """Round to 10 bits, which hides differences between LAPACK implementations."""
    fractions, exponents = np.frexp(x)
    rounded: Floats = np.ldexp(np.rint(fractions * 1024) / 1024, exponents).astype(np.float32)
    return rounded


# ---- the float model


def disk_bytes(checkpoint: Checkpoint, file_bytes: int) -> int:
    """Compute the largest disk space that a calibrated export takes: the inputs, and the float model or the target.

    Args:
        checkpoint: The model.
        file_bytes: The target's size.
    """
    config = checkpoint.config
    count, length = _text_size(config)
    columns = len(config.layers) * (2 * config.dim + config.n_heads * config.head_dim) + config.dim
    columns += sum(map(hidden_width, config.layers))
    return 2 * count * length * columns + max(file_bytes, float_bytes(checkpoint))


def float_bytes(checkpoint: Checkpoint) -> int:
    """The size of the file that `float_model` writes."""
    return _float_plan(checkpoint).file_bytes


def _float_plan(checkpoint: Checkpoint) -> Plan:
    return make_plan(checkpoint, exact_dtype(checkpoint.tensors))


@contextlib.contextmanager
def float_model(checkpoint: Checkpoint, folder: Path, threads: int) -> Iterator[Model]:
    """Write the checkpoint's unquantized weights to a temporary file, and open it.

    Args:
        checkpoint: The model.
        folder: Where to create the file.
        threads: The number of threads of its sessions.

    Yields:
        The opened model.
    """
    path = folder / "float.bin"
    try:
        with open(path, "w+b") as file:
            write_file(file, _float_plan(checkpoint), threads=threads)
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
    """Run a model over sequences of tokens and store the inputs of its matrices.

    Args:
        checkpoint: The checkpoint.
        model: Its weights, from `float_model`.
        sequences: Token ids, of equal length. None: TOKENS tokens that the model generates.
        folder: Where to create the temporary file.
        progress: Called with the phases "generating text" and "calibrating".
    """
    if sequences is None:
        sequences = _generated_sequences(checkpoint, model, progress)
    length = len(sequences[0])
    calibration = Calibration(checkpoint, folder)
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
    """Tokenize up to TOKENS tokens of text, in sequences spread evenly over it.

    Args:
        checkpoint: The model.
        text: The text.

    Returns:
        Token ids of sequences of equal length. Each begins with the tokens that the tokenizer puts before a prompt.

    Raises:
        ExportError: If the checkpoint has no tokenizer, or the text is too short for one sequence.
    """
    count, length = _text_size(checkpoint.config)
    if checkpoint.tokenizer is None:
        raise ExportError("calibration on text needs a tokenizer: pass one, or use --calibrate self")
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
    """Sequences sampled from the model: the same ones on every machine."""
    bos = checkpoint.tokenizer[1].bos_id if checkpoint.tokenizer is not None else None
    return generated(model, bos, *_text_size(checkpoint.config), progress)
