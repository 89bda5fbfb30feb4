"""libllamac: its versions, its symbols, its flags, and programs that use an installed copy (docs/c.md)."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from c import library

import llamac

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
if not (CSRC / "CMakeLists.txt").is_file():
    pytest.skip("the sources are not here: this is an installed copy", allow_module_level=True)
MISSING = [tool for tool in library.TOOLS if shutil.which(tool) is None]
needs_tools = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")


def header_version() -> str:
    text = (CSRC / "llamac.h").read_text()
    return ".".join(re.findall(r"^#define LLAMAC_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)$", text, re.MULTILINE))


def test_the_header_has_the_version_of_the_package() -> None:
    package = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert package is not None
    assert header_version() == package[1]


def test_the_list_of_symbols_is_the_header() -> None:
    text = (CSRC / "llamac.map").read_text()
    major, minor, _ = header_version().split(".")
    nodes = re.findall(r"^LLAMAC_([\d.]+) \{", text, re.MULTILINE)
    assert nodes[-1] == f"{major}.{minor}"
    assert re.findall(r"^ +(llamac_\w+);$", text, re.MULTILINE) == library.public_functions()


@pytest.mark.parametrize(("compiler", "standard"), [("cc", "c11"), ("cc", "c99"), ("c++", "c++98"), ("c++", "c++20")])
def test_the_header_compiles_alone(tmp_path: Path, compiler: str, standard: str) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    source = tmp_path / ("main.c" if compiler == "cc" else "main.cpp")
    source.write_text('#include "llamac.h"\nint main(void) { return llamac_version() != LLAMAC_VERSION; }\n')
    strict = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only"]
    command = [compiler, f"-std={standard}", *strict, f"-I{CSRC}", str(source)]
    assert subprocess.run(command, capture_output=True, text=True).stderr == ""


@needs_tools
def test_each_file_is_compiled_with_the_flags_of_the_extension(tmp_path: Path) -> None:
    library.configure(tmp_path, "CMAKE_EXPORT_COMPILE_COMMANDS=ON")
    flags = json.loads((CSRC / "flags.json").read_text())
    own = flags["isa"].get(platform.machine(), {})
    found = {}
    for entry in json.loads((tmp_path / "compile_commands.json").read_text()):
        words = shlex.split(entry["command"])
        assert {*flags["core"], *flags["warnings"], "-fopenmp", "-fPIC", "-DLLAMAC_EXPORTS"} <= set(words)
        name = Path(entry["file"]).name
        found[name] = words[words.index(flags["warnings"][-1]) + 1 : words.index("-o")]
        assert "-Ofast" not in words
        assert "-ffast-math" not in words
    assert found.keys() == {path.name for path in CSRC.glob("*.c")}
    assert {name: options for name, options in found.items() if options} == own


@needs_tools
@pytest.mark.parametrize(("include", "lib"), [("include", "lib/machine"), ("include", "/lib"), ("/include", "lib")])
def test_pkg_config_names_the_folders_of_an_installation(tmp_path: Path, include: str, lib: str) -> None:
    """Absolute folders are those of a package manager that installs headers or libraries elsewhere."""
    prefix = tmp_path / "prefix"
    folders = [str(tmp_path / "other") + name if name.startswith("/") else name for name in (include, lib)]
    settings = [f"CMAKE_INSTALL_PREFIX={prefix}", "LLAMAC_SCALAR_ONLY=ON"]
    settings += [f"CMAKE_INSTALL_{kind}DIR={folder}" for kind, folder in zip(("INCLUDE", "LIB"), folders, strict=True)]
    library.configure(tmp_path / "build", *settings)
    installed = prefix / folders[1] / "pkgconfig"
    installed.mkdir(parents=True)
    shutil.copy(tmp_path / "build" / "llamac.pc", installed)
    words = library.run("pkg-config", "--cflags", "--libs", "llamac", PKG_CONFIG_PATH=str(installed)).split()
    found = [word[:2] + os.path.normpath(word[2:]) for word in words[:2]]
    assert found == [f"-I{prefix / folders[0]}", f"-L{prefix / folders[1]}"]


def test_the_package_generates_the_recorded_tokens() -> None:
    with llamac.load(library.MODEL) as model:
        assert tuple(model.tokenize("Once upon a time")) == library.PROMPT
        result = model.generate(library.PROMPT, max_tokens=len(library.TOKENS), temperature=0)
    assert tuple(result.tokens) == library.TOKENS


@needs_tools
def test_programs_with_an_installed_library_generate_the_tokens_of_the_package(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Later runs of the suite compile only what has changed."""
    cache = getattr(request.config, "cache", None)
    library.check(tmp_path if cache is None else Path(cache.mkdir("library")), scalar=True)
