"""Mutation testing: small faults planted in a file, one at a time. A fault that no test notices is a survivor.

python tests/mutants.py                                    a sample of each file of TARGETS, which takes an hour
python tests/mutants.py csrc/sampler.c --sample 50         more of one file; --sample 0 plants every fault
python tests/mutants.py csrc/sampler.c --sample 0 --line 120     every fault of a line

A fault replaces an operator by a similar one, adds 1 to a number, or deletes a statement. Faults that do not compile,
or that the compiler turns into the same code, do not count. The sample is the same each time. The checkout is not
changed: mutated files are in a temporary folder. tests/mutants.md explains the survivors.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SAMPLE = 30
TIMEOUT_S = 600  # a fault can make a loop endless; without one, tests of a file take less than a minute


class Suite(NamedTuple):
    """The tests of a file: programs of tests/c, and files or folders for pytest. Those in C run first."""

    c: tuple[str, ...] = ()
    python: tuple[str, ...] = ()


_BATCHING = tuple(f"engine/batching/test_{name}.py" for name in ("scheduler", "aging", "admission", "engine"))
_DOCUMENTED = "project/test_docs.py::test_every_field_is_documented_as_in_the_core"
_PREFIXES = ("engine/cache/test_prefix_cache.py", "engine/cache/test_prefix_store.py")
TARGETS = {
    "csrc/format.c": Suite(("test_format",), ("format/test_corrupt.py",)),
    "csrc/format_fields.c": Suite(("test_format",), ("format/test_corrupt.py", _DOCUMENTED)),
    "csrc/format_config.c": Suite(("test_format",), ("format/test_encoder_config.py", "format/test_corrupt.py")),
    "csrc/slots.c": Suite(("test_format", "test_plan"), ("format/test_corrupt.py",)),
    "csrc/binding.c": Suite(("test_format", "test_plan", "test_model"), ("engine/test_lora.py",)),
    "csrc/sampler.c": Suite(("test_sampler", "test_logits"), ("engine/sampling",)),
    "csrc/filters.c": Suite(("test_sampler",), ("engine/sampling",)),
    "csrc/states.c": Suite(("test_states", "test_sequences"), ("engine/test_recurrent.py",)),
    "csrc/drafter.c": Suite(("test_drafter", "test_mtp", "test_eagle"), ("engine/speculation/test_assistant.py",)),
    "llamac/format/flatfile.py": Suite((), ("format", "core/test_memory.py")),
    "llamac/engine/batching/scheduler.py": Suite((), _BATCHING),
    "llamac/engine/batching/admission.py": Suite((), (*_BATCHING, "engine/test_failures.py")),
    "llamac/engine/cache/prefix_cache.py": Suite((), (*_PREFIXES, "engine/batching/test_engine.py")),
}


# ---- faults

# What takes the place of a token, in both languages.
SWAPPED = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+": "-", "-": "+", "+=": "-=", "-=": "+=",
    "*": "+", "/": "*", "//": "*", "%": "+", "&": "|", "<<": ">>", ">>": "<<",
    "&&": "||", "||": "&&", "!": "", "++": "--", "--": "++",
    "and": "or", "or": "and", "not": "", "True": "False", "False": "True", "break": "continue", "continue": "break",
    "min": "max", "max": "min",
}  # fmt: skip
_C_TOKEN = re.compile(
    r"//[^\n]*|/\*.*?\*/|^[ \t]*#[^\n]*|\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'"  # no faults in these
    r"|(?P<token>[A-Za-z_]\w*|0x[0-9a-fA-F]+u?|\d[\w.]*|->|<<=?|>>=?|[-+*/%&|^<>=!]=|&&|\|\||\+\+|--|[-+*/%&|<>!])",
    re.MULTILINE | re.DOTALL,
)
_STATEMENT = {
    "c": re.compile(r"^ +(?:[A-Za-z_][\w.>\[\]-]*(?: [-+|&]?= |\(|\+\+|--)|return\b|\*).*;\s*(?://.*)?$"),
    "py": re.compile(r"^ +(?:[A-Za-z_][\w.\[\]]*(?: [-+|&]?= |\(| \+= )|return\b|raise\b|del\b).*[^,(\[{:]$"),
}


@dataclass(frozen=True)
class Fault:
    """A fault: the text [begin, end) of a file becomes `text`."""

    begin: int
    end: int
    text: str

    def plant(self, source: str) -> str:
        """The source with the fault."""
        return source[: self.begin] + self.text + source[self.end :]

    def line(self, source: str) -> int:
        """The number of its line, from 1."""
        return source.count("\n", 0, self.begin) + 1

    def describe(self, name: str, source: str) -> str:
        """The fault as text: file, line, and the change."""
        start = source.rfind("\n", 0, self.begin) + 1
        stop = source.index("\n", self.end)
        after = (source[start : self.begin] + self.text + source[self.end : stop]).strip()
        was = source[start:stop].strip()
        return f"{name}:{self.line(source)}: {was!r} -> {after!r}"


def faults_of(source: str, language: str) -> list[Fault]:
    """Every fault that can be planted in a text: of tokens in their order, then of statements."""
    tokens = _c_tokens(source) if language == "c" else _python_tokens(source)
    found = []
    for begin, text in tokens:
        if text in SWAPPED:
            found.append(Fault(begin, begin + len(text), SWAPPED[text]))
        elif text.isdigit():
            found.append(Fault(begin, begin + len(text), str(int(text) + 1)))
    begin, nothing = 0, ";" if language == "c" else "pass"
    for line in source.splitlines(keepends=True):
        if _STATEMENT[language].match(line.rstrip()):
            indent = len(line) - len(line.lstrip())
            found.append(Fault(begin + indent, begin + len(line.rstrip()), nothing))
        begin += len(line)
    return found


def _c_tokens(source: str) -> Iterator[tuple[int, str]]:
    for match in _C_TOKEN.finditer(source):
        if match["token"]:
            yield match.start(), match["token"]


def _python_tokens(source: str) -> Iterator[tuple[int, str]]:
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.OP, tokenize.NAME, tokenize.NUMBER):
            yield starts[token.start[0] - 1] + token.start[1], token.string


# ---- builds


class CBuild:
    """Objects of the core and of its tests, with the scalar kernels, of which one file at a time is replaced.

    They are optimized less than those that are shipped, which does not change what they compute.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        flags = json.loads((ROOT / "csrc" / "flags.json").read_text())
        core = ["-O2" if flag == "-O3" else flag for flag in flags["core"]]
        self._command = ["cc", *core, "-w", "-fopenmp", "-fPIC", "-D_GNU_SOURCE", "-DLLAMAC_SCALAR_ONLY"]
        self._command += [f"-I{path}" for path in (ROOT / "csrc", ROOT / "tests" / "c", sysconfig.get_path("include"))]
        vector = {name for names in flags["isa"].values() for name in names}
        self._objects: dict[str, Path] = {}
        self._programs: dict[str, Path] = {}
        for source in sorted((ROOT / "csrc").glob("*.c")):
            if source.name not in vector:
                self._objects[source.stem] = self.compile(source, source.stem)

    def compile(self, source: Path, name: str) -> Path:
        """Compile a file. Raises CalledProcessError if that fails."""
        out = self.folder / f"{name}.o"
        self.folder.mkdir(exist_ok=True)
        subprocess.run([*self._command, "-c", str(source), "-o", str(out)], check=True, capture_output=True)
        return out

    def is_same(self, stem: str, text: str) -> bool:
        """Whether a core file with another text does not compile, or is the same code as before."""
        objects = []
        for each in ((ROOT / "csrc" / f"{stem}.c").read_text(), text):
            try:
                objects.append(self._compile_text(stem, each).read_bytes())
            except subprocess.CalledProcessError:
                return True
        return objects[0] == objects[1]

    def link(self, out: Path, stem: str, text: str, program: Path, *options: str) -> Path:
        """Link a program or module with the core, of which one file has another text."""
        changed = self._compile_text(stem, text)
        objects = [changed if name == stem else path for name, path in self._objects.items()]
        if program.stem not in self._programs:
            self._programs[program.stem] = self.compile(program, program.stem)
        command = ["cc", *map(str, (self._programs[program.stem], *objects)), "-fopenmp", "-lm", *options]
        subprocess.run([*command, "-o", str(out)], check=True, capture_output=True)
        return out

    def _compile_text(self, stem: str, text: str) -> Path:
        source = self.folder / "changed" / f"{stem}.c"
        source.parent.mkdir(exist_ok=True)
        source.write_text(text)
        return self.compile(source, f"changed/{stem}")


