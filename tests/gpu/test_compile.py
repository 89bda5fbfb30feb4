"""The kernels' sources: what they include, where PTX is, and that NVRTC compiles them for every device."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from llamac.gpu import sources
from llamac.gpu.nvrtc import C_HEADERS, OPTIONS, compile_file, create_program, kernel_names
from llamac.gpu.sources import HEADER_FOLDERS, included, kernel_files

KERNELS, CORE = HEADER_FOLDERS
FILES = sorted(KERNELS.glob("*.cu*"))
CAPABILITIES = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
LATEST = (9, 0)  # of which registers are checked
SPILLED_BYTES = 64  # of a thread, at most: a few addresses, outside of inner loops
SAMPLES = Path(__file__).parent / "samples.cu"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_kernels_need_no_headers_of_cuda(path: Path) -> None:
    """NVRTC alone must compile them: CUDA's headers are another package."""
    assert set(re.findall(r"#\s*include\s*<(.*?)>", path.read_text())) <= set(C_HEADERS)
    included(path)  # every other header is there


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_only_one_file_has_ptx(path: Path) -> None:
    """device.cuh, which says what the emulator does in its place."""
    assert path.name == "device.cuh" or not re.search(r"\basm\b", path.read_text())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_kernels_are_short_and_described(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert re.match(rf"// SPDX-License-Identifier: MIT\n// {re.escape(path.name)} - .", "\n".join(lines))
    assert len(lines) <= 600
    assert max(map(len, lines)) <= 120


def test_a_package_has_the_headers_of_the_core_that_kernels_include() -> None:
    config = Path(sources.__file__).parents[2] / "pyproject.toml"
    if not config.is_file():
        pytest.skip("the sources are not here: this is an installed copy")
    listed = re.findall(r'"core/(\w+\.h)"', config.read_text())
    needed = {name for path in FILES for name in included(path) if not (KERNELS / name).exists()}
    assert set(listed) == needed


def test_a_missing_header_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a.cuh").write_text('#include "b.cuh"\n')
    (tmp_path / "a.cu").write_text('#include "a.cuh"\n')
    with pytest.raises(FileNotFoundError, match=r"the kernels include b\.cuh, which is missing in "):
        included(tmp_path / "a.cu")


# ---- NVRTC


@pytest.fixture(scope="session")
def nvrtc() -> Any:
    """CuPy's module, if NVRTC is installed too."""
    cuda = pytest.importorskip("cupy.cuda", reason="CuPy is not installed (extra: cuda12 or cuda13)")
    try:
        cuda.nvrtc.getVersion()
    except RuntimeError:
        pytest.skip("NVRTC is not installed (extra: cuda12 or cuda13)")
    return cuda.nvrtc


@pytest.mark.parametrize("capability", CAPABILITIES, ids="{0[0]}.{0[1]}".format)
def test_what_differs_between_devices_compiles(nvrtc: Any, capability: tuple[int, int]) -> None:
    """All of device.cuh, to machine code."""
    assert "mma" in kernel_names(compile_file(nvrtc, SAMPLES, capability))


@pytest.mark.parametrize("path", kernel_files(), ids=lambda path: path.name)
def test_every_kernel_compiles_for_the_oldest_device(nvrtc: Any, path: Path) -> None:
    program = create_program(nvrtc, path)
    nvrtc.compileProgram(program, (*OPTIONS, f"--gpu-architecture=compute_{CAPABILITIES[0][0]}{CAPABILITIES[0][1]}"))
    assert b".entry" in nvrtc.getPTX(program)
    nvrtc.destroyProgram(program)


def test_kernels_are_found_by_name(nvrtc: Any) -> None:
    code = compile_file(nvrtc, SAMPLES, LATEST)
    written = re.findall(r'extern "C" __global__ void (?:__launch_bounds__\(\d+\) )?(\w+)', SAMPLES.read_text())
    assert kernel_names(code) == sorted(written)


def test_nothing_is_fused_flushed_or_approximated(nvrtc: Any, tmp_path: Path) -> None:
    path = tmp_path / "round.cu"
    path.write_text(
        'extern "C" __global__ void f(float *x) { x[0] = x[1] * x[2] + x[3]; x[4] = x[5] / x[6]; x[7] = sqrtf(x[8]); }'
    )
    program = create_program(nvrtc, path)
    nvrtc.compileProgram(program, (*OPTIONS, "--gpu-architecture=compute_90"))
    text = nvrtc.getPTX(program).decode()
    nvrtc.destroyProgram(program)
    found = re.findall(r"\b(?:mul|add|fma|div|sqrt)\.\S*f32", text)
    assert found == ["mul.rn.f32", "add.rn.f32", "div.rn.f32", "sqrt.rn.f32"]


@pytest.mark.parametrize("path", kernel_files(), ids=lambda path: path.name)
def test_every_kernel_compiles_and_keeps_its_variables_in_registers(nvrtc: Any, path: Path) -> None:
    program = create_program(nvrtc, path)
    nvrtc.compileProgram(program, (*OPTIONS, f"--gpu-architecture=sm_{LATEST[0]}{LATEST[1]}", "--ptxas-options=-v"))
    log = nvrtc.getProgramLog(program)
    nvrtc.destroyProgram(program)
    spills = dict(re.findall(r"Function properties for (\w+)\n.* (\d+) bytes spill stores", log))
    assert spills
    assert {name: int(spilled) for name, spilled in spills.items() if int(spilled) > SPILLED_BYTES} == {}
