"""Finds a checkpoint's tokenizer: the one that the user names, or the source's own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

from llamac.arguments import StrPath, file_path
from llamac.errors import ExportError, LlamacError, TokenizerError, UnsupportedError
from llamac.export.checkpoint import Checkpoint
from llamac.export.read import GGUF_MAGIC, read_head
from llamac.format.flatfile import MAGIC
from llamac.text.special_tokens import SpecialTokens
from llamac.text.tokenizer import Tokenizer
from llamac.text.vocabulary.canonical import read_canonical
from llamac.text.vocabulary.load import IdLimit, Vocabulary, find_tokenizer, load_vocabulary

IDS_ONLY = "without a tokenizer the model only takes token ids (`export --tokenizer` adds one, `run -z` uses one)"


def attach_tokenizer(
    checkpoint: Checkpoint,
    source: Path,
    given: StrPath | Literal[False] | None,
    warnings: list[str],
    vocabulary: Vocabulary | None = None,
) -> None:
    """Set the checkpoint's tokenizer and the number of its token ids.

    Args:
        checkpoint: The checkpoint to change.
        source: The file or directory that the checkpoint was read from.
        given: A tokenizer to use instead of the source's own, or False for none.
        warnings: Gets a message if the source has no tokenizer.
        vocabulary: That of a GGUF file, if it has been read.

    Raises:
        ExportError: If the tokenizer does not exist or belongs to another model.
        TokenizerError: If it is damaged or cannot be represented exactly.
        UnsupportedError: If its kind is not supported.
    """
    if given is False:
        checkpoint.tokenizer = None
        checkpoint.metadata.pop("tokenizer", None)
    elif given is not None:
        path = file_path(given, "tokenizer")
        try:
            checkpoint.tokenizer = load_vocabulary(path, IdLimit(checkpoint.config.vocab_size, warnings))
        except FileNotFoundError:
            raise ExportError(f"the tokenizer {path} does not exist") from None
        checkpoint.metadata["tokenizer"] = {"source": _base_name(path)}
        used = find_tokenizer(path) if path.is_dir() else path
        if used is not None and used.suffix == ".json":
            _check_pairs(checkpoint, used)
    elif source.is_dir():
        _attach_from_folder(checkpoint, source, warnings)
    elif read_head(source).startswith(GGUF_MAGIC):
        _attach_from_gguf(checkpoint, source.with_name(checkpoint.metadata["source"]["files"][0]), warnings, vocabulary)
    elif not read_head(source).startswith(MAGIC):
        _attach_neighbor(checkpoint, source, warnings)
    elif checkpoint.tokenizer is not None:
        _check_own(checkpoint.tokenizer[0], source)
    else:
        warnings.append(f"no tokenizer was found: {IDS_ONLY}")
    if checkpoint.tokenizer is not None:
        _fit_to_model(checkpoint)


def tokenizer_name(checkpoint: Checkpoint) -> str:
    """The file or directory that the tokenizer came from, or "none"."""
    if checkpoint.tokenizer is None:
        return "none"
    return str(checkpoint.metadata.get("tokenizer", {}).get("source", "unknown"))


def _attach_from_folder(checkpoint: Checkpoint, folder: Path, warnings: list[str]) -> None:
    if find_tokenizer(folder) is None:
        warnings.append(f"{folder} has no tokenizer: {IDS_ONLY}")
        return
    _attach_own(checkpoint, folder, warnings)
    _check_pairs(checkpoint, folder / "tokenizer.json")


def _check_pairs(checkpoint: Checkpoint, path: Path) -> None:
    """Check that the tokenizer.json of a model that scores pairs joins them as the engine does."""
    if checkpoint.config.scores_pairs and checkpoint.tokenizer is not None:
        from llamac.export.hf.pairs import check_joined, check_pairs

        with _advice_of(None):
            separators = checkpoint.metadata.get("pair_separators", 1)
            if not checkpoint.config.two_sided or separators == 0:
                check_joined(path)
                return
            check_pairs(path, checkpoint.tokenizer[1], separators)


def _attach_from_gguf(checkpoint: Checkpoint, path: Path, warnings: list[str], vocabulary: Vocabulary | None) -> None:
    from llamac.export.gguf.model import has_tokenizer
    from llamac.text.vocabulary.gguf import from_metadata

    values, checkpoint.gguf_values = checkpoint.gguf_values or {}, None
    if not has_tokenizer(values):
        warnings.append(f"{path} has no tokenizer: {IDS_ONLY}")
        return
    with _advice_of(path):
        checkpoint.tokenizer = vocabulary or from_metadata(values)
    checkpoint.metadata["tokenizer"] = {"source": _base_name(path)}


def _attach_own(checkpoint: Checkpoint, path: Path, warnings: list[str]) -> None:
    with _advice_of(None):
        checkpoint.tokenizer = load_vocabulary(path, IdLimit(checkpoint.config.vocab_size, warnings))
    checkpoint.metadata["tokenizer"] = {"source": _base_name(path)}


@contextlib.contextmanager
def _advice_of(path: Path | None) -> Iterator[None]:
    """Add to errors of a tokenizer what to do, and the path if it is given."""
    try:
        yield
    except (TokenizerError, UnsupportedError) as error:
        where = f"{path}: " if path is not None and isinstance(error, TokenizerError) else ""
        raise type(error)(f"{where}{error}; --no-tokenizer leaves it out, --tokenizer uses another one") from None


def _check_own(data: bytes, source: Path) -> None:
    """Raise TokenizerError if a flat file's tokenizer, which another program may have written, is malformed."""
    try:
        read_canonical(data, f"{source}: its tokenizer.json")
    except TokenizerError as error:
        raise TokenizerError(f"{error}; --no-tokenizer leaves it out, --tokenizer uses another one") from None


