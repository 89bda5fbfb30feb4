"""How a story is told: the counted random choices (`Draw`) and the text that grows from them (`Telling`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

from .lexicon import (
    ADJECTIVES,
    ANIMAL_NAMES,
    BOYS,
    FRIENDS,
    GIRLS,
    HELPER_TRAITS,
    HERO_ANIMALS,
    ROBOT_NAMES,
    SKILLS,
    TRAITS,
    Thing,
    Who,
)

T = TypeVar("T")

_MASK = (1 << 64) - 1


def _mix(value: int) -> int:
    """The finalizer of splitmix64: a bijection of 64-bit numbers in which every input bit moves every output bit."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class Draw:
    """A source of random choices that adds up their information.

    The numbers come from a counter-based generator (splitmix64) and depend on (seed, index) alone, not on the Python
    version. `bits` is the sum of -log2 p over the choices made so far.
    """

    def __init__(self, seed: int, index: int) -> None:
        self._state = _mix((_mix((seed * 0x9E3779B97F4A7C15) & _MASK) + index * 0xD1B54A32D192ED03 + 1) & _MASK)
        self.bits = 0.0
        self.choices = 0

    def choose(self, options: Sequence[T]) -> T:
        """Return one of the options, all equally likely; an option that is listed twice is twice as likely."""
        option = options[self._below(len(options))]
        self._count(options.count(option), len(options))
        return option

    def chance(self, hits: int, out_of: int) -> bool:
        """Return True with probability hits/out_of."""
        hit = self._below(out_of) < hits
        self._count(hits if hit else out_of - hits, out_of)
        return hit

    def _count(self, hits: int, out_of: int) -> None:
        """Count a choice whose outcome had the probability hits/out_of; a certain outcome was no choice."""
        if hits < out_of:
            self.bits += math.log2(out_of / hits)
            self.choices += 1

    def _below(self, n: int) -> int:
        """Return a number from 0 to n - 1, each with probability 1/n (up to 2**-56)."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        return (_mix(self._state) * n) >> 64


class Telling:
    """A story in the making: the cast by role, and the sentences told so far.

    Roles are the short keys of the templates: `h` the hero, `f` the friend, helper or rival, `o` the object, and so on.
    """

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self.cast: dict[str, Any] = {}
        self._paragraphs: list[list[str]] = [[]]

    def tell(self, *variants: str) -> None:
        """Add one of the variants (as `Draw.choose` takes it), with the cast filled in."""
        self._paragraphs[-1].append(self.draw.choose(variants).format_map(self.cast))

    def maybe(self, *variants: str) -> None:
        """Add one of the variants, or nothing, with even chances."""
        if self.draw.chance(1, 2):
            self.tell(*variants)

    def pick(self, role: str, options: Sequence[T]) -> T:
        """Fill a role with one of the options."""
        value = self.draw.choose(options)
        self.cast[role] = value
        return value

    def pick_other(self, role: str, options: Sequence[T], *taken: object) -> T:
        """Fill a role with one of the options that are not taken."""
        return self.pick(role, [option for option in options if option not in taken])

    def paragraph(self) -> None:
        """Start a new paragraph."""
        self._paragraphs.append([])

    def text(self) -> str:
        """Return the story: paragraphs of sentences, one line each."""
        return "\n".join(" ".join(sentences) for sentences in self._paragraphs)

    def hero(self, *, robot: bool = True) -> Who:
        """Cast the hero: always named; a girl or boy half of the time, otherwise an animal or (if allowed) a robot."""
        nouns = ("girl", "boy") if self.draw.chance(1, 2) else (*HERO_ANIMALS, "robot") if robot else HERO_ANIMALS
        return self._enter("h", self.draw.choose(nouns), self.draw.choose(TRAITS))

    def friend(self, role: str = "f", nouns: Sequence[str] = (*FRIENDS, "girl", "boy")) -> Who:
        """Cast another character, of another kind than the hero: an animal may go without a name ("the fox")."""
        taken = {who.noun for who in self.cast.values() if isinstance(who, Who)}
        noun = self.draw.choose([noun for noun in nouns if noun not in taken])
        human = noun in ("girl", "boy")
        named = human or self.draw.chance(1, 3)
        return self._enter(role, noun, self.draw.choose(TRAITS if human else HELPER_TRAITS), named)

    def helper(self, skill: str, role: str = "f") -> Who:
        """Cast a character who has the skill."""
        return self.friend(role, SKILLS[skill])

    def thing(self, role: str, nouns: Sequence[str]) -> Thing:
        """Cast an object with an adjective."""
        thing = Thing(self.draw.choose(ADJECTIVES), self.draw.choose(nouns))
        self.cast[role] = thing
        return thing

    def _enter(self, role: str, noun: str, trait: str, named: bool = True) -> Who:
        """Give a character a pronoun and, if `named`, a name that nobody else has."""
        names: Sequence[str]
        if not named:
            pronoun, names = "it", ()
        elif noun == "robot":
            pronoun, names = "it", ROBOT_NAMES
        elif noun in ("girl", "boy"):
            pronoun, names = ("she", GIRLS) if noun == "girl" else ("he", BOYS)
        else:
            pronoun = self.draw.choose(("she", "he"))
            names = ANIMAL_NAMES[pronoun]
        taken = [who.name for who in self.cast.values() if isinstance(who, Who)]
        name = self.draw.choose([name for name in names if name not in taken]) if named else ""
        who = Who(name, noun, trait, pronoun)
        self.cast[role] = who
        return who
