"""Decides how many drafts pay off, from the measured cost of passes with several rows and a budget for wrong drafts.

This changes only the speed, never the tokens.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from llamac import _core
from llamac.engine.cache.recurrent import state_bytes

if TYPE_CHECKING:
    from llamac.engine.session import Session
    from llamac.engine.speculation.drafter import Drafter
    from llamac.engine.speculation.lookup import Lookup

MAX_DRAFTS = 63
LOGITS_BYTES = 16 * 1024 * 1024  # maximum size of the drafts' logits
MIN_DRAFTS = 7  # drafts that are allowed even if their logits exceed LOGITS_BYTES
STATES_BYTES = 256 * 1024 * 1024  # maximum size of the drafts' states of recurrent layers
MIN_STATES = 4  # drafts that are allowed even if their states exceed STATES_BYTES
WINDOW = 9  # recent measurements of each kind whose median counts
MIN_STEP = 0.0005  # seconds; for shorter steps, looking for drafts would take more than 2% of the time
MIN_MEASURED = 3  # measured steps before the first draft
ROW_COST = 0.4  # assumed cost of a further row before any measurement, in steps
MIN_ROW_COST, MAX_ROW_COST = 0.02, 0.5  # range of assumed costs
SMALL_PASS = 1.2  # assumed cost of a row in a pass of a few rows, relative to a row of a long prompt
TRUSTED = 3  # measurements of a size that outweigh the assumed cost
OUTLIER = 4.0  # measurements above this multiple of the expected cost are attributed to other programs
FORGET_EVERY = 50  # steps after which the oldest measurement of each size is dropped
MIN_GAIN = 1.08  # minimum expected speedup for which drafts are computed

# The budget, in steps: its initial value, the increment with each step without drafts, and its maximum.
FIRST_CREDIT = 0.5
STEP_CREDIT = 0.008
PREDICTION_CREDIT = 0.25  # added for a correct prediction in a step without drafts, up to the initial value
MAX_CREDIT = 6.0
MIN_RISK = 0.25  # lower bound of the assumed chance that drafts are wrong
FIRST_DRAFT_COST = 0.3  # assumed cost of a draft of the draft model before any measurement, in steps

_SIZES = (2, 4, 8, 16, 32, MAX_DRAFTS + 1)  # upper bounds of the classes in which numbers of rows are measured
_CLASS = [next(i for i, size in enumerate(_SIZES) if rows <= size) for rows in range(MAX_DRAFTS + 2)]


def _median(numbers: Sequence[float]) -> float:
    """The median, without the module `statistics`, which takes 3 ms to import."""
    ordered = sorted(numbers)
    half = len(ordered) // 2
    return (ordered[half] + ordered[~half]) / 2


def max_drafts(core: _core.Session) -> int:
    """Return the maximum number of drafts of a pass, whose logits and states take memory."""
    states, logits = state_bytes(core), 4 * core.vocab_size
    found = min(MAX_DRAFTS, max(MIN_DRAFTS, LOGITS_BYTES // logits))
    return min(found, max(MIN_STATES, STATES_BYTES // states)) if states else found


def pass_bytes(core: _core.Session, requests: int) -> int:
    """Return the maximum bytes of the states of a pass with drafts, in which each request computes a row."""
    return (requests + max_drafts(core)) * state_bytes(core)


class RowCosts:
    """The measured time of passes with several rows, in passes with one row.

    Other programs distort single measurements. The cost is therefore a median, in which the assumed cost counts as two
    measurements. Old measurements are dropped, so that a short disturbance does not turn drafts off permanently.
    """

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=WINDOW)  # seconds of passes with one row
        self._row_costs: list[deque[float]] = [deque(maxlen=WINDOW) for _ in _SIZES]  # per further row, in steps
        self._prompt_row: float | None = None  # minimum seconds per row of a long prompt
        self._n_steps = 0
        self._relative: list[float] | None = None

    def observe_prompt(self, rows: int, seconds: float) -> None:
        """Record the computation of a prompt, which gives the first estimate of the cost of a row."""
        if rows > _SIZES[-1]:
            self._prompt_row = min(seconds / rows, self._prompt_row or seconds)

    def observe(self, rows: int, seconds: float) -> float:
        """Record a pass. Returns its cost in steps.

        With enough measurements of this size, this is the expected cost. Otherwise it is the measured cost if that is
        higher, so that the budget pays for a wrong estimate.
        """
        if rows > 1:
            if not self._steps or rows > _SIZES[-1]:
                return 1.0
            relative = seconds / self.step
            measured = self._row_costs[_CLASS[rows]]
            measured.append(max((relative - 1) / (rows - 1), MIN_ROW_COST))
            self._relative = None
            expected = self.relative[rows]
            return expected if len(measured) >= TRUSTED else max(expected, min(relative, OUTLIER * expected))
        self._n_steps += 1
        if self._n_steps == 1:
            return 1.0  # not representative: the first step touches memory for the first time
        self._steps.append(seconds)
        if self._n_steps % FORGET_EVERY == 0 or not self.is_known:
            self._relative = None
            for found in self._row_costs:
                if found:
                    found.popleft()
        return 1.0

    @property
    def is_known(self) -> bool:
        """Whether there are enough measurements for planning."""
        return len(self._steps) >= MIN_MEASURED

    @property
    def is_tiny(self) -> bool:
        """Whether steps are so short that even looking for drafts is too expensive."""
        return self.is_known and self.step < MIN_STEP

    @property
    def step(self) -> float:
        """Seconds of a pass with one row."""
        return _median(self._steps)

    @property
    def relative(self) -> list[float]:
        """The time of a pass by its number of rows, in steps; strictly increasing."""
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
        """Return the cost of a row in a class of sizes, from measurements of this class or the nearest one.

        Kernels for a few rows can be much faster than those for more. Measurements of a smaller class therefore do not
        lower the cost of a larger class below the assumed cost.
        """
        nearest = sorted(range(len(_SIZES)), key=lambda i: abs(i - size))
        known = next((i for i in nearest if self._row_costs[i]), size)
        found = _median([guess, guess, *self._row_costs[known]])
        return max(found, guess) if known < size else found


_costs: weakref.WeakKeyDictionary[object, dict[tuple[object, ...], RowCosts]] = weakref.WeakKeyDictionary()


def row_costs(session: Session) -> RowCosts:
    """Return the costs of a session's model and settings. Sessions with the same settings share them."""
    of_model = _costs.setdefault(session.model, {})
    return of_model.setdefault((session.kv_dtype, session.numerics, session.threads, session.isa), RowCosts())


