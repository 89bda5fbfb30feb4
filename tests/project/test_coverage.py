"""The script that measures what the tests reach (tests/measure_coverage.py): what counts as a line, and its totals."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import measure_coverage
import pytest
from c import build
from measure_coverage import CORE, ROOT, c_lines, python_lines, ranges, reached


def test_a_line_is_reached_if_any_object_has_run_it() -> None:
    def document(file: Path, **counts: int) -> dict[str, object]:
        lines = [{"line_number": int(name[1:]), "count": count} for name, count in counts.items()]
        return {"current_working_directory": "/elsewhere", "files": [{"file": str(file), "lines": lines}]}

    found = reached(
        [
            document(CORE / "template.h", l1=0, l2=5, l3=0),
            document(CORE / "template.h", l1=1, l3=0),
            document(CORE / "pool.c", l7=2),
            document(CORE.parent / "tests" / "c" / "test.h", l1=0),
            document(Path("stdio.h"), l1=0),
        ]
    )
    assert found == {"template.h": {1: True, 2: True, 3: False}, "pool.c": {7: True}}
    assert c_lines(found) == [
        "csrc/template.h: 66.7% (2 of 3); not reached: 3",
        "lines of csrc/ 75.0% (3 of 4)",
    ]


@pytest.mark.parametrize(("least", "code"), [("75", 0), ("75.1", 1)])
def test_fewer_lines_than_asked_for_are_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], least: str, code: int
) -> None:
    monkeypatch.setenv("CCACHE_DISABLE", "1")
    lines = {"pool.c": {1: True, 2: True, 3: True, 4: False}}
    monkeypatch.setattr(build, "build", lambda *args, **options: [])
    monkeypatch.setattr(measure_coverage, "reached", lambda documents: lines)
    assert measure_coverage.main(["c", "--at-least", least]) == code
    assert ("expected at least 75.1%" in capsys.readouterr().out) == bool(code)


@pytest.mark.parametrize(("least", "code"), [("50", 0), ("50.1", 1)])
def test_fewer_branches_than_asked_for_are_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, least: str, code: int
) -> None:
    """--begin and --end run no tests."""
    totals = {"num_branches": 4, "covered_branches": 2, "num_statements": 5, "covered_lines": 5}
    monkeypatch.setattr(measure_coverage, "add_up", lambda settings: {"files": {}, "totals": totals})
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: pytest.fail("a command runs"))
    folder = tmp_path / "counters"
    assert measure_coverage.main(["python", "--data", str(folder), "--begin"]) == 0
    assert f"data_file = {folder / 'data'}\n" in (folder / "settings").read_text()
    assert capsys.readouterr().out == ""
    assert measure_coverage.main(["python", "--data", str(folder), "--end", "--at-least", least]) == code
    assert ("expected at least 50.1%" in capsys.readouterr().out) == bool(code)


def test_lines_are_listed_as_ranges() -> None:
    assert ranges([1, 2, 3, 7, 9, 10]) == "1-3, 7, 9-10"
    assert ranges([]) == ""


@pytest.mark.skipif(shutil.which("gcc") is None or shutil.which("gcov") is None, reason="needs gcc and gcov")
def test_counters_of_a_program_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CCACHE_DISABLE", "1")
    source = tmp_path / "a.c"
    source.write_text("int main(int n, char **v) {\n    if (n > 5)\n        return 3;\n    return v == 0;\n}\n")
    subprocess.run(["gcc", "--coverage", "-O0", "-c", source, "-o", tmp_path / "a.o"], check=True)
    subprocess.run(["gcc", "--coverage", tmp_path / "a.o", "-o", tmp_path / "a"], check=True)
    subprocess.run([tmp_path / "a"], check=True)
    monkeypatch.setattr(measure_coverage, "CORE", tmp_path)
    found = reached([measure_coverage.read_counters(tmp_path / "a.gcda")])
    assert found == {"a.c": {1: True, 2: True, 3: False, 4: True}}


def test_branches_are_counted_apart_from_lines() -> None:
    def summary(branches: int, taken: int, statements: int, run: int) -> dict[str, int]:
        return {
            "num_branches": branches,
            "covered_branches": taken,
            "num_statements": statements,
            "covered_lines": run,
        }

    files = {
        "export/hf/a.py": {"summary": summary(4, 1, 10, 9)},
        "llamac/ops/b.py": {"summary": summary(2, 1, 5, 5)},
        "llamac/ops/c.py": {"summary": summary(2, 2, 5, 5)},
    }
    assert python_lines({"files": files, "totals": summary(8, 4, 20, 19)}) == [
        "llamac/ops/b.py: 1 of 2 branches not taken",
        "export/hf/a.py: 3 of 4 branches not taken",
        "export/: branches 25.0% (1 of 4)",
        "llamac/ops/: branches 75.0% (3 of 4)",
        "branches 50.0% (4 of 8), lines 95.0% (19 of 20)",
    ]


def test_branches_are_counted_until_the_cases_of_a_test_take_no_new_ones(tmp_path: Path) -> None:
    """.ci/package's plugin of pytest, with a stand-in for coverage."""
    (tmp_path / "coverage.py").write_text(
        "import sys, types\n"
        "branches = set()\n"
        "seen = []\n"
        "collector = types.SimpleNamespace(data={'file': branches})\n"
        "current = types.SimpleNamespace(_collector=collector, save=lambda: seen.append('saved'))\n"
        "Coverage = types.SimpleNamespace(current=lambda: current)\n"
        "def trace(frame, event, argument):\n"
        "    if frame.f_code.co_name == 'traced':\n"
        "        seen.append(frame.f_locals['case'])\n"
        "        branches.add(frame.f_locals['branch'])\n"
    )
    (tmp_path / "test_cases.py").write_text(
        "import pytest\n"
        "def traced(case, branch): pass\n"
        "@pytest.mark.parametrize('case', range(12))\n"
        "def test_a(case): traced(case, 'abaaaaaaaacd'[case])\n"
        "@pytest.mark.parametrize('case', range(20, 30))\n"
        "def test_b(case): traced(case, 'ababababcc'[case - 20])\n"
        "def test_c(): traced(40, 'e')\n"
    )
    program = (
        "import sys, coverage, pytest\n"
        "sys.settrace(coverage.trace)\n"
        "code = pytest.main(['-q', '-p', 'no:cacheprovider', '-p', 'count_new_branches', 'test_cases.py'])\n"
        "print('seen', code, *coverage.seen)\n"
    )
    folders = os.pathsep.join(map(str, (tmp_path, ROOT / ".ci")))
    environment = {**os.environ, "PYTHONPATH": folders, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    # test_a takes new branches in its cases 0 and 1, then none in eight; test_b none in its first eight
    expected = ["seen", "0", *map(str, (*range(10), *range(20, 28), 40)), "saved"]
    assert done.stdout.splitlines()[-1].split() == expected, done.stdout + done.stderr


def test_skipped_tests_are_noted_also_around_a_test_that_runs_pytest(tmp_path: Path) -> None:
    """.ci/package's other plugin of pytest: what a test starts inherits its options."""
    (tmp_path / "test_inner.py").write_text("def test_inner(): pass\n")
    (tmp_path / "test_cases.py").write_text(
        "import subprocess, sys, pytest\n"
        "def test_first(): pytest.skip('absent')\n"
        "def test_nested():\n"
        "    assert subprocess.run([sys.executable, '-m', 'pytest', '-q', 'test_inner.py']).returncode == 0\n"
        "def test_last(): pytest.skip('absent')\n"
    )
    noted = tmp_path / "skipped.txt"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".ci"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment |= {"SKIPPED_TESTS": str(noted), "PYTEST_ADDOPTS": "-p skipped_tests"}
    environment.pop("SKIPPED_TESTS_WRITER", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_cases.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert noted.read_text().split() == ["test_cases.py::test_first", "test_cases.py::test_last"]
