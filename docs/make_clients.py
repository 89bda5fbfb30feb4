"""Writes the tables of docs/clients.md from the recorded results of tests/clients: `python docs/make_clients.py`."""

from __future__ import annotations

import json
from pathlib import Path

DOCUMENT = Path(__file__).with_name("clients.md")
RESULTS = Path(__file__).parent.parent / "tests" / "clients" / "results.json"
BEGIN, END = "<!-- results -->\n", "<!-- end of results -->"


def clients_document() -> str:
    """Return the text of docs/clients.md with the tables of the recorded results."""
    before, _, rest = DOCUMENT.read_text("utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{tables()}\n\n{END}{rest.partition(END)[2]}"


def tables() -> str:
    """The results, and then the exceptions, as Markdown."""
    results = json.loads(RESULTS.read_text("utf-8"))
    lines = ["| suite | versions | model | passed | failed | skipped | exceptions |", "|---|---|---|---|---|---|---|"]
    reasons = ["| suite | tests | why they do not pass |", "|---|---|---|"]
    for name, found in results.items():
        counts = [found["passed"], found["failed"], found["skipped"], sum(found["exceptions"].values())]
        lines.append(" | ".join([f"| {name}", ", ".join(found["packages"]), found["model"], *map(str, counts)]) + " |")
        reasons += [f"| {name} | {count} | {reason} |" for reason, count in sorted(found["exceptions"].items())]
    return "\n".join([*lines, "", *reasons])


if __name__ == "__main__":
    DOCUMENT.write_text(clients_document(), "utf-8")
