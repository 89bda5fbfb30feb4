"""Conversions that are broken off: what they leave, who goes on with it, and when nobody does."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import llamac
from llamac import cache as cache_module
from llamac.cache import Cache
from llamac.export import export, writer
from llamac.flatfile import FlatFile
from opened_sources import flip, logits, models_in, phases, start
from processes import TIMEOUT


def names_in(place: Path) -> list[str]:
    return sorted(path.name for path in (place / "models").iterdir())


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the tensors that are converted while a test runs."""
    names: list[str] = []
    pack = writer._as_stored

    def note(slot: writer.Slot, *others: Any) -> bytes:
        names.append(slot.name)
        return pack(slot, *others)

    monkeypatch.setattr(writer, "_as_stored", note)
    return names


@pytest.mark.parametrize("moment", ["done == 0", "done > total / 2"])
def test_what_a_killed_process_left_is_gone_on_with(
    moment: str, checkpoint_folder: Path, place: Path, packed: list[str]
) -> None:
    expected = logits(checkpoint_folder, cache=False)
    everything = packed[:]
    packed.clear()
    also = f"if phase == 'writing' and {moment}: import os; os.kill(os.getpid(), {int(signal.SIGKILL)})"
    process = start(checkpoint_folder, also)
    process.communicate(timeout=TIMEOUT)
    assert process.returncode == -signal.SIGKILL
    (entry,) = Cache(place).entries()
    assert entry.problem == "half-written"
    assert names_in(place)[0].endswith(".partial")
    assert logits(checkpoint_folder) == expected
    (model,) = models_in(place)
    assert names_in(place) == [model.name, f"{model.stem}.json"]
    assert [entry.problem for entry in Cache(place).entries()] == [None]
    file = FlatFile(model)
    assert [problem for _, problem in file.verify_data() if problem] == []
    file.close()
    if moment == "done == 0":
        assert packed == everything


def interrupt(phase: str, done: int, total: int) -> None:
    if phase == "writing" and done > total / 2:
        raise KeyboardInterrupt


def break_off(source: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        llamac.load(source, progress=interrupt)


def test_an_interrupted_conversion_is_gone_on_with(checkpoint_folder: Path, place: Path, packed: list[str]) -> None:
    phases(checkpoint_folder)
    (model,) = models_in(place)
    whole, everything = model.read_bytes(), packed[:]
    shutil.rmtree(place)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "BLOCK_BYTES", 64)  # so that a small model is on the disk as far as it came
        break_off(checkpoint_folder)
    packed.clear()
    phases(checkpoint_folder)
    assert 0 < len(packed) < len(everything)
    assert packed == everything[-len(packed) :]
    assert model.read_bytes() == whole
    assert names_in(place) == [model.name, f"{model.stem}.json"]


def test_what_is_left_of_another_state_is_not_used(
    checkpoint_folder: Path, place: Path, packed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "BLOCK_BYTES", 64)
    expected = logits(checkpoint_folder)
    everything = packed[:]
    shutil.rmtree(place)
    break_off(checkpoint_folder)
    weights = checkpoint_folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes())  # it may have had other content meanwhile
    packed.clear()
    assert logits(checkpoint_folder) == expected
    assert packed == everything
    assert len(names_in(place)) == 2


def test_what_is_left_of_other_arguments_is_not_used(checkpoint_folder: Path, tmp_path: Path) -> None:
    """bf16 and f16 have the same sizes, so that only the tensors' records tell them apart."""
    partial = tmp_path / "partial"
    export(checkpoint_folder, tmp_path / "expected", dtype="f16", probe_source=None)
    export(checkpoint_folder, partial, dtype="bf16", probe_source=None)
    export(checkpoint_folder, tmp_path / "out", dtype="f16", probe_source=None, partial=partial)
    assert (tmp_path / "out").read_bytes() == (tmp_path / "expected").read_bytes()
    assert not partial.exists()


@pytest.mark.parametrize("at", [0.0, 0.3, 0.45])
def test_damage_in_what_was_left_is_mended(
    at: float, checkpoint_folder: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    phases(checkpoint_folder)
    (model,) = models_in(place)
    whole = model.read_bytes()
    shutil.rmtree(place)
    monkeypatch.setattr(writer, "BLOCK_BYTES", 64)
    break_off(checkpoint_folder)
    (partial,) = (place / "models").glob("*.partial")
    flip(partial, int(at * len(whole)))
    phases(checkpoint_folder)
    assert model.read_bytes() == whole


def test_without_locks_everybody_begins_anew(
    checkpoint_folder: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "fcntl", None)
    (place / "models").mkdir(parents=True)
    others = place / "models" / f".{'a' * 64}.bin.0123abcd.partial"
    others.touch()
    break_off(checkpoint_folder)
    assert names_in(place) == [others.name]
    phases(checkpoint_folder)
    assert others.exists()


def test_what_was_broken_off_long_ago_is_removed(checkpoint_folder: Path, place: Path) -> None:
    break_off(checkpoint_folder)
    (partial,) = (place / "models").glob("*.partial")
    with Cache(place).writing("b" * 64):
        assert partial.exists()
    when = time.time() - 8 * 86400
    os.utime(partial, (when, when))
    with Cache(place).writing(partial.name[1:65]), Cache(place).writing("b" * 64):
        assert partial.exists()  # it is being written
    with Cache(place).writing("b" * 64):
        assert names_in(place) == []
