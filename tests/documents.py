"""The pages of the documentation, as its tests read them: their texts, their scripts, their blocks of Python."""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@functools.cache
def text_of(name: str) -> str:
    return (ROOT / "docs" / name).read_text("utf-8")


def script(name: str) -> ModuleType:
    """Import a script of docs/."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def table_after(text: str, mark: str) -> list[list[str]]:
    """The cells of the first table after a mark, without the two header lines."""
    assert text.count(mark) == 1, f"{mark!r} occurs {text.count(mark)} times in the document"
    found: list[list[str]] = []
    for line in text.split(mark)[1].splitlines():
        if line.startswith("|"):
            found.append([cell.strip() for cell in line.strip("|").split("|")])
        elif found:
            break
    return found[2:]


def documented_metadata() -> set[str]:
    return {row[0].strip("`") for row in table_after(text_of("format.md"), "<!-- metadata keys -->")}


class Block(NamedTuple):
    """A fenced block of Python: the number of the line before it, its code, and why it is not run, if it is not."""

    line: int
    code: str
    reason: str | None


def blocks(path: Path) -> list[Block]:
    """The blocks that begin with ```python. `<!-- not run: REASON -->` in the line before one gives its reason."""
    found, lines = [], path.read_text("utf-8").splitlines()
    for start, line in enumerate(lines):
        if line.startswith("```python"):
            assert line == "```python", f"{path.name}, line {start + 1}: expected ```python alone, found {line}"
            end = lines.index("```", start)
            mark = re.fullmatch(r"<!-- not run: (.{10,}) -->", lines[start - 1]) if start else None
            found.append(Block(start + 1, "\n".join(lines[start + 1 : end]) + "\n", mark[1] if mark else None))
    return found
