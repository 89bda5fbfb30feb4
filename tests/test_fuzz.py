"""Hostile files of every kind: what fuzzing has found stays mended, and a few hundred mutations of sound files per
reader raise this library's errors and nothing else, in little time and memory. Longer runs: tests/fuzz/README.md."""

from __future__ import annotations

import contextlib
import random
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from fuzz.mutate import Parts, mutated_parts, unpack
from fuzz.targets import TARGETS, Target
from llamac.errors import LlamacError

CORPUS = Path(__file__).parent / "fuzz" / "corpus"
MUTATIONS = 200
MEMORY = 512 << 20  # what reading a small file may take
SECONDS = 20  # a reader that takes so long has got lost
# These samples hold no whole model: reading them must end with an error, but a mutation gets as far.
PARTIAL = {"gguf": 1}


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """A MemoryError for what takes too much memory, a TimeoutError for what does not end."""

    def late(signal_number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"not done after {SECONDS} seconds")

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGALRM, late)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, hard))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def samples(target: Target, folder: Path) -> list[Parts]:
    folder.mkdir(exist_ok=True)
    return list(target.samples(folder))


@pytest.mark.parametrize("name", TARGETS)
def test_samples_are_sound(name: str, tmp_path: Path) -> None:
    target = TARGETS[name]
    found = samples(target, tmp_path / "samples")
    (tmp_path / "files").mkdir()
    for number, parts in enumerate(found):
        if number < PARTIAL.get(name, len(found)):
            target.run(parts, tmp_path / "files")
            target.run(target.finish(parts), tmp_path / "files")


@pytest.mark.parametrize("name", TARGETS)
def test_what_was_found_stays_mended(name: str, tmp_path: Path) -> None:
    target = TARGETS[name]
    found = sorted((CORPUS / name).glob("*"))
    for path in found:
        with bounded(), contextlib.suppress(LlamacError):
            target.run(unpack(path.read_bytes(), len(target.names)), tmp_path)


@pytest.mark.parametrize("name", TARGETS)
def test_mutations_raise_errors_of_this_library_only(name: str, tmp_path: Path) -> None:
    target = TARGETS[name]
    found = samples(target, tmp_path / "samples")
    folder = tmp_path / "files"
    folder.mkdir()
    rng = random.Random(name)
    refused = 0
    for _ in range(MUTATIONS):
        parts = target.finish(mutated_parts(target.names, rng.choice(found), rng))
        with bounded(), contextlib.suppress(LlamacError):
            target.run(parts, folder)
            continue
        refused += 1
    assert refused > MUTATIONS // 20
