"""Converts a prompt (a text, token ids or a conversation) to the token ids at the start of a sequence."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from llamac.arguments import wrong_type
from llamac.engine.prompts.overflow import SINKS, FittedPrompt, fit_prompt, overflow_error
from llamac.engine.rows import known_ids
from llamac.errors import ArgumentError, ArgumentTypeError, ChatTemplateError, UnsupportedError
from llamac.format.flatfile import without_logits

if TYPE_CHECKING:
    from llamac.engine.generation.reading import Reading
    from llamac.engine.model_file import ModelFile
    from llamac.engine.sampling.params import ResolvedParams, SamplingParams
    from llamac.guided.guides import Guide
    from llamac.text.chat_runs import PromptRun
    from llamac.tools.functions import Tool
    from llamac.tools.message import Message

ToolChoice = Literal["auto", "none", "required"] | str | Mapping[str, Any]

SYSTEM_ROLES = ("system", "developer")
NO_TEMPLATE = "this model has no chat template: generate from a prompt in the format that it was trained on instead"


class ToolOptions(NamedTuple):
    """The arguments of `chat` that concern tools."""

    tools: Sequence[Tool] | None = None
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    tool_format: str | None = None


class ConversationIds(list[int]):
    """The token ids of a conversation, with the description of how to read the answer."""

    reading: Reading


def prompt_ids(model: ModelFile, prompt: str | Sequence[int], params: ResolvedParams, context: int) -> FittedPrompt:
    """Convert a prompt to token ids that fit the context.

    Args:
        model: The model.
        prompt: A str, which gets BOS if the model expects it; or token ids, which are used unchanged. An empty prompt
            stands for BOS.
        params: The request's parameters.
        context: The number of positions in the context.

    Raises:
        ContextFullError: If the prompt does not fit the context and must not be cut.
        ArgumentError: If an id is out of range, or the prompt is empty and the model has no BOS.
        UnsupportedError: If the model is an encoder.
    """
    check_generates(model)
    if not isinstance(prompt, str | Iterable):
        raise wrong_type("prompt", prompt, "a str or token ids")
    if isinstance(prompt, list | tuple) and any(isinstance(item, str) for item in prompt):
        raise ArgumentTypeError("prompt must be a str or token ids, not a list of str: use an Engine for several")
    if isinstance(prompt, str):
        if params.context_overflow == "error":
            check_length([prompt], model, params.max_tokens, context)
        prompt = model.tokenize(prompt)
    reading = prompt.reading if isinstance(prompt, ConversationIds) else None
    ids = known_ids(prompt, model.config["vocab_size"], "the prompt")
    if not ids:
        if not model.special.front:
            raise ArgumentError("the prompt is empty, and the model has no BOS token to begin with")
        ids = array("i", model.special.front)
    fitted = fit_prompt(ids, params, context)
    return fitted._replace(reading=reading)


def check_generates(model: ModelFile) -> None:
    """Refuse a model that only embeds texts or scores pairs of them.

    Raises:
        UnsupportedError: If the model is an encoder or a reranker.
    """
    if kind := without_logits(model.config):
        use = "rerank" if model.config["scores_pairs"] else "embed"
        other = "embed only with a model of embeddings" if use == "rerank" else "rerank only with a cross-encoder"
        raise UnsupportedError(f"the model is {kind}, which generates no text: use {use} ({other})")


def check_length(texts: Iterable[str], model: ModelFile, max_tokens: int | None, context: int) -> None:
    """Reject a prompt that is certainly too long, before spending time and memory on tokenizing it.

    Raises:
        ContextFullError: If the texts together have more tokens than the context has positions.
    """
    least = sum(map(model.tokenizer.min_tokens, texts))
    if least > context:
        raise overflow_error(f"at least {least}", max_tokens, context)


# ---- conversations


def render_runs(
    model: ModelFile, messages: Any, options: Mapping[str, Any], tool_format: str | None = None
) -> list[PromptRun]:
    """Render a conversation to runs of text that the template wrote and of text from messages.

    Raises:
        ArgumentError: If the model has no chat template, or a message has an unknown role.
        ChatTemplateError: If the template fails or refuses the messages.
        UnsupportedError: If the model is an encoder.
    """
    check_generates(model)
    return rendered_runs(model, messages, options, tool_format)


def rendered_runs(
    model: ModelFile, messages: Any, options: Mapping[str, Any], tool_format: str | None = None
) -> list[PromptRun]:
    """Like `render_runs`, also for models that only score pairs of texts."""
    if model.chat_template is None:
        raise ArgumentError(NO_TEMPLATE)
    tokenizer = model.tokenizer
    find_special = tokenizer.special_spans if tokenizer.reads_other_spellings else None
    messages, given = template_arguments(model, messages, options, tool_format)
    return model.chat_template.render_runs(messages, tokenizer.special_names, find_special, **given)


def template_arguments(
    model: ModelFile, messages: Any, options: Mapping[str, Any], tool_format: str | None = None
) -> tuple[Any, dict[str, Any]]:
    """Convert messages and options to the chat template's format: calls to dicts, functions to schemas."""
    from llamac.tools.conversation import prepared
    from llamac.tools.formats import format_named
    from llamac.tools.functions import tool_list

    given = dict(options)
    assert model.chat_template is not None
    if given.get("tools") is not None:
        given["tools"] = tool_list(given["tools"])
    template = model.chat_template.choose(given.get("template"), tools=given.get("tools") is not None)
    form = None if tool_format is None else format_named(tool_format)
    return prepared(messages, template, given.get("tools"), model.chat_template.special_tokens, form), given


