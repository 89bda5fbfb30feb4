"""A system without the library of OpenMP: Python and the command line say what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

# What Python raises there.
MISSING = "libgomp.so.1: cannot open shared object file: No such file or directory"
FINDER = f"""
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "llamac._core":
            raise ImportError("{MISSING}")

sys.meta_path.insert(0, Finder())
"""


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program where the core cannot be imported."""
    command = [sys.executable, "-c", FINDER + program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("name", ["load", "Engine", "Session"])
def test_the_error_of_an_import_says_what_to_install(name: str) -> None:
    found = run(f"from llamac import {name}")
    last = found.stderr.splitlines()[-1]
    assert found.returncode == 1
    assert last.startswith("ImportError: llamac's core needs libgomp")
    assert "apt install libgomp1" in last
    assert last.endswith(MISSING)


def test_a_command_says_what_to_install() -> None:
    found = run("import llamac.__main__ as m; m.main()", "run", "-i", "x")
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr.startswith("llamac: error: llamac's core needs libgomp")
    assert found.stderr.count("\n") == 1


def test_other_errors_of_imports_stay_as_they_are() -> None:
    found = run(
        "sys.meta_path[0].find_spec = lambda *_, **__: (_ for _ in ()).throw(ImportError('x'))\nfrom llamac import load"
    )
    assert found.stderr.splitlines()[-1] == "ImportError: x"
