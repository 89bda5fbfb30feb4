"""The models of a server: a table of their names, and which of them are open.

Everything but opening and closing happens in the event loop, so no two requests see the table change under them. Files
are opened and closed by one thread, one after another.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from llamac.engine.batching.engine import Engine
from llamac.engine.memory import MIN_CONTEXT, fixed_bytes
from llamac.errors import ArgumentError, LlamacError, OutOfMemoryError
from llamac.openai.errors import InvalidRequestError
from llamac.openai.responses import fingerprint
from llamac.server.exchange import HttpError
from llamac.sizes import size_text
from llamac.text.chat_process import prepare

LOGGER = logging.getLogger("llamac.server")
# Counts of an engine and of its prefix cache.
COUNTS = ("steps", "rows", "preemptions", "drafted_tokens", "accepted_tokens")
PREFIX_COUNTS = ("lookups", "hits", "evictions")
SHOWN = 100  # characters of an unknown name in an error
FOLDERS = re.compile(r"(?<![\w.])/(?:[^\s/:'\"]+/)+")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Need:
    """The most memory that an open model can need, in bytes.

    Attributes:
        own: Everything but its file.
        weights: Its file, which is mapped.
        file: Which file that is: models that share one need its memory once.
    """

    own: int
    weights: int
    file: tuple[int, int]

    @property
    def total(self) -> int:
        """All bytes."""
        return self.own + self.weights


def need_of(engine: Engine, kv_tokens: int | None, limit: int) -> Need:
    """What a model needs with its engine.

    Args:
        engine: The engine.
        kv_tokens: Positions that its KV cache has. None: those of one whole sequence, or as many as the limit leaves.
        limit: The limit of all models.
    """
    model = engine.model
    positions, page_bytes = engine.page_size
    fixed = model._memory.fixed()
    pages = -(-(engine.context if kv_tokens is None else kv_tokens) // positions)
    if kv_tokens is None and fixed + pages * page_bytes > limit:
        least = -(-min(MIN_CONTEXT, engine.context) // positions)
        pages = max(least, (limit - fixed) // page_bytes)
    found = os.stat(model.file.path)
    weights = fixed_bytes(model)[0]
    return Need(fixed - weights + pages * page_bytes, weights, (found.st_dev, found.st_ino))


class Entry:
    """A model of the table.

    Attributes:
        names: Its names; the first is the one that answers have.
        pinned: Whether it is opened at the start, and never closed.
        idle_seconds: Seconds without a request after which it is closed; None: never.
        need: What it needs, once that has been computed.
        context: Positions of a request, once it has been open.
        loads: How often it has been opened.
        unloads: How often it has been closed.
    """

    def __init__(
        self,
        names: Sequence[str],
        opens: Callable[[int | None], Engine],
        measures: Callable[[int], Need],
        *,
        pinned: bool = False,
        idle_seconds: float | None = None,
    ) -> None:
        """Describe a model.

        Args:
            names: Its names.
            opens: Opens it, with an engine that needs at most so many bytes. The model is closed with the engine.
            measures: Computes what it needs, within a limit of all models.
            pinned: Whether it is opened at the start, and never closed.
            idle_seconds: Seconds without a request after which it is closed; None: never.
        """
        self.names = tuple(names)
        self.pinned = pinned
        self.idle_seconds = idle_seconds
        self.need: Need | None = None
        self.loads = self.unloads = 0
        self.context: int | None = None
        self._opens = opens
        self._measures = measures
        self._opened: Opened | None = None
        self._uses = 0  # requests that hold it
        self._last_used = 0.0
        self._leaving = False  # another model waits for its memory
        self._waiters: list[asyncio.Future[Opened]] = []  # requests that wait until it is open
        self._loading: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    @property
    def opened(self) -> Opened | None:
        """The open model; None while it is closed."""
        return self._opened

    @property
    def _is_usable(self) -> bool:
        """Whether it is open and works. A pinned model whose engine has stopped stays: the server is not healthy."""
        return self._opened is not None and (self.pinned or self._opened.engine.failure is None)

    @property
    def uses(self) -> int:
        """How many requests hold it now."""
        return self._uses


class Opened:
    """An open model.

    Attributes:
        engine: Its engine.
        fingerprint: The `system_fingerprint` of its answers.
        is_warm: Whether it has computed something.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.fingerprint = fingerprint(engine)
        self.is_warm = False
        with contextlib.suppress(LlamacError):  # requests will report it
            template = engine.model.chat_template
            if template is not None:
                prepare(template.choose())  # while this process imports what requests need

    async def warm_up(self) -> None:
        """Compute one token: the threads start, and the first weights are read. Then guides read the vocabulary.

        llguidance holds the GIL meanwhile: the first guided request would stop all others.
        """
        model = self.engine.model
        token = model.special.bos_id or 0
        try:
            await self.engine.submit([token], max_tokens=1)
        except LlamacError:
            if self.engine.failure is not None:
                raise
        with contextlib.suppress(LlamacError):  # without llguidance or a tokenizer; guided requests will report it
            await asyncio.get_running_loop().run_in_executor(None, model.prepare_guides)
        self.is_warm = True

    def close(self) -> None:
        """Close the engine and its model."""
        self.engine.close()
        self.engine.model.close()


