"""Relevance of documents to a query, by cross-encoders and by models trained to answer "yes" or "no"."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from llamac.arguments import wrong_type
from llamac.engine.prompts.prompt_ids import ToolOptions, conversation_ids
from llamac.engine.sampling.params import SamplingParams
from llamac.engine.scoring.cancellation import Cancellation
from llamac.engine.scoring.pooled import Tokens, pooled_outputs, pooling_of
from llamac.engine.scoring.scores import Span, check_span, score_spans
from llamac.errors import ArgumentError, ContextFullError, UnsupportedError
from llamac.progress import silent

if TYPE_CHECKING:
    from llamac.engine.model import Model
    from llamac.progress import Progress

# The instruction and the default task of Qwen3-Reranker's model card.
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
TASK = "Given a web search query, retrieve relevant passages that answer the query"


@dataclass(frozen=True)
class Ranked:
    """A document's relevance.

    Attributes:
        index: Its index in the list of documents.
        score: The relevance. Of a model with a chat template: the probability that it answers "yes" rather than "no", 0
            to 1. Of a cross-encoder: its score, which is from 0 to 1 if the model has a sigmoid.
        document: The text.
    """

    index: int
    score: float
    document: str


class Prepared(NamedTuple):
    """Documents that are ready to be scored.

    Attributes:
        counts: The number of tokens of each document with its query.
        compute: Returns the scores.
    """

    counts: list[int]
    compute: Callable[[Progress], list[float]]


def rerank(
    model: Model, query: str, documents: Sequence[str], task: str | None, report: Progress, cancel: Cancellation | None
) -> list[Ranked]:
    """Rank documents; see `Model.rerank`."""
    if isinstance(documents, str | bytes) or not isinstance(documents, Iterable):
        raise wrong_type("documents", documents, "a list of str")
    listed = list(documents)
    return rank(listed, prepare(model, query, listed, task, cancel or Cancellation()), report)


def prepare(model: Model, query: str, documents: Sequence[str], task: str | None, cancel: Cancellation) -> Prepared:
    """Convert a query and documents to tokens, for a cross-encoder or for a model with a chat template.

    Raises:
        ContextFullError: If a document does not fit the context with the query.
        UnsupportedError: If the model can do neither.
        ArgumentError: If the model has no tokenizer, or a cross-encoder gets a task.
    """
    if not isinstance(query, str):
        raise wrong_type("query", query, "a str")
    for i, document in enumerate(documents):
        if not isinstance(document, str):
            raise wrong_type(f"documents[{i}]", document, "a str")
    if model.config["scores_pairs"]:
        if task is not None:
            raise ArgumentError("task is for models with a chat template: this model is a cross-encoder")
        pairs = [_pair(model, query, document, f"documents[{i}]", cancel) for i, document in enumerate(documents)]
        return Prepared([len(pair.ids) for pair in pairs], partial(_pair_scores, model, pairs, cancel))
    if model.config["two_sided"]:
        raise UnsupportedError("the model embeds texts and does not score pairs of them: use embed, or a cross-encoder")
    spans = answer_spans(model, query, documents, task, cancel)
    # an answer starts where its prompt ends
    return Prepared([span.start for span in spans[::2]], partial(_answer_scores, model, spans, cancel))


def rank(documents: Sequence[str], prepared: Prepared, report: Progress = silent) -> list[Ranked]:
    """Rank documents by their scores, best first."""
    scores = prepared.compute(report)
    ranked = [Ranked(i, score, text) for i, (score, text) in enumerate(zip(scores, documents, strict=True))]
    return sorted(ranked, key=lambda found: (-found.score, found.index))


# ---- cross-encoders


def _pair(model: Model, query: str, document: str, name: str, cancel: Cancellation) -> Tokens:
    """The tokens of a pair: BOS, the query, EOS, the document, EOS. Some models have two EOS in the middle."""
    context, special = model._context_limit(None), model.special
    if special.bos_id is None or special.eos_id is None:
        raise UnsupportedError("the tokenizer has no BOS or no EOS, which pairs of texts need")
    try:
        encode = partial(model.tokenizer.encode, parse_special=False, limit=context)
        first, second = (cancel.convert(partial(encode, text), len(text)) for text in (query, document))
    except ContextFullError:
        raise _too_long(name, context) from None
    separators = model.file.metadata.get("pair_separators", 1)
    head = [special.bos_id, *first, *[special.eos_id] * (2 if separators == 2 else 1)]
    tail = [*second, special.eos_id]
    if len(head) + len(tail) > context:
        raise _too_long(name, context)
    kind = int(model.file.metadata.get("pair_type", 1) != 0)
    types = array("i", [0] * len(head) + [kind] * len(tail)) if model.config["n_types"] > 1 else None
    return Tokens(array("i", head + tail), types)


def _too_long(name: str, context: int) -> ContextFullError:
    return ContextFullError(f"{name} does not fit the context with its query, which holds {context}: shorten it")


def _pair_scores(model: Model, pairs: Sequence[Tokens], cancel: Cancellation, report: Progress) -> list[float]:
    scores: list[float] = pooled_outputs(model, pairs, pooling_of(model, None), "scoring", report, cancel)[
        :, 0
    ].tolist()
    return scores


# ---- models with a chat template


def answer_spans(
    model: Model, query: str, documents: Sequence[str], task: str | None, cancel: Cancellation
) -> list[Span]:
    """Return two spans for each document: its prompt with the answer "yes", and with "no".

    Raises:
        ContextFullError: If a document does not fit the context with the query.
        UnsupportedError: If the vocabulary lacks "yes" or "no".
        ArgumentError: If the model has no chat template or no tokenizer.
    """
    yes, no = (_answer_id(model, word) for word in ("yes", "no"))
    context = model._context_limit(None)
    spans = []
    for i, document in enumerate(documents):
        text = f"<Instruct>: {task or TASK}\n<Query>: {query}\n<Document>: {document}"
        messages = [{"role": "system", "content": JUDGE}, {"role": "user", "content": text}]
        options = {"enable_thinking": False}
        convert = partial(conversation_ids, model, messages, ToolOptions(), options, SamplingParams(), context)
        try:
            ids = array("i", cancel.convert(convert, len(text))[0])
        except ContextFullError:
            message = f"documents[{i}] does not fit the context with its prompt, which holds {context}: shorten it"
            raise ContextFullError(message) from None
        for answer in (yes, no):
            spans.append(Span(ids + array("i", [answer]), len(ids)))
            check_span(spans[-1], context, f"documents[{i}]")
    return spans


def _answer_scores(model: Model, spans: Sequence[Span], cancel: Cancellation, report: Progress) -> list[float]:
    """The probability of "yes" against "no" for each document."""
    logprobs = [found.logprobs[0] for found in score_spans(model, spans, report=report, cancel=cancel)]
    pairs = zip(logprobs[::2], logprobs[1::2], strict=True)
    return [1 / (1 + math.exp(min(against - in_favour, 700))) for in_favour, against in pairs]


def _answer_id(model: Model, word: str) -> int:
    token = model.tokenizer.id_of(word)
    if token is None:
        raise UnsupportedError(f"the vocabulary has no token {word!r}, which ranking needs: choose a reranker model")
    return token
