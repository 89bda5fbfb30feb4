"""How many drafts are computed: the measured costs, the best number, and the bound of what wrong drafts cost."""

from __future__ import annotations

import random

import pytest

from llamac.engine import draft_plan
from llamac.engine.draft_plan import FIRST_CREDIT, MOST_DRAFTS, Credit, RowCosts, best_count


def measured(row_cost: float, step: float = 0.01) -> RowCosts:
    """Costs after passes of all sizes."""
    costs = RowCosts()
    for _ in range(12):
        costs.observe(1, step)
    for _ in range(5):
        for rows in (2, 4, 8, 16, 32, 64):
            costs.observe(rows, step * (1 + row_cost * (rows - 1)))
    return costs


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
    assert len(relative) == MOST_DRAFTS + 2
    assert relative[1:] == pytest.approx([1 + 0.25 * i for i in range(MOST_DRAFTS + 1)])


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
        costs.observe(draw.randrange(1, MOST_DRAFTS + 2), draw.expovariate(100))
    assert all(left < right for left, right in zip(costs.relative, costs.relative[1:], strict=False))


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.7, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("row_cost", [0.02, 0.25, 0.6, 1.2])
def test_the_number_of_drafts_is_the_best_one(rate: float, row_cost: float) -> None:
    costs = [1 + row_cost * (rows - 1) for rows in range(MOST_DRAFTS + 2)]
    n, gain = best_count(lambda ahead: rate, costs, 1e9, MOST_DRAFTS)
    gains = [sum(rate**i for i in range(count + 1)) / costs[count + 1] for count in range(MOST_DRAFTS + 1)]
    assert gain == pytest.approx(max(gains) if max(gains) >= draft_plan.WORTH else 1, rel=1e-3)
    assert gains[n] == pytest.approx(gain)
    assert best_count(lambda ahead: rate, costs, 1e9, 3)[0] <= 3
    assert best_count(lambda ahead: rate, costs, 0.0, MOST_DRAFTS) == (0, 1.0)


def test_nothing_is_drafted_where_a_row_costs_a_step() -> None:
    costs = [float(rows) for rows in range(MOST_DRAFTS + 2)]
    assert best_count(lambda ahead: 1.0, costs, 1e9, MOST_DRAFTS) == (0, 1.0)


@pytest.mark.parametrize("steps", [64, 500, 5000])
def test_wrong_drafts_cost_little_however_likely_they_seem(steps: int) -> None:
    """The worst text: every draft seems certain, and none is right."""
    credit, costs, spent = Credit(), measured(0.35).relative, 0.0
    for _ in range(steps):
        n, _ = best_count(lambda ahead: 0.99, costs, credit.left, MOST_DRAFTS)
        spent += costs[1 + n]
        credit.settle(costs[1 + n], 1)
    assert spent <= 1.01 * steps + FIRST_CREDIT / draft_plan.LEAST_RISK + 1


def test_a_text_that_stops_repeating_itself_loses_little_of_what_it_gained() -> None:
    credit, costs = Credit(), measured(0.3).relative
    times = [0.0, 0.0]
    for part, is_right in enumerate((True, False)):
        tokens = 0
        while tokens < 400:
            n, _ = best_count(lambda ahead: 0.98, costs, credit.left, MOST_DRAFTS)
            made = 1 + n * is_right
            credit.settle(costs[1 + n], made)
            times[part] += costs[1 + n]
            tokens += made
    assert times[0] < 400 / 2
    assert times[1] < 400 * 1.08


def test_tiny_models_are_left_alone() -> None:
    assert measured(0.1, step=0.0001).is_tiny
    assert not measured(0.1, step=0.001).is_tiny
    assert not RowCosts().is_tiny
