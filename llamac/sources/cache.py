"""The cache of converted models: a folder of flat files, each named by a hash of everything that determines its bytes.

    models/KEY.bin, KEY.json        a model and its note; the note's modification time is the model's last use; until
                                    the next boot, the disk may lack parts of a new model
    models/.KEY.STATE.ID.partial    an interrupted conversion, which the next process resumes; STATE identifies
                                    the source files' sizes and times and, for a draft, the boot; ID is random
    locks/KEY.lock                  locked by the process that converts
    sources/ID.json                 SHA-256 of a source's files, valid while their sizes, times and inodes are the same

KEY is a hash of the contents of the source's files, the options, and the versions of exporter and format. The key of a
draft is made from the files' stamps instead of their contents (finishing.py). Files that are damaged, that are not
regular files, or that belong to an untrusted user count as absent. The cache never deletes a file that it did not
write.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from llamac import __version__
from llamac.arguments import CacheDir, file_path
from llamac.errors import ArgumentError, BusyError, ExportError, LlamacError
from llamac.format.cache_folder import default_folder
from llamac.format.flatfile import MAGIC, NUMERICS, SECTIONS, VERSION, FlatFile
from llamac.format.private_files import create, locked, open_own, open_regular
from llamac.format.strict_json import MAX_BYTES, parse_object
from llamac.progress import Progress, silent
from llamac.sources.cache_entries import Entry, Removal
from llamac.sources.digests import digests_of, remembered_digest, sha256_hex, stamps_of

# Raised when the exporter writes other bytes for the same source and options.
CONVERSION = 6
VERSIONS = {"llamac": __version__, "conversion": CONVERSION, "format": VERSION, "numerics": NUMERICS}

# An interrupted conversion of this age is abandoned.
FORGOTTEN_S = 7 * 86400
TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# Models that llamac converted. See `llamac cache`.\n"

SHOWN = 12  # candidates in a message

_KEY = r"[0-9a-f]{64}"
_PARTIAL = re.compile(rf"\.({_KEY})\.([0-9a-f]{{16}})\.[0-9a-f]{{16}}\.partial")
_MODEL = re.compile(rf"({_KEY})\.bin")
_NOTE = re.compile(rf"\.?({_KEY})\.json(\.[0-9a-f]+\.partial)?")
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


def open_cache(cache_dir: CacheDir) -> Cache | None:
    """Open the cache in a folder. None is the default folder; False returns None."""
    if cache_dir is False:
        return None
    return Cache(default_folder() if cache_dir is None else file_path(cache_dir, "cache_dir"))


class Cache:
    """The cache in a folder. Reading creates nothing and needs no permission to write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._models = folder / "models"
        self._sources = folder / "sources"
        self._locks = folder / "locks"

    # ---- sources

    def digests(self, source: Path, files: Mapping[str, Path], progress: Progress = silent) -> dict[str, str]:
        """The SHA-256 of each file of a source. Files that have not changed since the last time are not read."""
        known = self._known_digests(source)
        found, stamps = digests_of(files, known, progress)
        if stamps != {name: known.get(name) for name in stamps}:
            with contextlib.suppress(OSError):  # without a note the files are read again next time
                self._make_folders()
                note = {"path": os.path.realpath(source), "files": {**known, **stamps}}
                _write_note(self._source_note(source), note)
        return found

    def remembered_digests(self, source: Path, files: Mapping[str, Path]) -> dict[str, str] | None:
        """The SHA-256 of each file of a source without reading any; None if one of them is unknown."""
        known = self._known_digests(source)
        found = {name: remembered_digest(known.get(name), path) for name, path in files.items()}
        return None if None in found.values() else {name: digest for name, digest in found.items() if digest}

    def _source_note(self, source: Path) -> Path:
        return self._sources / f"{sha256_hex(os.path.realpath(source).encode(errors='surrogateescape'))}.json"

    def _known_digests(self, source: Path) -> dict[str, Any]:
        known = (self._read_note(self._source_note(source)) or {}).get("files")
        return known if isinstance(known, dict) else {}

    # ---- models

    def path(self, key: str) -> Path:
        """The path of the model with this key, which need not exist."""
        return self._models / f"{key}.bin"

    def _note(self, key: str) -> Path:
        return self._models / f"{key}.json"

    def find(self, key: str, memory: str = "map") -> FlatFile | None:
        """Open the model with this key; None if it does not exist or is damaged."""
        note, path = self._note(key), self.path(key)
        known = self._read_note(note)
        if known is None or not self._is_trusted_file(path):
            return None
        file = None
        try:
            file = FlatFile(path, memory)
            stamp = _model_stamp(path)
            if file.header["id"].hex() != known.get("id"):
                raise LlamacError("the note describes another model")
            unsynced = known.pop("unsynced", None)
            # written to, copied, or lost by a crash before the disk had it: only reading all of it can tell
            if stamp != known.get("stamp") or (unsynced is not None and unsynced != _boot_id()):
                _verify(file)
                with contextlib.suppress(OSError):
                    _write_note(note, {**known, "stamp": stamp})
        except (LlamacError, OSError):
            if file is not None:
                file.close()
            return None
        with contextlib.suppress(OSError, NotImplementedError):
            os.utime(note, follow_symlinks=False)
        return file

    def add(
        self,
        key: str,
        source: str,
        files: Mapping[str, Path],
        write: Callable[[Path], str],
        exclusive: bool,
        is_draft: bool = False,
    ) -> None:
        """Convert a model into the cache.

        An interrupted conversion is resumed only if no file of the source has been touched since. A file that was
        changed during the conversion and then changed back would leave parts of both states.

        Args:
            key: The model's key.
            source: The source's name, as the user gave it.
            files: The source's files.
            write: Writes the model to a path and returns its dtype. It need not wait for the disk. If a file exists
                there, it is an interrupted conversion to resume. If `write` is interrupted, it leaves the file there.
            exclusive: Whether `converting` holds the lock. Without it, nothing is resumed or left for later.
            is_draft: Whether the key is a draft's. Nothing can verify an interrupted draft, so another boot does not
                resume it.
        """
        note, path, boot = self._note(key), self.path(key), _boot_id()
        state = sha256_hex(json.dumps([*stamps_of(files).items(), *([boot] if is_draft else [])]).encode())[:16]
        partial = self._resumable(key, state) if exclusive and not (is_draft and boot is None) else None
        partial = partial or self._models / f".{key}.{state}.{secrets.token_hex(8)}.partial"
        if exclusive:
            self._remove_partials(key, keep=partial)
        _write_note(note, {"source": source, **VERSIONS})  # first, so that `prune` recognizes leftovers
        try:
            dtype = write(partial)
            file = FlatFile(partial)
            model: dict[str, Any] = {"id": file.header["id"].hex(), "stamp": _model_stamp(partial)}
            model |= {"hashed": file.is_hashed} if is_draft else {"sizes": _sizes(files)}
            file.close()
            if boot is not None:
                model["unsynced"] = boot
            else:
                _sync(partial)
            os.replace(partial, path)
            _write_note(note, {"source": source, "dtype": dtype, **model, **VERSIONS})
        except BaseException as error:
            if not exclusive or isinstance(error, Exception):
                partial.unlink(missing_ok=True)
            if not partial.exists() and "id" not in (self._read_note(note) or {}):
                note.unlink(missing_ok=True)
            raise

    def publish(self, draft: str, key: str, files: Mapping[str, Path], status: os.stat_result, tables: bytes) -> bool:
        """Finish a draft, unless it has changed, or another process finishes it or has done so.

        At every moment the model is found under one key, or this process has the locks of both. If the process is
        killed, an interrupted conversion with the final key is left, which is verified before it is resumed.

        Args:
            draft: The draft's key.
            key: The final key.
            files: The source's files.
            status: The status of the draft that was hashed.
            tables: Its tables with the hashes.
        """
        path, note = self.path(draft), self._note(draft)
        with self._exclusively(draft) as one, self._exclusively(key) as other:
            known = self._read_note(note) or {}
            found = path.stat()
            is_same = (found.st_ino, *_model_stamp(path)) == (status.st_ino, status.st_size, status.st_mtime_ns)
            if not (one and other and is_same and known.get("stamp") == _model_stamp(path)):
                return False
            if finished := self.find(key):
                finished.close()
            else:

                def adopt(partial: Path) -> str:
                    os.replace(path, partial)
                    with open_own(partial) as file:
                        file.write(tables)
                    return str(known.get("dtype"))

                self.add(key, str(known.get("source")), files, adopt, exclusive=True)
            self._remove_model(draft)
        return True

    def may_know(self, files: Mapping[str, Path]) -> bool:
        """Whether a finished model was converted from files of these sizes, so perhaps from these files."""
        sizes = _sizes(files)
        paths: list[Path] = []
        with contextlib.suppress(OSError):  # not a folder, or not this user's: `converting` reports it
            paths = [path for path in _regular_files(self._models) if path.suffix == ".json"]
        return any((self._read_note(path) or {}).get("sizes") == sizes for path in paths)

    @contextlib.contextmanager
    def converting(self, key: str, progress: Progress = silent) -> Iterator[bool]:
        """Hold the lock for writing the model with this key, waiting for any other process that has it.

        Yields:
            Whether the lock is held: a file system without locks lets several processes convert at once.

        Raises:
            OSError: If the folder cannot be written.
        """
        self._make_folders()
        with locked(self._locks / f"{key}.lock", progress) as held:
            self._remove_forgotten()
            for path in (self.path(key), self._note(key)):
                if os.path.lexists(path) and not _is_regular(path):  # not written by this module
                    raise OSError(errno.EEXIST, f"{path} is not a regular file")
            yield held

    def _make_folders(self) -> None:
        if not self.folder.is_dir():
            with contextlib.suppress(FileExistsError):  # another process was faster, or it is a file: the next fails
                self.folder.mkdir(mode=0o700, parents=True)
        for part in (self._models, self._sources, self._locks):
            with contextlib.suppress(FileExistsError):
                part.mkdir()
            if not stat.S_ISDIR(part.lstat().st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(part))
        tag = self.folder / "CACHEDIR.TAG"  # makes backups skip the folder
        if not os.path.lexists(tag):
            with contextlib.suppress(FileExistsError), create(tag) as file:
                file.write(TAG.encode())

    def _resumable(self, key: str, state: str) -> Path | None:
        """The interrupted conversion of a model from the source's present state, if it is this user's alone."""
        for partial, owner in self._partials():
            if owner == key and f".{state}." in partial.name:
                with contextlib.suppress(OSError), open_own(partial):
                    return partial
        return None

    def _partials(self) -> Iterator[tuple[Path, str]]:
        """(path, key of its model) of every interrupted conversion."""
        for path in _regular_files(self._models):
            if name := _PARTIAL.fullmatch(path.name):
                yield path, name[1]

    def _remove_partials(self, key: str, keep: Path | None = None) -> None:
        for partial, owner in self._partials():
            if owner == key and partial != keep:
                partial.unlink(missing_ok=True)

    def _remove_forgotten(self) -> None:
        for partial, owner in self._partials():
            if _is_forgotten(partial):
                with contextlib.suppress(OSError), self._exclusively(owner) as exclusive:
                    if exclusive is not False:
                        partial.unlink(missing_ok=True)
                        known = self._read_note(self._note(owner))
                        if self._is_damaged(self._note(owner)) if known is None else "id" not in known:
                            self._remove_model(owner)

    def _remove_model(self, key: str) -> None:
        self._remove_partials(key)
        for path in (self.path(key), self._note(key)):
            if not path.is_dir():
                path.unlink(missing_ok=True)

    def _is_idle(self, key: str) -> bool:
        """Whether no process is writing this model now."""
        if not (self._locks / f"{key}.lock").exists():
            return True
        with contextlib.suppress(OSError), self._exclusively(key) as exclusive:
            return exclusive is not False
        return False

    @contextlib.contextmanager
    def _exclusively(self, key: str) -> Iterator[bool | None]:
        """Keep other processes from writing a model while the block runs.

        Yields:
            True; False if another process is writing it; None on a file system without locks.

        Raises:
            OSError: If this process may not write to the cache.
        """
        with contextlib.ExitStack() as stack:
            exclusive: bool | None = False
            try:
                self._locks.mkdir(exist_ok=True)
                exclusive = stack.enter_context(locked(self._locks / f"{key}.lock", wait=False)) or None
            except OSError as error:  # locked, or the lock is not a regular file
                if error.errno in _READ_ONLY:
                    raise
            yield exclusive

    # ---- listing and deleting

    def entries(self) -> list[Entry]:
        """The models, the most recently used first."""
        found = []
        partials, boot = {key: _size_of(partial) for partial, key in self._partials()}, _boot_id()
        for note in _regular_files(self._models):
            name = _NOTE.fullmatch(note.name)
            known = self._read_note(note) if name and note.name == f"{name[1]}.json" else None
            if name is None or known is None or "conversion" not in known:
                continue
            source, dtype = (str(known.get(what, "unknown")) for what in ("source", "dtype"))
            size = _size_of(self.path(name[1])) or partials.get(name[1], 0)
            problem = None
            if "id" not in known:
                problem = "interrupted" if self._is_idle(name[1]) else "being converted"
            elif not size:
                problem = "the model is missing"
            elif {what: known.get(what) for what in VERSIONS} != VERSIONS:
                problem = "made by another version of llamac"
            elif known.get("hashed") is False and known.get("unsynced", boot) != boot:
                problem = "not verified before the system's last start"
            found.append(Entry(name[1], source, dtype, size, _time_of(note), problem))
        for path in _regular_files(self._models):
            name = _MODEL.fullmatch(path.name)
            if name and self._is_trusted_file(path) and self._is_damaged(self._note(name[1])) and _is_flat(path):
                found.append(
                    Entry(name[1], "unknown", "unknown", _size_of(path), _time_of(path), "its note is damaged")
                )
        return sorted(found, key=lambda entry: (-entry.used, entry.key))

    def select(self, name: str) -> Entry:
        """Find the only model with a name.

        Args:
            name: A model's id, or its source as in `entries`, or the beginning of either; or the path of the source or
                of the model.

        Raises:
            ArgumentError: If not exactly one model has this name; the message lists the candidates.
        """
        entries = self.entries()
        names = {name, os.path.abspath(name)} if name else set()
        found = [entry for entry in entries if names & {entry.source, entry.key, str(self.path(entry.key))}]
        if name and not found:
            found = [entry for entry in entries if entry.source.startswith(name) or entry.key.startswith(name)]
        if len(found) == 1:
            return found[0]
        problem = f"{len(found)} models match {name!r}" if found else f"no model matches {name!r}"
        candidates = [f"{entry.id} ({entry.dtype}, {entry.source})" for entry in found or entries]
        more = f" and {len(candidates) - SHOWN} more" if len(candidates) > SHOWN else ""
        expected = f"expected one of {'; '.join(candidates[:SHOWN])}{more}" if candidates else "the cache is empty"
        raise ArgumentError(f"{problem}; {expected}")

    def remove(self, entry: Entry) -> Removal:
        """Delete a model.

        Raises:
            BusyError: If another process is converting it.
        """
        with self._exclusively(entry.key) as exclusive:
            if exclusive is False:
                raise BusyError(f"{entry.source} is being converted; wait for that process or end it")
            self._remove_model(entry.key)
        return Removal(entry.source, "", entry.bytes)

    def prune(
        self,
        *,
        everything: bool = False,
        older_than: float | None = None,
        max_bytes: int | None = None,
        dry_run: bool = False,
    ) -> list[Removal]:
        """Delete unusable files.

        These are interrupted conversions, models of other versions or without a readable note, and notes of missing
        sources.

        Models that other processes are writing are not deleted. An open model can be deleted, and stays usable until it
        is closed.

        Args:
            everything: Also delete all models.
            older_than: Also delete models not used for this many seconds.
            max_bytes: Then delete the least recently used models until the rest has at most this size.
            dry_run: Delete nothing.

        Returns:
            What was deleted, or would be deleted.
        """
        now, gone, pruned = time.time(), [], set()
        entries = self.entries()
        size = sum(entry.bytes for entry in entries)
        # unusable models first: the space they free need not come from others
        for entry in sorted(entries, key=lambda entry: (entry.problem is None, entry.used)):
            reason = entry.problem
            if everything:
                reason = reason or "all"
            if older_than is not None and now - entry.used > older_than:
                reason = reason or f"not used for {(now - entry.used) / 86400:.1f} days"
            if max_bytes is not None and size > max_bytes:
                reason = reason or "the cache is too large"
            if reason is None:
                continue
            with self._exclusively(entry.key) as exclusive:
                if exclusive is False or (exclusive is None and entry.problem == "interrupted"):
                    continue
                pruned.add(entry.key)
                size -= entry.bytes
                gone.append(Removal(entry.source, reason, entry.bytes))
                if not dry_run:
                    self._remove_model(entry.key)
        for partial, key in self._partials():
            with self._exclusively(key) as exclusive:
                if key not in pruned and (exclusive or (exclusive is None and _is_forgotten(partial))):
                    gone += self._remove([(partial, partial.name, "interrupted")], dry_run)
        gone += self._remove(self._stale_notes(everything), dry_run)
        if not dry_run:
            self._remove_locks()
        return gone

    def _stale_notes(self, everything: bool) -> Iterator[tuple[Path, str, str]]:
        """Yield each note's path, what it is, and why it can go."""
        for folder in (self._sources, self._models):
            for note in _regular_files(folder):
                name = _NOTE.fullmatch(note.name)
                if name is None:
                    continue
                if note.name != f"{name[1]}.json":
                    if time.time() - _time_of(note) > 60:  # writing a note takes much less
                        yield note, note.name, "interrupted"
                elif folder is self._sources:
                    path = (self._read_note(note) or {}).get("path")
                    if isinstance(path, str) and (everything or not os.path.exists(path)):
                        yield note, f"checksums of {path}", "all" if everything else "the source is missing"

    def _remove(self, found: Iterable[tuple[Path, str, str]], dry_run: bool) -> Iterator[Removal]:
        for path, what, reason in list(found):
            removal = Removal(what, reason, _size_of(path))
            if not dry_run:
                path.unlink(missing_ok=True)
            yield removal

    def _remove_locks(self) -> None:
        for lock in _regular_files(self._locks):
            key = re.fullmatch(rf"({_KEY})\.lock", lock.name)
            if key and not self.path(key[1]).exists():
                with contextlib.suppress(OSError), locked(lock, wait=False) as held:
                    if held:
                        lock.unlink()

    # ---- reading

    def _is_trusted(self, status: os.stat_result) -> bool:
        """Whether a file belongs to this user, to root, or to the owner of the cache folder."""
        return status.st_uid in (os.geteuid(), 0) or status.st_uid == self.folder.stat().st_uid

    def _is_trusted_file(self, path: Path) -> bool:
        try:
            status = path.lstat()
        except OSError:
            return False
        return stat.S_ISREG(status.st_mode) and self._is_trusted(status)

    def _read_note(self, path: Path) -> dict[str, Any] | None:
        """A note's values; None for anything but a note written by this module."""
        try:
            return self._parse_note(path)
        except (OSError, ExportError):
            return None

    def _is_damaged(self, note: Path) -> bool:
        """Whether a note is missing or does not parse. One that this process may not or cannot read may be sound."""
        try:
            self._parse_note(note)
        except (FileNotFoundError, ExportError):
            return True
        except OSError:
            pass
        return False

    def _parse_note(self, path: Path) -> dict[str, Any]:
        with os.fdopen(open_regular(path), "rb") as file:
            if not self._is_trusted(os.fstat(file.fileno())):
                raise PermissionError(errno.EPERM, "the note belongs to an untrusted user", str(path))
            return parse_object(file.read(MAX_BYTES), str(path))