class Models:
    """The table."""

    def __init__(
        self,
        entries: Sequence[Entry],
        *,
        default: str | None = None,
        max_memory: int | None = None,
        wait_seconds: float = 60.0,
    ) -> None:
        """Make the table.

        Args:
            entries: The models.
            default: A name of the model of requests that name none. Default: the only model, if there is one.
            max_memory: Most bytes that the open models may need together; None: no limit.
            wait_seconds: How long a request waits at most until there is room for its model.

        Raises:
            ArgumentError: If two models have the same name, or none has the name `default`.
        """
        self.entries = tuple(entries)
        self._names: dict[str, Entry] = {}
        for entry in self.entries:
            for name in entry.names:
                if name in self._names:
                    raise ArgumentError(f"two models have the name {name!r}: {self._names[name].name} and {entry.name}")
                self._names[name] = entry
        if default is not None and default not in self._names:
            raise ArgumentError(f"the default model is {default!r}, expected one of {', '.join(self._names)}")
        self._default = self._names[default] if default else self.entries[0] if len(self.entries) == 1 else None
        self._limit = max_memory
        self._wait_seconds = wait_seconds
        self._changing = asyncio.Lock()  # held while a model is opened or closed
        self._unused = asyncio.Event()  # a model has lost its last request
        self._thread = ThreadPoolExecutor(1, "llamac-models")
        self._tasks: set[asyncio.Task[None]] = set()
        self._past: Counter[str] = Counter()  # what engines that are closed have counted

    @staticmethod
    def of_one(engine: Engine, names: Sequence[str]) -> Models:
        """The table of one model that is open already. Its own name comes after those that are given."""
        own = engine.model.name or Path(engine.model.file.path).stem
        names = tuple(dict.fromkeys((*names, own)))
        found = Models([Entry(names, lambda limit: engine, lambda limit: need_of(engine, None, limit), pinned=True)])
        found._open_now(found.entries[0])
        return found

    # ---- what there is

    @property
    def names(self) -> dict[str, Entry]:
        """The model of each name."""
        return dict(self._names)

    def open_ones(self) -> Iterator[tuple[Entry, Opened]]:
        """The models that are open now."""
        for entry in self.entries:
            opened = entry._opened
            if opened is not None:
                yield entry, opened

    def counts(self) -> dict[str, int]:
        """What all engines have counted since the start, those included that are closed."""
        found = Counter(self._past)
        for _, opened in self.open_ones():
            found.update(_counts_of(opened.engine))
        return found

    def find(self, name: str | None, allowed: Callable[[Entry], bool] = lambda entry: True) -> Entry:
        """The model of a name. Names are looked up in the table, and nowhere else.

        Args:
            name: The name, or None for the default model.
            allowed: Whether the caller may use a model. Others do not exist for it.

        Raises:
            HttpError: If no model has this name.
            InvalidRequestError: If there is neither a name nor a default model.
        """
        known = [each for each, entry in self._names.items() if allowed(entry)]
        if name is None:
            if self._default is not None and allowed(self._default):
                return self._default
            message = f"several models are served: 'model' must be one of {_listed(known)}"
            raise InvalidRequestError(message, "model", "missing_required_parameter")
        if name not in known:
            shown = name if len(name) <= SHOWN else name[:SHOWN] + "..."
            raise HttpError(404, f"the model {shown!r} is not served here, only {_listed(known)}", "model_not_found")
        return self._names[name]

    # ---- requests

    async def take(self, entry: Entry) -> Opened:
        """Hold a model: it is open, and stays so until `release`. Waits until it has been opened.

        Raises:
            HttpError: If it cannot be opened.
        """
        opened = entry._opened
        if opened is not None and not entry._leaving and entry._is_usable:
            self.hold(entry)
            return opened
        waiter: asyncio.Future[Opened] = asyncio.get_running_loop().create_future()
        entry._waiters.append(waiter)
        if entry._loading is None:
            entry._loading = asyncio.ensure_future(self._load(entry))
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.release(entry)
            raise

    def hold(self, entry: Entry) -> None:
        """Hold an open model once more."""
        entry._uses += 1
        if entry._timer is not None:
            entry._timer.cancel()
            entry._timer = None

    def release(self, entry: Entry) -> None:
        """Let a model go."""
        entry._uses -= 1
        entry._last_used = time.monotonic()
        if not entry._uses:
            self._unused.set()
            self._rest(entry)

    # ---- opening

    def open_pinned(self) -> None:
        """Open the pinned models, before the event loop runs.

        Raises:
            OutOfMemoryError: If the limit does not allow them.
        """
        for entry in self.entries:
            if entry.pinned and entry._opened is None:
                self._check_room(entry)
                self._open_now(entry)

    def _open_now(self, entry: Entry) -> Opened:
        opened = Opened(entry._opens(None if entry.need is None else entry.need.total))
        entry._opened = opened
        entry.context = opened.engine.context
        entry.loads += 1
        return opened

    async def _load(self, entry: Entry) -> None:
        """Open a model, and wake the requests that wait for it."""
        try:
            async with self._changing:
                opened: Opened | None = None
                failure: Exception | None = None
                if any(not waiter.done() for waiter in entry._waiters):
                    try:
                        opened = await self._open(entry)
                    except Exception as error:
                        failure = error
                entry._loading = None
                for waiter in entry._waiters:
                    if waiter.done():
                        continue
                    if opened is not None:
                        self.hold(entry)
                        waiter.set_result(opened)
                    elif failure is not None:
                        waiter.set_exception(_unavailable(entry, failure))
                entry._waiters.clear()
                self._rest(entry)
        finally:
            entry._loading = None

    async def _open(self, entry: Entry) -> Opened:
        """Open a model unless it is open, and make room for it first."""
        opened = entry._opened
        if opened is not None:
            if entry._is_usable:
                return opened
            while entry._uses:  # they all end with the engine's error
                self._unused.clear()
                await self._unused.wait()
            await self._unload(entry, "its engine has stopped")
        begun = time.monotonic()
        try:
            if self._limit is not None:
                await self._in_thread(lambda: self._check_room(entry))
                await self._make_room(entry)
            opened = await self._in_thread(lambda: self._open_now(entry))
        except HttpError:
            raise
        except Exception as error:
            LOGGER.error("a model cannot be loaded", exc_info=error, extra={"fields": {"model": entry.name}})
            raise
        seconds = round(time.monotonic() - begun, 4)
        LOGGER.info("a model is loaded", extra={"fields": {"model": entry.name, "seconds": seconds}})
        return opened

    def _check_room(self, entry: Entry) -> None:
        """Compute what a model needs, and whether it fits beside the pinned ones."""
        if self._limit is None:
            return
        if entry.need is None:
            entry.need = entry._measures(self._limit)
        pinned = [each for each in self.entries if each.pinned and each.need is not None]
        needed = _bytes_of({*pinned, entry})
        if needed > self._limit:
            beside = " beside the pinned models" if pinned and pinned != [entry] else ""
            limit = f"max_memory is {size_text(self._limit)}"
            raise OutOfMemoryError(f"{limit}, but the model {entry.name!r} needs {size_text(needed)}{beside}")

    async def _make_room(self, entry: Entry) -> None:
        """Close models, those first that no request has used for longest, until a model fits.

        If requests use all of them, the one that was used least recently takes no new ones, so that this ends.
        """
        assert self._limit is not None
        limit = time.monotonic() + self._wait_seconds
        leaving: set[Entry] = set()
        try:
            while _bytes_of({each for each, _ in self.open_ones()} | {entry}) > self._limit:
                others = [each for each, _ in self.open_ones() if not each.pinned]
                unused = [each for each in others if not each._uses]
                if unused:
                    await self._unload(min(unused, key=_last_used), "another model needs the memory")
                    continue
                victim = min(others, key=_last_used)
                victim._leaving = True
                leaving.add(victim)
                self._unused.clear()
                try:
                    await asyncio.wait_for(self._unused.wait(), max(0.0, limit - time.monotonic()))
                except asyncio.TimeoutError:
                    message = f"there is no memory for the model {entry.name!r} while requests use others: try again"
                    raise HttpError(503, message, "model_not_loaded", "server_error") from None
        finally:
            for each in leaving:
                each._leaving = False

    # ---- closing

    def _rest(self, entry: Entry) -> None:
        """Close a model when it has been idle for its time."""
        if entry._timer is not None:
            entry._timer.cancel()
            entry._timer = None
        if entry._opened is None or entry._uses or entry.pinned or entry.idle_seconds is None:
            return
        entry._timer = asyncio.get_running_loop().call_later(entry.idle_seconds, self._expire, entry)

    def _expire(self, entry: Entry) -> None:
        entry._timer = None
        task = asyncio.ensure_future(self._unload_idle(entry, entry._last_used))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _unload_idle(self, entry: Entry, last_used: float) -> None:
        async with self._changing:
            if entry._opened is not None and not entry._uses and entry._last_used == last_used:
                await self._unload(entry, "it is idle")

    async def _unload(self, entry: Entry, reason: str) -> None:
        """Close a model that no request holds."""
        opened = entry._opened
        assert opened is not None
        assert not entry._uses
        assert self._changing.locked()
        entry._opened = None
        entry.unloads += 1
        self._past.update(_counts_of(opened.engine))
        await self._in_thread(opened.close)
        LOGGER.info("a model is unloaded", extra={"fields": {"model": entry.name, "reason": reason}})

    def close(self) -> None:
        """Close all models. No event loop runs any more."""
        self._thread.shutdown(wait=True)
        for entry, opened in list(self.open_ones()):
            entry._opened = None
            opened.close()

    async def _in_thread(self, call: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)


def _last_used(entry: Entry) -> float:
    return entry._last_used


def _bytes_of(entries: set[Entry]) -> int:
    """What models need together: files that several of them map count once."""
    needs = [entry.need for entry in entries if entry.need is not None]
    return sum(need.own for need in needs) + sum({need.file: need.weights for need in needs}.values())


def _unavailable(entry: Entry, error: Exception) -> HttpError:
    """The error of a request whose model cannot be opened. It shows no folders of this machine."""
    if isinstance(error, HttpError):
        return HttpError(error.status, str(error), error.code, error.kind)
    reason = FOLDERS.sub("", str(error)) if isinstance(error, LlamacError | OSError) else "the log says why"
    message = f"the model {entry.name!r} cannot be loaded: {reason}"
    return HttpError(503, message, "model_not_loaded", "server_error")


def _listed(names: Sequence[str]) -> str:
    return " or ".join(map(repr, names)) or "none"


def _counts_of(engine: Engine) -> dict[str, int]:
    """What an engine has counted since it was opened."""
    stats = engine.stats()
    found = {name: getattr(stats, name) for name in COUNTS}
    return found | {f"prefix_{name}": getattr(stats.prefix, name) for name in PREFIX_COUNTS}
