"""Interrupted conversions: what they leave behind, and when it is resumed or deleted."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import llamac
from llamac.cli import make_parser
from llamac.cli.serve_models import _opened
from llamac.engine.scoring.cancellation import Cancellation
from llamac.errors import CancelledError
from llamac.export import export
from llamac.export.flat import stream
from llamac.export.flat.plan import Slot
from llamac.format import private_files
from llamac.format.flatfile import FlatFile
from llamac.server.models_file import ModelSettings, read_models
from llamac.sources.cache import Cache
from opened_sources import flip, logits, models_in, phases, start
from processes import TIMEOUT


def names_in(cache_folder: Path) -> list[str]:
    return sorted(path.name for path in (cache_folder / "models").iterdir())


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the tensors converted during the test."""
    names: list[str] = []
    pack = stream._stored_bytes

    def note(slot: Slot, *others: Any) -> bytes | memoryview:
        names.append(slot.name)
        return pack(slot, *others)

    monkeypatch.setattr(stream, "_stored_bytes", note)
    return names


@pytest.mark.parametrize("moment", ["done == 0", "done > total / 2"])
def test_a_killed_conversion_is_resumed(
    moment: str, checkpoint_folder: Path, cache_folder: Path, packed: list[str]
) -> None:
    expected = logits(checkpoint_folder, cache_dir=False)
    everything = packed[:]
    packed.clear()
    also = f"if phase == 'writing' and {moment}: import os; os.kill(os.getpid(), {int(signal.SIGKILL)})"
    process = start(checkpoint_folder, also)
    process.communicate(timeout=TIMEOUT)
    assert process.returncode == -signal.SIGKILL
    (entry,) = Cache(cache_folder).entries()
    assert entry.problem == "interrupted"
    assert names_in(cache_folder)[0].endswith(".partial")
    assert logits(checkpoint_folder) == expected
    (model,) = models_in(cache_folder)
    assert names_in(cache_folder) == [model.name, f"{model.stem}.json"]
    assert [entry.problem for entry in Cache(cache_folder).entries()] == [None]
    file = FlatFile(model)
    assert [problem for _, problem in file.verify_data() if problem] == []
    file.close()
    if moment == "done == 0":
        assert packed == everything


def interrupt(phase: str, done: int, total: int) -> None:
    if phase == "writing" and done > total / 2:
        raise KeyboardInterrupt


def interrupt_conversion(source: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        llamac.load(source, progress=interrupt)


def test_an_interrupted_conversion_is_resumed(checkpoint_folder: Path, cache_folder: Path, packed: list[str]) -> None:
    phases(checkpoint_folder)
    (model,) = models_in(cache_folder)
    whole, everything = model.read_bytes(), packed[:]
    shutil.rmtree(cache_folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "BLOCK_BYTES", 64)  # so that part of a small model reaches the disk
        interrupt_conversion(checkpoint_folder)
    packed.clear()
    phases(checkpoint_folder)
    assert 0 < len(packed) < len(everything)
    assert packed == everything[-len(packed) :]
    assert model.read_bytes() == whole
    assert names_in(cache_folder) == [model.name, f"{model.stem}.json"]


def test_a_conversion_that_a_server_stopped_is_resumed(
    checkpoint_folder: Path, cache_folder: Path, packed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "BLOCK_BYTES", 64)
    options = make_parser().parse_args(["serve", "--models-dir", str(checkpoint_folder.parent)])
    (served,), _ = read_models(checkpoint_folder.parent, ModelSettings(), print)
    stopped = Cancellation()
    pack = stream._stored_bytes

    def stop(*arguments: Any) -> bytes | memoryview:
        if len(packed) == 5:
            stopped.cancel()
        return pack(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(stream, "_stored_bytes", stop)
        with pytest.raises(CancelledError):
            _opened(served, options, None, stopped)
    (entry,) = Cache(cache_folder).entries()
    assert entry.problem == "interrupted"
    names = packed[:]
    packed.clear()
    phases(checkpoint_folder)
    assert names[0] not in packed
    assert names[-1] in packed


def test_a_conversion_of_a_rewritten_source_is_not_resumed(
    checkpoint_folder: Path, cache_folder: Path, packed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "BLOCK_BYTES", 64)
    expected = logits(checkpoint_folder)
    everything = packed[:]
    shutil.rmtree(cache_folder)
    interrupt_conversion(checkpoint_folder)
    weights = checkpoint_folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes())  # the content may have been different in between
    packed.clear()
    assert logits(checkpoint_folder) == expected
    assert packed == everything
    assert len(names_in(cache_folder)) == 2


def test_a_conversion_with_other_arguments_is_not_resumed(checkpoint_folder: Path, tmp_path: Path) -> None:
    """The files for bf16 and f16 have the same size: only the tensor records differ."""
    partial = tmp_path / "partial"
    export(checkpoint_folder, tmp_path / "expected", dtype="f16", probe_source=None)
    export(checkpoint_folder, partial, dtype="bf16", probe_source=None)
    export(checkpoint_folder, tmp_path / "out", dtype="f16", probe_source=None, partial=partial)
    assert (tmp_path / "out").read_bytes() == (tmp_path / "expected").read_bytes()
    assert not partial.exists()


@pytest.mark.parametrize("at", [0.0, 0.3, 0.45])
def test_damage_in_an_interrupted_conversion_is_repaired(
    at: float, checkpoint_folder: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    phases(checkpoint_folder)
    (model,) = models_in(cache_folder)
    whole = model.read_bytes()
    shutil.rmtree(cache_folder)
    monkeypatch.setattr(stream, "BLOCK_BYTES", 64)
    interrupt_conversion(checkpoint_folder)
    (partial,) = (cache_folder / "models").glob("*.partial")
    flip(partial, int(at * len(whole)))
    phases(checkpoint_folder)
    assert model.read_bytes() == whole


def test_a_conversion_without_locks_is_not_resumed(
    checkpoint_folder: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_files, "try_lock", lambda descriptor: None)
    (cache_folder / "models").mkdir(parents=True)
    others = cache_folder / "models" / f".{'a' * 64}.{'0' * 16}.{'1' * 16}.partial"
    others.touch()
    interrupt_conversion(checkpoint_folder)
    assert names_in(cache_folder) == [others.name]
    phases(checkpoint_folder)
    assert others.exists()


def test_an_old_interrupted_conversion_is_deleted(checkpoint_folder: Path, cache_folder: Path) -> None:
    interrupt_conversion(checkpoint_folder)
    (partial,) = (cache_folder / "models").glob("*.partial")
    with Cache(cache_folder).converting("b" * 64):
        assert partial.exists()
    when = time.time() - 8 * 86400
    os.utime(partial, (when, when))
    with Cache(cache_folder).converting(partial.name[1:65]), Cache(cache_folder).converting("b" * 64):
        assert partial.exists()  # still being written
    with Cache(cache_folder).converting("b" * 64):
        assert names_in(cache_folder) == []
