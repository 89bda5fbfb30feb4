"""The cache of converted models: a folder of flat files, each under the SHA-256 of all that decides its bytes.

    models/KEY.bin, KEY.json    a model, and what is known of it; the latter's time of change is that of the last use
    models/.KEY.bin.ID.partial  what was written of a model until its conversion was broken off; the next one goes on
    locks/KEY.lock              held by the process that converts; the system lets go of it however that process ends
    sources/ID.json             SHA-256 of a source's files, good as long as these have the same size, times and inode

KEY is a hash over the contents of the source's files, the options and the versions of exporter and format. Whatever is
not as this module has written it counts as absent, and nothing that this module has not written is ever deleted.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamac import __version__
from llamac.arguments import file_path
from llamac.errors import ArgumentError, LlamacError
from llamac.flatfile import NUMERICS, SECTIONS, VERSION, FlatFile
from llamac.progress import Progress, silent

try:
    import fcntl
except ImportError:  # a system without such locks: processes may then do the same work twice
    fcntl = None  # type: ignore[assignment]

# Raised when the exporter makes other bytes of the same source.
CONVERSION = 2
VERSIONS = {"llamac": __version__, "conversion": CONVERSION, "format": VERSION, "numerics": NUMERICS}

READ_BYTES = 4 << 20
# A file that was changed so shortly before it was read may change again without getting another time.
SETTLED_NS = 2_000_000_000
# What was broken off so long ago will hardly be gone on with.
FORGOTTEN_S = 7 * 86400
TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# What llamac has converted; `llamac cache` shows and deletes it.\n"

_KEY = r"[0-9a-f]{64}"
_PARTIAL = re.compile(rf"\.({_KEY})\.bin\.[0-9a-f]+\.partial")
_NOTE = re.compile(rf"\.?({_KEY})\.json(\.[0-9a-f]+\.partial)?")
# What a system says that has no locks on this kind of disk.
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def folder() -> Path:
    """Where the cache is: LLAMAC_CACHE, or the folder llamac in XDG_CACHE_HOME, or ~/.cache/llamac."""
    base = os.environ.get("XDG_CACHE_HOME", "")  # a relative one is to be ignored, says its specification
    named = os.environ.get("LLAMAC_CACHE") or os.path.join(base if os.path.isabs(base) else "~/.cache", "llamac")
    place = os.path.expanduser(named)
    if place.startswith("~"):
        raise ArgumentError(
            f"the cache would be {named}, but there is no such home folder: LLAMAC_CACHE names another folder, "
            "--no-cache (cache=False) does without"
        )
    return Path(place)


def cache_in(place: bool | str | Path) -> Cache | None:
    """The cache that `load` is given: True is the usual one, False none."""
    if place is False:
        return None
    return Cache(folder() if place is True else file_path(place, "cache"))


@dataclass(frozen=True)
class Entry:
    """A model in the cache. source: what it was made of. dtype: of most matrices. used: when last, in seconds since
    1970. problem: why nothing will use it, or None."""

    key: str
    source: str
    dtype: str
    bytes: int
    used: float
    problem: str | None


@dataclass(frozen=True)
class Removal:
    """Something that `Cache.prune` removed, or would. what: a model's source, or what else it was."""

    what: str
    reason: str
    bytes: int


