"""Pooled outputs of texts: the output norm of the tokens, pooled, through the dense layers that follow in the model."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from llamac import _core
from llamac.arguments import NUMERICS
from llamac.engine.rows import STAGES, appended_rows
from llamac.engine.scoring.passes import PASS_ROWS, PASS_SEQUENCES, contexts_for
from llamac.errors import ArgumentError, UnsupportedError
from llamac.format.flatfile import FIELDS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llamac.engine.model import Model
    from llamac.engine.scoring.cancellation import Cancellation
    from llamac.engine.session import Session
    from llamac.progress import Progress

    Vectors = NDArray[np.float64]

Pooling = Literal["last", "mean", "cls", "max", "mean_sqrt_len", "weightedmean"]
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)
JOINED = "+"  # between the names of poolings whose vectors are concatenated
LATE = "late"  # for cross-encoders: the mean of the first dense layer's outputs for all tokens

OUTPUT_NORM = STAGES.index("output_norm")
NO_LOGITS = array("f")
DTYPES = dict(_core.dtypes())
ACTIVATION = next(field for field in FIELDS["config"] if field.name == "activation")
GELU_ERF = ACTIVATION.names.index("gelu_erf") + int(ACTIVATION.low)
# On the CPU, an encoder computes the layers of up to this many rows in one go; with more it computes keys and values
# separately.
ENCODER_ROWS = 256


class Tokens(NamedTuple):
    """A text.

    Attributes:
        ids: Its token ids.
        types: The types of its tokens, if not all are 0.
        skipped: How many of its first tokens are not pooled.
    """

    ids: array[int]
    types: array[int] | None = None
    skipped: int = 0


def pooling_of(model: Model, pooling: str | None) -> str:
    """Return the pooling to use: the argument, the file's setting, or "last". A file can join several by `JOINED`.

    Raises:
        ArgumentError: If the argument is not one of `POOLINGS`.
        UnsupportedError: If the argument is None and the file requires another pooling.
    """
    if pooling is not None:
        if pooling not in POOLINGS:
            raise ArgumentError(f"pooling is {pooling!r}, expected {', '.join(map(repr, POOLINGS))}")
        return pooling
    stored = model.file.metadata.get("pooling", "last")
    if stored == LATE and model.config["scores_pairs"]:
        return LATE
    names = stored.split(JOINED) if isinstance(stored, str) else []
    is_fed_whole = len(names) > 1 and model.config["n_pooled"] > 0  # the dense layer reads only one vector
    if not isinstance(stored, str) or not {*names} <= {*POOLINGS} or is_fed_whole:
        raise UnsupportedError(f"the model requires pooling {stored!r}, which llamac does not support: choose another")
    return stored


def width_of(model: Model, pooling: str) -> int:
    """The width of a pooled output."""
    n: int = model.config["n_pooled"]
    width: int = model.config["pooled_dim"][n - 1] if n else model.config["dim"] * len(pooling.split(JOINED))
    return width


def pooled_outputs(
    model: Model, texts: Sequence[Tokens], pooling: str, phase: str, report: Progress, cancel: Cancellation
) -> Vectors:
    """Compute the pooled output of each text, (n, width). The bits do not depend on the other texts.

    Args:
        model: The model.
        texts: The texts, which fit its context.
        pooling: How to pool, as `pooling_of` returns it.
        phase: The phase of the progress, which counts texts.
        report: The progress.
        cancel: Ends the computation.
    """
    import numpy as np

    layers = [_Layer(model, index) for index in range(model.config["n_pooled"])]
    outputs = np.empty((len(texts), width_of(model, pooling)))
    done = 0
    report(phase, done, len(texts))

    def compute(session: Session, batch: list[int]) -> None:
        n_before = int(pooling == LATE)
        per_token = partial(layers[0], session) if n_before else None
        pooled = np.stack(list(_pooled(session, [texts[i] for i in batch], pooling, per_token)))
        for layer in layers[n_before:]:
            pooled = layer(session, pooled)
        outputs[batch] = pooled

    for context, group in contexts_for(model, [len(text.ids) for text in texts]):
        with model.session(context=context, sequences=min(PASS_SEQUENCES, max(1, len(group)))) as session:
            is_in_one_go = model.config["two_sided"] and session.device == "cpu"
            for batch in _passes(texts, group, ENCODER_ROWS if is_in_one_go else PASS_ROWS):
                cancel.run(session, partial(compute, session, batch))
                done += len(batch)
                report(phase, done, len(texts))
    return outputs


def _passes(texts: Sequence[Tokens], group: Sequence[int], max_rows: int) -> Iterator[list[int]]:
    """Group the indices of texts that are computed together: texts of similar length, the longest first."""
    batch: list[int] = []
    rows = 0
    for i in sorted(group, key=lambda i: -len(texts[i].ids)):
        if batch and (rows + len(texts[i].ids) > max_rows or len(batch) == PASS_SEQUENCES):
            yield batch
            batch, rows = [], 0
        batch.append(i)
        rows += len(texts[i].ids)
    if batch:
        yield batch


def _pooled(
    session: Session, texts: Sequence[Tokens], pooling: str, per_token: Callable[[Vectors], Vectors] | None
) -> Iterator[Vectors]:
    """Yield the pooled output norm of each text. The session's sequences must be empty, and are empty afterwards.

    per_token: Applied to the output norms of a text's tokens before pooling; None: nothing is.
    """
    import numpy as np

    rows, types = array("i"), array("i")
    pooled_rows = [_pooled_rows(text, pooling) for text in texts]
    for sequence, (text, wanted) in enumerate(zip(texts, pooled_rows, strict=True)):
        added = appended_rows(text.ids, sequence, 0, None)
        added[4 * wanted.start + 3 : 4 * wanted.stop : 4] = array("i", [1]) * len(wanted)
        rows += added
        types += text.types or array("i", bytes(4 * len(text.ids)))
    norms = np.empty((sum(rows[3::4]), session.model.config["dim"]), np.float32)
    try:
        observations: list[tuple[int, int, Any]] = [(OUTPUT_NORM, 0, norms.reshape(-1))]
        given = types if any(types) else None
        session._recovering(
            lambda: session._core.eval_rows(rows, NO_LOGITS, observations, session._prepare, None, given), rows
        )
    finally:
        for sequence in range(len(texts)):
            session.truncate(0, sequence=sequence)
    first = 0
    for wanted in pooled_rows:
        last = first + len(wanted)
        rows_of_text = (norms[first:last] if per_token is None else per_token(norms[first:last])).astype(np.float64)
        yield np.concatenate([_one_row(name, rows_of_text, wanted.start) for name in pooling.split(JOINED)])
        first = last


def _pooled_rows(text: Tokens, pooling: str) -> range:
    """The rows of a text that are pooled."""
    n = len(text.ids)
    return {"last": range(n - 1, n), "cls": range(text.skipped, text.skipped + 1)}.get(pooling, range(text.skipped, n))


def _one_row(name: str, rows: Vectors, first: int) -> Vectors:
    """Pool rows, the first of which has the position `first`."""
    import numpy as np

    if name in ("last", "cls"):
        return np.asarray(rows[-1 if name == "last" else 0])
    if name == "max":
        return np.asarray(rows.max(axis=0))
    if name == "weightedmean":
        weights = np.arange(first + 1, first + 1 + len(rows), dtype=np.float64)[:, None]
        return np.asarray((weights * rows).sum(axis=0) / weights.sum())  # the bits of a product depend on the machine
    mean = rows.mean(axis=0)
    return np.asarray(mean * len(rows) ** 0.5 if name == "mean_sqrt_len" else mean)


class _Layer:
    """A dense layer after pooling: act(W x + b), and a layer norm without bias if the file says so."""

    def __init__(self, model: Model, index: int) -> None:
        record, self._strips = model.file.stored(f"pooled.{index}.weight")
        self._dtype, self._rows = DTYPES[record.dtype], record.shape[0]
        names = {tensor.name for tensor in model.file.tensors}
        self._bias, self._norm = (
            model.file.tensor(name) if name in names else None
            for name in (f"pooled.{index}.bias", f"pooled.{index}.norm.weight")
        )
        self._activation: str = model.config["pooled_activation"][index]
        self._norm_eps: float = model.config["norm_eps"]

    def __call__(self, session: Session, x: Vectors) -> Vectors:
        """Compute the layer for the rows of x, (n, columns) -> (n, rows)."""
        import numpy as np

        y = np.empty((len(x), self._rows), np.float32)
        numerics = NUMERICS.index(session.numerics)
        inputs = np.ascontiguousarray(x, np.float32)
        bias = None if self._bias is None else self._bias.data
        _core.op_matmul(self._dtype, self._strips, inputs.data, bias, numerics, y.data, session.isa, 1)
        if self._activation == "gelu_erf":
            _core.op_activate(GELU_ERF, y.data, y.data, session.isa)
        wide = y.astype(np.float64)
        if self._activation == "relu":
            wide = np.maximum(wide, 0)
        elif self._activation == "tanh":
            wide = np.tanh(wide)
        elif self._activation == "sigmoid":
            with np.errstate(over="ignore"):  # exp(-x) = inf gives the right limit, 0
                wide = np.asarray(1 / (1 + np.exp(-wide)))
        if self._norm is None:
            return wide
        rounded = wide.astype(np.float32)
        _core.op_norm(False, rounded.data, self._norm.data, None, self._norm_eps, y.data, session.isa)
        return y.astype(np.float64)
