"""The kernels' source files, and the headers that they include: those beside them, and some of the C core.

`core` is a link to csrc/ in a checkout. A package has the headers that kernels include.
"""

from __future__ import annotations

import re
from pathlib import Path

_FOLDER = Path(__file__).parent
HEADER_FOLDERS = (_FOLDER / "kernels", _FOLDER / "core")

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', flags=re.MULTILINE)


def kernel_files() -> list[Path]:
    """The files of kernels, each of which is compiled on its own."""
    return sorted((_FOLDER / "kernels").glob("*.cu"))


def included(path: Path) -> dict[str, str]:
    """The text of each header that a file includes in quotation marks, directly or through another, by its name.

    Raises:
        FileNotFoundError: A header is neither beside the file nor beside the kernels nor in the core.
    """
    found: dict[str, str] = {}

    def follow(text: str) -> None:
        for name in _INCLUDE.findall(text):
            if name not in found:
                found[name] = _header(name, path.parent)
                follow(found[name])

    follow(path.read_text("utf-8"))
    return found


def _header(name: str, beside: Path) -> str:
    for folder in (beside, *HEADER_FOLDERS):
        if (folder / name).is_file():
            return (folder / name).read_text("utf-8")
    raise FileNotFoundError(f"the kernels include {name}, which is missing in {', '.join(map(str, HEADER_FOLDERS))}")
