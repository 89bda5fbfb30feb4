"""Calls the client huggingface_hub, and protects it from hostile servers.

HF_ENDPOINT can name any server. The client uses the commit hashes and ETags that a server sends as file names, so only
plain hashes may reach the client.
"""

from __future__ import annotations

import contextlib
import errno
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from llamac.errors import ArgumentError, HubError, LlamacError, UnsupportedError
from llamac.format.detect import HUB

OLDEST_CLIENT = (1, 3)
TIMEOUT_S = 20
COMMIT = re.compile(r"[0-9a-f]{40}")
SHA256 = re.compile(r"[0-9a-f]{64}")
_ETAG = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # SHA-1 of small files, SHA-256 of large ones
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EIO)


class Unreachable(Exception):
    """The hub cannot be reached: there is no network, offline mode is on, or the server has a failure."""


class Listing(NamedTuple):
    """A repository's files at a commit.

    Attributes:
        commit: The commit's hash.
        names: The names of the files.
        sha256: Checksums of the large files, by name.
        sizes: Sizes in bytes, by name.
    """

    commit: str
    names: tuple[str, ...]
    sha256: Mapping[str, str]
    sizes: Mapping[str, int]


class Metadata(NamedTuple):
    """The hub's metadata of a file.

    Attributes:
        url: Where to download it.
        etag: Its name in the client's cache. For a large file, this is its SHA-256.
        size: Its size in bytes, or None if the server does not send it.
        has_xet: Whether the hub's own protocol can download it.
    """

    url: str
    etag: str
    size: int | None
    has_xet: bool


def load_client() -> Any:
    """Import huggingface_hub.

    Raises:
        UnsupportedError: If it is missing or too old.
    """
    try:
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ImportError:
        raise UnsupportedError(
            "models on the Hugging Face Hub need huggingface_hub: pip install huggingface_hub"
        ) from None
    version = str(huggingface_hub.__version__)
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST_CLIENT:
        oldest = ".".join(map(str, OLDEST_CLIENT))
        raise UnsupportedError(
            f"huggingface_hub {version} is too old, models on the Hugging Face Hub need {oldest} or newer: pip install "
            "--upgrade huggingface_hub"
        )
    return huggingface_hub


def repo_folder(client: Any, repo: str) -> Path:
    """A repository's folder in the client's cache, whose layout is public: https://huggingface.co/docs/hub/local-cache"""
    return Path(client.constants.HF_HUB_CACHE, "models--" + repo.replace("/", "--"))


# ---- requests


def list_files(client: Any, repo: str, revision: str) -> Listing:
    """Ask the hub for a repository's files.

    Raises:
        HubError: If the hub denies access, does not have the revision or sends malformed data.
        Unreachable: If it does not answer.
    """
    ask = partial(client.HfApi(library_name="llamac").model_info, repo, revision=revision, timeout=TIMEOUT_S)
    with translated_errors(client, repo, revision):
        try:
            info = ask(files_metadata=True)
        except (KeyError, TypeError):  # some mirrors leave out sizes and checksums
            info = ask()
        commit = str(info.sha)
        if not COMMIT.fullmatch(commit) or (COMMIT.fullmatch(revision) and commit != revision):
            raise HubError(_hostile(client, repo, f"{commit!r:.80} is not the hash of revision {revision!r}"))
        names, sha256, sizes = [], {}, {}
        for sibling in info.siblings or ():
            name = sibling.rfilename
            if not isinstance(name, str):
                raise HubError(_hostile(client, repo, f"{name!r:.80} is not a file name"))
            names.append(name)
            if sibling.size is not None:
                sizes[name] = _checked_size(client, repo, name, sibling.size)
            if sibling.lfs is not None and SHA256.fullmatch(str(sibling.lfs.sha256)):
                sha256[name] = sibling.lfs.sha256
    return Listing(commit, tuple(sorted(names)), sha256, sizes)


def file_metadata(client: Any, repo: str, commit: str, name: str) -> Metadata:
    """Ask the hub for a file's metadata.

    Raises:
        HubError: If the answer is for another commit, or its ETag is not a hash.
    """
    url = client.hf_hub_url(repo, name, revision=commit)
    found = client.get_hf_file_metadata(url, timeout=TIMEOUT_S)
    if found.commit_hash != commit:
        raise HubError(_hostile(client, repo, f"the commit of {name} is {found.commit_hash!r:.80}, not {commit}"))
    if not _ETAG.fullmatch(str(found.etag)):
        raise HubError(_hostile(client, repo, f"the ETag of {name} is {found.etag!r:.80}, which is not a hash"))
    size = None if found.size is None else _checked_size(client, repo, name, found.size)
    return Metadata(url, found.etag, size, found.xet_file_data is not None)


def _checked_size(client: Any, repo: str, name: str, size: object) -> int:
    if type(size) is not int or size < 0:
        raise HubError(_hostile(client, repo, f"the size of {name} is {size!r:.80}"))
    return size


