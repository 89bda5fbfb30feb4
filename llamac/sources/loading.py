"""Opens models from any source. A flat file is mapped; anything else is converted first."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

from llamac.arguments import (
    DTYPES,
    Adapter,
    CacheDir,
    DType,
    KVDtype,
    Memory,
    Numerics,
    StrPath,
    adapters,
    file_path,
    unexpected_argument,
    wrong_type,
)
from llamac.engine.model import Model, Origin
from llamac.engine.session_defaults import SessionDefaults
from llamac.errors import ArgumentError, ArgumentTypeError, TokenizerError, UnsupportedError, warn
from llamac.format.detect import HUB, is_foreign
from llamac.format.flatfile import FlatFile
from llamac.progress import Progress, reporter, silent
from llamac.sizes import parse_size
from llamac.sources.names import resolve
from llamac.text.tokenizer import Tokenizer

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def _requires_path(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorate a function so that a call without a path, or with an unknown argument, is told what to do."""
    names = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*arguments: Parameters.args, **options: Parameters.kwargs) -> Result:
        if (arguments[0] if arguments else options.get("path")) is None:
            raise ArgumentTypeError(
                "load needs a model: name a file, a directory, hf:ORG/NAME, or a built-in model such as 'stories'"
            )
        if unknown := [name for name in options if name not in names]:
            raise unexpected_argument(unknown[0], names)
        return function(*arguments, **options)

    return call


@_requires_path
def load(
    path: StrPath,
    *,
    context: int | None = None,
    kv_dtype: KVDtype | None = None,
    threads: int | None = None,
    isa: str | None = None,
    tokenizer: StrPath | None = None,
    lora: Adapter | Iterable[Adapter] = (),
    memory: Memory = "map",
    dtype: DType | None = None,
    cache_dir: CacheDir = None,
    draft_model: Model | StrPath | None = None,
    max_memory: int | str | None = None,
    numerics: Numerics = "exact",
    device: str = "cpu",
    progress: Progress | bool | None = None,
) -> Model:
    """Open a model.

    A flat file is mapped: only its header and tables are read here. Any other source is converted to a flat file once,
    and the result is cached. Anything the user should know about the model is reported as a `LlamacWarning`.

    Args:
        path: A flat file; a Hugging Face directory, GGUF file or llama2.c file; hf:ORG/NAME on the Hugging Face Hub;
            or the name of a built-in model (`llamac.models.NAMES`) unless a file has that name.
        context: Positions per sequence in the model's sessions. Default: as many as a request can reach; the model's
            limit for `Model.session`.
        kv_dtype: Number format of the KV cache: "f32", "f16" or "q8". Default: f32 for files whose matrices are all
            f32, else f16.
        threads: Default: the least of CPU affinity, cgroup quota and physical cores. `llamac inspect` explains it.
        isa: Kernel set, one that `llamac inspect` lists. Default: the environment variable LLAMAC_ISA, else the best
            that this machine supports.
        tokenizer: A tokenizer file or directory that replaces the model's own, of any kind that `Tokenizer.from_file`
            reads.
        lora: PEFT adapters to apply: a directory, a (directory, strength) pair, or several of these.
        memory: When weights are read: "map" on first use; "populate" now; "huge" now, into huge pages. Processes share
            one copy in each case.
        dtype: Number format of the matrices after a conversion. Default: one that preserves the source's quality. A
            flat file in another format is converted as well.
        cache_dir: Folder of converted models. Default: LLAMAC_CACHE, else the user's cache folder. False converts to a
            temporary file that is deleted when the model is closed.
        draft_model: A smaller model with the same vocabulary, for speculation: it makes generation faster and never
            changes its tokens. A Model, or anything that `path` can be; it is then closed with this model.
        max_memory: Maximum bytes that the model and its sessions may need, such as "2GiB": the mapped weights, KV
            caches, activations, logits and the tokenizer. Checked before any weight is read or converted; the KV caches
            get what the rest leaves. Default: no limit.
        numerics: How products round their inputs: "exact" to 15 bits with q8, q6 and GGUF's types; "fast" to 8 bits
            with these, and to bf16 with bf16, which speeds up long prompts and batches where the processor has VNNI or
            bf16 instructions (docs/determinism.md).
        device: The device to compute on: "cpu"; "cuda" or "cuda:N", a GPU, with the same bits (docs/gpu.md); "auto",
            the first usable GPU, otherwise the CPU with a warning that says why.
        progress: Whether to show bars during a download or conversion, or a function to call with (phase, done,
            total).

    Returns:
        The model. Close it, or use it as a context manager.

    Raises:
        FileNotFoundError: If nothing exists at the path. Other `OSError`s: if it cannot be read.
        ModelError: If the file is damaged or is not a model file.
        ExportError: If the source cannot be converted.
        TokenizerError: If its tokenizer is damaged or cannot be represented exactly.
        ChatTemplateError: If its chat templates cannot be read.
        UnsupportedError: If the source, or a setting, needs what this version or this machine lacks.
        HubError: If the Hub does not have the model or cannot be reached.
        ArgumentError: If an argument is out of range or conflicts with another; `ArgumentTypeError` if its type is
            wrong.
        DeviceError: If there is no such device, or it fails.
        OutOfMemoryError: If there is not enough memory for a session with these settings; or if `max_memory` leaves too
            little for one sequence of `context` positions, or of 256 if there is no `context`. The message has the
            plan and what would fit.
    """
    messages: list[str] = []
    is_open = False
    with reporter(progress) as report:
        model = open_model(
            path,
            SessionDefaults(context, kv_dtype, threads, isa, numerics=numerics, device=device),
            draft_model=draft_model,
            tokenizer=tokenizer,
            lora=lora,
            memory=memory,
            dtype=dtype,
            cache_dir=cache_dir,
            max_memory=max_memory,
            progress=report,
            on_warning=lambda text: (warn if is_open else messages.append)(text),
        )
    is_open = True
    for message in messages:
        warn(message)
    return model


