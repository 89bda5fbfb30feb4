"""The batch of an engine: the steps that compute its running requests, sample their tokens, and end them.

Only the engine's thread uses a batch, but any thread can interrupt its running pass.
"""

from __future__ import annotations

import contextlib
import functools
import time
from array import array
from collections.abc import Callable, Iterator
from typing import NamedTuple

from llamac.engine.batching.admission import Admission
from llamac.engine.batching.beams import BeamRequest
from llamac.engine.batching.request import Request
from llamac.engine.batching.running_pass import RunningPass
from llamac.engine.batching.scheduler import Limits, share_rows
from llamac.engine.cache.prefix_cache import PrefixCache
from llamac.engine.generation.logprobs import chunk_rows, score_rows, token_logprobs
from llamac.engine.generation.output import FinishReason
from llamac.engine.prompts.overflow import make_room
from llamac.engine.rows import ROW
from llamac.engine.sampling.device_draws import drawing_on_device
from llamac.engine.sampling.sampler import draw_rows
from llamac.engine.session import Session
from llamac.engine.speculation.batch_drafts import MAX_REQUESTS, Drafters, plan_drafts
from llamac.engine.speculation.draft_plan import max_drafts, row_costs
from llamac.engine.speculation.states import States
from llamac.errors import CancelledError, ClosedError, LlamacError, OutOfMemoryError, wrapped
from llamac.gpu.draws import Draw

GUIDE_WAIT_S = 0.001  # how long a step waits for guides, so that their requests do not miss the next step


@contextlib.contextmanager
def sequences_changed() -> Iterator[None]:
    """Mark what follows a pass: an OutOfMemoryError in it may have changed the sequences."""
    try:
        yield
    except OutOfMemoryError as failure:
        raise MemoryError(str(failure)) from failure


class _Rows(NamedTuple):
    """The rows of a step.

    Attributes:
        rows: Their numbers, ROW of each.
        n_logits: The number of rows of logits.
        scored: (request, first row of logits, rows) of prompts that are scored.
        wanted: The requests whose next token can be sampled.
        sampled: The row of logits of each of them.
    """

    rows: array[int]
    n_logits: int
    scored: list[tuple[Request, int, int]]
    wanted: list[Request]
    sampled: list[int]


def _rows_of(shares: list[tuple[Request, int]]) -> _Rows:
    """The next rows of requests."""
    rows, n_logits = array("i"), 0
    scored: list[tuple[Request, int, int]] = []
    wanted: list[Request] = []
    sampled: list[int] = []
    for request, n in shares:
        start, ends = request._position, n == request._pending
        n_scored = max(0, min(n, len(request._output.prompt) - 1 - start)) if request._to_score else 0
        for i, token in enumerate(request._next_ids(n)):
            rows.extend((token, request._running_sequence, start + i, int(i < n_scored or (ends and i + 1 == n))))
        if n_scored:
            scored.append((request, n_logits, n_scored))
        if ends:
            wanted.append(request)
            sampled.append(n_logits + n_scored)
        n_logits += n_scored + ends
    return _Rows(rows, n_logits, scored, wanted, sampled)


def _move_to_front(logits: memoryview, rows: list[int], size: int) -> None:
    """Move ascending rows of logits, of `size` each, to the front."""
    for place, row in enumerate(rows):
        if place != row:
            logits[place * size : (place + 1) * size] = logits[row * size : (row + 1) * size]


