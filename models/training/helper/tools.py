"""Conversations with tools: one call, several calls at once, no call, and answers from the result of a call."""

from __future__ import annotations

import re
from typing import Any

from . import talk
from . import words as w
from .conversation import Check, Conversation, new
from .dice import Dice, Pool
from .functions import USUAL, Function, invented, renamed, shown

NO_TOOL = "I cannot do that with my tools."

TOGETHER = Pool("{a} {b}", "{a}\n{b}", "{a} Also: {b}", "1. {a}\n2. {b}", "1: {a}\n2: {b}")
ERRORS = Pool("not found", "no connection", "not allowed", "out of stock", "access denied", "timeout", "no answer",
              "not available", "wrong code", "not possible")  # fmt: skip


def offer(dice: Dice, least: int = 1) -> list[Function]:
    """Draw tools with different names: usual ones and invented ones."""
    most = 8 if dice.level == 2 and dice.chance(1, 8) else (1, 2, 4)[dice.level]
    count = dice.number(least, max(least, most))
    found: dict[str, Function] = {}
    while len(found) < count:
        each = dice.choose(USUAL) if dice.chance(2, 5) else invented(dice, frozenset(found))
        name = "calculate" if verb_of(each) == "calculate" else each.name.replace("_", "").lower()
        found.setdefault(name, renamed(dice, each) if each in USUAL and dice.chance(1, 2) else each)
    if len({each.name.replace("_", "").lower() for each in found.values()}) < len(found):
        return offer(dice, least)
    return list(found.values())


def request(dice: Dice, function: Function) -> tuple[str, dict[str, Any]]:
    """Draw arguments; return the text that asks for the call, and the call."""
    values = {each.name: each.value(dice) for each in function.parameters if each.asked}
    fields = {each.field or each.name: shown(values[each.name]) for each in function.parameters if each.asked}
    text = dice.pick(function.asks).format(**fields)
    if not text[:-1].endswith(tuple(map(shown, values.values()))):
        text = w.casual(dice, text)
    return text, {"name": function.name, "arguments": values}


def with_tools(skill: str, dice: Dice, functions: list[Function]) -> Conversation:
    """Begin a conversation with these tools."""
    conversation = new(skill, dice)
    conversation.tools = [each.definition() for each in dice.shuffled(functions)]
    return conversation


def calls(dice: Dice) -> Conversation:
    """One call, sometimes after small talk."""
    functions = offer(dice)
    conversation = with_tools("calls", dice, functions)
    if dice.chance(1, 8):
        conversation.user(dice.pick(talk.GREETINGS))
        conversation.answer(talk.GREETING)
    text, call = request(dice, functions[0])
    conversation.user(text)
    conversation.call([call])
    return conversation


def calls_many(dice: Dice) -> Conversation:
    """Two calls in one answer: of the same tool or of two."""
    functions = offer(dice)
    first = functions[0]
    second = functions[1] if len(functions) > 1 and dice.chance(1, 2) else first
    (a, one), (b, two) = request(dice, first), request(dice, second)
    while one == two:
        b, two = request(dice, second)
    conversation = with_tools("calls_many", dice, functions)
    conversation.user(dice.pick(TOGETHER).format(a=a, b=b))
    conversation.call([one, two])
    return conversation


def verb_of(function: Function) -> str:
    """The first word of a tool's name: "open" of openBottle and open_bottle. Arithmetic is all the same."""
    name = function.origin or function.name
    verb = re.split(r"[_A-Z]", name)[0]
    is_usual = bool(function.origin) or function in USUAL
    return "calculate" if verb in ("add", "multiply") and is_usual else verb


def no_call(dice: Dice) -> Conversation:
    """Small talk, or a request that none of the tools can serve."""
    functions = offer(dice)
    conversation = with_tools("no_call", dice, functions)
    if dice.chance(1, 2):
        pool, text, has = dice.choose(
            (
                (talk.GREETINGS, talk.GREETING, "hello"),
                (talk.THANKS, talk.WELCOME, "welcome"),
                (talk.WHO_ARE_YOU, talk.IDENTITY, "helper"),
            )
        )
        conversation.user(dice.pick(pool))
        conversation.answer(text, Check(has=(has,), calls=()))
        return conversation
    other = dice.choose(USUAL) if dice.chance(1, 2) else invented(dice)
    verbs = {verb_of(each) for each in functions}
    while verb_of(other) in verbs:
        other = invented(dice)
    text = request(dice, other)[0]
    while other.name in text:
        text = request(dice, other)[0]
    conversation.user(text)
    conversation.answer(NO_TOOL, Check(has=("cannot",), calls=()))
    return conversation


def sentence_of(key: str, value: Any) -> str:
    """A sentence that says a value of a result."""
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return f"The {key} {'are' if isinstance(value, list) else 'is'} {text}."


def reports(dice: Dice) -> Conversation:
    """A call, its result, and the answer that says the result; sometimes the tool fails."""
    functions = offer(dice)
    conversation = with_tools("reports", dice, functions)
    for _ in range(dice.number(1, 1 + (dice.level > 0))):
        text, call = request(dice, functions[0])
        conversation.user(text)
        conversation.call([call])
        if dice.chance(1, 8):
            error = dice.pick(ERRORS)
            conversation.result({"error": error})
            conversation.answer(f"That did not work: {error}.", Check(has=(error,), calls=()))
            continue
        result = functions[0].result(dice)
        conversation.result(result)
        values = [value if isinstance(value, list) else [value] for value in result.values()]
        has = tuple(str(value) for each in values for value in each)
        conversation.answer(" ".join(sentence_of(*pair) for pair in result.items()), Check(has=has, calls=()))
    if dice.chance(1, 6):
        conversation.user(dice.pick(talk.THANKS))
        conversation.answer(talk.WELCOME, Check(has=("welcome",), calls=()))
    return conversation


def answers_beside_tools(dice: Dice) -> Conversation:
    """A name to remember, while tools are offered that nobody needs."""
    functions = offer(dice)
    conversation = with_tools("no_call", dice, functions)
    name = w.person(dice)
    conversation.user(dice.pick(talk.MY_NAME).format(n=name))
    conversation.answer(talk.NAMED_GREETING.format(n=name))
    conversation.user(dice.pick(talk.WHAT_NAME))
    conversation.answer(f"Your name is {name}.", Check(has=(name,), calls=()))
    return conversation
