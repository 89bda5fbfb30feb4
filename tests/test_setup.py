"""setup.py: which flags its options give to the compiler. The compiler here only notes what it is asked for."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("setuptools", reason="setuptools is not installed (extra: test)")

ROOT = Path(__file__).resolve().parent.parent
if not (ROOT / "setup.py").is_file():
    pytest.skip("the sources are not here: this is an installed copy", allow_module_level=True)
FLAGS = json.loads((ROOT / "csrc" / "flags.json").read_text())

COMPILER = """#!/bin/sh
echo "$@" >> "$NOTES"
for word in "$@"; do
    [ "$word" != "$REFUSED" ] || exit 1
    [ "$last" != -o ] || : > "$word"
    last=$word
done
"""


def commands(folder: Path, refused: str = "", **options: str) -> list[list[str]]:
    """The compiler's arguments for the core's files and, last, for linking. refused: a word that it does not take.
    A second call builds again with what the first one left."""
    compiler, notes = folder / "compiler", folder / "notes"
    if not compiler.exists():
        shutil.copytree(ROOT / "csrc", folder / "csrc")
        shutil.copy(ROOT / "setup.py", folder)
        (folder / "llamac").mkdir()
        for name in ("_core.pyx", "_core.c"):  # nothing to translate, with Cython or without it
            (folder / "llamac" / name).touch()
        compiler.write_text(COMPILER)
        compiler.chmod(0o700)
    notes.unlink(missing_ok=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LLAMAC_")}
    environment |= {"CC": str(compiler), "LDSHARED": str(compiler), "NOTES": str(notes), "REFUSED": refused, **options}
    subprocess.run([sys.executable, "setup.py", "-q", "build_ext"], cwd=folder, env=environment, check=True)
    lines = [line.split() for line in notes.read_text().splitlines()]
    core = [line for line in lines if any(word.startswith("csrc/") and word.endswith(".c") for word in line)]
    assert len(core) == len(list(Path(ROOT, "csrc").glob("*.c")))
    return [*core, lines[-1]]


def has(command: list[str], flags: list[str]) -> bool:
    """Whether the flags stand in a command, one after another."""
    return any(command[start : start + len(flags)] == flags for start in range(len(command)))


def test_the_core_gets_its_flags_and_each_kernel_set_its_own(tmp_path: Path) -> None:
    *core, link = commands(tmp_path)
    assert all(has(command, [*FLAGS["core"], "-fopenmp", *FLAGS["warnings"]]) for command in core)
    assert has(link, ["-fopenmp"])
    own = FLAGS["isa"].get(platform.machine(), {})
    assert {name: flags for name, flags in own.items() if any(has(command, flags) for command in core)} == own
    assert not any("sanitize" in word or word in ("-flto", "-march=native", "-Werror") for word in sum(core, link))


@pytest.mark.parametrize(
    ("name", "value", "flags"),
    [("NATIVE", "1", "-march=native"), ("LTO", "1", "-flto"), ("WERROR", "1", "-Werror")],
)
def test_options_are_passed_on(tmp_path: Path, name: str, value: str, flags: str) -> None:
    *core, _ = commands(tmp_path, **{f"LLAMAC_{name}": value})
    assert all(flags in command for command in core)


def test_a_second_build_links_what_it_has_compiled(tmp_path: Path) -> None:
    """Other flags, or other C files, would not reach the extension otherwise."""
    commands(tmp_path)
    *core, link = commands(tmp_path, LLAMAC_NATIVE="1")
    assert all("-march=native" in command for command in core)
    assert all(command[command.index("-o") + 1] in link for command in core)


@pytest.mark.parametrize(("options", "refused"), [({"LLAMAC_OPENMP": "0"}, ""), ({}, "-fopenmp")])
def test_openmp_is_left_out_if_it_is_unwanted_or_missing(tmp_path: Path, options: dict[str, str], refused: str) -> None:
    assert not any("-fopenmp" in command for command in commands(tmp_path, refused, **options))


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_a_sanitized_build_has_the_flags_of_the_sanitized_c_tests(tmp_path: Path, compiler: str) -> None:
    """Among them, for GCC, the one that keeps the time and memory for the kernels' file sane."""
    refused = "" if compiler == "gcc" else "--param"
    *core, link = commands(tmp_path, refused, LLAMAC_SANITIZE="address,undefined")
    flags = ["-fsanitize=address,undefined", *FLAGS["sanitize"]]
    assert all(has(command, flags) for command in [*core, link])
    assert all(has(command, FLAGS["sanitize_gcc"]) == (compiler == "gcc") for command in core)
