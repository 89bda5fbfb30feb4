"""Judges what a model wrote: whether the text of its turn obeys the check of a conversation."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from .conversation import Check

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_THOUGHT = re.compile(r"\A\s*<think>\s*(.*?)\s*</think>\s*", re.DOTALL)


@dataclass(frozen=True)
class Turn:
    """The parts of a turn: reasoning, answer and tool calls. A call that is not JSON is None."""

    thought: str | None
    answer: str
    calls: list[Any] = field(default_factory=list)


def parsed(text: str) -> Turn:
    """Take a turn apart."""
    thought = _THOUGHT.match(text)
    rest = text[thought.end() :] if thought else text
    calls: list[Any] = []
    for found in _CALL.finditer(rest):
        try:
            calls.append(json.loads(found[1]))
        except ValueError:
            calls.append(None)
    return Turn(thought[1] if thought else None, _CALL.sub("", rest).strip(), calls)


def fault(text: str, check: Check, *, ended: bool = True) -> str | None:
    """Say why the turn does not obey, or return None if it does.

    ended: whether the model ended its turn itself.
    """
    if not ended:
        return "the turn has no end"
    turn = parsed(text)
    if turn.calls != list(check.calls):
        return f"calls are {json.dumps(turn.calls)}, expected {json.dumps(check.calls)}"
    if check.thinks != (turn.thought is not None):
        return "no reasoning" if check.thinks else "reasoning that nobody asked for"
    if check.calls:
        return f"text beside the calls: {turn.answer!r}" if turn.answer else None
    if check.text is not None and turn.answer != check.text:
        return f"the answer is {turn.answer!r}, expected {check.text!r}"
    if check.json is not None:
        return _json_fault(turn.answer, check.json)
    low = turn.answer.lower()
    for part in check.has:
        if not contains(low, part):
            return f"{part!r} is not in {turn.answer!r}"
    for part in check.lacks:
        if contains(low, part):
            return f"{part!r} is in {turn.answer!r}"
    return None


def contains(text: str, part: str) -> bool:
    """Whether a text in small letters has the part, and not only inside a longer word or number."""
    return re.search(rf"(?<!\w){re.escape(part.lower())}(?!\w)", text) is not None


def _json_fault(answer: str, expected: Any) -> str | None:
    try:
        value = json.loads(answer)
    except ValueError:
        return f"not JSON: {answer!r}"
    # In Python, True == 1 and 1 == 1.0; in JSON they differ. The order of the keys is part of the order given.
    if json.dumps(value) != json.dumps(expected):
        return f"the answer is {json.dumps(value)}, expected {json.dumps(expected)}"
    return None
