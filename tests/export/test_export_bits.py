"""Exports have the same bytes on every machine, as docs/determinism.md promises."""

from __future__ import annotations

import os
import subprocess
import sys
from decimal import Decimal, localcontext
from pathlib import Path

import numpy as np
import pytest

from llamac.export import rope

THETAS = (10_000, 25_000, 50_000, 100_000, 130_000, 160_000, 500_000, 1_000_000, 5_000_000, 1_000_000_000)
HEAD_DIMS = (16, 32, 36, 40, 48, 64, 72, 80, 88, 96, 100, 112, 120, 128, 160, 192, 256)

# Other summation orders and C library functions change the bits of the probes' float64 logits.
OTHERS = [
    {"OPENBLAS_CORETYPE": "Prescott", "OPENBLAS_NUM_THREADS": "1"},
    {"GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA"},
    {"LLAMAC_ISA": "scalar"},
]


def test_common_rope_frequencies_do_not_depend_on_the_c_library() -> None:
    """Powers are rounded from float64 to float32; none is so close to a tie that the float64's last bit matters."""
    nearest = Decimal("Infinity")
    with localcontext() as context:
        context.prec = 50
        for theta in THETAS:
            logarithm = Decimal(theta).ln()
            for dim in HEAD_DIMS:
                exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
                exact = [(logarithm * Decimal(float(exponent))).exp() for exponent in exponents]
                found = rope._powers(theta, dim)
                assert [float(power) for power in found] == [float(np.float32(float(power))) for power in exact]
                for power, number in zip(exact[1:], found[1:], strict=True):
                    for side in (np.float32(0), np.float32(np.inf)):
                        middle = (Decimal(float(number)) + Decimal(float(np.nextafter(number, side)))) / 2
                        nearest = min(nearest, abs(power - middle) / Decimal(float(np.spacing(np.float64(number)))))
    assert nearest > 100_000


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_gpt2"])
def test_exports_do_not_depend_on_blas_libm_and_kernels(
    family: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    program = "import sys; from llamac.export.convert import export; export(sys.argv[1], sys.argv[2], overwrite=True)"
    source: Path = request.getfixturevalue(family)
    files = set()
    for environment in ({}, *OTHERS):
        command = [sys.executable, "-c", program, str(source), str(tmp_path / "out.bin")]
        subprocess.run(command, env={**os.environ, **environment}, check=True)
        files.add((tmp_path / "out.bin").read_bytes())
    assert len(files) == 1
