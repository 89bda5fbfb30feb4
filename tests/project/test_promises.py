"""The promises of the pages (tests/promises.toml): something that exists holds every sentence; docs/testing.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from documents import ROOT, script, text_of

if not (ROOT / "docs" / "testing.md").is_file() or not (ROOT / ".ci").is_dir():
    pytest.skip("the sources are not here: this is an installed copy", allow_module_level=True)

make_testing = script("make_testing")


def test_the_page_of_testing_is_current() -> None:
    assert text_of("testing.md") == make_testing.testing_document(), "run python docs/make_testing.py"


@pytest.mark.parametrize("page", make_testing.PAGES)
def test_every_sentence_of_a_page_is_held(page: str) -> None:
    assert list(make_testing.faults(page, promises())) == []
    assert len(promises()[make_testing.PAGES[page][0]]) > 20


def promises() -> dict[str, list[dict[str, Any]]]:
    table: dict[str, list[dict[str, Any]]] = make_testing.tomllib.loads(make_testing.TABLE.read_text("utf-8"))
    return table


def test_sentences_are_read_from_every_kind_of_text() -> None:
    text = """# A page

- **Fast.** It runs in 1.5 s on [this](x.md). It
  is **small**:

```sh
no sentence. Not this one.
```

<!-- not run: a reason -->
![a picture](x.svg)

## A table

| | |
|---|---|
| formats | f32, f16. Others: [docs/x.md](x.md) |
"""
    assert list(make_testing.sentences(text)) == [
        ("A page", "It runs in 1.5 s on this."),
        ("A page", "It is small:"),
        ("A table", "formats: f32, f16."),
        ("A table", "Others: docs/x.md"),
    ]


HELD = {"tests": ["tests/a.py::test_a", "tests/c/a.c::it_works", ".ci/a::a title"]}


@pytest.mark.parametrize(
    ("entries", "fault"),
    [
        ([{"says": "It is fast.", **HELD}], "sentence that the table does not have: It is small."),
        (
            [{"says": "It is fast.", **HELD}, {"says": "It is\ntiny.", **HELD}],
            "does not have this sentence: It is tiny.",
        ),
        ([{"says": "It is fast.", "tests": ["tests/a.py::test_b"]}], "no tests/a.py::test_b"),
        ([{"says": "It is fast.", "tests": ["tests/a.py::helper"]}], "no tests/a.py::helper"),
        ([{"says": "It is fast.", "tests": ["tests/b.py::test_a"]}], "no tests/b.py::test_a"),
        ([{"says": "It is fast.", "tests": ["tests/a.py"]}], "no tests/a.py"),
        ([{"says": "It is fast.", "tests": ["tests/c/a.c::it_fails"]}], "no tests/c/a.c::it_fails"),
        ([{"says": "It is fast.", "tests": [".ci/a::another title"]}], "no .ci/a::another title"),
        ([{"says": "It is fast.", "measured": ["bench/a.md"]}], "no page bench/a.md"),
        ([{"says": "It is fast."}], "needs either what holds it or why"),
        ([{"says": "It is fast.", "why": "x", **HELD}], "needs either what holds it or why"),
        ([{"says": "It is fast.", "test": "x", **HELD}], "unknown keys {'test'}"),
        ([{"says": "It is fast.", **HELD}] * 2, "occurs twice: It is fast."),
    ],
)
def test_a_fault_of_the_table_is_found(
    entries: list[dict[str, Any]], fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "page.md": "It is fast. It is small.\n\n## More\n\nNothing.\n",
        "tests/a.py": "def test_a() -> None: ...\n\ndef helper() -> None: ...\n",
        "tests/c/a.c": "int main(void) {\n    RUN(it_works);\n}\n",
        ".ci/a": 'section "a title"\n',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    make_testing.names.cache_clear()
    monkeypatch.setattr(make_testing, "ROOT", tmp_path)
    monkeypatch.setattr(make_testing, "PAGES", {"page.md": ("page", {"More"})})
    small = {"says": "It is small.", "why": "a reason"}
    table = {"page": entries if "It is small." in fault else [*entries, small]}
    try:
        found = list(make_testing.faults("page.md", table))
        assert found
        assert all(fault in line for line in found)
        right = {"page": [{"says": "It is fast.", **HELD}, small]}
        assert list(make_testing.faults("page.md", right)) == []
    finally:
        make_testing.names.cache_clear()
