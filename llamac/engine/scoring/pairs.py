"""The tokens of a query with a document: joined as the tokenizer joins two texts, or written by a chat template."""

from __future__ import annotations

from array import array
from functools import partial
from typing import TYPE_CHECKING

from llamac.engine.prompts.prompt_ids import check_length, rendered_runs, tokenize_runs
from llamac.engine.scoring.pooled import Tokens
from llamac.errors import ArgumentError, ChatTemplateError, ContextFullError, UnsupportedError
from llamac.text.template_files import DEFAULT

if TYPE_CHECKING:
    from llamac.engine.model import Model
    from llamac.engine.scoring.cancellation import Cancellation

QUERY, DOCUMENT = "query", "document"


def has_template(model: Model) -> bool:
    """Whether the chat template is for pairs: it names the roles that sentence-transformers gives the two texts."""
    template = model.chat_template.templates.get(DEFAULT, "") if model.chat_template else ""
    return all(f"'{role}'" in template or f'"{role}"' in template for role in (QUERY, DOCUMENT))


def pair_tokens(
    model: Model, query: str, document: str, task: str | None, parse_special: bool, name: str, cancel: Cancellation
) -> Tokens:
    """The tokens that a cross-encoder reads.

    Args:
        model: The model, which scores pairs.
        query: The query.
        document: The document.
        task: The purpose of the query, only for models with a template for pairs.
        parse_special: Whether names of special tokens in the texts become these tokens, only without a template.
        name: What errors call the document.
        cancel: Ends the conversion.

    Raises:
        ContextFullError: If the document does not fit the context with the query.
        ArgumentError: If the model cannot use the task or `parse_special`.
        UnsupportedError: If the tokenizer lacks a token that the pair needs.
    """
    if not model.config["two_sided"] and has_template(model):
        if parse_special:
            raise ArgumentError("parse_special is for pairs without a chat template: this model's template has them")
        return Tokens(rendered_pair(model, query, document, task, name, cancel))
    if task is not None:
        raise ArgumentError(
            "task is for models with a chat template: this model is a cross-encoder without one for pairs of texts"
        )
    query = model.file.metadata.get("prompt", "") + query
    if model.config["two_sided"]:
        return _encoder_pair(model, query, document, parse_special, name, cancel)
    return _decoder_pair(model, query, document, parse_special, name, cancel)


def rendered_pair(
    model: Model, query: str, document: str, task: str | None, name: str, cancel: Cancellation
) -> array[int]:
    """The token ids of a pair in the model's chat template, which gets the task, if any, as the system message.

    Raises:
        ContextFullError: If the document does not fit the context with the query.
        ChatTemplateError: If the template fails, or does not write one of the texts.
    """
    context = model._context_limit(None)
    system = task if task is not None else model.file.metadata.get("prompt")
    messages = [{"role": QUERY, "content": query}, {"role": DOCUMENT, "content": document}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})

    def convert(text: str) -> list[int]:
        runs = rendered_runs(model, messages, {"add_generation_prompt": False})
        written = "".join(run.text for run in runs)
        for role, content in (("task", task or ""), (QUERY, query), (DOCUMENT, text)):
            if content.strip() not in written:
                raise ChatTemplateError(f"the model's chat template leaves out or changes the {role} of {name}")
        check_length([written], model, None, context)
        return tokenize_runs(model, runs)

    try:
        ids = array("i", cancel.convert(partial(convert, document), len(query) + len(document)))
    except ContextFullError:
        raise too_long(name, context) from None
    if len(ids) > context:
        raise too_long(name, context)
    return ids


def too_long(name: str, context: int) -> ContextFullError:
    """The error for a document that does not fit the context."""
    return ContextFullError(f"{name} does not fit the context with its query, which holds {context}: shorten it")


def _encoder_pair(
    model: Model, query: str, document: str, parse_special: bool, name: str, cancel: Cancellation
) -> Tokens:
    """The tokens of a pair: BOS, the query, EOS, the document, EOS. Some models have two EOS in the middle."""
    special = model.special
    if special.bos_id is None or special.eos_id is None:
        raise UnsupportedError("the tokenizer has no BOS or no EOS, which pairs of texts need")
    first, second = _encoded(model, query, document, False, parse_special, name, cancel)
    separators = model.file.metadata.get("pair_separators", 1)
    head = [special.bos_id, *first, *[special.eos_id] * (2 if separators == 2 else 1)]
    tail = [*second, special.eos_id]
    if len(head) + len(tail) > model._context_limit(None):
        raise too_long(name, model._context_limit(None))
    kind = int(model.file.metadata.get("pair_type", 1) != 0)
    types = array("i", [0] * len(head) + [kind] * len(tail)) if model.config["n_types"] > 1 else None
    return Tokens(array("i", head + tail), types)


def _decoder_pair(
    model: Model, query: str, document: str, parse_special: bool, name: str, cancel: Cancellation
) -> Tokens:
    """The tokens of the query and of the document, each with BOS and EOS by the model's rules.

    The score is that of the last token that is not the padding token, as in transformers. Earlier tokens do not see
    later ones, so padding tokens at the end are left out.
    """
    first, second = _encoded(model, query, document, True, parse_special, name, cancel)
    ids = array("i", [*first, *second])
    padding = model.file.metadata.get("padding_id")
    while len(ids) > 1 and ids[-1] == padding:
        ids.pop()
    if not ids:
        raise ArgumentError(f"{name} and its query have no tokens: expected some text")
    if len(ids) > model._context_limit(None):
        raise too_long(name, model._context_limit(None))
    return Tokens(ids)


def _encoded(
    model: Model,
    query: str,
    document: str,
    add_special: bool,
    parse_special: bool,
    name: str,
    cancel: Cancellation,
) -> list[list[int]]:
    """The token ids of both texts."""
    context = model._context_limit(None)
    encode = partial(model.tokenizer.encode, add_special=add_special, parse_special=parse_special, limit=context)
    try:
        return [cancel.convert(partial(encode, text), len(text)) for text in (query, document)]
    except ContextFullError:
        raise too_long(name, context) from None