class Package:
    """A copy of the Python package, of which one file at a time is replaced."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(ROOT / "llamac", folder / "llamac", ignore=shutil.ignore_patterns("_core.c", "__pycache__"))

    def fails(self, tests: Iterable[str], name: str | None = None, text: str = "") -> bool:
        """Whether pytest fails with the copy, of which a file has another text."""
        if name is not None:
            (self.folder / name).write_text(text)
            try:
                return self.fails(tests)
            finally:
                shutil.copy(ROOT / name, self.folder / name)
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        environment.pop("PYTEST_ADDOPTS", None)  # plugins of the caller may not be in this path
        paths = [str(ROOT / "tests" / name) for name in tests]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *paths]
        return failed(command, self.folder, environment)


def failed(command: list[str], folder: Path, environment: dict[str, str] | None = None) -> bool:
    """Whether a command fails, or does not end in time."""
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return True
    return done.returncode != 0


# ---- trials


class Trials:
    """Plants faults of files and runs their tests."""

    def __init__(self, folder: Path) -> None:
        self._package = Package(folder / "package")
        self._build: CBuild | None = None
        self._folder = folder / "objects"

    def check(self, name: str) -> None:
        """Check that the tests of a file pass without a fault. Raises SystemExit if not."""
        if self._are_failing(name, (ROOT / name).read_text()) is not False:
            raise SystemExit(f"the tests of {name} fail without a fault")

    def notices(self, name: str, fault: Fault) -> bool | None:
        """Whether a test notices a fault of a file; None if it changes nothing."""
        source = (ROOT / name).read_text()
        text = fault.plant(source)
        is_same = self._c.is_same(Path(name).stem, text) if name.endswith(".c") else is_same_python(text, source)
        return None if is_same else self._are_failing(name, text)

    def _are_failing(self, name: str, text: str) -> bool:
        """Whether the tests of a file fail if it has another text."""
        if not name.endswith(".c"):
            return self._package.fails(TARGETS[name].python, name, text)
        stem = Path(name).stem
        for test in TARGETS[name].c:
            program = self._c.link(self._folder / test, stem, text, ROOT / "tests" / "c" / f"{test}.c")
            if failed([str(program), "--sparse"], self._folder):
                return True
        if not TARGETS[name].python:
            return False
        module = self._package.folder / "llamac" / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"
        self._c.link(module, stem, text, ROOT / "llamac" / "_core.c", "-shared")
        return self._package.fails(TARGETS[name].python)

    @property
    def _c(self) -> CBuild:
        if self._build is None:
            self._build = CBuild(self._folder)
        return self._build


def is_same_python(text: str, source: str) -> bool:
    """Whether a text is not valid Python, or is the same code as the source."""
    try:
        return ast.dump(ast.parse(text)) == ast.dump(ast.parse(source))
    except SyntaxError:
        return True


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("files", nargs="*", metavar="FILE", help="files of TARGETS (default: all)")
    parser.add_argument("--sample", type=int, default=SAMPLE, metavar="N", help="faults of each file (0: all)")
    parser.add_argument("--line", type=int, metavar="N", help="only faults of this line")
    options = parser.parse_args()
    unknown = set(options.files) - set(TARGETS)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: expected some of {', '.join(TARGETS)}")
    with tempfile.TemporaryDirectory() as folder:
        trials = Trials(Path(folder))
        survivors = [try_file(trials, name, options.sample, options.line) for name in options.files or TARGETS]
    return sum(survivors) > 0


def try_file(trials: Trials, name: str, sample: int, line: int | None) -> int:
    """Plant faults in a file, and print those that survived. Returns their number."""
    begun = time.monotonic()
    source = (ROOT / name).read_text()
    every = faults_of(source, "c" if name.endswith(".c") else "py")
    chosen = [fault for fault in every if line in (None, fault.line(source))]
    random.Random(name).shuffle(chosen)
    trials.check(name)
    tried = survived = 0
    for fault in chosen:
        if sample and tried == sample:
            break
        noticed = trials.notices(name, fault)
        tried += noticed is not None
        if noticed is False:
            survived += 1
            print(fault.describe(name, source), flush=True)
    took = f"{(time.monotonic() - begun) / 60:.1f} minutes"
    print(f"{name}: {tried - survived} of {tried} faults noticed ({len(every)} exist; {took})", flush=True)
    return survived


if __name__ == "__main__":
    sys.exit(main())
