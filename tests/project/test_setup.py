"""setup.py: the compiler flags of each option, recorded by a script in place of the compiler."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from c import build as build_c

pytest.importorskip("setuptools", reason="setuptools is not installed (extra: test)")

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "setup.py").is_file():
    pytest.skip("the sources are not here: this is an installed copy", allow_module_level=True)
FLAGS = json.loads((ROOT / "csrc" / "flags.json").read_text())

COMPILER = """#!/bin/sh
echo "$@" >> "$NOTES"
if [ "$*" != "${*% -}" ]; then  # a program on standard input
    read -r line
    [ "$line" != "$REFUSED" ] || { echo 'fatal error' >&2; exit 1; }
fi
for word in "$@"; do
    [ "$word" != "$REFUSED" ] || exit 1
    [ "$last" != -o ] || : > "$word"
    last=$word
done
"""


def build(folder: Path, refused: str = "", **options: str) -> subprocess.CompletedProcess[str]:
    """Run setup.py with a compiler that writes its arguments to `notes`. A second call builds again in the same folder.

    Args:
        folder: where setup.py and the C files are copied to.
        refused: an argument, or a line of a program on standard input, that the compiler rejects.
        options: environment variables, and COMMAND for the command of setup.py.
    """
    compiler, notes = folder / "compiler", folder / "notes"
    if not compiler.exists():
        shutil.copytree(ROOT / "csrc", folder / "csrc")
        shutil.copy(ROOT / "setup.py", folder)
        (folder / "llamac").mkdir()
        for name in ("_core.pyx", "_core.c"):  # nothing to translate, with or without Cython
            (folder / "llamac" / name).touch()
        compiler.write_text(COMPILER)
        compiler.chmod(0o700)
    notes.unlink(missing_ok=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LLAMAC_")}
    environment |= {"CC": str(compiler), "LDSHARED": str(compiler), "NOTES": str(notes), "REFUSED": refused, **options}
    command = [sys.executable, "setup.py", "-q", options.pop("COMMAND", "build_ext")]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def commands(folder: Path, refused: str = "", **options: str) -> list[list[str]]:
    """The compiler's arguments for the core's files and, last, for linking."""
    done = build(folder, refused, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in (folder / "notes").read_text().splitlines()]
    core = [line for line in lines if any(word.startswith("csrc/") and word.endswith(".c") for word in line)]
    vector_kernels = set().union(*FLAGS["isa"].values()) if "LLAMAC_SCALAR_ONLY" in options else set()
    assert len(core) == sum(file.name not in vector_kernels for file in Path(ROOT, "csrc").glob("*.c"))
    return [*core, lines[-1]]


def has(command: list[str], flags: list[str]) -> bool:
    """Whether a command contains the flags in succession."""
    return any(command[start : start + len(flags)] == flags for start in range(len(command)))


def test_the_core_and_each_kernel_set_get_their_flags(tmp_path: Path) -> None:
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
def test_build_options_reach_the_compiler(tmp_path: Path, name: str, value: str, flags: str) -> None:
    *core, _ = commands(tmp_path, **{f"LLAMAC_{name}": value})
    assert all(flags in command for command in core)


def test_the_c_tests_compile_the_core_with_the_same_command(tmp_path: Path) -> None:
    """They test what is shipped, and ccache compiles each file once."""

    def options(command: list[str]) -> list[str]:
        return [word for word in command if word.startswith("-") and word[:2] not in ("-I", "-c", "-o")]

    *core, _ = commands(tmp_path, LLAMAC_WERROR="1")
    own = FLAGS["isa"].get(platform.machine(), {})
    for command in core:
        (name,) = [word.removeprefix("csrc/") for word in command if word.endswith(".c")]
        assert options(command) == options([*build_c.setup_command(FLAGS, []), *own.get(name, []), "-g0"])


def test_a_second_build_compiles_and_links_again(tmp_path: Path) -> None:
    """Otherwise other flags or changed C files would not reach the extension."""
    commands(tmp_path)
    *core, link = commands(tmp_path, LLAMAC_NATIVE="1")
    assert all("-march=native" in command for command in core)
    assert all(command[command.index("-o") + 1] in link for command in core)


@pytest.mark.parametrize(("options", "refused"), [({"LLAMAC_OPENMP": "0"}, ""), ({}, "-fopenmp")])
def test_openmp_is_left_out_if_disabled_or_missing(tmp_path: Path, options: dict[str, str], refused: str) -> None:
    assert not any("-fopenmp" in command for command in commands(tmp_path, refused, **options))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AVX-VNNI and AMX are extensions of x86-64")
@pytest.mark.parametrize(("flag", "without"), [("-mavxvnni", "-DLLAMAC_NO_AVXVNNI"), ("-mamx-int8", "-DLLAMAC_NO_AMX")])
def test_a_kernel_set_that_the_compiler_does_not_know_is_left_out(tmp_path: Path, flag: str, without: str) -> None:
    *core, _ = commands(tmp_path, flag)
    assert all(without in command and flag not in command for command in core)
    *core, _ = commands(tmp_path)
    assert not any(without in command for command in core)


def test_kernels_for_certain_processors_can_be_left_out(tmp_path: Path) -> None:
    *core, _ = commands(tmp_path, LLAMAC_SCALAR_ONLY="1")
    assert all("-DLLAMAC_SCALAR_ONLY" in command for command in core)
    own = FLAGS["isa"].get(platform.machine(), {})
    assert not any(has(command, flags) for command in core for flags in own.values() if flags)


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_a_sanitized_build_has_the_flags_of_the_sanitized_c_tests(tmp_path: Path, compiler: str) -> None:
    """GCC needs one more flag, which limits the time and memory for the kernels' files."""
    refused = "" if compiler == "gcc" else "--param"
    *core, link = commands(tmp_path, refused, LLAMAC_SANITIZE="address,undefined")
    flags = ["-fsanitize=address,undefined", *FLAGS["sanitize"]]
    assert all(has(command, flags) for command in [*core, link])
    assert all(has(command, FLAGS["sanitize_gcc"]) == (compiler == "gcc") for command in core)


