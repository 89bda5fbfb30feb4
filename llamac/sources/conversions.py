"""Opens foreign sources as flat files: from the cache, converted into it, or converted to a temporary file."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal, NamedTuple, cast

from llamac.arguments import DTYPES, CacheDir
from llamac.errors import ExportError, LlamacError
from llamac.format.detect import Source, files_of
from llamac.format.flatfile import FlatFile
from llamac.format.gguf_parts import parse_part_name
from llamac.progress import Progress
from llamac.sources.cache import Cache, key_of, open_cache
from llamac.sources.cache_entries import Entry
from llamac.sources.finishing import Draft, draft_of, finish_later
from llamac.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llamac.text.vocabulary.gguf import ReadAhead

IN_CACHE = "free some with `llamac cache prune`, or set LLAMAC_CACHE to another folder"
CGROUP = Path("/sys/fs/cgroup")
IN_TMPDIR = "set TMPDIR to another folder"

Warn = Callable[[str], object]
Notice = Callable[[str], object]
Check = Callable[[FlatFile], object]


class Opened(NamedTuple):
    """An opened conversion.

    Attributes:
        file: The flat file.
        tokenizer: Its tokenizer, if the conversion has just been made; otherwise None, and the model opens it.
    """

    file: FlatFile
    tokenizer: Tokenizer | None = None


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

    @property
    def options(self) -> tuple[str | bool, ...]:
        """What decides the result, besides the source."""
        return self.dtype, self.tokenizer


def converted(
    request: Request,
    cache_dir: CacheDir,
    progress: Progress,
    warn: Warn,
    notice: Notice = lambda text: None,
    check: Check | None = None,
) -> Opened:
    """Open a source as a flat file. Converts it unless the cache has the result.

    Args:
        request: The conversion.
        cache_dir: As in `load`.
        progress: Called with (phase, done, total).
        warn: Called with each message that the user should see.
        notice: Called with a one-line announcement before a conversion begins.
        check: Called before a conversion begins, with the file that it would write, but without weights. Raises an
            error if the conversion is useless.

    Raises:
        ExportError: If the source cannot be converted, changes meanwhile, or the disk is full. Other errors as in
            `export`.
    """
    cache = open_cache(cache_dir)
    if cache is not None and (file := _cached(cache, request)):
        return Opened(file)
    if check is not None:
        with contextlib.closing(hollow(request)) as outlined:
            check(outlined)
    if cache is None:
        return _temporary(request, progress, warn, notice)
    content = _Content(cache, request, progress)
    with contextlib.ExitStack() as stack:
        try:
            exclusive = stack.enter_context(cache.converting(content.key, progress))
        except OSError as error:
            warn(
                f"the cache folder {cache.folder} cannot be written ({error.strerror or error}), so the conversion is "
                "not kept: set LLAMAC_CACHE to another folder, or keep nothing with --no-cache"
            )
            return _temporary(request, progress, warn, notice)
        if file := _cached(cache, request) or cache.find(content.key, request.memory):
            return Opened(file)  # the process that held the lock has converted it
        notice(f"converting {request.label} once; keeping the result in {cache.folder}")
        try:
            opened = _into_cache(content, exclusive, progress, warn)
        except _FullError as error:
            if not _fits_into_memory(request.path):
                raise
            warn(f"{error}. This time the model is converted in memory")
            return _temporary(request, progress, warn, lambda text: None)
    if content.draft:
        finish_later(content.draft, opened.file)
    return opened


class _Content:
    """What a source contains before its conversion, by the checksums of its files or, to save time, by a draft.

    Attributes:
        cache: The cache that receives the conversion.
        request: The conversion.
        files: The source's files.
        draft: The draft; None if the checksums are known.
        key: The conversion's key in the cache.
    """

    def __init__(self, cache: Cache, request: Request, progress: Progress) -> None:
        self.cache, self.request = cache, request
        self.files = files_of(request.path)
        self.draft = _draft(cache, request, self.files)
        if self.draft and not cache.remembered_digests(request.path, self.files) and not cache.may_know(self.files):
            self.key = self.draft.key
            return
        self.draft = None
        self._digests = cache.digests(request.path, self.files, progress)
        self.key = key_of(self._digests, *request.options)

    def has_changed(self) -> bool:
        """Whether the source has changed since."""
        if self.draft:
            return self.draft.has_changed()
        return self.cache.digests(self.request.path, files_of(self.request.path)) != self._digests


def _into_cache(content: _Content, exclusive: bool, progress: Progress, warn: Warn) -> Opened:
    """Convert a source into the cache.

    Args:
        content: The source's content, and the conversion.
        exclusive: As in `Cache.add`.
        progress: As in `converted`.
        warn: As in `converted`.
    """
    cache, request = content.cache, content.request
    is_draft = content.draft is not None
    tokenizer = None

    def write(path: Path) -> str:
        nonlocal tokenizer
        dtype, tokenizer = _convert(request, path, progress, warn, hashed=not is_draft)
        if content.has_changed():
            raise ExportError(f"{request.path} changed while it was converted: run this again")
        return dtype

    with _full_disk_advice(cache.folder, request.path, IN_CACHE):
        cache.add(content.key, request.label, content.files, write, exclusive, is_draft=is_draft)
    return Opened(FlatFile(cache.path(content.key), request.memory), tokenizer)


def hollow(request: Request) -> FlatFile:
    """The file that a conversion would write, without its weights. Only the source's headers and tokenizer are read.

    Raises:
        ExportError: As in `converted`.
    """
    from llamac.export.convert import export_hollow

    with _unnamed_file(None if hasattr(os, "memfd_create") else Path(tempfile.gettempdir())) as file:
        tokenizer: Literal[False] | None = None if request.tokenizer else False
        export_hollow(Source(request.path, request.name), file, dtype=request.dtype, tokenizer=tokenizer)
        return FlatFile(request.path, descriptor=file.fileno())


def _cached(cache: Cache, request: Request) -> FlatFile | None:
    """Open the conversion if the cache has it, without reading the source."""
    files = files_of(request.path)
    digests = cache.remembered_digests(request.path, files)
    if digests and (file := cache.find(key_of(digests, *request.options), request.memory)):
        return file
    draft = _draft(cache, request, files)
    file = cache.find(draft.key, request.memory) if draft else None
    if draft and file:
        finish_later(draft, file)
    return file


def _draft(cache: Cache, request: Request, files: Mapping[str, Path]) -> Draft | None:
    """The draft of a conversion; None if it must wait for the checksums of the source.

    Most GGUF files only need regrouping, which takes less time than the checksums.
    """
    if request.dtype != "auto" or not _is_gguf(request.path):
        return None
    return draft_of(cache, request.path, files, request.options)


def cached_conversions(path: Path, cache_dir: CacheDir = None) -> list[Entry]:
    """List the usable conversions of a source in the cache; none if it cannot be read. Reads no file of the source."""
    cache = open_cache(cache_dir)
    if cache is None:
        return []
    files = files_of(path)
    choices = [(dtype, tokenizer) for dtype in ("auto", *DTYPES) for tokenizer in (True, False)]
    digests = cache.remembered_digests(path, files)
    keys = {key_of(digests, *options) for options in choices} if digests else set()
    drafts = [draft_of(cache, path, files, options) for options in choices]
    keys |= {draft.key for draft in drafts if draft}
    with contextlib.suppress(OSError):
        return [entry for entry in cache.entries() if entry.key in keys and entry.problem is None]
    return []


def _read_ahead(request: Request) -> ReadAhead | None:
    """Read the head and the vocabulary of a GGUF file while a thread imports the exporter, which takes as long.

    Returns None if the exporter must read the source itself, and report its errors.
    """
    if not _is_gguf(request.path) or parse_part_name(request.path.name) is not None:
        return None
    from concurrent.futures import ThreadPoolExecutor

    from llamac.format.gguf_metadata import read_head
    from llamac.text.vocabulary.gguf import ReadAhead, from_metadata

    with ThreadPoolExecutor(1) as pool:
        pool.submit(_import_exporter)
        try:
            head = read_head(request.path)
            return ReadAhead(head, from_metadata(head.metadata.values) if request.tokenizer else None)
        except (LlamacError, OSError):
            return None


def _import_exporter() -> None:
    import llamac.export.convert
    import llamac.export.flat.write
    import llamac.export.gguf.model  # noqa: F401


def _is_gguf(path: Path) -> bool:
    return path.suffix == ".gguf" and not path.is_dir()


def _temporary(request: Request, progress: Progress, warn: Warn, notice: Notice) -> Opened:
    """Convert to a file without a name: the system deletes it when it is closed, however the process ends.

    A GGUF file, whose weights need no more space than the source, becomes a file in memory if there is enough.
    """
    folder = None if _fits_into_memory(request.path) else Path(tempfile.gettempdir())
    with _unnamed_file(folder) as file:
        notice(f"converting {request.label} {'in memory' if folder is None else 'to a temporary file'}")
        with _full_disk_advice(folder or Path("the memory"), request.path, IN_TMPDIR):
            ahead = _read_ahead(request)
            from llamac.export.convert import export_unnamed

            result = export_unnamed(
                Source(request.path, request.name),
                file,
                folder,
                dtype=request.dtype,
                tokenizer=None if request.tokenizer else False,
                progress=progress,
                ahead=ahead,
            )
        for text in result.warnings:
            warn(text)
        return Opened(FlatFile(request.path, request.memory, descriptor=file.fileno()), result.tokenizer)


def _fits_into_memory(path: Path) -> bool:
    """Whether a source is a GGUF file, and its conversion takes at most half of the free memory."""
    if not hasattr(os, "memfd_create") or not _is_gguf(path):
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


class _FullError(ExportError):
    """A disk is too small."""


@contextlib.contextmanager
def _full_disk_advice(folder: Path, source: Path, advice: str) -> Iterator[None]:
    """Raise _FullError with advice if the folder's disk is too small for the conversion of a source."""
    from llamac.export.targets import DISK_FULL, DiskFullError

    try:
        yield
    except DiskFullError as error:
        raise _FullError(f"{error}; {advice}") from None
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise _FullError(f"{folder} is too full for the conversion of {source} ({error.strerror}); {advice}") from None


def _convert(
    request: Request, path: Path, progress: Progress, warn: Warn, *, hashed: bool
) -> tuple[str, Tokenizer | None]:
    """Write the flat file, resuming an interrupted conversion at the same path.

    Returns:
        The dtype of most matrices, and the tokenizer.
    """
    ahead = _read_ahead(request)
    from llamac.export.convert import export_resumable

    result = export_resumable(
        Source(request.path, request.name),
        path,
        dtype=request.dtype,
        tokenizer=None if request.tokenizer else False,
        progress=progress,
        hashed=hashed,
        ahead=ahead,
    )
    for text in result.warnings:
        warn(text)
    return result.dtype, result.tokenizer
