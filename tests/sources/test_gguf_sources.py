"""Conversions of GGUF files: in memory without a cache, verified after a boot, and errors."""

from __future__ import annotations

import errno
import os
import pickle
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_samples import Type, spm_keys, write_gguf

import llamac
from commands import Command
from golden.cases import CASES
from golden.tiny_checkpoints import tensors
from llamac.sources import cache, conversions, digests
from llamac.text import packed, tokenizer
from opened_sources import flip, logits, models_in

CONFIG = CASES["llama"].config


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "m.gguf", CONFIG, tensors(CONFIG), kind=Type.F16, more=spm_keys())


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The conversions that are verified during the test."""
    found: list[Path] = []
    verify = cache._verify

    def note(file: Any) -> None:
        found.append(file.path)
        verify(file)

    monkeypatch.setattr(cache, "_verify", note)
    return found


def test_after_the_next_boot_a_conversion_is_verified_once(
    source: Path, cache_folder: Path, verified: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = logits(source)
    assert logits(source) == expected
    assert verified == []
    monkeypatch.setattr(cache, "_boot_id", lambda: "another")
    for _ in range(2):
        assert logits(source) == expected
    assert verified == models_in(cache_folder)


def test_a_conversion_that_the_disk_lost_is_made_again(
    source: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = logits(source)
    (model,) = models_in(cache_folder)
    times = model.stat().st_atime_ns, model.stat().st_mtime_ns
    flip(model, model.stat().st_size - 100)
    os.utime(model, ns=times)
    monkeypatch.setattr(cache, "_boot_id", lambda: "another")
    assert logits(source) == expected


def test_where_boots_are_unknown_the_disk_is_waited_for(
    source: Path, cache_folder: Path, verified: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(cache, "_boot_id", lambda: None)
    monkeypatch.setattr(cache, "_sync", synced.append)
    expected = logits(source)
    assert [path.suffix for path in synced] == [".partial"]
    assert logits(source) == expected
    assert verified == []


def test_the_boot_id_is_a_constant_text() -> None:
    assert cache._boot_id() == cache._boot_id()
    assert cache._boot_id() is None or len(str(cache._boot_id())) > 8


def test_without_a_cache_a_gguf_file_is_converted_in_memory(
    source: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = logits(source)

    def refuse(**options: object) -> None:
        raise AssertionError("a temporary file")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    assert logits(source, cache_dir=False) == expected


def test_with_too_little_memory_it_is_converted_to_a_temporary_file(
    source: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    group = tmp_path / "group"
    group.mkdir()
    size = source.stat().st_size
    monkeypatch.setattr(conversions, "CGROUP", group)
    for limit, fits in (("max", True), (str(3 * size), True), (str(2 * size), False)):
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{size // 2}\n")
        assert conversions._fits_into_memory(source) == fits
    with llamac.load(source, cache_dir=False) as model:
        assert not np.isnan(model.logits([1, 2])).any()
    assert not conversions._fits_into_memory(source.parent)


def test_a_cache_that_cannot_be_listed_is_reported_as_one_that_cannot_be_written(
    source: Path, cache_folder: Path, llamac_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when another user has made the folder."""
    expected = logits(source, cache_dir=False)

    def refuse(folder: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    monkeypatch.setattr(cache, "_regular_files", refuse)
    with pytest.warns(UserWarning, match=r"the cache folder .* cannot be written \(Permission denied\)"):
        assert logits(source) == expected
    assert conversions.cached_conversions(source) == []
    llamac_command("cache", "list").fails_with("models", "Permission denied")
    llamac_command("cache", "prune").fails_with("models", "Permission denied")


def test_an_interrupted_hash_ends(source: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[int] = []

    def interrupt(phase: str, done: int, total: int) -> None:
        reported.append(done)
        if phase == "reading":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llamac.load(source, dtype="q8", progress=interrupt)
    assert reported == [0]
    assert models_in(cache_folder) == []


def test_errors_of_the_hash_are_those_of_the_caller(source: Path, cache_folder: Path) -> None:
    source.chmod(0)
    if os.geteuid() == 0:
        source.unlink()
    with pytest.raises(OSError, match=r"Permission denied|No such file"):
        llamac.load(source)


def test_a_damaged_source_is_reported_once_by_the_conversion(
    source: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "SETTLED_NS", 0)
    os.truncate(source, source.stat().st_size - 100)
    with pytest.raises(llamac.ExportError, match="it is truncated"):
        llamac.load(source)
    assert models_in(cache_folder) == []


@pytest.mark.parametrize("cache_dir", [None, False])
def test_a_tokenizer_is_opened_once(
    source: Path, cache_folder: Path, cache_dir: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model uses what the conversion has opened."""
    opened: list[bytes] = []
    parse, tables = tokenizer._Parsed.__init__, packed.vocabulary_of

    def parsed(self: Any, data: bytes, *others: Any) -> None:
        opened.append(data)
        parse(self, data, *others)

    monkeypatch.setattr(tokenizer._Parsed, "__init__", parsed)
    with llamac.load(source, cache_dir=cache_dir) as model:
        ids = model.tokenize("some text")
        assert model.detokenize(ids) == "some text"
        assert len(opened) == 1
        assert isinstance(opened[0], packed.OpenedBytes)
        assert tables(opened[0]) is opened[0].vocabulary
        again = pickle.loads(pickle.dumps(model.tokenizer))
        assert (again.encode("some text"), type(again._data)) == (model.tokenizer.encode("some text"), bytes)
    with llamac.load(source, cache_dir=cache_dir, tokenizer=source) as model:
        assert model.tokenize("some text") == ids
    with llamac.load(source, cache_dir=cache_dir) as model:
        assert model.tokenize("some text") == ids


def test_what_is_read_ahead_decides_nothing(
    source: Path, cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The conversion is the same if the exporter reads the source itself."""
    expected = [logits(source, cache_dir=tmp_path / name) for name in ("ahead",)]
    monkeypatch.setattr(conversions, "_read_ahead", lambda request: None)
    assert [logits(source, cache_dir=tmp_path / "alone")] == expected
    (one,), (other,) = (list((tmp_path / name / "models").glob("*.bin")) for name in ("ahead", "alone"))
    assert one.read_bytes() == other.read_bytes()
