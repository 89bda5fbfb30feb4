"""Loads a tokenizer in any format: detects the format and calls its reader."""

from __future__ import annotations

import re
from pathlib import Path

from llamac.errors import TokenizerError, UnsupportedError
from llamac.format.flatfile import MAGIC
from llamac.format.git_lfs import check_not_pointer
from llamac.format.model_folders import check_links
from llamac.format.small_files import read_small
from llamac.text.tokenizer_json import MAX_FILE_BYTES, parse_document
from llamac.text.vocabulary.added import IdLimit, Sidecars, read_sidecars
from llamac.text.vocabulary.llama2c import from_llama2c, to_llama2c
from llamac.text.vocabulary.spm import from_sentencepiece, looks_like_sentencepiece
from llamac.text.vocabulary.tokenizer_json import Vocabulary, from_tokenizer_json, from_vocab_and_merges

__all__ = ["IdLimit", "Vocabulary", "find_tokenizer", "load_vocabulary", "to_llama2c"]

# The tokenizer files of a directory. The first that exists is used, so the most exact format comes first.
NAMES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer.bin")
# The files that are read along with a tokenizer file.
SIDECAR_NAMES = {"tokenizer.model", "merges.txt", *(f"{name}.json" for name in Sidecars._fields)}


def load_vocabulary(path: str | Path, id_limit: IdLimit | None = None) -> Vocabulary:
    """Read a tokenizer in any of the formats that `llamac.text.tokenizer.Tokenizer.from_file` lists.

    The format is detected from the content, not from the name.

    Args:
        path: A tokenizer file, or a directory with one.
        id_limit: The number of ids that the model has, if known. Tokens that sidecar files name without an id get one
            after the vocabulary, as in transformers. Tokens beyond the model's ids are left out.

    Raises:
        OSError: If a file cannot be read.
        TokenizerError: If the tokenizer is damaged or cannot be represented exactly.
        UnsupportedError: If the kind of tokenizer is not supported.
        ModelError: If a GGUF file is damaged.
        ExportError: If a file is a Git LFS pointer, or a link leaves the directory.
    """
    path = Path(path)
    if path.is_dir():
        check_links(path)
    else:
        check_links(path.parent, SIDECAR_NAMES - {path.name})
    if path.is_dir():
        found = find_tokenizer(path)
        if found is None:
            raise TokenizerError(
                f"{path} holds no tokenizer: expected one of {', '.join(NAMES)} (vocab.json with merges.txt), *.gguf"
            )
        path = found
    with open(path, "rb") as file:
        head = file.read(len(MAGIC))
    if head == MAGIC:
        raise TokenizerError(
            f"{path} is a model file, not a tokenizer; give a tokenizer.json, a tokenizer.model, llama2.c's "
            "tokenizer.bin, a GGUF file, or a directory with one of them"
        )
    if head.startswith(b"GGUF"):
        from llamac.text.vocabulary.gguf import from_gguf

        return from_gguf(path)
    data = read_small(path, MAX_FILE_BYTES, TokenizerError)
    check_not_pointer(path, data)
    try:
        return _from_bytes(path, data, id_limit)
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from None


def find_tokenizer(folder: Path) -> Path | None:
    """Find the tokenizer file of a directory. Returns None if it has none."""
    for name in NAMES:
        if (folder / name).is_file() and (name != "vocab.json" or (folder / "merges.txt").is_file()):
            return folder / name
    return min(folder.glob("*.gguf"), default=None)


def _from_bytes(path: Path, data: bytes, id_limit: IdLimit | None) -> Vocabulary:
    if data.lstrip()[:1] == b"{" or path.suffix == ".json":
        return _from_json_file(path, data, id_limit)
    if looks_like_sentencepiece(data):
        return from_sentencepiece(data, read_sidecars(path.parent), id_limit)
    if re.match(rb"[A-Za-z0-9+/]+=* \d+\n", data):
        raise UnsupportedError(
            f"{path} is a tiktoken file, which does not define how text is split into words; use the model's"
            " tokenizer.json"
        )
    return from_llama2c(data)


def _from_json_file(path: Path, data: bytes, id_limit: IdLimit | None) -> Vocabulary:
    sidecars = read_sidecars(path.parent)
    document = parse_document(data, path.name)
    if isinstance(document.get("model"), dict):
        model = path.parent / "tokenizer.model"
        spm = read_small(model, MAX_FILE_BYTES, TokenizerError) if model.is_file() else None
        return from_tokenizer_json(document, sidecars, spm, id_limit)
    merges = path.parent / "merges.txt"
    if not merges.is_file():
        raise TokenizerError(
            "neither a tokenizer.json (it has no 'model') nor a vocab.json (there is no merges.txt next to it)"
        )
    texts = read_small(merges, MAX_FILE_BYTES, TokenizerError)
    return from_vocab_and_merges(document, texts, sidecars, id_limit)
