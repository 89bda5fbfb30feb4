"""Builds the one extension, llamac._core: the C core with each instruction set's kernels compiled with its own flags.

Environment, for those who build themselves (docs/building.md):
    LLAMAC_WERROR=1    warnings are errors
    LLAMAC_NATIVE=1    compile for this machine's processor; the result may run on no other
    LLAMAC_LTO=1       link-time optimization
    LLAMAC_OPENMP=0    one thread only
    LLAMAC_SANITIZE=address,undefined    instrumented build for tests
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
from multiprocessing.pool import ThreadPool
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# Never -ffast-math, -Ofast or -ffp-contract=fast: the same bits everywhere is what this library promises.
FLAGS = json.loads(Path("csrc/flags.json").read_text())
OPENMP = "#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }\n"
MACHINE = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())


def asked(name: str) -> bool:
    return os.environ.get(f"LLAMAC_{name}", "") not in ("", "0")


class BuildCore(build_ext):
    """Compiles csrc/ file by file, then lets setuptools compile the Cython module and link everything."""

    def build_extension(self, ext: Extension) -> None:
        flags = list(FLAGS["core"])
        link: list[str] = []
        if os.environ.get("LLAMAC_OPENMP") != "0" and self.compiles("-fopenmp", source=OPENMP):
            flags.append("-fopenmp")
            link.append("-fopenmp")
        if asked("NATIVE"):
            flags.append("-march=native")
        if asked("LTO"):
            flags.append("-flto")
            link += ["-flto", "-O3"]
        if os.environ.get("LLAMAC_SANITIZE"):
            sanitize = [f"-fsanitize={os.environ['LLAMAC_SANITIZE']}", *FLAGS["sanitize"]]
            link += sanitize
            # checks as calls: inlined into the unrolled kernels they take minutes and gigabytes to compile
            flags += sanitize + (FLAGS["sanitize_gcc"] if self.compiles(*FLAGS["sanitize_gcc"], "-Werror") else [])
        warnings = FLAGS["warnings"] + (["-Werror"] if asked("WERROR") else [])
        sources = sorted(Path("csrc").glob("*.c"))

        def compile_one(source: Path) -> str:
            own = flags + warnings + FLAGS["isa"].get(MACHINE, {}).get(source.name, [])
            (made,) = self.compiler.compile([str(source)], output_dir=self.build_temp, extra_postargs=own)
            return made

        # the compiler is a process of its own: threads of Python's are enough to run several
        with ThreadPool(os.cpu_count()) as pool:
            ext.extra_objects += pool.map(compile_one, sources, chunksize=1)
        # Cython's own C is not ours to warn about
        ext.extra_compile_args = ["-O2", "-fvisibility=hidden", "-w"]
        ext.extra_link_args = link
        # all that is linked has just been compiled: an extension of an earlier build is never up to date
        ext.depends = ext.extra_objects
        super().build_extension(ext)

    def compiles(self, *flags: str, source: str = "int main(void) { return 0; }\n") -> bool:
        """Whether the compiler and linker take these flags."""
        with tempfile.TemporaryDirectory() as folder:
            probe = Path(folder, "probe.c")
            probe.write_text(source)
            try:
                objects = self.compiler.compile([str(probe)], output_dir=folder, extra_postargs=list(flags))
                self.compiler.link_executable(objects, "probe", output_dir=folder, extra_postargs=list(flags))
            except Exception:  # distutils has no common class for "the tool failed"
                return False
            return True


FORMATS = [f"llamac.export.{folder}" for folder in ("gguf", "hf", "llama2c", "vocabulary")]

setup(
    py_modules=["llamac_command"],
    packages=["llamac", "llamac.cli", "llamac.export", *FORMATS, "llamac.models"],
    package_dir={"llamac": "llamac", "llamac.export": "export", "llamac.models": "models"},
    ext_modules=[Extension("llamac._core", sources=["llamac/_core.pyx"], include_dirs=["csrc"], libraries=["m"])],
    cmdclass={"build_ext": BuildCore},
)
