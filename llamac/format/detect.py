"""Recognizes local model sources (flat, Hugging Face, GGUF, llama2.c) and lists the files that each one consists of."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from llamac import models
from llamac.arguments import StrPath, file_path
from llamac.errors import ExportError, ModelError
from llamac.format.flatfile import MAGIC
from llamac.format.gguf_parts import parse_part_name
from llamac.format.model_folders import MODULE_FOLDERS, TEMPLATES, check_links
from llamac.format.strict_json import MAX_INDEX_BYTES, read_object

HEAD_BYTES = 64
# Magic bytes of other formats and their offsets: GGUF, llama2.c versions 1 and 2, ZIP and pickle (PyTorch),
# safetensors, and Git LFS pointers, which can replace any of them.
FOREIGN = (
    (b"GGUF", 0),
    (b"24ka", 0),
    (b"PK\3\4", 0),
    *((bytes([0x80, protocol]), 0) for protocol in range(2, 6)),
    (b'{"', 8),
    (b"version https://git-lfs", 0),
)
# The weights of a Hugging Face directory. The first that exists is imported, and its path also denotes the directory.
HF_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
HF_ENDINGS = (".safetensors", ".safetensors.index.json", ".bin.index.json", "config.json")
# Endings of the other files in a Hugging Face directory that an import can read.
HF_TEXTS = (".json", ".jinja", ".txt", ".model")
# The files of a directory's tokenizer. Without any of these, it is read from the first GGUF file.
TOKENIZERS = ({"tokenizer.json"}, {"tokenizer.model"}, {"vocab.json", "merges.txt"}, {"tokenizer.bin"})

HUB = "hf:"  # begins the name of a model on the Hugging Face Hub


class Source(NamedTuple):
    """A model on this machine.

    Attributes:
        path: A file or a directory.
        name: The model's name, or None to derive it from the path.
    """

    path: Path
    name: str | None = None


def local_source(source: StrPath) -> Source:
    """Find the model that a path denotes.

    Args:
        source: A path, or the name of a built-in model if no file has that name.

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
    """Reject a file in an unknown format. Damaged and empty files are reported when they are opened."""
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
    """Find the path to import for a path of the user's.

    Args:
        path: Any existing path.

    Returns:
        The Hugging Face directory of a weights file that an import of the directory reads; the GGUF model in a
        directory of another kind; otherwise the path itself.

    Raises:
        ExportError: If a directory has several GGUF models, or a link leaves the directory.
    """
    if path.is_dir():
        check_links(path)
    if path.is_dir() and not _has_weights(path):
        models = gguf_models(file.name for file in path.iterdir() if file.is_file())
        if len(models) > 1:
            names = ", ".join(parts[0] for parts in models.values())
            raise ExportError(f"{path} holds several models, name one of them: {names}")
        return next((path / parts[0] for parts in models.values()), path)
    if path.name in HF_WEIGHTS and path.is_file() and (path.parent / "config.json").is_file():
        imported = next(name for name in HF_WEIGHTS if (path.parent / name).is_file())
        if path.name == imported:
            check_links(path.parent)
            return path.parent
    return path


def _has_weights(folder: Path) -> bool:
    """Whether a directory is a Hugging Face directory with weights. A config.json can also lie beside a GGUF file."""
    return (folder / "config.json").exists() and any((folder / name).is_file() for name in HF_WEIGHTS)


def gguf_models(names: Iterable[str]) -> dict[str, list[str]]:
    """Group the names of GGUF files by model.

    Args:
        names: File names. Image encoders ("mmproj") and importance matrices ("imatrix") are ignored.

    Returns:
        Maps each model's name to the names of its files. The name of a split model has no part number, unless another
        model has the name without it: then it is that of the first part.
    """
    found: dict[tuple[str, int | None], list[str]] = {}  # by the name without endings and the number of parts
    for name in sorted(names):
        if not name.endswith(".gguf") or "mmproj" in name.lower() or "imatrix" in name.lower():
            continue
        part = parse_part_name(name)
        found.setdefault(part or (name.removesuffix(".gguf"), None), []).append(name)
    stems = Counter(stem for stem, _ in found)
    return {
        f"{stem}.gguf" if n_parts is None or stems[stem] == 1 else files[0]: files
        for (stem, n_parts), files in found.items()
    }


def is_foreign(path: Path) -> bool:
    """Whether a path has to be converted. Files that are neither convertible nor flat are reported when opened."""
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
    from llamac.format.llama2c_header import looks_like_llama2c  # a flat file does not need it

    return looks_like_llama2c(path)


def files_of(path: Path) -> dict[str, Path]:
    """List the files that an import of a source can read.

    Returns:
        Maps names, which do not change if the source is moved or renamed, to the files.
    """
    if path.is_dir():
        return _files_inside(path)
    part = parse_part_name(path.name)
    if part is not None:
        parts = [path.with_name(name) for name in part.all_names()]
        return {f"part {number}": file for number, file in enumerate(parts, 1) if file.is_file()}
    files = {"": path}
    with open(path, "rb") as file:
        head = file.read(4)
    if head not in (b"GGUF", MAGIC[:4]):  # llama2.c models have their tokenizer in the same directory
        files |= {file.name: file for file in path.parent.glob("tok*.bin") if file.is_file() and file != path}
    return files


def _files_inside(folder: Path) -> dict[str, Path]:
    """The text files of a Hugging Face directory, and the weights that an import reads."""
    check_links(folder)
    imported = next((name for name in HF_WEIGHTS if (folder / name).is_file()), None)
    weights = {imported} if imported is not None else set()
    if imported is not None and imported.endswith(".index.json"):
        weights |= _shards(folder / imported)
    paths = sorted([*folder.iterdir(), *folder.glob(f"{TEMPLATES}/*"), *folder.glob(f"{MODULE_FOLDERS}/*")])
    files = {path.relative_to(folder).as_posix(): path for path in paths if path.is_file()}
    binaries = {
        *weights,
        "tokenizer.bin",
        *(name for name in files if name.rpartition("/")[2] in HF_WEIGHTS and "/" in name),
    }
    if not any(names <= set(files) for names in TOKENIZERS):
        binaries |= set([name for name in files if name.endswith(".gguf")][:1])
    return {name: path for name, path in files.items() if name in binaries or name.endswith(HF_TEXTS)}


def _shards(index: Path) -> set[str]:
    """The names of the files in an index of weights; empty if the index is damaged, which the import reports."""
    try:
        return set(read_object(index, max_bytes=MAX_INDEX_BYTES)["weight_map"].values())
    except (ExportError, LookupError, TypeError, AttributeError):
        return set()
