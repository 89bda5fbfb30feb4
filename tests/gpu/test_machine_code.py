"""NVRTC compiles every kernel for every device; neither it nor ptxas fuses, flushes or approximates anything.

registers.txt lists the registers of each kernel: another number fails, and so does a kernel without a row. If the table
is of this NVRTC and of these sources, the tests compile all files for the device whose machine code they check, and one
file for each other device, which changes with the sources. `--every-capability` compiles all.
"""

from __future__ import annotations

import re
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from gpu.machine_code import CAPABILITIES, LATEST, Code, chosen, compiled, digest, read_table, version

from bench import gpu_budgets
from llamac.gpu.early_launch import EARLY
from llamac.gpu.nvrtc import OPTIONS, create_program
from llamac.gpu.sources import kernel_files

SPILLED_BYTES = 2 * 64  # stored and loaded, of a thread, at most there: a few addresses, outside of inner loops
# Operations on floats in PTX: each rounds as C's does, or is exact.
ALLOWED = {f"{name}.rn" for name in ("fma", "mul", "add", "sub", "div", "sqrt")} | {"neg", "abs", "min", "max"}
# In machine code. MUFU.RCP begins the division of integers; HFMA2 is also how a constant is written to a register.
INEXACT = re.compile(r"[FD]FMA|HFMA2|MUFU\.(?!RCP )|(FADD|FMUL|FSETP|F2F)\b\S*\.FTZ")
CONSTANT = re.compile(r"HFMA2\S* \w+, -RZ, RZ, ")

_codes: dict[tuple[Path, tuple[int, int]], Code] = {}


def codes(nvrtc: Any, capability: tuple[int, int], paths: list[Path] | None = None) -> list[Code]:
    """The code of files, by default of all, which tests share."""
    paths = kernel_files() if paths is None else paths
    missing = [path for path in paths if (path, capability) not in _codes]
    for path, code in zip(missing, compiled(nvrtc, missing, capability), strict=True):
        _codes[path, capability] = code
    return [_codes[path, capability] for path in paths]


def test_the_table_of_registers_is_of_these_kernels() -> None:
    """If not: `python tests/gpu/machine_code.py`, with CuPy and NVRTC (extra cuda12). Check what a new number costs."""
    assert read_table().digests == {path.name: digest(path) for path in kernel_files()}


def test_the_budgets_are_those_of_the_table() -> None:
    """If not: `python -m bench.gpu_budgets`."""
    assert gpu_budgets.DOCUMENT.read_text("utf-8") == gpu_budgets.document()


@pytest.mark.parametrize("capability", CAPABILITIES, ids="{0[0]}.{0[1]}".format)
def test_every_kernel_compiles_and_needs_the_registers_that_the_table_says(
    nvrtc: Any, capability: tuple[int, int], request: pytest.FixtureRequest
) -> None:
    table = read_table()
    stands = table.version == version(nvrtc) and not request.config.getoption("--every-capability")
    paths = [chosen(capability)] if stands and capability != LATEST else kernel_files()
    found = {
        kernel: (registers, code.spilled[kernel])
        for code in codes(nvrtc, capability, paths)
        for kernel, registers in code.registers.items()
    }
    if capability == LATEST:
        assert {kernel: spilled for kernel, (_, spilled) in found.items() if spilled > SPILLED_BYTES} == {}
    recorded = {kernel: needs[capability] for path in paths for kernel, needs in table.needs[path.name].items()}
    assert found.keys() == recorded.keys()
    if table.version != version(nvrtc):
        pytest.skip(f"all kernels compile; tests/gpu/registers.txt is for {table.version}, this is {version(nvrtc)}")
    assert found == recorded


def test_ptx_rounds_every_operation(nvrtc: Any) -> None:
    for code in codes(nvrtc, LATEST):
        operations = set(
            re.findall(r"^\s*(?:@\S+ )?([a-z0-9]+[.\w]*)\.(?:f16|bf16|f32|f64)\w*\s", code.ptx, re.MULTILINE)
        )
        moves = re.compile(r"(mov|ld|st|cvt|setp|selp|slct|testp|set)\b")
        assert {name for name in operations if not moves.match(name)} <= ALLOWED
        assert not re.search(r"\.(ftz|approx|sat)\b|\b(ex2|lg2|sin|cos|tanh|rcp|rsqrt|mad)\.\S*f(16|32|64)", code.ptx)


def test_the_kernels_that_may_start_early_wait(nvrtc: Any) -> None:
    """Products of floats wait for nothing and are launched like all others."""
    waiting = {
        name
        for code in codes(nvrtc, LATEST)
        for name, body in re.findall(r"\.entry (\w+)\((.*?)(?=\.entry|\Z)", code.ptx, re.DOTALL)
        if "griddepcontrol.wait" in body
    }
    assert waiting == {name for code in codes(nvrtc, LATEST) for name in code.registers if EARLY.fullmatch(name)}
    assert {"norm_rows", "product_q4_one", "product_q8_few_fast", "heads_q8"} < waiting


