"""Writes the tables of docs/clients.md from the recorded results of tests/clients: `python docs/make_clients.py`."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).with_name("clients.md")
CLIENTS = Path(__file__).parent.parent / "tests" / "clients"
RESULTS = CLIENTS / "results.json"
BEGIN, END = "<!-- results -->\n", "<!-- end of results -->"


def clients_document() -> str:
    """Return the text of docs/clients.md with the tables of the recorded results."""
    before, _, rest = DOCUMENT.read_text("utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{tables()}\n\n{END}{rest.partition(END)[2]}"


def tables() -> str:
    """The results, the exceptions, and the files of libraries' own tests, as Markdown."""
    results = json.loads(RESULTS.read_text("utf-8"))
    lines = ["| suite | versions | model | passed | failed | skipped | exceptions |", "|---|---|---|---|---|---|---|"]
    reasons = ["| suite | tests | why they do not pass |", "|---|---|---|"]
    for name, found in results.items():
        counts = [found["passed"], found["failed"], found["skipped"], sum(found["exceptions"].values())]
        lines.append(" | ".join([f"| {name}", ", ".join(found["packages"]), found["model"], *map(str, counts)]) + " |")
        reasons += [f"| {name} | {count} | {reason} |" for reason, count in sorted(found["exceptions"].items())]
    files = ["| suite | files of the library's `tests/api_resources` |", "|---|---|"]
    for name, suite in suites().items():
        if suite.library and name in results:
            files.append(f"| {name} | {', '.join(f'`{file}`' for file in suite.files)} |")
    return "\n".join([*lines, "", *reasons, "", *files])


def suites() -> dict[str, Any]:
    """The suites, as tests/clients/run.py has them."""
    sys.path.insert(0, str(CLIENTS))
    try:
        spec = importlib.util.spec_from_file_location("run_clients", CLIENTS / "run.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # its dataclasses look themselves up there
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(CLIENTS))
    found: dict[str, Any] = module.SUITES
    return found


if __name__ == "__main__":
    DOCUMENT.write_text(clients_document(), "utf-8")
