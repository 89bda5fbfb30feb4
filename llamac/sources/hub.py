"""Models on the Hugging Face Hub: parses hf:ORG/NAME, and chooses the files of a repository that a model needs.

Downloads use the client huggingface_hub, its cache and its environment variables (HF_HOME, HF_TOKEN, HF_ENDPOINT,
HF_HUB_OFFLINE). In addition, llamac downloads only the files that a model needs, resumes large files, and rejects files
whose SHA-256 differs from the hub's.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from llamac.errors import ArgumentError, ExportError, HubError
from llamac.format.detect import HF_WEIGHTS, HUB, files_of, gguf_models
from llamac.format.model_folders import MODEL_SETTINGS, MODULES, SENTENCE_CONFIG
from llamac.format.small_files import read_small
from llamac.format.strict_json import MAX_INDEX_BYTES, parse_object
from llamac.progress import Progress
from llamac.sources import hub_client
from llamac.sources.cache import Cache
from llamac.sources.digests import digests_of
from llamac.sources.hub_client import COMMIT, SHA256, Listing, Unreachable
from llamac.sources.hub_download import Downloads, mismatch

FORM = "hf:ORG/NAME[@REVISION], or for a GGUF file hf:ORG/NAME/FILE.gguf or hf:ORG/NAME:Q4_K_M"
# Files other than weights that an import reads.
CONFIGURATION = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt"),
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "hf_quant_config.json"),
    *("chat_template.jinja", "chat_template.json", MODULES, SENTENCE_CONFIG, MODEL_SETTINGS),
)
TEMPLATES = "additional_chat_templates/"
MODULE_FILE = re.compile(r"(?P<folder>\d_\w+)/(config\.json|model\.safetensors|pytorch_model\.bin)")
PICKLES = tuple(name for name in HF_WEIGHTS if ".bin" in name)
ADAPTER = "adapter_model.safetensors"  # of LoRA
SHOWN = 12  # names in a message
REF_BYTES = 256  # more than a commit hash has

_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_NAME = re.compile(
    rf"hf:(?P<repo>{_PART}/{_PART})(?:/(?P<file>[^@:\\\0]+)|:(?P<quant>[A-Za-z0-9_.-]+))?(?:@(?P<revision>[^\s:\\\0]+))?"
)


class HubName(NamedTuple):
    """A parsed hf: name.

    Attributes:
        repo: The repository, ORG/NAME.
        revision: A branch, tag or commit.
        file: A GGUF file in the repository, or None.
        quant: A word in the name of a GGUF file, such as Q4_K_M, or None.
    """

    repo: str
    revision: str
    file: str | None
    quant: str | None


def parse(text: str) -> HubName:
    """Parse an hf: name.

    Raises:
        ArgumentError: If the name is malformed. The message has the expected form.
    """
    name = _NAME.fullmatch(text)
    parts = [name["file"] or "", name["revision"] or ""] if name else []
    steps = [step for part in parts if part for step in part.split("/")]
    if name is None or ".." in text or "--" in name["repo"] or any(step in ("", ".") for step in steps):
        raise ArgumentError(f"{text!r} is not the name of a model on the Hugging Face Hub, expected {FORM}")
    if name["file"] and not name["file"].endswith(".gguf"):
        raise ArgumentError(f"{text!r}: only a GGUF file can be selected in a repository, expected {FORM}")
    return HubName(name["repo"], name["revision"] or "main", name["file"], name["quant"])


def fetch(text: str, progress: Progress, cache: Cache | None) -> tuple[Path, str | None]:
    """Download the model with an hf: name, unless it is in the client's cache.

    Args:
        text: The name.
        progress: Called with the phases "downloading" and "reading" and byte counts.
        cache: Remembers the checksums of downloaded files; None computes them each time.

    Returns:
        The model's directory or GGUF file, and its name if it is a directory.

    Raises:
        ArgumentError: If `text` is not an hf: name.
        UnsupportedError: If the client is missing or too old.
        HubError: If the hub denies access, does not have the model or sends wrong data; or if it cannot be reached and
            the client's cache has no copy.
    """
    name = parse(text)
    client = hub_client.load_client()
    known: Mapping[str, str] = {}
    try:
        listing = hub_client.list_files(client, name.repo, name.revision)
    except Unreachable as error:
        path = _cached_model(client, name, str(error))
    else:
        known = listing.sha256
        try:
            with hub_client.translated_errors(client, name.repo, name.revision):
                path = _download(client, name, listing, progress)
        except Unreachable as error:
            raise HubError(
                f"{HUB}{name.repo}: the download was interrupted ({error}); run this again to resume it"
            ) from None
    _verify(name, path, known, progress, cache)
    return path, None if path.is_file() else name.repo


# ---- which files


def choose(name: HubName, files: Iterable[str], read: Callable[[str], bytes]) -> list[str]:
    """Choose the files that a model needs.

    Args:
        name: The model's name.
        files: Names of all files in the repository.
        read: Returns the content of one of them.

    Returns:
        The names of the files. The first one identifies the model: a GGUF file, or config.json.

    Raises:
        HubError: If the repository has no model, or several and the name selects none.
    """
    names = set(filter(_is_inside, files))
    models = gguf_models(names)
    if name.file is not None:
        selected = next((parts for label, parts in models.items() if name.file in (label, *parts)), None)
        if selected is None:
            raise HubError(f"{HUB}{name.repo} has no file {name.file}{_candidates(models)}")
        return selected
    if name.quant is not None:
        fitting = [label for label in models if _has_word(label, name.quant)]
        if len(fitting) != 1:
            what = f"{len(fitting)} GGUF files" if fitting else "no GGUF file"
            raise HubError(f"{HUB}{name.repo} has {what} for {name.quant!r}{_candidates(fitting or models)}")
        return models[fitting[0]]
    weights = next((weights for weights in HF_WEIGHTS if weights in names), None)
    # never read pickles of a model that also has safetensors
    safe = [other for other in sorted(names) if _is_safe_model(other)] if weights in PICKLES else []
    if "config.json" in names and weights is not None and not safe:
        extra = [other for other in sorted(names) if other in CONFIGURATION or other.startswith(TEMPLATES)]
        extra += _module_files(names)
        shards = _shards(name, weights, read(weights), names) if weights.endswith(".index.json") else []
        return ["config.json", *(other for other in extra if other != "config.json"), weights, *shards]
    if len(models) == 1:
        return next(iter(models.values()))
    if models:
        raise HubError(
            f"{HUB}{name.repo} has several models; select one with hf:ORG/NAME:QUANT or hf:ORG/NAME/FILE.gguf"
            f"{_candidates(models)}"
        )
    what = f"neither config.json with {', '.join(HF_WEIGHTS)}, nor a GGUF file"
    if "config.json" in names and safe:
        what = f"{weights} is not read beside safetensors files ({', '.join(safe[:SHOWN])})"
    raise HubError(f"{HUB}{name.repo} has no model: {what}{_candidates(sorted(names))}")


def _is_safe_model(name: str) -> bool:
    """Whether a safetensors file can have a model's weights: not those of an adapter or of a part in a folder."""
    return name.endswith(".safetensors") and "/" not in name and name != ADAPTER


