"""Prefixes on disk: found by other engines and processes, bounded, and never wrong."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from failing_allocations import Failing

import llamac
from builders import some_ids
from llamac.arguments import KV_DTYPES, KVDtype
from llamac.engine.cache.prefix_loads import PrefixLoads
from llamac.engine.cache.prefix_store import HEADER, SUFFIX, PrefixStore
from llamac.errors import OutOfMemoryError
from llamac.format.private_files import replacing
from processes import TIMEOUT
from waiting import wait_until


class Computer:
    """A session that computes prefixes, and a store."""

    def __init__(self, model: llamac.Model, folder: Path, **settings: Any) -> None:
        self.model = model
        self.session = model.session(sequences=2)
        self.store = PrefixStore(self.session, folder, **settings)

    def keep(self, ids: list[int]) -> None:
        self.session._core.truncate(0)
        self.session.eval(ids, logits=None)
        self.store.keep(array("i", ids), self.session._core, 0)
        self.store.drain()

    def found(self, ids: list[int]) -> int:
        return self.store.longest(array("i", ids))

    def restore(self, ids: list[int], length: int) -> bool:
        loaded = self.store.load(array("i", ids), length)
        if loaded is not None:
            self.store.restore(array("i", ids), loaded, self.session._core, 1)
        return loaded is not None

    def close(self) -> None:
        self.store.close()
        self.session.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that does not exist yet."""
    return tmp_path / "prefixes"


