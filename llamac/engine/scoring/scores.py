"""Probabilities of texts: continuations of prompts, and perplexity."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from llamac.arguments import wrong_type
from llamac.engine.rows import Rows, appended_rows, common_prefix, known_ids
from llamac.engine.scoring.cancellation import Cancellation, cancellation
from llamac.engine.scoring.passes import PASS_ROWS, PASS_SEQUENCES, contexts_for
from llamac.errors import ArgumentError, ContextFullError
from llamac.progress import silent

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llamac.engine.model import Model
    from llamac.engine.session import Session
    from llamac.progress import Progress
    from llamac.text.tokenizer import Tokenizer

PASS_LOGITS = 128  # maximum rows of logits per pass


class Span(NamedTuple):
    """Tokens to score: ids[start:], each given all preceding ids. start is at least 1."""

    ids: array[int]
    start: int


@dataclass(frozen=True)
class Score:
    """The probability of a continuation.

    Attributes:
        logprob: Natural logarithm of the continuation's probability: the sum of `token_logprobs`.
        tokens: The continuation's token ids.
        token_logprobs: Natural logarithm of each token's probability, given all preceding tokens.
        is_greedy: Whether each token is the most probable one.
    """

    logprob: float
    tokens: list[int]
    token_logprobs: list[float]
    is_greedy: bool


class TokenProbabilities(NamedTuple):
    """For each token of a span: its log probability, whether it is the most probable token, and its logit."""

    logprobs: NDArray[np.float64]
    is_best: NDArray[np.bool_]
    logits: NDArray[np.float64]


def score_spans(
    model: Model,
    spans: Sequence[Span],
    *,
    context: int | None = None,
    report: Progress = silent,
    cancel: Cancellation | None = None,
) -> list[TokenProbabilities]:
    """Compute the probabilities of many spans. Common prefixes are computed once.

    Args:
        model: The model.
        spans: At least two ids each.
        context: Positions of the session. Default: as many as the longest span needs.
        report: Called with the phase "scoring" and the number of finished spans.
        cancel: Cancels the computation.

    Returns:
        The probabilities of ids[start:] of each span, in the order of the spans.
    """
    found: dict[int, TokenProbabilities] = {}
    cancel = cancellation(cancel)
    report("scoring", 0, len(spans))
    for positions, group in contexts_for(model, [len(span.ids) - 1 for span in spans], context):
        # adjacent spans in this order share the longest prefixes
        order = sorted(group, key=lambda i: (spans[i].ids[: spans[i].start], spans[i].ids))
        max_spans = min(PASS_SEQUENCES, len(spans))
        with model.session(context=positions, sequences=max_spans + 1) as session:
            for batch in _batches(order, spans, max_spans):
                scored = cancel.run(session, partial(_score_batch, session, [spans[i] for i in batch]))
                found.update(zip(batch, scored, strict=True))
                report("scoring", len(found), len(spans))
    return [found[i] for i in range(len(spans))]


def _batches(order: Sequence[int], spans: Sequence[Span], max_spans: int) -> Iterator[list[int]]:
    """Split the order into runs of at max_spans `max_spans` spans and about PASS_ROWS ids."""
    batch: list[int] = []
    rows = 0
    for i in order:
        ids = spans[i].ids
        shared = common_prefix(ids, spans[batch[-1]].ids) if batch else 0
        if batch and (len(batch) == max_spans or rows + len(ids) - shared > PASS_ROWS):
            yield batch
            batch, rows, shared = [], 0, 0
        batch.append(i)
        rows += len(ids) - shared
    if batch:
        yield batch


def _score_batch(session: Session, spans: Sequence[Span]) -> list[TokenProbabilities]:
    """Score spans that are sorted by their ids, with one sequence each.

    Sequence 0 keeps their common prefix until the next batch. The first span with a given context computes it; the
    others with the same context then fork it.
    """
    shared = min(span.start for span in spans) - 1
    for span in spans[1:]:
        shared = min(shared, common_prefix(spans[0].ids, span.ids))
    base = _keep_base(session, spans[0].ids[:shared])
    results: dict[int, TokenProbabilities] = {}
    for wave in _waves(spans):
        starts: list[tuple[int, int]] = []
        for i, source in wave:
            length = base if source is None else _fork_length(session, spans[i].start - 1, source + 1)
            if source is not None and length:
                session.copy_sequence(source + 1, i + 1, length=length)
            elif base:
                length = base
                session.copy_sequence(0, i + 1, length=base)
            starts.append((i, length))
        for i, probabilities in _evaluate(session, spans, starts):
            results[i] = probabilities
    for sequence in range(1, len(spans) + 1):
        session.truncate(0, sequence=sequence)
    return [results[i] for i in range(len(spans))]


def _keep_base(session: Session, ids: array[int]) -> int:
    """Make sequence 0 equal to `ids`, reusing its common prefix. Returns its length."""
    held = array("i", session.tokens(0))
    reused = common_prefix(held, ids)
    if reused < session.shortest_length(0):
        reused = 0
    session.truncate(reused, sequence=0)
    for first in range(reused, len(ids), PASS_ROWS):
        session._run(appended_rows(ids[first : first + PASS_ROWS], 0, first, None))
    return len(ids)


def _waves(spans: Sequence[Span]) -> list[list[tuple[int, int | None]]]:
    """Return pairs of a span and the span to fork the context from: first those without one, then the others."""
    first: list[tuple[int, int | None]] = []
    rest: list[tuple[int, int | None]] = []
    for _, group in itertools.groupby(range(len(spans)), key=lambda i: spans[i].ids[: spans[i].start]):
        source, *others = group
        first.append((source, None))
        rest += ((i, source) for i in others)
    return [first, rest] if rest else [first]


def _fork_length(session: Session, length: int, sequence: int) -> int:
    """Return `length`, or 0 if the sequence can no longer be cut there."""
    return length if length >= session.shortest_length(sequence) else 0


def _evaluate(
    session: Session, spans: Sequence[Span], starts: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, TokenProbabilities]]:
    """Extend the sequences of spans from the given lengths to their ends. Yield each span's probabilities."""
    import numpy as np

    rows = array("i")
    wanted: list[int] = []  # the token after each row with logits
    for i, length in starts:
        ids, start = spans[i]
        rows += appended_rows(ids[length : start - 1], i + 1, length, None)
        rows += appended_rows(ids[start - 1 : -1], i + 1, start - 1, "all")
        wanted += ids[start:]
    logprobs, own_logits = np.empty(len(wanted)), np.empty(len(wanted))
    is_best = np.empty(len(wanted), bool)
    first = 0
    for piece in _pieces(rows):
        n = sum(piece[3::4])
        logits = np.empty((n, session._core.vocab_size), np.float32)
        session._run(piece, logits.reshape(-1))
        for row in logits:
            logprobs[first], is_best[first] = _probability(row, wanted[first])
            own_logits[first] = row[wanted[first]]
            first += 1
    first = 0
    for i, _ in starts:
        last = first + len(spans[i].ids) - spans[i].start
        yield i, TokenProbabilities(logprobs[first:last], is_best[first:last], own_logits[first:last])
        first = last


