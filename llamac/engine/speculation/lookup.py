"""Prompt lookup: finds an earlier occurrence of the last tokens of a text, and drafts the tokens that followed it.

The index is incremental, with a constant cost per token. It keeps the most recent position of at most `2 * KEPT`
n-grams of each order.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

ORDERS = (4, 2)  # lengths of the indexed n-grams; the shortest match has two tokens
KEPT = 16384  # n-grams per table; the previous table is kept as well
LONGEST = 48  # longer matches count as this length

# Matches are classified by length: 1, 2, 3, 4 to 5, 6 to 8, 9 to 16, 17 to 32, more. `_CLASS[length]` is the class.
# Only a match that resumes after a mismatch has length 1.
_CLASS = [0, 0, 1, 2, 3, 3, 4, 4, 4] + [5] * 8 + [6] * 16 + [7] * (LONGEST - 32)
# the assumed rate of correct predictions in each class
PRIOR = (0.3, 0.2, 0.3, 0.45, 0.6, 0.8, 0.92, 0.97)
RESUMED = 6  # matches of at least this length resume after a mismatch, because texts are often edits of others
PRIOR_WEIGHT = 4.0  # weight of the assumed rates, in trials
DECAY = 0.98  # decay of a trial's weight with each later trial of its class


class Lookup:
    """The tokens of a text, an index of its n-grams, and the success rates of its predictions.

    Each added token is compared with its prediction, even if the prediction was not used as a draft. The rates are
    therefore known before the first draft is computed.

    Attributes:
        ids: The tokens.
        length: Length of the current match; 0: no match.
        was_right: Whether the last token was predicted correctly.
    """

    def __init__(self, ids: Iterable[int]) -> None:
        self.ids = self._ids = array("i", ids)
        self._tables: list[tuple[dict[tuple[int, ...], int], dict[tuple[int, ...], int]]] = []
        self._place = 0  # the position after the earlier occurrence of the match
        self.length = 0
        self.was_right = False
        self._interrupted = 0  # the length of the match before the last token, if that token was a mismatch
        self._right = [rate * PRIOR_WEIGHT for rate in PRIOR]
        self._trials = [PRIOR_WEIGHT] * len(PRIOR)
        self._rates = list(PRIOR)
        first = max(0, len(self._ids) - KEPT)
        recent = self._ids[first:]
        for order in ORDERS:
            grams = zip(*(recent[i:] for i in range(order)), strict=False)
            self._tables.append((dict(zip(grams, range(first + order, len(self._ids) + 1), strict=True)), {}))

    def push(self, token: int) -> None:
        """Add a token, and update the match at the end of the text."""
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
        """Return the length of the match after n correct predictions."""
        if n and self._interrupted:  # tokens before a mismatch count half
            return min(max(2, self._interrupted // 2) + n - 1, LONGEST)
        return min(self.length + n, LONGEST)

    def _match(self, place: int, known: int) -> int:
        """Return how many tokens before `place` equal the last tokens, at most LONGEST. The first `known` are equal."""
        ids, end, n = self._ids, len(self._ids), known
        limit = min(place, LONGEST)
        while n < limit and ids[place - n - 1] == ids[end - n - 1]:
            n += 1
        return n

    def _learn(self, length: int, is_right: bool) -> None:
        kind = _CLASS[length]
        right = self._right[kind] = DECAY * self._right[kind] + is_right
        trials = self._trials[kind] = DECAY * self._trials[kind] + 1
        self._rates[kind] = right / trials

    def rate(self, ahead: int) -> float:
        """Return the success rate of the prediction after the current match and `ahead` correct predictions."""
        return self._rates[_CLASS[self._ahead(ahead)]]

    def draft(self, n: int) -> list[int]:
        """Return the n tokens that followed the earlier occurrence of the match."""
        place, period = self._place, len(self._ids) - self._place
        found = self._ids[place : place + n].tolist()
        while len(found) < n:  # the match overlaps its earlier occurrence, so the text repeats itself
            found.append(found[len(found) - period])
        return found
