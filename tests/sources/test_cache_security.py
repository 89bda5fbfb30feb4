"""Attacks on the cache by another user who can write to its folder: links, pipes, hard links, planted models."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import llamac
from llamac.format.detect import files_of
from llamac.sources.cache import Cache, key_of
from opened_sources import logits, models_in, phases
from processes import run_python

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
STRANGER = 12345


@contextmanager
def unwritable_is_fine() -> Iterator[None]:
    """A cache that was tampered with may be unusable; then llamac warns and converts without it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the cache folder .* cannot be written")
        yield


def interrupted(source: Path, cache: Path) -> Path:
    """The partial file of an interrupted conversion."""

    def interrupt(phase: str, done: int, total: int) -> None:
        if phase == "writing" and done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llamac.load(source, progress=interrupt)
    (partial,) = (cache / "models").glob(".*.partial")
    return partial


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_bytes(b"private" * 100_000)
    return path


@pytest.mark.parametrize("plant", [Path.symlink_to, Path.hardlink_to], ids=["symbolic link", "hard link"])
def test_a_link_in_place_of_a_partial_file_is_not_written_through(
    plant: Callable[[Path, Path], None], checkpoint_folder: Path, cache_folder: Path, victim: Path
) -> None:
    expected, private = logits(checkpoint_folder, cache_dir=False), victim.read_bytes()
    partial = interrupted(checkpoint_folder, cache_folder)
    partial.unlink()
    plant(partial, victim)
    assert logits(checkpoint_folder) == expected
    assert victim.read_bytes() == private


def test_names_of_partial_files_are_unpredictable(checkpoint_folder: Path, cache_folder: Path) -> None:
    names = set()
    for _ in range(2):
        partial = interrupted(checkpoint_folder, cache_folder)
        names.add(partial.name)
        partial.unlink()
    assert len(names) == 2


@AS_ROOT
def test_a_partial_file_of_another_user_is_not_resumed(checkpoint_folder: Path, cache_folder: Path) -> None:
    partial = interrupted(checkpoint_folder, cache_folder)
    os.chown(partial, STRANGER, STRANGER)
    with partial.open("rb") as file:  # so that no other file gets its inode
        phases(checkpoint_folder)
        assert models_in(cache_folder)[0].stat().st_ino != os.fstat(file.fileno()).st_ino


@pytest.mark.parametrize("dangling", [True, False], ids=["dangling", "to a file"])
@pytest.mark.parametrize("name", ["CACHEDIR.TAG", "locks/KEY.lock", "models/KEY.bin", "models/KEY.json"])
def test_a_link_in_the_cache_is_not_followed(
    name: str, dangling: bool, checkpoint_folder: Path, cache_folder: Path, victim: Path
) -> None:
    key = key_of(Cache(cache_folder).digests(checkpoint_folder, files_of(checkpoint_folder)), "auto", True)
    path, private = cache_folder / name.replace("KEY", key), victim.read_bytes()
    (cache_folder / "CACHEDIR.TAG").unlink()
    if dangling:
        victim.unlink()
    path.symlink_to(victim)
    with unwritable_is_fine():
        logits(checkpoint_folder)
    assert (not victim.exists()) if dangling else (victim.read_bytes() == private)
    Cache(cache_folder).prune(everything=True)
    assert victim.exists() != dangling


@pytest.mark.parametrize("name", ["locks", "models", "sources"])
def test_a_link_to_another_folder_is_not_followed(
    name: str, checkpoint_folder: Path, cache_folder: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    cache_folder.mkdir()
    (cache_folder / name).symlink_to(elsewhere)
    with unwritable_is_fine():
        logits(checkpoint_folder)
    assert list(elsewhere.iterdir()) == []


USE = """
import sys, warnings
from pathlib import Path
import llamac
from llamac.sources.cache import Cache
warnings.simplefilter("ignore")
llamac.load(sys.argv[1]).close()
cache = Cache(Path(sys.argv[2]))
cache.entries()
cache.prune(everything=True, dry_run=True)
cache.prune(everything=True)
"""


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("name", ["models/*.bin", "models/*.json", "sources/*.json", "locks/*.lock", "CACHEDIR.TAG"])
def test_a_pipe_in_the_cache_does_not_block(name: str, checkpoint_folder: Path, cache_folder: Path) -> None:
    phases(checkpoint_folder)
    (path,) = cache_folder.glob(name)
    replace_by_pipe(path)
    done = run_python(USE, checkpoint_folder, cache_folder)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_pipe_in_place_of_a_partial_file_does_not_block(checkpoint_folder: Path, cache_folder: Path) -> None:
    replace_by_pipe(interrupted(checkpoint_folder, cache_folder))
    done = run_python(USE, checkpoint_folder, cache_folder)
    assert (done.returncode, done.stderr) == (0, "")


@AS_ROOT
@pytest.mark.parametrize("suffix", [".bin", ".json"])
def test_a_model_of_an_untrusted_user_is_not_used(suffix: str, checkpoint_folder: Path, cache_folder: Path) -> None:
    phases(checkpoint_folder)
    planted = models_in(cache_folder)[0].with_suffix(suffix)
    os.chown(planted, STRANGER, STRANGER)
    assert "writing" in phases(checkpoint_folder)
    assert planted.stat().st_uid == os.geteuid()


@AS_ROOT
@pytest.mark.parametrize("suffixes", [(".bin", ".json"), (".json",), (".bin",)], ids=["both", "note", "model"])
def test_a_model_of_an_untrusted_user_is_not_pruned(
    suffixes: tuple[str, ...], checkpoint_folder: Path, cache_folder: Path
) -> None:
    phases(checkpoint_folder)
    (model,) = models_in(cache_folder)
    for suffix in suffixes:
        os.chown(model.with_suffix(suffix), STRANGER, STRANGER)
    assert Cache(cache_folder).prune() == []
    if ".json" not in suffixes:
        model.with_suffix(".json").unlink()
        assert Cache(cache_folder).prune() == []
    assert model.exists()


@AS_ROOT
def test_a_model_owned_by_the_cache_folders_owner_is_used(checkpoint_folder: Path, cache_folder: Path) -> None:
    """An administrator can share a cache."""
    phases(checkpoint_folder)
    for path in (cache_folder, *cache_folder.rglob("*")):
        os.chown(path, STRANGER, STRANGER)
    assert phases(checkpoint_folder) == set()


@AS_ROOT
def test_digests_noted_by_an_untrusted_user_are_not_trusted(checkpoint_folder: Path, cache_folder: Path) -> None:
    phases(checkpoint_folder)
    (note,) = (cache_folder / "sources").iterdir()
    os.chown(note, STRANGER, STRANGER)
    assert phases(checkpoint_folder) == {"reading"}