def _pieces(rows: Rows) -> Iterator[Rows]:
    """Split rows into pieces of at most PASS_ROWS rows and PASS_LOGITS rows of logits."""
    first = n = 0
    for i, wants in enumerate(rows[3::4]):
        if i - first == PASS_ROWS or n + wants > PASS_LOGITS:
            yield rows[4 * first : 4 * i]
            first, n = i, 0
        n += wants
    if first * 4 < len(rows):
        yield rows[4 * first :]


def _probability(logits: NDArray[np.float32], token: int) -> tuple[float, bool]:
    """Return log softmax(logits)[token], and whether it is the largest."""
    import numpy as np

    largest = logits.max()
    shifted = np.exp(logits - largest)
    logprob = float(logits[token] - largest) - math.log(float(shifted.sum(dtype=np.float64)))
    return logprob, bool(logits[token] == largest)


# ---- continuations


Text = str | Sequence[int]


def continuation_span(model: Model, prompt: Text, continuation: Text) -> Span:
    """Return the ids of a prompt and its continuation, given as two texts or as two lists of token ids.

    Texts are tokenized together and split where the prompt's own tokens end; or each by itself, if a token would have
    a part of both. White space at the prompt's end counts as the start of the continuation, because most vocabularies
    have it at the start of words. An empty prompt stands for BOS, or for EOS if the model has no BOS.

    Raises:
        ArgumentError: If the continuation has no tokens, or a token id is not in the vocabulary.
    """
    if isinstance(prompt, str) and isinstance(continuation, str):
        stripped = prompt.rstrip()
        whole = array("i", model.tokenize(prompt + continuation, parse_special=False))
        before = array("i", model.tokenize(stripped, parse_special=False)) if stripped else array("i")
        start = len(before)
        if whole[:start] != before and not model.special.add_eos:
            whole = before + array("i", _ids_after(model.tokenizer, prompt[len(stripped) :] + continuation))
    elif isinstance(prompt, str) or isinstance(continuation, str):
        raise wrong_type("continuation", continuation, "of the prompt's type: both str, or both token ids")
    else:
        size = model.config["vocab_size"]
        whole, start = known_ids(prompt, size, "the prompt"), len(prompt)
        whole += known_ids(continuation, size, "the continuation")
    if start == 0:
        special = model.special
        front = array("i", special.front or ([] if special.eos_id is None else [special.eos_id]))
        if not front:
            raise ArgumentError("the prompt is empty, and the model has neither BOS nor EOS to begin with")
        start = len(front)
        if whole[:start] != front:
            whole[:0] = front
    if len(whole) <= start:
        raise ArgumentError(f"the continuation {continuation!r} has no tokens of its own: expected some text")
    return Span(whole, start)


