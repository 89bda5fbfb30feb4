"""Small talk, names and things to remember, personas, simple instructions, and questions that nothing answers."""

from __future__ import annotations

from collections.abc import Callable

from ..lexicon import article
from . import words as w
from .conversation import Check, Conversation, new
from .dice import Dice, Pool

UNKNOWN = "I do not know. I only know what you tell me."
IDENTITY = "I am helper, a small language model."
ABILITIES = (
    "I can answer questions about a text that you give me, call your tools, answer in JSON, and think before I answer."
)
GREETING = "Hello! How can I help you?"
NAMED_GREETING = "Hello, {n}! How can I help you?"
CHEER = "I am well, thank you. How can I help you?"
WELCOME = "You are welcome!"
FAREWELL = "Goodbye!"

GREETINGS = Pool(
    "Hello", "Hi", "Hello!", "Hi!", "hello", "Hi there!", "Good morning!", "Good evening", "Hey", "Hello there!",
    "hi", "Good morning", "Hey!", "Good afternoon!", "hi there", "Hello.", "Hey there!", "Greetings!", "Hi.",
    "Good evening!", "hey", "Hello helper!", "Hi helper", "Good day!", "hello!",
)  # fmt: skip
HOW_ARE_YOU = Pool("How are you?", "How are you today?", "How do you do?", "Are you well?", "Hello! How are you?")
WHO_ARE_YOU = Pool(
    "Who are you?", "What are you?", "What is your name?", "Tell me who you are.", "Tell me your name.",
    "Who am I talking to?", "Are you a person?", "Introduce yourself.", "What is your name, please?",
    "Please tell me who you are.",
)  # fmt: skip
WHAT_CAN_YOU_DO = Pool(
    "What can you do?", "How can you help me?", "What are you good at?", "Can you help me?", "What can you do for me?"
)
THANKS = Pool(
    "Thank you!", "Thanks!", "Thank you", "Thanks", "Thank you.", "Thanks a lot!", "Great, thank you!", "Many thanks!",
    "Perfect, thanks!", "Great, thanks!",
)  # fmt: skip
BYE = Pool("Goodbye!", "Bye!", "See you!", "Goodbye", "Bye", "See you later!", "Bye bye!", "Good night!", "bye", "Bye.")
MY_NAME = Pool(
    "My name is {n}.", "I am {n}.", "Hello, my name is {n}.", "Hi, I am {n}.", "Hi, my name is {n}.",
    "Hello! I am {n}.", "Hello, I'm {n}.", "My name is {n}, hello!", "You can call me {n}.", "Hi! I'm {n}.",
)  # fmt: skip
WHAT_NAME = Pool(
    "What is my name?", "What am I called?", "Do you know my name?", "Tell me my name.", "Who am I?",
    "Do you remember my name?", "What was my name?", "Say my name.", "Please say my name.", "Please tell me my name.",
)  # fmt: skip
NOTES: tuple[tuple[str, Callable[[Dice], str]], ...] = (
    ("code", lambda dice: dice.code()),
    ("password", lambda dice: dice.coin()),
    ("room number", lambda dice: str(dice.number(1, 999))),
    ("favorite color", lambda dice: dice.pick(w.COLORS)),
    ("favorite food", lambda dice: dice.pick(w.FOODS)),
    ("favorite animal", lambda dice: f"the {dice.pick(w.ANIMALS)}"),
    ("home town", w.town),
    ("birthday", lambda dice: dice.pick(w.MONTHS)),
    ("best friend", w.person),
    ("dream", lambda dice: f"a {dice.pick(w.COLORS)} {dice.pick(w.VEHICLES)}"),
)
TELL_NOTE = Pool(
    "My {k} is {v}.", "Remember that my {k} is {v}.", "Please remember: my {k} is {v}.", "Note that my {k} is {v}.",
    "Please note that my {k} is {v}.",
)  # fmt: skip
ASK_NOTE = Pool("What is my {k}?", "Tell me my {k}.", "Do you remember my {k}?", "What was my {k}?",
                "Do you know what my {k} is?")  # fmt: skip
