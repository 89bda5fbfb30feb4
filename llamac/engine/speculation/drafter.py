"""The interface of drafters, and the statistics that they share: the rate of accepted drafts and their duration."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from llamac.engine.speculation.draft_plan import WINDOW

if TYPE_CHECKING:
    from llamac.engine.sampling.sampler import Sampler
    from llamac.engine.speculation.states import States

FIRST_RATE = 0.7  # assumed rate of accepted drafts before the first trial
TRIALS = 4.0  # weight of the assumed rate, in trials
DECAY = 0.95  # decay of a trial's weight with each later draft
FORGET = 0.99  # decay of all weights with each step without drafts, so that drafts get another chance eventually


class Drafter:
    """Predicts the next tokens of one text: with a draft model, the model's own MTP layer, or a drafter beside it.

    Attributes:
        place: The sequence of the model's session that has the text.
    """

    def __init__(self) -> None:
        self.place = 0
        self._seconds: list[float] = []  # durations of recent drafts
        self._right, self._trials = FIRST_RATE * TRIALS, TRIALS

    @property
    def rate(self) -> float:
        """The estimated rate of accepted drafts."""
        return self._right / self._trials

    @property
    def seconds(self) -> float | None:
        """The median seconds per draft; None before the first measurement."""
        return sorted(self._seconds)[len(self._seconds) // 2] if self._seconds else None

    def learn(self, right: int, tried: int) -> None:
        """Record that of `tried` drafts the first `right` were accepted."""
        for i in range(min(right + 1, tried)):
            self._right = DECAY * self._right + (i < right)
            self._trials = DECAY * self._trials + 1

    def skip(self) -> None:
        """Record a step without drafts."""
        self._right = FORGET * self._right + (1 - FORGET) * FIRST_RATE * TRIALS
        self._trials = FORGET * self._trials + (1 - FORGET) * TRIALS

    def observe(self, seconds: float) -> None:
        """Record how long a draft took."""
        self._seconds = [*self._seconds[1 - WINDOW :], seconds]

    # ---- the text

    def follow(self, ids: array[int]) -> None:
        """Begin a text. Reuses what was computed for the previous one, up to the first token that differs."""

    def states(self, rows: int) -> States | None:
        """Return what receives the hidden states of a pass of the model; None if they are not needed.

        It is good until the next call.
        """
        return None

    def keep(self, place: int, states: States | None, first: int, n: int) -> None:
        """Note hidden states of the text. Those of a device that fails are forgotten.

        Args:
            place: The index in the text of the first of these tokens.
            states: What has received those of the pass, or None.
            first: The row of that token.
            n: The number of tokens.
        """

    # ---- drafts

    def catch_up(self, ids: array[int], max_tokens: int) -> bool:
        """Compute at most `max_tokens` tokens of a text. Returns whether the whole text has been computed."""
        raise NotImplementedError

    def draft(self, ids: array[int], n: int, sampler: Sampler) -> list[int]:
        """Draw at most n tokens that may follow a text, with the settings and seed of a request's sampler."""
        raise NotImplementedError

    def close(self) -> None:
        """Free the session."""
