"""Compiles a file of kernels, as it is, with the system's C++ compiler to a library that the emulator runs."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from llamac.errors import UnsupportedError
from llamac.format.private_files import locked, replacing
from llamac.gpu.sources import HEADER_FOLDERS, included

_FOLDER = Path(__file__).parent
# -O2 takes longer to compile than it saves when tests run.
_FLAGS = (
    *("-std=c++20", "-O1", "-g1", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno"),
    *(
        "-fno-strict-aliasing",
        "-Wall",
        "-Wextra",
        "-Wno-unknown-pragmas",
        "-Wno-unused-function",
        "-Wno-missing-field-initializers",
    ),
    # csrc's constants are enumerations: C++20 deprecates arithmetic that mixes them
    *("-Wno-deprecated-enum-enum-conversion", "-Wno-deprecated-anon-enum-enum-conversion"),
    "-Wno-maybe-uninitialized",  # values loaded ahead are used under the same condition
)
_RUNTIME = ("runtime.cpp", "checks.cpp")  # linked to every library
_KERNEL = re.compile(r'extern\s*"C"\s*__global__\s+void\s+(\w+)\s*\(')


def build(source: Path, cache: Path, sanitize: str = "", checked: bool = False) -> Path:
    """The library of a file's kernels.

    Args:
        source: A .cu file.
        cache: The folder that keeps libraries, which is created if it does not exist.
        sanitize: For the compiler's option -fsanitize, as "undefined"; "" for none.
        checked: Whether the kernels' accesses to memory are checked (checks.cpp).

    Raises:
        UnsupportedError: There is no C++ compiler, or it refuses the file.
    """
    flags = _flags(sanitize)
    cache.mkdir(parents=True, exist_ok=True)
    runtime_flags = (*flags, "-DEMULATOR_CHECKED") if checked else flags
    runtime = [str(_kept(_FOLDER / name, cache, ".o", runtime_flags, _compile_runtime)) for name in _RUNTIME]
    link = [*flags, "-shared", *runtime]  # checks.cpp takes the place of the library of -fsanitize=thread
    kernel_flags = (*flags, "-fsanitize=thread") if checked else flags
    if sanitize or checked:  # optimizing checked kernels takes longer than running them unoptimized
        kernel_flags = (*kernel_flags, "-O0")
    return _kept(source, cache, ".so", kernel_flags, partial(_compile_kernels, link))


def _kept(
    source: Path, cache: Path, suffix: str, flags: tuple[str, ...], make: Callable[[Path, Path, Sequence[str]], None]
) -> Path:
    """The output of `make` for a file, from the cache if nothing that determines it has changed.

    If another thread or process makes it, this one waits.
    """
    texts = {**included(source), **{path.name: path.read_text("utf-8") for path in _FOLDER.glob("*.[hc]*")}}
    key = hashlib.sha256(repr((source.read_text("utf-8"), sorted(texts.items()), flags, compiler())).encode())
    path = cache / f"{source.stem}-{key.hexdigest()[:32]}{suffix}"
    if not path.exists():
        lock = path.with_suffix(".lock")
        with locked(lock):
            if not path.exists():
                with replacing(path, sync=False) as file, tempfile.TemporaryDirectory() as folder:
                    # a compiler replaces its output file, and the new one would not be locked
                    made = Path(folder, path.name)
                    make(source, made, flags)
                    file.write(made.read_bytes())
            lock.unlink(missing_ok=True)
    return path


def _compile_runtime(source: Path, made: Path, flags: Sequence[str]) -> None:
    _run([*compiler()[0], *flags, "-c", str(source), "-o", str(made)])


def _compile_kernels(link: Sequence[str], source: Path, library: Path, flags: Sequence[str]) -> None:
    folders = [f"-I{folder}" for folder in (source.parent, *HEADER_FOLDERS)]
    command = [*compiler()[0], *flags, *folders, "-include", str(_FOLDER / "cuda.h"), "-x", "c++"]
    # the first pass keeps __global__, which the second, of text without macros, replaces by a table of kernels
    text = _run([*command, "-E", "-D__global__=__global__", str(source)])
    entries = "".join(f'emulator::describe<&{name}>("{name}"), ' for name in _KERNEL.findall(text))
    table = f"""
extern "C" {{
__attribute__((visibility("default"))) extern const emulator::Kernel emulator_kernels[];
const emulator::Kernel emulator_kernels[] = {{ {entries}{{nullptr, nullptr, nullptr}} }};
}}
"""
    text = re.sub(r"\b__global__\b", "__attribute__((noinline))", text) + table
    # a file without the sources' path: ccache caches no input from a pipe, and would miss in another checkout
    expanded, kernels = f"{library}.ii", f"{library}.o"
    Path(expanded).write_text(text.replace(f'"{_FOLDER.parents[2]}/', '"'), "utf-8")
    _run([*compiler()[0], *flags, "-c", expanded, "-o", kernels])
    _run([*compiler()[0], *link, kernels, "-o", str(library)])


def _run(command: Sequence[str]) -> str:
    """The output of the compiler."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise UnsupportedError(
            f"the emulator of a device needs a C++ compiler, and {command[0]} does not run ({error}); install g++ or "
            "clang++, or name one in the environment variable CXX"
        ) from error
    if done.returncode != 0:
        raise UnsupportedError(f"the C++ compiler refuses a file of kernels: {shlex.join(command)}\n{done.stderr}")
    return done.stdout


def _flags(sanitize: str) -> tuple[str, ...]:
    checks: tuple[str, ...] = ()
    if sanitize:
        checks = (f"-fsanitize={sanitize}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
    errors = ("-Werror",) if os.environ.get("LLAMAC_WERROR", "0") not in ("", "0") else ()
    return (*_FLAGS, *errors, *checks, *(("-mfma",) if _has_fma() else ()))  # fma inline, not a call: the same bits


@functools.lru_cache
def _has_fma() -> bool:
    try:
        return re.search(r"^flags\s*:.*\bfma\b", Path("/proc/cpuinfo").read_text(), flags=re.MULTILINE) is not None
    except OSError:
        return False


@functools.lru_cache
def compiler() -> tuple[tuple[str, ...], str]:
    """The compiler's command, and its version."""
    command = tuple(shlex.split(os.environ.get("CXX") or "c++"))
    return command, _run([*command, "--version"])
