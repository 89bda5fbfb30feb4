"""What NVRTC makes of the kernels for each device: PTX, machine code, registers. Keeps the table of registers.

python tests/gpu/machine_code.py          compiles the files that have changed, and writes tests/gpu/registers.txt
python tests/gpu/machine_code.py --all    compiles all files, as after a change of NVRTC's version
"""

from __future__ import annotations

import argparse
import hashlib
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from llamac.gpu.nvrtc import OPTIONS, create_program
from llamac.gpu.sources import included, kernel_files

CAPABILITIES = ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
LATEST = (9, 0)  # whose operations are checked
TABLE = Path(__file__).with_name("registers.txt")

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


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


class Table(NamedTuple):
    """The registers and spilled bytes of each kernel, by file and device.

    A compiler makes the same code of the same text, so a file whose digest is here need not be compiled again.
    """

    version: str
    digests: dict[str, str]
    needs: dict[str, dict[str, dict[tuple[int, int], tuple[int, int]]]]


def digest(path: Path) -> str:
    """The digest of what determines a file's code: its text and its headers, without comments, and the options."""
    texts = [path.read_text("utf-8"), *(text for _, text in sorted(included(path).items()))]
    decides = repr(([_COMMENT.sub(" ", text).split() for text in texts], OPTIONS))
    return hashlib.sha256(decides.encode()).hexdigest()[:16]


def chosen(capability: tuple[int, int]) -> Path:
    """The file to compile for a device other than the latest: another one whenever files change."""
    every = repr((capability, [digest(path) for path in kernel_files()]))
    return kernel_files()[int(hashlib.sha256(every.encode()).hexdigest(), 16) % len(kernel_files())]


def read_table() -> Table:
    first, _, header, *rows = TABLE.read_text().splitlines()
    assert header.split()[1:] == ["sm_{}{}".format(*capability) for capability in CAPABILITIES]
    table = Table(first.removeprefix("# "), {}, {})
    for row in rows:
        name, *cells = row.split()
        if name.endswith(".cu"):
            file = name
            table.digests[file], table.needs[file] = cells[0], {}
        else:
            pairs = (cell.partition("+") for cell in cells)
            numbers = [(int(registers), int(spilled or 0)) for registers, _, spilled in pairs]
            table.needs[file][name] = dict(zip(CAPABILITIES, numbers, strict=True))
    return table


def updated(nvrtc: Any, table: Table) -> Table:
    """The table of the current kernels. Compiles the files that have changed; with another version of NVRTC, all."""
    digests = {path.name: digest(path) for path in kernel_files()}
    stand = table.version == version(nvrtc)
    changed = [path for path in kernel_files() if not stand or table.digests.get(path.name) != digests[path.name]]
    needs = {path.name: table.needs.get(path.name, {}) for path in kernel_files()}
    needs |= {path.name: {} for path in changed}
    for capability in CAPABILITIES:
        for path, code in zip(changed, compiled(nvrtc, changed, capability), strict=True):
            for kernel, registers in code.registers.items():
                needs[path.name].setdefault(kernel, {})[capability] = registers, code.spilled[kernel]
    return Table(version(nvrtc), digests, needs)


def write_table(table: Table) -> None:
    width = max(len(kernel) for kernels in table.needs.values() for kernel in kernels)
    text = [
        f"# {table.version}",
        "# registers of a thread, + bytes that it spills; and digests of files (tests/gpu/machine_code.py writes this)",
        "kernel".ljust(width) + "".join("sm_{}{}".format(*each).rjust(8) for each in CAPABILITIES),
    ]
    for file, kernels in table.needs.items():
        text.append(f"{file} {table.digests[file]}")
        for kernel, needs in sorted(kernels.items()):
            cells = [f"{registers}+{spilled}" if spilled else f"{registers}" for registers, spilled in needs.values()]
            text.append(kernel.ljust(width) + "".join(cell.rjust(8) for cell in cells))
    TABLE.write_text("\n".join(text) + "\n")


def main() -> None:
    from cupy.cuda import nvrtc

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--all", action="store_true", help="compile everything, whatever the table has")
    everything = parser.parse_args().all
    write_table(updated(nvrtc, Table("", {}, {}) if everything else read_table()))


if __name__ == "__main__":
    main()
