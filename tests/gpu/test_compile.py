"""The kernels' sources: what they include, and where PTX is. test_machine_code.py has what NVRTC makes of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from gpu.machine_code import CAPABILITIES

from llamac.gpu import sources
from llamac.gpu.nvrtc import C_HEADERS, OPTIONS, compile_file, create_program, kernel_names
from llamac.gpu.sources import HEADER_FOLDERS, included

KERNELS, CORE = HEADER_FOLDERS
FILES = sorted(KERNELS.glob("*.cu*"))
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


@pytest.mark.parametrize("capability", CAPABILITIES, ids="{0[0]}.{0[1]}".format)
def test_what_differs_between_devices_compiles(nvrtc: Any, capability: tuple[int, int]) -> None:
    """All of device.cuh, to machine code."""
    assert "mma" in kernel_names(compile_file(nvrtc, SAMPLES, capability))


def test_kernels_are_found_by_name(nvrtc: Any) -> None:
    code = compile_file(nvrtc, SAMPLES, CAPABILITIES[0])
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
