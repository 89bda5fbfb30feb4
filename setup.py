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
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# Never -ffast-math, -Ofast or -ffp-contract=fast: the same bits everywhere is what this library promises.
FLAGS = json.loads(Path("csrc/flags.json").read_text())
MACHINE = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())


def asked(name: str) -> bool:
    return os.environ.get(f"LLAMAC_{name}", "") not in ("", "0")


class BuildCore(build_ext):
    """Compiles csrc/ file by file, then lets setuptools compile the Cython module and link everything."""

    def build_extension(self, ext: Extension) -> None:
        flags = list(FLAGS["core"])
        link: list[str] = []
        if os.environ.get("LLAMAC_OPENMP") != "0" and self.compiles("-fopenmp"):
            flags.append("-fopenmp")
            link.append("-fopenmp")
        if asked("NATIVE"):
            flags.append("-march=native")
        if asked("LTO"):
            flags.append("-flto")
            link += ["-flto", "-O3"]
        if os.environ.get("LLAMAC_SANITIZE"):
            sanitize = [f"-fsanitize={os.environ['LLAMAC_SANITIZE']}", "-fno-omit-frame-pointer", "-g", "-O1"]
            flags += sanitize
            link += sanitize
        warnings = FLAGS["warnings"] + (["-Werror"] if asked("WERROR") else [])
        sources = sorted(Path("csrc").glob("*.c"))
        headers = [str(path) for path in sorted(Path("csrc").glob("*.h"))]
        for source in sources:
            isa = FLAGS["isa"].get(MACHINE, {}).get(source.name, [])
            ext.extra_objects += self.compiler.compile(
                [str(source)], output_dir=self.build_temp, extra_postargs=flags + warnings + isa, depends=headers
            )
        # Cython's own C is not ours to warn about
        ext.extra_compile_args = ["-O2", "-fvisibility=hidden", "-w"]
        ext.extra_link_args = link
        ext.depends = headers
        super().build_extension(ext)

    def compiles(self, flag: str) -> bool:
        """Whether the compiler and linker take a flag."""
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.c")
            source.write_text("#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }\n")
            try:
                objects = self.compiler.compile([str(source)], output_dir=folder, extra_postargs=[flag])
                self.compiler.link_executable(objects, "probe", output_dir=folder, extra_postargs=[flag])
            except Exception:  # distutils has no common class for "the tool failed"
                return False
            return True


setup(
    packages=["llamac", "llamac.cli", "llamac.export", "llamac.models"],
    package_dir={"llamac": "llamac", "llamac.export": "export", "llamac.models": "models"},
    ext_modules=[Extension("llamac._core", sources=["llamac/_core.pyx"], include_dirs=["csrc"], libraries=["m"])],
    cmdclass={"build_ext": BuildCore},
)
