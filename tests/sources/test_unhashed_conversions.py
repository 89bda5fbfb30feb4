"""Conversions that do not wait for checksums: what finds them, what finishes them, and what an interruption leaves."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gguf_samples import Type, spm_keys, write_gguf

import llamac
from golden.cases import CASES
from golden.tiny_checkpoints import tensors
from llamac.export.flat import direct
from llamac.format.flatfile import UNHASHED, FlatFile
from llamac.format.private_files import open_own
from llamac.sources import cache as cache_module
from llamac.sources import conversions, finishing
from llamac.sources.cache import Cache
from llamac.sources.finishing import Draft, finish
from opened_sources import flip, logits, models_in, phases, start
from processes import TIMEOUT

# whole blocks in every row
CONFIG = CASES["llama"].config | {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A GGUF file whose matrices only need regrouping."""
    return write_gguf(tmp_path / "m.gguf", CONFIG, tensors(CONFIG), kind=Type.Q8_0, more=spm_keys())


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> list[Draft]:
    """The drafts that a thread would finish later."""
    found: list[Draft] = []
    monkeypatch.setattr(conversions, "finish_later", lambda draft, file: found.append(draft))
    return found


@pytest.fixture
def hashed(source: Path, tmp_path: Path) -> bytes:
    """The finished conversion."""
    llamac.export.export(source, tmp_path / "hashed.bin", probe_source=None)
    return (tmp_path / "hashed.bin").read_bytes()


def problems(path: Path) -> list[str]:
    """What is wrong with a model's data."""
    file = FlatFile(path)
    found = [problem for _, problem in file.verify_data() if problem]
    file.close()
    return found


def test_a_conversion_reads_the_source_once(
    source: Path, cache_folder: Path, drafts: list[Draft], hashed: bytes
) -> None:
    assert phases(source) == {"writing"}
    (model,) = models_in(cache_folder)
    assert len(model.read_bytes()) == len(hashed)
    assert set(problems(model)) == {"its SHA-256 has not been computed"}
    assert phases(source) == set()
    assert [draft.key for draft in drafts] == [model.stem] * 2


def test_a_file_in_place_of_the_cache_folder_is_reported(source: Path, cache_folder: Path) -> None:
    cache_folder.touch()
    with pytest.warns(UserWarning, match=r"cache cannot be written \(Not a directory\)"):
        logits(source)


def test_a_finished_draft_is_the_file_that_export_writes(
    source: Path, cache_folder: Path, drafts: list[Draft], hashed: bytes
) -> None:
    expected = logits(source)
    (draft,) = drafts
    (before,) = models_in(cache_folder)
    inode = before.stat().st_ino
    assert finish(draft) is not None
    (model,) = models_in(cache_folder)
    assert model.read_bytes() == hashed
    assert (model.stat().st_ino, model != before) == (inode, True)
    assert sorted(path.name for path in (cache_folder / "models").iterdir()) == [model.name, f"{model.stem}.json"]
    assert phases(source) == set()
    assert logits(source) == expected
    assert len(drafts) == 1


def test_a_finished_draft_recognizes_copies_and_moved_sources(
    source: Path, cache_folder: Path, drafts: list[Draft], tmp_path: Path
) -> None:
    phases(source)
    finish(drafts[0])
    shutil.copy(source, tmp_path / "copy.gguf")
    source.rename(tmp_path / "moved.gguf")
    for name in ("copy.gguf", "moved.gguf"):
        assert phases(tmp_path / name) == {"reading"}
        assert phases(tmp_path / name) == set()
    assert len(models_in(cache_folder)) == 1


def test_a_copy_of_a_source_with_a_draft_ends_as_the_same_model(
    source: Path, cache_folder: Path, drafts: list[Draft], tmp_path: Path
) -> None:
    shutil.copy(source, tmp_path / "copy.gguf")
    phases(source)
    phases(tmp_path / "copy.gguf")
    assert len(models_in(cache_folder)) == 2
    for draft in drafts:
        assert finish(draft) is not None
    assert len(models_in(cache_folder)) == 1
    assert phases(source) == phases(tmp_path / "copy.gguf") == set()


def test_the_id_of_a_draft_is_that_of_the_finished_model(
    source: Path, cache_folder: Path, drafts: list[Draft], tmp_path: Path, hashed: bytes
) -> None:
    expected = FlatFile(tmp_path / "hashed.bin").id
    with llamac.load(source) as model:
        assert model.file.id == expected
        assert model.file.is_hashed
        pickled = pickle.dumps(model)
    assert all(tensor.sha256 == UNHASHED for tensor in FlatFile(models_in(cache_folder)[0]).tensors)
    finish(drafts[0])
    with pickle.loads(pickled) as model:
        assert model.file.id == expected
    with llamac.load(source, cache_dir=False) as model:
        assert not model.file.is_hashed
        assert model.file.id == expected