class Cache:
    """The cache in a folder. Reading makes no folders and needs no permission to write."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._models = place / "models"
        self._sources = place / "sources"
        self._locks = place / "locks"

    # ---- sources

    def digests(self, source: Path, files: Mapping[str, Path], progress: Progress = silent) -> dict[str, str]:
        """The SHA-256 of each file of a source, which is read only where it may have changed since it was read last."""
        note = self._sources / f"{_sha256(os.path.realpath(source).encode(errors='surrogateescape'))}.json"
        known = (_read_note(note) or {}).get("files")
        known = known if isinstance(known, dict) else {}
        found, stamps = digests_of(files, known, progress)
        if stamps != {name: known.get(name) for name in stamps}:
            with contextlib.suppress(OSError):  # without the note the files are read again
                self._make_folders()
                _write_note(note, {"path": os.path.realpath(source), "files": {**known, **stamps}})
        return found

    # ---- models

    def path(self, key: str) -> Path:
        """Where the model with this key is, or would be."""
        return self._models / f"{key}.bin"

    def find(self, key: str, memory: str = "map") -> FlatFile | None:
        """The model with this key, opened; None if there is none that is whole."""
        note = self._models / f"{key}.json"
        known = _read_note(note)
        if known is None:
            return None
        file = None
        try:
            file = FlatFile(self.path(key), memory)
            stamp = _model_stamp(self.path(key))
            if file.id != known.get("id"):
                raise LlamacError("it is another model")
            if stamp != known.get("stamp"):  # written to, or copied: only reading it all can tell
                _verify(file)
                with contextlib.suppress(OSError):
                    _write_note(note, {**known, "stamp": stamp})
        except (LlamacError, OSError):
            if file is not None:
                file.close()
            return None
        with contextlib.suppress(OSError):
            os.utime(note)
        return file

    def make(
        self, key: str, source: str, files: Mapping[str, Path], write: Callable[[Path, Path | None], str], alone: bool
    ) -> None:
        """Has a model written, by who has the right to (`writing`). files: the source's. write: is given the path and,
        if nobody else can be at it (`alone`), that of the unfinished file; returns the dtype.

        What was written when a conversion was broken off is for files that have not been touched since: one that was
        changed in the middle, and changed back, has left pieces of both states."""
        note, path = self._models / f"{key}.json", self.path(key)
        stamps = _sha256(json.dumps([[name, _stamp(file)] for name, file in sorted(files.items())]).encode())
        partial = self._models / f".{key}.bin.{stamps[:16]}.partial" if alone else None
        if alone:
            self._remove_partials(key, but=partial)
        _write_note(note, {"source": source, **VERSIONS})  # first, so that whatever is left behind is known to be ours
        try:
            dtype = write(path, partial)
            file = FlatFile(path)
            _write_note(
                note, {"source": source, "dtype": dtype, "id": file.id, "stamp": _model_stamp(path), **VERSIONS}
            )
            file.close()
        except BaseException:
            path.unlink(missing_ok=True)
            if partial is None or not partial.exists():
                note.unlink(missing_ok=True)
            raise

    @contextlib.contextmanager
    def writing(self, key: str, progress: Progress = silent) -> Iterator[bool]:
        """The right to write the model with this key, waited for while another process has it; False where the disk
        knows no locks, and several may do it at once. OSError if the folder cannot be written. What was broken off long
        ago is removed."""
        self._make_folders()
        with locked(self._locks / f"{key}.lock", progress) as held:
            if held:
                for partial, owner in self._partials():
                    if time.time() - _time_of(partial) > FORGOTTEN_S:
                        with contextlib.suppress(OSError), self._alone(owner) as alone:
                            if alone:
                                self._remove_model(owner)
            for path in (self.path(key), self._models / f"{key}.json"):
                if path.is_dir() or path.is_symlink():  # which this module does not make
                    raise OSError(errno.EEXIST, f"{path} is no file")
            yield held

    def _make_folders(self) -> None:
        if not self.place.is_dir():
            with contextlib.suppress(FileExistsError):  # another process was faster, or it is a file: told by the next
                self.place.mkdir(mode=0o700, parents=True)
        for part in (self._models, self._sources, self._locks):
            part.mkdir(exist_ok=True)
        tag = self.place / "CACHEDIR.TAG"  # backups leave such folders out
        if not tag.exists():
            tag.write_text(TAG)

    def _partials(self) -> Iterator[tuple[Path, str]]:
        """(half-written file, key of its model)."""
        for path in _listed(self._models):
            if name := _PARTIAL.fullmatch(path.name):
                yield path, name[1]

    def _remove_partials(self, key: str, but: Path | None = None) -> None:
        for partial, owner in self._partials():
            if owner == key and partial != but:
                partial.unlink(missing_ok=True)

    def _remove_model(self, key: str) -> None:
        """All that there is of a model."""
        self._remove_partials(key)
        for path in (self.path(key), self._models / f"{key}.json"):
            if not path.is_dir():
                path.unlink(missing_ok=True)

    def _is_free(self, key: str) -> bool:
        """Whether no process is writing this model now."""
        if not (self._locks / f"{key}.lock").exists():
            return True
        with contextlib.suppress(OSError), self._alone(key) as alone:
            return alone
        return False

    @contextlib.contextmanager
    def _alone(self, key: str) -> Iterator[bool]:
        """Whether no process is writing this model; then none begins to while the block runs. OSError where this
        process may not write here."""
        with contextlib.ExitStack() as stack:
            try:
                self._locks.mkdir(exist_ok=True)
                alone = stack.enter_context(locked(self._locks / f"{key}.lock", wait=False))
            except OSError as error:  # it is held, or is nothing that can be
                if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                    raise
                alone = False
            yield alone

    # ---- what there is, and less of it

    def entries(self) -> list[Entry]:
        """The models, the one that was used last first."""
        found = []
        partials = {key: _size_of(partial) for partial, key in self._partials()}
        for note in _listed(self._models):
            name = _NOTE.fullmatch(note.name)
            known = _read_note(note) if name and note.name == f"{name[1]}.json" else None
            if name is None or known is None or "conversion" not in known:
                continue
            source, dtype = (str(known.get(what, "unknown")) for what in ("source", "dtype"))
            size = _size_of(self.path(name[1])) or partials.get(name[1], 0)
            problem = None
            if "id" not in known:
                problem = "half-written" if self._is_free(name[1]) else "being converted"
            elif not size:
                problem = "the model is gone"
            elif {what: known.get(what) for what in VERSIONS} != VERSIONS:
                problem = "made by another version of llamac"
            found.append(Entry(name[1], source, dtype, size, _time_of(note), problem))
        return sorted(found, key=lambda entry: (-entry.used, entry.key))

    def prune(
        self,
        *,
        everything: bool = False,
        older_than: float | None = None,
        max_bytes: int | None = None,
        dry_run: bool = False,
    ) -> list[Removal]:
        """Removes what nothing will use: half-written files, models of other versions, notes of sources that are gone.

        everything: all models, too. older_than: those not used for so many seconds. max_bytes: then those that were
        used longest ago, until the rest is not larger. dry_run: tells what would be removed. What other processes are
        writing stays; models that are open may be removed, who has them open keeps them.
        """
        now, gone, pruned = time.time(), [], set()
        entries = self.entries()
        size = sum(entry.bytes for entry in entries)
        # the models that nobody asks for come first: what they take need not be taken from others
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
            with self._alone(entry.key) as alone:
                if not alone:
                    continue
                pruned.add(entry.key)
                size -= entry.bytes
                gone.append(Removal(entry.source, reason, entry.bytes))
                if not dry_run:
                    self._remove_model(entry.key)
        for partial, key in self._partials():
            with self._alone(key) as alone:
                if alone and key not in pruned:
                    gone += self._remove([(partial, "half-written")], dry_run)
        gone += self._remove(self._stale_notes(everything), dry_run)
        if not dry_run:
            self._remove_locks()
        return gone

    def _stale_notes(self, everything: bool) -> Iterator[tuple[Path, str]]:
        for folder in (self._sources, self._models):
            for note in _listed(folder):
                name = _NOTE.fullmatch(note.name)
                if name is None:
                    continue
                if note.name != f"{name[1]}.json":
                    if time.time() - _time_of(note) > 60:  # it is written in no time
                        yield note, "half-written"
                elif folder is self._sources:
                    path = (_read_note(note) or {}).get("path")
                    if isinstance(path, str) and (everything or not os.path.exists(path)):
                        yield note, "all" if everything else "note of a source that is gone"

    def _remove(self, found: Iterable[tuple[Path, str]], dry_run: bool) -> Iterator[Removal]:
        for path, reason in list(found):
            removal = Removal(path.name, reason, _size_of(path))
            if not dry_run:
                path.unlink(missing_ok=True)
            yield removal

    def _remove_locks(self) -> None:
        for lock in _listed(self._locks):
            key = re.fullmatch(rf"({_KEY})\.lock", lock.name)
            if key and not self.path(key[1]).exists():
                with contextlib.suppress(OSError), locked(lock, wait=False) as held:
                    if held:
                        lock.unlink()


def digests_of(
    files: Mapping[str, Path], known: Mapping[str, Any], progress: Progress = silent
) -> tuple[dict[str, str], dict[str, list[Any]]]:
    """(SHA-256 of each file, what to give as `known` the next time: files that have not changed are not read then)."""
    found: dict[str, str] = {}
    stamps: dict[str, list[Any]] = {}
    todo: dict[str, Path] = {}
    for name, path in files.items():
        entry = known.get(name)
        if isinstance(entry, list) and len(entry) == 2 and entry[0] == _stamp(path) and _is_sha256(entry[1]):
            found[name], stamps[name] = entry[1], entry
        else:
            todo[name] = path
    total, done = sum(path.stat().st_size for path in todo.values()), 0
    for name, path in todo.items():
        started, stamp = time.time_ns(), _stamp(path)

        def tell(count: int, before: int = done) -> None:
            progress("reading", min(before + count, total), total)

        found[name] = sha256_of_file(path, tell)
        done += stamp[2]
        if stamp == _stamp(path) and stamp[-1] + SETTLED_NS < started:
            stamps[name] = [stamp, found[name]]
    return found, stamps


def sha256_of_file(path: Path, tell: Callable[[int], object] = lambda count: None) -> str:
    """The SHA-256 of a file. tell: called with the number of bytes read, first 0."""
    digest, done = hashlib.sha256(), 0
    tell(done)
    with open(path, "rb", buffering=0) as file:
        while data := file.read(READ_BYTES):
            digest.update(data)
            done += len(data)
            tell(done)
    return digest.hexdigest()


def key_of(digests: Mapping[str, str], *options: str | bool) -> str:
    """The key of what is converted from files with these SHA-256, with these options."""
    return _sha256(json.dumps([VERSIONS, options, sorted(digests.items())]).encode())


# ---- files


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _is_sha256(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(_KEY, value) is not None


def _stamp(path: Path) -> list[int]:
    """What changes when a file changes; the last one is a time that nobody can set."""
    found = path.stat()
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _model_stamp(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]


def _verify(file: FlatFile) -> None:
    """LlamacError if anything in a file is damaged."""
    for name in SECTIONS[:-1]:
        file.section(name)
    for record, problem in file.verify_data():
        if problem:
            raise LlamacError(f"tensor {record.name}: {problem}")


def _listed(place: Path) -> list[Path]:
    """The regular files of a folder; none if there is no such folder."""
    try:
        return sorted(path for path in place.iterdir() if path.is_file() and not path.is_symlink())
    except FileNotFoundError:
        return []


def _time_of(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read_note(path: Path) -> dict[str, Any] | None:
    """A note's values; None if there is none that this module has written."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _write_note(path: Path, values: dict[str, Any]) -> None:
    """Writes a note whole or not at all."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        partial.write_text(json.dumps(values))
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(path: Path, progress: Progress = silent, wait: bool = True) -> Iterator[bool]:
    """Holds a lock; False where the disk knows none. BlockingIOError if another one has it and `wait` is not set."""
    while True:
        with open(path, "a") as file:
            try:
                held = _take(file.fileno(), wait, progress)
                try:
                    same = os.path.samestat(os.fstat(file.fileno()), os.stat(path))
                except FileNotFoundError:
                    same = False  # it was removed while this process waited: the lock is on another file now
                if not same and wait:
                    continue
                yield held and same
                return
            finally:
                if fcntl is not None:
                    with contextlib.suppress(OSError):  # children that were forked meanwhile have it open, too
                        fcntl.flock(file.fileno(), fcntl.LOCK_UN)


def _take(descriptor: int, wait: bool, progress: Callable[[str, int, int], None]) -> bool:
    if fcntl is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not wait:
            raise
        progress("waiting for another process", 0, 1)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        progress("waiting for another process", 1, 1)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True
