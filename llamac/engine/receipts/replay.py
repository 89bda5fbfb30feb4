"""Reproduces a result from its receipt, and reports what has changed."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from llamac import __version__
from llamac.engine.generation.candidates import WITHOUT_BEAMS, generate_several
from llamac.engine.generation.stream import Stream, resolved_params
from llamac.engine.identity import Identity, identity_of
from llamac.engine.prompts.overflow import FittedPrompt, fit_prompt
from llamac.engine.prompts.prompt_ids import prompt_ids, render_runs, tokenize_runs
from llamac.engine.receipts.receipt import Receipt
from llamac.engine.sampling.params import ResolvedParams, SamplingParams
from llamac.errors import ArgumentError, LlamacError

if TYPE_CHECKING:
    from llamac.engine.generation.output import Completion
    from llamac.engine.model import Model
    from llamac.engine.session import Session

# Descriptions of a model's parts, in the order of the report.
_PARTS = {
    "weights": "the model's weights or configuration",
    "adapters": "the LoRA adapters",
    "numerics": "the numerics version",
    "stop_ids": "the tokens that end a text",
    "tokenizer": "the tokenizer",
    "template": "the chat template, which made the prompt's ids",
}
CUT_SHORT = ("cancelled", "deadline")
# The parameters of a request, which `SamplingParams` checks.
_REQUESTED = {field.name for field in fields(SamplingParams)}


@dataclass(frozen=True)
class Replay:
    """A reproduced result, compared with its receipt.

    Attributes:
        identical: Whether tokens, text, finish reason and stop string equal those of the receipt.
        changes: A sentence for each difference: parts of the model, settings, tokens. A changed part does not
            necessarily change the result.
        position: The index of the first generated token that differs; None if all are equal or nothing was computed.
        completion: The reproduced result; None if it could not be computed.
    """

    identical: bool
    changes: tuple[str, ...]
    position: int | None
    completion: Completion | None


def replay_on(model: Model, receipt: Receipt) -> Replay:
    """Reproduce a result on a model."""
    changes = _changed_parts(receipt, identity_of(model)) + _changed_prompt(model, receipt)
    try:
        completion = _repeat(model, receipt)
    except LlamacError as error:
        return Replay(False, (*changes, f"the result cannot be computed here: {error}"), None, None)
    position, differences = _differences(receipt, completion)
    return Replay(not differences, (*changes, *differences), position, completion)


def _changed_parts(receipt: Receipt, found: Identity) -> list[str]:
    """Describe the parts of the model that differ from the receipt."""
    changes = []
    for part, name in _PARTS.items():
        before, now = getattr(receipt.model, part), getattr(found, part)
        if before != now:
            verb = "differ" if name.endswith(("adapters", "tokens that end a text")) else "differs"
            changes.append(f"{name} {verb}: the receipt has {_shown(before)}, the model has {_shown(now)}")
    if receipt.llamac != __version__:
        changes.append(f"the receipt was written by llamac {receipt.llamac}, this is {__version__}")
    return changes


def _changed_prompt(model: Model, receipt: Receipt) -> list[str]:
    """Report whether the conversation now renders to another prompt. The replay itself uses the receipt's ids."""
    chat = receipt.chat
    if chat is None:
        return []
    try:
        options = {**chat["template_options"], "tools": chat["tools"]}
        now = tokenize_runs(model, render_runs(model, chat["messages"], options, chat.get("tool_format")))
    except (LlamacError, TypeError) as error:
        return [f"the conversation cannot be rendered here: {error}"]
    before = list(receipt.prompt)
    with contextlib.suppress(LlamacError):  # the result cannot be computed, or the prompt does not fit
        now = list(fit_prompt(array("i", now), _params(model, receipt.settings), receipt.context).ids)
    if now == before:
        return []
    n = min(len(before), len(now))
    position = next((i for i in range(n) if before[i] != now[i]), n)
    return [f"the conversation is rendered differently: the ids of the prompt differ from number {position} on"]


def _shown(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, str):
        return value[:12] + "..."
    return str(list(value) if isinstance(value, tuple) else value)


def _repeat(model: Model, receipt: Receipt) -> Completion:
    """Generate with the receipt's settings, at most one token more than the receipt has.

    A result that was cut short is reproduced up to its length.
    """
    params = _params(model, receipt.settings)
    session = model.session(
        context=receipt.context,
        kv_dtype=receipt.kv_dtype,  # type: ignore[arg-type]
        numerics=receipt.numerics,  # type: ignore[arg-type]
    )
    try:
        prompt = prompt_ids(model, receipt.prompt, params, session.context)
        if params.beam_width > 1:
            return _search_again(session, prompt, params, receipt)
        stream = Stream(session, prompt, params, owns_session=True)
    except BaseException:
        session.close()
        raise
    most = len(receipt.tokens) + (receipt.finish_reason not in CUT_SHORT)  # a damaged receipt may never end
    with stream:  # setting max_tokens would change the result: a guide completes its text before that limit
        while len(stream._output.tokens) < most and next(stream, None) is not None:
            pass
    return stream.completion


