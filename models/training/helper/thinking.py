"""Questions to think about: the reasoning comes first, then the answer."""

from __future__ import annotations

from ..lexicon import capital
from . import facts
from . import words as w
from .conversation import Check, Conversation
from .dice import Dice, Pool
from .facts import World, filled
from .passages import AROUND, NOT_SAID, around, asked, others

THINK = Pool(
    "{question} Think first.",
    "Think first, then answer: {question}",
    "{question} Think before you answer.",
    "Think about it: {question}",
    "Think before you answer: {question}",
)
THINK_SYSTEM = Pool(
    "Think before you answer.", "Think first.", "Always think first, then answer.", "Think, then answer.",
    "Always think before you answer.",
)  # fmt: skip


def asks_to_think(dice: Dice, conversation: Conversation, question: str) -> str:
    """Ask for reasoning: in the question, in the system message, or with the template's variable."""
    way = dice.number(0, 2)
    if way == 0:
        return dice.pick(THINK).format(question=question)
    if way == 1:
        conversation.system(dice.pick(THINK_SYSTEM))
    else:
        conversation.enable_thinking = True
    return question


def thinks(dice: Dice) -> Conversation:
    """One of the ways to think before an answer."""
    way = dice.choose((quotes, quotes, compares, two_steps, sums))
    return way(dice)


def quotes(dice: Dice) -> Conversation:
    """The reasoning quotes the sentence of the passage that has the answer, or finds none."""
    conversation = Conversation("thinks")
    world = facts.world(dice)
    if world.unsaid and dice.chance(1, 4):
        question = asks_to_think(dice, conversation, asked(dice, *dice.choose(world.unsaid)))
        conversation.user(around(dice, world, question))
        conversation.answer(NOT_SAID, Check(has=("does not say",), thinks=True), "No sentence of the text says that.")
        return conversation
    fact = dice.choose(world.facts)
    question = asks_to_think(dice, conversation, asked(dice, fact.subject, fact.attribute))
    conversation.user(around(dice, world, question))
    check = Check(has=(str(fact.value),), lacks=others(world, fact), thinks=True)
    conversation.answer(fact.answer, check, f'The text says: "{capital(fact.sentence)}"')
    return conversation


COMPARISONS = (
    (facts.PERSON, "age", w.person, Pool(
        "Who is older, {a} or {b}?", "Which of the two is older: {a} or {b}?", "Is {a} or {b} older?",
        "{a} or {b}: who is older?", "Who of the two is older, {a} or {b}?",
    ), "{N} is older."),
    (facts.THING, "price", lambda dice: f"the {w.thing(dice)}", Pool(
        "Which costs more, {a} or {b}?", "What costs more: {a} or {b}?", "Does {a} or {b} cost more?",
        "{a} or {b}: which costs more?", "Which of the two costs more, {a} or {b}?",
    ), "{N} costs more."),
    (facts.TOWN, "population", w.town, Pool(
        "Which is bigger, {a} or {b}?", "Which town is bigger: {a} or {b}?", "Is {a} or {b} bigger?",
        "{a} or {b}: which is bigger?", "Which of the two towns is bigger, {a} or {b}?",
    ), "{N} is bigger."),
)  # fmt: skip


def compares(dice: Dice) -> Conversation:
    """Two numbers of the passage are compared."""
    conversation = Conversation("thinks")
    attributes, key, name, asks, full = dice.choose(COMPARISONS)
    attribute = next(each for each in attributes if each.key == key)
    one, two = facts.state(dice, name(dice), attribute), facts.state(dice, name(dice), attribute)
    while one.subject in two.subject or two.subject in one.subject or one.value == two.value:
        two = facts.state(dice, name(dice), attribute)
    more, less = sorted((one, two), key=lambda fact: int(fact.value), reverse=True)
    world = World(dice.shuffled((one, two)), [])
    question = asks_to_think(dice, conversation, capital(dice.pick(asks).format(a=one.subject, b=two.subject)))
    conversation.user(around(dice, world, question))
    thought = f"{one.answer} {two.answer} {more.value} is more than {less.value}."
    check = Check(has=(more.subject,), lacks=(less.subject,), thinks=True)
    conversation.answer(filled(full, more.subject), check, thought)
    return conversation


def two_steps(dice: Dice) -> Conversation:
    """A thing lies in another one, and that one is in a room."""
    conversation = Conversation("thinks")
    inner, outer = (f"the {dice.pick(w.OBJECTS)}", f"the {dice.pick(w.COLORS)} {dice.choose(('box', 'bag', 'case'))}")
    room, other_room = dice.several(w.ROOMS, 2)
    other = f"the {dice.pick(w.COLORS)} {dice.choose(('jar', 'chest', 'crate'))}"
    sentences = dice.shuffled(
        [f"{capital(inner)} is in {outer}.", f"{capital(outer)} is in the {room}.",
         f"{capital(other)} is in the {other_room}."]
    )  # fmt: skip
    question = asks_to_think(dice, conversation, f"In which room is {inner}?")
    conversation.user(dice.pick(AROUND).format(text=" ".join(sentences), question=question))
    thought = f"{capital(inner)} is in {outer}. {capital(outer)} is in the {room}."
    check = Check(has=(room,), lacks=(other_room,), thinks=True)
    conversation.answer(f"{capital(inner)} is in the {room}.", check, thought)
    return conversation


SUMS = Pool(
    "{n} has {a} {things} and gets {b} more. How many {things} does {n} have?",
    "{n} has {a} {things}. {n} finds {b} more. How many {things} does {n} have now?",
    "There are {a} {things} on the table. {n} brings {b} more. How many {things} are there?",
    "{n} buys {a} {things}, then {b} more. How many {things} does {n} have?",
    "{n} has {a} {things}. {n} buys {b} more. How many {things} does {n} have now?",
)


def sums(dice: Dice) -> Conversation:
    """A small sum, with the calculation as the reasoning."""
    conversation = Conversation("thinks")
    a, b = dice.number(1, 20), dice.number(1, 20)
    things = w.plural(dice.pick(w.OBJECTS))
    question = dice.pick(SUMS).format(n=w.person(dice), a=a, b=b, things=things)
    conversation.user(asks_to_think(dice, conversation, question))
    total = str(a + b)
    conversation.answer(f"{capital(total)} {things}.", Check(has=(total,), thinks=True), f"{a} + {b} = {total}.")
    return conversation