def open_model(
    source: StrPath,
    session_defaults: SessionDefaults = SessionDefaults(),  # noqa: B008  immutable
    *,
    tokenizer: StrPath | None = None,
    lora: Adapter | Iterable[Adapter] = (),
    memory: Memory = "map",
    dtype: DType | None = None,
    cache_dir: CacheDir = None,
    draft_model: Model | StrPath | None = None,
    max_memory: int | str | None = None,
    progress: Progress = silent,
    on_warning: Callable[[str], object],
    on_conversion: Callable[[str], object] = lambda text: None,
) -> Model:
    """Open a model for `load` or a command.

    Args:
        source: The `path` of `load`. Arguments that are not listed here are those of `load`.
        session_defaults: Settings of sessions that do not choose their own.
        progress: Called with (phase, done, total).
        on_warning: Called with each message that the user should see.
        on_conversion: Called with a one-line announcement before a conversion begins.
    """
    if dtype is not None and not isinstance(dtype, str):
        raise wrong_type("dtype", dtype, "a str")
    if dtype is not None and dtype not in DTYPES:
        raise ArgumentError(f"dtype is {dtype!r}, expected one of {', '.join(DTYPES)}")
    if not (cache_dir is None or cache_dir is False or isinstance(cache_dir, str | os.PathLike)):
        raise wrong_type("cache_dir", cache_dir, "a folder, None or False")
    tokenizer_path = None if tokenizer is None else file_path(tokenizer, "tokenizer")
    return _Opening(
        source=source,
        session_defaults=session_defaults,
        tokenizer_path=tokenizer_path,
        tokenizer=None if tokenizer_path is None else Tokenizer.from_file(tokenizer_path),
        lora=adapters(lora),
        memory=memory,
        dtype=dtype,
        cache_dir=cache_dir,
        draft_model=draft_model,
        limit=None if max_memory is None else parse_size(max_memory, "max_memory"),
        progress=progress,
        on_warning=on_warning,
        on_conversion=on_conversion,
    ).model()