class Batch:
    """Requests that are computed together, and requests that wait for a sequence.

    Attributes:
        steps: Number of passes through the model.
        rows: Number of tokens computed in these passes.
        generated: Number of sampled tokens.
        drafted: Number of computed drafts.
        accepted: Number of accepted drafts.
        running_pass: The current pass, which other threads can cancel.
    """

    def __init__(self, session: Session, n_sequences: int, cache: PrefixCache | None, drafters: Drafters) -> None:
        """Create an empty batch.

        Args:
            session: A session that only this batch uses.
            n_sequences: The number of sequences of the session.
            cache: The prefix cache, or None.
            drafters: What drafts with a model.
        """
        self.steps = self.rows = self.generated = 0
        self.drafted = self.accepted = 0
        self.running_pass = RunningPass(session._core)
        self._drafters = drafters
        self._session = session
        self._model = session.model
        self._costs = row_costs(session)
        self._admission = Admission(session, n_sequences, cache)
        self._limits = Limits()
        self._logits = array("f")
        self._drawn: dict[Request, int | None] = {}  # tokens of the current step that the device drew

    @property
    def waiting(self) -> list[Request]:
        """Requests without a sequence."""
        return self._admission.waiting

    @property
    def running(self) -> list[Request]:
        """Requests with a sequence."""
        return self._admission.running

    @property
    def preemptions(self) -> int:
        """Number of pauses of running requests."""
        return self._admission.preemptions

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not self.waiting and not self.running

    def add(self, requests: list[Request]) -> None:
        """Add new requests."""
        self._admission.add(requests)

    def end_all(self, error: Exception | None) -> None:
        """End every request with an error, or as cancelled if there is none."""
        for request in [*self.running, *self.waiting]:
            if error is None:
                with contextlib.suppress(ClosedError):  # of the model: there is nothing left to free
                    self._end(request, "cancelled")
            else:
                (request._beams or request)._finish(error)
        self.running.clear()
        self.waiting.clear()
        self._admission.prefixes.forget_reads()

    def requeue_all(self) -> None:
        """After a step that failed at any point, free all sequences. The requests resume by recomputing them."""
        self._costs = row_costs(self._session)
        self._logits = array("f")
        self._admission.prefixes.clear()
        self._admission.requeue_all()  # first: what a sequence holds is unknown, so the prefix cache may not keep it
        for request in list(self.waiting):
            if request._beams is None and request._output.finish_reason is not None:
                self._finish(request)

    def step(self) -> None:
        """End cancelled and late requests, admit waiting ones, compute one batch."""
        now = time.monotonic()
        try:
            self._end_expired(now)
            self._admission.age(now)
            self._admission.admit()
            if not self.running:
                self._admission.prefixes.wait()
            self._step()
        except MemoryError as failure:  # anything may have changed
            self._recover(failure)

    def _step(self) -> None:
        wanted: list[Request] = []
        try:
            self._shift()
            runnable = (r for r in self.running if r._deferred_logits is None and not r._is_idle)
            max_scored = chunk_rows(self._session._core.vocab_size)
            shares = [(r, min(n, max_scored) if r._to_score else n) for r, n in share_rows(runnable, self._limits)]
            if (drafts := self._plan_drafts(shares)) and self._compute_with_drafts(drafts):
                return
            if shares:
                wanted = self._compute(shares)
        except OutOfMemoryError as failure:  # of a shift or a pass, which leave the sequences unchanged
            if (largest := self._admission.free_memory()) is not None:
                self._fail(largest, failure)
            return
        except CancelledError:
            return
        self._sample_deferred(0.0 if shares else GUIDE_WAIT_S)
        if wanted:
            self._sample(*self._defer_late(wanted))
        self._search_beams(0.0 if shares else GUIDE_WAIT_S)

    def _recover(self, failure: MemoryError) -> None:
        """End the request that ranks last, so that all requests end eventually if steps keep failing."""
        self.requeue_all()
        if self.waiting:
            last = max(self.waiting, key=lambda request: request._rank)
            self._fail(last, wrapped(failure, "a step"))

    def _end_expired(self, now: float) -> None:
        """End requests that were cancelled or whose deadline has passed."""
        for request in [*self.running, *self.waiting]:
            if request._cancelled:
                self._end(request, "cancelled")
            elif request._deadline is not None and now >= request._deadline:
                self._end(request, "deadline")

    # ---- computing

    def _shift(self) -> None:
        """Shift full sequences. They fill up at the same length as alone, so a request gets the same tokens."""
        for request in self.running:
            if request._pending and not request._ready:
                request._dropped += make_room(self._session._core, request._running_sequence, request._output.keep)
                request._output.shifted = request._dropped

    def _compute(self, shares: list[tuple[Request, int]]) -> list[Request]:
        """Compute the rows of a step. Returns the requests whose next token can be sampled, in the logits' order."""
        rows, n_logits, scored, wanted, sampled = _rows_of(shares)
        logits = self._logits_of(n_logits)
        draws: list[Draw | None] = [None] * n_logits
        for request, row in zip(wanted, sampled, strict=True):
            if request._beams is None:
                draws[row] = request._output.sampler.device_draw(request._length)
        requests = [request for request, _ in shares]
        n_rows = len(rows) // ROW
        states = self._drafters.states(self.running, n_rows)
        begun = time.perf_counter()
        with drawing_on_device(self._session, draws) as tokens:
            self._pass(requests, n_rows, lambda: self._session._compute(rows, logits, (), None, states))
        self._drawn = {request: tokens[row] for request, row in zip(wanted, sampled, strict=True)}
        if all(request._pending == 1 for request, _ in shares):
            self._costs.observe(len(shares), time.perf_counter() - begun)
        size = self._session._core.vocab_size
        with sequences_changed():
            for request, row, n_scored in scored:
                self._score(request, logits[row * size : (row + n_scored) * size])
            _move_to_front(logits, sampled, size)
            first = 0
            for request, n in shares:
                self._drafters.keep(request, self.running, states, first, n)
                first += n
                request._computed += n
                self._admission.prefixes.keep_marked(request)
        return wanted

    def _pass(self, requests: list[Request], rows: int, compute: Callable[[], None]) -> None:
        """Run an interruptible pass."""
        self.running_pass.run(requests, [request for request in requests if request._pending > 1], compute)
        self.steps += 1
        self.rows += rows

    # ---- drafts

    def _plan_drafts(self, shares: list[tuple[Request, int]]) -> dict[Request, list[int]]:
        """Plan drafts for a step in which every running request computes one row, if they pay off and fit in memory."""
        requests = [request for request, _ in shares]
        if len(requests) > MAX_REQUESTS or len(requests) < len(self.running) or self.waiting:
            return {}
        if any(request._pending != 1 or request._to_score or request._beams for request in requests):
            return {}
        if not self._admission.has_room_for_drafts(len(requests)):
            return {}
        most = max_drafts(self._session._core)
        found: dict[Request, list[int]] = {}

        def plan() -> None:
            found.update(plan_drafts(requests, self._costs, most, self._drafters))

        if self._drafters.enabled:
            self.running_pass.run(requests, requests, plan)
        else:
            plan()
        return found

    def _compute_with_drafts(self, drafts: dict[Request, list[int]]) -> bool:
        """Compute a step with drafts, and sample tokens of each request until one differs from its draft.

        Returns whether there was enough memory.
        """
        rows, first = array("i"), {}
        draws: list[Draw | None] = []
        for request, guesses in drafts.items():
            first[request] = place = len(rows) // ROW
            for i, token in enumerate([*request._next_ids(1), *guesses]):
                rows.extend((token, request._running_sequence, place + i - 1 if i else -1, 1))
                draws.append(request._output.sampler.device_draw(request._computed + 1 + i))
        n_rows = len(rows) // ROW
        logits = self._logits_of(n_rows)
        states = self._drafters.states(self.running, n_rows)
        begun = time.perf_counter()
        try:
            with drawing_on_device(self._session, draws) as drawn:
                self._pass(list(drafts), n_rows, lambda: self._session._compute_drafts(rows, logits, states))
        except OutOfMemoryError:
            return False
        cost = self._costs.observe(n_rows, time.perf_counter() - begun)
        with sequences_changed():
            self._draw_drafts(drafts, logits, drawn, states, first, cost)
        return True

    def _draw_drafts(
        self,
        drafts: dict[Request, list[int]],
        logits: memoryview,
        drawn: list[int | None],
        states: States | None,
        first: dict[Request, int],
        cost: float,
    ) -> None:
        """Sample tokens of each request from the logits of its drafts until one differs from its draft.

        Args:
            drafts: The drafts of each request.
            logits: The logits of all rows.
            drawn: The token that the device drew after each row; None: it drew none.
            states: The hidden states of the pass, or None.
            first: Each request's first row.
            cost: The cost of the pass.
        """
        n_rows = len(first) + sum(map(len, drafts.values()))
        size, ended = self._session._core.vocab_size, []
        last: dict[Request, int] = {}
        for request, guesses in drafts.items():
            n_accepted = 0
            while True:
                last[request] = place = first[request] + n_accepted
                self._drafters.keep(request, self.running, states, place, 1)
                request._computed += 1
                self._drawn[request] = drawn[place]
                if failed := self._draw([request], logits[place * size : (place + 1) * size]):
                    ended += failed
                    break
                has_next = n_accepted < len(guesses) and request._pending == 1
                if not has_next or request._output.tokens[-1] != guesses[n_accepted]:
                    break
                n_accepted += 1
            request._output.drafted += len(guesses)
            request._output.accepted += n_accepted
            self.drafted += len(guesses)
            self.accepted += n_accepted
            if request._drafts is not None and guesses:
                others = self._costs.relative[n_rows - len(guesses)]
                request._drafts.settle(1 + (cost - others) / others, len(guesses), n_accepted, len(drafts))
        for place in last.values():  # before any request ends, because that discards drafts
            self._session.accept(place)
        self._finish_all(ended)

    # ---- sampling

    def _score(self, request: Request, logits: memoryview) -> None:
        """Record the log probabilities of a prompt's next tokens from the preceding rows of logits."""
        top = request._output.params.prompt_logprobs
        assert top is not None
        size, n = self._session._core.vocab_size, self._model.n_token_ids
        rows = [logits[at : at + size] for at in range(0, len(logits), size)]
        start = request._computed + 1
        tokens = request._output.prompt[start : start + len(rows)]
        request._output.prompt_logprobs[start:] = score_rows(rows, tokens, top, n, lambda: request._cancelled)

    def _logits_of(self, n: int) -> memoryview:
        """Return a buffer for n rows of logits."""
        size = n * self._session._core.vocab_size
        if len(self._logits) < size:
            self._logits = array("f", bytes(4 * size))
        return memoryview(self._logits)[:size]

    def _defer_late(self, wanted: list[Request]) -> tuple[list[Request], memoryview]:
        """Return the requests whose guides are ready, with their logits. The others keep theirs for a later step.

        A slow guide therefore delays no other request. Beams keep their logits until the whole search has them.
        """
        size, logits = self._session._core.vocab_size, self._logits_of(len(wanted))
        limit = time.monotonic() + GUIDE_WAIT_S
        late = [r for r in wanted if r._beams or not r._output.sampler.is_ready(max(0.0, limit - time.monotonic()))]
        if not late:
            return wanted, logits
        ready_logits = array("f")
        for i, request in enumerate(wanted):
            row = array("f", logits[i * size : (i + 1) * size])
            if request in late:
                request._deferred_logits = row
            else:
                ready_logits += row
        return [request for request in wanted if request not in late], memoryview(ready_logits)

    def _sample_deferred(self, timeout: float) -> None:
        """Sample the requests whose guides have become ready since an earlier step."""
        for request in [r for r in self.running if r._deferred_logits is not None and r._beams is None]:
            if request._output.sampler.is_ready(timeout) and request._deferred_logits is not None:
                row, request._deferred_logits = memoryview(request._deferred_logits), None
                self._sample([request], row)

    def _sample(self, wanted: list[Request], logits: memoryview) -> None:
        """Sample the next token of each request, deliver it, and end the requests that are complete."""
        self._finish_all(self._draw(wanted, logits))

    def _finish_all(self, ended: list[tuple[Request, Exception | None]]) -> None:
        for request, failure in ended:
            self._finish(request, failure)

    def _draw(self, wanted: list[Request], logits: memoryview) -> list[tuple[Request, Exception | None]]:
        """Sample the next token of each request, and deliver it. Returns the requests that ended, with their errors."""
        ended: list[tuple[Request, Exception | None]] = []
        size, n = self._session._core.vocab_size, self._model.n_token_ids
        for i, (request, token) in enumerate(zip(wanted, self._tokens(wanted, logits), strict=True)):
            if isinstance(token, Exception):
                ended.append((request, token))
                continue
            self.generated += 1
            row = logits[i * size : (i + 1) * size]
            try:
                request._deliver(request._output.accept(token, functools.partial(token_logprobs, row, n)))
            except BaseException as failure:  # raised by the guide, the decoder or the parser: ends only this request
                ended.append((request, wrapped(failure, "recording a token")))
                continue
            if request._output.finish_reason is not None:
                ended.append((request, None))
        return ended

    def _search_beams(self, timeout: float) -> None:
        """Continue the beam searches whose sequences all have logits and whose guides are ready."""
        for beams in {request._beams: None for request in self.running if request._deferred_logits is not None}:
            if beams is None or any(request._deferred_logits is None for request in beams._live):
                continue
            if not beams._search.is_ready(timeout):
                continue
            try:
                self.generated += len(beams._live)
                beams._advance(self._session._core)
            except BaseException as failure:
                self._end_beams(beams, failure=wrapped(failure, "a step of the beam search"))
                continue
            if beams._search.is_done:
                self._end_beams(beams, "stop")

    def _tokens(self, wanted: list[Request], logits: memoryview) -> list[int | LlamacError]:
        if not wanted:
            return []
        rows = logits.cast("B").cast("f", (len(wanted), self._session._core.vocab_size))
        samplers = [request._output.sampler for request in wanted]
        histories = [request._ids if request._output.sampler.in_python else () for request in wanted]
        positions = [request._computed for request in wanted]
        known = [self._drawn.pop(request, None) for request in wanted]
        return draw_rows(samplers, rows, self._model.n_token_ids, histories, positions, self._session._threads, known)

    # ---- ends

    def _finish(self, request: Request, failure: Exception | None = None) -> None:
        """Free a request's sequence and report its end."""
        try:
            if failure is None:
                self._admission.prefixes.keep_all(request)
            self._admission.remove(request)
        finally:
            request._finish(failure)

    def _fail(self, request: Request, failure: Exception) -> None:
        """End a request, and with it its beam search, with an error."""
        if request._beams is not None:
            self._end_beams(request._beams, failure=failure)
        else:
            self._finish(request, failure)

    def _end(self, request: Request, reason: FinishReason) -> None:
        """End a request, and with it its beam search."""
        if request._beams is not None:
            self._end_beams(request._beams, reason)
            return
        if request._output.finish_reason is None:
            request._deliver(request._output.end(reason))
        self._finish(request)

    def _end_beams(
        self, beams: BeamRequest, reason: FinishReason = "cancelled", failure: Exception | None = None
    ) -> None:
        """End a beam search and report its result once. `reason` applies to its running sequences."""
        beams._reason = reason
        try:
            for request in beams._members:
                self._admission.remove(request)
        finally:
            beams._finish(failure)
