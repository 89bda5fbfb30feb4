"""How many drafts are computed: the measured costs, the best number, and the bound of what wrong drafts cost."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from llamac.engine.speculation import draft_plan, lookup
from llamac.engine.speculation.draft_plan import FIRST_CREDIT, MAX_DRAFTS, Credit, RowCosts, best_count
from llamac.engine.speculation.lookup import Lookup


def measured(row_cost: float, step: float = 0.01) -> RowCosts:
    """Costs after passes of all sizes."""
    costs = RowCosts()
    for _ in range(12):
        costs.observe(1, step)
    for _ in range(5):
        for rows in (2, 4, 8, 16, 32, 64):
            costs.observe(rows, step * (1 + row_cost * (rows - 1)))
    return costs


def record(credit: Credit, costs: list[float], n: int, right: int) -> None:
    """Record a pass with n drafts."""
    if n:
        credit.settle(costs[1 + n], 1 + right)
    else:
        credit.skip(False)


def test_costs_are_those_measured() -> None:
    costs = RowCosts()
    assert not costs.is_known
    costs.observe(1, 5.0)  # the first pass touches memory for the first time
    for _ in range(3):
        costs.observe(1, 0.01)
    assert costs.is_known
    assert costs.step == 0.01
    assert costs.relative[1:4] == pytest.approx([1, 1 + draft_plan.ROW_COST, 1 + 2 * draft_plan.ROW_COST])
    relative = measured(0.25).relative
    assert len(relative) == MAX_DRAFTS + 2
    assert relative[1:] == pytest.approx([1 + 0.25 * i for i in range(MAX_DRAFTS + 1)])


def test_a_long_prompt_is_the_first_guess() -> None:
    costs = RowCosts()
    for seconds in (0.5, 0.1, 0.3):  # the first prompt reads the file
        costs.observe_prompt(100, seconds)
    for _ in range(5):
        costs.observe(1, 0.01)
    assert costs.relative[11] == pytest.approx(1 + 10 * draft_plan.SMALL_PASS * 0.1)


def test_one_bad_measurement_changes_nothing_and_several_are_forgotten() -> None:
    costs = measured(0.2)
    good = costs.relative[8]
    costs.observe(8, 5.0)
    costs.observe(1, 5.0)
    assert costs.relative[8] == pytest.approx(good)
    for _ in range(9):
        costs.observe(8, 5.0)
    assert costs.relative[8] > 10 * good
    for _ in range(9 * draft_plan.FORGET_EVERY):
        costs.observe(1, 0.01)
    assert costs.relative[8] < 4


def test_costs_grow_with_every_row_whatever_is_measured() -> None:
    draw = random.Random(1)
    costs = measured(0.2)
    for _ in range(200):
        costs.observe(draw.randrange(1, MAX_DRAFTS + 2), draw.expovariate(100))
    assert all(left < right for left, right in zip(costs.relative, costs.relative[1:], strict=False))


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.7, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("row_cost", [0.02, 0.25, 0.6, 1.2])
def test_the_number_of_drafts_is_the_best_one(rate: float, row_cost: float) -> None:
    costs = [1 + row_cost * (rows - 1) for rows in range(MAX_DRAFTS + 2)]
    n, gain = best_count(lambda ahead: rate, costs, 1e9, MAX_DRAFTS)
    gains = [sum(rate**i for i in range(count + 1)) / costs[count + 1] for count in range(MAX_DRAFTS + 1)]
    assert gain == pytest.approx(max(gains) if max(gains) >= draft_plan.MIN_GAIN else 1, rel=1e-3)
    assert gains[n] == pytest.approx(gain)
    assert best_count(lambda ahead: rate, costs, 1e9, 3)[0] <= 3
    assert best_count(lambda ahead: rate, costs, 0.0, MAX_DRAFTS) == (0, 1.0)


def test_nothing_is_drafted_where_a_row_costs_a_step() -> None:
    costs = [float(rows) for rows in range(MAX_DRAFTS + 2)]
    assert best_count(lambda ahead: 1.0, costs, 1e9, MAX_DRAFTS) == (0, 1.0)


@pytest.mark.parametrize("steps", [64, 200, 500, 5000])
def test_wrong_drafts_cost_little_however_likely_they_seem(steps: int) -> None:
    """The worst text: every draft seems certain, and none is right. From 200 tokens on, that costs at most 2%."""
    credit, costs, spent = Credit(), measured(0.35).relative, 0.0
    for _ in range(steps):
        n, _ = best_count(lambda ahead: 0.99, costs, credit.left, MAX_DRAFTS)
        spent += costs[1 + n]
        record(credit, costs, n, 0)
    assert spent - steps <= draft_plan.STEP_CREDIT * steps + FIRST_CREDIT / draft_plan.MIN_RISK + 0.01
    if steps >= 200:
        assert spent <= 1.02 * steps


def test_a_text_that_stops_repeating_itself_loses_little_of_what_it_gained() -> None:
    credit, costs = Credit(), measured(0.3).relative
    times = [0.0, 0.0]
    for part, is_right in enumerate((True, False)):
        tokens = 0
        while tokens < 400:
            n, _ = best_count(lambda ahead: 0.98, costs, credit.left, MAX_DRAFTS)
            made = 1 + n * is_right
            record(credit, costs, n, n * is_right)
            times[part] += costs[1 + n]
            tokens += made
    assert times[0] < 400 / 2
    assert times[1] < 400 * 1.08


def test_tiny_models_are_left_alone() -> None:
    assert measured(0.1, step=0.0001).is_tiny
    assert not measured(0.1, step=0.001).is_tiny
    assert not RowCosts().is_tiny


# ---- costs that differ from the guesses


def test_few_cheap_rows_do_not_make_more_rows_cheap() -> None:
    """Passes of up to 4 rows can have kernels of their own."""
    costs = RowCosts()
    for _ in range(6):
        costs.observe(1, 0.01)
    for _ in range(8):
        costs.observe(2, 0.0105)
        costs.observe(4, 0.0115)
    assert costs.relative[2] == pytest.approx(1.05)
    assert costs.relative[4] == pytest.approx(1.15)
    assert costs.relative[8] == pytest.approx(1 + 7 * draft_plan.ROW_COST)


def test_a_guess_that_was_too_low_is_paid_for_once() -> None:
    costs = RowCosts()
    costs.observe_prompt(100, 0.02)  # rows of a long prompt cost 2% of a step
    for _ in range(6):
        assert costs.observe(1, 0.01) == 1
    assert costs.relative[2] < 1.1
    assert costs.observe(2, 0.03) == pytest.approx(3.0)
    assert costs.observe(2, 0.03) == pytest.approx(3.0)
    assert costs.observe(2, 0.03) == pytest.approx(costs.relative[2])
    assert costs.relative[2] == pytest.approx(3.0)


def test_another_program_does_not_use_up_the_budget() -> None:
    costs = RowCosts()
    for _ in range(6):
        costs.observe(1, 0.01)
    assert costs.observe(2, 1.0) <= draft_plan.OUTLIER * (1 + draft_plan.ROW_COST)
    known = measured(0.2)
    assert known.observe(2, 1.0) == pytest.approx(1.2)


def generate(
    right: Callable[[int], bool], row_cost: Callable[[int], float], tokens: int, draw: random.Random
) -> tuple[float, int]:
    """Simulate a stream whose predictions are right where `right` says. Returns the time in steps, and the drafts.

    The lookup sees matches as a text would give them: it predicts each token, and knows whether it was right. A pass
    takes what `row_cost` says, with noise; now and then another program makes it ten times as long.
    """
    costs, credit, text = RowCosts(), Credit(), Simulated()
    spent, n_drafts, done = 0.0, 0, 0
    while done < tokens:
        n = 0
        if costs.is_known:
            n = draft_plan.choose(text, None, costs.relative, costs.step, credit.left, tokens - done - 1).n  # type: ignore[arg-type]
        rows = 1 + n
        cost = 1 + row_cost(rows) if n else 1.0
        seconds = 0.01 * cost * draw.uniform(0.97, 1.03) * (10 if draw.random() < 0.01 else 1)
        charged = costs.observe(rows, seconds)
        n_accepted = 0
        while n_accepted < n and right(done + n_accepted):
            text.push(is_right=True)
            n_accepted += 1
        text.push(is_right=right(done + n_accepted))
        if n:
            credit.settle(charged, 1 + n_accepted)
        else:
            credit.skip(text.was_right)
        spent, n_drafts, done = spent + cost, n_drafts + n, done + 1 + n_accepted
    return spent * tokens / done, n_drafts


class Simulated(Lookup):
    """Prompt lookup in a text of which only the right predictions are known; each match begins with two tokens."""

    def __init__(self) -> None:
        super().__init__([])
        self.length = 2

    def push(self, token: int = 0, *, is_right: bool = False) -> None:
        self._learn(self.length, is_right)
        self.was_right = is_right
        self.length = min(self.length + 1, lookup.LONGEST) if is_right else 2


ROW_COSTS: dict[str, Callable[[int], float]] = {
    "cheap": lambda rows: 0.05 * (rows - 1),
    "usual": lambda rows: 0.25 * (rows - 1),
    "cheap up to 4": lambda rows: 0.06 * (rows - 1) if rows <= 4 else 0.6 * (rows - 1),
    "dear": lambda rows: 1.3 * (rows - 1),
}


@pytest.mark.parametrize("name", ROW_COSTS)
@pytest.mark.parametrize("tokens", [240, 2000])
def test_a_text_without_any_repetition_loses_at_most_two_percent(name: str, tokens: int) -> None:
    for seed in range(20):
        spent, _ = generate(lambda place: False, ROW_COSTS[name], tokens, random.Random(seed))
        assert spent <= 1.02 * tokens


@pytest.mark.parametrize("name", ROW_COSTS)
@pytest.mark.parametrize("part", [0.05, 0.15, 0.3])
def test_chance_matches_of_a_free_text_lose_at_most_two_percent(name: str, part: float) -> None:
    for seed in range(20):
        draw = random.Random(seed)
        hits = [draw.random() < part for _ in range(2100)]
        spent, _ = generate(hits.__getitem__, ROW_COSTS[name], 2000, draw)
        assert spent <= 1.02 * 2000


def test_long_copies_are_fast_also_after_a_long_free_text() -> None:
    hits = [place >= 300 and place % 40 > 3 for place in range(1100)]
    for name in ("cheap", "usual", "cheap up to 4"):
        spent, drafts = generate(hits.__getitem__, ROW_COSTS[name], 1000, random.Random(1))
        assert spent < 300 * 1.02 + 700 / 1.5
        assert drafts > 300