def pages(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{SUFFIX}"))


def answers(model: llamac.Model, folder: Path, prompts: list[list[int]], **settings: Any) -> tuple[list[Any], Any]:
    """The results and the statistics of an engine of its own."""
    with llamac.Engine(model, prefix_dir=folder, **settings) as engine:
        completions = engine.generate(prompts, max_tokens=6, temperature=0)
    return completions, engine.stats().prefix  # all that waited has been written


# ---- finding


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_later_engine_continues_a_prefix(tiny_llama: Path, folder: Path, kv_dtype: KVDtype) -> None:
    ids = some_ids(200)
    with llamac.load(tiny_llama, kv_dtype=kv_dtype) as model:
        first, before = answers(model, folder, [ids])
        assert (before.hits, before.disk_hits) == (0, 0)
    assert len(pages(folder)) == 3
    with llamac.load(tiny_llama, kv_dtype=kv_dtype, isa="scalar", threads=1) as model:
        prompts = [ids, [*ids[:150], *some_ids(30, seed=4)]]
        again, after = answers(model, folder, prompts)
        assert again[0].tokens == first[0].tokens
        assert again[1].tokens == model.generate(prompts[1], max_tokens=6, temperature=0).tokens
        assert again[0].usage.cached_tokens == 192
        assert (after.disk_hits, after.disk_hit_tokens) == (1, 192)  # the other is found in memory
        assert after.hit_tokens >= 192 + 128
        assert after.disk_read_bytes == 3 * model.session()._core.page_size()[1]


def test_a_prefix_from_the_disk_is_in_memory_from_then_on(tiny_llama: Path, folder: Path) -> None:
    ids = array("i", some_ids(200))
    with llamac.load(tiny_llama) as model:
        answers(model, folder, [list(ids)])
        with llamac.Engine(model, prefix_dir=folder) as engine:
            cache = engine._cache
            assert cache is not None
            assert cache._store is not None
            assert cache.find(ids).length == 0
            found = cache.restore(ids, engine._session._core, 0, cache._store.load(ids, 192))
            assert (found.length, cache.find(ids).length) == (192, 192)
            engine._session.truncate(0)


def test_the_longest_stored_prefix_is_found(model: llamac.Model, folder: Path) -> None:
    ids, other = some_ids(200), some_ids(200, seed=3)
    computer = Computer(model, folder)
    assert computer.found(ids) == 0
    computer.keep(ids)
    assert computer.found(ids) == 192
    assert computer.found(ids[:192]) == 128  # one id is left to compute
    assert computer.found([*ids[:130], *other]) == 128
    assert computer.found([*ids[:63], *other]) == 0
    assert computer.store.longest(array("i", ids), at_least=193) == 0
    assert computer.restore(ids, 128)
    assert computer.session.tokens(1) == ids[:128]
    found = computer.session.eval(ids[128:], sequence=1, logits="all")
    assert found.tobytes() == model.logits(ids)[128:].tobytes()
    computer.close()


def test_pages_are_stored_once(model: llamac.Model, folder: Path) -> None:
    computer = Computer(model, folder)
    shared = some_ids(128)
    for seed in range(3):
        computer.keep([*shared, *some_ids(64, seed=seed + 5)])
    assert len(pages(folder)) == 2 + 3
    written = computer.store.stats.written_bytes
    assert written == sum(path.stat().st_size for path in pages(folder)) == computer.store.stats.bytes
    computer.keep(shared)
    assert computer.store.stats.written_bytes == written
    computer.close()


def test_windows_need_their_last_pages_only(windowed: llamac.Model, folder: Path) -> None:
    ids = some_ids(1000)
    computer = Computer(windowed, folder)
    computer.keep(ids)
    assert len(pages(folder)) < 2 * 15  # the layer with a window has dropped early pages
    assert computer.found(ids) == 960
    assert computer.found([*ids[:500], 1]) == 0  # the pages of the window are not there
    assert computer.restore(ids, 960)
    found = computer.session.eval(ids[960:], sequence=1, logits="all")
    assert found.tobytes() == windowed.logits(ids)[960:].tobytes()
    computer.keep(ids[:300])
    assert computer.found([*ids[:500], 1]) == 256
    computer.close()


def test_other_models_and_formats_find_nothing(tiny_llama: Path, tiny_gpt2: Path, folder: Path) -> None:
    ids = some_ids(100)
    cases: list[tuple[Path, dict[str, Any]]] = [
        (tiny_llama, {"kv_dtype": "f16"}),
        (tiny_llama, {"kv_dtype": "q8"}),
        (tiny_llama, {"kv_dtype": "f16", "numerics": "fast"}),
        (tiny_gpt2, {"kv_dtype": "f16"}),
    ]
    for path, settings in cases:
        with llamac.load(path, **settings) as model:
            computer = Computer(model, folder)
            assert computer.found(ids) == 0
            computer.keep(ids)
            assert computer.found(ids) == 64
            computer.close()


# ---- damage


@pytest.fixture
def stored(model: llamac.Model, folder: Path) -> Iterator[Computer]:
    """A store with two pages."""
    computer = Computer(model, folder)
    computer.keep(some_ids(140))
    yield computer
    computer.close()


@pytest.mark.parametrize("at", [0, 8, 12, 16, 50, HEADER.size, -1])
def test_a_damaged_page_is_deleted_and_computed_again(stored: Computer, folder: Path, at: int) -> None:
    path = stored.store._path(stored.store._keys(array("i", some_ids(140)), 2)[1], 0)
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
    assert not stored.restore(some_ids(140), 128)
    assert not path.exists()
    assert stored.store.stats.errors == 1
    assert stored.found(some_ids(140)) == 64
    stored.keep(some_ids(140))
    assert stored.restore(some_ids(140), 128)


def test_a_page_cut_at_any_length(stored: Computer, folder: Path) -> None:
    path = stored.store._path(stored.store._keys(array("i", some_ids(140)), 2)[0], 0)
    data = path.read_bytes()
    for length in (0, 1, HEADER.size - 1, HEADER.size, HEADER.size + 1, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        assert not stored.restore(some_ids(140), 128)
        assert not path.exists()


def test_links_and_pipes_are_not_followed(stored: Computer, folder: Path, tmp_path: Path) -> None:
    first, second = pages(folder)
    first.rename(tmp_path / "page")
    first.symlink_to(tmp_path / "page")
    second.unlink()
    os.mkfifo(second)
    assert stored.found(some_ids(140)) == 0
    assert not stored.restore(some_ids(140), 128)


def test_an_engine_computes_what_it_cannot_read(model: llamac.Model, folder: Path) -> None:
    ids = some_ids(140)
    first, _ = answers(model, folder, [ids])
    for path in pages(folder):
        path.write_bytes(b"x")
    again, stats = answers(model, folder, [ids])
    assert again[0].tokens == first[0].tokens
    assert (stats.disk_hits, stats.disk_errors) == (0, 1)


def test_a_folder_that_cannot_be_written_is_an_error_in_the_statistics(
    model: llamac.Model, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llamac.engine.cache import prefix_store

    for error in (OSError("the disk is full"), MemoryError(), llamac.OutOfMemoryError("no memory")):

        def fail(*arguments: object, error: Exception = error, **options: object) -> None:
            raise error

        monkeypatch.setattr(prefix_store, "replacing", fail)
        completions, stats = answers(model, folder, [some_ids(140)])
        assert len(completions[0].tokens) == 6
        assert stats.disk_errors >= 2
        assert pages(folder) == []


# ---- limits


def test_what_was_used_longest_ago_is_deleted_last_pages_first(model: llamac.Model, folder: Path) -> None:
    page = model.session()._core.page_size()[1] + HEADER.size
    computer = Computer(model, folder, max_bytes=8 * page)
    prompts = [some_ids(200, seed=seed) for seed in (1, 2, 3)]
    for prompt in prompts:
        computer.keep(prompt)
        time.sleep(0.01)
    total = sum(path.stat().st_size for path in pages(folder))
    assert total <= 8 * page
    assert [computer.found(prompt) for prompt in prompts] == [64, 192, 192]
    assert computer.store.stats.evictions == 2
    computer.close()
    assert Computer(model, folder, max_bytes=3 * page).store.stats.bytes <= 3 * page


def test_leftovers_of_killed_processes_are_deleted(model: llamac.Model, folder: Path) -> None:
    folder.mkdir()
    for path in (folder / ".llamac-1-left", folder / "notes.txt"):
        path.write_bytes(b"x")
    with replacing(folder / "new") as running:
        Computer(model, folder).close()
        assert sorted(path.name for path in folder.iterdir()) == [Path(running.name).name, "notes.txt"]


def test_files_that_cannot_be_deleted_do_not_keep_others(
    model: llamac.Model, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Users who share a folder may not delete each other's files."""
    with closing(Computer(model, folder)) as computer:
        computer.keep(some_ids(64 * 4, seed=1))
    kept = min(pages(folder), key=lambda path: path.stat().st_mtime_ns)  # the first to be deleted
    unlink = os.unlink

    def refuse(path: str) -> None:
        if Path(path) == kept:
            raise PermissionError(errno.EPERM, "Operation not permitted", path)
        unlink(path)

    monkeypatch.setattr(os, "unlink", refuse)
    page = kept.stat().st_size
    with closing(Computer(model, folder, max_bytes=2 * page)) as computer:
        assert computer.store.stats.bytes <= 2 * page
    assert kept in pages(folder)


def test_arguments(model: llamac.Model, folder: Path) -> None:
    with pytest.raises(llamac.ArgumentError, match="prefix_dir needs prefix_cache"):
        llamac.Engine(model, prefix_dir=folder, prefix_cache=False)
    with pytest.raises(llamac.ArgumentError, match="prefix_dir_bytes is 5, expected at least"):
        llamac.Engine(model, prefix_dir=folder, prefix_dir_bytes=5)
    with pytest.raises(llamac.ArgumentError, match="prefix_bytes is -1"):
        llamac.Engine(model, prefix_bytes=-1)
    folder.write_bytes(b"")
    with pytest.raises(FileExistsError):
        llamac.Engine(model, prefix_dir=folder)
    assert model.kv_bytes == 0


def test_the_memory_of_prefixes_is_bounded(model: llamac.Model) -> None:
    page = model.session()._core.page_size()[1]
    with llamac.Engine(model, prefix_bytes=4 * page) as engine:
        for seed in range(5):
            engine.generate([some_ids(100, seed=seed)], max_tokens=2)
        stats = engine.stats().prefix
        assert 0 < stats.bytes <= 4 * page == stats.max_bytes
        assert stats.evictions >= 3


def test_pages_that_wait_for_the_disk_do_not_take_the_memory_of_requests(
    model: llamac.Model, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = PrefixStore._write_one

    def slowly(store: PrefixStore, *item: Any) -> None:
        time.sleep(0.02)
        write(store, *item)

    monkeypatch.setattr(PrefixStore, "_write_one", slowly)
    prompts = [some_ids(250, seed=seed) for seed in range(4)]
    expected = [model.generate(prompt, max_tokens=6, temperature=0).tokens for prompt in prompts]
    completions, stats = answers(model, folder, prompts, kv_tokens=600, max_sequences=2)
    assert [completion.tokens for completion in completions] == expected
    assert stats.disk_written_bytes > 0
    assert model.kv_bytes == 0


def test_an_error_of_a_restored_prefix_holds_no_pages(stored: Computer) -> None:
    ids = array("i", some_ids(140))
    loaded = stored.store.load(ids, 128)
    assert loaded is not None
    before = stored.model.kv_bytes - sum(page.nbytes for page in loaded.pages)
    with Failing(-1), pytest.raises(OutOfMemoryError) as error:
        stored.store.restore(ids, loaded, stored.session._core, 1)
    assert stored.model.kv_bytes == before
    assert error.tb is not None  # it refers to the frames of the call


# ---- several processes

PROGRAM = """
import random, sys, llamac
path, folder, seed = sys.argv[1:]
rng = random.Random(int(seed))
with llamac.load(path, threads=1) as model:
    page = model.session()._core.page_size()[1]
    for _ in range(int(1e9) if seed == "0" else 3):
        with llamac.Engine(model, prefix_dir=folder, prefix_dir_bytes=12 * page) as engine:
            for _ in range(4):
                start = rng.randrange(3)
                prompt = [(start * 50 + i * i) % 280 for i in range(rng.randrange(70, 300))]
                found = engine.generate([prompt], max_tokens=2, temperature=0)[0].tokens
                assert found == model.generate(prompt, max_tokens=2, temperature=0).tokens, prompt
        print("round", flush=True)
"""


def test_processes_share_a_folder_and_can_be_killed(tiny_llama: Path, folder: Path) -> None:
    def start(seed: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PROGRAM, str(tiny_llama), str(folder), str(seed)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    killed, others = start(0), [start(seed) for seed in (1, 2)]
    assert killed.stdout is not None
    for _ in range(2):
        assert killed.stdout.readline() == "round\n"
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    for process in others:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    with llamac.load(tiny_llama) as model:
        page = model.session()._core.page_size()[1]
        computer = Computer(model, folder, max_bytes=12 * page)
        assert computer.store.stats.bytes <= 12 * page
        computer.close()


def test_threads_end_with_their_engine(model: llamac.Model, folder: Path) -> None:
    answers(model, folder, [some_ids(100)])
    assert not [thread for thread in threading.enumerate() if thread.name == "llamac-prefixes"]


def test_statistics_are_copied(model: llamac.Model, folder: Path) -> None:
    with llamac.Engine(model, prefix_dir=folder) as engine:
        before = engine.stats().prefix
        engine.generate([some_ids(100)], max_tokens=2)
        assert before == replace(before)
        assert before.lookups == 0


# ---- reading alongside the engine's thread


class SlowDisk:
    """Reads wait until a test lets them go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.leave, self.reads = threading.Event(), threading.Event(), 0
        load = PrefixStore.load

        def wait(store: PrefixStore, *arguments: Any) -> Any:
            self.reads += 1
            self.entered.set()
            assert self.leave.wait(TIMEOUT)
            return load(store, *arguments)

        monkeypatch.setattr(PrefixStore, "load", wait)


def test_other_requests_go_on_while_a_prefix_is_read(
    model: llamac.Model, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = some_ids(200)
    first, _ = answers(model, folder, [ids])
    disk = SlowDisk(monkeypatch)
    with llamac.Engine(model, prefix_dir=folder) as engine:
        reading = engine.submit(ids, max_tokens=6, temperature=0)
        assert disk.entered.wait(TIMEOUT)
        sharing = engine.submit([*ids[:150], 7], max_tokens=6, temperature=0)
        other = some_ids(20, seed=8)
        alone = model.generate(other, max_tokens=6, temperature=0)
        assert engine.submit(other, max_tokens=6, temperature=0).result(TIMEOUT).tokens == alone.tokens
        assert not reading.done
        assert not sharing.done
        disk.leave.set()
        assert reading.result(TIMEOUT).tokens == first[0].tokens
        assert reading.result().usage.cached_tokens == 192
        assert sharing.result(TIMEOUT).usage.cached_tokens >= 128  # of the pages that were read for the other one
        assert disk.reads == 1


def test_a_request_is_cancelled_while_its_prefix_is_read(
    model: llamac.Model, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = some_ids(200)
    first, _ = answers(model, folder, [ids])
    disk = SlowDisk(monkeypatch)
    with llamac.Engine(model, prefix_dir=folder) as engine:
        reading = engine.submit(ids, max_tokens=6, temperature=0)
        assert disk.entered.wait(TIMEOUT)
        sharing = engine.submit(ids, max_tokens=6, temperature=0)
        reading.cancel()
        assert (reading.result(0).finish_reason, reading.result(0).tokens) == ("cancelled", [])
        wait_until(lambda: disk.reads == 2)  # the engine has dropped the cancelled request, whose read goes on
        disk.leave.set()
        assert sharing.result(TIMEOUT).tokens == first[0].tokens
        assert sharing.result().usage.cached_tokens == 192
        wait_until(lambda: model.kv_bytes == engine.stats().prefix.bytes)
    assert model.kv_bytes == 0


def stored_and_long(model: llamac.Model, folder: Path) -> tuple[list[int], list[int], list[int], list[int]]:
    """A prompt whose prefix is on disk, another one, and the tokens after each, 100 of them after the other one."""
    ids, other = some_ids(200), some_ids(150, seed=8)
    [first], _ = answers(model, folder, [ids])
    return ids, other, first.tokens, model.generate(other, max_tokens=100, temperature=0, ignore_eos=True).tokens


def test_pages_that_were_read_give_way_to_running_requests(
    model: llamac.Model, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without memory for both, a prefix that was read is forgotten and computed again."""
    ids, other, first, long = stored_and_long(model, folder)
    with llamac.Engine(model, prefix_dir=folder, kv_tokens=320) as engine:
        running = engine.submit(other, max_tokens=100, temperature=0, ignore_eos=True)
        next(iter(running))
        reading = engine.submit(ids, max_tokens=6, temperature=0)
        assert running.result(TIMEOUT).tokens == long
        assert reading.result(TIMEOUT).tokens == first
        assert engine.failure is None
    assert model.kv_bytes == 0


def test_a_prefix_that_is_being_read_gives_way_to_a_running_request(
    model: llamac.Model, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of its pages are in memory, and the read goes on while the running request finds no page."""
    ids, other, first, long = stored_and_long(model, folder)
    entered, leave, pages, waits = threading.Event(), threading.Event(), list[Path](), list[bool]()
    read, forget = PrefixStore._read, PrefixLoads.forget

    def slow_read(store: PrefixStore, path: Path, *arguments: Any) -> Any:
        pages.append(path)
        if len(pages) == 3:
            entered.set()
            assert leave.wait(TIMEOUT)
        return read(store, path, *arguments)

    def counted(loads: PrefixLoads) -> bool:
        if len(waits) == 2:
            leave.set()
        waits.append(forget(loads))
        return waits[-1]

    monkeypatch.setattr(PrefixStore, "_read", slow_read)
    monkeypatch.setattr(PrefixLoads, "forget", counted)
    with llamac.Engine(model, prefix_dir=folder, kv_tokens=320) as engine:
        reading = engine.submit(ids, max_tokens=6, temperature=0)
        assert entered.wait(TIMEOUT)
        running = engine.submit(other, max_tokens=100, temperature=0, ignore_eos=True)
        assert running.result(TIMEOUT).tokens == long
        assert reading.result(TIMEOUT).tokens == first
        assert waits[:3] == [True, True, True]
    assert model.kv_bytes == 0


def test_a_prefix_is_read_while_its_request_waits_for_a_sequence(
    model: llamac.Model, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, other = some_ids(200), some_ids(20, seed=8)
    first, _ = answers(model, folder, [ids])
    disk = SlowDisk(monkeypatch)
    disk.leave.set()
    with llamac.Engine(model, max_sequences=1, prefix_dir=folder) as engine:
        running = engine.submit(other, max_tokens=400, temperature=0, ignore_eos=True)
        next(iter(running))
        waiting = engine.submit(ids, max_tokens=6, temperature=0)
        assert disk.entered.wait(TIMEOUT)  # the other one still runs, unless this machine is very slow
        assert waiting.result(TIMEOUT).tokens == first[0].tokens
        assert waiting.result().usage.cached_tokens == 192
