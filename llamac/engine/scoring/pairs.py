"""The tokens of a query with a document: joined as the tokenizer joins two texts, or written by a chat template."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from llamac.engine.prompts.prompt_ids import check_length, rendered_runs, tokenize_runs
from llamac.engine.scoring.pooled import Tokens
from llamac.engine.scoring.prompts import default_prompt
from llamac.errors import ArgumentError, ChatTemplateError, ContextFullError, ModelError, UnsupportedError
from llamac.format.model_folders import PAIR_OPTIONS
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
        ArgumentError: If the model cannot use the task or `parse_special`, or the pair has no tokens.
        ModelError: If the file's metadata about pairs has the wrong type.
        UnsupportedError: If the tokenizer lacks a token that the pair needs.
    """
    if has_template(model):
        if parse_special:
            raise ArgumentError("parse_special needs a model without a chat template for pairs, and this model has one")
        return Tokens(rendered_pair(model, query, document, task, template_options(model), name, cancel))
    if task is not None:
        raise ArgumentError(
            "task is for models with a chat template: this model is a cross-encoder without one for pairs of texts"
        )
    query = (default_prompt(model) or "") + query
    if model.config["two_sided"] and model.file.metadata.get("pair_separators", 1) != 0:
        return _encoder_pair(model, query, document, parse_special, name, cancel)
    return _decoder_pair(model, query, document, parse_special, name, cancel)


def template_options(model: Model) -> Mapping[str, bool]:
    """The options with which a cross-encoder's chat template writes a pair.

    Raises:
        ModelError: If the file's metadata has others than `PAIR_OPTIONS`, or not booleans.
    """
    found = model.file.metadata.get("pair_options", {})
    if not isinstance(found, dict) or not all(key in PAIR_OPTIONS and type(found[key]) is bool for key in found):
        raise ModelError(
            f"{model.file.path}: metadata: pair_options is {found!r:.80}, expected "
            f"{' and '.join(PAIR_OPTIONS)}, true or false"
        )
    return {"add_generation_prompt": False, **found}


def check_template(model: Model, task: str | None, options: Mapping[str, bool], name: str) -> None:
    """Check that the model's chat template for pairs writes both texts and the task, if any, as they are.

    The texts of this check are random: nothing else that the template writes contains them.

    Raises:
        ChatTemplateError: If the template fails, or does not write one of the texts.
        ModelError: If the default prompt in the file's metadata is not a text.
    """
    texts = {role: f"A{secrets.token_hex(8)}z" for role in (QUERY, DOCUMENT, "task")}
    system = default_prompt(model) if task is None else texts["task"]
    runs = rendered_runs(model, _messages(texts[QUERY], texts[DOCUMENT], system), options)
    written = "".join(run.text for run in runs)
    for role, text in texts.items():
        if text not in written and (role != "task" or task):
            raise ChatTemplateError(f"the model's chat template leaves out or changes the {role} of {name}")


def rendered_pair(
    model: Model,
    query: str,
    document: str,
    task: str | None,
    options: Mapping[str, bool],
    name: str,
    cancel: Cancellation,
) -> array[int]:
    """The token ids of a pair in the model's chat template, which gets the task, if any, as the system message.

    Raises:
        ContextFullError: If the document does not fit the context with the query.
        ChatTemplateError: If the template fails.
        ArgumentError: If the template writes nothing.
        ModelError: If the default prompt in the file's metadata is not a text.
    """
    context = model._context_limit(None)
    messages = _messages(query, document, default_prompt(model) if task is None else task)

    def convert() -> list[int]:
        runs = rendered_runs(model, messages, options)
        check_length([run.text for run in runs], model, None, context)
        return tokenize_runs(model, runs)

    try:
        ids = array("i", cancel.convert(convert, len(query) + len(document)))
    except ContextFullError:
        raise too_long(name, context) from None
    if not ids:
        raise _no_tokens(name)
    if len(ids) > context:
        raise too_long(name, context)
    return ids


def _messages(query: str, document: str, system: str | None) -> list[dict[str, str]]:
    pair = [{"role": QUERY, "content": query}, {"role": DOCUMENT, "content": document}]
    return pair if system is None else [{"role": "system", "content": system}, *pair]


def _no_tokens(name: str) -> ArgumentError:
    return ArgumentError(f"{name} and its query have no tokens: expected some text")


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

    If earlier tokens do not see later ones, the score is that of the last token that is not the padding token, as in
    transformers. So padding tokens at the end are left out.
    """
    first, second = _encoded(model, query, document, True, parse_special, name, cancel)
    ids = array("i", [*first, *second])
    padding = model.file.metadata.get("padding_id")
    while len(ids) > 1 and ids[-1] == padding:
        ids.pop()
    if not ids:
        raise _no_tokens(name)
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
