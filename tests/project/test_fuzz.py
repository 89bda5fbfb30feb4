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

from fuzz.formats import mutated_parts
from fuzz.mutate import Parts
from fuzz.targets import CORPUS, TARGETS, Target
from llamac.errors import LlamacError

MEMORY = 512 << 20  # what reading a small file may take
SECONDS = 20  # a reader that takes so long has got lost
# These samples hold no whole model: reading them must end with an error, but a mutation gets as far.
PARTIAL = {"gguf": 1, "cache": 1}


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


def test_the_corpus_is_there_and_small() -> None:
    folders = {path.name: sorted(path.iterdir()) for path in CORPUS.iterdir()}
    assert folders.keys() == TARGETS.keys()
    for name, paths in folders.items():
        kinds = {path.name.partition("-")[0] for path in paths}
        assert kinds
        assert kinds <= {"taken", "refused", "found"}, name
    assert sum(path.stat().st_size for paths in folders.values() for path in paths) < 700_000


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus_gives_what_it_gave(name: str, tmp_path: Path) -> None:
    """Inputs that together reach all that fuzzing has reached are taken or refused as their names say; what failed once
    (found-...) is refused."""
    target = TARGETS[name]
    for path in sorted((CORPUS / name).iterdir()):
        outcome = "taken"
        with bounded():
            try:
                target.run(target.stored(path), tmp_path)
            except LlamacError as error:
                outcome = "refused" if str(error).strip() else "refused without a word"
        assert outcome in ("taken", "refused"), path
        if target.stable and not path.name.startswith("found-"):
            assert path.name.startswith(f"{outcome}-"), path


@pytest.mark.parametrize("name", TARGETS)
def test_mutations_raise_errors_of_this_library_only(name: str, tmp_path: Path) -> None:
    target = TARGETS[name]
    found = samples(target, tmp_path / "samples")
    found += [target.stored(path) for path in sorted((CORPUS / name).iterdir())]
    folder = tmp_path / "files"
    folder.mkdir()
    rng = random.Random(name)
    refused = 0
    for _ in range(target.mutations):
        parts = target.finish(mutated_parts(target.names, rng.choice(found), rng))
        with bounded(), contextlib.suppress(LlamacError):
            target.run(parts, folder)
            continue
        refused += 1
    assert refused > target.mutations // 20
