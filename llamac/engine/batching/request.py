"""A request to an engine, as its caller and the engine's thread see it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from llamac import _core
from llamac.engine.generation.logprobs import TokenLogprobs
from llamac.engine.generation.output import Completion, Output, Timings
from llamac.errors import wrapped
from llamac.interrupt import WAIT_S

if TYPE_CHECKING:
    from llamac.engine.batching.beams import BeamRequest
    from llamac.engine.batching.engine import Engine
    from llamac.engine.generation.reading import Deltas
    from llamac.engine.speculation.batch_drafts import RequestDrafts


class Request:
    """A generation that an engine computes together with others. `Engine.submit` makes one.

    Iterate it for pieces of text, as soon as they are known; `result` waits for the whole. In asyncio, `await` it for
    the completion, or iterate it with `async for`. Each piece is delivered once. As a context manager a request cancels
    itself at the end.
    """

    def __init__(self, engine: Engine, output: Output, priority: int, deadline: float | None, order: int) -> None:
        self._engine = engine
        self._output = output
        self._priority = priority
        self._submitted = time.monotonic()
        self._deadline = None if deadline is None else self._submitted + deadline
        self._order = order
        self._condition = threading.Condition()
        self._pieces: deque[str] = deque()
        self._delivered = 0  # characters of the pieces so far
        self._listeners: list[Callable[[], None]] = []
        self._completion: Completion | None = None
        self._failure: Exception | None = None
        self._cancelled = False
        self._group: Request | None = None  # of which this is a candidate
        self._members: list[Request] = [self]  # that an engine computes
        # of the engine's thread
        self._level = priority
        self._waiting_since = self._submitted  # the moves of both are those of `scheduler.age`
        self._source: _core.Session | None = None  # a session that holds the prompt but for its last id
        self._sequence: int | None = None  # of the engine's session, while the request runs
        self._computed = 0  # ids that have been computed
        self._dropped = 0  # of these, positions that shifts have removed
        self._held: array[float] | None = None  # the last logits, while the guide does not know what may follow
        self._beams: BeamRequest | None = None  # the beam search that this is a part of
        self._is_idle = False  # of a beam search, and without a token to compute
        self._marks: set[int] = set()  # lengths at which the prefix cache keeps the state
        self._drafts: RequestDrafts | None = None
        self._admitted: float | None = None
        self._first_token: float | None = None

    # ---- for callers

    @property
    def candidates(self) -> list[Request]:
        """A request for each candidate: this one alone, unless the request asks for several (`n`)."""
        return [self]

    @property
    def done(self) -> bool:
        """Whether the request has ended. Pieces of text can still be waiting for their reader."""
        return self._completion is not None or self._failure is not None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self._output.prompt)

    @property
    def new_tokens(self) -> int:
        """Tokens generated so far, those of all candidates together."""
        return sum(len(member._output.tokens) for member in self._members)

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """The log probabilities of the tokens so far, if the request asked for them."""
        return self._output.logprobs[: len(self._output.tokens)]

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the end and return the result.

        Args:
            timeout: Seconds to wait. The request goes on after a timeout.

        Raises:
            TimeoutError: If the request has not ended in time.
            LlamacError: The error that ended it, if one did.
        """
        limit = None if timeout is None else time.monotonic() + timeout
        with self._condition:
            while not self.done:
                if limit is not None and time.monotonic() >= limit:
                    raise TimeoutError(f"the request has not ended within {timeout} seconds")
                self._condition.wait(WAIT_S if limit is None else min(WAIT_S, max(0.0, limit - time.monotonic())))
        return self._result()

    def cancel(self) -> None:
        """End the request now, and keep what was generated: finish_reason is "cancelled".

        Any thread may call this, also after the end. The engine frees the request's memory after the running step, of
        which it computes nothing more than other requests need.
        """
        self._cancelled = True
        self._end_early()
        self._engine._interrupt(self)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        with self._condition:
            while not self._pieces and not self.done:
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
        await self._changed(lambda: self.done)
        return self._result()

    async def __aiter__(self) -> AsyncIterator[str]:
        changed, listen = self._listener()
        try:
            while True:
                while self._pieces:
                    yield self._pieces.popleft()
                if self.done:
                    with self._condition:  # `cancel` holds it until it has delivered everything
                        if not self._pieces:
                            break
                else:
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
        return f"<llamac.Request: {len(self._output.tokens)} tokens, {state}>"

    def _result(self) -> Completion:
        if self._failure is not None:
            raise self._failure
        assert self._completion is not None
        return self._completion

    async def _changed(self, ready: Callable[[], bool]) -> None:
        """Wait in asyncio until the request is in a state. A task that is cancelled cancels the request."""
        changed, listen = self._listener()
        try:
            while not ready():
                await changed.wait()
                changed.clear()
        except asyncio.CancelledError:
            self.cancel()
            raise
        finally:
            self._stop_listening(listen)

    def _listener(self) -> tuple[asyncio.Event, Callable[[], None]]:
        """An event of the running loop that is set when something changes, and the listener that sets it."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        waker = self._engine._waker

        def listen() -> None:
            waker.wake(loop, changed)

        with self._condition:
            self._listeners.append(listen)
        return changed, listen

    def _stop_listening(self, listen: Callable[[], None]) -> None:
        with self._condition, contextlib.suppress(ValueError):  # its loop was closed
            self._listeners.remove(listen)

    def _join(self, group: Request) -> None:
        """Become a candidate of a group, whose waiters are woken with this one's."""
        self._group, self._condition, self._listeners = group, group._condition, group._listeners

    # ---- for the engine's thread

    @property
    def _ids(self) -> array[int]:
        """The ids to compute before the next token can be sampled."""
        return self._output.prompt + array("i", self._output.tokens)

    def _next_ids(self, n: int) -> array[int]:
        """The next n of the pending ids."""
        tokens = self._output.tokens
        if n == 1 and self._pending == 1 and tokens:
            return array("i", tokens[-1:])
        return self._ids[self._computed : self._computed + n]

    @property
    def _to_score(self) -> int:
        """Positions of the prompt whose rows must still give the log probabilities of the token after them."""
        if self._output.params.prompt_logprobs is None:
            return 0
        return len(self._output.prompt) - len(self._output.prompt_logprobs)

    @property
    def _slot(self) -> int:
        """The sequence of a running request."""
        assert self._sequence is not None
        return self._sequence

    @property
    def _length(self) -> int:
        return len(self._output.prompt) + len(self._output.tokens)

    @property
    def _position(self) -> int:
        """Positions that the sequence holds."""
        return self._computed - self._dropped

    @property
    def _ready(self) -> int:
        """Ids that can be computed before the next shift."""
        return min(self._pending, self._output.context - self._position)

    def _missing_pages(self, page: int) -> int:
        """The pages of so many positions that the request will need soon, beside those that it has."""
        if self._is_idle:
            return 1
        last = min(self._position + self._pending, self._output.context) // page + 1
        return last - self._position // page

    @property
    def _pending(self) -> int:
        """Ids that are not computed yet."""
        return self._length - self._computed

    @property
    def _rank(self) -> tuple[float, float, int]:
        """The order in which requests are served: higher level, earlier deadline, earlier arrival."""
        return -self._level, float("inf") if self._deadline is None else self._deadline, self._order

    def _deliver(self, piece: str) -> None:
        if self._first_token is None:
            self._first_token = time.monotonic()
        if piece:
            with self._condition:
                if not self.done:  # otherwise `cancel` has delivered the whole text
                    self._pieces.append(piece)
                    self._delivered += len(piece)
                    self._notify()

    def _end_early(self) -> None:
        """Report the tokens so far as the result, in the thread that cancels, while a step may be running.

        The engine's thread notices it after the step. Until then it may still record a token, which counts no more.
        """
        with self._condition:
            if self.done:
                return
            self._completion = self._completed()
            if rest := self._completion.text[self._delivered :]:  # held back for a stop string, or just generated
                self._pieces.append(rest)
            self._notify()

    def _finish(self, failure: Exception | None = None) -> None:
        """Report the result of the output, or an error. A request that was cancelled has its result already."""
        with self._condition:
            if self.done:
                return
            if failure is None:
                try:
                    self._completion = self._completed()
                except BaseException as error:  # its text or its message cannot be read
                    failure = wrapped(error, "reading the result")
            self._failure = failure
            self._notify()
        if failure is not None and self._group is not None:
            for member in self._group._members:
                member._cancelled = True

    def _completed(self) -> Completion:
        """The result. It has the tokens so far."""
        return self._output.completion(self._timings())

    def _timings(self) -> Timings:
        now = time.monotonic()
        admitted = now if self._admitted is None else self._admitted
        first = now if self._first_token is None else self._first_token
        return Timings(prefill=first - admitted, decode=now - first, queued=admitted - self._submitted)

    def _notify(self) -> None:
        self._condition.notify_all()
        for listen in list(self._listeners):
            try:
                listen()
            except RuntimeError:  # the event loop has been closed
                self._listeners.remove(listen)
