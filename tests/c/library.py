"""Build libllamac, install it into a prefix, and run the examples against the installed copy.

python tests/c/library.py --work DIR               with all kernels of this machine, as users build it
python tests/c/library.py --work DIR --scalar      with the plain C kernels alone, which compile in a minute

DIR keeps the objects for the next run. The programs must print TOKENS: with the shared and the static library,
found by pkg-config and by CMake, and from Python through ctypes. The commands of docs/c.md run as they are.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "c"
MODEL = ROOT / "models" / "stories.bin"
PROMPT = (1, 613, 614, 261, 476)  # "Once upon a time"
# tests/core/test_library.py checks that the Python package generates these.
TOKENS = (1499, 492, 295, 261, 1080, 662, 357, 788, 1493, 788, 366, 332, 261, 621, 1127, 1493, 13, 1398, 895, 623)
TOOLS = ("cc", "cmake", "make", "nm", "pkg-config")


def public_functions() -> list[str]:
    """The functions of llamac.h that belong to the library, in order."""
    header = (ROOT / "csrc" / "llamac.h").read_text().split("// ---- for tests of the core")[0]
    return re.findall(r"^[\w ]+[ *](llamac_\w+)\(", re.sub("//.*", "", header), re.MULTILINE)


def run(*command: str | Path, **environment: str) -> str:
    """Run a command and return its output. An error shows the output."""
    words = [str(word) for word in command]
    done = subprocess.run(words, env={**os.environ, **environment}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{shlex.join(words)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def configure(build: Path, *settings: str) -> None:
    """Configure the library in a folder."""
    run("cmake", "-S", ROOT / "csrc", "-B", build, "-G", "Unix Makefiles", *(f"-D{setting}" for setting in settings))


def install(work: Path, scalar: bool) -> Path:
    """Build and install the library, then move it: nothing installed depends on where that was. Returns the prefix."""
    first, prefix = work / "first", work / "home" / ".local"  # as in docs/c.md, where the home is work / "home"
    shutil.rmtree(prefix, ignore_errors=True)
    configure(work / "build", f"CMAKE_INSTALL_PREFIX={first}", f"LLAMAC_SCALAR_ONLY={'ON' if scalar else 'OFF'}")
    run("cmake", "--build", work / "build", "--target", "install", "--parallel", str(os.cpu_count()))
    prefix.parent.mkdir(exist_ok=True)
    return first.rename(prefix)


def check_symbols(prefix: Path) -> None:
    """Compare the symbols of both libraries with the header."""
    expected = set(public_functions())
    exported = run("nm", "-D", "--defined-only", prefix / "lib" / "libllamac.so").split("\n")
    names = {line.split()[-1] for line in exported if " T " in line}
    assert {name.partition("@@")[0] for name in names} == expected, names
    node = re.search(r"^(LLAMAC_[\d.]+) \{", (ROOT / "csrc" / "llamac.map").read_text(), re.MULTILINE)
    assert node is not None
    assert {name.partition("@@")[2] for name in names} == {node[1]}, names
    static = run("nm", "-g", "--defined-only", prefix / "lib" / "libllamac.a").split("\n")
    assert {line.split()[-1] for line in static if len(line.split()) == 3} == expected, static


def compile_as_documented(work: Path, prefix: Path, line: int) -> list[str]:
    """Run the export line of docs/c.md and one of its compiler lines. Returns the program's command."""
    lines = re.findall(r"^    ((?:export|cc) .*)$", (ROOT / "docs" / "c.md").read_text(), re.MULTILINE)
    strict = f'cc() {{ command {os.environ.get("CC", "cc")} -std=c11 -Wall -Wextra -Wpedantic -Werror "$@"; }}'
    if "-fopenmp" not in (prefix / "lib" / "pkgconfig" / "llamac.pc").read_text():  # the compiler has no OpenMP
        lines[line] = lines[line].replace(" -fopenmp", "")
    folder = work / "documented"
    folder.mkdir(exist_ok=True)
    shutil.copy(EXAMPLES / "generate.c", folder)
    script = "\n".join((strict, f"cd {shlex.quote(str(folder))}", lines[0], lines[line]))
    run("sh", "-ec", script, HOME=str(work / "home"))
    return [str(folder / "generate")]


def programs(work: Path, prefix: Path) -> Iterator[tuple[str, list[str]]]:
    """Build the examples. Yields the name of each way and its command, to which the arguments are added."""
    shared, static = 1, 2  # lines
    yield "pkg-config", compile_as_documented(work, prefix, shared)
    command = compile_as_documented(work, prefix, static)
    assert "llamac_" not in run("nm", "-D", *command), "the program needs the shared library"
    yield "the static library's file", command
    run("cmake", "-S", EXAMPLES, "-B", work / "examples", f"-DCMAKE_PREFIX_PATH={prefix}")
    run("cmake", "--build", work / "examples")
    yield "CMake", [str(work / "examples" / "generate")]
    yield "CMake, static", [str(work / "examples" / "generate_static")]
    yield "ctypes", [sys.executable, str(EXAMPLES / "generate.py"), str(prefix / "lib" / "libllamac.so")]


def check(work: Path, scalar: bool) -> None:
    """Build, install and run everything. Raises SystemExit or AssertionError if something is wrong."""
    prefix = install(work, scalar)
    check_symbols(prefix)
    for name, command in programs(work, prefix):
        output = run(*command, MODEL, str(len(TOKENS)), *map(str, PROMPT))
        assert tuple(map(int, output.split())) == TOKENS, f"{name}: {output}"
        print(f"{name}: {len(TOKENS)} tokens as the Python package")


def main() -> None:
    """Run `check` with the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="where to build and install")
    parser.add_argument("--scalar", action="store_true", help="only the plain C kernels")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    check(options.work.resolve(), options.scalar)


if __name__ == "__main__":
    main()