@dataclass(frozen=True)
class _Opening:
    """The checked arguments of `open_model`, with the tokenizer that replaces the source's, and the memory limit."""

    source: StrPath
    session_defaults: SessionDefaults
    tokenizer_path: Path | None
    tokenizer: Tokenizer | None
    lora: Sequence[tuple[Path, float]]
    memory: Memory
    dtype: DType | None
    cache_dir: CacheDir
    draft_model: Model | StrPath | None
    limit: int | None
    progress: Progress
    on_warning: Callable[[str], object]
    on_conversion: Callable[[str], object]

    def model(self) -> Model:
        """Open the file, the draft model and the adapters."""
        file, opened_tokenizer = self._file()
        opened_draft: Model | None = None
        try:
            draft = self.draft_model
            if draft is not None and not isinstance(draft, Model):
                draft = opened_draft = self._draft(draft)
            self._attach_adapters(file)
            return Model(
                file,
                self.session_defaults._replace(draft_model=draft),
                tokenizer=self.tokenizer,
                opened_tokenizer=opened_tokenizer,
                owned_draft_model=opened_draft,
                origin=self._origin(),
                max_memory=self.limit,
                on_warning=self.on_warning,
                progress=self.progress,
            )
        except BaseException:
            if opened_draft is not None:
                opened_draft.close()
            file.close()
            raise

    def _file(self) -> tuple[FlatFile, Tokenizer | None]:
        """Open the source as a flat file, converting it if necessary. Returns also the tokenizer if it was opened."""
        found = resolve(self.source, self.progress, self.cache_dir)
        if not is_foreign(found.path):
            file = FlatFile(found.path, self.memory)
            if self.dtype in (None, file.metadata.get("dtype")):
                return file, None
            file.close()
        from llamac.sources.conversions import Request, converted

        name = os.fspath(self.source)
        label = name if name.startswith(HUB) else os.path.abspath(found.path)
        request = Request(found.path, found.name, label, self.dtype or "auto", True, self.memory)
        check = None if self.limit is None else self._check_limit
        if self.tokenizer is None:
            return converted(request, self.cache_dir, self.progress, self.on_warning, self.on_conversion, check)
        warnings: list[str] = []
        notices: list[str] = []

        def announce(text: str) -> None:
            """Pass on only the first announcement: both attempts are one conversion to the user."""
            if not notices:
                self.on_conversion(text)
            notices.append(text)

        try:
            opened = converted(request, self.cache_dir, self.progress, warnings.append, announce, check)
        except (TokenizerError, UnsupportedError):  # the tokenizer is replaced: the source's own need not be usable
            request = request._replace(tokenizer=False)
            return converted(request, self.cache_dir, self.progress, self.on_warning, announce, check)
        for text in warnings:
            self.on_warning(text)
        return opened

    def _check_limit(self, outlined: FlatFile) -> None:
        """Refuse a memory limit that cannot be kept before the weights are converted."""
        with contextlib.ExitStack() as stack:
            self._attach_adapters(outlined)
            draft = self.draft_model
            if draft is not None and not isinstance(draft, Model):
                settings = SessionDefaults(threads=self.session_defaults.threads, isa=self.session_defaults.isa)
                file = _outlined(draft, self.cache_dir, self.progress)
                draft = stack.enter_context(Model(file, settings, on_warning=lambda text: None))
            Model(
                outlined,
                self.session_defaults._replace(draft_model=draft, device="cpu"),
                tokenizer=self.tokenizer,
                max_memory=self.limit,
                on_warning=lambda text: None,
            ).close()

    def _draft(self, source: StrPath) -> Model:
        """Open the draft model."""
        own = self.session_defaults
        return open_model(
            source,
            SessionDefaults(threads=own.threads, isa=own.isa, device=own.device),
            memory=self.memory,
            cache_dir=self.cache_dir,
            progress=self.progress,
            on_warning=self.on_warning,
            on_conversion=self.on_conversion,
        )

    def _attach_adapters(self, file: FlatFile) -> None:
        if self.lora:
            from llamac.export.lora import attach

            attach(file, self.lora)

    def _origin(self) -> Origin:
        """How another process opens the same model."""
        draft = self.draft_model
        return Origin(
            load,
            _recorded(self.source),
            {
                **self.session_defaults._asdict(),
                "tokenizer": self.tokenizer_path and os.path.abspath(self.tokenizer_path),
                "lora": [(os.path.abspath(folder), strength) for folder, strength in self.lora],
                "memory": self.memory,
                "dtype": self.dtype,
                "cache_dir": os.path.abspath(self.cache_dir) if self.cache_dir else self.cache_dir,
                "draft_model": draft if isinstance(draft, Model | None) else _recorded(draft),
                "max_memory": self.limit,
            },
        )


def _outlined(source: StrPath, cache_dir: CacheDir, progress: Progress) -> FlatFile:
    """A model file, or the file that a conversion would write, without its weights."""
    from llamac.sources.conversions import Request, hollow

    found = resolve(source, progress, cache_dir)
    if not is_foreign(found.path):
        return FlatFile(found.path, "map")
    return hollow(Request(found.path, found.name, os.fspath(source), "auto", True, "map"))


def _recorded(source: StrPath) -> str:
    """A source as another process finds it."""
    return os.path.abspath(source) if os.path.lexists(source) else os.fspath(source)