def test_a_thread_finishes_an_idle_process_and_its_open_model(
    source: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch, hashed: bytes
) -> None:
    monkeypatch.setattr(conversions, "finish_later", finishing.finish_later)
    monkeypatch.setattr(finishing, "PAUSE_S", 0.001)
    monkeypatch.setattr(finishing, "BUSY", float("inf"))
    started: list[Any] = []
    begin = threading.Thread.start

    def note(thread: Any) -> None:
        started.append(thread)
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", note)
    with llamac.load(source) as model:
        (thread,) = [thread for thread in started if thread.name == "llamac-finish"]
        thread.join(TIMEOUT)
        assert model.file.is_hashed
        assert models_in(cache_folder)[0].read_bytes() == hashed


def test_a_process_without_threads_opens_a_draft(
    source: Path, cache_folder: Path, drafts: list[Draft], monkeypatch: pytest.MonkeyPatch
) -> None:
    llamac.load(source).close()

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(conversions, "finish_later", finishing.finish_later)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with llamac.load(source) as model:
        assert not model.file.is_hashed


def test_a_busy_process_does_not_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([(0.0, 0.0), (1.0, 0.9), (2.0, 1.8), (3.0, 1.85), (4.0, 1.9)])
    now = [0.0, 0.0]
    slept: list[float] = []

    def tick() -> float:
        now[:] = next(times)
        return now[0] + 1

    monkeypatch.setattr(time, "monotonic", tick)
    monkeypatch.setattr(time, "process_time", lambda: now[1])
    monkeypatch.setattr(time, "thread_time", lambda: 0.0)
    monkeypatch.setattr(time, "sleep", slept.append)
    idle = finishing._Idle()
    idle.wait()  # the first look, a busy second, another one, an idle one
    assert len(slept) == 3
    idle.wait()
    assert len(slept) == 3


@pytest.mark.parametrize("moment", ["source", "tensors"])
def test_an_interrupted_finish_leaves_the_draft(
    moment: str, source: Path, cache_folder: Path, drafts: list[Draft], hashed: bytes
) -> None:
    phases(source)
    (model,) = models_in(cache_folder)
    before = model.read_bytes()
    calls = iter([False, False, moment == "tensors"])  # before and after the source is read; before the first tensor

    def pause() -> None:
        if moment == "source" or next(calls):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        finish(drafts[0], pause)
    assert models_in(cache_folder) == [model]
    assert model.read_bytes() == before
    assert phases(source) == set()
    finish(drafts[0])
    assert models_in(cache_folder)[0].read_bytes() == hashed


