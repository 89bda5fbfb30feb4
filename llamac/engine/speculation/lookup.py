"""Prompt lookup: finds where the last tokens of a text occurred before. What followed there is the draft.

The index is incremental: a token costs the same at any length of the text. It keeps the most recent places of at most
`2 * KEPT` n-grams of each order.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

ORDERS = (4, 2)  # lengths of the indexed n-grams; two tokens in common are the least that makes a match
KEPT = 16384  # n-grams of a table; the table before it is kept, too
LONGEST = 48  # tokens of a match that are told apart

# Matches are classed by their length: 1, 2, 3, 4 to 5, 6 to 8, 9 to 16, 17 to 32, more. `_CLASS[length]` is the class.
# Only a match that goes on after a token that differs has length 1.
_CLASS = [0, 0, 1, 2, 3, 3, 4, 4, 4] + [5] * 8 + [6] * 16 + [7] * (LONGEST - 32)
# the part of right predictions in each class before anything is known
PRIOR = (0.3, 0.2, 0.3, 0.45, 0.6, 0.8, 0.92, 0.97)
RESUMED = 6  # a match of this length or more goes on after one token that differs: texts are often edits of others
PRIOR_WEIGHT = 4.0  # in trials
DECAY = 0.98  # of a trial's weight with each later trial of its class


class Lookup:
    """The tokens of one text, an index of them, and how often its predictions were right.

    Each token that is added tells whether the prediction for its place was right, also where nobody used it. So the
    rates are known before a draft is computed.

    Attributes:
        ids: The tokens.
        length: Tokens of the running match; 0: there is none.
        was_right: Whether there was a prediction for the last token, and it was right.
    """

    def __init__(self, ids: Iterable[int]) -> None:
        self.ids = self._ids = array("i", ids)
        self._tables: list[tuple[dict[tuple[int, ...], int], dict[tuple[int, ...], int]]] = []
        self._place = 0  # what followed the match's earlier occurrence begins here
        self.length = 0
        self.was_right = False
        self._interrupted = 0  # the length of the match before the token that differed, if that was the last one
        self._right = [rate * PRIOR_WEIGHT for rate in PRIOR]
        self._trials = [PRIOR_WEIGHT] * len(PRIOR)
        self._rates = list(PRIOR)
        first = max(0, len(self._ids) - KEPT)
        recent = self._ids[first:]
        for order in ORDERS:
            grams = zip(*(recent[i:] for i in range(order)), strict=False)
            self._tables.append((dict(zip(grams, range(first + order, len(self._ids) + 1), strict=True)), {}))

    def push(self, token: int) -> None:
        """Add a token of the text, and find the match of its new end."""
        ids = self._ids
        self.was_right = False
        if self.length:
            self.was_right = ids[self._place] == token
            self._learn(self.length, self.was_right)
            self._place += 1
            if self.was_right:
                self.length, self._interrupted = self._ahead(1), 0
            elif self.length >= RESUMED:
                self.length, self._interrupted = 1, self.length
            else:
                self.length = self._interrupted = 0
        ids.append(token)
        end = len(ids)
        for i, order in enumerate(ORDERS):
            if end < order:
                continue
            recent, older = self._tables[i]
            gram = tuple(ids[-order:])
            place = recent.get(gram) or older.get(gram, 0)
            recent[gram] = end
            if len(recent) >= KEPT:
                self._tables[i] = {}, recent
            if place and not (self.length and place == self._place) and self.length < LONGEST:
                found = self._match(place, order)
                if found > max(self.length, self._interrupted // 2):
                    self._place, self.length, self._interrupted = place, found, 0

    def _ahead(self, n: int) -> int:
        """The length of the match after n right predictions."""
        if n and self._interrupted:  # what came before the token that differed counts half
            return min(max(2, self._interrupted // 2) + n - 1, LONGEST)
        return min(self.length + n, LONGEST)

    def _match(self, place: int, least: int) -> int:
        """How many tokens before a place are equal to the last tokens, at most LONGEST."""
        ids, end, n = self._ids, len(self._ids), least
        most = min(place, LONGEST)
        while n < most and ids[place - n - 1] == ids[end - n - 1]:
            n += 1
        return n

    def _learn(self, length: int, is_right: bool) -> None:
        kind = _CLASS[length]
        right = self._right[kind] = DECAY * self._right[kind] + is_right
        trials = self._trials[kind] = DECAY * self._trials[kind] + 1
        self._rates[kind] = right / trials

    def rate(self, ahead: int) -> float:
        """The part of right predictions for the token after the running match and `ahead` right predictions."""
        return self._rates[_CLASS[self._ahead(ahead)]]

    def draft(self, n: int) -> list[int]:
        """The n tokens that follow if the text goes on as it did after the match."""
        place, period = self._place, len(self._ids) - self._place
        found = self._ids[place : place + n].tolist()
        while len(found) < n:  # the match overlaps its earlier occurrence: the text repeats itself
            found.append(found[len(found) - period])
        return found
