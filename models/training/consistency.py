"""A check that a story keeps its characters and objects straight; for generated stories and for what a model writes.

It knows the generator's words, so it finds what small models get wrong: a name or an animal that nobody introduced, and
an object that changes its color halfway.
"""

from __future__ import annotations

import re

from . import lexicon

_NAMES = {*lexicon.GIRLS, *lexicon.BOYS, *lexicon.ROBOT_NAMES, *sum(lexicon.ANIMAL_NAMES.values(), ())}
_KINDS = {*lexicon.HERO_ANIMALS, *lexicon.FRIENDS, *sum(lexicon.SKILLS.values(), ())}
_TRAITS = {*lexicon.TRAITS, *lexicon.HELPER_TRAITS}
_OBJECTS = {
    *(lexicon.LIGHT + lexicon.FLOATING + lexicon.ROUND + lexicon.HEAVY + lexicon.HIDDEN + lexicon.TREASURES),
    *(lexicon.BREAKABLE + lexicon.PRIZES + lexicon.GIFTS),
}


def _any(words: set[str] | tuple[str, ...]) -> str:
    return "(" + "|".join(sorted(words, key=lambda word: (-len(word), word))) + ")"


# "Honey!" may be the food.
_NAME = re.compile(rf"\b(?!Honey!){_any(_NAMES)}\b")
_THE_KIND = re.compile(rf"\b[Tt]he {_any(_KINDS)}\b")
_A_KIND = re.compile(rf"\b[Aa]n? {_any(_TRAITS)} {_any(_KINDS)}\b")
_OBJECT = re.compile(rf"\b{_any(lexicon.ADJECTIVES)} {_any(_OBJECTS)}\b")


def faults(text: str) -> list[str]:
    """Return what is inconsistent in a story, one line each; nothing for a story that keeps everything straight.

    Names and kinds of animals must be introduced: in the first paragraph, or as "... named Lily" and "a small fox". An
    object keeps its adjective through the whole story.
    """
    found = []
    first = text.find("\n") if "\n" in text else len(text)
    seen: set[str] = set()
    for match in _NAME.finditer(text):
        name = match.group(1)
        if name not in seen and match.start() > first and not text[: match.start()].endswith("named "):
            found.append(f"{name} was never introduced")
        seen.add(name)
    introduced = {match.group(2) for match in _A_KIND.finditer(text)}
    introduced |= {match.group(1) for match in _THE_KIND.finditer(text[:first])}
    for kind in sorted({match.group(1) for match in _THE_KIND.finditer(text)} - introduced):
        found.append(f"the {kind} was never introduced")
    adjectives: dict[str, set[str]] = {}
    for match in _OBJECT.finditer(text):
        adjectives.setdefault(match.group(2), set()).add(match.group(1))
    for noun, ways in sorted(adjectives.items()):
        if len(ways) > 1:
            found.append(f"the {noun} is {' and '.join(sorted(ways))}")
    return found
