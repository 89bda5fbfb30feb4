"""Where llamac keeps what it can make again: converted models, compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path

from llamac.errors import ArgumentError


def default_folder() -> Path:
    """The default cache folder: LLAMAC_CACHE, or the folder llamac in XDG_CACHE_HOME, or ~/.cache/llamac."""
    base = os.environ.get("XDG_CACHE_HOME", "")  # its specification says to ignore a relative path
    named = os.environ.get("LLAMAC_CACHE") or os.path.join(base if os.path.isabs(base) else "~/.cache", "llamac")
    path = os.path.expanduser(named)
    if path.startswith("~"):
        raise ArgumentError(
            f"the cache folder {named} has no home folder; set LLAMAC_CACHE to another folder, or keep nothing with "
            "--no-cache (cache_dir=False)"
        )
    return Path(path)