@pytest.mark.parametrize("moment", ["renamed", "written", "complete"])
def test_a_kill_while_hashes_are_stored_leaves_no_wrong_hash(
    moment: str, source: Path, cache_folder: Path, drafts: list[Draft], hashed: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A BaseException stands for the kill: nothing is cleaned up."""
    expected = logits(source)
    steps = iter(["renamed", "complete"])
    real_replace = os.replace

    class KilledError(BaseException):
        pass

    def replace(one: Path, other: Path) -> None:
        if ".json" not in Path(one).name and next(steps) == moment:  # a model, not a note
            if moment == "renamed":
                real_replace(one, other)
            raise KilledError
        real_replace(one, other)

    def open_partial(path: Path) -> Any:
        file = open_own(path)
        if moment == "written":
            with file:
                file.write(hashed[:1500])  # some of the hashes
            raise KilledError
        return file

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        patch.setattr("llamac.sources.cache.open_own", open_partial)
        with pytest.raises(KilledError):
            finish(drafts[0])
    assert models_in(cache_folder) == []
    assert logits(source) == expected
    (model,) = models_in(cache_folder)
    assert model.read_bytes() == hashed
    assert problems(model) == []


def test_a_draft_is_made_again_after_the_next_boot(
    source: Path, cache_folder: Path, drafts: list[Draft], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash can have lost parts of it, and nothing can verify it."""
    expected = logits(source)
    (model,) = models_in(cache_folder)
    times = model.stat().st_atime_ns, model.stat().st_mtime_ns
    flip(model, model.stat().st_size - 100)
    os.utime(model, ns=times)
    monkeypatch.setattr(cache_module, "_boot_id", lambda: "another")
    (entry,) = Cache(cache_folder).entries()
    assert entry.problem == "not verified before the system's last start"
    assert logits(source) == expected
    assert [entry.problem for entry in Cache(cache_folder).entries()] == [None]


def test_a_draft_that_was_touched_is_made_again(source: Path, cache_folder: Path, drafts: list[Draft]) -> None:
    expected = logits(source)
    (model,) = models_in(cache_folder)
    flip(model, model.stat().st_size - 100)
    assert finish(drafts[0]) is None
    assert logits(source) == expected


def test_a_changed_source_gets_another_draft(source: Path, cache_folder: Path, drafts: list[Draft]) -> None:
    expected = logits(source)
    other = tensors(CONFIG)
    other = {name: values * 2 for name, values in other.items()}
    write_gguf(source, CONFIG, other, kind=Type.Q8_0, more=spm_keys())
    assert finish(drafts[0]) is None
    assert logits(source) != expected
    assert len(models_in(cache_folder)) == 2


def test_a_source_that_changes_while_it_is_read_is_an_error(
    source: Path, cache_folder: Path, drafts: list[Draft]
) -> None:
    def touch(phase: str, done: int, total: int) -> None:
        if done == total:
            os.utime(source)

    with pytest.raises(llamac.ExportError, match="changed while it was converted"):
        llamac.load(source, progress=touch)
    assert models_in(cache_folder) == []


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks so small that an interruption comes in the middle of a small model."""
    monkeypatch.setattr(direct, "JOB_BYTES", 4096)
    direct._buffers.__dict__.clear()
    yield
    direct._buffers.__dict__.clear()


@pytest.mark.parametrize("boot", [None, "another"])
def test_an_interrupted_draft_is_resumed_in_the_same_boot(
    boot: str | None,
    source: Path,
    cache_folder: Path,
    drafts: list[Draft],
    small_blocks: None,
    hashed: bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[int] = []
    fill = direct._write_block

    def note(*arguments: Any) -> int:
        written.append(arguments[3])
        return fill(*arguments)

    def interrupt(phase: str, done: int, total: int) -> None:
        if phase == "writing" and done > total / 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(direct, "_write_block", note)
    with pytest.raises(KeyboardInterrupt):
        llamac.load(source, progress=interrupt)
    (partial,) = (cache_folder / "models").glob("*.partial")
    assert models_in(cache_folder) == []
    first = min(written)
    written.clear()
    if boot:
        monkeypatch.setattr(cache_module, "_boot_id", lambda: boot)
    logits(source)
    assert (min(written) == first) == (boot is not None)
    assert not partial.exists()
    finish(drafts[-1])
    assert models_in(cache_folder)[0].read_bytes() == hashed


def test_two_processes_convert_once(source: Path, cache_folder: Path) -> None:
    os.utime(source, (1, 1))
    prepare = "import llamac.sources.digests as d; d.SETTLED_NS = 0"
    both = [start(source, prepare=prepare) for _ in range(2)]
    outputs = [process.communicate(timeout=TIMEOUT)[0].splitlines() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted(lines.count("writing") for lines in outputs) == [0, 1]
    assert len({lines[-1] for lines in outputs}) == 1


@pytest.mark.parametrize("moment", ["done == 0", "done > total / 2", "done == total"])
def test_a_killed_conversion_is_made_again(
    moment: str, source: Path, cache_folder: Path, drafts: list[Draft], hashed: bytes
) -> None:
    prepare = "import llamac.sources.digests as d; d.SETTLED_NS = 0"
    also = f"if phase == 'writing' and {moment}: import os; os.kill(os.getpid(), {int(signal.SIGKILL)})"
    process = start(source, also, prepare=prepare)
    process.communicate(timeout=TIMEOUT)
    assert process.returncode == -signal.SIGKILL
    logits(source)
    finish(drafts[0])
    (model,) = models_in(cache_folder)
    assert model.read_bytes() == hashed


def test_with_a_full_disk_the_model_runs_from_memory(
    source: Path, cache_folder: Path, drafts: list[Draft], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = logits(source, cache_dir=False)
    write = direct._write_block

    def fill(descriptor: int, *others: Any) -> int:
        if ".partial" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, *others)

    monkeypatch.setattr(direct, "_write_block", fill)
    with pytest.warns(UserWarning, match=r"too full for .*`llamac cache prune`.*converted in memory"):
        assert logits(source) == expected
    assert list((cache_folder / "models").iterdir()) == []
