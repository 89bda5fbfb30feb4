"""Text generation with a session: the stream, and its loop of sampling and computing tokens."""

from __future__ import annotations

import contextlib
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from llamac import _core
from llamac.arguments import wrong_type
from llamac.engine.cache.moving import leave_device
from llamac.engine.generation.candidates import (
    asks_for_several,
    check_beams,
    check_counts,
    check_streams,
    generate_several,
)
from llamac.engine.generation.logprobs import TokenLogprobs, described, score_prompt
from llamac.engine.generation.output import Completion, Output, Timings
from llamac.engine.prompts.overflow import FittedPrompt, make_room
from llamac.engine.prompts.prompt_ids import prompt_ids
from llamac.engine.sampling.device_draws import drawing_on_device
from llamac.engine.sampling.params import ResolvedParams, SamplingParams, resolve
from llamac.engine.sampling.sampler import check_token_ids
from llamac.engine.session import Session
from llamac.engine.speculation.states import place_in
from llamac.engine.speculation.stream_drafts import Speculation
from llamac.errors import ArgumentError, BusyError, CancelledError, ClosedError, DeviceError
from llamac.sizes import counted

if TYPE_CHECKING:
    from llamac.engine.generation.reading import Deltas
    from llamac.engine.model import Model
    from llamac.engine.receipts.receipt import Receipt