def key_of(digests: Mapping[str, str], *options: str | bool) -> str:
    """The key of the conversion of files with these SHA-256 and options."""
    return sha256_hex(json.dumps([VERSIONS, options, sorted(digests.items())]).encode())


# ---- files


def _sizes(files: Mapping[str, Path]) -> list[int]:
    return sorted(path.stat().st_size for path in files.values())


def _model_stamp(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]


def _boot_id() -> str | None:
    """What identifies the time since the system started; None where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip() or None
    except (OSError, ValueError):
        return None


def _sync(path: Path) -> None:
    """Wait until the disk has a file."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _verify(file: FlatFile) -> None:
    """Raise LlamacError if anything in a file is damaged."""
    for name in SECTIONS[:-1]:
        file.section(name)
    for record, problem in file.verify_data():
        if problem:
            raise LlamacError(f"tensor {record.name}: {problem}")


def _is_regular(path: Path) -> bool:
    return stat.S_ISREG(path.lstat().st_mode)


def _is_flat(path: Path) -> bool:
    """Whether a file begins like a model."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def _regular_files(folder: Path) -> list[Path]:
    """The regular files of a folder; none if the folder does not exist."""
    try:
        return sorted(Path(entry.path) for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False))
    except FileNotFoundError:
        return []


def _time_of(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _is_forgotten(partial: Path) -> bool:
    return time.time() - _time_of(partial) > FORGOTTEN_S


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _write_note(path: Path, values: dict[str, Any]) -> None:
    """Write a note completely or not at all."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with create(partial) as file:
            file.write(json.dumps(values).encode())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
