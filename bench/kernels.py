"""Each kernel by itself, for every instruction set of this machine: error against float64, GB/s, MAC per cycle.

    python -m bench.kernels [--isa avx2] [--kernel gemm] [--milliseconds 2] [--megabytes 256] [--result NAME]

Compiles kernel_speed.c with the core's own flags and runs it. Error: root mean square of the difference to float64 over
that of the truth, the rounding of inputs (to int8 for q4 and q4s, int16 for q8, f16 in the cache) included. GB/s:
weights, cache pages, or what a function reads and writes. Products and attention take their memory from a pool of so
many megabytes, matrices of up to a megabyte stay in the cache. MAC: multiply-adds. Cycles are those of a chain of
dependent additions, timed right after each case. One thread; medians of 9 samples.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.stamp import save

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ("peak", "gemm", "pack", "attend", "norm", "add", "gather", "store", "activate", "rotate")


def build(folder: Path, cc: str) -> Path:
    """The compiled program."""
    program = folder / "kernel_speed"
    source = ROOT / "bench" / "kernel_speed.c"
    command: list[str | Path] = [sys.executable, ROOT / "tests" / "c" / "build.py", "--cc", cc]
    subprocess.run([*command, "--program", source, "--out", program], check=True)
    return program


def parse(line: str) -> dict[str, Any]:
    """A line of the program as figures."""
    kernel, isa, what, *numbers = line.rstrip("\n").split("\t")
    error, seconds, best, count, macs, hertz = map(float, numbers)
    return {
        "kernel": kernel,
        "isa": isa,
        "what": what,
        "error": error,
        "seconds": seconds,
        "seconds_best": best,
        "gb_s": count / seconds / 1e9,
        "mac_per_cycle": macs / seconds / hertz,
        "mac_s": macs / seconds,
        "clock_ghz": hertz / 1e9,
    }


def row(found: dict[str, Any]) -> str:
    """One line of the table."""
    rate = f"{found['gb_s']:8.1f}" if found["gb_s"] else " " * 8
    macs = f"{found['mac_per_cycle']:9.1f}" if found["mac_per_cycle"] else " " * 9
    return (
        f"{found['kernel']:<10} {found['isa']:<10} {found['what']:<38} {found['error']:8.1e} "
        f"{found['seconds'] * 1e6:10.2f} {rate} {macs}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", default="all", help="one kernel set (default: all that this machine runs)")
    parser.add_argument("--kernel", default="all", choices=("all", *KERNELS), help="one kernel (default: all)")
    parser.add_argument("--milliseconds", type=float, default=2, help="length of a sample (default: %(default)s)")
    parser.add_argument("--megabytes", type=int, default=256, help="pool of weights (default: %(default)s)")
    parser.add_argument("--cc", default="cc", help="the compiler (default: %(default)s)")
    parser.add_argument("--result", metavar="NAME", help="write bench/results/DATE-NAME.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [str(build(Path(folder), options.cc)), options.isa, options.kernel]
        command += [str(options.milliseconds), str(options.megabytes)]
        print(f"{'kernel':<10} {'isa':<10} {'':<38} {'error':>8} {'us':>10} {'GB/s':>8} {'MAC/cycle':>9}")
        found = []
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
            assert program.stdout is not None
            for line in program.stdout:
                found.append(parse(line))
                print(row(found[-1]), flush=True)
    if program.returncode:
        raise SystemExit(program.returncode)
    if options.result:
        settings = {"milliseconds": options.milliseconds, "megabytes": options.megabytes, "compiler": options.cc}
        print(save(options.result, {"bench": "kernels", "settings": settings, "results": found}))


if __name__ == "__main__":
    main()
