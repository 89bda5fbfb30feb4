"""Embeddings: one vector per text, pooled from the normalized outputs of its tokens."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeAlias

from llamac.arguments import to_int, wrong_type
from llamac.engine.rows import known_ids
from llamac.engine.scoring.cancellation import Cancellation, cancellation
from llamac.engine.scoring.pooled import Tokens, pooled_outputs, pooling_of, width_of
from llamac.engine.scoring.prompts import chosen_prompt
from llamac.errors import ArgumentError, ContextFullError, ModelError, UnsupportedError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llamac.engine.model import Model
    from llamac.progress import Progress

    Vectors = NDArray[np.float32]

Text: TypeAlias = str | Sequence[int]  # or its token ids
Texts: TypeAlias = Text | Sequence[Text]


# The functions of sentence-transformers for which the length of a vector counts.
LENGTHS_COUNT = ("dot", "euclidean", "manhattan")


def text_tokens(
    model: Model, texts: Sequence[Text], cancel: Cancellation, *, prompt: str = "", parse_special: bool = False
) -> list[Tokens]:
    """Return the tokens of each text, with BOS and EOS by the model's rules. Token ids are used unchanged.

    Args:
        model: The model.
        texts: The texts.
        cancel: Ends the conversion.
        prompt: Precedes each text that is not given as token ids. It comes from the model's files or from the caller,
            so it can write special tokens.
        parse_special: Whether the texts can write special tokens.

    Raises:
        ContextFullError: If a text does not fit the context.
        ArgumentError: If a text has no tokens, or an id is not in the vocabulary.
    """
    context = model._context_limit(None)
    is_pooled = model.file.metadata.get("pools_prompt") is not False
    skipped = 0 if is_pooled or not prompt else _prompt_length(model, prompt)
    found = []
    for i, text in enumerate(texts):
        cancel.check()
        name = f"texts[{i}]"
        try:
            if isinstance(text, str):
                encode = partial(_encoded, model, prompt, text, parse_special, context)
                ids, first = array("i", cancel.convert(encode, len(prompt) + len(text))), skipped
            elif isinstance(text, Iterable):
                ids, first = known_ids(text, model.config["vocab_size"], name), 0
                if len(ids) > context:
                    raise ContextFullError(f"{len(ids)} tokens")
            else:
                raise wrong_type(name, text, "a str or token ids")
        except ContextFullError as error:
            raise ContextFullError(f"{name}: {error}; the context holds {context} positions: split it") from None
        if len(ids) <= first:
            raise ArgumentError(f"{name} has no tokens{' besides the prompt' if first else ''}: expected some text")
        found.append(Tokens(ids, skipped=first))
    return found


def _encoded(model: Model, prompt: str, text: str, parse_special: bool, limit: int) -> list[int]:
    """The token ids of a prompt and a text. Only the prompt can write special tokens, unless `parse_special`."""
    tokenizer = model.tokenizer
    encode = partial(tokenizer.encode, add_special=True, limit=limit)
    if parse_special or not prompt or not tokenizer.special_spans(prompt):
        return encode(prompt + text, parse_special=parse_special)
    if not tokenizer.special_spans(text):
        return encode(prompt + text, parse_special=True)
    before, after = encode(prompt, parse_special=True), encode(text)
    special = model.special
    if special.add_eos and before[-1:] == [special.eos_id]:
        before.pop()
    if special.add_bos and after[:1] == [special.bos_id]:
        del after[: len(special.front)]
    if len(before) + len(after) > limit:
        raise ContextFullError(f"the text has {len(before) + len(after)} tokens with its prompt, the limit is {limit}")
    return before + after


def _prompt_length(model: Model, prompt: str) -> int:
    """The number of tokens that sentence-transformers takes a prompt for: without the EOS that ends a text."""
    ids = model.tokenizer.encode(prompt, add_special=True, parse_special=True)
    return len(ids) - int(ids[-1:] == [model.special.eos_id])


def embed(
    model: Model,
    texts: Texts,
    prompts: tuple[str | None, str | None],
    pooling: str | None,
    normalize: bool | None,
    dimensions: int | None,
    parse_special: bool,
    report: Progress,
    cancel: Cancellation | None,
) -> Vectors:
    """Compute the embeddings of texts; see `Model.embed`. prompts: the name of a prompt, and a prompt."""
    cancel = cancellation(cancel)
    check_embeds(model)
    chosen = pooling_of(model, pooling)
    kept = kept_dimensions(model, chosen, dimensions)
    prompt_name, prompt = prompts
    before = chosen_prompt(model, prompt, prompt_name)
    if isinstance(texts, bytes) or not isinstance(texts, Iterable):
        raise wrong_type("texts", texts, "a str, token ids, or a list of these")
    given: list[Any] = [texts] if isinstance(texts, str) else list(texts)
    is_single = isinstance(texts, str) or (len(given) > 0 and isinstance(given[0], Integral))
    listed = [given] if is_single and not isinstance(texts, str) else given
    if before and (prompt or prompt_name) and not all(isinstance(text, str) for text in listed):
        raise ArgumentError("a prompt applies only to strings: put its tokens before the token ids instead")
    tokens = text_tokens(model, listed, cancel, prompt=before, parse_special=parse_special)
    found = vectors(model, tokens, chosen, normalize, kept, report, cancel)
    return found[0] if is_single else found


def check_embeds(model: Model) -> None:
    """Refuse a model that has no embeddings.

    Raises:
        UnsupportedError: If it is one.
    """
    if model.config["scores_pairs"]:
        raise UnsupportedError("the model scores pairs of texts and does not embed them: use rerank")


def kept_dimensions(model: Model, pooling: str, dimensions: int | None) -> int:
    """The number of dimensions of an embedding with this pooling: those asked for, or the file's, or all.

    Raises:
        ArgumentError: If the model has fewer.
        ModelError: If the file's metadata has the wrong type.
    """
    dim = width_of(model, pooling)
    if dimensions is None:
        stored = model.file.metadata.get("dimensions", dim)
        if type(stored) is not int or stored < 1:
            raise ModelError(f"{model.file.path}: metadata: dimensions is {stored!r:.80}, expected a positive integer")
        return min(stored, dim)
    kept = to_int(dimensions, "dimensions")
    if not 1 <= kept <= dim:
        raise ArgumentError(f"dimensions is {kept}, expected 1 to {dim}, the model's")
    return kept


def vectors(
    model: Model,
    texts: Sequence[Tokens],
    pooling: str,
    normalize: bool | None,
    kept: int,
    report: Progress,
    cancel: Cancellation,
) -> Vectors:
    """Compute the embeddings of texts that fit the context, (n, kept)."""
    import numpy as np

    is_scaled = not _lengths_count(model) if normalize is None else normalize
    found = np.empty((len(texts), kept), np.float32)
    for i, vector in enumerate(pooled_outputs(model, texts, pooling, "embedding", report, cancel)):
        cut = vector[:kept]
        length = float(np.sqrt(np.square(cut).sum())) if is_scaled else 1.0
        found[i] = cut / (length or 1.0)
    return found


def _lengths_count(model: Model) -> bool:
    """Whether the model's files leave the lengths of vectors as they are and compare vectors by these, too."""
    metadata = model.file.metadata
    return metadata.get("normalizes") is False and metadata.get("similarity") in LENGTHS_COUNT