NOTED = "I will remember that."
WORLD_QUESTIONS = Pool(
    "What is the capital of {country}?", "Who is the president of {country}?", "How many people live in {country}?",
    "What is the weather in {city}?", "What is the weather today in {city}?", "When did {name} {brand} die?",
    "Who wrote the book about {theme}?", "Where is {city}?", "How far is it to {city}?",
    "How many people live in {city}?", "What is the population of {country}?", "Who invented the {object}?",
    "What happened in {country} in {year}?", "Tell me about {country}.", "What happened in {city} in {year}?",
    "Who won the game on {day}?", "What time is it in {city}?", "Which river flows through {city}?",
    "What do you know about {theme}?", "What time is it in {country}?", "Tell me the history of the {object}.",
    "What does the word {word} mean?", "Who is {name} {brand}?", "How does a {object} work?",
    "What do you know about {country}?", "Where does {name} live?", "What is the job of {name}?", "How old is {name}?",
    "How much does the {object} cost?", "What is the price of the {object}?",
)  # fmt: skip


def _world_question(dice: Dice) -> str:
    return dice.pick(WORLD_QUESTIONS).format(
        country=dice.pick(w.COUNTRIES),
        city=w.town(dice),
        name=w.person(dice),
        brand=w.brand(dice),
        theme=dice.pick(w.THEMES),
        object=dice.pick(w.OBJECTS),
        year=dice.number(1200, 2030),
        day=dice.pick(w.DAYS),
        word=dice.coin(),
    )


def greets(dice: Dice) -> Conversation:
    """Greetings, thanks and questions about the model itself, up to three in a row."""
    conversation = new("greets", dice)
    turns = (
        (GREETINGS, GREETING, ("hello",)),
        (GREETINGS, GREETING, ("hello",)),
        (HOW_ARE_YOU, CHEER, ("well",)),
        (WHO_ARE_YOU, IDENTITY, ("helper",)),
        (WHO_ARE_YOU, IDENTITY, ("helper",)),
        (WHAT_CAN_YOU_DO, ABILITIES, ("questions", "tools")),
        (THANKS, WELCOME, ("welcome",)),
        (BYE, FAREWELL, ("goodbye",)),
    )
    for _ in range(dice.number(1, 3)):
        if dice.chance(1, 6):
            name = w.person(dice)
            conversation.user(dice.pick(MY_NAME).format(n=name))
            conversation.answer(NAMED_GREETING.format(n=name), Check(has=(name,)))
        else:
            pool, text, has = dice.choose(turns)
            conversation.user(w.casual(dice, dice.pick(pool)))
            conversation.answer(text, Check(has=has))
    return conversation


def remembers(dice: Dice) -> Conversation:
    """The user says a name and other things; later turns ask for one of them."""
    conversation = new("remembers", dice)
    known: list[tuple[str, str]] = []
    if dice.chance(1, 2):
        name = w.person(dice)
        conversation.user(dice.pick(MY_NAME).format(n=name))
        conversation.answer(NAMED_GREETING.format(n=name))
        known.append(("name", name))
    for key, value_of in dice.shuffled(NOTES)[: dice.number(0 if known else 1, 1 + dice.level)]:
        value = value_of(dice)
        conversation.user(dice.pick(TELL_NOTE).format(k=key, v=value))
        conversation.answer(NOTED)
        known.append((key, value))
    if dice.chance(1, 3):
        conversation.user(w.casual(dice, dice.pick(WHO_ARE_YOU)))
        conversation.answer(IDENTITY)
    for key, value in dice.shuffled(known)[: dice.number(1, 2)]:
        question = dice.pick(WHAT_NAME) if key == "name" else dice.pick(ASK_NOTE).format(k=key)
        conversation.user(w.casual(dice, question))
        conversation.answer(f"Your {key} is {value}.", Check(has=(value,)))
    return conversation


def unknown(dice: Dice) -> Conversation:
    """A question about the world, or about something that the user has not said."""
    conversation = new("declines", dice)
    if dice.chance(1, 4):
        conversation.user(dice.pick(GREETINGS))
        conversation.answer(GREETING)
    if dice.chance(1, 5):
        key = dice.choose(NOTES)[0]
        conversation.user(dice.pick(WHAT_NAME) if dice.chance(1, 3) else dice.pick(ASK_NOTE).format(k=key))
    else:
        conversation.user(w.casual(dice, _world_question(dice)))
    conversation.answer(UNKNOWN, Check(has=("do not know",)))
    return conversation


