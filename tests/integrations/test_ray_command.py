"""The command for batch files on a Ray cluster: its errors and exit codes. Ray is not needed."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from llamac.errors import ArgumentError, ModelError, UnsupportedError
from llamac.exit_codes import ERROR, INTERRUPTED, USAGE
from llamac.integrations import ray_batch


class RayError(Exception):
    """As Ray's."""


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that runs the command on a cluster on which an error occurs, and returns its exit code."""
    ray = types.ModuleType("ray")
    ray.init = lambda *_, **__: None  # type: ignore[attr-defined]
    ray.exceptions = types.SimpleNamespace(RayError=RayError)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(ray_batch, "find_spec", lambda name: name)

    def run(error: BaseException) -> int:
        def answer_file(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr(ray_batch, "answer_file", answer_file)
        return ray_batch.main(["in.jsonl", "out.jsonl"])

    return run


TRACEBACK = "ray::Worker.__init__() (pid=7)\n  File x\nllamac.errors.ModelError: tiny.bin is another model\n"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ArgumentError("workers is 0"), USAGE, "workers is 0"),
        (ModelError("out.jsonl is not a model"), ERROR, "out.jsonl is not a model"),
        (UnsupportedError("no"), ERROR, "no"),
        (OSError("without a file"), ERROR, "without a file"),
        (OSError(28, "No space left on device", "out.jsonl"), ERROR, "out.jsonl: No space left on device"),
        (RayError(TRACEBACK), ERROR, "llamac.errors.ModelError: tiny.bin is another model"),
        (RayError(), ERROR, "RayError"),
    ],
)
def test_exit_codes_and_messages_are_those_of_the_command_line(
    error: Exception, code: int, message: str, fail: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fail(error) == code
    assert capsys.readouterr() == ("", f"llamac: error: {message}\n")


def test_ctrl_c_says_how_to_continue(fail: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert fail(KeyboardInterrupt()) == INTERRUPTED
    assert capsys.readouterr().err == "llamac: stopped; run the command again to continue\n"
