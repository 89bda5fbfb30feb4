"""Embeddings: one vector per text, pooled from the normalized outputs of its tokens."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from llamac.arguments import whole_number, wrong_type
from llamac.engine.rows import STAGES, appended_rows, known_ids
from llamac.engine.scoring.cancellation import Cancellation
from llamac.engine.scoring.passes import PASS_ROWS, PASS_SEQUENCES, contexts_for
from llamac.errors import ArgumentError, ContextFullError, UnsupportedError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llamac.engine.model import Model
    from llamac.engine.session import Session
    from llamac.progress import Progress

    Vectors = NDArray[np.float32]

Text: TypeAlias = str | Sequence[int]  # or its token ids
Texts: TypeAlias = Text | Sequence[Text]
Pooling = Literal["last", "mean"]
POOLINGS: tuple[Pooling, ...] = ("last", "mean")

OUTPUT_NORM = STAGES.index("output_norm")
NO_LOGITS = array("f")


def pooling_of(model: Model, pooling: str | None) -> Pooling:
    """Return the pooling to use: the argument, the file's setting, or "last".

    Raises:
        ArgumentError: If the argument is neither "last" nor "mean".
        UnsupportedError: If the argument is None and the file requires another pooling.
    """
    found = next((name for name in POOLINGS if name == pooling), None)
    if found is not None:
        return found
    if pooling is not None:
        raise ArgumentError(f"pooling is {pooling!r}, expected 'last' or 'mean'")
    stored = model.file.metadata.get("pooling", "last")
    found = next((name for name in POOLINGS if name == stored), None)
    if found is None:
        raise UnsupportedError(f"the model requires pooling {stored!r}, which llamac does not support: choose another")
    return found


def text_ids(
    model: Model, texts: Sequence[Text], cancel: Cancellation, *, parse_special: bool = False
) -> list[array[int]]:
    """Return the token ids of each text, with BOS and EOS by the model's rules. Token ids are used unchanged.

    Raises:
        ContextFullError: If a text does not fit the context.
        ArgumentError: If a text has no tokens, or an id is not in the vocabulary.
    """
    context = model._context_limit(None)
    found = []
    for i, text in enumerate(texts):
        cancel.check()
        name = f"texts[{i}]"
        try:
            if isinstance(text, str):
                encode = partial(model.tokenizer.encode, add_special=True, parse_special=parse_special, limit=context)
                ids = array("i", cancel.convert(partial(encode, text), len(text)))
            elif isinstance(text, Iterable):
                ids = known_ids(text, model.config["vocab_size"], name)
                if len(ids) > context:
                    raise ContextFullError(f"{len(ids)} tokens")
            else:
                raise wrong_type(name, text, "a str or token ids")
        except ContextFullError as error:
            raise ContextFullError(f"{name}: {error}; the context holds {context} positions: split it") from None
        if not ids:
            raise ArgumentError(f"{name} has no tokens: expected some text")
        found.append(ids)
    return found


def embed(
    model: Model,
    texts: Texts,
    pooling: str | None,
    normalize: bool,
    dimensions: int | None,
    parse_special: bool,
    report: Progress,
    cancel: Cancellation | None,
) -> Vectors:
    """Compute the embeddings of texts; see `Model.embed`."""
    import numpy as np

    cancel = cancel or Cancellation()
    chosen = pooling_of(model, pooling)
    dim: int = model.config["dim"]
    kept = dim if dimensions is None else whole_number(dimensions, "dimensions")
    if not 1 <= kept <= dim:
        raise ArgumentError(f"dimensions is {kept}, expected 1 to {dim}, the model's")
    given: list[Any] = [texts] if isinstance(texts, str) else list(texts)
    is_single = isinstance(texts, str) or (len(given) > 0 and isinstance(given[0], Integral))
    listed = [given] if is_single and not isinstance(texts, str) else given
    ids = text_ids(model, listed, cancel, parse_special=parse_special)
    vectors = np.empty((len(ids), kept), np.float32)
    done = 0
    report("embedding", done, len(ids))

    def compute(session: Session, batch: list[int]) -> None:
        for i, pooled in zip(batch, _pooled(session, [ids[i] for i in batch], chosen), strict=True):
            cut = pooled[:kept]
            length = float(np.sqrt(np.square(cut).sum())) if normalize else 1.0
            vectors[i] = cut / (length or 1.0)

    for context, group in contexts_for(model, [len(tokens) for tokens in ids]):
        with model.session(context=context, sequences=min(PASS_SEQUENCES, max(1, len(group)))) as session:
            for batch in _passes(ids, group):
                cancel.run(session, partial(compute, session, batch))
                done += len(batch)
                report("embedding", done, len(ids))
    return vectors[0] if is_single else vectors


def _passes(ids: Sequence[array[int]], group: Sequence[int]) -> Iterator[list[int]]:
    """Group the indices of texts that are computed together: texts of similar length, the longest first."""
    batch: list[int] = []
    rows = 0
    for i in sorted(group, key=lambda i: -len(ids[i])):
        if batch and (rows + len(ids[i]) > PASS_ROWS or len(batch) == PASS_SEQUENCES):
            yield batch
            batch, rows = [], 0
        batch.append(i)
        rows += len(ids[i])
    if batch:
        yield batch


def _pooled(session: Session, ids: Sequence[array[int]], pooling: Pooling) -> Iterator[NDArray[np.float64]]:
    """Yield the pooled output of each text. The session's sequences must be empty, and are empty again afterwards."""
    import numpy as np

    rows = array("i")
    for sequence, tokens in enumerate(ids):
        rows += appended_rows(tokens, sequence, 0, "all" if pooling == "mean" else "last")
    n = sum(rows[3::4])
    norms = np.empty((n, session.model.config["dim"]), np.float32)
    try:
        session._run(rows, NO_LOGITS, [(OUTPUT_NORM, 0, norms.reshape(-1))])
    finally:
        for sequence in range(len(ids)):
            session.truncate(0, sequence=sequence)
    first = 0
    for tokens in ids:
        last = first + (len(tokens) if pooling == "mean" else 1)
        yield norms[first:last].mean(axis=0, dtype=np.float64)
        first = last
