"""What a fuzzing target is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from fuzz.mutate import Parts, unpack


@dataclass(frozen=True)
class Target:
    """A reader of files.

    Attributes:
        names: The names of the files, in one folder.
        samples: Returns valid contents.
        use: Reads the folder and uses the result.
        finish: Makes mutated contents pass the checks that would reject them before any other check.
        stable: Whether the outcome depends on this project alone, not on the versions of libraries.
        mutations: The number of mutations that the test suite tries.
    """

    names: tuple[str, ...]
    samples: Callable[[Path], Iterable[Parts]]
    use: Callable[[Path], None]
    finish: Callable[[Parts], Parts] = lambda parts: parts
    stable: bool = True
    mutations: int = 120

    def stored(self, path: Path) -> Parts:
        """The files of an input of the corpus."""
        return unpack(path.read_bytes(), len(self.names))

    def run(self, parts: Parts, folder: Path) -> None:
        """Write the files to the folder and use them."""
        for name, part in zip(self.names, parts, strict=True):
            (folder / name).write_bytes(part)
        self.use(folder)
