"""Checks symbolic links in model directories.

Exporting an untrusted directory must not copy the user's private files into the exported model.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from llamac.errors import ExportError

TEMPLATES = "additional_chat_templates"
# of sentence-transformers: the list of modules, limits of texts, the settings of the model, and the folders of modules
MODULES, SENTENCE_CONFIG = "modules.json", "sentence_bert_config.json"
# What SENTENCE_CONFIG can say about the chat template of a reranker.
PAIR_OPTIONS = ("add_generation_prompt", "enable_thinking")
MODEL_SETTINGS = "config_sentence_transformers.json"
POOLING = "1_Pooling/config.json"
MODULE_FOLDERS = "[0-9]_*"


def check_links(folder: Path, names: Iterable[str] | None = None) -> None:
    """Check the links in a directory before any file in it is read.

    Links inside the directory are fine. So are those of the hub client's cache, where a snapshot consists of links to
    the repository's blobs (https://huggingface.co/docs/hub/local-cache).

    Args:
        folder: The directory.
        names: The files to check. Default: all files that an import can read.

    Raises:
        ExportError: If a link leads to a file outside the directory.
    """
    root = Path(os.path.realpath(folder))
    allowed = [root]
    if root.parent.name == "snapshots" and root.parents[1].name.startswith("models--"):
        repo = root.parents[1]
        allowed += [repo / "blobs", repo.parent / "blobs"]  # repositories share the latter
    for path in _files(folder) if names is None else (folder / name for name in names):
        target = Path(os.path.realpath(path))
        if target.is_file() and not any(target.is_relative_to(parent) for parent in allowed):
            raise ExportError(
                f"{path} is a link to {target}, outside of the directory; replace it by a copy if you trust it"
            )


def _files(folder: Path) -> Iterator[Path]:
    for parent in (folder, folder / TEMPLATES, *folder.glob(MODULE_FOLDERS)):
        if parent.is_dir():
            yield from sorted(parent.iterdir())
