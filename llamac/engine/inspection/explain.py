"""Explains a request: its tokens, why BOS was or was not added, which tokens are cached or cut, and why it ended."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

from llamac.arguments import wrong_type
from llamac.engine.generation.stream import resolved_params, run
from llamac.engine.prompts.overflow import ContextOverflow, fit_prompt
from llamac.engine.prompts.prompt_ids import ToolOptions, conversation_ids, render_runs, tokenize_runs
from llamac.engine.rows import as_ids, common_prefix
from llamac.engine.sampling.params import ResolvedParams, SamplingParams
from llamac.errors import ArgumentError, ContextFullError

if TYPE_CHECKING:
    from llamac.engine.generation.output import Completion
    from llamac.engine.model import Model
    from llamac.engine.session import Session


@dataclass(frozen=True)
class ExplainedToken:
    """A token of a prompt.

    Attributes:
        id: Its id.
        bytes: Its bytes, or the name of a special token. Empty if the model has no tokenizer.
        is_special: Whether it is a special token.
        is_cached: Whether it is already in the session.
        is_cut: Whether it is dropped because the context is full.
    """

    id: int
    bytes: bytes
    is_special: bool
    is_cached: bool
    is_cut: bool


@dataclass(frozen=True)
class Explanation:
    """The explanation of a request.

    Attributes:
        prompt: The text that was tokenized, as the chat template rendered it; None for token ids.
        tokens: The prompt's tokens, including those that are cut.
        bos_added: Whether BOS was added.
        bos_reason: Why BOS was or was not added.
        context: Positions of the context.
        max_tokens: Maximum number of new tokens, or None.
        context_overflow: The policy for a full context.
        cached: Number of prompt tokens that are already in the session.
        cut: Begin and end (exclusive) of the tokens that are cut; None if none are.
        kept: Number of leading tokens that a shift keeps; 0 if the context is not shifted.
        error: Why the prompt is rejected, or None.
        completion: The result; None if the prompt is rejected or nothing was generated.
        ended_by: What ended the generation, or None.
    """

    prompt: str | None
    tokens: tuple[ExplainedToken, ...]
    bos_added: bool
    bos_reason: str
    context: int
    max_tokens: int | None
    context_overflow: ContextOverflow
    cached: int
    cut: tuple[int, int] | None
    kept: int
    error: str | None
    completion: Completion | None
    ended_by: str | None


def explain(
    model: Model,
    prompt: str | Sequence[int] | Sequence[Mapping[str, Any]],
    params: SamplingParams,
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    template_options: Mapping[str, Any] | None,
    context: int | None,
    session: Session | None,
    generate: bool,
) -> Explanation:
    """Explain a request of `Model.explain`."""
    if session is not None and context is not None:
        raise ArgumentError("context and session are both given: a session has its own context")
    limit = session.context if session is not None else model._context_limit(context)
    text, ids, reason, added = _prompt(model, prompt, tools, template_options)
    asked: Sequence[int] = ids
    if _is_messages(prompt):
        with contextlib.suppress(ContextFullError):  # `fit_prompt` finds that as well
            asked, params = conversation_ids(model, prompt, ToolOptions(tools), template_options, params, limit)
    resolved = resolved_params(model, params)
    cut, kept, error, fitted = None, 0, None, ids
    try:
        found = fit_prompt(ids, resolved, limit)
        fitted, kept = found.ids, found.keep if resolved.context_overflow == "shift" else 0
        if found.truncated:
            start = common_prefix(ids, fitted)
            cut = (start, start + found.truncated)
    except ContextFullError as failure:
        error = str(failure)
    cached = session._reusable(fitted) if session is not None and error is None else 0
    completion = None
    if generate and error is None:
        # ignore a random seed from `resolved_params`: the stream picks its own and reports it
        streaming = model.stream(asked, params, context=context) if session is None else session.stream(asked, params)
        completion = run(streaming)
    return Explanation(
        prompt=text,
        tokens=_tokens(model, ids, cached, cut),
        bos_added=added,
        bos_reason=reason,
        context=limit,
        max_tokens=resolved.max_tokens,
        context_overflow=resolved.context_overflow,
        cached=cached,
        cut=cut,
        kept=kept,
        error=error,
        completion=completion,
        ended_by=None if completion is None else _end(model, completion, resolved),
    )


def _is_messages(prompt: object) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str)
        and len(prompt) > 0
        and all(isinstance(message, Mapping) for message in prompt)
    )


def _prompt(
    model: Model,
    prompt: str | Sequence[int] | Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    template_options: Mapping[str, Any] | None,
) -> tuple[str | None, array[int], str, bool]:
    """Return the text of a prompt, its ids, why BOS was or was not added, and whether it was."""
    bos = model.special.bos_id
    if _is_messages(prompt):
        runs = render_runs(model, prompt, {"tools": tools, **(template_options or {})})
        ids = as_ids(tokenize_runs(model, runs))
        wrote = "it wrote BOS" if bos is not None and ids[:1] == array("i", [bos]) else "it wrote none"
        return "".join(text for text, _ in runs), ids, f"the chat template decides, and {wrote}", False
    if tools is not None or template_options is not None:
        raise ArgumentError("tools and template_options belong to messages, and the prompt is not a list of them")
    if isinstance(prompt, str):
        ids = as_ids(model.tokenizer.encode(prompt, parse_special=True))
        name = _bytes(model, bos).decode("utf-8", "replace") if bos is not None else ""
        if bos is None:
            added, reason = False, "the model has no BOS token"
        elif not ids:
            added, reason = True, "the prompt is empty, and the model needs a first token"
        elif not model.special.add_bos:
            added, reason = False, "the tokenizer's rules add none"
        elif ids[0] == bos:
            added, reason = False, f"the text begins with {name} already"
        else:
            added, reason = True, "the tokenizer's rules put it before a text"
        return prompt, array("i", model.special.front) + ids if added else _not_empty(ids), reason, added
    if not isinstance(prompt, Iterable):
        raise wrong_type("prompt", prompt, "a str, token ids or messages")
    return None, _not_empty(as_ids(prompt)), "token ids are used unchanged", False  # type: ignore[arg-type]


def _not_empty(ids: array[int]) -> array[int]:
    if not ids:
        raise ArgumentError("the prompt is empty: there is nothing to explain")
    return ids


def _bytes(model: Model, token: int) -> bytes:
    if not model.has_tokenizer or not 0 <= token < model.tokenizer.n_ids:
        return b""
    return model.tokenizer.token_bytes(token)


def _tokens(model: Model, ids: array[int], cached: int, cut: tuple[int, int] | None) -> tuple[ExplainedToken, ...]:
    special = model.tokenizer._loaded.texts.special if model.has_tokenizer else frozenset()
    start, end = cut or (len(ids), len(ids))
    found = []
    for i, token in enumerate(ids):
        is_cut = start <= i < end
        position = i if i < start else i - (end - start)
        found.append(
            ExplainedToken(token, _bytes(model, token), token in special, not is_cut and position < cached, is_cut)
        )
    return tuple(found)


def _end(model: Model, completion: Completion, params: ResolvedParams) -> str:
    """Describe what ended a generation."""
    stop = completion.stopped_by
    if isinstance(stop, str):
        return f"the stop string {stop!r}"
    if stop is not None:
        kind = "token of stop_token_ids" if stop in params.stop_token_ids else "stop token of the model"
        return f"the {kind} {stop}, {_bytes(model, stop).decode('utf-8', 'replace')!r}"
    n = completion.usage.completion_tokens
    reasons = {
        "length": f"max_tokens: {n} tokens were generated",
        "context": f"the context is full after {n} tokens",
        "stop": "the text matches the guide, and nothing can follow",
        "cancelled": "it was cancelled",
        "deadline": "its time was over",
    }
    return reasons[completion.finish_reason]
