"""Static checks: mypy in strict mode, the stub of the compiled module, and ruff."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "pyproject.toml"
CHECKED_TESTS = sorted([*ROOT.glob("tests/*.py"), *ROOT.glob("tests/*/test_*.py")])

if not (ROOT / "llamac" / "_core.pyi").is_file():
    pytest.skip("the sources are not here: this is an installed copy", allow_module_level=True)


def needs(tool: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(tool) is None, reason=f"{tool} is not installed (extra: test)")


@pytest.fixture(scope="module")
def mypy_cache(request: pytest.FixtureRequest) -> Path:
    """mypy's cache, which later runs of the suite reuse: pytest's, or without its plugin mypy's own folder."""
    cache = getattr(request.config, "cache", None)
    return ROOT / ".mypy_cache" if cache is None else cache.mkdir("mypy")


def run(mypy_cache: Path, *arguments: object) -> str:
    """The output of a failing check; empty if it passes."""
    environment = {**os.environ, "MYPYPATH": str(ROOT / "tests"), "MYPY_CACHE_DIR": str(mypy_cache)}
    command = [sys.executable, "-m", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stdout + done.stderr


@needs("mypy")
def test_mypy_accepts_the_package(mypy_cache: Path) -> None:
    assert run(mypy_cache, "mypy", "--config-file", CONFIG, "-p", "llamac") == ""


@needs("mypy")
def test_mypy_accepts_the_tests(mypy_cache: Path) -> None:
    assert run(mypy_cache, "mypy", "--config-file", CONFIG, *CHECKED_TESTS) == ""


@needs("mypy")
def test_mypy_accepts_the_benchmarks(mypy_cache: Path) -> None:
    assert run(mypy_cache, "mypy", "--config-file", CONFIG, "-p", "bench") == ""


@needs("mypy")
def test_the_stub_matches_the_compiled_module(mypy_cache: Path) -> None:
    assert run(mypy_cache, "mypy.stubtest", "llamac._core", "--mypy-config-file", CONFIG) == ""


PROGRAM = """
import llamac
from typing_extensions import assert_type
import numpy as np
from numpy.typing import NDArray
params = llamac.SamplingParams(temperature=0, stop=["a"])
with llamac.load("m", threads=2, kv_dtype="f16", memory="map", dtype="q8", cache_dir=False, progress=True) as model:
    text: str = model.generate("a", params, seed=1, stop=None).text
    assert_type(model.chat([{"role": "user", "content": "x"}], max_tokens=5), llamac.Completion)
    assert_type(model.stream([1, 2]), llamac.Stream)
    with model.session() as session:
        assert_type(session.eval([1]), NDArray[np.float32])
        assert_type(session.eval([1], logits="all"), NDArray[np.float32])
        assert_type(session.generate("a", top_k=5).tokens, list[int])
        assert_type(session.sample(temperature=0.5), int)
    if model.generate("a").finish_reason == "cancelled":
        pass
"""
# Maps a line of a program to part of mypy's message about it.
MISTAKES = {
    "model.generate(3)": 'Argument 1 to "generate" of "Model" has incompatible type "int"',
    "model.stream('a', tokens=3)": 'Unexpected keyword argument "tokens"',
    "model.generate('a', temperature='hot')": 'Argument "temperature" to "generate" of "Model"',
    "model.session().generate('a', context=5)": 'Unexpected keyword argument "context"',
    "llamac.load()": 'Missing positional argument "path"',
    "llamac.load('m', kv_dtype='q4')": 'Argument "kv_dtype" to "load"',
    "llamac.load('m', numerics='slow')": 'Argument "numerics" to "load"',
    "llamac.SamplingParams(5)": "Too many positional arguments",
    "model.session().eval([1], logits=None).shape": '"None" has no attribute "shape"',
    "model.generate('a').finish_reason == 'done'": "Non-overlapping equality check",
    "model.config['context'] = 5": "Unsupported target for indexed assignment",
}


@needs("mypy")
def test_programs_that_use_the_package_are_type_checked(mypy_cache: Path, tmp_path: Path) -> None:
    """Correct uses pass, and every mistake is reported."""
    (tmp_path / "right.py").write_text(PROGRAM)
    assert run(mypy_cache, "mypy", "--config-file", CONFIG, tmp_path / "right.py") == ""
    lines = ["import llamac", "model = llamac.load('m')", *MISTAKES]
    (tmp_path / "wrong.py").write_text("\n".join(lines) + "\n")
    found = run(mypy_cache, "mypy", "--config-file", CONFIG, tmp_path / "wrong.py")
    for number, (line, message) in enumerate(MISTAKES.items(), 3):
        assert re.search(rf"wrong\.py:{number}: error: .*{re.escape(message)}", found), f"{line}: {found}"


@needs("ruff")
def test_ruff_accepts_the_code(mypy_cache: Path) -> None:
    assert run(mypy_cache, "ruff", "check", "--output-format", "concise", "--config", CONFIG, ROOT) == ""
