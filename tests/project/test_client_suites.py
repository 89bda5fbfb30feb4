"""The program that runs the suites of other projects' clients (tests/clients/run.py): what counts as a failure."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

CLIENTS = Path(__file__).parents[1] / "clients"
GOOD = {"failed": 0, "code": 0, "passed": 1}


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The program, with two recorded suites."""
    monkeypatch.syspath_prepend(CLIENTS)
    run = importlib.import_module("run")

    (tmp_path / "results.json").write_text(json.dumps({"litellm": GOOD, "langchain": GOOD}))
    monkeypatch.setattr(run, "RESULTS", tmp_path / "results.json")
    return run


@pytest.mark.parametrize(
    ("options", "missing", "answers", "code"),
    [
        (["--recorded"], "MissingError", True, 1),
        (["--recorded"], "MissingError", False, 0),
        (["--recorded"], "UnreachableError", True, 0),
        (["litellm", "langchain"], "MissingError", True, 0),
    ],
)
def test_a_recorded_suite_must_run_if_packages_can_be_installed(
    program: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    missing: str,
    answers: bool,
    code: int,
) -> None:
    def one(name: str, _: object) -> dict[str, Any]:
        if name == "litellm":
            raise getattr(program, missing)("it cannot be installed")
        return GOOD

    monkeypatch.setattr(program, "run", one)
    monkeypatch.setattr(program, "index_answers", lambda _: answers)
    monkeypatch.setattr(sys, "argv", ["run.py", *options])
    assert program.main() == code
    printed = capsys.readouterr().out
    assert "not run: litellm" in printed
    assert ("must be installed" in printed) == bool(code)
