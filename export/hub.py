"""Models on the Hugging Face Hub: what hf:org/name means, which files of a repository a model needs, and bringing them.

All goes through the client, huggingface_hub, with its cache and its environment (HF_HOME, HF_TOKEN, HF_ENDPOINT,
HF_HUB_OFFLINE). What is added here: only needed files are asked for, large ones go on where they were broken off, also
by another process, and none is used whose SHA-256 is another than the hub's.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from llamac.cache import Cache, digests_of, locked, sha256_of_file
from llamac.errors import ArgumentError, HubError, LlamacError, UnsupportedError
from llamac.export.files import read_small
from llamac.progress import Progress
from llamac.sources import HF_WEIGHTS, HUB, files_of, gguf_models

FORM = "hf:ORG/NAME[@REVISION], or to choose a GGUF file hf:ORG/NAME/FILE.gguf or hf:ORG/NAME:Q4_K_M"
# Files that tell of a model beside its weights.
TEXTS = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt"),
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json"),
)
TEMPLATES = "additional_chat_templates/"
PICKLES = tuple(name for name in HF_WEIGHTS if ".bin" in name)
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EIO)
WEIGHTS = (".safetensors", ".bin", ".gguf")
OLDEST_CLIENT = (1, 3)  # pyproject.toml asks for no older one, but other packages may have brought one
ATTEMPTS = 5  # one after another without a single byte
PAUSE_S = 0.5
SHOWN = 12  # names in a message

_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_NAME = re.compile(
    rf"hf:(?P<repo>{_PART}/{_PART})(?:/(?P<file>[^@:\\\0]+)|:(?P<quant>[A-Za-z0-9_.-]+))?(?:@(?P<revision>[^\s:\\\0]+))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Wanted(NamedTuple):
    """What an hf: name asks for. file: a GGUF file in the repository; quant: part of the name of one."""

    repo: str
    revision: str
    file: str | None
    quant: str | None


def parse(text: str) -> Wanted:
    """An hf: name. Raises ArgumentError with the right form."""
    name = _NAME.fullmatch(text)
    parts = [name["repo"], name["file"] or "", name["revision"] or ""] if name else []
    steps = [step for part in parts[1:] if part for step in part.split("/")]
    if name is None or ".." in text or "--" in name["repo"] or any(step in ("", ".") for step in steps):
        raise ArgumentError(f"{text!r} is no name of a model on the Hugging Face Hub, expected {FORM}")
    if name["file"] and not name["file"].endswith(".gguf"):
        raise ArgumentError(f"{text!r}: only a GGUF file can be named in a repository, expected {FORM}")
    return Wanted(name["repo"], name["revision"] or "main", name["file"], name["quant"])


class _Files(NamedTuple):
    """The files of a repository at a commit. known: SHA-256 of those that the hub keeps as large files."""

    commit: str
    names: tuple[str, ...]
    known: Mapping[str, str]
    sizes: Mapping[str, int]


def fetch(text: str, progress: Progress, notes: Cache | None) -> tuple[Path, str | None]:
    """(the directory or file of the model with this hf: name, its name if it is a directory), brought here if need be.

    notes: where checksums of files are remembered. Raises ArgumentError for what is no such name, UnsupportedError
    without the client, HubError for what the hub has not or does not give, or where neither it nor a copy is at hand.
    """
    wanted = parse(text)
    client = _client()
    known: Mapping[str, str] = {}
    try:
        files = _listed(client, wanted)
    except _Unreachable as error:
        path = _kept(client, wanted, str(error))
    else:
        known = files.known
        try:
            with _hub_errors(client, wanted):
                path = _bring(client, wanted, files, progress)
        except _Unreachable as error:
            raise HubError(
                f"{HUB}{wanted.repo}: the download was broken off ({error}): run this again, it goes on from there"
            ) from None
    _verify(wanted, path, known, progress, notes)
    return path, None if path.is_file() else wanted.repo


def _client() -> Any:
    try:
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ImportError:
        raise UnsupportedError(
            "models on the Hugging Face Hub need its client: pip install 'llamac[hub]' (or huggingface_hub)"
        ) from None
    version = str(huggingface_hub.__version__)
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST_CLIENT:
        raise UnsupportedError(
            f"huggingface_hub {version} is too old, models on the Hugging Face Hub need "
            f"{'.'.join(map(str, OLDEST_CLIENT))} or newer: pip install --upgrade huggingface_hub"
        )
    return huggingface_hub


# ---- asking the hub


class _Unreachable(Exception):
    """The hub cannot be asked: no network, offline mode, or it is out of order."""


def _listed(client: Any, wanted: Wanted) -> _Files:
    ask = partial(client.HfApi(library_name="llamac").model_info, wanted.repo, revision=wanted.revision, timeout=20)
    with _hub_errors(client, wanted):
        try:
            info = ask(files_metadata=True)
        except (KeyError, TypeError):  # mirrors do not always tell of sizes and checksums in full
            info = ask()
    names, known, sizes = [], {}, {}
    for sibling in info.siblings or ():
        names.append(sibling.rfilename)
        if sibling.size is not None:
            sizes[sibling.rfilename] = sibling.size
        if sibling.lfs is not None and _SHA256.fullmatch(str(sibling.lfs.sha256)):
            known[sibling.rfilename] = sibling.lfs.sha256
    return _Files(info.sha or wanted.revision, tuple(sorted(names)), known, sizes)


@contextlib.contextmanager
def _hub_errors(client: Any, wanted: Wanted) -> Iterator[None]:
    """Errors of the client as ours: _Unreachable where a copy on this machine may do."""
    kinds = client.errors
    page = f"{client.constants.ENDPOINT}/{wanted.repo}"
    try:
        yield
    except LlamacError:  # HubError is an OSError, too
        raise
    except kinds.GatedRepoError:
        raise HubError(
            f"{HUB}{wanted.repo} is gated: accept its conditions at {page} and give your token in HF_TOKEN"
        ) from None
    except kinds.RepositoryNotFoundError:
        raise HubError(
            f"{HUB}{wanted.repo}: there is no such repository at {client.constants.ENDPOINT}, or it is private "
            "(HF_TOKEN holds your token)"
        ) from None
    except kinds.RevisionNotFoundError:
        raise HubError(f"{HUB}{wanted.repo} has no revision {wanted.revision!r}: see {page}") from None
    except kinds.EntryNotFoundError as error:
        if isinstance(error, kinds.LocalEntryNotFoundError):
            raise _Unreachable(_first_line(error.__cause__ or error)) from None
        raise HubError(f"{HUB}{wanted.repo}: {_first_line(error)}") from None
    except kinds.HFValidationError as error:
        raise ArgumentError(f"{HUB}{wanted.repo}: {_first_line(error)}") from None
    except kinds.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        if status >= 500 or status == 429:
            raise _Unreachable(_first_line(error)) from None
        token = "; does the hub know your token (HF_TOKEN, or what `hf auth login` has stored)?"
        raise HubError(f"{HUB}{wanted.repo}: {_first_line(error)}{token if status in (401, 403) else ''}") from None
    except _network_errors(client) as error:
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            raise HubError(f"{client.constants.HF_HUB_CACHE}, the client's cache: {error.strerror}") from None
        raise _Unreachable(_first_line(error)) from None


def _network_errors(client: Any) -> tuple[type[BaseException], ...]:
    """The client's HTTP library differs between its versions: its errors are what the client's own derive from."""
    return (OSError, *client.errors.HfHubHTTPError.__bases__)


def _chunk_errors() -> tuple[type[BaseException], ...]:
    """What tells that the hub's own protocol (Xet) has failed: where it does, HTTP may do."""
    try:
        import hf_xet
    except ImportError:
        return ()
    own = (value for value in vars(hf_xet).values() if isinstance(value, type) and issubclass(value, Exception))
    return (RuntimeError, *own)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


