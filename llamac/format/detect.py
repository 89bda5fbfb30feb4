"""Recognizes local model sources (flat, Hugging Face, GGUF, llama2.c) and lists the files that each one consists of."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from llamac import models
from llamac.arguments import StrPath, file_path
from llamac.errors import ExportError, ModelError
from llamac.format.flatfile import MAGIC
from llamac.format.gguf_parts import parse_part_name
from llamac.format.llama2c_header import looks_like_llama2c
from llamac.format.model_folders import TEMPLATES, check_links
from llamac.format.strict_json import MAX_INDEX_BYTES, read_object

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


HUB = "hf:"  # begins the name of a model on the Hugging Face Hub


class Source(NamedTuple):
    """A model on this machine. path: a file or a directory. name: what it is called where its path does not tell it."""

    path: Path
    name: str | None = None


def local_source(source: StrPath) -> Source:
    """The model that a path denotes, or a built-in model's name where no file has that name.

    Raises:
        FileNotFoundError: If nothing exists at the path.
        ExportError: If a directory holds several models.
        ModelError: If the file is not a model.
    """
    path = file_path(source, "source")
    if str(path) in models.NAMES and not os.path.lexists(path):
        return Source(models.path(str(path)))
    os.stat(path)
    path = model_at(path)
    _check_recognized(path)
    return Source(path)


def _check_recognized(path: Path) -> None:
    """Refuse a file that is not a model of any known format. What is damaged or empty is found when it is opened."""
    if not path.is_file() or is_foreign(path):
        return
    with open(path, "rb") as file:
        head = file.read(len(MAGIC))
    if head and not MAGIC.startswith(head):
        raise ModelError(
            f"{path}: not a llamac file, a GGUF file, a llama2.c file or a Hugging Face directory; name one of these, "
            "a model on the Hugging Face Hub (hf:ORG/NAME), or stories"
        )


def model_at(path: Path) -> Path:
    """The Hugging Face directory of a file of weights in it, if that file is what the import of it reads; and of a
    folder that is none the GGUF model in it."""
    if path.is_dir():
        check_links(path)
    if path.is_dir() and not (path / "config.json").exists():
        models = gguf_models(place.name for place in path.iterdir() if place.is_file())
        if len(models) > 1:
            names = ", ".join(parts[0] for parts in models.values())
            raise ExportError(f"{path} holds several models, name one of them: {names}")
        return next((path / parts[0] for parts in models.values()), path)
    if path.name in HF_WEIGHTS and path.is_file() and (path.parent / "config.json").is_file():
        taken = next(name for name in HF_WEIGHTS if (path.parent / name).is_file())
        if path.name == taken:
            check_links(path.parent)
            return path.parent
    return path


def gguf_models(names: Iterable[str]) -> dict[str, list[str]]:
    """The GGUF files that are models, by name: each with all its parts. Parts of other models are left out."""
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        if not name.endswith(".gguf") or "mmproj" in name.lower() or "imatrix" in name.lower():
            continue
        part = parse_part_name(name)
        found.setdefault(part.stem + ".gguf" if part else name, []).append(name)
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
    return looks_like_llama2c(path)


def files_of(path: Path) -> dict[str, Path]:
    """Every file that an import of this source may read, by a name that stays when the source is moved or renamed."""
    if path.is_dir():
        return _files_inside(path)
    part = parse_part_name(path.name)
    if part is not None:
        parts = [path.with_name(name) for name in part.all_names()]
        return {f"part {number}": place for number, place in enumerate(parts, 1) if place.is_file()}
    files = {"": path}
    with open(path, "rb") as file:
        if file.read(4) not in (b"GGUF", MAGIC[:4]):  # llama2.c's models have their tokenizer beside them
            files |= {place.name: place for place in path.parent.glob("tok*.bin") if place.is_file() and place != path}
    return files


def _files_inside(folder: Path) -> dict[str, Path]:
    """All texts of a Hugging Face directory, and of what else could be weights those that the import takes."""
    check_links(folder)
    taken = next((name for name in HF_WEIGHTS if (folder / name).is_file()), None)
    weights = {taken} if taken is not None else set()
    if taken is not None and taken.endswith(".index.json"):
        weights |= _shards(folder / taken)
    places = [*folder.iterdir(), *folder.glob(f"{TEMPLATES}/*")]
    names = {place.relative_to(folder).as_posix(): place for place in sorted(places) if place.is_file()}
    known = {*weights, "tokenizer.bin"}
    if not any(files <= set(names) for files in TOKENIZERS):
        known |= set([name for name in names if name.endswith(".gguf")][:1])  # they are in order
    return {name: place for name, place in names.items() if name in known or name.endswith(HF_TEXTS)}


def _shards(index: Path) -> set[str]:
    """The names of files in an index of weights; none if it is one that the import will not take."""
    try:
        return set(read_object(index, max_bytes=MAX_INDEX_BYTES)["weight_map"].values())
    except (ExportError, LookupError, TypeError, AttributeError):
        return set()