PERSONA = Pool(
    "You are {n}, {a}.", "Your name is {n}. You are {a}.", "You are {a} named {n}.", "You are {a}. Your name is {n}.",
    "You are {a}, and your name is {n}.",
)  # fmt: skip


def persona(dice: Dice) -> Conversation:
    """The system message gives the model a name and a role."""
    conversation = Conversation("follows")
    name = w.person(dice)
    role = dice.pick(w.ROLES)
    conversation.system(dice.pick(PERSONA).format(n=name, a=article(role)))
    if dice.chance(1, 3):
        conversation.user(dice.pick(GREETINGS))
        conversation.answer(GREETING)
    conversation.user(w.casual(dice, dice.pick(WHO_ARE_YOU)))
    conversation.answer(f"I am {name}, {article(role)}.", Check(has=(name, role)))
    return conversation


ALWAYS_SAY = Pool(
    "End every answer with: {x}", "After every answer, say: {x}", 'End each answer with "{x}"',
    'Say "{x}" after every answer.', 'Say "{x}" at the end of each answer.',
)  # fmt: skip


def signs_off(dice: Dice) -> Conversation:
    """The system message asks for a text at the end of every answer."""
    conversation = Conversation("follows")
    mark = dice.choose((f"{dice.coin().capitalize()}!", w.short_text(dice)))
    conversation.system(dice.pick(ALWAYS_SAY).format(x=mark))
    for _ in range(dice.number(1, 2)):
        pool, text = dice.choose(
            ((GREETINGS, GREETING), (HOW_ARE_YOU, CHEER), (WHO_ARE_YOU, IDENTITY), (BYE, FAREWELL), (THANKS, WELCOME))
        )
        conversation.user(dice.pick(pool))
        conversation.answer(f"{text} {mark}", Check(has=(mark,)))
    return conversation


SAY = Pool("Say {x}", "Repeat: {x}", "Say this: {x}", "Repeat this: {x}", "Please repeat: {x}",
           "Write: {x}", "Write this: {x}", "Repeat after me: {x}", "Please say: {x}",
           "Please say this: {x}")  # fmt: skip
LIST = Pool(
    "Write these words as a list: {x}", "Make a list of these words: {x}", "List these words: {x}",
    "Please make a list: {x}", "Write a list of these words: {x}",
)  # fmt: skip
ITEM = Pool(
    "What is the {o} word? {x}", "Which word is the {o}? {x}", "Say the {o} word: {x}",
    "Give me the {o} of these words: {x}", "Give me the {o} word: {x}",
)  # fmt: skip
ORDER = Pool(
    "Write these words in reverse order: {x}", "Reverse the order of these words: {x}",
    "Say these words backwards: {x}", "Turn around the order of these words: {x}", "Reverse these words: {x}",
)  # fmt: skip
ORDINALS = ("first", "second", "third")


def _some_words(dice: Dice, low: int, high: int) -> list[str]:
    pool = dice.choose((w.OBJECTS, w.FOODS, w.ANIMALS, w.COLORS, w.FIRST_NAMES, w.JOBS, None))
    count = dice.number(low, high)
    if pool is not None:
        return dice.several(pool, count)
    found: list[str] = []
    while len(found) < count:
        word = dice.coin()
        if word not in found:
            found.append(word)
    return found


def instructions(dice: Dice) -> Conversation:
    """Repeat, list, pick or reverse words of the message."""
    conversation = new("follows", dice)
    for _ in range(dice.number(1, 2)):
        way = dice.number(0, 5)
        if way <= 1:
            text = w.short_text(dice) if dice.chance(1, 2) else " ".join(_some_words(dice, 1, 5))
            conversation.user(dice.pick(SAY).format(x=text))
            conversation.answer(text)
            continue
        some = _some_words(dice, 3, 5)
        joined = ", ".join(some)
        if way == 2:
            conversation.user(dice.pick(LIST).format(x=joined))
            conversation.answer("\n".join(f"- {word}" for word in some))
        elif way == 3:
            conversation.user(dice.pick(ORDER).format(x=joined))
            conversation.answer(", ".join(reversed(some)))
        else:
            place = dice.number(0, 3)
            ordinal = "last" if place == 3 else ORDINALS[place]
            conversation.user(dice.pick(ITEM).format(o=ordinal, x=joined))
            conversation.answer(some[-1 if place == 3 else place])
    return conversation
