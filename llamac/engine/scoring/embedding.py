"""Embeddings: one vector per text, pooled from the normalized outputs of its tokens."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeAlias

from llamac.arguments import whole_number, wrong_type
from llamac.engine.rows import known_ids
from llamac.engine.scoring.cancellation import Cancellation
from llamac.engine.scoring.pooled import Tokens, pooled_outputs, pooling_of, width_of
from llamac.errors import ArgumentError, ContextFullError, UnsupportedError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llamac.engine.model import Model
    from llamac.progress import Progress

    Vectors = NDArray[np.float32]

Text: TypeAlias = str | Sequence[int]  # or its token ids
Texts: TypeAlias = Text | Sequence[Text]


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
    if model.config["scores_pairs"]:
        raise UnsupportedError("the model scores pairs of texts and does not embed them: use rerank")
    dim = width_of(model)
    kept = dim if dimensions is None else whole_number(dimensions, "dimensions")
    if not 1 <= kept <= dim:
        raise ArgumentError(f"dimensions is {kept}, expected 1 to {dim}, the model's")
    if isinstance(texts, bytes) or not isinstance(texts, Iterable):
        raise wrong_type("texts", texts, "a str, token ids, or a list of these")
    given: list[Any] = [texts] if isinstance(texts, str) else list(texts)
    is_single = isinstance(texts, str) or (len(given) > 0 and isinstance(given[0], Integral))
    listed = [given] if is_single and not isinstance(texts, str) else given
    ids = text_ids(model, listed, cancel, parse_special=parse_special)
    vectors = pooled_outputs(model, [Tokens(tokens) for tokens in ids], chosen, "embedding", report, cancel)
    found = np.empty((len(ids), kept), np.float32)
    for i, vector in enumerate(vectors):
        cut = vector[:kept]
        length = float(np.sqrt(np.square(cut).sum())) if normalize else 1.0
        found[i] = cut / (length or 1.0)
    return found[0] if is_single else found
