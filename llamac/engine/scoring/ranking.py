"""Relevance of documents to a query, by cross-encoders and by models trained to answer "yes" or "no"."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from llamac.arguments import wrong_type
from llamac.engine.prompts.prompt_ids import ToolOptions, conversation_ids
from llamac.engine.sampling.params import SamplingParams
from llamac.engine.scoring.cancellation import Cancellation, cancellation
from llamac.engine.scoring.pairs import check_template, has_template, pair_tokens, rendered_pair, template_options
from llamac.engine.scoring.pooled import Tokens, pooled_outputs, pooling_of
from llamac.engine.scoring.scores import Span, check_span, score_spans
from llamac.errors import ArgumentError, ContextFullError, ModelError, UnsupportedError
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
# A language model's answer is the next token after the prompt.
ANSWERING = {"add_generation_prompt": True, "enable_thinking": False}


@dataclass(frozen=True)
class Ranked:
    """A document's relevance.

    Attributes:
        index: Its index in the list of documents.
        score: The relevance. For a model that answers a prompt: the probability that it answers "yes" rather than "no",
            0 to 1, or the score that its files derive from the logits of other answers. For a cross-encoder: its score,
            which is from 0 to 1 if the model has a sigmoid.
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
    model: Model,
    query: str,
    documents: Sequence[str],
    task: str | None,
    parse_special: bool,
    report: Progress,
    cancel: Cancellation | None,
) -> list[Ranked]:
    """Rank documents; see `Model.rerank`."""
    if isinstance(documents, str | bytes) or not isinstance(documents, Iterable):
        raise wrong_type("documents", documents, "a list of str")
    listed = list(documents)
    return rank(listed, prepare(model, query, listed, task, cancellation(cancel), parse_special), report)


def prepare(
    model: Model,
    query: str,
    documents: Sequence[str],
    task: str | None,
    cancel: Cancellation,
    parse_special: bool = False,
) -> Prepared:
    """Convert a query and documents to tokens, for a cross-encoder or for a model with a chat template.

    Raises:
        ContextFullError: If a document does not fit the context with the query.
        UnsupportedError: If the model can do neither.
        ArgumentError: If the model has no tokenizer, cannot use the task or `parse_special`, or a pair has no
            tokens.
        ModelError: If the file's metadata about pairs has the wrong type.
        ChatTemplateError: If the chat template fails, or does not write the texts.
    """
    if not isinstance(query, str):
        raise wrong_type("query", query, "a str")
    for i, document in enumerate(documents):
        if not isinstance(document, str):
            raise wrong_type(f"documents[{i}]", document, "a str")
    if not isinstance(task, str | None):
        raise wrong_type("task", task, "a str")
    if documents and has_template(model) and model.config["scores_pairs"]:
        check_template(model, task, template_options(model), "documents[0]")
    elif documents and has_template(model) and not model.config["two_sided"]:
        check_template(model, task, answers_of(model).options, "documents[0]")
    if model.config["scores_pairs"]:
        pairs = [
            pair_tokens(model, query, document, task, parse_special, f"documents[{i}]", cancel)
            for i, document in enumerate(documents)
        ]
        return Prepared([len(pair.ids) for pair in pairs], partial(_pair_scores, model, pairs, cancel))
    if model.config["two_sided"]:
        raise UnsupportedError("the model embeds texts and does not score pairs of them: use embed, or a cross-encoder")
    if parse_special:
        raise ArgumentError("parse_special is for cross-encoders without a chat template: this model answers a prompt")
    spans = answer_spans(model, query, documents, task, cancel)
    # an answer starts where its prompt ends
    return Prepared([first.start for first, *_ in spans], partial(_answer_scores, model, spans, cancel))


def rank(documents: Sequence[str], prepared: Prepared, report: Progress = silent) -> list[Ranked]:
    """Rank documents by their scores, best first."""
    scores = prepared.compute(report)
    ranked = [Ranked(i, score, text) for i, (score, text) in enumerate(zip(scores, documents, strict=True))]
    return sorted(ranked, key=lambda found: (-found.score, found.index))


# ---- cross-encoders


def _pair_scores(model: Model, pairs: Sequence[Tokens], cancel: Cancellation, report: Progress) -> list[float]:
    scores: list[float] = pooled_outputs(model, pairs, pooling_of(model, None), "scoring", report, cancel)[
        :, 0
    ].tolist()
    return scores


