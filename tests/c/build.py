"""Builds and runs the C tests, with the flags of the shipped build.

python tests/c/build.py                                       compile for this machine and run
python tests/c/build.py --sanitize address,undefined          instrumented
python tests/c/build.py --cc aarch64-linux-gnu-gcc --machine aarch64 --run "qemu-aarch64 -L /usr/aarch64-linux-gnu"
    --run "qemu-aarch64 -L /usr/aarch64-linux-gnu -cpu cortex-a53"      the kernels once more, on another processor
python tests/c/build.py --run "qemu-x86_64 -cpu Nehalem"      the scalar path on an old processor
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ("test_kernels", "test_model")


def build(folder: Path, cc: str, machine: str, sanitize: str | None) -> list[Path]:
    """Compiles core and tests into a folder; returns the test programs."""
    flags = json.loads((ROOT / "csrc" / "flags.json").read_text())
    common = [*flags["core"], *flags["warnings"], "-Werror", "-fopenmp", "-g1", f"-I{ROOT / 'csrc'}", "-D_GNU_SOURCE"]
    if sanitize:
        common += [f"-fsanitize={sanitize}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-O1"]
        if "clang" not in cc:  # checks as calls: inlined into unrolled kernels they take minutes to compile
            common += ["--param", "asan-instrumentation-with-call-threshold=0"]

    def compile_one(source: Path) -> Path:
        out = folder / f"{source.stem}.o"
        isa = flags["isa"].get(machine, {}).get(source.name, [])
        subprocess.run([*shlex.split(cc), *common, *isa, "-c", str(source), "-o", str(out)], check=True)
        return out

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        core = list(pool.map(compile_one, sorted((ROOT / "csrc").glob("*.c"))))
        tests = list(pool.map(compile_one, [ROOT / "tests" / "c" / f"{name}.c" for name in TESTS]))
    for test in tests:
        program = [*shlex.split(cc), *common, str(test), *map(str, core), "-lm", "-o", str(test.with_suffix(""))]
        subprocess.run(program, check=True)
    return [test.with_suffix("") for test in tests]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cc", default="cc", help="the compiler, with options (default: %(default)s)")
    parser.add_argument("--machine", default=platform.machine(), help="what it compiles for (default: %(default)s)")
    parser.add_argument("--sanitize", help="sanitizers, e.g. address,undefined")
    parser.add_argument(
        "--run",
        action="append",
        help="what runs the programs, e.g. an emulator; each further one, another processor, for the kernels only",
    )
    options = parser.parse_args()
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
    with tempfile.TemporaryDirectory() as folder:
        programs = build(Path(folder), options.cc, options.machine, options.sanitize)
        runs = options.run or [""]
        todo = [(runs[0], program) for program in programs] + [(run, programs[0]) for run in runs[1:]]
        for run, program in todo:
            print(f"--- {run} {program.name}", flush=True)
            emulated = ["--emulated"] if run else []
            code = subprocess.run([*shlex.split(run), str(program), *emulated], env=environment).returncode
            if code:
                print(f"{program.name} ended with {code}")
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
