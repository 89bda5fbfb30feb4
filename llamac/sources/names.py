"""Resolves what a user names as a model: a path, a built-in model, or hf:ORG/NAME on the Hugging Face Hub."""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from pathlib import Path

from llamac import models
from llamac.arguments import CacheDir, StrPath, file_path
from llamac.format.detect import HUB, Source, local_source
from llamac.progress import Progress, silent

# Other names for models on the Hub: the address of their page, in which a Path merges slashes, and ORG/NAME alone.
HUB_PAGE = re.compile(r"(?:https?://?(?:www\.)?(?:huggingface\.co|hf\.co)/)?([\w.-]+/[\w.-]+)(?:/tree/main)?/?")


def resolve(source: StrPath | Source, progress: Progress = silent, cache_dir: CacheDir = None) -> Source:
    """Locate a model on this machine, downloading it first if it is on the Hugging Face Hub.

    Args:
        source: A path, a built-in model's name (`llamac.models.NAMES`), or hf:ORG/NAME[@REVISION]. A weights file
            inside a Hugging Face directory denotes the directory.
        progress: Called during a download.
        cache_dir: The folder that remembers checksums of downloaded files, as for `load`.

    Raises:
        FileNotFoundError: If nothing exists at the path.
        HubError: If the Hub does not have the model or cannot be reached.
    """
    if isinstance(source, Source):
        return source
    path, name = file_path(source, "path"), os.fspath(source)
    if name.startswith(HUB):
        from llamac.sources import hub
        from llamac.sources.cache import open_cache

        return Source(*hub.fetch(name, progress, open_cache(cache_dir)))
    try:
        return local_source(path)
    except FileNotFoundError as error:
        raise FileNotFoundError(error.errno, f"{error.strerror}{_advice(name)}", str(path)) from None


def _advice(name: str) -> str:
    """A hint for the name of a missing file that looks like a built-in model or one on the Hub; otherwise empty."""
    page = HUB_PAGE.fullmatch(name)
    if page is None or Path(name).parent.exists():
        near = get_close_matches(name, models.NAMES, 1)
        return f"; did you mean the built-in model {near[0]}?" if near else ""
    return f"; a model on the Hugging Face Hub is named {HUB}{page[1]}"
