"""What may be named as a model, where it lies, and opening it: a flat file is mapped, anything else is converted first.

Opening a flat file needs nothing but this module: what finds, converts and keeps other sources is imported for these.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from llamac.arguments import DTYPES, Adapter, adapters, file_path, wrong_type
from llamac.errors import ArgumentError, ExportError, TokenizerError, UnsupportedError
from llamac.flatfile import MAGIC, FlatFile
from llamac.progress import Progress, silent

HUB = "hf:"
HEAD_BYTES = 64
# What files of other formats begin with, at which byte: GGUF, llama2.c's versions 1 and 2, ZIP and pickle (PyTorch),
# safetensors, and Git LFS's pointers, which stand for any of them.
FOREIGN = (
    (b"GGUF", 0),
    (b"24ka", 0),
    (b"PK\3\4", 0),
    *((bytes([0x80, protocol]), 0) for protocol in range(2, 6)),
    (b'{"', 8),
    (b"version https://git-lfs", 0),
)
# A file that names its directory, in the order in which the import of a directory takes them.
HF_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
HF_ENDINGS = (".safetensors", ".safetensors.index.json", ".bin.index.json", "config.json")
# Files of a Hugging Face directory that an import may read beside the weights.
HF_TEXTS = (".json", ".jinja", ".txt", ".model")
# What a directory's tokenizer is read from; where there is none of these, from the first GGUF file.
TOKENIZERS = ({"tokenizer.json"}, {"tokenizer.model"}, {"vocab.json", "merges.txt"}, {"tokenizer.bin"})
# How models of the hub are named elsewhere: by their page (a Path makes one slash of two), by their name alone.
HUB_PAGE = re.compile(r"(?:https?://?(?:www\.)?(?:huggingface\.co|hf\.co)/)?([\w.-]+/[\w.-]+)(?:/tree/main)?/?")
GGUF_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


class Source(NamedTuple):
    """A model on this machine. path: a file or a directory. name: what it is called where its path does not tell it."""

    path: Path
    name: str | None = None


def find(source: str | Path | None, progress: Progress = silent, cache: bool | str | Path = True) -> Source:
    """Where a model lies. None is the built-in one, and so is the name of a built-in one that no file has; hf: names
    one on the Hugging Face Hub, which is brought here. A file of weights may stand for its directory.

    cache: where checksums of what was brought are remembered, as for `open_model`.
    """
    from llamac import models

    if source is None:
        return Source(models.path(models.DEFAULT))
    path = file_path(source, "path")
    if str(source).startswith(HUB):
        from llamac.cache import cache_in
        from llamac.export import hub

        return Source(*hub.fetch(str(source), progress, cache_in(cache)))
    if str(path) in models.NAMES and not os.path.lexists(path):
        return Source(models.path(str(path)))
    try:
        os.stat(path)
    except FileNotFoundError as error:
        raise FileNotFoundError(error.errno, f"{error.strerror}{_advice(str(source))}", str(path)) from None
    return Source(_model_of(path))


def _advice(name: str) -> str:
    """What may have been meant by the name of a file that there is not."""
    page = HUB_PAGE.fullmatch(name)
    if page is None or Path(name).parent.exists():
        return ""
    return f"; a model on the Hugging Face Hub is named {HUB}{page[1]}"


def _model_of(path: Path) -> Path:
    """The Hugging Face directory of a file of weights in it, if that file is what the import of it reads; and of a
    folder that is none the GGUF model in it."""
    if path.is_dir() and not (path / "config.json").exists():
        models = gguf_models(place.name for place in path.iterdir() if place.is_file())
        if len(models) > 1:
            names = ", ".join(parts[0] for parts in models.values())
            raise ExportError(f"{path} holds several models, name one of them: {names}")
        return next((path / parts[0] for parts in models.values()), path)
    if path.name in HF_WEIGHTS and path.is_file() and (path.parent / "config.json").is_file():
        taken = next(name for name in HF_WEIGHTS if (path.parent / name).is_file())
        if path.name == taken:
            return path.parent
    return path


def gguf_models(names: Iterable[str]) -> dict[str, list[str]]:
    """The GGUF files that are models, by name: each with all its parts. Parts of other models are left out."""
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        if not name.endswith(".gguf") or "mmproj" in name.lower() or "imatrix" in name.lower():
            continue
        part = GGUF_PART.fullmatch(name)
        found.setdefault(part[1] + ".gguf" if part else name, []).append(name)
    return found


def is_foreign(path: Path) -> bool:
    """Whether this is something to be converted; what is neither that nor a flat file is told when it is opened."""
    if path.is_dir():
        return True
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES)
    if not head or head.startswith(MAGIC):
        return False
    if path.name.endswith(HF_ENDINGS) or any(head[at:].startswith(magic) for magic, at in FOREIGN):
        return True
    from llamac.export.llama2c.header import looks_like_llama2c

    return looks_like_llama2c(path)


def files_of(path: Path) -> dict[str, Path]:
    """Every file that an import of this source may read, by a name that stays when the source is moved or renamed."""
    if path.is_dir():
        return _files_inside(path)
    part = GGUF_PART.fullmatch(path.name)
    if part is not None:
        names = (f"{part[1]}-{number:05}-of-{part[3]}.gguf" for number in range(1, min(int(part[3]), 9999) + 1))
        parts = [path.with_name(name) for name in names]
        return {f"part {number}": place for number, place in enumerate(parts, 1) if place.is_file()}
    files = {"": path}
    with open(path, "rb") as file:
        if file.read(4) not in (b"GGUF", MAGIC[:4]):  # llama2.c's models have their tokenizer beside them
            files |= {place.name: place for place in path.parent.glob("tok*.bin") if place.is_file() and place != path}
    return files


def _files_inside(folder: Path) -> dict[str, Path]:
    """All texts of a Hugging Face directory, and of what else could be weights those that the import takes."""
    taken = next((name for name in HF_WEIGHTS if (folder / name).is_file()), None)
    weights = {taken} if taken is not None else set()
    if taken is not None and taken.endswith(".index.json"):
        weights |= _shards(folder / taken)
    places = [*folder.iterdir(), *folder.glob("additional_chat_templates/*")]
    names = {place.relative_to(folder).as_posix(): place for place in sorted(places) if place.is_file()}
    known = {*weights, "tokenizer.bin"}
    if not any(files <= set(names) for files in TOKENIZERS):
        known |= set([name for name in names if name.endswith(".gguf")][:1])  # they are in order
    return {name: place for name, place in names.items() if name in known or name.endswith(HF_TEXTS)}


def _shards(index: Path) -> set[str]:
    """The names of files in an index of weights; none if it is one that the import will not take."""
    from llamac.export.files import read_small

    try:
        return set(json.loads(read_small(index))["weight_map"].values())
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return set()


def open_adapted(source: str | Path | None, lora: Adapter | Iterable[Adapter], **options: Any) -> FlatFile:
    """Opens any source as `open_model` does, with adapters that are added to its products."""
    found = adapters(lora)
    file = open_model(source, **options)
    if found:
        from llamac.export.lora import attach

        try:
            attach(file, found)
        except BaseException:
            file.close()
            raise
    return file


def open_model(
    source: str | Path | None,
    *,
    memory: str = "map",
    dtype: str | None = None,
    cache: bool | str | Path = True,
    probes: bool = False,
    other_tokenizer: bool = False,
    progress: Progress = silent,
    warn: Callable[[str], object],
) -> FlatFile:
    """Opens any source as a flat file. What is none is converted, once: the result is kept in the cache.

    dtype: of the matrices of what is converted (default: what keeps the source's quality, docs/cache.md); a flat file
    of another dtype is converted, too. cache: whether to keep what is converted, or the folder to keep it in.
    probes: whether what is converted shall carry some. other_tokenizer: whether there is another one than the source's,
    which then need not be one that can be read. warn: is told what a conversion's user should know.
    """
    if dtype is not None and not isinstance(dtype, str):
        raise wrong_type("dtype", dtype, "a text")
    if dtype is not None and dtype not in DTYPES:
        raise ArgumentError(f"dtype is {dtype!r}, expected one of {', '.join(DTYPES)}")
    if not isinstance(cache, bool | str | Path):
        raise wrong_type("cache", cache, "True, False or a folder")
    found = find(source, progress, cache)
    if not is_foreign(found.path):
        file = FlatFile(found.path, memory)
        if dtype in (None, file.metadata.get("dtype")):
            return file
        file.close()
    from llamac.conversions import Request, converted

    label = str(source) if str(source).startswith(HUB) else os.path.abspath(found.path)
    request = Request(found.path, found.name, label, dtype or "auto", probes, True, memory)
    try:
        return converted(request, cache, progress, warn)
    except (TokenizerError, UnsupportedError):
        if not other_tokenizer:
            raise
        return converted(request._replace(tokenizer=False), cache, progress, warn)
