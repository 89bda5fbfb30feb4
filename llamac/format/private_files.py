"""Opens and locks files in folders to which other users can write. Never follows links or waits for pipes.

The library filelock takes locks of the operating system (flock), which end with the process. Some network file systems
have no locks. Every function here reports that instead of failing.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from llamac.progress import Progress, silent

TEMPORARY = ".llamac-"  # begins the names of files that are not complete yet
STALE_S = 3600.0  # age from which such a file is one of a process that ended, on disks without locks

# What systems report for a lock on a file system without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF)


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file and return its descriptor.

    Raises:
        OSError: Also if the path is a symbolic link, a pipe, a device or a folder.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def open_own(path: Path) -> BinaryIO:
    """Open an existing file for reading and writing.

    Raises:
        OSError: Also if the file is not regular, belongs to another user, or has several hard links.
    """
    descriptor = open_regular(path, os.O_RDWR)
    status = os.fstat(descriptor)
    if status.st_uid == os.geteuid() and status.st_nlink == 1:
        return open(path, "r+b", opener=lambda name, flags: descriptor)
    os.close(descriptor)
    raise PermissionError(errno.EPERM, "the file is not this user's alone", str(path))


def create(path: Path) -> BinaryIO:
    """Create a file for reading and writing.

    Raises:
        FileExistsError: If anything exists at the path, including a dangling link.
    """
    return open(path, "x+b", opener=lambda name, flags: open_regular(path, flags))


@contextlib.contextmanager
def replacing(path: Path, *, sync: bool = True) -> Iterator[BinaryIO]:
    """Open a new file that replaces `path` when the block succeeds, and is deleted when it fails.

    The new file is locked until it has its name, so `remove_abandoned` recognizes the files of killed processes.

    Args:
        path: The file. If it is a symbolic link, the file that it points to is replaced.
        sync: Whether to wait until the disk has the file. Otherwise a crash of the machine can leave it damaged.

    Raises:
        OSError: Also if something other than a regular file is at the path.
    """
    path = Path(os.path.realpath(path))
    mode = None
    with contextlib.suppress(FileNotFoundError):
        mode = os.stat(path).st_mode
    if mode is not None and not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    try:
        temporary, file = _create_locked(path.parent)
    except OSError as error:
        error.filename = str(path)
        raise
    try:
        with file:
            if mode is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(mode))
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
            os.replace(temporary, path)  # before closing it releases the lock
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError) and error.errno and error.filename is None:  # a full disk names no file
            error.filename = str(path)
        raise


def _create_locked(folder: Path) -> tuple[Path, BinaryIO]:
    """Create a temporary file and lock it."""
    while True:
        path = folder / f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"
        file = create(path)
        if lock_new(path, file.fileno()):
            return path, file
        file.close()


def lock_new(path: Path, descriptor: int) -> bool:
    """Lock a new temporary file or folder. False if another process took it for an abandoned one first."""
    held = try_lock(descriptor)
    if held is None:  # this disk has no locks, so no process can mistake the file for an abandoned one
        return True
    return held and is_at(path, descriptor)


def remove_abandoned(paths: Iterable[Path], stale_s: float = math.inf) -> None:
    """Delete those of some temporary files and folders that no process has locked: their processes were killed.

    Files of other users stay. On disks without locks, files stay until their last change is `stale_s` seconds ago.
    """
    for path in paths:
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                status = os.fstat(descriptor)
                held = try_lock(descriptor)
                is_abandoned = time.time() - status.st_mtime > stale_s if held is None else held
                if status.st_uid != os.geteuid() or not is_abandoned:
                    continue
                if stat.S_ISDIR(status.st_mode):
                    shutil.rmtree(path)
                elif stat.S_ISREG(status.st_mode):
                    os.unlink(path)
            finally:
                os.close(descriptor)


def remove_abandoned_in(folder: Path) -> None:
    """Delete the files of a folder that `replacing` left behind in processes that were killed."""
    with contextlib.suppress(OSError):
        remove_abandoned([path for path in folder.iterdir() if path.name.startswith(TEMPORARY)], STALE_S)


def try_lock(descriptor: int) -> bool | None:
    """Lock an open file or folder until its descriptor is closed.

    Returns:
        Whether the lock is now held; None on a file system without locks.
    """
    from filelock import lock_descriptor

    try:
        return bool(lock_descriptor(descriptor, blocking=False))
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise


@contextlib.contextmanager
def locked(path: Path, progress: Progress = silent, wait: bool = True) -> Iterator[bool]:
    """Hold a lock while the block runs.

    Args:
        path: The lock file, which is created if it does not exist.
        progress: Called if another process holds the lock.
        wait: Whether to wait for that process.

    Yields:
        Whether the lock is held: True, or False on a file system without locks.

    Raises:
        BlockingIOError: If another process holds the lock and `wait` is false.
    """
    while True:
        descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
        try:
            held = try_lock(descriptor)
            if held is False:
                if not wait:
                    raise BlockingIOError(errno.EAGAIN, "locked by another process", str(path))
                _wait_for_lock(descriptor, progress)
            # If the holder has deleted the file, this lock is on a file without a name and protects nothing.
            if held is None or is_at(path, descriptor):
                yield held is not None
                return
        finally:
            _unlock(descriptor)
            os.close(descriptor)


def _wait_for_lock(descriptor: int, progress: Progress) -> None:
    from filelock import lock_descriptor

    progress("waiting for another process", 0, 1)
    lock_descriptor(descriptor)
    progress("waiting for another process", 1, 1)


def is_at(path: Path, descriptor: int) -> bool:
    """Whether an open file is the one at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _unlock(descriptor: int) -> None:
    """Release the lock. Closing alone does not: children forked while it was held have the same open file."""
    from filelock import unlock_descriptor

    with contextlib.suppress(OSError):
        unlock_descriptor(descriptor)
