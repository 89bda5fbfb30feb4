"""Facts that passages state and questions ask for: people, things, towns, events and companies with attributes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..lexicon import article, capital
from . import words as w
from .dice import Dice, Pool

ASKS = Pool(
    "Tell me the {k} of {n}.", "What does the text say about the {k} of {n}?", "I want to know the {k} of {n}.",
    "Give me the {k} of {n}.", "I want to know {n}'s {k}.", "Do you know the {k} of {n}?", "The {k} of {n}?",
    "Which {k} does the text give for {n}?", "Find the {k} of {n}.", "Tell me what the text says about {n}'s {k}.",
    "And the {k} of {n}?", "What is the {k} of {n} in the text?", "Tell me {n}'s {k}.", "{N}'s {k}?",
    "Do you know {n}'s {k}?", "What about the {k} of {n}?", "I need the {k} of {n}.", "What is given as {n}'s {k}?",
    "Look for the {k} of {n}.", "What about {n}'s {k}?",
)  # fmt: skip


@dataclass(frozen=True)
class Attribute:
    """Something that can be said of a subject.

    Templates have {n} for the subject, {N} for the subject at the beginning of a sentence, {v} for the value, and
    {a} for the value with its article. `key` is its name in JSON; `full` is the answer as a sentence. `noun` is its
    name in a question, by default the key.
    """

    key: str
    value: Callable[[Dice], str | int]
    full: str
    says: Pool[str]
    asks: Pool[str]
    noun: str = ""

    def ask(self, dice: Dice, subject: str) -> str:
        """A question about it: one of its own, or one that suits any attribute."""
        if dice.chance(3, 4):
            return filled(dice.pick(self.asks), subject)
        return dice.pick(ASKS).format(k=self.noun or self.key, n=subject, N=capital(subject))


@dataclass(frozen=True)
class Fact:
    """An attribute of a subject with its value, and the sentence that states it."""

    subject: str
    attribute: Attribute
    value: str | int
    sentence: str

    @property
    def answer(self) -> str:
        """The value as a sentence."""
        return filled(self.attribute.full, self.subject, self.value)


def filled(template: str, subject: str, value: str | int = "") -> str:
    """Put a subject and a value into a template."""
    text = str(value)
    return template.format(n=subject, N=capital(subject), v=text, a=article(text) if text else "")


def picker(pool: Pool[str]) -> Callable[[Dice], str]:
    """A value that is an entry of a pool."""
    return lambda dice: dice.pick(pool)


def between(low: int, high: int) -> Callable[[Dice], int]:
    """A value that is a whole number."""
    return lambda dice: dice.number(low, high)


PERSON = (
    Attribute(
        "town",
        w.town,
        "{N} lives in {v}.",
        Pool("{N} lives in {v}.", "{N} has a home in {v}.", "The home of {n} is in {v}.", "{v} is the home of {n}.",
             "{N} has a house in {v}."),
        Pool("Where does {n} live?", "In which town does {n} live?", "Where is the home of {n}?",
             "What is the name of the town where {n} lives?", "In which town is the home of {n}?"),
        "home town",
    ),
    Attribute(
        "job",
        picker(w.JOBS),
        "{N} is {a}.",
        Pool("{N} is {a}.", "{N} works as {a}.", "The job of {n} is {v}.", "{N} has worked as {a} for years.",
             "{N} has a job as {a}."),
        Pool("What is the job of {n}?", "What does {n} work as?", "What work does {n} do?", "What is {n}'s job?",
             "What job does {n} have?"),
    ),
    Attribute(
        "age",
        between(5, 95),
        "{N} is {v} years old.",
        Pool("{N} is {v} years old.", "The age of {n} is {v}.", "{N} turned {v} this year.", "{N} is {v}.",
             "This year {n} is {v} years old."),
        Pool("How old is {n}?", "What is the age of {n}?", "What age is {n}?", "How many years old is {n}?",
             "What is {n}'s age?"),
    ),
    Attribute(
        "pet",
        picker(w.ANIMALS),
        "{N} has {a}.",
        Pool("{N} has {a}.", "{N} keeps {a} as a pet.", "The pet of {n} is {a}.", "{N} owns {a}.",
             "{N} has {a} as a pet."),
        Pool("What pet does {n} have?", "Which animal does {n} have?", "What is the pet of {n}?",
             "Which animal does {n} keep?", "What animal does {n} own?"),
    ),
    Attribute(
        "color",
        picker(w.COLORS),
        "The favorite color of {n} is {v}.",
        Pool("The favorite color of {n} is {v}.", "{N} likes the color {v} best.", "{N}'s favorite color is {v}.",
             "Of all colors, {n} likes {v} best.", "{N} says that the best color is {v}."),
        Pool("What is the favorite color of {n}?", "Which color does {n} like best?", "What is {n}'s favorite color?",
             "What color does {n} like best?", "Which color is the favorite of {n}?"),
    ),
    Attribute(
        "food",
        picker(w.FOODS),
        "{N} likes to eat {v}.",
        Pool("{N} likes to eat {v}.", "The favorite food of {n} is {v}.", "{N} eats {v} every day.",
             "For lunch {n} likes {v}.", "{N} likes {v} for lunch."),
        Pool("What does {n} like to eat?", "What is the favorite food of {n}?", "Which food does {n} like?",
             "What does {n} eat?", "What food does {n} like to eat?"),
    ),
    Attribute(
        "hobby",
        picker(w.HOBBIES),
        "The hobby of {n} is {v}.",
        Pool("The hobby of {n} is {v}.", "{N} enjoys {v}.", "In the evening {n} enjoys {v}.", "{N}'s hobby is {v}.",
             "{N} enjoys {v} in the evening."),
        Pool("What is the hobby of {n}?", "Which hobby does {n} have?", "What does {n} enjoy?",
             "What is {n}'s hobby?", "What hobby does {n} enjoy?"),
    ),
    Attribute(
        "instrument",
        picker(w.INSTRUMENTS),
        "{N} plays the {v}.",
        Pool("{N} plays the {v}.", "{N} is learning the {v}.", "{N} practices the {v} every day.",
             "The {v} is the instrument of {n}.", "Every day {n} plays the {v}."),
        Pool("Which instrument does {n} play?", "What instrument does {n} play?", "What does {n} play?",
             "What is the instrument of {n}?", "Which instrument is {n}'s?"),
    ),
    Attribute(
        "month",
        picker(w.MONTHS),
        "The birthday of {n} is in {v}.",
        Pool("The birthday of {n} is in {v}.", "{N} was born in {v}.", "{N} has a birthday in {v}.",
             "In {v} it is the birthday of {n}.", "{N}'s birthday is in {v}."),
        Pool("When is the birthday of {n}?", "In which month was {n} born?", "In which month is {n}'s birthday?",
             "When was {n} born?", "In which month does {n} have a birthday?"),
        "birthday month",
    ),
    Attribute(
        "neighbor",
        w.person,
        "The neighbor of {n} is called {v}.",
        Pool("The neighbor of {n} is called {v}.", "{N} has a neighbor named {v}.", "{N}'s neighbor is {v}.",
             "{v} is the neighbor of {n}.", "The neighbor of {n} is {v}."),
        Pool("Who is the neighbor of {n}?", "What is the name of {n}'s neighbor?",
             "What is the neighbor of {n} called?", "Who is {n}'s neighbor?",
             "What is the name of the neighbor of {n}?"),
    ),
    Attribute(
        "transport",
        picker(w.VEHICLES),
        "{N} goes to work by {v}.",
        Pool("{N} goes to work by {v}.", "{N} takes the {v} to work.", "Every day {n} travels by {v}.",
             "{N} comes by {v}.", "{N} travels to work by {v}."),
        Pool("How does {n} go to work?", "How does {n} travel?", "What does {n} take to work?", "How does {n} come?",
             "How does {n} travel to work?"),
    ),
)  # fmt: skip
THING = (
    Attribute(
        "room",
        picker(w.ROOMS),
        "{N} is in the {v}.",
        Pool("{N} is in the {v}.", "{N} stands in the {v}.", "Somebody put {n} into the {v}.", "In the {v} is {n}.",
             "Somebody put {n} in the {v}."),
        Pool("Where is {n}?", "In which room is {n}?", "Where can I find {n}?", "Where is {n} now?",
             "In which room can I find {n}?"),
    ),
    Attribute(
        "price",
        between(2, 990),
        "{N} costs {v} dollars.",
        Pool("{N} costs {v} dollars.", "The price of {n} is {v} dollars.", "You pay {v} dollars for {n}.",
             "{N} has a price of {v} dollars.", "For {n} you pay {v} dollars."),
        Pool("How much does {n} cost?", "What is the price of {n}?", "How much is {n}?", "What does {n} cost?",
             "How many dollars does {n} cost?"),
    ),
    Attribute(
        "owner",
        w.person,
        "{N} belongs to {v}.",
        Pool("{N} belongs to {v}.", "{v} owns {n}.", "The owner of {n} is {v}.", "{v} is the owner of {n}.",
             "{v} has {n}."),
        Pool("Who owns {n}?", "Who is the owner of {n}?", "To whom does {n} belong?", "Who has {n}?",
             "What is the name of the owner of {n}?"),
    ),
    Attribute(
        "material",
        picker(w.MATERIALS),
        "{N} is made of {v}.",
        Pool("{N} is made of {v}.", "{N} was made from {v}.", "The material of {n} is {v}.",
             "Somebody made {n} of {v}.", "Somebody made {n} from {v}."),
        Pool("What is {n} made of?", "Which material is {n} made of?", "What is the material of {n}?",
             "What was {n} made from?", "Which material was {n} made from?"),
    ),
    Attribute(
        "weight",
        between(1, 90),
        "{N} weighs {v} kilograms.",
        Pool("{N} weighs {v} kilograms.", "The weight of {n} is {v} kilograms.", "{N} has a weight of {v} kilograms.",
             "With {v} kilograms, {n} is not light.", "{N} is {v} kilograms in weight."),
        Pool("How much does {n} weigh?", "What is the weight of {n}?", "How heavy is {n}?", "What does {n} weigh?",
             "How many kilograms does {n} weigh?"),
    ),
    Attribute(
        "code",
        lambda dice: dice.code(),
        "The code of {n} is {v}.",
        Pool("The code of {n} is {v}.", "{N} has the code {v}.", "{v} is the code of {n}.",
             "The label of {n} says {v}.",
             "The label of {n} has the code {v}."),
        Pool("What is the code of {n}?", "Which code does {n} have?", "What does the label of {n} say?",
             "What code does {n} have?", "What is the code on the label of {n}?"),
    ),
)  # fmt: skip
TOWN = (
    Attribute(
        "river",
        w.brand,
        "The river in {n} is the {v}.",
        Pool("The river in {n} is the {v}.", "{N} lies on the river {v}.", "The river {v} flows through {n}.",
             "Through {n} flows the {v}.", "The {v} is the river in {n}."),
        Pool("Which river flows through {n}?", "What is the river in {n}?", "On which river does {n} lie?",
             "What is the name of the river in {n}?", "Which river is in {n}?"),
    ),
    Attribute(
        "population",
        between(200, 99000),
        "{N} has {v} inhabitants.",
        Pool("{N} has {v} inhabitants.", "{v} people live in {n}.", "The population of {n} is {v}.",
             "In {n} there are {v} people.", "{N} is home to {v} people."),
        Pool("How many people live in {n}?", "What is the population of {n}?", "How many inhabitants does {n} have?",
             "How many people are there in {n}?", "How many inhabitants are there in {n}?"),
    ),
    Attribute(
        "founded",
        between(900, 1999),
        "{N} was founded in {v}.",
        Pool("{N} was founded in {v}.", "The year {v} saw the beginning of {n}.", "{N} began in the year {v}.",
             "In {v}, people founded {n}.", "People founded {n} in the year {v}."),
        Pool("When was {n} founded?", "In which year was {n} founded?", "When did {n} begin?",
             "What year did {n} begin?", "In what year was {n} founded?"),
        "founding year",
    ),
    Attribute(
        "mayor",
        w.full_name,
        "The mayor of {n} is {v}.",
        Pool("The mayor of {n} is {v}.", "{v} is the mayor of {n}.", "{N} has a mayor named {v}.",
             "The mayor of {n} is called {v}.", "{N}'s mayor is {v}."),
        Pool("Who is the mayor of {n}?", "What is the name of the mayor of {n}?", "Who is mayor of {n}?",
             "What is the mayor of {n} called?", "What is {n}'s mayor called?"),
    ),
    Attribute(
        "product",
        picker(w.FOODS),
        "{N} is known for its {v}.",
        Pool("{N} is known for its {v}.", "People go to {n} for the {v}.", "The {v} of {n} is famous.",
             "{N} is famous for its {v}.", "{N} is known for the {v}."),
        Pool("What is {n} known for?", "What is {n} famous for?", "Why do people go to {n}?",
             "For what is {n} known?", "For what is {n} famous?"),
    ),
)  # fmt: skip
EVENT = (
    Attribute(
        "time",
        w.clock,
        "{N} begins at {v}.",
        Pool("{N} begins at {v}.", "{N} starts at {v}.", "The start of {n} is at {v}.", "At {v}, {n} begins.",
             "At {v}, {n} starts."),
        Pool("When does {n} begin?", "At what time does {n} begin?", "At what time does {n} start?",
             "When does {n} start?", "What is the time at which {n} starts?"),
    ),
    Attribute(
        "day",
        picker(w.DAYS),
        "{N} is on {v}.",
        Pool("{N} is on {v}.", "{N} takes place on {v}.", "The day of {n} is {v}.", "On {v} there is {n}.",
             "On {v}, {n} takes place."),
        Pool("On which day is {n}?", "What day is {n}?", "On what day does {n} take place?", "Which day is {n} on?",
             "On which day does {n} take place?"),
    ),
    Attribute(
        "place",
        w.town,
        "{N} is in {v}.",
        Pool("{N} is in {v}.", "{N} is held in {v}.", "The place of {n} is {v}.", "{v} is the place of {n}.",
             "{N} takes place in {v}."),
        Pool("Where is {n}?", "Where is {n} held?", "What is the place of {n}?", "In which town is {n}?",
             "In which town is {n} held?"),
    ),
    Attribute(
        "ticket",
        between(3, 95),
        "A ticket for {n} costs {v} dollars.",
        Pool("A ticket for {n} costs {v} dollars.", "Tickets for {n} cost {v} dollars.",
             "The ticket price of {n} is {v} dollars.", "You pay {v} dollars for a ticket for {n}.",
             "For a ticket for {n} you pay {v} dollars."),
        Pool("How much is a ticket for {n}?", "What does a ticket for {n} cost?", "What is the ticket price of {n}?",
             "How much does a ticket for {n} cost?", "What is the price of a ticket for {n}?"),
        "ticket price",
    ),
    Attribute(
        "host",
        w.full_name,
        "The host of {n} is {v}.",
        Pool("The host of {n} is {v}.", "{v} leads {n}.", "{v} is the host of {n}.", "The leader of {n} is {v}.",
             "{N} has a host named {v}."),
        Pool("Who is the host of {n}?", "Who leads {n}?", "What is the name of the host of {n}?",
             "Who is the leader of {n}?", "What is the host of {n} called?"),
    ),
)  # fmt: skip
COMPANY = (
    Attribute(
        "boss",
        w.full_name,
        "The boss of {n} is {v}.",
        Pool("The boss of {n} is {v}.", "{v} is the boss of {n}.", "{v} runs {n}.", "{N} has a boss named {v}.",
             "The boss of {n} is called {v}."),
        Pool("Who is the boss of {n}?", "Who runs {n}?", "What is the name of the boss of {n}?",
             "What is the boss of {n} called?", "What is the name of {n}'s boss?"),
    ),
    Attribute(
        "product",
        lambda dice: w.plural(dice.pick(w.OBJECTS)),
        "{N} makes {v}.",
        Pool("{N} makes {v}.", "{N} produces {v}.", "The company {n} makes {v}.", "People buy {v} from {n}.",
             "The company {n} produces {v}."),
        Pool("What does {n} make?", "What does {n} produce?", "What does the company {n} make?",
             "What do people buy from {n}?", "What does the company {n} produce?"),
    ),
    Attribute(
        "town",
        w.town,
        "{N} is based in {v}.",
        Pool("{N} is based in {v}.", "The office of {n} is in {v}.", "{N} has its office in {v}.",
             "In {v} is the office of {n}.", "The company {n} is based in {v}."),
        Pool("Where is {n} based?", "Where is the office of {n}?", "In which town is {n} based?",
             "In which town is the office of {n}?", "Where is the company {n} based?"),
    ),
    Attribute(
        "workers",
        between(3, 9000),
        "{N} has {v} workers.",
        Pool("{N} has {v} workers.", "{v} people work for {n}.", "The company {n} has {v} workers.",
             "There are {v} workers at {n}.", "There are {v} people who work for {n}."),
        Pool("How many people work for {n}?", "How many workers does {n} have?", "How many workers are there at {n}?",
             "What is the number of workers at {n}?", "How many people are there who work for {n}?"),
        "number of workers",
    ),
)  # fmt: skip

KINDS: tuple[tuple[Callable[[Dice], str], tuple[Attribute, ...]], ...] = (
    (w.full_name, PERSON),
    (lambda dice: f"the {w.thing(dice)}", THING),
    (lambda dice: w.town(dice), TOWN),
    (lambda dice: f"the {dice.coin().capitalize()} {dice.pick(w.EVENTS)}", EVENT),
    (w.brand, COMPANY),
)


_VALUES: tuple[Callable[[Dice], str | int], ...] = (
    w.brand, w.full_name, w.town, between(1, 9999), lambda dice: dice.code(), picker(w.OBJECTS), picker(w.THEMES),
)  # fmt: skip


def invented(dice: Dice) -> Attribute:
    """An attribute with a word that nobody has seen, or that usually means something else."""
    key = dice.coin(2) if dice.chance(1, 2) else dice.pick(w.OBJECTS)
    return Attribute(
        key,
        dice.choose(_VALUES),
        f"The {key} of {{n}} is {{v}}.",
        Pool(f"The {key} of {{n}} is {{v}}.", f"{{N}} has the {key} {{v}}.", f"{{v}} is the {key} of {{n}}.",
             f"The {key} that {{n}} has is {{v}}.", f"The {key} that belongs to {{n}} is {{v}}."),
        Pool(f"What is the {key} of {{n}}?", f"Which {key} does {{n}} have?", f"What is {{n}}'s {key}?",
             f"What {key} does {{n}} have?", f"What is the {key} that belongs to {{n}}?"),
    )  # fmt: skip


def state(dice: Dice, subject: str, attribute: Attribute) -> Fact:
    """Draw a value of an attribute and a sentence that states it."""
    value = attribute.value(dice)
    return Fact(subject, attribute, value, filled(dice.pick(attribute.says), subject, value))


@dataclass(frozen=True)
class World:
    """What a passage says: facts about one to four subjects of a kind, and what it does not say."""

    facts: list[Fact]
    unsaid: list[tuple[str, Attribute]]

    @property
    def text(self) -> str:
        """The facts as a passage."""
        return " ".join(capital(fact.sentence) for fact in self.facts)


def world(dice: Dice, most: int | None = None) -> World:
    """Draw facts for a passage: at most `most` of them, by default as many as the level allows."""
    long = dice.level == 2 and dice.chance(1, 6)
    most = most or (30 if long else (4, 7, 12)[dice.level])
    name, attributes = KINDS[0] if dice.chance(2, 5) else dice.choose(KINDS[1:])
    count = 6 if long else dice.number(1, (2, 3, 4)[dice.level])
    subjects: list[str] = []
    while len(subjects) < count:
        new = name(dice)
        if not any(new in other or other in new for other in subjects):
            subjects.append(new)
    chosen = dice.shuffled(attributes)[: dice.number(2, min(len(attributes), 3 + dice.level))]
    if dice.chance(1, 3):
        chosen[0] = invented(dice)
    cells = dice.shuffled([(subject, attribute) for subject in subjects for attribute in chosen])
    count = min(len(cells), dice.number(15 if long else 2, most))
    said = cells[:count]
    if dice.chance(1, 2):
        said.sort(key=lambda cell: subjects.index(cell[0]))
    unsaid = cells[count:]
    others = [attribute for attribute in attributes if attribute not in chosen]
    unsaid += [(subject, attribute) for subject in subjects for attribute in others]
    stranger = name(dice)
    if not any(stranger in other or other in stranger for other in subjects):
        unsaid += [(stranger, attribute) for attribute in chosen]
    return World([state(dice, *cell) for cell in said], unsaid)
