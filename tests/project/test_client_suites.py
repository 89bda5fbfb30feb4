"""The program that runs the suites of foreign clients (tests/clients/run.py): what counts as a failure."""

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
    """The program, with two recorded suites, of which one cannot be installed."""
    monkeypatch.syspath_prepend(CLIENTS)
    run = importlib.import_module("run")

    def one(name: str, _: object) -> dict[str, Any]:
        if name == "litellm":
            raise run.MissingError("its packages cannot be installed")
        return GOOD

    (tmp_path / "results.json").write_text(json.dumps({"litellm": GOOD, "langchain": GOOD}))
    monkeypatch.setattr(run, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(run, "run", one)
    return run


@pytest.mark.parametrize(
    ("options", "answers", "code", "printed"),
    [
        (["--recorded"], True, 1, "not run: litellm; although the package index can be reached"),
        (["--recorded"], False, 0, "not run: litellm; the package index cannot be reached"),
        (["litellm", "langchain"], True, 0, "not run: litellm"),
    ],
)
def test_a_recorded_suite_must_run_if_packages_can_be_installed(
    program: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    answers: bool,
    code: int,
    printed: str,
) -> None:
    monkeypatch.setattr(program, "index_answers", lambda _: answers)
    monkeypatch.setattr(sys, "argv", ["run.py", *options])
    assert program.main() == code
    assert capsys.readouterr().out.splitlines()[-1] == printed
