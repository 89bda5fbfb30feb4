"""Builds the extension llamac._core from the C core and the Cython wrapper.

Environment variables (docs/building.md):
    LLAMAC_WERROR=1      warnings are errors
    LLAMAC_NATIVE=1      compile for this machine's processor; the result may not run on others
    LLAMAC_LTO=1         link-time optimization
    LLAMAC_OPENMP=0      one thread only
    LLAMAC_SYMBOLS=1     keep symbols and line numbers, for gdb and perf
    LLAMAC_SANITIZE=address,undefined    instrument for tests; keeps symbols
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sysconfig
import tempfile
from multiprocessing.pool import ThreadPool
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

# Never -ffast-math, -Ofast or -ffp-contract=fast: results are bit-identical everywhere.
FLAGS = json.loads(Path("csrc/flags.json").read_text())
OPENMP = "#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }\n"
MACHINE = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())

HOW_TO_INSTALL = """\
Install a C compiler and the headers of Python, then repeat the command:
    Debian, Ubuntu    sudo apt install gcc libc6-dev python3-dev
    Fedora, RHEL      sudo dnf install gcc python3-devel
    Arch              sudo pacman -S gcc
    Alpine            sudo apk add gcc musl-dev linux-headers python3-dev"""


def asked(name: str) -> bool:
    return os.environ.get(f"LLAMAC_{name}", "") not in ("", "0")


def require_tools() -> None:
    """Ends the build with a short message if there is no C compiler or no Python.h."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    headers = sysconfig.get_path("include")

    def accepts(source: str) -> bool:
        command = [*compiler, f"-I{headers}", "-fsyntax-only", "-x", "c", "-"]
        try:
            return subprocess.run(command, input=source.encode(), capture_output=True).returncode == 0
        except OSError:
            return False

    if not accepts("int main(void) { return 0; }\n"):
        problem = f"the C compiler does not work or is missing: {shlex.join(compiler)}"
    elif not accepts("#include <Python.h>\n"):
        problem = f"the C compiler does not find Python.h, which belongs into {headers}"
    else:
        return
    raise SystemExit(f"error: llamac must compile its C core, but {problem}\n{HOW_TO_INSTALL}")


class Build(build):
    """Checks for the tools before setuptools prints every file that it copies."""

    def run(self) -> None:
        require_tools()
        super().run()


class BuildCore(build_ext):
    """Compiles csrc/ file by file, then has setuptools compile the Cython module and link everything."""

    def run(self) -> None:
        require_tools()  # an editable install does not run Build
        super().run()

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
        symbols = asked("SYMBOLS") or bool(os.environ.get("LLAMAC_SANITIZE"))
        debug = [] if symbols else ["-g0"]  # Python's own flags have -g
        link += [] if symbols else ["-s"]
        isa, without = self.kernel_sets()
        flags += without
        warnings = FLAGS["warnings"] + (["-Werror"] if asked("WERROR") else [])
        left_out = {name for names in FLAGS["isa"].values() for name in names} if asked("SCALAR_ONLY") else set()
        sources = sorted(file for file in Path("csrc").glob("*.c") if file.name not in left_out)

        def compile_one(source: Path) -> str:
            own = isa.get(source.name, [])
            (made,) = self.compiler.compile(
                [str(source)], output_dir=self.build_temp, extra_postargs=flags + warnings + own + debug
            )
            return made

        # each compiler is a process, so Python threads run several at once
        with ThreadPool(os.cpu_count()) as pool:
            ext.extra_objects += pool.map(compile_one, sources, chunksize=1)
        # -w: warnings about the C code that Cython generates are not ours to fix
        ext.extra_compile_args = ["-O2", "-fvisibility=hidden", "-w", *debug]
        ext.extra_link_args = link
        # setuptools then sees that an extension from an earlier build is out of date
        ext.depends = ext.extra_objects
        super().build_extension(ext)

    def kernel_sets(self) -> tuple[dict[str, list[str]], list[str]]:
        """The flags of each kernel set's file, and the flags that leave out sets which the compiler does not know."""
        if asked("SCALAR_ONLY"):
            return {}, ["-DLLAMAC_SCALAR_ONLY"]
        isa = dict(FLAGS["isa"].get(MACHINE, {}))
        without = []
        for name, probe in FLAGS["probes"].items():
            if name in isa and not self.compiles(*isa[name], source=probe["program"]):
                print(f"leaving out csrc/{name}: the compiler does not support {' '.join(isa.pop(name))}")
                without.append(probe["without"])
        return isa, without

    def compiles(self, *flags: str, source: str = "int main(void) { return 0; }\n") -> bool:
        """Whether the compiler and linker accept these flags."""
        with tempfile.TemporaryDirectory() as folder:
            probe = Path(folder, "probe.c")
            probe.write_text(source)
            try:
                objects = self.compiler.compile([str(probe)], output_dir=folder, extra_postargs=list(flags))
                self.compiler.link_executable(objects, "probe", output_dir=folder, extra_postargs=list(flags))
            except Exception:  # distutils has no common class for the errors of tools
                return False
            return True


PACKAGES = [
    *("llamac", "llamac.cli", "llamac.format", "llamac.guided", "llamac.integrations"),
    *("llamac.engine", "llamac.engine.batching", "llamac.engine.cache", "llamac.engine.generation"),
    *("llamac.engine.hardware", "llamac.engine.inspection", "llamac.engine.prompts", "llamac.engine.receipts"),
    *("llamac.engine.sampling", "llamac.engine.scoring", "llamac.engine.speculation"),
    *("llamac.gpu", "llamac.gpu.emulator"),
    *("llamac.openai", "llamac.server", "llamac.sources", "llamac.text", "llamac.text.vocabulary", "llamac.tools"),
    "llamac.trace",
    *("llamac.export", "llamac.export.flat", "llamac.export.gguf", "llamac.export.hf", "llamac.export.llama2c"),
    *("llamac.export.lora", "llamac.export.parity", "llamac.export.quality"),
    "llamac.models",
    "llamac.ops",
]
# One folder on sys.path holds all packages: llamac/export and llamac/models are links in a checkout and folders in
# a source archive. setuptools therefore installs an editable package as a .pth file. For a mapping of packages to
# folders it would install an import hook, which Python asks last: beside a checkout called llamac, Python would
# import the checkout as a namespace package.
setup(
    packages=PACKAGES,
    package_dir={"": "."},
    ext_modules=[Extension("llamac._core", sources=["llamac/_core.pyx"], include_dirs=["csrc"], libraries=["m"])],
    cmdclass={"build": Build, "build_ext": BuildCore},
)
