"""Every page of the documentation: its links resolve, the files that it names exist, its lines are short."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from documents import script
from llamac.cli import make_parser

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "bench").rglob("*.md")),
    *sorted((ROOT / "models").glob("*.md")),
    ROOT / "tests" / "fuzz" / "README.md",
]
IDS = [str(path.relative_to(ROOT)) for path in PAGES]
MAX_COLUMNS = 120
SOURCES = ("csrc", "llamac", "export", "models", "docs", "bench", "tests")

if not (ROOT / "csrc").is_dir():
    pytest.skip("the sources are not here: this is an installed copy", allow_module_level=True)

site_hooks = script("site_hooks")


def anchors(path: Path) -> Iterator[str]:
    """The anchors of a page's headings, as GitHub generates them."""
    for title in re.findall(r"^#+ (.*)$", path.read_text("utf-8"), re.MULTILINE):
        yield site_hooks.anchor(title)


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
    """The C and Python files in backticks of which neither the path nor the end of it exists."""
    known = [f"/{path.relative_to(ROOT)}" for folder in SOURCES for path in (ROOT / folder).rglob("*.*")]
    named = re.findall(r"`((?:[\w]+/)*\w+\.(?:c|h|py|pyx))`", text)
    return sorted({name for name in named if not any(path.endswith(f"/{name}") for path in known)})


@pytest.mark.parametrize(
    "name", ["CONTRIBUTING.md", "docs/architecture.md", "docs/families.md", "docs/quantization.md"]
)
def test_named_files_exist(name: str) -> None:
    assert missing_files((ROOT / name).read_text("utf-8")) == []


def commands(text: str) -> list[list[str]]:
    """The arguments of each llamac command in a page's code, up to a comment or an explanation."""
    blocks = [*re.findall(r"^```(?:sh|text)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)]
    blocks += re.findall(r"^    .*$", text, re.MULTILINE)
    lines = re.findall(r"^ *(?:[^`|\n]*\| )?llamac ([a-z]+ .*)$", "\n".join(blocks), re.MULTILINE)
    return [shlex.split(re.split(r"\s{2,}| \|(?: |$)| && ", line, maxsplit=1)[0], comments=True) for line in lines]


@pytest.mark.parametrize(
    "path", [path for path in PAGES if commands(path.read_text("utf-8"))], ids=lambda path: path.name
)
def test_the_parser_accepts_every_command(path: Path) -> None:
    for arguments in commands(path.read_text("utf-8")):
        make_parser(arguments).parse_args(arguments)


def unknown_names(text: str, known: set[str]) -> list[str]:
    """The names in the last column of a page's table of renamed modules that the sources do not have."""
    tables = re.findall(r"^#### Modules\n+((?:\|.*\n)+)", text, re.MULTILINE)
    cells = [row.strip("|").split(" | ")[-1] for table in tables for row in table.splitlines()[2:]]
    names = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    return sorted({name for name in names if not set(re.findall(r"\w{2,}", name.rpartition("/")[2])) <= known})


def words_of_the_sources() -> set[str]:
    paths = [path for folder in ("csrc", "llamac", "export", "tests") for path in (ROOT / folder).rglob("*.*")]
    sources = [path for path in paths if path.suffix in (".c", ".h", ".py", ".pyx", ".pyi")]
    words = {word for path in sources for word in re.findall(r"\w{2,}", path.read_text("utf-8"))}
    return words | {part for path in sources for part in re.findall(r"\w+", str(path.relative_to(ROOT)))}


def test_new_names_in_the_changelog_exist() -> None:
    assert unknown_names((ROOT / "CHANGELOG.md").read_text("utf-8"), words_of_the_sources()) == []


def test_the_checks_detect_faults(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n[a](#title) [b](#other) [c](none.md)\n{'x' * 121}\n")
    assert list(broken_links(page)) == ["#other", "none.md"]
    assert list(long_lines(page)) == ["line 3: 121 columns"]
    assert missing_files("`csrc/pool.c`, `worker.py`, `text/nothing.py`") == ["text/nothing.py"]
    found = commands(
        '    echo a | llamac run -i "b c" -q   an explanation\nllamac is prose\n    llamac check --data | head\n'
    )
    assert found == [["run", "-i", "b c", "-q"], ["check", "--data"]]
    table = "#### Modules\n\n| before | now |\n|---|---|\n| `llamac.f`, `llamac.g` | `pool_run`, `no_name` |\n"
    assert unknown_names(table, {"pool_run"}) == ["no_name"]