@contextlib.contextmanager
def checked_responses(client: Any, repo: str, expected: Metadata) -> Iterator[None]:
    """Check the answers to the client's own requests in this thread before the client sees them.

    Args:
        client: The client.
        repo: The repository.
        expected: The metadata that the hub sent earlier for the file.

    Raises:
        HubError: If a commit hash is not a hash, or the file's metadata has changed.
    """
    thread = threading.get_ident()

    def check(response: Any) -> None:
        if threading.get_ident() != thread or response.request.method != "HEAD":
            return
        headers = response.headers
        commit = headers.get("X-Repo-Commit")
        if commit is not None and not COMMIT.fullmatch(commit):
            raise HubError(_hostile(client, repo, f"the commit is {commit!r:.80}, which is not a hash"))
        if not response.is_success and not response.is_redirect:
            return
        if response.is_redirect and not urlsplit(headers.get("Location", "")).netloc:
            return  # the client follows this redirect and uses the next answer
        etag = headers.get("X-Linked-ETag") or headers.get("ETag", "")
        size = headers.get("X-Linked-Size") or (None if response.is_redirect else headers.get("Content-Length"))
        has_xet = "X-Xet-Hash" in headers
        if etag.removeprefix("W/").strip('"') != expected.etag or (has_xet and not expected.has_xet):
            raise HubError(f"{HUB}{repo} changed while it was downloaded; run this again")
        if size is not None and size != str(expected.size):
            raise HubError(_hostile(client, repo, f"two sizes of a file: {expected.size} and {size:.20}"))

    hooks = client.get_session().event_hooks["response"]
    hooks.append(check)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            hooks.remove(check)


# ---- errors


def _hostile(client: Any, repo: str, problem: str) -> str:
    """The message for an answer that the Hugging Face Hub would not send."""
    return f"{HUB}{repo}: {client.constants.ENDPOINT} does not answer like the Hugging Face Hub: {problem}"


@contextlib.contextmanager
def translated_errors(client: Any, repo: str, revision: str) -> Iterator[None]:
    """Convert the client's errors to HubError, ArgumentError, or Unreachable if a copy on this machine can help."""
    kinds = client.errors
    page = f"{client.constants.ENDPOINT}/{repo}"
    try:
        yield
    except LlamacError:  # HubError is also an OSError
        raise
    except kinds.GatedRepoError:
        raise HubError(
            f"{HUB}{repo} is gated: accept its conditions at {page} and set HF_TOKEN to your token"
        ) from None
    except kinds.RepositoryNotFoundError:
        raise HubError(
            f"{HUB}{repo} does not exist at {client.constants.ENDPOINT}, or it is private (HF_TOKEN is your token)"
        ) from None
    except kinds.RevisionNotFoundError:
        raise HubError(f"{HUB}{repo} has no revision {revision!r}: see {page}") from None
    except kinds.EntryNotFoundError as error:
        if isinstance(error, kinds.LocalEntryNotFoundError):
            raise Unreachable(_first_line(error.__cause__ or error)) from None
        raise HubError(f"{HUB}{repo}: {_first_line(error)}") from None
    except kinds.HFValidationError as error:
        raise ArgumentError(f"{HUB}{repo}: {_first_line(error)}") from None
    except kinds.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        if status >= 500 or status == 429:
            raise Unreachable(_first_line(error)) from None
        token = "; check your token (HF_TOKEN, or `hf auth login`)"
        raise HubError(f"{HUB}{repo}: {_first_line(error)}{token if status in (401, 403) else ''}") from None
    except network_errors(client) as error:
        if isinstance(error, OSError) and is_disk_error(error):
            raise HubError(f"{client.constants.HF_HUB_CACHE}, the client's cache: {error.strerror}") from None
        raise Unreachable(_first_line(error)) from None
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, _invalid_url(client)) as error:
        raise HubError(_hostile(client, repo, _first_line(error))) from None


def network_errors(client: Any) -> tuple[type[BaseException], ...]:
    """The classes of network errors.

    Versions of the client use different HTTP libraries. The client's own error derives from theirs.
    """
    return (OSError, *client.errors.HfHubHTTPError.__bases__)


def is_disk_error(error: BaseException) -> bool:
    """Whether an error is about the disk rather than the network."""
    return isinstance(error, OSError) and error.errno in _DISK_ERRORS


def _invalid_url(client: Any) -> type[Exception]:
    """The HTTP library's error for a URL that it cannot parse, which is not one of its network errors."""
    for base in client.errors.HfHubHTTPError.__bases__:
        library = sys.modules.get(base.__module__.partition(".")[0])
        found = getattr(library, "InvalidURL", None)
        if isinstance(found, type) and issubclass(found, Exception):
            return found
    return ValueError


def xet_errors() -> tuple[type[BaseException], ...]:
    """The classes of errors of the hub's own protocol (Xet). If it fails, plain HTTP may still work."""
    try:
        import hf_xet
    except ImportError:
        return ()
    named = (value for value in vars(hf_xet).values() if isinstance(value, type) and issubclass(value, Exception))
    return (RuntimeError, *named)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
