"""Opens a model for a command: announces a conversion, shows its progress, and prints warnings on stderr."""

from __future__ import annotations

import argparse
import contextlib
import sys
from contextlib import AbstractContextManager
from typing import Any

from llamac.arguments import parse_adapters
from llamac.cli.text import safe_error
from llamac.engine.model import Model
from llamac.engine.session_defaults import SessionDefaults
from llamac.progress import Progress, bars, silent
from llamac.sources.loading import open_model

BAR_DELAY = 0.5  # seconds before there is a bar: importing tqdm takes as long as converting a small GGUF file


def load_model(options: argparse.Namespace, *, tokenizer: str | None = None, **settings: Any) -> Model:
    """Open the model that a command names, and convert it if necessary.

    Args:
        options: The command's options.
        tokenizer: A tokenizer to use instead of the model's.
        settings: The sessions' settings, as for `llamac.load`.
    """
    warnings: list[str] = []
    notices: list[str] = []
    is_open = False

    def warn(text: str) -> None:
        if is_open:
            print(f"llamac: warning: {safe_error(text)}", file=sys.stderr)
        else:
            warnings.append(text)  # after the bars

    with shown_progress(options, BAR_DELAY) as show:

        def report(phase: str, done: int, total: int) -> None:
            # held until there is progress: a source that is rejected at once gets only its error
            while notices and show is not silent:
                print(f"llamac: {safe_error(notices.pop())}", file=sys.stderr, flush=True)
            show(phase, done, total)

        model = open_model(
            options.default_model if options.model is None else options.model,
            SessionDefaults(**settings),
            tokenizer=tokenizer,
            lora=parse_adapters(getattr(options, "lora", ())),
            dtype=options.dtype,
            cache_dir=False if options.no_cache else options.cache_dir or None,
            draft_model=getattr(options, "draft_model", None),
            max_memory=getattr(options, "max_memory", None),
            progress=report,
            on_warning=warn,
            on_conversion=notices.append,
        )
    is_open = True
    for text in warnings:
        warn(text)
    return model


def shown_progress(options: argparse.Namespace, delay: float = 0.0) -> AbstractContextManager[Progress]:
    """Progress as bars on a terminal, else as lines; no lines with --quiet."""
    quiet = getattr(options, "quiet", False) and not sys.stderr.isatty()
    return contextlib.nullcontext(silent) if quiet else bars(delay=delay)
