"""Opens foreign sources as flat files: from the cache, converted into it, or converted to a temporary file."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from llamac.arguments import DTYPES, CacheDir
from llamac.errors import ExportError
from llamac.format.detect import Source, files_of
from llamac.format.flatfile import FlatFile
from llamac.progress import Progress
from llamac.sources.cache import Entry, key_of, open_cache

IN_CACHE = "free some with `llamac cache prune`, or set LLAMAC_CACHE to another folder"
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
    digests = cache.digests(request.path, files_of(request.path), progress)
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
            dtype = _convert(request, path, progress, warn)
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


def _temporary(request: Request, progress: Progress, warn: Warn, notice: Notice) -> FlatFile:
    """Convert to a file without a name: the system deletes it when it is closed, however the process ends."""
    from llamac.export.convert import export_unnamed

    folder = Path(tempfile.gettempdir())
    with tempfile.TemporaryFile(prefix="llamac-") as file:
        notice(f"converting {request.label} to a temporary file")
        with _full_disk_advice(folder, request.path, IN_TMPDIR):
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


def _convert(request: Request, path: Path, progress: Progress, warn: Warn) -> str:
    """Write the flat file, resuming an interrupted conversion at the same path. Returns the dtype of most matrices."""
    from llamac.export.convert import export

    report = export(
        request.path,
        path,
        dtype=request.dtype,
        name=request.name,
        tokenizer=None if request.tokenizer else False,
        overwrite=True,
        partial=path,
        probe_source=None,
        progress=progress,
    )
    for text in report.warnings:
        warn(text)
    return report.dtype
