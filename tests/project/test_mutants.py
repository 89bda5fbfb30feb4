"""The script that plants faults (tests/mutants.py): which faults there are, and whether tests notice them."""

from __future__ import annotations

from pathlib import Path

import mutants
import pytest
from mutants import ROOT, Fault, Suite, Trials, faults_of, is_same_python

C = """\
#include <a-b.h>   // a < b
int f(int n) {
    const char *text = "a + b";
    /* n == 3 */
    if (n <= 10 && text[0] != '+') n += 2;
    g(n);
    return n;
}
"""
PYTHON = '''\
"""a < b"""
def f(n: int) -> int:
    # n == 3
    if n < 10 and not n == 2:
        g(n + 1)
    return n
'''


@pytest.mark.parametrize(
    ("source", "language", "expected"),
    [
        (
            C,
            "c",
            [
                "5: if (n < 10 && text[0] != '+') n += 2;",
                "5: if (n <= 11 && text[0] != '+') n += 2;",
                "5: if (n <= 10 || text[0] != '+') n += 2;",
                "5: if (n <= 10 && text[1] != '+') n += 2;",
                "5: if (n <= 10 && text[0] == '+') n += 2;",
                "5: if (n <= 10 && text[0] != '+') n -= 2;",
                "5: if (n <= 10 && text[0] != '+') n += 3;",
                "6: ;",
                "7: ;",
            ],
        ),
        (
            PYTHON,
            "py",
            [
                "4: if n <= 10 and not n == 2:",
                "4: if n < 11 and not n == 2:",
                "4: if n < 10 or not n == 2:",
                "4: if n < 10 and  n == 2:",
                "4: if n < 10 and not n != 2:",
                "4: if n < 10 and not n == 3:",
                "5: g(n - 1)",
                "5: g(n + 2)",
                "5: pass",
                "6: pass",
            ],
        ),
    ],
    ids=["C", "Python"],
)
def test_operators_numbers_and_statements_are_changed_one_at_a_time(
    source: str, language: str, expected: list[str]
) -> None:
    found = []
    for fault in faults_of(source, language):
        number, line = fault.line(source), fault.plant(source).splitlines()[fault.line(source) - 1].strip()
        found.append(f"{number}: {line}")
        assert fault.describe("f", source).startswith(f"f:{number}: ")
    assert [each for each in found if not each.startswith("3:")] == expected  # the declaration has a `*`


def test_a_change_of_a_comment_or_of_the_grammar_is_no_fault() -> None:
    assert is_same_python(PYTHON.replace("n == 3", "n == 4"), PYTHON)
    assert is_same_python(PYTHON.replace("if n", "if if"), PYTHON)
    assert not is_same_python(PYTHON.replace("n == 2", "n == 3"), PYTHON)


def test_a_test_notices_a_fault_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "llamac/sizes.py"
    test = tmp_path / "test_size.py"
    test.write_text("from llamac.sizes import parse_size\ndef test_size(): assert parse_size(5, 'size') == 5\n")
    monkeypatch.setitem(mutants.TARGETS, name, Suite((), (str(test),)))
    trials = Trials(tmp_path / "copy")
    source = (ROOT / name).read_text()
    at = source.index("def parse_size")
    assert trials.notices(name, Fault(at + 4, at + 4, "no_")) is True
    end = len(source)
    assert trials.notices(name, Fault(end, end, "\nUNUSED = 1\n")) is False
    assert trials.notices(name, Fault(end, end, "\n# a comment\n")) is None
    assert (ROOT / name).read_text() == source


def test_every_target_has_tests() -> None:
    for name, tests in mutants.TARGETS.items():
        assert (ROOT / name).is_file()
        assert all((ROOT / "tests" / "c" / f"{test}.c").is_file() for test in tests.c)
        for test in tests.python:
            path, _, function = test.partition("::")
            assert (ROOT / "tests" / path).exists()
            assert not function or f"def {function}(" in (ROOT / "tests" / path).read_text()
