"""Reads any source as a checkpoint: a Hugging Face directory, a GGUF file, a llama2.c model file or a flat file."""

from __future__ import annotations

from pathlib import Path

from llamac.errors import ExportError
from llamac.export.checkpoint import Checkpoint
from llamac.format.detect import HF_ENDINGS
from llamac.format.flatfile import MAGIC
from llamac.format.gguf_metadata import GGUFHead
from llamac.format.git_lfs import HEAD_BYTES, check_not_pointer
from llamac.format.llama2c_header import looks_like_llama2c
from llamac.progress import Progress, silent

GGUF_MAGIC = b"GGUF"
LLAMA2C_MAGIC = b"24ka"
ZIP_MAGIC, PICKLE_MAGIC = b"PK\x03\x04", b"\x80"
SOURCES = "a Hugging Face directory, a GGUF file, a llama2.c model file or a flat file"


def read_checkpoint(
    source: Path, warnings: list[str], progress: Progress = silent, gguf_head: GGUFHead | None = None
) -> Checkpoint:
    """Read a source of any format, recognized by its content. The tokenizer is read separately.

    Args:
        source: The source.
        warnings: Receives warnings.
        progress: Called while a flat file is verified.
        gguf_head: The head of a GGUF file, if it has been read.

    Raises:
        ExportError: If the source has no known format, or is damaged.
    """
    if source.is_dir():
        from llamac.export.hf.model import read as read_hf

        return read_hf(source, warnings)
    head = read_head(source)
    if head.startswith(MAGIC):
        from llamac.export.flat.model import read as read_flat

        return read_flat(source, progress)
    check_not_pointer(source, head)
    if head.startswith(GGUF_MAGIC):
        from llamac.export.gguf.model import read as read_gguf

        return read_gguf(source, warnings, head=gguf_head)
    if looks_like_llama2c(source) or head.startswith(LLAMA2C_MAGIC):
        from llamac.export.llama2c.model import read as read_llama2c

        return read_llama2c(source)
    if source.name.endswith(HF_ENDINGS) or head.startswith((ZIP_MAGIC, PICKLE_MAGIC)):
        raise ExportError(_advice(source))
    raise ExportError(f"{source} has no known format, expected {SOURCES}")


def read_head(path: Path) -> bytes:
    """The first bytes of a file, which identify its format."""
    with open(path, "rb") as file:
        return file.read(HEAD_BYTES)


def _advice(source: Path) -> str:
    """What to pass instead of one file of a Hugging Face directory."""
    if (source.parent / "config.json").is_file():
        return f"{source} is one of several files of a Hugging Face directory: pass the directory, {source.parent}"
    return (
        f"{source} holds only weights: pass a Hugging Face directory, which has config.json (and the tokenizer) next to"
        " the weights"
    )
