"""What NVRTC makes of the kernels for each device: PTX, machine code, registers. Writes the table of registers.

python tests/gpu/machine_code.py      writes tests/gpu/registers.txt, with the installed NVRTC
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from llamac.gpu.nvrtc import OPTIONS, create_program
from llamac.gpu.sources import kernel_files

CAPABILITIES = ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
TABLE = Path(__file__).with_name("registers.txt")


class Code(NamedTuple):
    """A file's code for a device. A kernel's registers and the bytes that it spills are of a thread."""

    ptx: str
    registers: dict[str, int]
    spilled: dict[str, int]


def compiled(nvrtc: Any, paths: Iterable[Path], capability: tuple[int, int]) -> list[Code]:
    """The code of each file, which is compiled to machine code as for a device."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda path: _compiled(nvrtc, path, capability), paths))


def _compiled(nvrtc: Any, path: Path, capability: tuple[int, int]) -> Code:
    program = create_program(nvrtc, path)
    try:
        name = f"sm_{capability[0]}{capability[1]}"
        nvrtc.compileProgram(program, (*OPTIONS, f"--gpu-architecture={name}", "--ptxas-options=-v"))
        ptx, log = nvrtc.getPTX(program).decode(), nvrtc.getProgramLog(program)
    finally:
        nvrtc.destroyProgram(program)
    found = re.findall(
        rf"Compiling entry function '(\w+)' for '{name}'\n(?s:.*?) (\d+) bytes spill stores, (\d+) bytes spill loads\n"
        r".*Used (\d+) registers",
        log,
    )
    return Code(
        ptx,
        {kernel: int(registers) for kernel, _, _, registers in found},
        {kernel: int(stored) + int(loaded) for kernel, stored, loaded, _ in found},
    )


def version(nvrtc: Any) -> str:
    return "NVRTC {}.{}".format(*nvrtc.getVersion())


def read_table() -> tuple[str, dict[tuple[int, int], dict[str, tuple[int, int]]]]:
    """The compiler's version, and for each device the registers and the spilled bytes of each kernel."""
    first, _, header, *rows = TABLE.read_text().splitlines()
    table: dict[tuple[int, int], dict[str, tuple[int, int]]] = {capability: {} for capability in CAPABILITIES}
    assert header.split()[1:] == ["sm_{}{}".format(*capability) for capability in CAPABILITIES]
    for row in rows:
        kernel, *cells = row.split()
        for capability, cell in zip(CAPABILITIES, cells, strict=True):
            registers, _, spilled = cell.partition("+")
            table[capability][kernel] = int(registers), int(spilled or 0)
    return first.removeprefix("# "), table


def write_table(nvrtc: Any) -> None:
    columns: list[dict[str, str]] = []
    for capability in CAPABILITIES:
        columns.append({})
        for code in compiled(nvrtc, kernel_files(), capability):
            for kernel, registers in code.registers.items():
                spilled = code.spilled[kernel]
                columns[-1][kernel] = f"{registers}+{spilled}" if spilled else f"{registers}"
    lines = [["kernel", *("sm_{}{}".format(*capability) for capability in CAPABILITIES)]]
    lines += [[kernel, *(column[kernel] for column in columns)] for kernel in sorted(columns[0])]
    width = max(len(line[0]) for line in lines)
    text = [
        f"# {version(nvrtc)}",
        "# registers of a thread, + bytes that it spills (tests/gpu/machine_code.py writes this)",
    ]
    text += ["".join([line[0].ljust(width), *(cell.rjust(8) for cell in line[1:])]) for line in lines]
    TABLE.write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    from cupy.cuda import nvrtc as installed

    write_table(installed)
