"""The words of the story generator: who can appear, where, with what, and what each kind is good at.

Plain data and three small value classes. Everything a plot needs to stay consistent (pronouns, articles, skills) is an
attribute of the value, so that a template such as "{h.He} looked at {o.the}." cannot get it wrong.
"""

from __future__ import annotations

from dataclasses import dataclass


def article(phrase: str) -> str:
    """Return the phrase with "a" or "an" before it (by its first letter, which is enough for the words below)."""
    return ("an " if phrase[0] in "aeiou" else "a ") + phrase


def capital(text: str) -> str:
    """Return the text with its first letter in upper case."""
    return text[0].upper() + text[1:]


PRONOUNS = {"she": ("her", "her"), "he": ("him", "his"), "it": ("it", "its")}


@dataclass(frozen=True)
class Who:
    """A character: name ("" for one that has none), kind, trait, and pronoun ("she", "he" or "it").

    As text it is what the story calls them: the name, or "the fox".
    """

    name: str
    noun: str
    trait: str
    he: str

    def __str__(self) -> str:
        return self.name or self.the

    @property
    def N(self) -> str:
        """What the story calls them, where a sentence begins: "Rusty" or "The fox"."""
        return capital(str(self))

    @property
    def him(self) -> str:
        """The object pronoun."""
        return PRONOUNS[self.he][0]

    @property
    def his(self) -> str:
        """The possessive pronoun."""
        return PRONOUNS[self.he][1]

    @property
    def He(self) -> str:
        """The subject pronoun, where a sentence begins."""
        return capital(self.he)

    @property
    def His(self) -> str:
        """The possessive pronoun, where a sentence begins."""
        return capital(self.his)

    @property
    def the(self) -> str:
        """With the definite article: "the fox"."""
        return "the " + self.noun

    @property
    def a(self) -> str:
        """With trait and indefinite article: "a small fox"."""
        return article(f"{self.trait} {self.noun}")

    @property
    def called(self) -> str:
        """The full introduction: "a small fox named Rusty", or "a small fox"."""
        return f"{self.a} named {self.name}" if self.name else self.a

    @property
    def short(self) -> str:
        """The short introduction: "Rusty the fox", "Lily", or "the fox"."""
        if self.name and self.noun not in ("girl", "boy"):
            return f"{self.name} {self.the}"
        return str(self)

    @property
    def call(self) -> str:
        """How they are addressed: "Rusty", or "Fox" ("Fox, come here!")."""
        return self.name or capital(self.noun)


@dataclass(frozen=True)
class Thing:
    """An object: adjective and noun. As text it is "red kite"; `n` is "kite"."""

    adjective: str
    n: str

    def __str__(self) -> str:
        return f"{self.adjective} {self.n}"

    @property
    def a(self) -> str:
        """With the indefinite article: "a red kite"."""
        return article(str(self))

    @property
    def the(self) -> str:
        """With the definite article: "the red kite"."""
        return f"the {self}"

    @property
    def The(self) -> str:
        """With the definite article, where a sentence begins: "The red kite"."""
        return f"The {self}"


@dataclass(frozen=True)
class Place:
    """A place: `at` is "in the forest", `the` is "the forest"."""

    at: str
    the: str

    @property
    def to(self) -> str:
        """The way there: "to the forest"."""
        return "to " + self.the


GIRLS = ("Lily", "Mia", "Anna", "Ruby", "Ella", "Zoe", "Rosa", "Nina", "Emma", "Clara", "Maya", "Lucy")
BOYS = ("Tom", "Ben", "Sam", "Max", "Leo", "Jack", "Noah", "Tim", "Omar", "Hugo", "Adam", "Paul")
ANIMAL_NAMES = {
    "she": ("Hazel", "Daisy", "Poppy", "Willow", "Luna", "Ivy", "Molly", "Olive", "Honey", "Penny"),
    "he": ("Rusty", "Bruno", "Pip", "Oscar", "Toby", "Finn", "Milo", "Barney", "Jasper", "Otto"),
}
ROBOT_NAMES = ("Bolt", "Pixel", "Beep", "Gizmo", "Tinker", "Zip")

