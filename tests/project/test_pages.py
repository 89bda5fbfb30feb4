"""Every page of the documentation: its links resolve, the files that it names exist, its lines are short."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "bench").rglob("*.md")),
    ROOT / "models" / "README.md",
    ROOT / "tests" / "fuzz" / "README.md",
]
IDS = [str(path.relative_to(ROOT)) for path in PAGES]
MAX_COLUMNS = 120
SOURCES = ("csrc", "llamac", "export", "models", "docs", "bench", "tests")

if not (ROOT / "csrc").is_dir():
    pytest.skip("the sources are not here: this is an installed copy", allow_module_level=True)


def anchors(path: Path) -> Iterator[str]:
    """The anchors of a page's headings, as GitHub generates them."""
    for title in re.findall(r"^#+ (.*)$", path.read_text("utf-8"), re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def broken_links(path: Path) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)]+)\)", path.read_text("utf-8")):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        other = (path.parent / file).resolve() if file else path
        if not other.exists() or (anchor and anchor not in anchors(other)):
            yield target


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_links_resolve(path: Path) -> None:
    assert list(broken_links(path)) == []


def long_lines(path: Path) -> Iterator[str]:
    """Lines of more than MAX_COLUMNS, except those of tables, quotations and JSON."""
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if len(line) > MAX_COLUMNS and not line.startswith(("|", ">", '    "')):
            yield f"line {number}: {len(line)} columns"


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_lines_are_short(path: Path) -> None:
    assert list(long_lines(path)) == []


def missing_files(text: str) -> list[str]:
    """The C and Python files in backticks that do not exist, by their path or the end of it."""
    known = [f"/{path.relative_to(ROOT)}" for folder in SOURCES for path in (ROOT / folder).rglob("*.*")]
    named = re.findall(r"`((?:[\w]+/)*\w+\.(?:c|h|py|pyx))`", text)
    return sorted({name for name in named if not any(path.endswith(f"/{name}") for path in known)})


@pytest.mark.parametrize(
    "name", ["CONTRIBUTING.md", "docs/architecture.md", "docs/families.md", "docs/quantization.md"]
)
def test_named_files_exist(name: str) -> None:
    assert missing_files((ROOT / name).read_text("utf-8")) == []


def test_the_checks_find_faults(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n[a](#title) [b](#other) [c](none.md)\n{'x' * 121}\n")
    assert list(broken_links(page)) == ["#other", "none.md"]
    assert list(long_lines(page)) == ["line 3: 121 columns"]
    assert missing_files("`csrc/pool.c`, `worker.py`, `text/nothing.py`") == ["text/nothing.py"]
