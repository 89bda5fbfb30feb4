"""Microbenchmarks of every kernel on every instruction set of this machine: error, GB/s, MAC per cycle.

    python -m bench.kernels [--isa avx2] [--kernel gemm] [--case "q4 2048"] [--result NAME]

Compiles kernel_speed.c with the core's flags and runs it on one thread. Results are medians of 9 samples.

error      root mean square of the difference from float64, relative to the expected values. It includes the rounding of
           inputs: to int8 for q4 and q4s, to int16 for q8, to f16 in the KV cache.
GB/s       of weights, of cache pages, or of the data that a function reads and writes. Products and attention rotate
           through a pool of --megabytes; matrices of up to 1 MB stay in the CPU cache.
MAC/cycle  multiply-adds per clock cycle. The clock is measured after each case with a chain of dependent additions.
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
KERNELS = ("peak", "read", "gemm", "pack", "attend", "norm", "add", "gather", "store", "activate", "rotate")


def build(folder: Path, cc: str) -> Path:
    """Compile kernel_speed.c; return the program."""
    program = folder / "kernel_speed"
    source = ROOT / "bench" / "kernel_speed.c"
    command: list[str | Path] = [sys.executable, ROOT / "tests" / "c" / "build.py", "--cc", cc]
    subprocess.run([*command, "--program", source, "--out", program], check=True)
    return program


def parse(line: str) -> dict[str, Any]:
    """Parse one line of the program's output."""
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
        "mac_per_cycle_best": macs / best / hertz,
        "mac_s": macs / seconds,
        "clock_ghz": hertz / 1e9,
    }


def row(found: dict[str, Any]) -> str:
    """Format one line of the table."""
    rate = f"{found['gb_s']:8.1f}" if found["gb_s"] else " " * 8
    macs = f"{found['mac_per_cycle']:9.1f}" if found["mac_per_cycle"] else " " * 9
    return (
        f"{found['kernel']:<10} {found['isa']:<10} {found['what']:<38} {found['error']:8.1e} "
        f"{found['seconds'] * 1e6:10.2f} {rate} {macs}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--isa", default="all", help="instruction set (default: all that this machine supports)")
    parser.add_argument("--kernel", default="all", choices=("all", *KERNELS), help="kernel (default: all)")
    parser.add_argument("--case", default="all", help="only cases that contain this, such as 'q4 2048' (default: all)")
    parser.add_argument("--milliseconds", type=float, default=2, help="length of a sample (default: %(default)s)")
    parser.add_argument("--megabytes", type=int, default=256, help="size of the weight pool (default: %(default)s)")
    parser.add_argument("--cc", default="cc", help="compiler (default: %(default)s)")
    parser.add_argument("--result", metavar="NAME", help="write bench/results/DATE-NAME.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [str(build(Path(folder), options.cc)), options.isa, options.kernel]
        command += [str(options.milliseconds), str(options.megabytes), options.case]
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
