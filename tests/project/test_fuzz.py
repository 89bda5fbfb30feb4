"""Hostile files of every kind: faults found by fuzzing stay fixed, and mutated files raise only llamac's errors.

A few hundred mutations of valid files per reader must end in little time and memory. tests/fuzz/README.md describes
longer runs.
"""

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
from fuzz.target import Target
from fuzz.targets import CORPUS, TARGETS
from llamac.errors import LlamacError

MEMORY = 512 << 20  # for reading a small file
SECONDS = 20  # far more than any reader needs
# The number of whole models among the samples of these targets. The other samples are rejected, but their mutations
# reach as much code.
PARTIAL = {"gguf": 1, "cache": 1}


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Turn excessive memory use into a MemoryError and excessive time into a TimeoutError."""

    def expire(signal_number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"not done after {SECONDS} seconds")

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGALRM, expire)
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
def test_samples_are_valid(name: str, tmp_path: Path) -> None:
    target = TARGETS[name]
    found = samples(target, tmp_path / "samples")
    (tmp_path / "files").mkdir()
    for number, parts in enumerate(found):
        if number < PARTIAL.get(name, len(found)):
            target.run(parts, tmp_path / "files")
            target.run(target.finish(parts), tmp_path / "files")


def test_the_corpus_covers_every_target_and_is_small() -> None:
    folders = {path.name: sorted(path.iterdir()) for path in CORPUS.iterdir()}
    assert folders.keys() == TARGETS.keys()
    for name, paths in folders.items():
        kinds = {path.name.partition("-")[0] for path in paths}
        assert kinds
        assert kinds <= {"accepted", "rejected", "found"}, name
    assert sum(path.stat().st_size for paths in folders.values() for path in paths) < 700_000


@pytest.mark.parametrize("name", TARGETS)
def test_corpus_inputs_have_their_recorded_outcome(name: str, tmp_path: Path) -> None:
    """Inputs are accepted or rejected as their names say; inputs that once failed (found-) may have either outcome.

    Together they reach all the code that fuzzing has reached.
    """
    target = TARGETS[name]
    for path in sorted((CORPUS / name).iterdir()):
        outcome = "accepted"
        with bounded():
            try:
                target.run(target.stored(path), tmp_path)
            except LlamacError as error:
                outcome = "rejected" if str(error).strip() else "rejected without a message"
        assert outcome in ("accepted", "rejected"), path
        if target.stable and not path.name.startswith("found-"):
            assert path.name.startswith(f"{outcome}-"), path


@pytest.mark.parametrize("name", TARGETS)
def test_mutations_raise_only_llamac_errors(name: str, tmp_path: Path) -> None:
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