# ---- which files


def choose(wanted: Wanted, files: Iterable[str], read: Callable[[str], bytes]) -> list[str]:
    """The files that the model needs, the one that stands for it first. read: the content of one of them.

    Raises HubError where there is none, or more than one model.
    """
    names = set(filter(_is_plain, files))  # any other would lead out of the client's cache
    models = gguf_models(names)
    if wanted.file is not None:
        taken = next((parts for label, parts in models.items() if wanted.file in (label, *parts)), None)
        if taken is None:
            raise HubError(f"{HUB}{wanted.repo} has no file {wanted.file}{_are_there(models)}")
        return taken
    if wanted.quant is not None:
        fitting = [label for label in models if _has_word(label, wanted.quant)]
        if len(fitting) != 1:
            what = f"{len(fitting)} GGUF files" if fitting else "no GGUF file"
            raise HubError(f"{HUB}{wanted.repo} has {what} for {wanted.quant!r}{_are_there(fitting or models)}")
        return models[fitting[0]]
    weights = next((name for name in HF_WEIGHTS if name in names), None)
    if weights in PICKLES and any(name.endswith(".safetensors") for name in names):
        weights = None  # a pickle is never taken where the same may be had without
    if "config.json" in names and weights is not None:
        texts = [name for name in sorted(names) if name in TEXTS or name.startswith(TEMPLATES)]
        shards = _shards(wanted, weights, read(weights), names) if weights.endswith(".index.json") else []
        return ["config.json", *(name for name in texts if name != "config.json"), weights, *shards]
    if len(models) == 1:
        return next(iter(models.values()))
    if models:
        raise HubError(
            f"{HUB}{wanted.repo} has several models, name one: hf:ORG/NAME:QUANT or hf:ORG/NAME/FILE.gguf"
            f"{_are_there(models)}"
        )
    raise HubError(
        f"{HUB}{wanted.repo} holds no model: neither config.json with {', '.join(HF_WEIGHTS)}, nor a GGUF file"
        f"{_are_there(sorted(names))}"
    )