def test_only_what_the_source_writes_is_fused(nvrtc: Any, tmp_path: Path) -> None:
    """With the source's own fused operations replaced by a function that is elsewhere, none is left."""
    elsewhere = tmp_path / "elsewhere.h"
    elsewhere.write_text(
        'extern "C" __device__ float written(float, float, float);\n'
        "#define __fmaf_rn written\n#define __builtin_fmaf written\n"
    )
    added = (f"--pre-include={elsewhere}", "--relocatable-device-code=true", "--gpu-architecture=compute_90")

    def ptx_of(path: Path) -> str:
        program = create_program(nvrtc, path)
        nvrtc.compileProgram(program, (*OPTIONS, *added))
        ptx: str = nvrtc.getPTX(program).decode()
        nvrtc.destroyProgram(program)
        return ptx

    with ThreadPoolExecutor() as pool:
        texts = list(pool.map(ptx_of, kernel_files()))
    assert [name for text in texts for name in re.findall(r"\bfma\.\S*", text)] == []
    assert sum(len(re.findall(r"^\s*written,\s*$", text, re.MULTILINE)) for text in texts) > 1000


# ---- machine code


def tool(name: str) -> str:
    """The path of one of CUDA's programs, each of which has its own wheel."""
    packages = Path(sysconfig.get_path("purelib")) / "nvidia"
    found = sorted(packages.glob(f"*/bin/{name}"))
    if not found:
        wheels = {"ptxas": "nvidia-cuda-nvcc-cu12", "nvdisasm": "nvidia-cuda-nvdisasm"}
        pytest.skip(f"{name} is not installed (pip install {wheels[name]})")
    return str(found[-1])


def without_fused(ptx: str) -> str:
    """PTX with products and sums in place of what becomes fused operations: fma, division and square root."""
    for kind in "f32", "f64":
        both = rf"{{ .reg .{kind} product; mul.rn.{kind} product, \2, \3; add.rn.{kind} \1, product, \4; }}"
        ptx = re.sub(rf"fma\.rn\.{kind}\s+(\S+), (\S+), (\S+), (\S+);", both, ptx)
        ptx = re.sub(rf"div\.rn\.{kind}(\s)", rf"mul.rn.{kind}\1", ptx)
        ptx = re.sub(rf"sqrt\.rn\.{kind}(\s+\S+, )(\S+);", rf"mul.rn.{kind}\1\2, \2;", ptx)
    return ptx


def inexact(ptx: str, folder: Path) -> dict[str, set[str]]:
    """What ptxas makes of PTX that fuses, flushes or approximates, for each kernel that has such operations."""
    ptxas, nvdisasm = tool("ptxas"), tool("nvdisasm")
    source, code = folder / "kernels.ptx", folder / "kernels.cubin"
    source.write_text(ptx.rstrip("\0"))
    subprocess.run([ptxas, "-arch=sm_{}{}".format(*LATEST), str(source), "-o", str(code)], check=True)
    text = subprocess.run([nvdisasm, "-c", str(code)], check=True, capture_output=True, text=True).stdout
    found: dict[str, set[str]] = {}
    kernel = ""
    for line in text.splitlines():
        if named := re.match(r"\.text\.(\w+):", line):
            kernel = named[1]
        operation = re.match(r"\s+/\*\w+\*/\s+(?:@\S+ )?(([A-Z]\S*) .*)", line)
        if operation and INEXACT.match(operation[1]) and not CONSTANT.match(operation[1]):
            found.setdefault(kernel, set()).add(operation[2])
    assert kernel, text[:500]
    return found


@pytest.mark.parametrize("index", range(len(kernel_files())), ids=[path.stem for path in kernel_files()])
def test_machine_code_fuses_flushes_and_approximates_nothing(nvrtc: Any, index: int, tmp_path: Path) -> None:
    """Of the products and sums that PTX without fused operations has, ptxas makes no fused operation."""
    tool("ptxas")  # before the kernels are compiled
    assert inexact(without_fused(codes(nvrtc, LATEST)[index].ptx), tmp_path) == {}


def test_what_ptxas_fuses_is_found(nvrtc: Any, tmp_path: Path) -> None:
    source = tmp_path / "product.cu"
    source.write_text('extern "C" __global__ void f(float *x) { x[0] = x[1] * x[2] + x[3]; }')
    ptx = compiled(nvrtc, [source], LATEST)[0].ptx
    assert inexact(ptx, tmp_path) == {}
    may_fuse = ptx.replace("mul.rn.f32", "mul.f32").replace("add.rn.f32", "add.f32")
    assert inexact(may_fuse, tmp_path) == {"f": {"FFMA"}}
