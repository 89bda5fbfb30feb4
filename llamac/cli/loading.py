"""Opening a model for a command: with a bar where it is brought or converted, and with its warnings on stderr."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from llamac.arguments import parse_adapters
from llamac.cli.progress import progress_bars
from llamac.cli.text import safe_error
from llamac.model import Model, load_with


def load_model(
    options: argparse.Namespace, *, tokenizer: str | None = None, probes: bool = False, **settings: Any
) -> Model:
    """The model that a command is given. probes: whether what is converted shall carry some, which takes longer.
    tokenizer and settings: as `load` has them."""
    told: list[str] = []
    with progress_bars() as progress:
        model = load_with(
            tokenizer,
            settings,
            source=options.model,
            lora=parse_adapters(getattr(options, "lora", ())),
            dtype=options.dtype,
            cache=False if options.no_cache else options.cache_dir or True,
            probes=probes,
            progress=progress,
            warn=told.append,
        )
    for text in told:
        print(f"llamac: warning: {safe_error(text)}", file=sys.stderr)
    return model