def _is_plain(name: str) -> bool:
    """Whether a name that the hub tells is one of a file inside the repository, on every system."""
    return not any(step in ("", ".", "..") for step in name.split("/")) and not set(name) & set("\\:\0")


def _has_word(name: str, word: str) -> bool:
    """Whether a file's name has a word that ends at a dot, hyphen or slash, in whatever case: Q4_K is not Q4_K_M."""
    return re.search(rf"(?:^|[-./_]){re.escape(word)}(?:[-./]|$)", name, re.IGNORECASE) is not None


def _are_there(names: Iterable[str]) -> str:
    shown = list(names)
    more = f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    return f"; there are {', '.join(shown[:SHOWN])}{more}" if shown else "; there is no file"


def _shards(wanted: Wanted, index: str, data: bytes, names: set[str]) -> list[str]:
    """The files that an index names. What is no name of a file of the repository's own is never asked for."""
    try:
        shards = sorted(set(json.loads(data)["weight_map"].values()))
        missing = [f"{shard}" for shard in shards if shard not in names]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise HubError(f"{HUB}{wanted.repo}: {index} is no index of weights") from None
    if missing:
        raise HubError(f"{HUB}{wanted.repo}: {index} names files that are not there: {', '.join(missing[:SHOWN])}")
    return shards


# ---- bringing them


def _bring(client: Any, wanted: Wanted, files: _Files, progress: Progress) -> Path:
    """Downloads what is not here yet; returns the file or directory that stands for the model."""
    downloads = _Downloads(client, wanted, files, progress)
    taken = choose(wanted, files.names, lambda name: read_small(downloads.get(name), error=HubError))
    downloads.expect(taken)
    paths = [downloads.get(name) for name in taken]
    return paths[0] if taken[0].endswith(".gguf") else paths[0].parent


