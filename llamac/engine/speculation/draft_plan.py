"""How many drafts pay: the measured cost of passes with several rows, and a budget for drafts that turn out wrong.

All of this changes speed only, never tokens.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from llamac.engine.session import Session
    from llamac.engine.speculation.draft_model import DraftModel
    from llamac.engine.speculation.lookup import Lookup

MAX_DRAFTS = 63
LOGITS_BYTES = 16 * 1024 * 1024  # the most for the logits of drafts
MIN_DRAFTS = 7  # that may be computed with a large vocabulary, too
MEASURED = 9  # passes of a kind whose median counts
MIN_STEP = 0.0005  # seconds: looking for drafts takes 2% of a shorter step
MIN_MEASURED = 3  # steps before the first draft
ROW_COST = 0.4  # of a step: what a further row is assumed to cost before anything was measured
MIN_ROW_COST, MAX_ROW_COST = 0.02, 0.5  # in which guesses are believed
SMALL_PASS = 1.2  # times what a row of a long prompt costs: what one is assumed to cost in a pass of a few rows
BELIEVED = 3  # measurements of passes of a size that outweigh the guess
SURPRISE = 4.0  # times the expected cost: a single time above it says more about other programs
FORGET_EVERY = 50  # steps: then the oldest measurement of each size is forgotten
WORTH = 1.08  # the least expected gain in speed for which drafts are computed

# In steps: what may be lost at the beginning, then with each step without drafts; and the most that gains add up to.
FIRST_CREDIT = 0.5
CREDIT_OF_A_STEP = 0.008
CREDIT_OF_A_PREDICTION = 0.25  # that was right in a step without drafts; it adds up to the first credit
MAX_CREDIT = 6.0
MIN_RISK = 0.25  # however sure the drafts seem
FIRST_DRAFT_COST = 0.3  # of a step: what a draft of the draft model is assumed to cost before one was made

_SIZES = (2, 4, 8, 16, 32, MAX_DRAFTS + 1)  # rows of a pass are measured in classes up to these numbers
_CLASS = [next(i for i, size in enumerate(_SIZES) if rows <= size) for rows in range(MAX_DRAFTS + 2)]


def _median(numbers: Sequence[float]) -> float:
    """The median, without the module `statistics`, which takes 3 ms to import."""
    ordered = sorted(numbers)
    half = len(ordered) // 2
    return (ordered[half] + ordered[~half]) / 2


class RowCosts:
    """The measured time of passes with several rows, in passes with one row.

    Other programs make single measurements wrong. So medians count, with a guess that counts as two measurements, and
    old measurements are forgotten, so that one bad moment does not end all drafts.
    """

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=MEASURED)  # seconds of passes with one row
        self._row_costs: list[deque[float]] = [deque(maxlen=MEASURED) for _ in _SIZES]  # per further row, in steps
        self._prompt_row: float | None = None  # the least seconds of a row of a long prompt
        self._n_steps = 0
        self._relative: list[float] | None = None

    def observe_prompt(self, rows: int, seconds: float) -> None:
        """Record the computation of a prompt: the first guess at the cost of a row."""
        if rows > _SIZES[-1]:
            self._prompt_row = min(seconds / rows, self._prompt_row or seconds)

    def observe(self, rows: int, seconds: float) -> float:
        """Record a pass. Returns what it cost, in steps.

        A single time is not believed where several of passes of this size are known. Before that it counts where it is
        longer than expected, so that a wrong guess is paid for.
        """
        if rows > 1:
            if not self._steps or rows > _SIZES[-1]:
                return 1.0
            relative = seconds / self.step
            measured = self._row_costs[_CLASS[rows]]
            measured.append(max((relative - 1) / (rows - 1), MIN_ROW_COST))
            self._relative = None
            expected = self.relative[rows]
            return expected if len(measured) >= BELIEVED else max(expected, min(relative, SURPRISE * expected))
        self._n_steps += 1
        if self._n_steps == 1:
            return 1.0  # it touches memory for the first time
        self._steps.append(seconds)
        if self._n_steps % FORGET_EVERY == 0 or not self.is_known:
            self._relative = None
            for found in self._row_costs:
                if found:
                    found.popleft()
        return 1.0

    @property
    def is_known(self) -> bool:
        """Whether enough has been measured to plan with it."""
        return len(self._steps) >= MIN_MEASURED

    @property
    def is_tiny(self) -> bool:
        """Whether steps are so short that even looking for drafts costs too much."""
        return self.is_known and self.step < MIN_STEP

    @property
    def step(self) -> float:
        """Seconds of a pass with one row."""
        return _median(self._steps)

    @property
    def relative(self) -> list[float]:
        """The time of a pass by its number of rows, in steps. It grows with every row."""
        if self._relative is None:
            guess = ROW_COST if self._prompt_row is None else SMALL_PASS * self._prompt_row / self.step
            guess = min(max(guess, MIN_ROW_COST), MAX_ROW_COST)
            row_costs = [self._row_cost(size, guess) for size in range(len(_SIZES))]
            costs = [0.0, 1.0]
            for rows in range(2, MAX_DRAFTS + 2):
                costs.append(max(costs[-1] + MIN_ROW_COST, 1 + (rows - 1) * row_costs[_CLASS[rows]]))
            self._relative = costs
        return self._relative

    def _row_cost(self, size: int, guess: float) -> float:
        """The cost of a row in a class of sizes, from its measurements or those of the nearest class.

        Kernels for a few rows can be much faster than those for more. So the rows of a smaller class do not make those
        of a larger one cheaper than guessed.
        """
        nearest = sorted(range(len(_SIZES)), key=lambda i: abs(i - size))
        known = next((i for i in nearest if self._row_costs[i]), size)
        found = _median([guess, guess, *self._row_costs[known]])
        return max(found, guess) if known < size else found


_costs: weakref.WeakKeyDictionary[object, dict[tuple[object, ...], RowCosts]] = weakref.WeakKeyDictionary()


def row_costs(session: Session) -> RowCosts:
    """The costs of a model with the settings of a session: sessions share what one has measured."""
    of_model = _costs.setdefault(session.model, {})
    return of_model.setdefault((session.kv_dtype, session.numerics, session.threads, session.isa), RowCosts())


class Credit:
    """A budget that bounds what wrong drafts can cost, in steps.

    Right drafts add what they saved, wrong ones take what they cost. In steps without drafts, predictions that turn out
    right restore the first credit. A text on which all predictions fail is therefore never slower than without by more
    than the first stake, which is FIRST_CREDIT / MIN_RISK, and CREDIT_OF_A_STEP.
    """

    def __init__(self) -> None:
        self.left = FIRST_CREDIT

    def settle(self, cost: float, tokens: float) -> None:
        """Record a pass of a cost that produced a number of tokens."""
        self.left = min(self.left + tokens - cost, MAX_CREDIT)

    def rest(self, was_right: bool) -> None:
        """Record a step without drafts, and whether its token had been predicted."""
        if was_right and self.left < FIRST_CREDIT:
            self.left = min(self.left + CREDIT_OF_A_PREDICTION, FIRST_CREDIT)
        self.left = min(self.left + CREDIT_OF_A_STEP, MAX_CREDIT)


class Choice(NamedTuple):
    """How many drafts a request gets, who makes them, and what a pass with them costs, in steps."""

    n: int
    from_model: bool
    making: float  # what the draft model's passes cost


def choose(
    lookup: Lookup,
    model: DraftModel | None,
    costs: Sequence[float],
    step: float,
    credit: float,
    most: int,
    requests: int = 1,
) -> Choice:
    """Choose between the drafts of prompt lookup and those of a draft model.

    Args:
        lookup: The text.
        model: The draft model, if there is one.
        costs: The cost of a pass by its number of rows, in passes without drafts.
        step: Seconds of a pass without drafts.
        credit: As for `best_count`, and so are the others.
        most: The most drafts.
        requests: How many requests the pass computes.
    """
    n, gain = best_count(lookup.rate, costs, credit, most, requests) if lookup.length else (0, 1.0)
    if model is None:
        return Choice(n, False, 0.0)
    rate, seconds = model.rate, model.seconds
    each = FIRST_DRAFT_COST if seconds is None else seconds / step
    with_drafts = [cost + max(0, rows - 1) * each for rows, cost in enumerate(costs)]
    n_model, gain_model = best_count(lambda ahead: rate, with_drafts, credit, most, requests)
    return Choice(n_model, True, n_model * each) if gain_model > gain else Choice(n, False, 0.0)


def best_count(
    rate: Callable[[int], float], costs: Sequence[float], credit: float, most: int, requests: int = 1
) -> tuple[int, float]:
    """How many drafts give the highest speed, and how much higher it is than without.

    Args:
        rate: The chance that a draft is right if the given number of drafts before it are.
        costs: The cost of a pass by its number of rows, in steps, with that of making the drafts.
        credit: What may be lost, in steps. Drafts that are likely to be right may cost more.
        most: The most drafts that can be used.
        requests: How many requests the pass computes; a pass without drafts gives each of them a token.
    """
    best, gain = 0, 1.0
    chance = expected = 1.0
    if credit <= 0:
        return best, gain
    stake = credit / max(1 - rate(0), MIN_RISK)
    for n in range(1, min(most, len(costs) - 2) + 1):
        chance *= rate(n - 1)
        expected += chance / requests
        cost = costs[n + 1]
        if chance < 0.05 or cost - 1 > stake:
            break
        if expected > gain * cost:
            best, gain = n, expected / cost
    return (best, gain) if gain >= WORTH else (0, 1.0)
