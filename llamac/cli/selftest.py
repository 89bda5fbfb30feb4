"""`llamac selftest`: check that this build computes on this machine what it computes everywhere."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

from llamac.cli.text import json_text, safe_line
from llamac.engine.inspection.selftest import Part, run_parts
from llamac.exit_codes import ERROR, OK
from llamac.format.flatfile import NUMERICS

DESCRIPTION = (
    "Check in seconds that this build computes the same bits on this machine as everywhere else. The command "
    "computes tiny models of every stored dtype with every kernel set of this processor, on several threads, in chunks "
    "and in batches, then draws tokens and encodes a text. It compares SHA-256 hashes of the results with recorded "
    "ones. Exit code 1 means a difference. `llamac check` verifies a model file."
)
EXAMPLES = """\
  llamac selftest                   a line per part
  llamac selftest --json            everything, with a description of this machine
"""
REPORT = """\
A difference means wrong results, caused by a defect of this build, its compiler or this machine. To report it:
  1. Repeat the command. If the differences change from run to run, test the machine's memory and cooling first.
  2. Set LLAMAC_ISA to a kernel set without differences. Results are then right, but slower.
  3. Report the output of `llamac selftest --json`, the version of the compiler, and how you installed llamac."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    parts: list[Part] = []
    for part in run_parts():
        parts.append(part)
        if not options.json:
            print("\n".join(map(safe_line, _lines(part))), flush=True)
    differs = any(part.differences for part in parts)
    if options.json:
        from llamac.cli.inspect import describe_machine

        parts_facts = [asdict(part) for part in parts]
        facts = {"identical": not differs, "numerics": NUMERICS, "parts": parts_facts, "machine": describe_machine()}
        sys.stdout.write(json_text(facts))
    elif differs:
        print(REPORT)
    else:
        print(
            f"{sum(part.runs for part in parts)} results in {sum(part.seconds for part in parts):.1f} s: all identical"
        )
    return ERROR if differs else OK


def _lines(part: Part) -> list[str]:
    """A line for the part, and one for each difference."""
    verdict = f"DIFFERENT: {len(part.differences)}" if part.differences else "identical"
    lines = [f"{part.name:<20} {part.runs:>3} results   {verdict}"]
    for difference in part.differences:
        lines.append(f"  {difference.what}: {difference.found[:16]}, recorded {difference.recorded[:16]}")
    return lines