def _attach_neighbor(checkpoint: Checkpoint, source: Path, warnings: list[str]) -> None:
    """Use the tok*.bin next to a llama2.c model that has as many ids as the model."""
    size = checkpoint.config.vocab_size
    fitting: list[tuple[Path, Vocabulary]] = []
    others: list[str] = []
    for path in sorted(path for path in source.parent.glob("tok*.bin") if path.is_file() and path != source):
        try:
            vocabulary = load_vocabulary(path)
        except LlamacError:
            others.append(f"{path.name} is not a tokenizer")
            continue
        n_ids = _count_ids(vocabulary, path.name)
        if n_ids == size:
            fitting.append((path, vocabulary))
        else:
            others.append(f"{path.name} has {n_ids} ids")
    if len({vocabulary for _, vocabulary in fitting}) > 1:
        names = ", ".join(path.name for path, _ in fitting)
        raise ExportError(f"several tokenizers next to {source.name} fit it: {names}; choose one with --tokenizer")
    if fitting:
        path, checkpoint.tokenizer = fitting[0]
        checkpoint.metadata["tokenizer"] = {"source": path.name}
    elif others:
        warnings.append(f"no tokenizer next to the model has its {size} ids ({', '.join(others)}): {IDS_ONLY}")
    else:
        warnings.append(f"no tokenizer was found: {IDS_ONLY}")


def _fit_to_model(checkpoint: Checkpoint) -> None:
    """Set the number of token ids, and complete the rules for special tokens with the source's."""
    assert checkpoint.tokenizer is not None
    data, special, spm = checkpoint.tokenizer
    tokenizer = Tokenizer.from_json(data, special, source=tokenizer_name(checkpoint))
    n_ids = tokenizer.n_ids
    if n_ids > checkpoint.config.vocab_size:
        raise ExportError(
            f"the tokenizer has {n_ids} ids, but the model's vocabulary has {checkpoint.config.vocab_size}:"
            " the tokenizer belongs to another model"
        )
    checkpoint.config = replace(checkpoint.config, n_token_ids=n_ids)
    if checkpoint.metadata["source"].get("format") == "llama2c":
        special = replace(special, add_bos=special.bos_id is not None, add_eos=False)
    stop_ids = tuple(sorted({*checkpoint.stop_ids, *special.stop_ids}))
    special = replace(special, stop_ids=stop_ids)
    checkpoint.tokenizer = (data, special, spm)
    checkpoint.opened_tokenizer = tokenizer._with_special(special)


def _count_ids(vocabulary: tuple[bytes, SpecialTokens, bytes | None], where: str) -> int:
    return Tokenizer.from_json(vocabulary[0], vocabulary[1], source=where).n_ids


def _base_name(path: Path) -> str:
    """The name of a file or directory, also for "." and ".."."""
    return os.path.basename(os.path.abspath(path))