class _Downloads:
    """Downloads of one repository's files, one after another."""

    def __init__(self, client: Any, wanted: Wanted, files: _Files, progress: Progress) -> None:
        self._client, self._wanted, self._files, self._progress = client, wanted, files, progress
        self._total = self._before = 0
        self._is_noted = _COMMIT.fullmatch(wanted.revision) is not None

    def expect(self, names: list[str]) -> None:
        """Which files there will be: so many bytes are all there is to do."""
        self._total = sum(self._files.sizes.get(name, 0) for name in names)

    def get(self, name: str) -> Path:
        """A file's place in the client's cache."""
        client, wanted, commit = self._client, self._wanted, self._files.commit
        bar = self._bar()
        is_new = not self._is_here(name)
        is_checked = is_new and (name in self._files.known or name.endswith(WEIGHTS)) and self._bring_large(name, bar)
        # the first one by the revision's name: so the client notes which commit that is, for when there is no network
        revision = commit if self._is_noted else wanted.revision
        ask = partial(client.hf_hub_download, wanted.repo, name, tqdm_class=bar, library_name="llamac", etag_timeout=20)
        try:
            path = ask(revision=revision)
        except _chunk_errors():
            is_checked = self._bring_large(name, bar, in_chunks=False)
            path = ask(revision=revision)
        if not self._is_noted and f"/snapshots/{commit}/" not in path.replace(os.sep, "/"):  # it has just moved on
            path = ask(revision=commit)
        self._is_noted = True
        self._before += self._files.sizes.get(name, 0)
        if is_new and not is_checked:
            blob = Path(path).resolve()
            self._check(name, blob, _expected(self._files.known.get(name), blob), Path(path))
        return Path(path)

    def _check(self, name: str, blob: Path, expected: str | None, *others: Path) -> None:
        """Removes what has just been downloaded if it is damaged. expected: its SHA-256, if it is known."""
        if expected is not None and sha256_of_file(blob) != expected:
            for path in (blob, *others):
                path.unlink(missing_ok=True)
            raise HubError(_damaged(self._wanted, name))

    def _is_here(self, name: str) -> bool:
        found = self._client.try_to_load_from_cache(self._wanted.repo, name, revision=self._files.commit)
        return isinstance(found, str)

    def _bar(self) -> type:
        """What the client takes for a class of progress bars: it tells our progress."""
        progress, before, total = self._progress, self._before, self._total

        class Bar:
            def __init__(self, *_: object, total: float | None = None, initial: float = 0, **__: object) -> None:
                self.total, self.n = total, initial

            def update(self, count: float | None = 1) -> None:
                self.n += count or 0
                all_bytes = max(total, int(self.total or 0))
                progress("downloading", min(before + int(self.n), all_bytes), all_bytes)

            def __enter__(self) -> Bar:
                return self

            def __exit__(self, *_: object) -> None:
                pass

            def __getattr__(self, _: str) -> Callable[..., None]:
                return lambda *args, **kwargs: None

        return Bar

    def _bring_large(self, name: str, bar: Callable[..., Any], in_chunks: bool = True) -> bool:
        """Downloads a large file to where the client looks for it, from the byte on at which an earlier process was
        broken off; the client itself would begin anew. False where this is left to the client: the file is a small
        one, or comes in the hub's own chunks (Xet), several at a time, if it may (`in_chunks`)."""
        client, repo = self._client, self._wanted.repo
        url = client.hf_hub_url(repo, name, revision=self._files.commit)
        found = client.get_hf_file_metadata(url)
        etag, size = str(found.etag), found.size  # of a large file it is its SHA-256
        has_xet = not client.constants.HF_HUB_DISABLE_XET and find_spec("hf_xet") is not None
        in_chunks = in_chunks and found.xet_file_data is not None and has_xet
        if not _SHA256.fullmatch(etag) or size is None or in_chunks:
            return False
        blob = _place(client, self._wanted) / "blobs" / etag
        part = blob.with_name(f"{etag}.llamac.incomplete")
        blob.parent.mkdir(parents=True, exist_ok=True)
        with locked(part), open(part, "ab", buffering=0) as file:
            if blob.exists():  # another process has brought it meanwhile
                part.unlink()
                return False
            if file.tell() > size:
                file.truncate(0)
            self._receive(url, file, size, bar(total=size, initial=file.tell()))
            self._check(name, part, etag)
            os.replace(part, blob)
        return True

    def _receive(self, url: str, file: BinaryIO, size: int, bar: Any) -> None:
        """Appends what is missing; where the connection breaks it goes on from there, as long as anything comes."""
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        attempts = 0
        while (begun := file.seek(0, os.SEEK_END)) < size:
            headers = {**build_hf_headers(library_name="llamac"), "Accept-Encoding": "identity"}
            if begun:
                headers["Range"] = f"bytes={begun}-"
            try:
                with get_session().stream("GET", url, headers=headers, follow_redirects=True) as response:
                    hf_raise_for_status(response)
                    if begun and response.status_code != 206:  # it comes from the beginning
                        file.truncate(0)
                        bar.update(-begun)
                    for piece in response.iter_bytes():
                        file.write(piece)
                        bar.update(len(piece))
                        attempts = 0
                if file.tell() == begun:
                    raise ConnectionError("the hub sent nothing")
            except self._client.errors.HfHubHTTPError:
                raise
            except _network_errors(self._client) as error:
                attempts += 1
                if attempts > ATTEMPTS or (isinstance(error, OSError) and error.errno in DISK_ERRORS):
                    raise
                time.sleep(PAUSE_S * attempts)