HERO_ANIMALS = (
    "rabbit",
    "fox",
    "bear",
    "mouse",
    "cat",
    "dog",
    "duck",
    "frog",
    "hedgehog",
    "squirrel",
    "turtle",
    "goat",
)
TRAITS = (
    "kind",
    "brave",
    "curious",
    "shy",
    "clever",
    "cheerful",
    "gentle",
    "playful",
    "quiet",
    "little",
    "young",
    "merry",
)
HELPER_TRAITS = ("friendly", "wise", "old", "big", "small", "gray", "brown", "funny", "sleepy", "polite")

# Who can help with what. A plot picks the skill that its obstacle asks for.
SKILLS = {
    "fly": ("crow", "owl", "duck", "magpie"),
    "climb": ("squirrel", "cat", "monkey"),
    "swim": ("duck", "otter", "frog", "turtle"),
    "squeeze": ("mouse", "mole", "lizard", "weasel"),
    "lift": ("bear", "horse", "bull", "robot"),
    "smell": ("dog", "fox", "pig"),
}
FRIENDS = (
    "rabbit",
    "fox",
    "bear",
    "mouse",
    "cat",
    "dog",
    "duck",
    "frog",
    "squirrel",
    "turtle",
    "owl",
    "robot",
    "dragon",
)

ADJECTIVES = (
    "red",
    "blue",
    "green",
    "yellow",
    "golden",
    "silver",
    "purple",
    "orange",
    "white",
    "pretty",
    "little",
    "lovely",
)
LIGHT = ("kite", "hat", "scarf", "balloon", "ribbon", "map", "letter", "feather")
FLOATING = ("boat", "ball", "hat", "basket", "flute", "doll", "drum")
ROUND = ("ball", "marble", "ring", "coin", "button", "bell", "shell", "key")
HEAVY = ("wagon", "drum", "basket", "lantern", "box", "book")
HIDDEN = ("key", "ring", "whistle", "coin", "bell", "doll", "shell")
TREASURES = ("ball", "kite", "drum", "boat", "doll", "wagon", "flute", "bell", "swing", "puzzle", "top", "scooter")
GIFTS = ("scarf", "bell", "flute", "lantern", "basket", "blanket", "book", "ring", "hat", "music box")
BREAKABLE = ("vase", "cup", "plate", "bowl", "mirror", "teapot", "clock", "jar")
PRIZES = ("cup", "medal", "crown", "ribbon", "flag", "trophy")

HOMES = (
    "in a small village", "by the sea", "near a big forest", "on a quiet farm", "at the edge of the woods",
    "in a little house on a hill", "beside a blue lake", "in a busy town", "under an old oak tree",
    "near a stone bridge",
)  # fmt: skip
PLACES = tuple(
    Place(preposition + " the " + noun, "the " + noun)
    for preposition, noun in (
        ("in", "forest"), ("in", "meadow"), ("by", "river"), ("at", "beach"), ("in", "park"), ("in", "garden"),
        ("on", "hill"), ("near", "old mill"), ("in", "orchard"), ("at", "market"), ("by", "pond"), ("in", "valley"),
    )
)  # fmt: skip
WATERS = tuple(place for place in PLACES if place.the in ("the river", "the beach", "the pond"))
WEATHER = ("sunny", "warm", "bright", "cold", "windy", "cloudy", "quiet", "fine")
PARTS = ("morning", "afternoon", "day")
SEASONS = ("spring", "summer", "autumn", "winter")
HOBBIES = (
    "to sing", "to draw pictures", "to read books", "to climb trees", "to dance", "to collect stones",
    "to count the stars", "to look at the clouds", "to tell jokes", "to build things", "to play in the mud",
    "to help others",
)  # fmt: skip
FOODS = (
    "bread",
    "soup",
    "cake",
    "berries",
    "apples",
    "cookies",
    "honey",
    "cheese",
    "pears",
    "nuts",
    "pancakes",
    "plums",
)
