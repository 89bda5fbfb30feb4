"""Opening and locking files in folders to which other users can write."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest

from llamac.format import private_files
from llamac.format.private_files import (
    create,
    locked,
    open_own,
    open_regular,
    remove_abandoned_in,
    replacing,
    try_lock,
)
from processes import UNCOUNTED, output_of

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root for chown")


def link(path: Path) -> None:
    path.symlink_to(path.with_name("victim"))


def dangling_link(path: Path) -> None:
    path.symlink_to(path.with_name("absent"))


def socket(path: Path) -> None:
    os.mknod(path, 0o600 | 0o140000)


@pytest.mark.parametrize("make", [link, dangling_link, os.mkfifo, os.mkdir, socket])
@pytest.mark.parametrize("call", [open_regular, open_own, create])
def test_only_regular_files_are_opened(
    call: Callable[[Path], object], make: Callable[[Path], object], tmp_path: Path
) -> None:
    (tmp_path / "victim").write_text("private")
    make(tmp_path / "path")
    with pytest.raises(OSError, match="path"):
        call(tmp_path / "path")
    assert (tmp_path / "victim").read_text() == "private"
    assert not (tmp_path / "absent").exists()


def test_a_file_with_a_second_hard_link_is_rejected(tmp_path: Path) -> None:
    create(tmp_path / "path").close()
    open_own(tmp_path / "path").close()
    os.link(tmp_path / "path", tmp_path / "other")
    with pytest.raises(PermissionError, match="not this user's alone"):
        open_own(tmp_path / "path")


@needs_root
def test_a_file_of_another_user_is_rejected(tmp_path: Path) -> None:
    create(tmp_path / "path").close()
    os.chown(tmp_path / "path", 12345, 12345)
    with pytest.raises(PermissionError, match="not this user's alone"):
        open_own(tmp_path / "path")


@pytest.mark.parametrize("way", ["replacing", "atomic_file"])
def test_a_full_disk_names_the_file(way: str, tmp_path: Path) -> None:
    code = """
        import resource, sys
        from pathlib import Path
        from llamac.export.targets import atomic_file
        from llamac.format.private_files import replacing
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, resource.RLIM_INFINITY))
        try:
            with {"replacing": replacing, "atomic_file": atomic_file}[sys.argv[1]](Path(sys.argv[2])) as file:
                file.write(bytes(2_000))  # which stays in a buffer until the end
        except OSError as error:
            print(error.filename)
    """
    assert output_of(code, way, tmp_path / "file", **UNCOUNTED) == f"{tmp_path / 'file'}\n"
    assert list(tmp_path.iterdir()) == []


# ---- files of processes that were killed


def test_only_files_that_no_process_writes_are_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".llamac-1-a").touch()
    (tmp_path / ".llamac-1-b").mkdir()
    (tmp_path / "victim").touch()
    (tmp_path / ".llamac-1-c").symlink_to(tmp_path / "victim")
    os.mkfifo(tmp_path / ".llamac-1-d")
    with replacing(tmp_path / "file") as file:
        remove_abandoned_in(tmp_path)
        kept = {Path(file.name).name, "victim", ".llamac-1-c", ".llamac-1-d"}
        assert {path.name for path in tmp_path.iterdir()} == kept
        file.write(b"whole")
    remove_abandoned_in(tmp_path)
    assert (tmp_path / "file").read_bytes() == b"whole"
    (tmp_path / ".llamac-2").touch()
    monkeypatch.setattr(private_files, "try_lock", lambda descriptor: None)  # a disk without locks
    remove_abandoned_in(tmp_path)
    assert (tmp_path / ".llamac-2").exists()
    os.utime(tmp_path / ".llamac-2", (1, 1))
    remove_abandoned_in(tmp_path)
    assert not (tmp_path / ".llamac-2").exists()
    remove_abandoned_in(tmp_path / "absent")


def test_a_new_file_that_another_process_takes_for_an_abandoned_one_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Path] = []

    def take_first(path: Path) -> BinaryIO:
        file = create(path)
        if not taken:
            remove_abandoned_in(path.parent)
            taken.append(path)
        return file

    monkeypatch.setattr(private_files, "create", take_first)
    with replacing(tmp_path / "file") as file:
        assert Path(file.name) != taken[0]
        file.write(b"whole")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"whole"


@needs_root
def test_abandoned_files_of_another_user_stay(tmp_path: Path) -> None:
    (tmp_path / ".llamac-1").touch()
    os.chown(tmp_path / ".llamac-1", 12345, 12345)
    remove_abandoned_in(tmp_path)
    assert (tmp_path / ".llamac-1").exists()


# ---- locks


def test_a_lock_excludes_other_holders_until_it_is_released(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locked(path) as held:
        assert held
        with pytest.raises(BlockingIOError, match="locked by another process"), locked(path, wait=False):
            pass
    with locked(path, wait=False) as held:
        assert held


def test_a_waiting_thread_reports_and_then_gets_the_lock(tmp_path: Path) -> None:
    path, reports, waiting, order = tmp_path / "lock", [], threading.Event(), []

    def report(*progress: object) -> None:
        reports.append(progress)
        waiting.set()

    def wait() -> None:
        with locked(path, report):
            order.append("second")

    thread = threading.Thread(target=wait)
    with locked(path):
        thread.start()
        assert waiting.wait(60)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    assert reports == [("waiting for another process", done, 1) for done in (0, 1)]


def test_a_waiting_process_does_not_lock_a_deleted_file(tmp_path: Path) -> None:
    """If the holder deletes the lock file, a waiting process locks the new file instead."""
    path, waiting, is_locked = tmp_path / "lock", threading.Event(), []

    def wait() -> None:
        with locked(path, lambda *_: waiting.set()):
            try:
                with locked(path, wait=False):
                    is_locked.append(False)
            except BlockingIOError:
                is_locked.append(True)

    thread = threading.Thread(target=wait)
    with locked(path):
        thread.start()
        assert waiting.wait(60)
        path.unlink()
        path.touch()
    thread.join()
    assert is_locked == [True]


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_locks_is_reported(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> bool:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("filelock.lock_descriptor", refuse)
    with create(tmp_path / "file") as file:
        assert try_lock(file.fileno()) is None
    with locked(tmp_path / "lock") as held, locked(tmp_path / "lock") as other:
        assert (held, other) == (False, False)
    code = errno.EIO
    with pytest.raises(OSError, match="Input/output error"), locked(tmp_path / "lock"):
        pass


def test_a_lock_ends_with_its_process_but_not_with_a_child(tmp_path: Path) -> None:
    code = """
        import os, sys
        from pathlib import Path
        from llamac.format.private_files import locked
        path = Path(sys.argv[1])
        reader, writer = os.pipe()
        with locked(path):
            child = os.fork()
            if not child:  # it inherits the open file
                os.close(writer)
                os.read(reader, 1)
                os._exit(0)
        with locked(path, wait=False) as held:
            print(held)
        os.close(writer)
        os.waitpid(child, 0)
        with locked(path):
            if not os.fork():
                os._exit(0)  # without releasing anything
            os.wait()
            os.kill(os.getpid(), 9) if len(sys.argv) > 2 else None
    """
    assert output_of(code, tmp_path / "lock") == "True\n"
    with locked(tmp_path / "lock", wait=False) as held:
        assert held
