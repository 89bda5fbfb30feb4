"""The models that `llamac serve --models-dir` opens and closes while it runs."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from llamac.engine.batching.engine import Engine
from llamac.engine.model import Model
from llamac.engine.scoring.cancellation import Cancellation
from llamac.engine.session_defaults import SessionDefaults
from llamac.errors import ArgumentError, CancelledError
from llamac.format.detect import files_of
from llamac.server.models import Entry, Models, Need, need_of
from llamac.server.models_file import ModelSettings, ServedModel, read_models
from llamac.sizes import parse_size
from llamac.sources.digests import file_stamp
from llamac.sources.loading import open_model
from llamac.text.template_files import read_text

LOGGER = logging.getLogger("llamac.server")
ALONE = ("model", "alias", "lora", "tokenizer")  # options of a server with one model
UNLIMITED = 1 << 62  # bytes
DEFAULT_IDLE_SECONDS = 900


class _StoppedError(BaseException):
    """Stops a conversion as Ctrl-C does: the cache keeps what has been written, and the next conversion resumes it."""


def models_of(options: argparse.Namespace) -> Models:
    """The table of the models in a folder, with those that are pinned open.

    Raises:
        ArgumentError: If the folder's `models.toml` is wrong, or an option is for a server with one model.
        LlamacError: If a pinned model cannot be opened.
    """
    for name in ALONE:
        if getattr(options, name):
            shown = "MODEL" if name == "model" else f"--{name}"
            raise ArgumentError(f"--models-dir serves the models of a folder: omit {shown} (set it in models.toml)")
    defaults = ModelSettings(
        context=options.context,
        max_sequences=options.max_sequences,
        max_queue=options.max_queue,
        kv_dtype=options.kv_dtype,
        numerics=options.numerics,
        kv_tokens=options.kv_tokens,
        threads=options.threads,
        idle_seconds=DEFAULT_IDLE_SECONDS if options.idle_seconds is None else options.idle_seconds,
    )
    found, default = read_models(Path(options.models_dir), defaults, lambda text: LOGGER.warning("%s", text))
    limit = None if options.max_memory is None else parse_size(options.max_memory, "--max-memory")
    cancel = Cancellation()
    entries = [_entry(model, options, cancel) for model in found]
    models = Models(entries, default=default, max_memory=limit, cancel=cancel)
    try:
        models.open_pinned()
    except BaseException:
        models.close()
        raise
    return models


def _entry(served: ServedModel, options: argparse.Namespace, cancel: Cancellation) -> Entry:
    settings = served.settings
    adapters = [path for path, _ in settings.adapters]
    others = (settings.tokenizer, settings.chat_template, settings.draft_model)
    paths = [served.path.absolute(), *adapters, *filter(None, others)]

    def opens(limit: int | None) -> Engine:
        return _opened(served, options, limit, cancel)

    def measures(limit: int) -> Need:
        engine = _opened(served, options, None, cancel)
        try:
            return need_of(engine, settings.kv_tokens, limit)
        finally:
            engine.close()
            engine.model.close()

    return Entry(
        served.names,
        opens,
        measures,
        pinned=settings.pinned,
        idle_seconds=settings.idle_seconds or None,
        stamp=lambda: [_stamps(path) for path in paths],
        folders=[path.parent for path in paths],
    )


def _stamps(path: Path) -> list[list[int]]:
    """The stamps of a model's files, or those of the files in its directory."""
    files = path.iterdir() if path.is_dir() else files_of(path).values()
    return [file_stamp(each) for each in sorted(files) if each.is_file()]


def _opened(served: ServedModel, options: argparse.Namespace, limit: int | None, cancel: Cancellation) -> Engine:
    """Open a model with an engine, which needs at most `limit` bytes. `cancel` stops a conversion."""
    settings = served.settings

    def check(phase: str, done: int, total: int) -> None:
        if cancel.cancelled:
            raise _StoppedError

    try:
        model = open_model(
            served.path.absolute(),  # errors for clients leave out absolute folders
            SessionDefaults(
                settings.context,
                settings.kv_dtype,
                settings.threads,
                options.isa,
                numerics=settings.numerics,
                device=options.device,
            ),
            tokenizer=settings.tokenizer,
            lora=list(settings.adapters),
            dtype=options.dtype,
            cache_dir=False if options.no_cache else options.cache_dir or None,
            draft_model=settings.draft_model,
            progress=check,
            on_warning=lambda text: LOGGER.warning("%s", text, extra={"fields": {"model": served.names[0]}}),
        )
    except _StoppedError:
        raise CancelledError("the server ended before it had opened the model") from None
    try:
        _adapt(model, settings)
        return Engine(
            model,
            max_sequences=settings.max_sequences,
            kv_tokens=settings.kv_tokens,
            max_queue=settings.max_queue,
            max_memory=limit,
        )
    except BaseException:
        model.close()
        raise


def _adapt(model: Model, settings: ModelSettings) -> None:
    template = None if settings.chat_template is None else read_text(settings.chat_template)
    model._adapt(settings.sampling, template)
