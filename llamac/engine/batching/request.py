"""A request to an engine: its interface for callers, and its state for the engine's thread."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from llamac import _core
from llamac.arguments import to_float
from llamac.engine.generation.logprobs import TokenLogprobs
from llamac.engine.generation.output import Completion, Output, Timings
from llamac.errors import ArgumentError, wrapped
from llamac.interrupt import WAIT_S
from llamac.sizes import counted

if TYPE_CHECKING:
    from llamac.engine.batching.beams import BeamRequest
    from llamac.engine.batching.engine import Engine
    from llamac.engine.generation.reading import Deltas
    from llamac.engine.speculation.batch_drafts import RequestDrafts


class Request:
    """A generation that an engine computes together with others. `Engine.submit` makes one.

    Iterate over a request for pieces of text as they are generated; `result` waits for the completion. In asyncio,
    `await` it for the completion, or iterate with `async for`. Each piece is delivered once. A request is a context
    manager that cancels itself at the end.
    """

    def __init__(self, engine: Engine, output: Output, priority: int, deadline: float | None, order: int) -> None:
        self._engine = engine
        self._output = output
        self._priority = priority
        self._queued = time.monotonic()
        self._deadline = None if deadline is None else self._queued + deadline
        self._order = order
        self._condition = threading.Condition()
        self._pieces: deque[str] = deque()
        self._push: Callable[[str], bool] | None = None  # gets the pieces instead of `_pieces`
        self._delivered = 0  # number of characters delivered so far
        self._listeners: list[Callable[[], None]] = []
        self._completion: Completion | None = None
        self._failure: Exception | None = None
        self._cancelled = False
        self._group: Request | None = None  # the combined request that this candidate belongs to
        self._members: list[Request] = [self]  # the requests that an engine computes for this one
        # used only by the engine's thread
        self._level = priority
        self._waiting_since = self._queued  # once queued, only `scheduler.age` changes this and the level
        self._source: _core.Session | None = None  # a session with the prompt except its last id
        self._sequence: int | None = None  # the index in the engine's session while the request runs
        self._computed = 0  # number of computed ids
        self._dropped = 0  # number of these whose positions shifts have removed
        self._deferred_logits: array[float] | None = None  # the last logits, until the guide or beam search is ready
        self._beams: BeamRequest | None = None  # the beam search to which this request belongs
        self._is_idle = False  # a member of a beam search without a sequence to compute
        self._marks: set[int] = set()  # lengths at which the prefix cache stores the state
        self._drafts: RequestDrafts | None = None
        self._admitted: float | None = None
        self._first_token: float | None = None

    # ---- for callers

    @property
    def candidates(self) -> list[Request]:
        """The requests of the candidates. This is only the request itself unless it has several candidates (`n`)."""
        return [self]

    @property
    def done(self) -> bool:
        """Whether the request has ended. Some pieces may still be unread."""
        return self._completion is not None or self._failure is not None

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens in the prompt."""
        return len(self._output.prompt)

    @property
    def new_tokens(self) -> int:
        """The number of tokens generated so far, for all candidates together."""
        return sum(len(member._output.tokens) for member in self._members)

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """The log probabilities of the tokens so far, if the request has `logprobs`."""
        return self._output.logprobs[: len(self._output.tokens)]

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the end and return the result.

        Args:
            timeout: Seconds to wait. The request continues after a timeout.

        Raises:
            TimeoutError: If the request has not ended in time.
            BusyError: In the engine's own thread, where logits processors run.
            LlamacError: The error that ended it, if one did.
            ArgumentError: If `timeout` is no number.
        """
        if timeout is not None and math.isnan(timeout := to_float(timeout, "timeout")):
            raise ArgumentError("timeout is nan, expected a number of seconds")
        limit = None if timeout is None else time.monotonic() + timeout
        with self._condition:
            while not self.done:
                if limit is not None and time.monotonic() >= limit:
                    raise TimeoutError(f"the request has not ended within {timeout} seconds")
                self._engine._check_wait()
                self._condition.wait(WAIT_S if limit is None else min(WAIT_S, max(0.0, limit - time.monotonic())))
        return self._result()

    def cancel(self) -> None:
        """End the request now with the text generated so far and the finish_reason "cancelled".

        Any thread may call this, even after the end. The engine interrupts the running step unless other requests need
        it, and frees the request's memory after the step.
        """
        self._cancelled = True
        self._end_early()
        self._engine._interrupt(self)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        with self._condition:
            while not self._pieces and not self.done:
                self._engine._check_wait()
                self._condition.wait(WAIT_S)
            if self._pieces:
                return self._pieces.popleft()
        if self._failure is not None:
            raise self._failure
        raise StopIteration

    def deltas(self) -> Deltas:
        """Iterate over the pieces of the message instead of the text, with `for` or `async for`.

        Raises:
            ArgumentError: If the request does not answer a conversation.
        """
        from llamac.engine.generation.reading import Deltas

        return Deltas(self, self._output)

    def __await__(self) -> Generator[object, None, Completion]:
        return self._wait().__await__()

    async def _wait(self) -> Completion:
        await self._wait_until(lambda: self.done)
        return self._result()

    async def __aiter__(self) -> AsyncIterator[str]:
        changed, listen = self._listener()
        try:
            while True:
                while self._pieces:
                    yield self._pieces.popleft()
                if self.done:
                    with self._condition:  # `cancel` holds the lock until it has delivered everything
                        if not self._pieces:
                            break
                else:
                    self._engine._check_wait()
                    await changed.wait()
                    changed.clear()
        except asyncio.CancelledError:
            self.cancel()
            raise
        finally:
            self._stop_listening(listen)
        if self._failure is not None:
            raise self._failure

    def __enter__(self) -> Request:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def __repr__(self) -> str:
        state = "failed" if self._failure is not None else "waiting" if self._sequence is None else "running"
        if self._completion is not None:
            state = self._completion.finish_reason
        return f"<llamac.Request: {counted(len(self._output.tokens), 'token')}, {state}>"

    def _result(self) -> Completion:
        if self._failure is not None:
            raise self._failure
        assert self._completion is not None
        return self._completion

    async def _wait_until(self, ready: Callable[[], bool]) -> None:
        """Wait in asyncio until `ready()` is true. Cancelling the task cancels the request."""
        changed, listen = self._listener()
        try:
            while not ready():
                self._engine._check_wait()
                await changed.wait()
                changed.clear()
        except asyncio.CancelledError:
            self.cancel()
            raise
        finally:
            self._stop_listening(listen)

    def _listener(self) -> tuple[asyncio.Event, Callable[[], None]]:
        """Return an event of the running loop, and a listener that sets the event when the request changes."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        waker = self._engine._waker

        def listen() -> None:
            waker.wake(loop, changed)

        with self._condition:
            self._listeners.append(listen)
        return changed, listen

    def _stop_listening(self, listen: Callable[[], None]) -> None:
        with self._condition, contextlib.suppress(ValueError):  # already removed: its event loop was closed
            self._listeners.remove(listen)

    def _push_to(self, push: Callable[[str], bool]) -> None:
        """Let the engine's thread call `push` with each piece, until it returns False. Later pieces are iterated again.

        `push` is called with the request's lock, so that no call begins after `cancel` has returned. It must not block,
        because the whole batch waits for it.
        """
        with self._condition:
            while self._pieces:
                if not push(self._pieces.popleft()):
                    return
            self._push = push

    def _join(self, group: Request) -> None:
        """Become a candidate of a group. Changes of this request also wake the group's waiters."""
        self._group, self._condition, self._listeners = group, group._condition, group._listeners

    def _enter_queue(self) -> None:
        """Begin to wait: `Engine.generate` makes requests long before there is room for them in the queue."""
        self._queued = self._waiting_since = time.monotonic()

    # ---- for the engine's thread

    @property
    def _ids(self) -> array[int]:
        """All ids of the prompt and the generated tokens."""
        return self._output.prompt + array("i", self._output.tokens)

    def _next_ids(self, n: int) -> array[int]:
        """The next n of the pending ids."""
        tokens = self._output.tokens
        if n == 1 and self._pending == 1 and tokens:
            return array("i", tokens[-1:])
        return self._ids[self._computed : self._computed + n]

    @property
    def _to_score(self) -> int:
        """Positions of the prompt whose logits still have to be scored for `prompt_logprobs`."""
        if self._output.params.prompt_logprobs is None:
            return 0
        return len(self._output.prompt) - len(self._output.prompt_logprobs)

    @property
    def _running_sequence(self) -> int:
        """The sequence of a running request."""
        assert self._sequence is not None
        return self._sequence

    @property
    def _length(self) -> int:
        return len(self._output.prompt) + len(self._output.tokens)

    @property
    def _position(self) -> int:
        """The number of positions in the sequence."""
        return self._computed - self._dropped

    @property
    def _ready(self) -> int:
        """Ids that can be computed before the next shift."""
        return min(self._pending, self._output.context - self._position)

    def _missing_pages(self, page: int) -> int:
        """Return how many more pages of `page` positions the request will need soon."""
        if self._is_idle:
            return 1
        last = min(self._position + self._pending, self._output.context) // page + 1
        return last - self._position // page

    @property
    def _pending(self) -> int:
        """The number of ids that have not been computed yet."""
        return self._length - self._computed

    @property
    def _rank(self) -> tuple[float, float, int]:
        """The sort key of the serving order: higher level, then earlier deadline, then earlier arrival."""
        return -self._level, float("inf") if self._deadline is None else self._deadline, self._order

    def _deliver(self, piece: str) -> None:
        if self._first_token is None:
            self._first_token = time.monotonic()
        if piece:
            with self._condition:
                if self.done:  # `cancel` has already delivered all text
                    return
                self._delivered += len(piece)
                if self._push is None:
                    self._pieces.append(piece)
                    self._notify()
                elif not self._push(piece):
                    self._push = None

    def _end_early(self) -> None:
        """Report the tokens so far as the result, in the cancelling thread, while a step may be running.

        The engine's thread notices the end after the step. A token that it records until then is ignored.
        """
        with self._condition:
            if self.done:
                return
            self._completion = self._completed()
            if rest := self._completion.text[self._delivered :]:  # held back for a stop string, or just generated
                self._pieces.append(rest)
            self._notify()

    def _finish(self, failure: Exception | None = None) -> None:
        """Report the result of the output, or an error. A cancelled request already has its result."""
        with self._condition:
            if self.done:
                return
            if failure is None:
                try:
                    self._completion = self._completed()
                except BaseException as error:  # decoding the text or parsing the message failed
                    failure = wrapped(error, "reading the result")
            self._failure = failure
            self._notify()
        if failure is not None and self._group is not None:
            for member in self._group._members:
                member._cancelled = True

    def _completed(self) -> Completion:
        """Return the result with the tokens so far."""
        return self._output.completion(self._timings())

    def _timings(self) -> Timings:
        now = time.monotonic()
        admitted = now if self._admitted is None else self._admitted
        first = now if self._first_token is None else self._first_token
        return Timings(prefill=first - admitted, decode=now - first, queued=admitted - self._queued)

    def _notify(self) -> None:
        self._condition.notify_all()
        for listen in list(self._listeners):
            try:
                listen()
            except RuntimeError:  # the event loop has been closed
                self._listeners.remove(listen)
