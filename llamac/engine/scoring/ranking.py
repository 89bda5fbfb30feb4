"""Relevance of documents to a query, by models trained to answer "yes" or "no"."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from llamac.arguments import wrong_type
from llamac.engine.prompts.prompt_ids import ToolOptions, conversation_ids
from llamac.engine.sampling.params import SamplingParams
from llamac.engine.scoring.cancellation import Cancellation
from llamac.engine.scoring.scores import Span, check_span, score_spans
from llamac.errors import ContextFullError, UnsupportedError
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
        score: Probability that the model answers "yes" rather than "no", 0 to 1.
        document: The text.
    """

    index: int
    score: float
    document: str


def rerank(
    model: Model, query: str, documents: Sequence[str], task: str | None, report: Progress, cancel: Cancellation | None
) -> list[Ranked]:
    """Rank documents by the probability of "yes"; see `Model.rerank`."""
    cancel = cancel or Cancellation()
    return rank(model, documents, answer_spans(model, query, documents, task, cancel), cancel, report)


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
        if not isinstance(document, str):
            raise wrong_type(f"documents[{i}]", document, "a str")
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


def rank(
    model: Model, documents: Sequence[str], spans: Sequence[Span], cancel: Cancellation, report: Progress = silent
) -> list[Ranked]:
    """Rank documents by the probabilities of their spans (see `answer_spans`), best first."""
    logprobs = [found.logprobs[0] for found in score_spans(model, spans, report=report, cancel=cancel)]
    ranked = [
        Ranked(i, 1 / (1 + math.exp(min(against - in_favour, 700))), document)
        for i, (document, in_favour, against) in enumerate(zip(documents, logprobs[::2], logprobs[1::2], strict=True))
    ]
    return sorted(ranked, key=lambda found: (-found.score, found.index))


def _answer_id(model: Model, word: str) -> int:
    token = model.tokenizer.id_of(word)
    if token is None:
        raise UnsupportedError(f"the vocabulary has no token {word!r}, which ranking needs: choose a reranker model")
    return token