def _search_again(session: Session, prompt: FittedPrompt, params: ResolvedParams, receipt: Receipt) -> Completion:
    """Repeat a beam search, and return the sequence with the receipt's rank."""
    if receipt.finish_reason in CUT_SHORT:
        raise LlamacError("it is a sequence of a beam search that was cut short at an unknown step")
    if not 0 <= receipt.rank < params.beam_width:
        raise LlamacError(f"its rank is {receipt.rank}, expected 0 to {params.beam_width - 1}, as beam_width says")
    with session:
        return generate_several(session, prompt, replace(params, n=receipt.rank + 1)).choices[receipt.rank]


def _params(model: Model, settings: Mapping[str, Any]) -> ResolvedParams:
    """Restore the parameters of a receipt.

    Raises:
        ArgumentError: If a parameter is out of range, unknown to this version, or a function.
    """
    unknown = next((name for name in settings if name not in _REQUESTED), None)
    if unknown is not None:
        raise LlamacError(f"this version has no setting {unknown!r}")
    if settings.get("beam_width", 1) != 1:  # a model's recommendations for draws had no effect
        settings = {name: value for name, value in settings.items() if name not in WITHOUT_BEAMS}
    values = {name: _restored(name, settings[name]) for name in settings if name in _REQUESTED}
    return resolved_params(model, SamplingParams(**values))


def _restored(name: str, value: Any) -> Any:
    """Restore a parameter from its JSON."""
    if name == "logit_bias":
        return _bias(value)
    if isinstance(value, dict) and isinstance(value.get("grammar"), str):
        from llamac.guided.guides import Guide

        return Guide(value["grammar"], "of a receipt", _closings(value.get("closings", [])))
    functions = [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
    if functions or isinstance(value, dict):
        shown = [item.get("python", item) for item in functions] or value
        raise LlamacError(f"{name} was a function of the program, {shown}, which a receipt cannot contain")
    return value


def _bias(value: Any) -> list[tuple[int, float]]:
    """Restore the parameter `logit_bias`. Its numbers are checked later."""
    pairs = value if isinstance(value, list) else [value]
    for pair in pairs:
        is_pair = isinstance(pair, list) and len(pair) == 2
        if not is_pair or not isinstance(pair[1], int | float | str) or pair[1] is True or pair[1] is False:
            raise ArgumentError(f"logit_bias contains {pair!r:.60}, expected pairs of a token id and a number")
    try:
        return [(token, float(bias)) for token, bias in pairs]
    except (ValueError, OverflowError) as error:
        raise ArgumentError(f"logit_bias contains a value that is not a number: {error}") from None


def _closings(value: object) -> list[list[int]]:
    """Restore the tokens that end free text in a grammar."""
    if not isinstance(value, list) or not all(isinstance(ids, list) and ids for ids in value):
        raise LlamacError(f"the guide's closings are {value!r}, expected a list of lists of token ids")
    if not all(type(token) is int and 0 <= token < 1 << 31 for ids in value for token in ids):
        raise LlamacError("the guide's closings must contain only token ids")
    return value


def _differences(receipt: Receipt, completion: Completion) -> tuple[int | None, list[str]]:
    """Return the index of the first token that differs, and descriptions of the differences."""
    before, now = list(receipt.tokens), completion.tokens
    if receipt.finish_reason in CUT_SHORT:
        now = now[: len(before)]
    if before != now:
        n = min(len(before), len(now))
        position = next((i for i in range(n) if before[i] != now[i]), n)
        ends = f"{_at('the receipt', before, position)}, {_at('the repeated result', now, position)}"
        return position, [f"the tokens differ from number {position} on: {ends}"]
    if receipt.finish_reason in CUT_SHORT:
        return None, []
    differences = []
    for name in ("text", "finish_reason", "stopped_by"):
        old, new = getattr(receipt, name), getattr(completion, name)
        if old != new:
            differences.append(f"{name} differs: the receipt has {old!r}, the repeated result {new!r}")
    return None, differences


def _at(name: str, tokens: list[int], position: int) -> str:
    return f"{name} {f'has {tokens[position]}' if position < len(tokens) else 'has ended'}"