def test_the_extension_is_stripped_unless_symbols_are_requested(tmp_path: Path) -> None:
    *core, link = commands(tmp_path)
    assert all("-g0" in command for command in core)
    assert "-s" in link
    for options in ({"LLAMAC_SYMBOLS": "1"}, {"LLAMAC_SANITIZE": "address"}):
        *core, link = commands(tmp_path, **options)
        assert not any("-g0" in command for command in core)
        assert "-s" not in link


# ---- missing tools


@pytest.mark.parametrize("command", ["build", "build_ext"])
@pytest.mark.parametrize(
    ("refused", "options", "problem"),
    [
        ("", {"CC": "no-such-cc -m64"}, "the C compiler does not work or is missing: no-such-cc -m64"),
        ("int main(void) { return 0; }", {}, "the C compiler does not work or is missing"),
        ("#include <Python.h>", {}, "the C compiler does not find Python.h"),
    ],
    ids=["no compiler", "broken compiler", "no headers"],
)
def test_missing_tools_are_reported_in_a_short_message(
    tmp_path: Path, command: str, refused: str, options: dict[str, str], problem: str
) -> None:
    done = build(tmp_path, refused, COMMAND=command, **options)
    assert done.returncode == 1
    assert problem in done.stderr
    for install in ("apt install gcc libc6-dev python3-dev", "dnf install", "pacman -S gcc", "apk add gcc musl-dev"):
        assert install in done.stderr
    assert len((done.stdout + done.stderr).splitlines()) < 10


# ---- editable installs


def test_an_editable_install_is_found_next_to_a_folder_of_the_same_name(tmp_path: Path) -> None:
    """A clone named llamac makes its parent folder contain a namespace package llamac.

    A folder on sys.path with the real package must take precedence.
    """
    clone, site = tmp_path / "llamac", tmp_path / "site"
    (clone / "export").mkdir(parents=True)
    (clone / "models").mkdir()
    build(clone)
    own = [path for top in ("llamac", "export", "models") for path in (ROOT / top).glob("**/__init__.py")]
    for path in sorted(own):
        package = clone / path.relative_to(ROOT)
        package.parent.mkdir(parents=True, exist_ok=True)
        package.touch()
    for name in ("export", "models"):
        (clone / "llamac" / name).symlink_to(Path("..", name))
    assert build(clone, COMMAND="editable_wheel").returncode == 0
    (wheel,) = (clone / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    program = f"import site; site.addsitedir({str(site)!r}); import llamac.export; print(llamac.__file__)"
    for cwd in (tmp_path, clone, site):
        found = subprocess.run([sys.executable, "-ES", "-c", program], cwd=cwd, capture_output=True, text=True)
        assert (found.stdout, found.stderr) == (f"{clone}/llamac/__init__.py\n", "")