# ---- what is here


def _kept(client: Any, wanted: Wanted, reason: str) -> Path:
    """The model in the client's cache, as its documentation lays that out. reason: why the hub cannot be asked."""
    place = _place(client, wanted)
    commit = wanted.revision
    if not _COMMIT.fullmatch(commit):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            noted = (place / "refs" / wanted.revision).read_text().strip()
            commit = noted if _COMMIT.fullmatch(noted) else commit
    folder = place / "snapshots" / commit
    here = f"the hub cannot be reached ({reason})"
    if not folder.is_dir():
        raise HubError(f"{HUB}{wanted.repo}: {here}, and revision {wanted.revision!r} is not in {place.parent}")
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    try:
        taken = choose(wanted, names, lambda name: read_small(folder / name, error=HubError))
    except HubError as error:
        raise HubError(f"{here}, and its copy in {place.parent} is not whole: {error}") from None
    return folder / taken[0] if taken[0].endswith(".gguf") else folder


def _place(client: Any, wanted: Wanted) -> Path:
    """A repository's folder in the client's cache."""
    return Path(client.constants.HF_HUB_CACHE, "models--" + wanted.repo.replace("/", "--"))


def _verify(wanted: Wanted, path: Path, known: Mapping[str, str], progress: Progress, notes: Cache | None) -> None:
    """HubError if a file has another SHA-256 than the hub says, or than the client's cache has it under."""
    files = files_of(path)
    digests = notes.digests(path, files, progress) if notes is not None else digests_of(files, {}, progress)[0]
    snapshots = next(parent for parent in path.parents if parent.name == "snapshots")
    for name, place in files.items():
        in_repo = place.relative_to(snapshots).as_posix().partition("/")[2]
        blob = place.resolve()
        if digests[name] != (_expected(known.get(in_repo), blob) or digests[name]):
            raise HubError(f"{_damaged(wanted, in_repo)}: delete {blob}, which belongs to the client's cache")


def _expected(known: str | None, blob: Path) -> str | None:
    """The SHA-256 of a file: as the hub said, or else the name under which the client keeps a large file."""
    return known or (blob.name if _SHA256.fullmatch(blob.name) else None)


def _damaged(wanted: Wanted, name: str) -> str:
    return f"{HUB}{wanted.repo}: {name} came damaged: its SHA-256 is not the hub's; run this again"
