"""The documentation as a site (mkdocs.yml), without building it: its pages, its links, and the list of public names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import llamac
from documents import ROOT, script
from llamac import export, models, ops

if not (ROOT / "mkdocs.yml").is_file():
    pytest.skip("the sources are not here: this is an installed copy", allow_module_level=True)

hooks = script("site_hooks")
PAGES = [*hooks.outside_pages(), *sorted((ROOT / "docs").glob("*.md"))]


def test_every_page_is_in_the_navigation_once() -> None:
    nav = (ROOT / "mkdocs.yml").read_text("utf-8").split("\nnav:\n")[1]
    named = re.findall(r"^ *- [^:\n]+: (\S+)$", nav, re.MULTILINE)
    assert sorted(named) == sorted(map(hooks.place, PAGES))


def test_every_public_name_is_in_the_reference_once() -> None:
    text = (ROOT / "docs" / "reference.md").read_text("utf-8")
    named = re.findall(r"^::: llamac\.(\S+)$", text, re.MULTILINE)
    public = set(llamac.__all__) - {"__version__", "export", "models", "ops"}
    public |= {f"export.{name}" for name in export.__all__}
    public |= {f"ops.{name}" for name in ops.__all__}
    public |= {f"models.{name}" for name in ("NAMES", "path")}
    assert sorted(named) == sorted(public)
    assert set(vars(models)) >= {"NAMES", "path"}


def test_links_between_pages_and_to_files_lead_to_their_places_on_the_site() -> None:
    readme, guide, log = ROOT / "README.md", ROOT / "docs" / "python.md", ROOT / "bench" / "LOG.md"
    cases = [
        (readme, "[a](docs/python.md#engine) ![b](docs/run.svg)", "[a](python.md#engine) ![b](run.svg)"),
        (readme, "[a](bench/LOG.md)", "[a](bench/LOG.md)"),
        (guide, "[a](../README.md) [b](../bench/LOG.md#x)", "[a](README.md) [b](bench/LOG.md#x)"),
        (guide, "[a](../csrc/pool.c) [b](cache.md)", "[a](csrc/pool.c) [b](cache.md)"),
        (log, "[a](../docs/gguf.md#x) [b](../models/helper.md)", "[a](../gguf.md#x) [b](../models/helper.md)"),
        (
            guide,
            "[a](#engine) [b](https://x.org/y.md) [c](none.md)",
            "[a](#engine) [b](https://x.org/y.md) [c](none.md)",
        ),
    ]
    for page, text, expected in cases:
        assert hooks.with_site_links(text, page) == expected


def test_linked_files_outside_the_pages_are_found(tmp_path: Path) -> None:
    pages = set(PAGES)
    linked = {path for page in PAGES for path in hooks.linked_files(page)} - pages
    assert ROOT / "docs" / "run.svg" in linked
    assert ROOT / "models" / "loss.png" in linked


def test_blocks_of_several_libraries_become_tabs() -> None:
    text = "**llamac**\n\n```python\na = 1\n\nb = 2\n```\n\n**vLLM**\n\n<!-- not run: a reason -->\n```sh\nc\n```\n"
    tabs = '=== "llamac"\n\n    ```python\n    a = 1\n\n    b = 2\n    ```\n\n=== "vLLM"\n\n    ```sh\n    c\n    ```\n'
    assert hooks.with_tabs(text) == tabs
    skipped = "**llamac**\n\n<!-- not run: a reason -->\ntext\n\n<!-- another -->\n```python\nx\n```\n"
    assert hooks.with_tabs(skipped + text) == skipped + tabs
    plain = "**Damage.** Text.\n\n```python\nx\n```\n"
    assert hooks.with_tabs(plain) == plain


def lists_without_a_blank_line(path: Path) -> list[str]:
    """Lines that begin with a list's mark after a line of text: the repository's view and the site differ there."""
    found, before, in_code = [], "", False
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        in_code ^= line.startswith("```")
        marked = re.match(r"([*+-]|\d+\.) ", line) is not None
        if marked and not in_code and before and not re.match(r"([*+-]|\d+\.|) ", before):
            found.append(f"line {number}: {line}")
        before = line
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_lists_are_the_same_in_both_views(path: Path) -> None:
    assert lists_without_a_blank_line(path) == []