def _module_files(names: set[str]) -> list[str]:
    """The files of sentence-transformers' modules, without a pickle where there is a safetensors file."""
    found = [match for match in map(MODULE_FILE.fullmatch, sorted(names)) if match is not None]
    safe = {match["folder"] for match in found if match[0].endswith(".safetensors")}
    return [match[0] for match in found if not (match[0].endswith(".bin") and match["folder"] in safe)]


def _is_inside(name: str) -> bool:
    """Whether a file name from the hub stays inside the repository, on every system."""
    return not any(step in ("", ".", "..") for step in name.split("/")) and not set(name) & set("\\:\0")


def _has_word(name: str, word: str) -> bool:
    """Whether a file name has a word, ignoring case. Dots, hyphens and slashes end words, so Q4_K is not in Q4_K_M."""
    return re.search(rf"(?:^|[-./_]){re.escape(word)}(?:[-./]|$)", name, re.IGNORECASE) is not None


def _candidates(names: Iterable[str]) -> str:
    shown = list(names)
    more = f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    return f"; it has {', '.join(shown[:SHOWN])}{more}" if shown else "; it has no such file"


def _shards(name: HubName, index: str, data: bytes, names: set[str]) -> list[str]:
    """The files that an index names. Raises HubError if one is missing."""
    try:
        shards = sorted(set(parse_object(data, index, max_bytes=MAX_INDEX_BYTES)["weight_map"].values()))
        missing = [str(shard) for shard in shards if shard not in names]
    except (ExportError, LookupError, TypeError, AttributeError):
        raise HubError(f"{HUB}{name.repo}: {index} is not an index of weights") from None
    if missing:
        raise HubError(f"{HUB}{name.repo}: {index} names missing files: {', '.join(missing[:SHOWN])}")
    return shards


def _download(client: Any, name: HubName, listing: Listing, progress: Progress) -> Path:
    """Download the files that are not in the client's cache. Returns the file or directory of the model."""
    downloads = Downloads(client, name.repo, name.revision, listing, progress)
    needed = choose(name, listing.names, lambda index: read_small(downloads.get(index), error=HubError))
    downloads.expect(needed)
    paths = [downloads.get(file) for file in needed]
    return paths[0] if needed[0].endswith(".gguf") else paths[0].parent


# ---- the client's cache


def _cached_model(client: Any, name: HubName, reason: str) -> Path:
    """The model in the client's cache. `reason` says why the hub cannot be reached."""
    folder = hub_client.repo_folder(client, name.repo)
    commit = name.revision
    if not COMMIT.fullmatch(commit):
        with contextlib.suppress(OSError, UnicodeDecodeError, HubError):
            noted = read_small(folder / "refs" / name.revision, REF_BYTES, HubError).decode().strip()
            commit = noted if COMMIT.fullmatch(noted) else commit
    snapshot = folder / "snapshots" / commit
    why = f"the hub cannot be reached ({reason})"
    if not snapshot.is_dir():
        raise HubError(f"{HUB}{name.repo}: {why}, and revision {name.revision!r} is not in {folder.parent}")
    names = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()]
    try:
        needed = choose(name, names, lambda index: read_small(snapshot / index, error=HubError))
    except HubError as error:
        raise HubError(f"{why}, and the copy in {folder.parent} is incomplete: {error}") from None
    return snapshot / needed[0] if needed[0].endswith(".gguf") else snapshot


def _verify(name: HubName, path: Path, known: Mapping[str, str], progress: Progress, cache: Cache | None) -> None:
    """Raise HubError if a file's SHA-256 differs from the hub's, or from its name in the client's cache."""
    files = files_of(path)
    digests = cache.digests(path, files, progress) if cache is not None else digests_of(files, {}, progress)[0]
    snapshots = next(parent for parent in path.parents if parent.name == "snapshots")
    for label, file in files.items():
        in_repo = file.relative_to(snapshots).as_posix().partition("/")[2]
        blob = Path(os.path.realpath(file))
        expected = known.get(in_repo) or (blob.name if SHA256.fullmatch(blob.name) else None)
        if expected not in (None, digests[label]):
            raise HubError(f"{mismatch(name.repo, in_repo)}; delete {blob} and run this again")
