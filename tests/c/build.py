"""Build and run the C tests with the flags of the shipped build.

python tests/c/build.py                                       compile for this machine and run
python tests/c/build.py --sanitize address,undefined          with sanitizers
python tests/c/build.py --sanitize thread --scalar --only test_pool     data races in the thread team
python tests/c/build.py --no-openmp --scalar                  single-threaded, without the vector kernels
python tests/c/build.py --cc aarch64-linux-gnu-gcc --machine aarch64 --run "qemu-aarch64 -L /usr/aarch64-linux-gnu"
    --run "qemu-aarch64 -L /usr/aarch64-linux-gnu -cpu cortex-a53"      then the recorded bits on a second CPU model
python tests/c/build.py --run "qemu-x86_64 -cpu Nehalem" --only test_selftest       the scalar kernels on an old CPU
python tests/c/build.py --program bench/kernel_speed.c --out FILE       build another program against the core
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import resource
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Programs run side by side in this order: the longest first.
NAMES = ("test_model", "test_kernels", "test_format", "test_attention", "test_sequences", "test_drafts", "test_regroup")
NAMES += ("test_sampler", "test_logits", "test_changed_file", "test_session_reads", "test_tiles", "test_shift")
NAMES += ("test_selftest", "test_saving", "test_device", "test_plan", "test_shares", "test_nodes", "test_pool")
NAMES += ("test_states", "test_encoder", "test_pool_portable", "test_bpe", "test_tokens", "test_ops", "test_mtp")
NAMES += ("test_drafter", "test_eagle", "test_cancel")
TESTS = tuple(ROOT / "tests" / "c" / f"{name}.c" for name in NAMES)
# Programs whose subject does not depend on the processor are left out where it is emulated.
PORTABLE = ("test_changed_file", "test_device", "test_format", "test_plan", "test_shares", "test_nodes")
PORTABLE += ("test_pool_portable", "test_bpe", "test_tokens", "test_mtp", "test_drafter", "test_eagle", "test_cancel")
PORTABLE += ("test_drafts", "test_saving", "test_sequences", "test_states", "test_shift", "slow_thread")
# Programs that compare recorded bits with those of a processor's best kernels: they show that older processors compute
# the same bits and have all the instructions. On the first processor, the tests compare all sets of kernels.
RECORDED = ("test_selftest", "test_attention")
# Programs that #include or replace a core file, and the object that must then not be linked.
INCLUDED = {"test_pool_portable": "pool", "test_tiles": "kernels"}
# Programs that run the tables of the tests.
KERNEL_PROGRAMS = ("test_kernels", "test_attention", "test_tiles", "kernel_speed")
# The tables that only they have, by machine: for each file, the core's file that it includes, and its flags. If few
# processors can run the core's file, they take its place in builds with clang.
AVX512VNNI = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mfma", "-mf16c"]
TEST_TABLES = {
    "x86_64": {
        "kernels_avxvnni_evex.c": (
            "kernels_avxvnni.c",
            ["-mavx2", "-mfma", "-mf16c", "-mavx512vnni", "-mavx512vl"],
        ),
        "kernels_amx_emulated.c": ("kernels_amx.c", AVX512VNNI),
        "kernels_avx512vnni_other.c": ("kernels_avx512vnni.c", AVX512VNNI),
    },
}
# Built with the tests and run briefly, to keep them working: their arguments.
BENCHMARKS = {"kernel_speed": ["all", "pack", "0", "1", "all"], "sampling_speed": ["1000", "2"]}
BENCHMARKS |= {"slow_thread": ["-", "2", "0"]}
BENCHMARK_FILES = tuple(ROOT / "bench" / f"{name}.c" for name in BENCHMARKS)

# With these options clang compiles the unrolled kernels in seconds instead of minutes. Builds with gcc check them for
# undefined behavior.
CLANG_SANITIZED_KERNELS = ("-fno-sanitize=undefined", "-mllvm", "-asan-instrumentation-with-call-threshold=0")

# What builds for libFuzzer leave without checks and counters.
UNINSTRUMENTED = "tests/fuzz/uninstrumented.txt"


def compiles(cc: str, flags: list[str], program: str) -> bool:
    """Whether the compiler accepts flags that its older versions do not know."""
    command = [*shlex.split(cc), *flags, "-x", "c", "-c", "-o", os.devnull, "-"]
    return subprocess.run(command, input=program.encode(), capture_output=True).returncode == 0


def build(
    folder: Path,
    cc: str,
    machine: str,
    sanitize: str | None,
    openmp: bool,
    scalar: bool = False,
    sources: tuple[Path, ...] = (*TESTS, *BENCHMARK_FILES),
    kept: Path | None = None,
    uncounted: tuple[str, ...] = (),
) -> list[Path]:
    """Compile the core and single-file programs.

    Args:
        folder: Receives objects and programs.
        cc: Compiler command, with options.
        machine: Target architecture, a key of "isa" in csrc/flags.json.
        sanitize: Comma-separated sanitizers, or None.
        openmp: Whether to compile with OpenMP.
        scalar: Whether to leave out the kernels that need flags, which take most of the time to compile.
        sources: C files with a main function.
        kept: A folder with the objects of the last build, which takes those whose text and flags are the same; None to
            compile everything.
        uncounted: Names of programs whose scalar kernels do not count lines, although the compiler's options have
            --coverage.

    Returns:
        The programs, in the order of `sources`.
    """
    flags = json.loads((ROOT / "csrc" / "flags.json").read_text())
    as_shipped = (cc, machine, sanitize, openmp, scalar) == ("cc", platform.machine(), None, True, False)
    common = [*flags["core"], *flags["warnings"], "-Werror", "-g1", "-D_GNU_SOURCE"]
    common += [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests' / 'c'}"]
    without: list[str] = []
    if openmp:
        common.append("-fopenmp")
    if sanitize:
        common += [f"-fsanitize={sanitize}", *flags["sanitize"]]
        if "clang" not in cc:  # checks as calls: inline checks in unrolled kernels take minutes to compile
            common += flags["sanitize_gcc"]
    if scalar:
        common.append("-DLLAMAC_SCALAR_ONLY")

    isa = {} if scalar else dict(flags["isa"].get(machine, {}))
    for name, probe in flags["probes"].items():
        if name in isa and not compiles(cc, isa[name], probe["program"]):
            print(f"leaving out csrc/{name}: the compiler does not support {' '.join(isa.pop(name))}", flush=True)
            without.append(probe["without"])
    common += without
    vector_kernels = {name for names in flags["isa"].values() for name in names}
    core_files = [
        file for file in sorted((ROOT / "csrc").glob("*.c")) if file.name in isa or file.name not in vector_kernels
    ]
    if any(source.stem in KERNEL_PROGRAMS for source in sources) and (sanitize or "clang" in cc):
        for name, (made_of, own) in TEST_TABLES.get(machine, {}).items():
            if made_of not in isa:
                continue
            if made_of in flags["probes"]:
                core_files.remove(ROOT / "csrc" / made_of)  # few processors run it; compiling takes half a minute
                common.append(flags["probes"][made_of]["without"])
            if not sanitize:
                isa[name] = [*own, "-DLLAMAC_SMALL_KERNELS"]
                core_files.append(ROOT / "tests" / "c" / name)
                common.append("-DTEST_TABLES")

    made: list[tuple[Path, Path | None]] = []
    of_setup = setup_command(flags, without)  # here, because threads can see sysconfig's variables half filled

    def compile_one(source: Path, counted: bool = True) -> Path:
        out = folder / (f"{source.stem}.o" if counted else f"{source.stem}_uncounted.o")
        own = list(isa.get(source.name, ()))
        if sanitize and "clang" in cc and source.stem == "kernels_scalar":
            own += CLANG_SANITIZED_KERNELS
        if sanitize and "fuzzer" in sanitize:
            own += [f"-fsanitize{part}-ignorelist={UNINSTRUMENTED}" for part in ("", "-coverage")]
        command = [*shlex.split(cc), *common, *own]
        if as_shipped and source.parent.name == "csrc":
            command = [*of_setup, *own, "-g0"]
        if not counted:
            command.remove("--coverage")
        before = None if kept is None else kept / f"{source.stem}-{digest(command, source)}.o"
        if before is not None and before.exists():
            shutil.copy(before, out)
        else:
            # relative to the checkout, as for setup.py
            place = source.relative_to(ROOT) if source.is_relative_to(ROOT) else source
            subprocess.run([*command, "-c", str(place), "-o", str(out)], cwd=ROOT, check=True)
        made.append((out, before))
        return out

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        core = list(pool.map(compile_one, core_files))
        programs = list(pool.map(compile_one, sources))
        if uncounted:
            core.append(compile_one(ROOT / "csrc" / "kernels_scalar.c", counted=False))
    if kept is not None:
        keep(kept, {before: out for out, before in made if before is not None})
    for program in programs:
        kernels = "kernels_scalar" if program.stem in uncounted else "kernels_scalar_uncounted"
        left_out = kernels, INCLUDED.get(program.stem)
        objects = [str(file) for file in (program, *core) if file.stem not in left_out]
        link = [*shlex.split(cc), *common, *objects, "-lm", "-o", str(program.with_suffix(""))]
        subprocess.run(link, check=True)
    return [program.with_suffix("") for program in programs]


def setup_command(flags: dict[str, Any], without: list[str]) -> list[str]:
    """setup.py's command for the core where warnings are errors, so that ccache compiles each file once for both.

    A file's own flags and -g0 follow.

    Args:
        flags: csrc/flags.json.
        without: The flags that leave out kernels.
    """
    of_python = [sysconfig.get_config_var(name) or "" for name in ("CC", "CFLAGS", "CCSHARED")]
    compiler = [os.environ.get("CC") or of_python[0], of_python[1], os.environ.get("CFLAGS", ""), of_python[2]]
    given = [word for part in compiler for word in shlex.split(part)]
    return [*given, "-Icsrc", *flags["core"], "-fopenmp", *without, *flags["warnings"], "-Werror"]


def digest(command: list[str], source: Path) -> str:
    """What decides an object: the compiler, its flags, and the source with all that it includes."""
    version = subprocess.run([*command, "--version"], capture_output=True, check=True).stdout
    text = subprocess.run([*command, "-E", str(source)], cwd=ROOT, capture_output=True, check=True).stdout
    return hashlib.sha256(b"\0".join((version, repr(command).encode(), text))).hexdigest()[:32]


def keep(folder: Path, objects: dict[Path, Path]) -> None:
    """Leave exactly these objects in a folder: their paths there, and where they are now."""
    folder.mkdir(parents=True, exist_ok=True)
    for path, made in objects.items():
        if not path.exists():
            temporary = path.with_suffix(f".{os.getpid()}")
            shutil.copy(made, temporary)
            temporary.replace(path)
    for path in set(folder.iterdir()) - objects.keys():
        path.unlink()


def run_program(run: str, program: Path, cases: list[str]) -> str:
    """Run a test or a benchmark, with a command in front, and print its output. Returns its name if it failed.

    Args:
        run: The command, such as an emulator.
        program: The program.
        cases: The arguments that say which cases a test tries.
    """
    arguments = BENCHMARKS.get(program.name, ["--emulated"] if run else cases)
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
    command = [*shlex.split(run), str(program), *arguments]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as running:
        assert running.stdout is not None
        printed = running.stdout.read()
        _, ended, usage = os.wait4(running.pid, 0)
        running.returncode = os.waitstatus_to_exitcode(ended)
    status = f"{program.name} exited with status {running.returncode}\n" if running.returncode else ""
    seconds = usage.ru_utime + usage.ru_stime
    print(f"--- {run} {program.name}, CPU {seconds:.0f} s\n{printed}{status}", end="", flush=True)
    return program.name if running.returncode else ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--cc", default="cc", help="compiler command, with options (default: %(default)s)")
    parser.add_argument("--machine", default=platform.machine(), help="target architecture (default: %(default)s)")
    parser.add_argument("--sanitize", help="sanitizers, e.g. address,undefined")
    parser.add_argument("--no-openmp", action="store_true", help="build without OpenMP: single-threaded")
    parser.add_argument("--scalar", action="store_true", help="build without the kernels for certain processors")
    parser.add_argument(
        "--run",
        action="append",
        help="command that runs the programs, e.g. an emulator; a repeated --run runs only those of RECORDED",
    )
    parser.add_argument("--sparse", action="store_true", help="try fewer cases, as in an emulator")
    parser.add_argument("--only", action="append", choices=NAMES, help="run only this test program; repeatable")
    parser.add_argument("--program", type=Path, metavar="FILE", help="build this C file, instead of running tests")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to put that program")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep objects here, for the next build that needs them"
    )
    options = parser.parse_args()
    if (options.program is None) != (options.out is None):
        parser.error("--program and --out must be given together")
    with tempfile.TemporaryDirectory() as folder:
        setting = (Path(folder), options.cc, options.machine, options.sanitize, not options.no_openmp, options.scalar)
        if options.program:
            shutil.copy(build(*setting, (options.program.resolve(),), options.keep)[0], options.out)
            return 0
        chosen = [test for test in TESTS if test.stem in options.only] if options.only else [*TESTS, *BENCHMARK_FILES]
        programs = build(*setting, tuple(chosen), options.keep)
        spent = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(f"compiled, CPU {spent.ru_utime + spent.ru_stime:.0f} s", flush=True)
        runs = options.run or [""]
        recorded = [program for program in programs if program.name in RECORDED]
        pairs = [(runs[0], program) for program in programs if not (runs[0] and program.name in PORTABLE)]
        pairs += [(run, program) for run in runs[1:] for program in recorded]
        if not pairs:
            parser.error("none of these programs runs where the processor is emulated")
        cases = ["--sparse"] if options.sparse else []
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            failed = [name for name in pool.map(lambda pair: run_program(*pair, cases), pairs) if name]
        if failed:
            print(f"failed: {', '.join(failed)}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
