"""Adapts the repository's pages to the site that mkdocs builds (mkdocs.yml).

Pages outside docs/ become pages of the site, and files that pages link to are copied, so each relative link of a page
works in the repository and on the site. Anchors are those of the repository's view. Blocks of code for several
libraries become tabs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "bench/**/*.md",
    "models/*.md",
    "tests/fuzz/*.md",
)
LINK = re.compile(r"\]\(([^)#\s]*)(#[^)\s]*)?\)")
# A library's name in bold, why its block is not run, and the block.
LIBRARY = re.compile(
    r"^\*\*([\w. -]+)\*\*\n\n(?:<!-- not run: [^\n]* -->\n)?(```(?:python|sh|text)\n.*?^```)$", re.M | re.S
)


def anchor(title: str, separator: str = "-") -> str:
    """The anchor of a heading, as GitHub generates it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", separator)


def outside_pages() -> list[Path]:
    """The pages of the site that are not in docs/."""
    return sorted(path for pattern in OUTSIDE for path in ROOT.glob(pattern))


def place(path: Path) -> str:
    """Where a file of the repository is on the site."""
    name = path.relative_to(ROOT).as_posix()
    return name.removeprefix("docs/")


def linked_file(page: Path, target: str) -> Path | None:
    """The file that a relative link of a page names, if it is one of the repository's."""
    path = Path(os.path.normpath(page.parent / target)) if target and ":" not in target else page
    return path if path != page and path.is_file() and path.is_relative_to(ROOT) else None


def linked_files(page: Path) -> Iterator[Path]:
    for target, _ in LINK.findall(page.read_text("utf-8")):
        path = linked_file(page, target)
        if path is not None:
            yield path


def with_site_links(text: str, page: Path) -> str:
    """A page's text with links to where the files are on the site."""

    def changed(found: re.Match[str]) -> str:
        path = linked_file(page, found[1])
        if path is None:
            return found[0]
        start = os.path.dirname(place(page))
        return f"]({os.path.relpath(place(path), start or '.')}{found[2] or ''})"

    return LINK.sub(changed, text)


def with_tabs(text: str) -> str:
    """A page's text with a tab for each library's block of code."""

    def tab(found: re.Match[str]) -> str:
        code = "\n".join(f"    {line}".rstrip() for line in found[2].split("\n"))
        return f'=== "{found[1]}"\n\n{code}'

    return LIBRARY.sub(tab, text)


# ---- called by mkdocs


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.mdx_configs.setdefault("toc", {})["slugify"] = anchor
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File, InclusionLevel

    pages = [*outside_pages(), *(ROOT / "docs").glob("*.md")]
    linked = {path for page in pages for path in linked_files(page)}
    for path in sorted({*outside_pages(), *linked}):
        if not path.is_relative_to(ROOT / "docs"):
            file = File.generated(config, place(path), abs_src_path=str(path), inclusion=InclusionLevel.INCLUDED)
            files.append(file)  # whatever exclude_docs says: a page links to it
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    assert page.file.abs_src_path is not None
    return with_tabs(with_site_links(markdown, Path(page.file.abs_src_path)))
