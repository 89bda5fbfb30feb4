"""Static checks: mypy in its strict mode, the stub of the compiled module against the module, ruff's rules."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
COMMAND = ROOT / "llamac_command.py"
CONFIG = ROOT / "pyproject.toml"
CHECKED_TESTS = sorted(ROOT.glob("tests/*.py"))

if not (ROOT / "llamac" / "_core.pyi").is_file():
    pytest.skip("the sources are not here: this is an installed copy", allow_module_level=True)


def needs(tool: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(tool) is None, reason=f"{tool} is not installed (extra: test)")


@pytest.fixture(scope="module")
def tree(request: pytest.FixtureRequest) -> Path:
    """The package as it is installed, made of links: export/ and models/ in llamac/; and bench/. mypy's cache stays."""
    assert request.config.cache is not None
    folder = request.config.cache.mkdir("typing")
    package = folder / "llamac"
    package.mkdir(exist_ok=True)
    for link in package.iterdir():
        link.unlink()
    bench = folder / "bench"
    if not bench.is_symlink():
        bench.symlink_to(ROOT / "bench")
    for source in [*(ROOT / "llamac").iterdir(), ROOT / "export", ROOT / "models"]:
        if source.suffix in (".py", ".pyi", ".typed", "") and source.name != "__pycache__":
            (package / source.name).symlink_to(source)
    if not (folder / COMMAND.name).exists():
        (folder / COMMAND.name).symlink_to(COMMAND)
    return folder


def run(tree: Path, *arguments: object) -> str:
    """What a check has to say; empty if it is content."""
    environment = {**os.environ, "MYPYPATH": f"{tree}:{ROOT / 'tests'}", "MYPY_CACHE_DIR": str(tree / "cache")}
    command = [sys.executable, "-m", *map(str, arguments)]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stdout + done.stderr


@needs("mypy")
def test_mypy_is_content_with_the_package(tree: Path) -> None:
    assert run(tree, "mypy", "--config-file", CONFIG, "-p", "llamac", "-m", "llamac_command") == ""


@needs("mypy")
def test_mypy_is_content_with_the_tests(tree: Path) -> None:
    assert run(tree, "mypy", "--config-file", CONFIG, *CHECKED_TESTS) == ""


@needs("mypy")
def test_mypy_is_content_with_the_benchmarks(tree: Path) -> None:
    assert run(tree, "mypy", "--config-file", CONFIG, "-p", "bench") == ""


@needs("mypy")
def test_the_stub_describes_the_compiled_module(tree: Path) -> None:
    assert run(tree, "mypy.stubtest", "llamac._core", "--mypy-config-file", CONFIG) == ""


@needs("mypy")
def test_a_program_that_uses_the_package_is_checked(tree: Path, tmp_path: Path) -> None:
    """The types reach users: right uses pass, wrong ones are found."""
    good = "import llamac\nwith llamac.load('m', threads=2) as model:\n    text: str = model.generate('a').text\n"
    wrong = "import llamac\nmodel = llamac.load('m')\nmodel.generate(3)\nmodel.stream('a', tokens=3)\n"
    (tmp_path / "good.py").write_text(good)
    (tmp_path / "wrong.py").write_text(wrong)
    assert run(tree, "mypy", "--config-file", CONFIG, tmp_path / "good.py") == ""
    found = run(tree, "mypy", "--config-file", CONFIG, tmp_path / "wrong.py")
    assert "wrong.py:3: error: Argument 1" in found
    assert 'wrong.py:4: error: Unexpected keyword argument "tokens"' in found


@needs("ruff")
def test_ruff_is_content(tree: Path) -> None:
    assert run(tree, "ruff", "check", "--output-format", "concise", "--config", CONFIG, ROOT) == ""
