"""Output files and folders, which appear complete or not at all.

Everything is written under a temporary name in the target's folder, `.NAME.ID.partial`, and renamed at the end. The
writer locks the temporary file; the lock ends with the writer's process. So the next export to the same target can
recognize and remove files that a killed process left.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from llamac.errors import ExportError
from llamac.format import private_files
from llamac.format.private_files import create, lock_new, open_own
from llamac.sizes import size_text

# What a system reports if a file cannot grow.
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskFullError(ExportError):
    """The disk does not have enough free space."""


def check_target(out: Path, to: str, overwrite: bool) -> None:
    """Check that `out` can be written. Removes temporary files that killed exports to `out` left.

    Args:
        out: The target.
        to: The output format, as in `llamac.export.export`.
        overwrite: Whether an existing file can be replaced.

    Raises:
        ExportError: If `out` cannot be written, or exists and must not be replaced.
    """
    remove_abandoned(out)
    if not out.parent.is_dir():
        raise ExportError(f"the folder {out.parent} does not exist")
    if out.is_symlink() and not (real := Path(os.path.realpath(out))).parent.is_dir():
        raise ExportError(f"{out} is a link to {real}, but the folder {real.parent} does not exist")
    if to == "hf":
        if out.exists() and (not out.is_dir() or any(out.iterdir())):  # never replace a directory: it may hold more
            raise ExportError(f"{out} exists and is not an empty directory: choose another name")
        return
    if out.is_dir():
        raise ExportError(f"{out} is a directory, expected the name of a file")
    check_replaceable(out)
    if out.exists() and not overwrite:
        raise ExportError(f"{out} exists: choose another name, or allow overwriting (--force)")


def check_new(out: Path) -> None:
    """Check that `out` can be written, for commands that replace no files.

    Raises:
        ExportError: If `out` cannot be written, or exists.
    """
    if out.is_file():
        raise ExportError(f"{out} exists: choose another name")
    check_target(out, "llamac", overwrite=False)


def check_replaceable(target: Path) -> None:
    """Check that a target can be replaced by a file.

    Raises:
        ExportError: If it is a directory, a device, a pipe or anything else but a regular file.
    """
    if target.exists() and not target.is_file():
        raise ExportError(f"{target} is not a regular file and is never replaced: choose another name")


def check_space(target: Path, needed: int, partial: Path | None = None) -> None:
    """Check the free space on the target's disk.

    Args:
        target: The target, or the folder of a temporary file.
        needed: The bytes that will be written.
        partial: An unfinished file that will be reused. Its blocks count as free.

    Raises:
        DiskFullError: If there is not enough space.
    """
    path = Path(os.path.realpath(target))
    folder = path if path.is_dir() else path.parent
    free = shutil.disk_usage(folder).free
    if partial is not None and partial.exists():
        free += 512 * partial.stat().st_blocks
    if free < needed:
        raise DiskFullError(f"the disk of {folder} has {size_text(free)} free, but {size_text(needed)} are needed")


@contextlib.contextmanager
def atomic_file(target: Path, partial: Path | None = None, *, sync: bool = True) -> Iterator[BinaryIO]:
    """Open a new file that replaces `target` when the block succeeds, and is deleted when it fails.

    If the target is a symbolic link, the file it points to is replaced. The new file gets the permissions of the
    replaced one.

    Args:
        target: The target.
        partial: The path to use, in the target's folder, until the file is complete. An existing file there is resumed.
            The file is not deleted if the block is interrupted (Ctrl-C, or the process ends) instead of failing.
        sync: Whether to wait until the disk has the file. Otherwise a crash of the machine can leave it damaged.
    """
    target = Path(os.path.realpath(target))
    temporary = partial
    try:
        with errors_naming(target):
            if partial is None:
                for temporary in _new_paths(target, target.parent):
                    file = create(temporary)
                    if lock_new(temporary, file.fileno()):
                        break
                    file.close()
            else:
                file = _open_partial(partial)
        with errors_naming(target, *DISK_FULL), file:  # closing fails again if a write has failed
            with contextlib.suppress(FileNotFoundError):
                os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
            with errors_naming(target):
                os.replace(file.name, target)
    except BaseException as error:
        if temporary is not None and (partial is None or isinstance(error, Exception)):
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise


@contextlib.contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Create a new folder whose files become the target's when the block succeeds, and are deleted when it fails.

    The target must not exist, or be an empty folder. An empty folder is not replaced, because it can be a mount point
    or a shell's working directory; the files are moved into it one by one.
    """
    target = Path(os.path.realpath(target))
    exists = target.is_dir()
    moved: list[Path] = []
    with _temporary_folder(target, target if exists else target.parent) as folder:
        try:
            yield folder
            with errors_naming(target):
                if not exists:
                    os.replace(folder, target)
                    return
                for path in sorted(folder.iterdir()):
                    moved.append(target / path.name)
                    os.rename(path, moved[-1])
        except BaseException:
            for path in moved:
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def scratch_folder(target: Path) -> Iterator[Path]:
    """Create a folder for temporary files next to `target`; it is deleted when the block ends."""
    target = Path(os.path.realpath(target))
    with _temporary_folder(target, target.parent) as folder:
        yield folder


@contextlib.contextmanager
def _temporary_folder(target: Path, parent: Path) -> Iterator[Path]:
    """Create a locked folder in `parent`; delete it, unless it was renamed, when the block ends."""
    folder, descriptor = None, -1
    try:
        with errors_naming(target):
            for folder in _new_paths(target, parent):
                folder.mkdir()
                descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
                if lock_new(folder, descriptor):
                    break
                os.close(descriptor)
        assert folder is not None
        with errors_naming(target, *DISK_FULL):
            yield folder
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        if descriptor >= 0:
            os.close(descriptor)


def remove_abandoned(target: Path) -> None:
    """Delete the temporary files and folders of exports to `target` whose processes were killed."""
    target = Path(os.path.realpath(target))
    pattern = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}\.partial")
    for folder in (target.parent, target):
        with contextlib.suppress(OSError):
            private_files.remove_abandoned([path for path in folder.iterdir() if pattern.fullmatch(path.name)])


def _new_paths(target: Path, folder: Path) -> Iterator[Path]:
    """Yield unused names for temporary files of `target`, after removing abandoned ones."""
    remove_abandoned(target)
    while True:
        yield folder / f".{target.name}.{secrets.token_hex(4)}.partial"


def _open_partial(path: Path) -> BinaryIO:
    """Open an unfinished file, or create it. Anything that is not this user's own file is replaced, not followed."""
    try:
        return open_own(path)
    except FileNotFoundError:
        pass
    except OSError:
        os.unlink(path)
    return create(path)


@contextlib.contextmanager
def errors_naming(target: Path, *codes: int) -> Iterator[None]:
    """Re-raise OSErrors (all, or those with the given codes) with the target's name, not that of a temporary file."""
    try:
        yield
    except OSError as error:
        if codes and error.errno not in codes:
            raise
        raise OSError(error.errno, error.strerror, str(target)) from None
