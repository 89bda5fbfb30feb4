"""Builds and runs the C tests, with the flags of the shipped build.

python tests/c/build.py                                       compile for this machine and run
python tests/c/build.py --sanitize address,undefined          instrumented
python tests/c/build.py --no-openmp                           one thread only
python tests/c/build.py --cc aarch64-linux-gnu-gcc --machine aarch64 --run "qemu-aarch64 -L /usr/aarch64-linux-gnu"
    --run "qemu-aarch64 -L /usr/aarch64-linux-gnu -cpu cortex-a53"      the kernels once more, on another processor
python tests/c/build.py --run "qemu-x86_64 -cpu Nehalem"      the scalar path on an old processor
python tests/c/build.py --program bench/kernel_speed.c --out FILE  another program with the core in it, not run
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("test_kernels", "test_format", "test_model", "test_sampler", "test_pool", "test_pool_portable")
TESTS = tuple(ROOT / "tests" / "c" / f"{name}.c" for name in NAMES)
INCLUDED = {"test_pool_portable": "pool"}  # programs with a file of the core in them, compiled in another way
BENCHMARK = ROOT / "bench" / "kernel_speed.c"  # built with the tests and run on a few kernels, so that it keeps working

# clang takes seconds with these for the unrolled kernels, minutes without; gcc checks them for undefined behaviour
FUZZED_KERNELS = ("-fno-sanitize=undefined", "-mllvm", "-asan-instrumentation-with-call-threshold=0")


def build(
    folder: Path,
    cc: str,
    machine: str,
    sanitize: str | None,
    openmp: bool,
    sources: tuple[Path, ...] = (*TESTS, BENCHMARK),
    instrument_all: bool = True,
) -> list[Path]:
    """Compiles the core and programs of one file each into a folder; returns the programs.

    instrument_all: False leaves the kernels that need flags of their own without sanitizers: clang takes many minutes
    for them, and a fuzzer runs the scalar ones.
    """
    flags = json.loads((ROOT / "csrc" / "flags.json").read_text())
    common = [*flags["core"], *flags["warnings"], "-Werror", "-g1", "-D_GNU_SOURCE"]
    common += [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests' / 'c'}"]
    if openmp:
        common.append("-fopenmp")
    plain = list(common)
    if sanitize:
        common += [f"-fsanitize={sanitize}", *flags["sanitize"]]
        if "clang" not in cc:  # checks as calls: inlined into unrolled kernels they take minutes to compile
            common += flags["sanitize_gcc"]

    def compile_one(source: Path) -> Path:
        out = folder / f"{source.stem}.o"
        isa = flags["isa"].get(machine, {}).get(source.name, [])
        chosen = common if instrument_all or not isa else [*plain, "-O1"]
        if not instrument_all and source.stem == "kernels_scalar":
            chosen = [*common, *FUZZED_KERNELS]
        subprocess.run([*shlex.split(cc), *chosen, *isa, "-c", str(source), "-o", str(out)], check=True)
        return out

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        core = list(pool.map(compile_one, sorted((ROOT / "csrc").glob("*.c"))))
        programs = list(pool.map(compile_one, sources))
    for program in programs:
        objects = [str(file) for file in (program, *core) if file.stem != INCLUDED.get(program.stem)]
        link = [*shlex.split(cc), *common, *objects, "-lm", "-o", str(program.with_suffix(""))]
        subprocess.run(link, check=True)
    return [program.with_suffix("") for program in programs]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cc", default="cc", help="the compiler, with options (default: %(default)s)")
    parser.add_argument("--machine", default=platform.machine(), help="what it compiles for (default: %(default)s)")
    parser.add_argument("--sanitize", help="sanitizers, e.g. address,undefined")
    parser.add_argument("--no-openmp", action="store_true", help="one thread only")
    parser.add_argument(
        "--run",
        action="append",
        help="what runs the programs, e.g. an emulator; each further one runs the kernels' tests only",
    )
    parser.add_argument("--program", type=Path, metavar="FILE", help="a C file to build instead of the tests")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the program goes")
    options = parser.parse_args()
    if (options.program is None) != (options.out is None):
        parser.error("--program and --out belong together")
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
    with tempfile.TemporaryDirectory() as folder:
        setting = (Path(folder), options.cc, options.machine, options.sanitize, not options.no_openmp)
        if options.program:
            fuzzer = "fuzzer" in (options.sanitize or "")
            shutil.copy(build(*setting, (options.program.resolve(),), not fuzzer)[0], options.out)
            return 0
        programs = build(*setting)
        runs = options.run or [""]
        todo = [(runs[0], program) for program in programs] + [(run, programs[0]) for run in runs[1:]]
        for run, program in todo:
            print(f"--- {run} {program.name}", flush=True)
            arguments = ["--emulated"] if run else []
            if program.name == BENCHMARK.stem:
                arguments = ["all", "pack", "0", "1", "all"]
            code = subprocess.run([*shlex.split(run), str(program), *arguments], env=environment).returncode
            if code:
                print(f"{program.name} ended with {code}")
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
