"""Nanoseconds per weight and thread of the quantizer, on every instruction set of this machine.

    python -m bench.quantizer [--isa avx2] [--columns 2048] [--rounds 5] [--result NAME]

Quantizes rows of normal numbers, as many as two tasks of an export have. "importance" weights the errors of columns;
"feedback" also compensates them (GPTQ), as a calibrated export does. Instruction sets alternate; the best round counts.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from bench.stamp import save
from llamac import _core
from llamac.export.dtypes import DTYPES, FEW_BITS
from llamac.export.quantize import TASK_STRIPS
from llamac.format.strips import QUANTIZED, STRIP_ROWS

MODES = ("plain", "importance", "feedback")


def measure(isa: str, dtype: str, mode: str, columns: int) -> float:
    """Nanoseconds per weight of one call."""
    random = np.random.default_rng(0)
    rows = random.standard_normal((2 * TASK_STRIPS * STRIP_ROWS, columns), np.float32)
    importance = np.ones(columns, np.float32).data if mode != "plain" else None
    feedback = None
    if mode == "feedback":
        feedback = np.triu(random.standard_normal((columns, columns), np.float32) / np.float32(128), 1).data
    out = np.empty(_core.matrix_bytes(DTYPES[dtype], *rows.shape), np.uint8)
    start = time.perf_counter()
    _core.quantize(DTYPES[dtype], rows.data, out.data, importance, feedback, isa=isa)
    return (time.perf_counter() - start) * 1e9 / rows.size


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", action="append")
    parser.add_argument("--columns", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--result", metavar="NAME")
    args = parser.parse_args()
    isas = args.isa or [name for name, supported in _core.isas() if supported]
    rows: list[dict[str, Any]] = []
    print(f"{'':16}" + "".join(f"{isa:>12}" for isa in isas) + "   ns per weight")
    for dtype in QUANTIZED:
        for mode in MODES if dtype in FEW_BITS else MODES[:2]:
            best = dict.fromkeys(isas, float("inf"))
            for _ in range(args.rounds):
                for isa in isas:
                    best[isa] = min(best[isa], measure(isa, dtype, mode, args.columns))
            rows += [{"dtype": dtype, "mode": mode, "isa": isa, "ns_per_weight": best[isa]} for isa in isas]
            print(f"{dtype + ' ' + mode:16}" + "".join(f"{best[isa]:12.1f}" for isa in isas), flush=True)
    if args.result:
        save(args.result, {"rows": rows})


if __name__ == "__main__":
    main()
