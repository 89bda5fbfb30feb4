"""A foreign source as an opened flat file: from the cache, or converted into it, or into a file that is soon gone."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from llamac.cache import cache_in, key_of
from llamac.errors import ExportError
from llamac.flatfile import FlatFile
from llamac.progress import Progress
from llamac.sources import files_of

IN_CACHE = "`llamac cache prune` makes room, LLAMAC_CACHE names another folder"

Warn = Callable[[str], object]


class Request(NamedTuple):
    """What is to be opened. path: the source. name: of the model, where the path does not tell it. label: what `llamac
    cache list` shows. dtype: as `export` has it. probes: whether there must be some. tokenizer: whether to take
    the source's. memory: as `FlatFile` has it."""

    path: Path
    name: str | None
    label: str
    dtype: str
    probes: bool
    tokenizer: bool
    memory: str


def converted(request: Request, cache: bool | str | Path, progress: Progress, warn: Warn) -> FlatFile:
    """The source as a flat file. cache: whether to keep it for the next time, or the folder to keep it in."""
    place = cache_in(cache)
    if place is None:
        return _temporary(request, progress, warn)
    digests = place.digests(request.path, files_of(request.path), progress)
    keys = [key_of(digests, request.dtype, request.tokenizer, probes) for probes in (request.probes, True)]
    key = keys[0]
    for fitting in dict.fromkeys(keys):  # one with probes will do in any case
        if file := place.find(fitting, request.memory):
            return file
    with contextlib.ExitStack() as stack:
        try:
            alone = stack.enter_context(place.writing(key, progress))
        except OSError as error:
            warn(
                f"the cache folder {place.place} cannot be written ({error.strerror or error}), so that what is "
                "converted is not kept: LLAMAC_CACHE names another folder, --no-cache does without"
            )
            return _temporary(request, progress, warn)
        if file := place.find(key, request.memory):  # another process has converted it meanwhile
            return file

        def write(path: Path, partial: Path | None) -> str:
            dtype = _convert(request, path, partial, progress, warn)
            if place.digests(request.path, files_of(request.path), progress) != digests:
                raise ExportError(f"{request.path} has changed while it was converted: run this again")
            return dtype

        with _told_of_room(place.place, request.path, IN_CACHE):
            place.make(key, request.label, files_of(request.path), write, alone)
        return FlatFile(place.path(key), request.memory)


def _temporary(request: Request, progress: Progress, warn: Warn) -> FlatFile:
    """A file that has no name any more when it is returned: its space is free as soon as it is closed."""
    with tempfile.TemporaryDirectory(prefix="llamac-") as place:
        path = Path(place, "model.bin")
        with _told_of_room(path.parent, request.path, "TMPDIR names another folder"):
            _convert(request, path, None, progress, warn)
        file = FlatFile(path, request.memory)
        file.path = request.path  # what messages about it name
        return file


@contextlib.contextmanager
def _told_of_room(folder: Path, source: Path, advice: str) -> Iterator[None]:
    """ExportError where the disk of a folder has no room for what a source is converted to. advice: what helps then."""
    from llamac.export.writer import NO_ROOM, NoRoomError

    try:
        yield
    except NoRoomError as error:
        raise ExportError(f"{error}; {advice}") from None
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        room = f"{folder} has no room for what {source} is converted to ({error.strerror})"
        raise ExportError(f"{room}; {advice}") from None


def _convert(request: Request, out: Path, partial: Path | None, progress: Progress, warn: Warn) -> str:
    """Converts, and returns the dtype of most matrices. partial: as `export` has it."""
    from llamac.export.convert import export

    report = export(
        request.path,
        out,
        dtype=request.dtype,
        name=request.name,
        tokenizer=None if request.tokenizer else False,
        overwrite=True,
        partial=partial,
        probe_source="auto" if request.probes else None,
        progress=progress,
    )
    for text in report.warnings:
        warn(text)
    return report.dtype
