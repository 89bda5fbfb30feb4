"""The models of a server: a table that maps names to models, and opens and closes them.

Everything except opening and closing files happens in the event loop, so the table needs no locks. One thread opens and
closes files, one after another.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from llamac.engine.batching.engine import Engine
from llamac.engine.memory import MIN_CONTEXT, fixed_bytes, kv_is_on_device
from llamac.engine.scoring.cancellation import Cancellation
from llamac.errors import ArgumentError, LlamacError, OutOfMemoryError
from llamac.openai.errors import InvalidRequestError
from llamac.openai.responses import fingerprint
from llamac.server.exchange import HttpError
from llamac.sizes import size_text
from llamac.text.chat_process import prepare

LOGGER = logging.getLogger("llamac.server")
# Counters of an engine and of its prefix cache.
COUNTS = ("steps", "rows", "preemptions", "drafted_tokens", "accepted_tokens")
PREFIX_COUNTS = ("lookups", "hits", "evictions")
SHOWN = 100  # maximum number of characters of an unknown name in an error
FOLDERS = re.compile(r"(?<![\w.])/(?:[^\s/:'\"]+/)+")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Need:
    """The maximum memory that an open model can need, in bytes. A GPU's memory does not count.

    Attributes:
        own: Everything except the model file.
        weights: The model file, which is mapped.
        file: The identity of the file. Models that share a file need its memory once.
    """

    own: int
    weights: int
    file: tuple[int, int]

    @property
    def total(self) -> int:
        """The sum of all bytes."""
        return self.own + self.weights


def need_of(engine: Engine, kv_tokens: int | None, limit: int) -> Need:
    """Compute the memory that a model needs with its engine.

    Args:
        engine: The engine.
        kv_tokens: Capacity of its KV cache in positions. None: one whole sequence, or as many as the limit leaves. The
            states of a sequence's recurrent layers come on top.
        limit: The limit for all models.
    """
    model = engine.model
    positions, page_bytes = engine.page_size
    fixed, states = model._memory.fixed(), engine._most_state_bytes
    pages = -(-(engine.context if kv_tokens is None else kv_tokens) // positions)
    if kv_is_on_device(model):
        pages = states = 0
    elif kv_tokens is None and page_bytes and fixed + states + pages * page_bytes > limit:
        least = -(-min(MIN_CONTEXT, engine.context) // positions)
        pages = max(least, (limit - fixed - states) // page_bytes)
    found = os.stat(model.file.path)
    weights = fixed_bytes(model)[0]
    return Need(fixed - weights + states + pages * page_bytes, weights, (found.st_dev, found.st_ino))


class Entry:
    """A model of the table.

    Attributes:
        names: Its names. Answers use the first.
        pinned: Whether it is opened at startup and never closed.
        idle_seconds: Seconds without a request after which it is closed; None: never.
        need: The memory that it needs, once computed.
        context: Positions per request; known once it has been opened.
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
        stamp: Callable[[], object] = lambda: None,
        folders: Iterable[Path] = (),
    ) -> None:
        """Describe a model.

        Args:
            names: Its names.
            opens: Opens it with an engine, within a limit in bytes or None. Closing the engine closes the model.
            measures: Computes the memory that it needs, given the limit for all models.
            pinned: Whether it is opened at startup and never closed.
            idle_seconds: Seconds without a request after which it is closed; None: never.
            stamp: Returns what differs if its files have changed.
            folders: The folders of its files. Errors for clients leave them out.
        """
        self.names = tuple(names)
        self.pinned = pinned
        self.idle_seconds = idle_seconds
        self.need: Need | None = None
        self.loads = self.unloads = 0
        self.context: int | None = None
        self._opens = opens
        self._measures = measures
        self._stamp = stamp
        self._folders = sorted({f"{folder}/" for folder in folders}, key=len, reverse=True)
        self._measured: object = None  # the stamp of the files for which `need` was computed
        self._opened: Opened | None = None
        self._uses = 0  # number of references
        self._last_used = 0.0
        self._leaving = False  # whether it is being evicted: another model waits for its memory
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
        """Whether it is open and works. A pinned model stays open if its engine stops: the server is then unhealthy."""
        return self._opened is not None and (self.pinned or self._opened.engine.failure is None)

    @property
    def _is_awaited(self) -> bool:
        """Whether requests wait until it is open."""
        return any(not waiter.done() for waiter in self._waiters)

    @property
    def uses(self) -> int:
        """The current number of references."""
        return self._uses


