"""Opens model sources for the tests of the cache, in this process or another one."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import llamac

IDS = [1, 5, 9]


def logits(source: str | Path, **settings: Any) -> bytes:
    """The logits of IDS, by the model of a source."""
    with llamac.load(source, **settings) as model:
        return model.logits(IDS).tobytes()


def phases(source: str | Path, **settings: Any) -> set[str]:
    """The progress phases of opening a source."""
    found = set()
    llamac.load(source, progress=lambda phase, done, total: found.add(phase), **settings).close()
    return found


def models_in(cache_folder: Path) -> list[Path]:
    """The cached models."""
    return sorted((cache_folder / "models").glob("*.bin"))


def flip(path: Path, offset: int) -> None:
    """Flip a bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


OPEN = """
import sys
import llamac
{}
def report(phase, done, total):
    if done == 0:
        print(phase, flush=True)
    {}
with llamac.load(sys.argv[1], progress=report) as model:
    print("logits", model.logits([1, 5, 9]).tobytes().hex(), flush=True)
"""


def start(source: Path, on_progress: str = "pass", prepare: str = "pass") -> subprocess.Popen[str]:
    """Open a source in another process, which runs a statement at each progress report and prints its logits.

    `prepare` is a statement that it runs before.
    """
    code = textwrap.dedent(OPEN.format(prepare, on_progress))
    return subprocess.Popen([sys.executable, "-c", code, str(source)], stdout=subprocess.PIPE, text=True)
