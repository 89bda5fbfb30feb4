"""Questions about a passage: answered, answered briefly, and not answered by the passage."""

from __future__ import annotations

from ..lexicon import capital
from . import facts
from . import words as w
from .conversation import Check, Conversation, new
from .dice import Dice, Pool
from .facts import Attribute, Fact, World

NOT_SAID = "The text does not say."

AROUND = Pool(
    "{text}\n\n{question}",
    "{text}\n{question}",
    "Text: {text}\n\nQuestion: {question}",
    "Read this text.\n\n{text}\n\n{question}",
    "Text: {text}\n\n{question}",
    "{question}\n\n{text}",
    "Answer a question about this text: {text}\n\n{question}",
    "Here is a text: {text}\n{question}",
    "{question}\n\nText: {text}",
    "Read this text: {text}\n\nQuestion: {question}",
    "{text} {question}",
    "I have a question about a text.\n\n{text}\n\n{question}",
    "Context: {text}\nQuestion: {question}",
    "Use this text to answer. {text}\n\n{question}",
    "Here is a text.\n\n{text}\n\nQuestion: {question}",
)
FIRST = Pool(
    "{text}",
    "Read this text: {text}",
    "Here is a text. {text}",
    "Please read this: {text}",
    "Please read this text.\n\n{text}",
)
READ = "I have read it. What would you like to know?"
POLITE = Pool(
    "{question}", "Tell me: {question}", "Please: {question}", "{question} Please answer.", "Please answer: {question}",
    "So: {question}", "Please tell me: {question}", "My question: {question}", "Now tell me: {question}",
    "My question is: {question}",
)  # fmt: skip
BRIEF = Pool(
    "{question} Answer briefly.",
    "{question} Only the answer, please.",
    "Answer briefly: {question}",
    "{question} Be brief.",
    "Be brief: {question}",
    "In short: {question}",
    "{question} Answer in one or two words.",
    "{question} Give only the answer.",
    "{question} Just the answer.",
    "Give only the answer, please. {question}",
)
BRIEF_SYSTEM = Pool(
    "Answer briefly.", "Be brief.", "Give only the answer.", "Give short answers without sentences.",
    "Give only short answers.",
)  # fmt: skip


def asked(dice: Dice, subject: str, attribute: Attribute) -> str:
    """A question about an attribute."""
    return w.casual(dice, attribute.ask(dice, subject))


def politely(dice: Dice, question: str) -> str:
    """The question, sometimes with a few words before or after it."""
    return question if dice.chance(1, 2) else dice.pick(POLITE).format(question=question)


def around(dice: Dice, world: World, question: str) -> str:
    """A message with the passage and the question."""
    return dice.pick(AROUND).format(text=world.text, question=question)


def others(world: World, fact: Fact) -> tuple[str, ...]:
    """The values that would be wrong answers: of the same attribute, for other subjects."""
    same = [str(each.value) for each in world.facts if each.attribute is fact.attribute and each is not fact]
    right = fact.answer.lower()
    return tuple(value for value in same if value.lower() not in right)


def is_whole(fact: Fact, world: World) -> Check:
    """The check of a sentence that answers a question."""
    return Check(has=(str(fact.value),), lacks=(*others(world, fact), NOT_SAID))


def answers(dice: Dice) -> Conversation:
    """Questions whose answers stand in the passage, one after another; some of the earlier ones are not answered."""
    conversation = new("answers", dice)
    world = facts.world(dice)
    asks = dice.shuffled(world.facts)[: dice.number(1, (2, 3, 4)[dice.level])]
    if dice.chance(1, 6):
        conversation.user(dice.pick(FIRST).format(text=world.text))
        conversation.answer(READ)
        opened = True
    else:
        opened = False
    for index, fact in enumerate(asks):
        question = politely(dice, asked(dice, fact.subject, fact.attribute))
        conversation.user(question if opened or index else around(dice, world, question))
        conversation.answer(fact.answer, is_whole(fact, world))
        if index + 1 < len(asks) and world.unsaid and dice.chance(1, 4):
            conversation.user(asked(dice, *dice.choose(world.unsaid)))
            conversation.answer(NOT_SAID)
    return conversation


def brief(dice: Dice) -> Conversation:
    """A question to be answered with the value alone, because the user or the system message asks for it."""
    conversation = Conversation("follows")
    world = facts.world(dice)
    always = dice.chance(1, 2)
    if always:
        conversation.system(dice.pick(BRIEF_SYSTEM))
    for index, fact in enumerate(dice.shuffled(world.facts)[: dice.number(1, 3)]):
        question = asked(dice, fact.subject, fact.attribute)
        question = question if always else dice.pick(BRIEF).format(question=question)
        conversation.user(question if index else around(dice, world, question))
        conversation.answer(capital(str(fact.value)))
    return conversation


def unsaid(dice: Dice) -> Conversation:
    """A question that the passage does not answer, sometimes after one that it answers."""
    conversation = new("declines", dice)
    world = facts.world(dice)
    while not world.unsaid:
        world = facts.world(dice)
    first = dice.chance(1, 2)
    if first:
        fact = dice.choose(world.facts)
        conversation.user(around(dice, world, asked(dice, fact.subject, fact.attribute)))
        conversation.answer(fact.answer)
    question = politely(dice, asked(dice, *dice.choose(world.unsaid)))
    conversation.user(question if first else around(dice, world, question))
    conversation.answer(NOT_SAID, Check(has=("does not say",)))
    return conversation