class Opened:
    """An open model.

    Attributes:
        engine: Its engine.
        fingerprint: The `system_fingerprint` of its answers.
        is_warm: Whether it has computed a token.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.fingerprint = fingerprint(engine)
        self.is_warm = False
        with contextlib.suppress(LlamacError):  # requests will report the error
            template = engine.model.chat_template
            if template is not None:
                prepare(template.choose())  # starts the worker while this process imports other modules

    async def warm_up(self) -> None:
        """Compute one token, which starts the threads and reads the weights. Then prepare the tables for guides.

        llguidance holds the GIL while it reads the vocabulary. Otherwise the first guided request would stall others.
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
    """The table of models."""

    def __init__(
        self,
        entries: Sequence[Entry],
        *,
        default: str | None = None,
        max_memory: int | None = None,
        wait_seconds: float = 60.0,
        cancel: Cancellation | None = None,
    ) -> None:
        """Create the table.

        Args:
            entries: The models.
            default: The model for requests that do not name one. Default: the only model, if there is exactly one.
            max_memory: Maximum total bytes that the open models may need; None: no limit.
            wait_seconds: Maximum time that a request waits for room for its model.
            cancel: Stops the opening of models when the table is closed.

        Raises:
            ArgumentError: If two models have the same name, or no model has the name `default`.
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
        self._cancel = cancel
        self._changing = asyncio.Lock()  # held while a model is opened or closed
        self._turn = asyncio.Lock()  # held by the one load that closes models to make room, also while it waits
        self._made_room: set[Entry] = set()  # the models that it has closed: no other load may take their room
        self._unused = asyncio.Event()  # set when a model loses its last reference or its last waiting request
        self._thread = ThreadPoolExecutor(1, "llamac-models")
        self._tasks: set[asyncio.Task[None]] = set()
        self._past: Counter[str] = Counter()  # final counters of closed engines

    @staticmethod
    def of_one(engine: Engine, names: Sequence[str], further: Sequence[str] = ()) -> Models:
        """Return a table of one model that is already open. Its own name comes after `names` and before `further`."""
        own = engine.model.name or Path(engine.model.file.path).stem
        names = tuple(dict.fromkeys((*names, own, *further)))
        found = Models([Entry(names, lambda limit: engine, lambda limit: need_of(engine, None, limit), pinned=True)])
        found._open_now(found.entries[0])
        return found

    # ---- look-ups

    @property
    def names(self) -> dict[str, Entry]:
        """The models by name."""
        return dict(self._names)

    def open_ones(self) -> Iterator[tuple[Entry, Opened]]:
        """Iterate over the models that are open now."""
        for entry in self.entries:
            opened = entry._opened
            if opened is not None:
                yield entry, opened

    def counts(self) -> dict[str, int]:
        """Return the counters of all engines since startup, including closed ones."""
        found = Counter(self._past)
        for _, opened in self.open_ones():
            found.update(_counts_of(opened.engine))
        return found

    def find(self, name: str | None, allowed: Callable[[Entry], bool] = lambda entry: True) -> Entry:
        """Find the model with a name in the table.

        Args:
            name: The name, or None for the default model.
            allowed: Returns whether the caller may use a model. Other models are treated as nonexistent.

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
        """Acquire a reference to an open model, which stays open until `release`. Opens the model if necessary.

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
            if not entry._is_awaited:
                self._unused.set()
            raise

    def hold(self, entry: Entry) -> None:
        """Add a reference to an open model."""
        entry._uses += 1
        if entry._timer is not None:
            entry._timer.cancel()
            entry._timer = None

    def release(self, entry: Entry) -> None:
        """Drop a reference to a model."""
        entry._uses -= 1
        entry._last_used = time.monotonic()
        if not entry._uses:
            self._unused.set()
            self._schedule_close(entry)

    # ---- opening

    def open_pinned(self) -> None:
        """Open the pinned models, before the event loop runs.

        Raises:
            OutOfMemoryError: If the limit does not allow them.
        """
        for entry in self.entries:
            if entry.pinned and entry._opened is None:
                self._measure(entry)
                self._check_room(entry)
                self._open_now(entry)

    def _open_now(self, entry: Entry) -> Opened:
        opened = Opened(entry._opens(None if entry.need is None else entry.need.total))
        entry._opened = opened
        entry._last_used = time.monotonic()
        entry.context = opened.engine.context
        entry.loads += 1
        return opened

    async def _load(self, entry: Entry) -> None:
        """Open a model and wake the requests that wait for it."""
        try:
            if entry._leaving:  # the model that needs its memory comes first
                async with self._turn:
                    pass
            async with self._changing:
                opened: Opened | None = None
                failure: Exception | None = None
                if entry._is_awaited:
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
                self._schedule_close(entry)
        finally:
            entry._loading = None

    async def _open(self, entry: Entry) -> Opened:
        """Open a model unless it is open, after making room for it."""
        opened = entry._opened
        if opened is not None:
            if entry._is_usable:
                return opened
            while entry._uses:  # all of its requests end with the engine's error
                self._unused.clear()
                await self._unused.wait()
            await self._unload(entry, "its engine has stopped")
        begun = time.monotonic()
        try:
            if self._limit is not None:
                await self._with_room(lambda: self._measure(entry))
                self._check_room(entry)
                await self._make_room(entry)
            opened = await self._with_room(lambda: self._open_now(entry))
        except HttpError:
            raise
        except Exception as error:
            expected = isinstance(error, LlamacError | OSError)  # then the message says what is wrong
            fields = {"model": entry.name, **({"reason": str(error)} if expected else {})}
            LOGGER.error("a model cannot be loaded", exc_info=None if expected else error, extra={"fields": fields})
            raise
        seconds = round(time.monotonic() - begun, 4)
        LOGGER.info("a model is loaded", extra={"fields": {"model": entry.name, "seconds": seconds}})
        return opened

    async def _with_room(self, call: Callable[[], Result]) -> Result:
        """Call a function that opens a model, in the thread; again without an unused model if there is no memory.

        Only the memory of the process is planned, and not a GPU's.
        """
        while True:
            try:
                return await self._in_thread(call)
            except OutOfMemoryError:
                if await self._close_unused("another model finds no memory") is None:
                    raise

    def _measure(self, entry: Entry) -> None:
        """Compute what a model needs, unless this is known and its files have not changed since."""
        if self._limit is None:
            return
        stamp = entry._stamp()
        if entry.need is None or stamp != entry._measured:
            entry.need = entry._measures(self._limit)
            entry._measured = stamp

    def _check_room(self, entry: Entry) -> None:
        """Check that a model fits beside the pinned models."""
        if self._limit is None:
            return
        pinned = [each for each in self.entries if each.pinned and each.need is not None]
        needed = _bytes_of({*pinned, entry})
        if needed > self._limit:
            beside = " beside the pinned models" if pinned and pinned != [entry] else ""
            limit = f"max_memory is {size_text(self._limit)}"
            raise OutOfMemoryError(f"{limit}, but the model {entry.name!r} needs {size_text(needed)}{beside}")

    async def _make_room(self, entry: Entry) -> None:
        """Close models, the least recently used first, until a model fits.

        If all models are in use, the least recently used one accepts no new requests, so that the wait ends. Meanwhile
        models that fit at once are opened, and idle ones are closed.
        """
        if entry not in self._made_room and self._fits(entry, self._made_room):
            return
        limit = time.monotonic() + self._wait_seconds
        await self._while_unlocked(self._turn.acquire())
        leaving: set[Entry] = set()
        is_over = False
        try:
            while not (entry._is_awaited and self._fits(entry)):
                if is_over or not entry._is_awaited:
                    message = f"there is no memory for the model {entry.name!r} while requests use others: try again"
                    raise HttpError(503, message, "model_not_loaded", "server_error")
                closed = await self._close_unused("another model needs the memory")
                if closed is not None:
                    self._made_room.add(closed)
                    continue
                if not self._fits(entry, without=leaving):
                    others = [each for each, _ in self.open_ones() if not each.pinned and each not in leaving]
                    victim = min(others, key=_last_used)
                    victim._leaving = True
                    leaving.add(victim)
                self._unused.clear()
                try:
                    left = max(0.0, limit - time.monotonic())
                    await self._while_unlocked(asyncio.wait_for(self._unused.wait(), left))
                except asyncio.TimeoutError:
                    is_over = True
        finally:
            for each in leaving:
                each._leaving = False
            self._made_room.clear()
            self._turn.release()

    def _fits(self, entry: Entry, others: Iterable[Entry] = (), without: Collection[Entry] = ()) -> bool:
        """Return whether there is room for a model beside others and the open ones, except those in `without`."""
        assert self._limit is not None
        beside = {each for each, _ in self.open_ones() if each not in without}
        return _bytes_of({entry, *others, *beside}) <= self._limit

    async def _while_unlocked(self, waiting: Awaitable[object]) -> None:
        """Wait for something, and let others open and close models meanwhile."""
        self._changing.release()
        try:
            await waiting
        finally:
            await self._changing.acquire()

    # ---- closing

    async def _close_unused(self, reason: str) -> Entry | None:
        """Close the model that no request has used for longest, if there is one, and return it."""
        unused = [each for each, _ in self.open_ones() if not each.pinned and not each._uses]
        found = min(unused, key=_last_used, default=None)
        if found is not None:
            await self._unload(found, reason)
        return found

    def _schedule_close(self, entry: Entry) -> None:
        """Close a model after its idle time."""
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
        """Close an unreferenced model."""
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
        """Close all models, after the event loop has ended."""
        if self._cancel is not None:
            self._cancel.cancel()
        self._thread.shutdown(wait=True)
        for entry, opened in list(self.open_ones()):
            entry._opened = None
            opened.close()

    async def _in_thread(self, call: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)


def _last_used(entry: Entry) -> float:
    return entry._last_used


def _bytes_of(entries: set[Entry]) -> int:
    """Return the total memory that models need. Files that several models map count once."""
    needs = [entry.need for entry in entries if entry.need is not None]
    return sum(need.own for need in needs) + sum({need.file: need.weights for need in needs}.values())


def _unavailable(entry: Entry, error: Exception) -> HttpError:
    """Return the error for a request whose model cannot be opened. It does not reveal folders of this machine."""
    if isinstance(error, HttpError):
        return HttpError(error.status, str(error), error.code, error.kind)
    reason = "the log says why"
    if isinstance(error, LlamacError | OSError):
        reason = str(error)
        for folder in entry._folders:  # FOLDERS ends at a space or a colon
            reason = re.sub(rf"(?<![\w.]){re.escape(folder)}", "/-/", reason)
        reason = FOLDERS.sub("", reason)
    message = f"the model {entry.name!r} cannot be loaded: {reason}"
    return HttpError(503, message, "model_not_loaded", "server_error")


def _listed(names: Sequence[str]) -> str:
    return " or ".join(map(repr, names)) or "none"


def _counts_of(engine: Engine) -> dict[str, int]:
    """Return an engine's counters since it was opened."""
    stats = engine.stats()
    found = {name: getattr(stats, name) for name in COUNTS}
    return found | {f"prefix_{name}": getattr(stats.prefix, name) for name in PREFIX_COUNTS}
