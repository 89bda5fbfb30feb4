"""Writes the table of promises into docs/testing.md: `python docs/make_testing.py`.

tests/promises.toml has the promises of README.md and SECURITY.md, and what holds each. This module checks that every
sentence of the pages is there word for word, and that what it names exists. It reads the tests' sources; it imports and
runs none.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "testing.md"
TABLE = ROOT / "tests" / "promises.toml"
BEGIN, END = "<!-- promises -->\n", "<!-- end of promises -->"
# The pages whose sentences are in the table, under which name, and the sections that promise nothing.
PAGES = {
    "README.md": ("readme", {"More"}),
    "SECURITY.md": (
        "security",
        {"Reporting a vulnerability", "Threat model", "How the promises are tested", "What is not promised"},
    ),
}


def testing_document() -> str:
    """Return the text of docs/testing.md with the table of this version.

    Raises:
        ValueError: A sentence is missing from the table or from its page, or a test does not exist.
    """
    table = tomllib.loads(TABLE.read_text("utf-8"))
    wrong = [fault for page in PAGES for fault in faults(page, table)]
    if wrong:
        raise ValueError("tests/promises.toml:\n" + "\n".join(wrong))
    before, _, rest = DOCUMENT.read_text("utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{rows(table)}\n\n{END}{rest.partition(END)[2]}"


# ---- sentences


def sentences(text: str) -> Iterator[tuple[str, str]]:
    """The sentences of a page with the titles of their sections.

    They have no marks of bold text, and links are their texts. A row of a table is a sentence that begins with its
    first cell. Code, pictures, comments and bold words at the beginning of a paragraph are left out.
    """
    text = re.sub(r"^```.*?^```$|<!--.*?-->", "", text, flags=re.MULTILINE | re.DOTALL)
    title = ""
    for paragraph in re.split(r"\n\s*\n|\n(?=- |\* |\||#)", text):
        line = " ".join(paragraph.split())
        if line.startswith("#"):
            title = line.lstrip("# ")
            continue
        if line.startswith("|"):
            first, _, rest = line.strip("| -").partition(" | ")
            line = f"{first}: {rest}" if rest else ""
        line = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", line.removeprefix("- ").removeprefix("* "))
        line = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line)
        line = re.sub(r"^\*\*[^*]*\.\*\* ", "", line).replace("**", "")
        for sentence in re.split(r"(?<=\.) ", line.strip()):
            if sentence:
                yield title, sentence


def faults(page: str, table: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    """What is wrong with a page's part of the table, a line each."""
    name, without = PAGES[page]
    found = [sentence for title, sentence in sentences((ROOT / page).read_text("utf-8")) if title not in without]
    listed = [said(promise) for promise in table.get(name, [])]
    yield from (f"{page} has a sentence that the table does not have: {s}" for s in found if s not in listed)
    yield from (f"{page} does not have this sentence: {s}" for s in listed if s not in found)
    yield from (f"this sentence occurs twice: {s}" for s in {s for s in listed if listed.count(s) > 1})
    for promise in table.get(name, []):
        held = [*promise.get("tests", []), *promise.get("measured", [])]
        if bool(held) == bool(promise.get("why")):
            yield f"this sentence needs either what holds it or why nothing does: {said(promise)}"
        if promise.keys() - {"says", "tests", "measured", "why"}:
            yield f"unknown keys {promise.keys() - {'says', 'tests', 'measured', 'why'}}: {said(promise)}"
        yield from (f"there is no {test}: {said(promise)}" for test in promise.get("tests", []) if not exists(test))
        for measured in promise.get("measured", []):
            if not (ROOT / measured).is_file():
                yield f"there is no page {measured}: {said(promise)}"


def said(promise: dict[str, Any]) -> str:
    """The sentence of an entry, on one line."""
    return " ".join(str(promise["says"]).split())


# ---- tests


def exists(test: str) -> bool:
    """Whether there is a test of this id."""
    path, _, name = test.partition("::")
    return bool(name) and name in names(path)


@functools.cache
def names(path: str) -> frozenset[str]:
    """The tests of a Python or C file, or the sections of a script of .ci/; none if it does not exist."""
    file = ROOT / path
    if not file.is_file():
        return frozenset()
    text = file.read_text("utf-8")
    if path.endswith(".py"):
        return frozenset(
            node.name
            for node in ast.parse(text).body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
        )
    return frozenset(re.findall(r"^ *RUN\((\w+)\);" if path.endswith(".c") else r'^ *section "(.+)"$', text, re.M))


# ---- the table


def rows(table: dict[str, list[dict[str, Any]]]) -> str:
    """The promises of each section of each page, and what holds them, as Markdown."""
    lines = []
    for page, (name, _) in PAGES.items():
        promises = {said(promise): promise for promise in table[name]}
        shown = None
        for title, sentence in sentences((ROOT / page).read_text("utf-8")):
            promise = promises.get(sentence, {})
            held = [*map(cell, by_file(promise.get("tests", [])).items())]
            held += [f"measured: {linked(path)}" for path in promise.get("measured", [])]
            if held and title != shown:
                lines += ["", f"### {page}: {title}", "", "| promise | held by |", "|---|---|"]
                shown = title
            if held:
                lines.append(f"| {sentence} | {'<br>'.join(held)} |")
    return "\n".join(lines).strip()


def by_file(tests: list[str]) -> dict[str, list[str]]:
    """Names of tests by their file."""
    found: dict[str, list[str]] = {}
    for test in tests:
        path, _, name = test.partition("::")
        found.setdefault(path, []).append(name)
    return found


def cell(item: tuple[str, list[str]]) -> str:
    """A file and its tests."""
    path, tests = item
    return f"{linked(path)}: {', '.join(f'`{test}`' for test in tests)}"


def linked(path: str) -> str:
    """A link to a file of the repository, from docs/."""
    return f"[{path}]({path.removeprefix('docs/') if path.startswith('docs/') else f'../{path}'})"


if __name__ == "__main__":
    DOCUMENT.write_text(testing_document(), "utf-8")
