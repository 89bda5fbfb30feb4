"""Compares measured times: which of two is faster, if the noise allows a conclusion.

Runs are compared in pairs, the first with the first and so on: what slows the machine down for both runs of a pair then
cancels. Times vary by factors, so the logarithms of their ratios are averaged, and Student's t distribution gives the
interval of their mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, stdev
from typing import Any

from llamac.engine.inspection.benchmark import KEY, summary
from llamac.errors import ArgumentError

CONFIDENCE = 0.95
# What reports must have in common if one gets the runs of the other one, and the lists of a row's runs.
SETTINGS = ("llamac", "isa", "kv", "numerics", "decode")
RUNS = ("seconds", "read_seconds", "multiply_seconds")


@dataclass(frozen=True)
class Comparison:
    """How fast the second of two is.

    Attributes:
        ratio: The second's speed as a multiple of the first's.
        low: The lower end of the confidence interval of `ratio`; None for a single pair, which has no interval.
        high: The upper end.
        pairs: The number of pairs of runs.
    """

    ratio: float
    low: float | None
    high: float | None
    pairs: int

    @property
    def verdict(self) -> str:
        """Whether the second one is "faster" or "slower", or "no difference can be shown"."""
        if self.low is not None and self.low > 1:
            return "faster"
        if self.high is not None and self.high < 1:
            return "slower"
        return "no difference can be shown"

    def as_dict(self) -> dict[str, Any]:
        return {"ratio": self.ratio, "interval": [self.low, self.high], "pairs": self.pairs, "verdict": self.verdict}


def compare(first: Sequence[float], second: Sequence[float]) -> Comparison:
    """Compare times in pairs. Runs without a partner are left out.

    Args:
        first: Seconds of the first one's runs, in the order in which they were measured.
        second: Seconds of the second one's runs.

    Raises:
        ArgumentError: If there is no pair, or a time is not positive.
    """
    pairs = list(zip(first, second, strict=False))
    if not pairs or min(map(min, pairs)) <= 0:
        raise ArgumentError("times to compare must be positive, one of each at least")
    gains = [math.log(a / b) for a, b in pairs]
    mean = fmean(gains)
    if len(gains) == 1:
        return Comparison(math.exp(mean), None, None, 1)
    half = t_quantile(CONFIDENCE, len(gains) - 1) * stdev(gains) / math.sqrt(len(gains))
    return Comparison(math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(gains))


def t_quantile(confidence: float, degrees: int) -> float:
    """The t with which Student's distribution is between -t and t with this probability."""
    low, high = 0.0, 1.0
    while _t_within(high, degrees) < confidence:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_within(middle, degrees) < confidence else (low, middle)
    return high


def _t_within(t: float, degrees: int) -> float:
    """The probability of Student's distribution between -t and t, by its finite series for whole degrees of freedom."""
    angle = math.atan(t / math.sqrt(degrees))
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = degrees % 2
    ratios = ((k - 1 + odd) / (k + odd) * cosine**2 for k in range(2, degrees - odd, 2))
    series = sum(accumulate(ratios, float.__mul__, initial=1.0))
    if not odd:
        return sine * series
    return (angle + (sine * cosine * series if degrees > 1 else 0.0)) * 2 / math.pi


# ---- reports of `llamac bench`


def compare_reports(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Compare two reports row by row, and the machine's limits as they were measured beside these rows.

    Returns:
        JSON values: `rows`, `reading` and `multiplying` (the machine's own limits, from all common rows), and
        `unmatched`, the rows that only one of the reports has.

    Raises:
        ArgumentError: If no row is in both reports.
    """
    both = [_by_key(report) for report in (first, second)]
    common = [key for key in both[0] if key in both[1]]
    if not common:
        raise ArgumentError("the reports have no row in common: same threads, prompts, contexts and batches")
    rows = []
    for key in common:
        a, b = both[0][key], both[1][key]
        found = compare(a["seconds"], b["seconds"])
        rows.append({**dict(zip(KEY, key, strict=True)), "tok_s": [a["tok_s"], b["tok_s"]], **found.as_dict()})
    return {
        "rows": rows,
        "reading": _limits(both, common, "read_seconds", "bytes"),
        "multiplying": _limits(both, common, "multiply_seconds", "multiply_adds"),
        "unmatched": [[dict(zip(KEY, key, strict=True)) for key in side if key not in common] for side in both],
    }


def _by_key(report: dict[str, Any]) -> dict[tuple[Any, ...], dict[str, Any]]:
    return {tuple(result[name] for name in KEY): result for result in report["results"]}


def _limits(
    both: list[dict[tuple[Any, ...], dict[str, Any]]], keys: list[tuple[Any, ...]], seconds: str, work: str
) -> dict[str, Any]:
    """A limit of the machine, from what was measured beside these rows: the seconds of a unit of work, per round."""
    times = [
        [sum(run) for run in zip(*([s / rows[key][work] for s in rows[key][seconds]] for key in keys), strict=False)]
        for rows in both
    ]
    return compare(*times).as_dict()


def check_same(report: dict[str, Any], more: dict[str, Any]) -> None:
    """Check that the runs of a report can be added to another one's. They need not be measured yet.

    Raises:
        ArgumentError: If the reports do not have the same model, settings and rows.
    """
    for name in SETTINGS:
        if report[name] != more[name]:
            raise ArgumentError(f"its runs have {name} {report[name]}, these have {more[name]}")
    if report["model"]["id"] != more["model"]["id"]:
        raise ArgumentError("its runs are those of another model")
    if list(_by_key(report)) != list(_by_key(more)):
        raise ArgumentError("its rows are others: give the same threads, prompts, contexts and batches")


def merged(report: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """A report with the runs of another one after its own. Everything except the runs comes from the other one.

    Raises:
        ArgumentError: As `check_same`.
    """
    check_same(report, more)
    old, new = _by_key(report), _by_key(more)
    results = [summary({**old[key], **{name: old[key][name] + new[key][name] for name in RUNS}}) for key in old]
    found = {**more, "rounds": report["rounds"] + more["rounds"], "results": results}
    if "import" in report and "import" in more:
        found["import"] = {**more["import"], "seconds": report["import"]["seconds"] + more["import"]["seconds"]}
    return found
