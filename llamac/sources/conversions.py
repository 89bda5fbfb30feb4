"""Opens foreign sources as flat files: from the cache, converted into it, or converted to a temporary file."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, cast

from llamac.arguments import DTYPES, CacheDir
from llamac.errors import ExportError, LlamacError
from llamac.format.detect import Source, files_of
from llamac.format.flatfile import FlatFile
from llamac.progress import Progress
from llamac.sources.cache import Cache, Entry, key_of, open_cache
from llamac.sources.digests import file_stamp, is_settled

if TYPE_CHECKING:
    from llamac.export.convert import Prepared

IN_CACHE = "free some with `llamac cache prune`, or set LLAMAC_CACHE to another folder"
CGROUP = Path("/sys/fs/cgroup")
IN_TMPDIR = "set TMPDIR to another folder"

Warn = Callable[[str], object]
Notice = Callable[[str], object]


class Request(NamedTuple):
    """A conversion.

    Attributes:
        path: The source.
        name: The model's name, if the path does not say it.
        label: The source as `llamac cache list` shows it.
        dtype: As in `export`.
        tokenizer: Whether to convert the source's tokenizer.
        memory: As in `FlatFile`.
    """

    path: Path
    name: str | None
    label: str
    dtype: str
    tokenizer: bool
    memory: str


def converted(
    request: Request, cache_dir: CacheDir, progress: Progress, warn: Warn, notice: Notice = lambda text: None
) -> FlatFile:
    """Open a source as a flat file. Converts it unless the cache has the result.

    Args:
        request: The conversion.
        cache_dir: As in `load`.
        progress: Called with (phase, done, total).
        warn: Called with each message that the user should see.
        notice: Called with a one-line announcement before a conversion begins.

    Raises:
        ExportError: If the source cannot be converted, changes meanwhile, or the disk is full. Other errors as in
            `export`.
    """
    cache = open_cache(cache_dir)
    if cache is None:
        return _temporary(request, progress, warn, notice)
    digests, preparation = _digests(cache, request, progress)
    key = key_of(digests, request.dtype, request.tokenizer)
    if file := cache.find(key, request.memory):
        return file
    with contextlib.ExitStack() as stack:
        try:
            exclusive = stack.enter_context(cache.converting(key, progress))
        except OSError as error:
            warn(
                f"the cache folder {cache.folder} cannot be written ({error.strerror or error}), so the conversion is "
                "not kept: set LLAMAC_CACHE to another folder, or keep nothing with --no-cache"
            )
            return _temporary(request, progress, warn, notice)
        if file := cache.find(key, request.memory):  # the process that held the lock has converted it
            return file
        notice(f"converting {request.label} once; keeping the result in {cache.folder}")

        def write(path: Path) -> str:
            dtype = _convert(request, path, progress, warn, preparation)
            if cache.digests(request.path, files_of(request.path), progress) != digests:
                raise ExportError(f"{request.path} changed while it was converted: run this again")
            return dtype

        with _full_disk_advice(cache.folder, request.path, IN_CACHE):
            cache.add(key, request.label, files_of(request.path), write, exclusive)
        return FlatFile(cache.path(key), request.memory)


def cached_conversions(path: Path, cache_dir: CacheDir = None) -> list[Entry]:
    """List the usable conversions of a source in the cache. Reads no file of the source."""
    cache = open_cache(cache_dir)
    digests = cache.remembered_digests(path, files_of(path)) if cache else None
    if cache is None or digests is None:
        return []
    keys = {key_of(digests, dtype, tokenizer) for dtype in ("auto", *DTYPES) for tokenizer in (True, False)}
    return [entry for entry in cache.entries() if entry.key in keys and entry.problem is None]


class _Preparation(NamedTuple):
    """What was read of a source while its checksums were computed.

    Attributes:
        stamps: The source's files before that.
        prepared: What they hold besides the weights.
    """

    stamps: list[list[int]]
    prepared: Prepared


def _digests(cache: Cache, request: Request, progress: Progress) -> tuple[dict[str, str], _Preparation | None]:
    """The SHA-256 of each file of a source. If they must be read, a thread does that while this one prepares."""
    files = files_of(request.path)
    if found := cache.remembered_digests(request.path, files):
        return found, None
    is_needed = True

    def report(phase: str, done: int, total: int) -> None:
        if not is_needed:
            raise InterruptedError
        progress(phase, done, total)

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(cache.digests, request.path, files, report)
        try:
            preparation = _prepare(request)
            return future.result(), preparation
        finally:
            is_needed = False


def _prepare(request: Request) -> _Preparation | None:
    """Import the exporter and, of a GGUF file, read all but the weights: for a large vocabulary that takes as long as
    the checksum. None if the conversion must read the source itself, and report its errors.
    """
    import llamac.export.flat.write  # noqa: F401
    from llamac.export.convert import prepare

    if request.path.is_dir() or request.path.suffix != ".gguf":
        return None
    stamps = _stamps(request.path)
    if not all(map(is_settled, stamps)):
        return None
    try:
        prepared = prepare(Source(request.path, request.name), None if request.tokenizer else False)
    except (LlamacError, OSError):
        return None
    return _Preparation(stamps, prepared)


def _stamps(path: Path) -> list[list[int]]:
    return [file_stamp(file) for _, file in sorted(files_of(path).items())]


def _temporary(request: Request, progress: Progress, warn: Warn, notice: Notice) -> FlatFile:
    """Convert to a file without a name: the system deletes it when it is closed, however the process ends.

    A GGUF file, whose weights need no more space than the source, becomes a file in memory if there is enough.
    """
    from llamac.export.convert import export_unnamed

    folder = None if _fits_into_memory(request.path) else Path(tempfile.gettempdir())
    with _unnamed_file(folder) as file:
        notice(f"converting {request.label} {'in memory' if folder is None else 'to a temporary file'}")
        with _full_disk_advice(folder or Path("the memory"), request.path, IN_TMPDIR):
            report = export_unnamed(
                Source(request.path, request.name),
                file,
                folder,
                dtype=request.dtype,
                tokenizer=None if request.tokenizer else False,
                progress=progress,
            )
        for text in report.warnings:
            warn(text)
        return FlatFile(request.path, request.memory, descriptor=file.fileno())


def _fits_into_memory(path: Path) -> bool:
    """Whether a source is a GGUF file, and its conversion takes at most half of the free memory."""
    if not hasattr(os, "memfd_create") or path.is_dir() or path.suffix != ".gguf":
        return False
    size = sum(file.stat().st_size for file in files_of(path).values())
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        free = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return False
    with contextlib.suppress(OSError, ValueError):  # the limit of a container; "max" is none
        limit, used = (int((CGROUP / f"memory.{name}").read_text("ascii")) for name in ("max", "current"))
        free = min(free, limit - used)
    return 2 * size < free


def _unnamed_file(folder: Path | None) -> BinaryIO:
    """Create a file in a folder, or in memory."""
    if folder is None:
        return open(os.memfd_create("llamac"), "w+b")
    return cast(BinaryIO, tempfile.TemporaryFile(prefix="llamac-", dir=folder))  # a file in fact, by its type IO[bytes]


@contextlib.contextmanager
def _full_disk_advice(folder: Path, source: Path, advice: str) -> Iterator[None]:
    """Raise ExportError with advice if the folder's disk is too small for the conversion of a source."""
    from llamac.export.targets import DISK_FULL, DiskFullError

    try:
        yield
    except DiskFullError as error:
        raise ExportError(f"{error}; {advice}") from None
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise ExportError(f"{folder} is too full for the conversion of {source} ({error.strerror}); {advice}") from None


def _convert(request: Request, path: Path, progress: Progress, warn: Warn, preparation: _Preparation | None) -> str:
    """Write the flat file, resuming an interrupted conversion at the same path. Returns the dtype of most matrices."""
    from llamac.export.convert import export_resumable

    report = export_resumable(
        Source(request.path, request.name),
        path,
        dtype=request.dtype,
        tokenizer=None if request.tokenizer else False,
        progress=progress,
        prepared=preparation.prepared if preparation and preparation.stamps == _stamps(request.path) else None,
    )
    for text in report.warnings:
        warn(text)
    return report.dtype