# ---- models that answer a prompt


class Answers(NamedTuple):
    """What a language model's score is made of.

    Attributes:
        ids: The tokens for a relevant and for another document, or only the first. The logit of the first, less that of
            the second, gives the score.
        has_sigmoid: Whether the score is the sigmoid of this difference, and not the difference.
        options: The options with which the chat template for pairs writes the prompt.
    """

    ids: tuple[int, ...]
    has_sigmoid: bool
    options: Mapping[str, bool]


def answers_of(model: Model) -> Answers:
    """How the model answers: as its files say, or with "yes" and "no".

    Raises:
        UnsupportedError: If the vocabulary lacks "yes" or "no".
        ModelError: If the file's metadata has the wrong type.
    """
    stored = model.file.metadata.get("answers")
    if stored is None:
        return Answers(tuple(_answer_id(model, word) for word in ("yes", "no")), True, ANSWERING)
    ids = stored.get("ids") if isinstance(stored, dict) else None
    size = model.config["vocab_size"]
    if not isinstance(ids, list) or not 1 <= len(ids) <= 2 or not all(_is_id(token, size) for token in ids):
        raise ModelError(f"{model.file.path}: metadata: answers is {stored!r:.80}, expected ids: one or two token ids")
    return Answers(tuple(ids), stored.get("activation") != "none", template_options(model))


def _is_id(token: object, size: int) -> bool:
    return isinstance(token, int) and not isinstance(token, bool) and 0 <= token < size


def answer_spans(
    model: Model, query: str, documents: Sequence[str], task: str | None, cancel: Cancellation
) -> list[list[Span]]:
    """Return the spans of each document: its prompt with each of the model's answers.

    Raises:
        ContextFullError: If a document does not fit the context with the query.
        UnsupportedError: If the vocabulary lacks "yes" or "no".
        ArgumentError: If the model has no chat template or no tokenizer.
        ModelError: If the file's metadata has the wrong type.
    """
    answers = answers_of(model)
    is_written = has_template(model)
    context = model._context_limit(None)
    found = []
    for i, document in enumerate(documents):
        name = f"documents[{i}]"
        if is_written:
            ids = rendered_pair(model, query, document, task, answers.options, name, cancel)
        else:
            ids = _judged_pair(model, query, document, task, name, cancel)
        spans = [Span(ids + array("i", [answer]), len(ids)) for answer in answers.ids]
        check_span(spans[0], context, name)
        found.append(spans)
    return found


def _judged_pair(
    model: Model, query: str, document: str, task: str | None, name: str, cancel: Cancellation
) -> array[int]:
    """The token ids of a pair in Qwen3-Reranker's words."""
    text = f"<Instruct>: {task or TASK}\n<Query>: {query}\n<Document>: {document}"
    messages = [{"role": "system", "content": JUDGE}, {"role": "user", "content": text}]
    context = model._context_limit(None)
    convert = partial(conversation_ids, model, messages, ToolOptions(), ANSWERING, SamplingParams(), context)
    try:
        return array("i", cancel.convert(convert, len(text))[0])
    except ContextFullError:
        message = f"{name} does not fit the context with its prompt, which holds {context}: shorten it"
        raise ContextFullError(message) from None


def _answer_scores(
    model: Model, spans: Sequence[Sequence[Span]], cancel: Cancellation, report: Progress
) -> list[float]:
    """The score of each document, by default the probability of "yes" against "no"."""
    listed = [span for own in spans for span in own]
    logits = [float(found.logits[0]) for found in score_spans(model, listed, report=report, cancel=cancel)]
    answers = answers_of(model)
    n = len(answers.ids)
    scores = [in_favour - sum(logits[i * n + 1 : (i + 1) * n]) for i, in_favour in enumerate(logits[::n])]
    return [1 / (1 + math.exp(min(-score, 700))) for score in scores] if answers.has_sigmoid else scores


def _answer_id(model: Model, word: str) -> int:
    token = model.tokenizer.id_of(word)
    if token is None:
        raise UnsupportedError(f"the vocabulary has no token {word!r}, which ranking needs: choose a reranker model")
    return token
