"""Opening a model for a command: with a bar where it is brought or converted, and with its warnings on stderr."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from llamac.arguments import file_path
from llamac.cli.progress import progress_bars
from llamac.cli.text import safe_error
from llamac.model import Model
from llamac.sources import open_model
from llamac.tokenizer import Tokenizer


def load_model(
    options: argparse.Namespace, *, tokenizer: str | None = None, probes: bool = False, **settings: Any
) -> Model:
    """The model that a command is given. probes: whether what is converted shall carry some, which takes longer.
    tokenizer and settings: as `load` has them."""
    cache = False if options.no_cache else options.cache_dir or True
    other = Tokenizer.from_file(file_path(tokenizer, "tokenizer")) if tokenizer is not None else None
    told: list[str] = []
    with progress_bars() as progress:
        file = open_model(
            options.model, dtype=options.dtype, cache=cache, probes=probes, progress=progress, warn=told.append
        )
    for text in told:
        print(f"llamac: warning: {safe_error(text)}", file=sys.stderr)
    return Model(file, tokenizer=other, **settings)
