"""Random choices of the conversation generator, and the rule that keeps held-out words and phrases out of training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from ..telling import Draw

T = TypeVar("T")

SHARE = 5  # one of so many entries of a pool, and of the invented words, is held out
INVENTED = 3  # in training, one of so many words of an open pool is invented, and one of so many of these is letters

_ONSETS = ("b", "br", "c", "d", "dr", "f", "g", "gr", "h", "j", "k", "l", "m", "n", "p", "r", "s", "st", "t", "tr", "v")
_VOWELS = ("a", "e", "i", "o", "u", "a", "e", "o", "ai", "ee", "ou")
_CODAS = ("", "", "", "l", "n", "r", "s", "m", "d", "k", "t", "x")


_LETTERS = "abcdefghijklmnoprstuvwxyz"


class Pool(Generic[T]):
    """Words or phrases in two disjoint parts: every fifth is held out, the others are for training.

    Attributes:
        train: The entries for training.
        held_out: The others.
        is_open: Whether an invented word can stand for an entry. Without them, a model learns a list of words by heart
            and not to copy.
    """

    def __init__(self, *items: T, is_open: bool = False) -> None:
        if len(items) < SHARE or len(set(items)) < len(items):
            raise ValueError(f"a pool needs at least {SHARE} different entries, not {items}")
        self.train = tuple(item for index, item in enumerate(items) if index % SHARE != SHARE - 1)
        self.held_out = tuple(item for index, item in enumerate(items) if index % SHARE == SHARE - 1)
        self.is_open = is_open


def words(text: str) -> Pool[str]:
    """Return an open pool of the words in a text; an underscore stands for a space within an entry."""
    return Pool(*(word.replace("_", " ") for word in text.split()), is_open=True)


def is_held_out(word: str) -> bool:
    """Whether an invented word belongs to the held-out part (decided by a 32-bit FNV-1a hash of its letters)."""
    value = 0x811C9DC5
    for byte in word.lower().encode():
        value = ((value ^ byte) * 0x01000193) & 0xFFFFFFFF
    return (value >> 8) % SHARE == SHARE - 1


class Dice(Draw):
    """The random choices of one conversation: a function of (seed, index, held_out).

    Attributes:
        held_out: Which part of each pool `pick` and `coin` use.
        level: How long the conversation may be: 0, 1 or 2.
    """

    def __init__(self, seed: int, index: int, held_out: bool = False, level: int = 2) -> None:
        super().__init__(seed, index)
        self.held_out = held_out
        self.level = level

    def choose(self, options: Sequence[T]) -> T:
        """Return one of the options, the same ones in both parts."""
        return options[self._below(len(options))]

    def chance(self, hits: int, out_of: int) -> bool:
        """Return True with probability hits/out_of."""
        return self._below(out_of) < hits

    def pick(self, pool: Pool[T]) -> T:
        """Return an entry of this part of a pool, or in its place an invented word."""
        return self._or_coin(pool, self.choose(pool.held_out if self.held_out else pool.train))

    def several(self, pool: Pool[T], count: int) -> list[T]:
        """Return `count` different entries of this part of a pool, or all of them if it has fewer."""
        found = self.shuffled(pool.held_out if self.held_out else pool.train)[:count]
        return [self._or_coin(pool, item) for item in found]

    def _or_coin(self, pool: Pool[T], item: T) -> T:
        if self.held_out or not pool.is_open or not isinstance(item, str) or not self.chance(1, INVENTED):
            return item
        coined = self.coin()
        return type(item)(coined.capitalize() if item[0].isupper() else coined)

    def shuffled(self, options: Sequence[T]) -> list[T]:
        """Return the options in random order."""
        left = list(options)
        for last in range(len(left) - 1, 0, -1):
            other = self._below(last + 1)
            left[last], left[other] = left[other], left[last]
        return left

    def number(self, low: int, high: int) -> int:
        """Return a whole number from low to high."""
        return low + self._below(high - low + 1)

    def coin(self, syllables: int | None = None) -> str:
        """Return an invented word in small letters that belongs to this part: syllables, or in training any letters."""
        while True:
            count = syllables or self.number(2, 3)
            if not self.held_out and self.chance(1, INVENTED):
                word = "".join(self.choose(_LETTERS) for _ in range(2 * count + self.number(0, 3)))
            else:
                parts = [self.choose(_ONSETS) + self.choose(_VOWELS) for _ in range(count)]
                word = "".join(parts) + self.choose(_CODAS)
            if is_held_out(word) == self.held_out:
                return word

    def code(self) -> str:
        """Return an identifier such as "KR-4071"."""
        letters = "".join(self.choose("ABCDEFGHJKLMNPRSTUVWXYZ") for _ in range(self.number(1, 3)))
        digits = "".join(self.choose("0123456789") for _ in range(self.number(2, 4)))
        return letters + self.choose(("-", "", "-")) + digits