def _ids_after(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text that continues another one. Many tokenizers put a space before a text that begins."""
    for before in ("\n", ".", "a"):
        ids = tokenizer.encode(before + text)
        for start in range(min(len(ids), 4)):
            if b"".join(map(tokenizer.token_bytes, ids[start:])) == text.encode():
                return ids[start:]
    return tokenizer.encode(text)


def check_span(span: Span, context: int, name: str) -> None:
    """Reject a span that does not fit. Its last token needs no position.

    Raises:
        ContextFullError: If it is too long.
    """
    if len(span.ids) - 1 > context:
        raise ContextFullError(
            f"{name} has {len(span.ids)} tokens with its prompt, but the context holds {context}: shorten it"
        )


def score(model: Model, prompt: Text, continuations: Sequence[Text], cancel: Cancellation | None) -> list[Score]:
    """Score continuations of a prompt, as `Model.score` describes."""
    cancel = cancellation(cancel)
    if isinstance(continuations, str | bytes) or not isinstance(continuations, Iterable):
        raise wrong_type("continuations", continuations, "a list of str or of token ids")
    limit = model._context_limit(None)
    spans = []
    for i, continuation in enumerate(continuations):
        convert = partial(continuation_span, model, prompt, continuation)
        characters = sum(len(text) for text in (prompt, continuation) if isinstance(text, str))
        spans.append(cancel.convert(convert, characters))
        check_span(spans[-1], limit, f"continuations[{i}]")
    scores = []
    for span, found in zip(spans, score_spans(model, spans, cancel=cancel), strict=True):
        tokens, logprobs = span.ids[span.start :].tolist(), found.logprobs.tolist()
        scores.append(Score(math.fsum(logprobs), tokens, logprobs, bool(found.is_best.all())))
    return scores


# ---- perplexity


def windows(n: int, size: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Cover n ids with windows. Yields each window's first id, its end, and the first id that it scores.

    A window has at most `size` ids and begins `stride` ids after the previous one. It scores the ids that no earlier
    window has scored. The very first id has no context and is not scored.
    """
    scored = 1
    for first in itertools.count(0, stride):
        end = min(first + size, n)
        yield first, end, scored
        if end == n:
            return
        scored = end


def perplexity(
    model: Model,
    text: Text,
    *,
    stride: int | None,
    context: int | None,
    report: Progress,
    cancel: Cancellation | None,
) -> float:
    """exp of the mean negative log-probability per token, as `Model.perplexity` describes."""
    import numpy as np

    cancel = cancellation(cancel)
    given = cancel.convert(partial(model.tokenize, text), len(text)) if isinstance(text, str) else text
    ids = known_ids(given, model.config["vocab_size"], "the text")
    size = model._context_limit(context)
    if size < 2:
        raise ArgumentError(f"context is {size}, expected at least 2: a token is scored given one before it")
    step = size if stride is None else stride
    if len(ids) < 2:
        raise ArgumentError(f"the text has {len(ids)} tokens, expected at least 2")
    if not 1 <= step <= size:
        raise ArgumentError(f"stride is {step}, expected 1 to {size}, the context")
    spans = []
    for first, end, scored in windows(len(ids), size, step):
        start = max(1, scored - first)  # a window's own first id has nothing before it
        if first + start < end:
            spans.append(Span(ids[first:end], start))
    scored_spans = score_spans(model, spans, context=size, report=report, cancel=cancel)
    return math.exp(-np.concatenate([found.logprobs for found in scored_spans]).mean())
