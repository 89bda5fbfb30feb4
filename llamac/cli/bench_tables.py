"""What `llamac bench` prints: the table of a report, and the comparison of two."""

from __future__ import annotations

import textwrap
from statistics import median
from typing import Any

from llamac.sizes import size_text

WIDE = 77  # columns that the whole table needs


def report_lines(report: dict[str, Any], width: int) -> list[str]:
    """Format the result. A narrow terminal gets fewer columns."""
    wide = width >= WIDE
    model = report["model"]
    lines = [f"{model['name']}: {'/'.join(model['dtypes'])}, {size_text(model['file_bytes'])}"]
    rounds = f"medians of {report['rounds']} rounds" if report["rounds"] > 1 else "1 round"
    numerics = ", fast" if report["numerics"] == "fast" else ""
    lines.append(f"{report['isa']}{numerics}, KV {report['kv']}; {rounds}")
    lines += textwrap.wrap(f"memory: {report['memory']['text']}", width, subsequent_indent="  ")
    for entry in report["limits"]:
        threads = f"{entry['threads']} thread{'s' if entry['threads'] > 1 else ''}"
        peaks = ", ".join(f"{name} {_digits(speed / 1e9)}" for name, speed in entry["mac_per_s"].items())
        lines += [f"{threads}: reads {_digits(entry['read_gb_s'])} GB/s;", f"  multiplies (G/s) {peaks}"]
        if wide:
            lines[-2:] = [f"{lines[-2]}{lines[-1][1:]}"]
    lines.append("")
    lines.append(
        f"{'threads':>7}  {'':<14} {'batch':>5} {'tok/s':>9}  {'from':>9} {'to':>9}  {'share of limit':>14}"
        if wide
        else f"{'thr':>3} {'':<13} {'bat':>3} {'tok/s':>9} {'share':>6}"
    )
    lines += [_row(result, wide) for result in report["results"]]
    if "import" in report:
        lines.append(_import_line(report["import"]))
    if "peers" in report:
        lines += ["", *_peer_lines(report["peers"])]
    return lines


def _row(result: dict[str, Any], wide: bool) -> str:
    speed, share = _digits(result["tok_s"]), f"{result['share_of_limit']:.0%}"
    if not wide:
        what = row_name(result).replace("prefill", "prompt").replace("decode at", "at")
        return f"{result['threads']:>3} {what:<13.13} {result['batch']:>3} {speed:>9} {share:>6}"
    what = row_name(result)
    low, high = (_digits(speed) for speed in result["tok_s_spread"])
    limit = {"read": "reading", "multiply": "multiply"}[result["limit"]]
    return (
        f"{result['threads']:>7}  {what:<14} {result['batch']:>5} {speed:>9}  {low:>9} {high:>9}  {share:>5} {limit:>8}"
    )


def row_name(result: dict[str, Any]) -> str:
    """What a row measures, without its threads and sequences."""
    if result["phase"] == "prefill":
        return f"prefill {result['prompt']}"
    return f"{result['sampling'] or 'decode'} at {result['context']}"


def _import_line(entry: dict[str, Any]) -> str:
    seconds = sorted(entry["seconds"])
    speed = entry["bytes"] / median(seconds) / 1e9
    return f"import: {median(seconds):.2f} s ({seconds[0]:.2f} to {seconds[-1]:.2f}), {_digits(speed)} GB/s"


def _peer_lines(peers: list[dict[str, Any]]) -> list[str]:
    """A line for each row of each peer: speeds, and how many times as fast llamac is."""
    lines = []
    for entry in peers:
        what = f"{entry['threads']} thread{'s' if entry['threads'] > 1 else ''}, {entry['phase']} {entry['tokens']}"
        speeds = f"{_digits(entry['tok_s'][0])} tok/s, {entry['peer']} {_digits(entry['tok_s'][1])}"
        lines += [f"{what}: {speeds};", f"  llamac is {_ratio(entry)}"]
    return lines


def comparison_lines(first: dict[str, Any], second: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """The comparison of two reports: what they measured, a line for each row, and the machine's own limits.

    Args:
        first: The first report.
        second: The second one.
        found: What `comparison.compare_reports` has found.
    """
    lines = [f"{name}: {_described(report)}" for name, report in (("first", first), ("second", second))]
    lines.append("")
    for row in found["rows"]:
        what = f"{row['threads']} threads, {row_name(row)}, batch {row['batch']}".replace("1 threads", "1 thread")
        lines += [f"{what}: {' -> '.join(map(_digits, row['tok_s']))} tok/s;", f"  the second is {_ratio(row)}"]
    lines.append("")
    changed = [name for name in ("reading", "multiplying") if found[name]["interval"][0] is not None]
    changed = [name for name in changed if found[name]["verdict"] in ("faster", "slower")]
    for name in changed:
        lines.append(f"the machine itself: {name} was {_ratio(found[name])} beside the second's runs;")
    if changed:
        lines.append("  so the rows differ for that reason, too: measure in alternation, with --append")
    pairs = min(row["pairs"] for row in found["rows"])
    if pairs < 5:
        lines.append(f"only {pairs} pair{'s' if pairs > 1 else ''} of runs: more rounds can show smaller differences")
    for name, side in zip(("first", "second"), found["unmatched"], strict=True):
        if side:
            rows = ", ".join(f"{row_name(row)} (threads {row['threads']}, batch {row['batch']})" for row in side)
            lines += textwrap.wrap(f"only in the {name}: {rows}", 100, subsequent_indent="  ")
    return lines


def _described(report: dict[str, Any]) -> str:
    model = report["model"]
    return f"{model['name']}, {model['dtype']}, {report['isa']}, KV {report['kv']}, {report['numerics']}"


def _ratio(entry: dict[str, Any]) -> str:
    """A ratio of speeds with its interval and the verdict."""
    low, high = entry["interval"]
    interval = "one run, so no interval" if low is None else f"95%: {_multiple(low)} to {_multiple(high)}"
    return f"{_multiple(entry['ratio'])} times as fast ({interval}): {entry['verdict']}"


def _multiple(number: float) -> str:
    return f"{number:.3f}" if 0.001 <= number < 100 else f"{number:.3g}"


def _digits(number: float) -> str:
    """Format a number with at least three digits."""
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"
