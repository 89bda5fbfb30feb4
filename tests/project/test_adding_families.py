"""docs/families.md shows how to add a family by the example of one: the files have what its diff adds.

The fields of a family are documented in the order in which they are declared.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from llamac.export.hf.family import Family, Module

ROOT = Path(__file__).parents[2]
MOST_LINES = 40


def diff_of(document: str) -> list[str]:
    """The lines of the diff in the section."""
    section = document.partition("## Adding a family\n")[2]
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    return str(diff).splitlines()


def additions(diff: list[str]) -> Iterator[tuple[str, str]]:
    """The path and the added lines, as one text, of each file of a diff."""
    start = None
    for number, line in enumerate([*diff, "+++ "]):
        if line.startswith("+++ "):
            if start is not None:
                yield diff[start].removeprefix("+++ b/"), "".join(f"{line[1:]}\n" for line in diff[start + 1 : number])
            start = number


def test_the_files_have_what_the_diff_adds() -> None:
    diff = diff_of((ROOT / "docs" / "families.md").read_text("utf-8"))
    assert len(diff) <= MOST_LINES
    assert diff[0].startswith("+++ b/")
    assert all(line.startswith("+") for line in diff)
    found = list(additions(diff))
    assert len(found) == sum(line.startswith("+++ ") for line in diff) >= 4
    for path, added in found:
        assert added.strip(), path
        assert added in (ROOT / path).read_text("utf-8"), path


def test_a_line_that_a_file_does_not_have_is_noticed() -> None:
    diff = ["+++ b/a.py", "+x = 1", "+", "+y = 2", "+++ b/b.py", "+z"]
    assert list(additions(diff)) == [("a.py", "x = 1\n\ny = 2\n"), ("b.py", "z\n")]


@pytest.mark.parametrize("row", [Family, Module])
def test_fields_are_documented_in_their_order(row: type[Family | Module]) -> None:
    attributes = (row.__doc__ or "").partition("Attributes:\n")[2]
    entries = re.findall(r"^        ([a-z][\w, ]*):", attributes, re.MULTILINE)
    documented = [name for entry in entries for name in entry.split(", ")]
    assert documented == [each.name for each in fields(row) if each.name != "model_type"]
