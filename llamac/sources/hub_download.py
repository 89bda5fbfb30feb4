"""Downloads a repository's files into the client's cache, verifies checksums, and resumes interrupted downloads.

The client downloads small files, and large ones that the hub serves with its own protocol (Xet). It does not resume a
plain HTTP download that another process began. So this module downloads large files, to the path where the client
stores a blob (https://huggingface.co/docs/hub/local-cache):

    blobs/SHA256.ID.llamac.incomplete    an interrupted download; ID is random
    blobs/SHA256.llamac.lock             locked by the process that downloads
    blobs/SHA256                         the file; the client links it into the snapshot

On a file system without locks, each process downloads to its own file, and nothing is resumed.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

from llamac.errors import HubError
from llamac.format.detect import HUB
from llamac.format.private_files import create, locked, open_own
from llamac.progress import Progress
from llamac.sizes import size_text
from llamac.sources.digests import sha256_of_file
from llamac.sources.hub_client import (
    COMMIT,
    SHA256,
    TIMEOUT_S,
    Listing,
    Metadata,
    checked_responses,
    file_metadata,
    is_disk_error,
    network_errors,
    repo_folder,
    xet_errors,
)

WEIGHTS = (".safetensors", ".bin", ".gguf")
MAX_CONFIGURATION_BYTES = 1 << 28  # the limit for tokenizer files
ATTEMPTS = 5  # consecutive attempts in which the file did not grow
PAUSE_S = 0.5


def mismatch(repo: str, name: str) -> str:
    """The message for a file with a wrong SHA-256."""
    return f"{HUB}{repo}: checksum mismatch in {name}"


class Downloads:
    """Downloads files of a repository at a commit, one after another.

    Args:
        client: The client.
        repo: The repository.
        revision: The revision that the user named. The client remembers its commit, for use without a network.
        listing: The repository's files.
        progress: Called with the phase "downloading" and byte counts.
    """

    def __init__(self, client: Any, repo: str, revision: str, listing: Listing, progress: Progress) -> None:
        self._client, self._repo, self._revision = client, repo, revision
        self._listing, self._progress = listing, progress
        self._total = self._done = 0
        self._is_noted = COMMIT.fullmatch(revision) is not None

    def expect(self, names: list[str]) -> None:
        """Announce the files to download, so that progress counts the bytes of all of them."""
        self._total = sum(self._listing.sizes.get(name, 0) for name in names)

    def get(self, name: str) -> Path:
        """The path of a file in the client's cache, after downloading it if necessary."""
        cached = self._client.try_to_load_from_cache(self._repo, name, revision=self._listing.commit)
        path = Path(cached) if isinstance(cached, str) and self._is_noted else self._download(name)
        self._done += self._listing.sizes.get(name, 0)
        return path

    def _download(self, name: str) -> Path:
        found = file_metadata(self._client, self._repo, self._listing.commit, name)
        limit = self._limit(name, found)
        if found.has_xet and self._can_use_xet():
            try:
                return self._ask_client(name, found, limit)
            except xet_errors():
                pass
        if SHA256.fullmatch(found.etag):
            self._download_blob(name, found, limit)
        return self._ask_client(name, found, limit)

    def _limit(self, name: str, found: Metadata) -> int:
        """The announced size of a file, which a download must not exceed."""
        sizes = {size for size in (self._listing.sizes.get(name), found.size) if size is not None}
        if len(sizes) > 1:
            raise HubError(f"{HUB}{self._repo}: the hub announces two sizes for {name}: {sorted(sizes)}")
        is_weights = SHA256.fullmatch(found.etag) is not None or name.endswith(WEIGHTS)
        if is_weights and not sizes:
            raise HubError(f"{HUB}{self._repo}: the hub does not announce the size of {name}")
        limit = max(sizes, default=MAX_CONFIGURATION_BYTES)
        if not is_weights and limit > MAX_CONFIGURATION_BYTES:
            raise HubError(f"{HUB}{self._repo}: {name} has {limit} bytes, at most {MAX_CONFIGURATION_BYTES} are read")
        return limit

    def _can_use_xet(self) -> bool:
        return not self._client.constants.HF_HUB_DISABLE_XET and find_spec("hf_xet") is not None

    def _ask_client(self, name: str, found: Metadata, limit: int) -> Path:
        """Have the client link a file into the snapshot, after downloading it unless its cache has it."""
        commit = self._listing.commit
        uses_xet = found.has_xet and self._can_use_xet()
        ask = partial(
            self._client.hf_hub_download,
            self._repo,
            name,
            tqdm_class=self._bar_class(name, None if uses_xet else limit),  # Xet may transfer more than the file has
            library_name="llamac",
            etag_timeout=TIMEOUT_S,
        )
        is_new = not (repo_folder(self._client, self._repo) / "blobs" / found.etag).exists()
        with checked_responses(self._client, self._repo, found):
            path = ask(revision=commit if self._is_noted else self._revision)
            if not self._is_noted and f"/snapshots/{commit}/" not in path.replace(os.sep, "/"):
                path = ask(revision=commit)  # the branch has just changed
        self._is_noted = True
        if is_new:
            self._check(name, found, limit, Path(path))
        return Path(path)

    def _check(self, name: str, found: Metadata, limit: int, path: Path) -> None:
        """Delete a file that the client just downloaded if it is damaged or too long."""
        expected = self._listing.sha256.get(name) or (found.etag if SHA256.fullmatch(found.etag) else None)
        if path.stat().st_size > limit or (expected is not None and sha256_of_file(path) != expected):
            for damaged in (Path(os.path.realpath(path)), path):
                damaged.unlink(missing_ok=True)
            raise HubError(f"{mismatch(self._repo, name)}; run this again")

    def _bar_class(self, name: str, limit: int | None) -> type:
        """A class of progress bars for the client. They call `progress`, and raise HubError beyond the limit."""
        progress, before, expected = self._progress, self._done, self._total
        too_long = f"{HUB}{self._repo}: {name} is longer than the announced {limit} bytes"

        class Bar:
            def __init__(self, *_: object, total: float | None = None, initial: float = 0, **__: object) -> None:
                self.total, self.n = total, initial

            def update(self, count: float | None = 1) -> None:
                self.n += count or 0
                if limit is not None and self.n > limit:
                    raise HubError(too_long)
                total = max(expected, int(self.total or 0))
                progress("downloading", min(before + int(self.n), total), total)

            def __enter__(self) -> Bar:
                return self

            def __exit__(self, *_: object) -> None:
                pass

            def __getattr__(self, _: str) -> Callable[..., None]:
                return lambda *args, **kwargs: None

        return Bar

    # ---- large files by plain HTTP

    def _download_blob(self, name: str, found: Metadata, size: int) -> None:
        """Download a large file to the client's path for it, resuming an interrupted download."""
        folder = repo_folder(self._client, self._repo)
        blob = folder / "blobs" / found.etag
        blob.parent.mkdir(parents=True, exist_ok=True)
        with locked(blob.with_name(f"{found.etag}.llamac.lock"), self._progress) as held:
            if blob.exists():  # downloaded by the process that held the lock
                return
            partial, file = self._open_partial(blob, resume=held)
            waits = False  # for space: what has been downloaded stays
            try:
                with file:
                    begun = file.seek(0, os.SEEK_END)
                    if begun > size:
                        begun = file.truncate(file.seek(0))
                    waits = begun > 0
                    self._check_space(partial, name, size - begun)
                    waits = False
                    self._receive(file, name, found.url, size)
                if sha256_of_file(partial) != found.etag:
                    raise HubError(f"{mismatch(self._repo, name)}; run this again")
                os.replace(partial, blob)
            except BaseException as error:
                if not held or (isinstance(error, HubError) and not waits):  # without locks nothing is resumed
                    partial.unlink(missing_ok=True)
                raise

    def _open_partial(self, blob: Path, resume: bool) -> tuple[Path, BinaryIO]:
        """The path and the file of an interrupted download of a blob, or of a new one."""
        pattern = re.compile(rf"{blob.name}\.[0-9a-f]{{16}}\.llamac\.incomplete")
        for path in sorted(blob.parent.iterdir()) if resume else ():
            if pattern.fullmatch(path.name):
                with contextlib.suppress(OSError):
                    return path, open_own(path)
        path = blob.with_name(f"{blob.name}.{secrets.token_hex(8)}.llamac.incomplete")
        return path, create(path)

    def _check_space(self, partial: Path, name: str, needed: int) -> None:
        free = shutil.disk_usage(partial.parent).free
        if needed > free:
            raise HubError(
                f"{HUB}{self._repo}: {name} needs {size_text(needed)} more, the disk of {partial.parent} has "
                f"{size_text(free)} free"
            )

    def _receive(self, file: BinaryIO, name: str, url: str, size: int) -> None:
        """Append the rest of a file. Reconnects as long as the file grows."""
        bar = self._bar_class(name, size)(total=size, initial=file.tell())
        attempts = longest = 0
        while (begun := file.seek(0, os.SEEK_END)) < size:
            try:
                for piece in self._pieces(file, url, begun, bar):
                    file.write(piece)
                    file.flush()
                    bar.update(len(piece))
                if file.tell() < size:
                    raise ConnectionError("the connection was closed")
            except self._client.errors.HfHubHTTPError:
                raise
            except HubError:
                raise
            except network_errors(self._client) as error:
                attempts = attempts + 1 if file.tell() <= longest else 1
                longest = max(longest, file.tell())
                if attempts > ATTEMPTS or is_disk_error(error):
                    raise
                time.sleep(PAUSE_S * (attempts - 1))

    def _pieces(self, file: BinaryIO, url: str, begun: int, bar: Any) -> Any:
        """Yield the bytes of a file from byte `begun` on. Empties the file if the server sends all of it."""
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        headers = {**build_hf_headers(library_name="llamac"), "Accept-Encoding": "identity"}
        if begun:
            headers["Range"] = f"bytes={begun}-"
        timeout = self._client.constants.HF_HUB_DOWNLOAD_TIMEOUT
        with get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=timeout) as response:
            hf_raise_for_status(response)
            is_rest = response.status_code == 206 and response.headers.get("Content-Range", "").startswith(
                f"bytes {begun}-"
            )
            if begun and not is_rest:
                if response.status_code == 206:
                    raise ConnectionError("the hub sent another range than requested")
                file.seek(0)
                file.truncate()
                bar.update(-begun)
            yield from response.iter_bytes()