class Stream(Iterator[str]):
    """An iterator that generates text on demand. Pieces consist of whole characters and are never empty.

    `Model.stream`, `Model.chat_stream` and the same methods of `Session` make streams. Only one thread at a time can
    iterate; any thread can cancel. A stream is a context manager that closes itself.
    """

    def __init__(self, session: Session, prompt: FittedPrompt, params: ResolvedParams, owns_session: bool) -> None:
        if not isinstance(session, Session):
            raise wrong_type("session", session, "a Session: use model.stream() or session.stream()")
        self._session = session
        self._owns_session = owns_session
        self._drawn: int | None = None  # the next token, if the device has drawn it
        self._scope = _core.CancelScope(session._core)
        self._output = Output(session, prompt, params)
        self._speculation = Speculation(session, self._output, draws_on_device=owns_session)
        self._changes = 0  # the session's change counter after this stream's last eval
        self._resumed = 0.0  # when the running computation began
        self._prefill_time: float | None = None
        self._decode_time = 0.0  # seconds of earlier computations
        self._completion: Completion | None = None
        self._failure: Exception | None = None
        self._on_prefilled: Callable[[], object] | None = None  # called once, when the prompt has been computed

    @_core.scoped
    def __next__(self) -> str:
        if self._failure is not None:
            raise self._failure
        self._resumed = time.perf_counter()
        try:
            while self._completion is None and not self._scope.cancelled:
                if self._prefill_time is None:
                    self._prefill()
                else:
                    self._extend()
                if piece := self._draw():
                    self._decode_time += time.perf_counter() - self._resumed
                    return piece
        except CancelledError:
            pass
        except Exception as failure:
            self._fail(failure)
            raise
        except BaseException as interruption:
            self._completion = self._completion or self._summary()
            self._fail(ClosedError(f"the stream has ended: {type(interruption).__name__} interrupted it"))
            raise
        if self._completion is None and (piece := self._end(self._output.end("cancelled"))):
            return piece
        raise StopIteration

    def cancel(self) -> None:
        """End the generation within 50 ms. Any thread may call this.

        The iterating thread gets the buffered text, if any; then the stream ends with the finish_reason "cancelled".
        """
        self._scope.cancel()

    @_core.scoped
    def close(self) -> None:
        """End the generation and free its memory.

        Raises:
            BusyError: While another thread iterates. Call `cancel` instead.
        """
        if self._completion is None and self._failure is None:
            self._resumed = time.perf_counter()
            self._completion = self._summary()
        self._release()

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens in the prompt."""
        return len(self._output.prompt)

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """The log probabilities of the tokens so far, if requested. They can be ahead of the delivered text."""
        return self._output.logprobs[: len(self._output.tokens)]

    @property
    def completion(self) -> Completion:
        """The result, available after the stream's last piece, `close` or `cancel`.

        Raises:
            ArgumentError: If the stream has not ended.
            LlamacError: The error that ended it, if one did.
        """
        if self._completion is None and self._failure is None and self._scope.cancelled:
            with contextlib.suppress(BusyError):
                self.close()
        if self._completion is not None:
            return self._completion
        if self._failure is not None:
            raise self._failure
        raise ArgumentError("the stream has not ended: iterate to its end, or close or cancel it first")

    def receipt(self) -> Receipt:
        """Return the receipt of the result, from which `llamac.replay` reproduces it. The stream must have ended.

        Raises:
            LlamacError: As for `completion`.
            ClosedError: If the model has been closed and the request did not ask for a receipt.
        """
        return self._output.receipt(self.completion)

    def deltas(self) -> Deltas:
        """Iterate over the pieces of the message instead of the text: content, reasoning and tool calls.

        Raises:
            ArgumentError: If the stream does not answer a conversation.
        """
        from llamac.engine.generation.reading import Deltas

        return Deltas(self, self._output)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state: str = "generating" if self._failure is None else "failed"
        if self._completion is not None:
            state = self._completion.finish_reason
        return f"<llamac.Stream: {counted(len(self._output.tokens), 'token')}, {state}>"

    # ---- the loop, which always runs inside the cancel scope

    def _prefill(self) -> None:
        """Compute the prompt."""
        output, session = self._output, self._session
        if output.params.prompt_logprobs is not None:
            session._core.truncate(0)
            output.prompt_logprobs = score_prompt(
                session, output.prompt, output.params.prompt_logprobs, lambda: self._scope.cancelled
            )
        reused = session._prefill_missing(output.prompt, self._speculation.begin())
        output.cached = 0 if output.params.prompt_logprobs is not None else reused
        computed = time.perf_counter()
        self._prefill_time, self._resumed = computed - self._resumed, computed
        n = len(output.prompt)
        self._speculation.observe_prompt(n - output.cached, n - reused, self._prefill_time)
        if self._on_prefilled is not None:
            self._on_prefilled()

    def _extend(self) -> None:
        """Compute the tokens that are not in the session yet, after shifting the context if it is full."""
        output, session = self._output, self._session
        core, begun = session._core, len(output.prompt) - output.shifted
        if self._changes != core.changes:
            session._check_open()
            raise ClosedError("the stream has ended: its session has been used for something else")
        pending = output.tokens[core.length() - begun :]
        while pending:
            if output.shifts and core.length() == output.context:
                removed = session._recovering(lambda: make_room(core, 0, output.keep))
                session._removed(output.keep, output.keep + removed)
                output.shifted += removed
            n = output.context - core.length()
            if rest := self._speculation.extend(pending[:n], output.left):
                started = time.perf_counter()
                rows, states = session._rows(array("i", rest)), self._speculation.states(len(rest))
                # not from a session that stays open: its logits would be missing
                draw = output.sampler.device_draw(output.length) if self._owns_session else None
                with drawing_on_device(session, [draw]) as tokens:
                    try:
                        core.eval_rows(rows, prepare=session._prepare, hidden=place_in(session, states))
                    except DeviceError as failure:
                        leave_device(session, failure, rows)
                        core.eval_rows(rows, prepare=session._prepare, hidden=place_in(session, states))
                self._drawn = tokens[0]
                self._speculation.observe(rest, time.perf_counter() - started)
            else:
                self._drawn = self._speculation.drawn
            pending = pending[n:]

    def _draw(self) -> str:
        """Sample the next token. Return the text that can be delivered."""
        output, core = self._output, self._session._core
        self._changes = core.changes
        token, self._drawn = self._drawn, None
        if token is None:
            token = output.sampler.draw(core, output.length, chain(output.prompt, output.tokens))
        piece = output.accept(token, self._describe)
        return self._end(piece) if output.finish_reason else piece

    def _describe(self, token: int, top: int) -> TokenLogprobs:
        """Return the log probabilities at the position of the token that has just been sampled."""
        n = self._session.model.n_token_ids
        return described(self._session._core.logprobs(n, token, min(top, n)))

    def _end(self, piece: str) -> str:
        """Report the result of the ended output. Return its last piece."""
        self._completion = self._summary()
        self._release()
        return piece

    def _fail(self, failure: Exception) -> None:
        self._failure = failure
        self._release()

    def _release(self) -> None:
        if self._owns_session:
            self._session.close()
        elif self._changes == self._session._core.changes:
            self._speculation.end()

    def _summary(self) -> Completion:
        elapsed = time.perf_counter() - self._resumed
        timings = Timings(elapsed, 0.0)
        if self._prefill_time is not None:
            timings = Timings(self._prefill_time, self._decode_time + elapsed)
        return self._output.completion(timings)


# ---- from a request to a stream


def resolved_params(model: Model, request: SamplingParams) -> ResolvedParams:
    """Complete a request's parameters with the model's defaults, and check them.

    Raises:
        ArgumentError: If a parameter has strings or a guide but the model has no tokenizer, or if a token id is not in
            the vocabulary.
        UnsupportedError: If `context_overflow` is "shift" but the model's context cannot be shifted.
    """
    params = resolve(request, model.sampling_defaults)
    breakers = params.dry_sequence_breakers if params.dry_multiplier else ()
    needs = {"stop": params.stop, "banned_strings": params.banned_strings, "dry_sequence_breakers": breakers}
    tags = params.reasoning_budget is not None
    for name, value in {**needs, "guide": params.guide, "reasoning_budget": tags}.items():
        if value and not model.has_tokenizer:
            raise ArgumentError(f"{name} needs a tokenizer, and this model has none")
    check_token_ids(params, model.n_token_ids)
    if params.context_overflow == "shift":
        model._core.check_shift()
    check_counts(params)
    check_beams(request)
    return params


def complete_from_model(
    model: Model, prompt: str | Sequence[int], request: SamplingParams, context: int | None
) -> Completion:
    """Generate the whole result in a new session."""
    params = resolved_params(model, request)
    if not asks_for_several(params):
        return run(Stream(*opened(model, prompt, request, context)))
    fitted = prompt_ids(model, prompt, params, model._context_limit(context))
    with _session_for(model, fitted, params, context) as session:
        return generate_several(session, fitted, params)


def complete_from_session(session: Session, prompt: str | Sequence[int], request: SamplingParams) -> Completion:
    """Generate the whole result on sequence 0 of a session."""
    params = resolved_params(session.model, request)
    if not asks_for_several(params):
        return run(Stream(*continued(session, prompt, request)))
    return generate_several(session, prompt_ids(session.model, prompt, params, session.context), params)


def opened(
    model: Model, prompt: str | Sequence[int], request: SamplingParams, context: int | None
) -> tuple[Session, FittedPrompt, ResolvedParams, bool]:
    """Check a request and open a session for it. Returns the arguments of `Stream`."""
    params = resolved_params(model, request)
    check_streams(params)
    fitted = prompt_ids(model, prompt, params, model._context_limit(context))
    return _session_for(model, fitted, params, context), fitted, params, True


def _session_for(model: Model, prompt: FittedPrompt, params: ResolvedParams, context: int | None) -> Session:
    most = model.config["context"] if params.max_tokens is None else params.max_tokens
    return model._session_for(len(prompt.ids) + most - 1, context)  # the last token needs no position


def continued(
    session: Session, prompt: str | Sequence[int], request: SamplingParams
) -> tuple[Session, FittedPrompt, ResolvedParams, bool]:
    """Check a request that continues sequence 0 of a session. Returns the arguments of `Stream`."""
    params = resolved_params(session.model, request)
    check_streams(params)
    fitted = prompt_ids(session.model, prompt, params, session.context)
    return session, fitted, params, False


def run(stream: Stream) -> Completion:
    """Generate to the end and return the result."""
    with stream:
        for _ in stream:
            pass
    return stream.completion