def tokenize_runs(model: ModelFile, runs: Iterable[PromptRun]) -> list[int]:
    """Convert runs to token ids. Only the template's own text can become special tokens."""
    ids: list[int] = []
    for run in runs:
        ids += model.tokenize(run.text, add_special=False, parse_special=run.parse_special)
    return ids


def conversation_ids(
    model: ModelFile,
    messages: Sequence[Mapping[str, Any] | Message],
    tools: ToolOptions,
    template_options: Mapping[str, Any] | None,
    params: SamplingParams,
    context: int,
) -> tuple[ConversationIds, SamplingParams]:
    """Convert the arguments of `chat` to token ids and parameters. Messages cannot write special tokens.

    Raises:
        ArgumentError: If the model has no chat template, a message has an unknown role, or an option is not one of
            the template's.
        ChatTemplateError: If the template fails or refuses the messages.
        ContextFullError: If the conversation certainly does not fit the context.
    """
    from llamac.engine.generation.reading import chosen_tools, reading_of
    from llamac.tools.conversation import as_dicts

    chat: Any = as_dicts(messages)
    if not isinstance(template_options, Mapping | None):
        raise wrong_type("template_options", template_options, "a dict")
    options = dict(template_options or {})
    for name in options:
        if not isinstance(name, str):
            raise wrong_type("a name of template_options", name, "a str")
    for name in ("messages", "tools", "parse_special"):
        if name in options:
            raise ArgumentError(f"template_options holds {name!r}, which is not an option of the template")
    options["tools"] = chosen_tools(tools)[0]
    runs = render_runs(model, chat, options, tools.tool_format)
    assert model.chat_template is not None
    template = model.chat_template.choose(options.get("template"), tools=options["tools"] is not None)
    answer = _schema_of(params.guide) if tools.tool_choice == "auto" else None
    reading, guide = reading_of(model, template, tools, "".join(run.text for run in runs), answer)
    if guide is not None:
        if params.guide is not None and answer is None:
            raise ArgumentError(_guides_error(tools, options["tools"]))
        params = params.updated({"guide": guide})
    can_limit = params.reasoning_budget is None and (params.beam_width or 1) == 1
    if params.guide is not None and can_limit and _is_without_reasoning(options):
        params = params.updated({"reasoning_budget": 0})  # the guide would make an opening tag more probable
    ids = ConversationIds()
    described = {"messages": list(chat), "tools": options["tools"], "template_options": dict(template_options or {})}
    if tools.tool_format is not None:
        described["tool_format"] = tools.tool_format
    ids.reading = replace(reading, chat=described)
    if params.context_overflow in (None, "error"):
        check_length((run.text for run in runs), model, params.max_tokens, context)
        ids += tokenize_runs(model, runs)
        return ids, params
    ids += tokenize_runs(model, runs)
    if params.context_keep is None:
        params = params.updated({"context_keep": _system_tokens(model, ids, chat, options, tools.tool_format)})
    return ids, params


def _is_without_reasoning(options: Mapping[str, Any]) -> bool:
    """Whether template options turn reasoning off."""
    return options.get("enable_thinking") is False or options.get("reasoning_effort") == "none"


def _schema_of(guide: Guide | None) -> Mapping[str, Any] | None:
    """The schema of a guide for JSON; None for others. Calls can come in place of JSON."""
    if guide is None:
        return None
    from llamac.guided.guides import Json

    return guide.schema if isinstance(guide, Json) else None


def _guides_error(options: ToolOptions, tools: list[dict[str, Any]]) -> str:
    """Return the message for a guide besides calls that need one of their own."""
    if options.tool_choice != "auto":
        other, what_to_do = f"tool_choice {options.tool_choice!r}", "remove one of them"
    else:
        names = [tool["function"]["name"] for tool in tools if tool["function"].get("strict") is True]
        other = f"the strict tools {', '.join(map(repr, names))}"
        what_to_do = 'remove it, or "strict" from the tools'
    return f"guide cannot be combined with {other}, because both constrain the answer: {what_to_do}"


def _system_tokens(
    model: ModelFile,
    ids: list[int],
    messages: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    tool_format: str | None,
) -> int:
    """How many ids of a conversation come before what its first message other than the system's says."""
    n = next((i for i, message in enumerate(messages) if message.get("role") not in SYSTEM_ROLES), len(messages))
    try:
        chat = [*messages[:n], {"role": "user", "content": ""}]
        other = tokenize_runs(model, render_runs(model, chat, options, tool_format))
    except ChatTemplateError:
        return SINKS
    return next((i for i, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b), min(len(ids), len(other)))