class Credit:
    """A budget, in steps, that bounds the cost of wrong drafts.

    Accepted drafts add the steps that they saved; wrong drafts subtract their cost. In steps without drafts, correct
    predictions restore the initial budget. If all predictions of a text fail, generation is therefore slower than
    without drafts by at most the first stake, FIRST_CREDIT / MIN_RISK, plus STEP_CREDIT per step.
    """

    def __init__(self) -> None:
        self.left = FIRST_CREDIT

    def settle(self, cost: float, tokens: float) -> None:
        """Record the cost of a pass and the number of tokens that it produced."""
        self.left = min(self.left + tokens - cost, MAX_CREDIT)

    def skip(self, was_right: bool) -> None:
        """Record a step without drafts, and whether its token was predicted correctly."""
        if was_right and self.left < FIRST_CREDIT:
            self.left = min(self.left + PREDICTION_CREDIT, FIRST_CREDIT)
        self.left = min(self.left + STEP_CREDIT, MAX_CREDIT)


class Choice(NamedTuple):
    """The number of drafts of a request, their source, and the cost of making them, in steps."""

    n: int
    from_model: bool
    draft_cost: float  # the cost of the draft model's passes


def choose(
    lookup: Lookup,
    model: Drafter | None,
    costs: Sequence[float],
    step: float,
    credit: float,
    max_drafts: int,
    requests: int = 1,
) -> Choice:
    """Choose between the drafts of prompt lookup and those of a draft model.

    Args:
        lookup: The index of the text.
        model: The draft model or MTP layer, if there is one.
        costs: The cost of a pass by its number of rows, in passes without drafts.
        step: Seconds of a pass without drafts.
        credit: As for `best_count`.
        max_drafts: As for `best_count`.
        requests: As for `best_count`.
    """
    n, gain = best_count(lookup.rate, costs, credit, max_drafts, requests) if lookup.length else (0, 1.0)
    if model is None:
        return Choice(n, False, 0.0)
    rate, seconds = model.rate, model.seconds
    each = FIRST_DRAFT_COST if seconds is None else seconds / step
    with_drafts = [cost + max(0, rows - 1) * each for rows, cost in enumerate(costs)]
    n_model, gain_model = best_count(lambda ahead: rate, with_drafts, credit, max_drafts, requests)
    return Choice(n_model, True, n_model * each) if gain_model > gain else Choice(n, False, 0.0)


def best_count(
    rate: Callable[[int], float], costs: Sequence[float], credit: float, max_drafts: int, requests: int = 1
) -> tuple[int, float]:
    """Return the number of drafts with the highest expected speed, and the speedup over no drafts.

    Args:
        rate: The probability that a draft is accepted, given the number of accepted drafts before it.
        costs: The cost of a pass by its number of rows, in steps, including the cost of making the drafts.
        credit: The budget for losses, in steps. Drafts that are likely to be accepted may cost more.
        max_drafts: Maximum number of drafts.
        requests: Number of requests in the pass; without drafts, each of them gets one token per pass.
    """
    best, gain = 0, 1.0
    chance = expected = 1.0
    if credit <= 0:
        return best, gain
    stake = credit / max(1 - rate(0), MIN_RISK)
    for n in range(1, min(max_drafts, len(costs) - 2) + 1):
        chance *= rate(n - 1)
        expected += chance / requests
        cost = costs[n + 1]
        if chance < 0.05 or cost - 1 > stake:
            break
        if expected > gain * cost:
            best, gain = n, expected / cost
    return (best, gain) if gain >= MIN_GAIN else (0, 1.0)
