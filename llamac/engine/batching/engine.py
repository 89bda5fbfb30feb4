"""The engine: accepts requests from any thread and computes them together in its own thread (batch.py)."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, overload

from llamac import _core
from llamac.arguments import DEFAULT_SEQUENCES, KVDtype, Numerics, to_float, to_int, wrong_type
from llamac.engine.batching.batch import Batch
from llamac.engine.batching.beams import BeamRequest
from llamac.engine.batching.candidates_request import CandidatesRequest
from llamac.engine.batching.engine_stats import EngineStats
from llamac.engine.batching.request import Request
from llamac.engine.batching.waker import Waker
from llamac.engine.cache.moving import leave_device
from llamac.engine.cache.prefix_cache import PrefixCache, PrefixStats
from llamac.engine.cache.recurrent import state_bytes
from llamac.engine.closeable import Closeable
from llamac.engine.generation.candidates import params_of_each
from llamac.engine.generation.output import Output
from llamac.engine.generation.stream import resolved_params
from llamac.engine.memory import ENGINE_BYTES, MIN_CONTEXT, MemoryUse, memory_use, plan_of, refusal, session_bytes
from llamac.engine.prompts.overflow import FittedPrompt
from llamac.engine.prompts.prompt_ids import ToolOptions, conversation_ids, prompt_ids
from llamac.engine.sampling.params import ResolvedParams, SamplingOverrides, SamplingParams, request_params
from llamac.engine.session import Session
from llamac.engine.speculation.batch_drafts import MAX_REQUESTS, Drafters
from llamac.errors import (
    ArgumentError,
    BusyError,
    ClosedError,
    DeviceError,
    LlamacError,
    OutOfMemoryError,
    QueueFullError,
)
from llamac.interrupt import WAIT_S
from llamac.progress import Progress, shown
from llamac.sizes import parse_size, size_text

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from llamac.engine.generation.output import Completion
    from llamac.engine.model import Model
    from llamac.engine.prompts.prompt_ids import ToolChoice
    from llamac.tools.functions import Tool
    from llamac.tools.message import Message

MAX_SEQUENCES = 256  # each takes a row of every step
CACHED_STATES = 256
Prompt = str | Sequence[int]


class Engine(Closeable):
    """Computes many requests at once. Requests join and leave between the steps of a batch.

    Each request gets exactly the tokens that it would get alone in a session with the same context. Common prefixes,
    such as a system prompt or the earlier turns of a conversation, are computed once.

    Any number of threads and asyncio tasks can submit requests. An engine is a context manager that closes itself.

        with llamac.Engine(model, max_sequences=8) as engine:
            for completion in engine.generate(["Once upon", "A long time"], max_tokens=64):
                print(completion.text)
    """

    def __init__(
        self,
        model: Model,
        *,
        max_sequences: int = DEFAULT_SEQUENCES,
        kv_tokens: int | None = None,
        context: int | None = None,
        kv_dtype: KVDtype | None = None,
        threads: int | None = None,
        isa: str | None = None,
        draft_model: Model | None = None,
        numerics: Numerics | None = None,
        prefix_cache: bool = True,
        prefix_bytes: int | None = None,
        prefix_dir: str | os.PathLike[str] | None = None,
        prefix_dir_bytes: int = 4 << 30,
        max_queue: int = 1024,
        max_memory: int | str | None = None,
    ) -> None:
        """Open an engine.

        Args:
            model: The model. It must stay open longer than the engine.
            max_sequences: Maximum number of requests that are computed at a time, 1 to 256. Others wait.
            kv_tokens: Capacity of the KV cache in positions, for all requests and cached prefixes. This becomes the
                model's `kv_budget`. If requests need more, the engine first evicts cached prefixes, then pauses the
                requests that rank last and resumes them later. Default: the model's `kv_budget`, if it has one;
                otherwise no limit.
            context: Positions per request. For this and the following settings, the default is the argument of `load`,
                or llamac's default.
            kv_dtype: Number format of the KV cache.
            threads: Threads per step.
            isa: Kernel set.
            numerics: How products round their inputs.
            draft_model: A smaller model with the same vocabulary, for speculation while at most four requests run. It
                makes them faster and never changes a result. It must stay open as long as the engine.
            prefix_cache: Whether to keep computed prefixes for later requests.
            prefix_bytes: Maximum bytes of the prefixes in memory. Default: the rest of `kv_tokens`.
            prefix_dir: A folder that also stores prefixes, so that they outlive the engine. Several processes can use
                it at once. Default: none.
            prefix_dir_bytes: Maximum bytes of the files there. The least recently used files are deleted.
            max_queue: Maximum number of waiting requests.
            max_memory: Maximum bytes that the model and all its sessions may need while the engine is open, such as
                "2GiB". The KV cache gets the memory that weights, activations and logits leave. Default: the limit of
                `load`.

        Raises:
            ArgumentError: If a setting is out of range.
            OutOfMemoryError: If there is not enough memory, or if `max_memory` leaves too little for one sequence of
                `context` positions (256 if `context` is not set). The message has the plan.
        """
        if not 1 <= to_int(max_sequences, "max_sequences") <= MAX_SEQUENCES:
            raise ArgumentError(f"max_sequences is {max_sequences}, expected 1 to {MAX_SEQUENCES}")
        if to_int(max_queue, "max_queue") < 1:
            raise ArgumentError(f"max_queue is {max_queue}, expected at least 1")
        if prefix_bytes is not None and to_int(prefix_bytes, "prefix_bytes") < 0:
            raise ArgumentError(f"prefix_bytes is {prefix_bytes}, expected 0 or more, or None")
        if prefix_dir is not None and not prefix_cache:
            raise ArgumentError("prefix_dir needs prefix_cache: prefixes go from memory to the disk")
        self._model = model
        self._session = Session(
            model,
            context=context,
            sequences=max_sequences,
            kv_dtype=kv_dtype,
            threads=threads,
            isa=isa,
            draft_model=draft_model,
            numerics=numerics,
        )
        self._session._n_drafted = min(max_sequences, MAX_REQUESTS)
        self._drafters = Drafters(self._session, self._session._n_drafted)
        self._cache_session: Session | None = None
        self._cache: PrefixCache | None = None
        self._freeing = threading.RLock()  # a signal handler can close the engine while it closes
        self._is_free = False
        memory = model._memory
        self._owner = object()  # of what it sets there: the model does not keep the engine alive
        self._logits_bytes = ENGINE_BYTES * self._session._core.vocab_size * max_sequences
        memory.engine_logits += self._logits_bytes
        try:
            if prefix_cache:
                self._cache_session = self._open_cache_session()
            self._set_limit(max_memory, context)
            self._set_budget(kv_tokens)
            if self._cache_session is not None:
                self._cache = self._open_cache(self._cache_session, prefix_bytes, prefix_dir, prefix_dir_bytes)
        except BaseException:
            self._free()
            raise
        self._batch = Batch(self._session, max_sequences, self._cache, self._drafters)
        self._max_queue = max_queue
        self._max_sequences = max_sequences
        self._order = itertools.count()
        self._changed = threading.Condition()  # guards the next four attributes
        self._arrived: list[Request] = []
        self._thread: threading.Thread | None = None
        self._process = os.getpid()  # of the thread
        self._closing = False
        self._failure: LlamacError | None = None
        self._closed_inside = False  # in the engine's thread, by a logits processor
        self._waker = Waker()

    def _open_cache_session(self) -> Session:
        """Open the session whose sequences are the states of the prefix cache. It computes nothing."""
        return Session(
            self._model,
            context=self._session.context,
            sequences=CACHED_STATES,
            kv_dtype=self._session.kv_dtype,
            threads=1,
            isa=self._session.isa,
            numerics=self._session.numerics,
            _computes=False,
        )

    def _open_cache(
        self, session: Session, max_bytes: int | None, folder: str | os.PathLike[str] | None, max_folder_bytes: int
    ) -> PrefixCache:
        store = None
        if folder is not None:
            from llamac.engine.cache.prefix_store import PrefixStore

            store = PrefixStore(session, folder, to_int(max_folder_bytes, "prefix_dir_bytes"))
        return PrefixCache(session._core, CACHED_STATES, max_bytes, store)

    def _set_limit(self, max_memory: int | str | None, context: int | None) -> None:
        """Apply the engine's limit, in addition to the model's."""
        memory = self._model._memory
        asked = None if max_memory is None else parse_size(max_memory, "max_memory")
        limits = [limit for limit in (asked, memory.limit) if limit is not None]
        if not limits:
            return
        if asked is not None:
            memory.set(self._owner, "limit", min(limits))
        wanted = min(MIN_CONTEXT, self.context) if context is None else self.context
        plan = plan_of(
            self._model,
            self._session._core,
            memory.limit,
            wanted,
            1,
            engine_requests=self._session._n_sequences,
            engine_drafts=self._session._n_drafted,
            prefix_cache=0 if self._cache_session is None else session_bytes(self._cache_session),
        )
        if not plan.fits:
            raise refusal(plan, ": fewer sequences need less for logits, a smaller context less for the KV cache")
        memory.admit(self._session, wanted)

    def _set_budget(self, kv_tokens: int | None) -> None:
        if kv_tokens is None:
            return
        positions, page_bytes = self._session._core.page_size()
        least = min(self._session.context, positions)
        if to_int(kv_tokens, "kv_tokens") < least:
            raise ArgumentError(f"kv_tokens is {kv_tokens}, expected at least {least}")
        # each sequence needs its state and the one that a pass writes
        states = 2 * self._session._n_sequences * state_bytes(self._session._core)
        budget = max(1, -(-kv_tokens // positions) * page_bytes + states)  # 1: the layers keep nothing
        device = self._model._working_device
        if self._session.device != "cpu" and device is not None and budget > device.kv_room:
            left = max(0, device.kv_room - states)
            most = f"at most {left // page_bytes * positions} fit" if left >= page_bytes > 0 else "use fewer sequences"
            raise OutOfMemoryError(
                f"kv_tokens is {kv_tokens}, which need {size_text(budget)} on {device.name}, but the weights and the "
                f"passes leave {size_text(device.kv_room)}: {most}"
            )
        memory = self._model._memory
        memory.set(self._owner, "kv_budget", budget)
        memory.apply()

    # ---- facts

    @property
    def model(self) -> Model:
        """The model."""
        return self._model

    @property
    def context(self) -> int:
        """Maximum number of positions of a request."""
        return self._session.context

    @property
    def kv_dtype(self) -> KVDtype:
        """Number format of the KV cache."""
        return self._session.kv_dtype

    @property
    def numerics(self) -> Numerics:
        """How products round their inputs."""
        return self._session.numerics

    @property
    def threads(self) -> int:
        """Threads of a step."""
        return self._session.threads

    @property
    def page_size(self) -> tuple[int, int]:
        """The positions and the bytes of a page of the KV cache."""
        return self._session._core.page_size()

    @property
    def _most_state_bytes(self) -> int:
        """The most bytes of the states of a sequence's recurrent layers."""
        return _core.memory_limits(self._session._core, 1)[1] - self.page_size[1]  # beside the pages of one position

    @property
    def failure(self) -> LlamacError | None:
        """The error that stopped the engine: every request ends with it. None while the engine works."""
        return self._failure

    @property
    def closed(self) -> bool:
        """Whether the engine has been closed."""
        return self._closing

    def stats(self) -> EngineStats:
        """Return the engine's counters."""
        batch = self._batch
        return EngineStats(
            running=len(batch.running),
            waiting=len(batch.waiting) + len(self._arrived),
            steps=batch.steps,
            rows=batch.rows,
            generated=batch.generated,
            preemptions=batch.preemptions,
            drafted_tokens=batch.drafted,
            accepted_tokens=batch.accepted,
            kv_bytes=self._model.kv_bytes,
            prefix=replace(self._cache.stats) if self._cache else PrefixStats(),
        )

    def memory(self) -> MemoryUse:
        """Return the memory that the model and its sessions use now, including this engine's."""
        self._check_open()
        return memory_use(self._model, self._cache.stats.bytes if self._cache else 0)

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self._batch.running)} running, {len(self._batch.waiting)} waiting"
        return f"<llamac.Engine: {state}>"

    # ---- requests

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        deadline: float | None = None,
        **overrides: Unpack[SamplingOverrides],
    ) -> Request:
        """Queue a request.

        Args:
            prompt: A str, which gets BOS if the model expects it; or token ids, which are used unchanged. An empty
                prompt stands for BOS.
            params: Sampling parameters.
            priority: Requests of higher priority are served first, and pause last when memory runs out. Every 10
                seconds in the queue raise the effective priority by one.
            deadline: Seconds until the request ends with the tokens so far and the finish_reason "deadline". Among
                requests of equal priority, the earliest deadline is served first.
            overrides: Values that replace those of `params`.

        Raises:
            ContextFullError: If the prompt does not fit the context.
            QueueFullError: If `max_queue` requests are already waiting.
            ArgumentError: If an argument is out of range.
            ClosedError: If the engine is closed.
            OutOfMemoryError: If the system refuses the engine's thread.
        """
        request = self._request(prompt, request_params(params, overrides), priority, deadline)
        self._enqueue(request, wait=False)
        return request

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is not meant as a sequence of prompts
        self,
        prompts: str,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        deadline: float | None = None,
        progress: bool | Progress = False,
        **overrides: Unpack[SamplingOverrides],
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        deadline: float | None = None,
        progress: bool | Progress = False,
        **overrides: Unpack[SamplingOverrides],
    ) -> list[Completion]: ...

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        deadline: float | None = None,
        progress: bool | Progress = False,
        **overrides: Unpack[SamplingOverrides],
    ) -> Completion | list[Completion]:
        """Continue prompts and return the results, in their order.

        Ctrl-C cancels all of them. Prompts beyond `max_queue` are queued as others end.

        Args:
            prompts: A prompt, for one result; or a list of prompts, each a str or token ids.
            params: Sampling parameters of all prompts.
            priority: As for `submit`.
            deadline: As for `submit`, counted from this call.
            progress: True shows a bar on standard error. A callback is called as `llamac.progress.Progress` says, with
                the phase "generating".
            overrides: Values that replace those of `params`.

        Raises:
            LlamacError: As for `submit`, for any of the prompts, before anything is computed. Or the first error of a
                request.
        """
        chosen = request_params(params, overrides)
        listed: Sequence[Prompt] = [prompts] if isinstance(prompts, str) else prompts
        requests = [self._request(prompt, chosen, priority, deadline) for prompt in listed]
        with shown(progress) as report, contextlib.ExitStack() as cancelling:
            report("generating", 0, len(requests))
            for request in requests:
                cancelling.enter_context(request)
                self._enqueue(request, wait=True)
            completions = []
            for request in requests:
                completions.append(request.result())
                report("generating", len(completions), len(requests))
        return completions[0] if isinstance(prompts, str) else completions

    def chat(
        self,
        messages: Sequence[Mapping[str, Any] | Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Tool] | None = None,
        tool_choice: ToolChoice = "auto",
        parallel_tool_calls: bool = True,
        tool_format: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        priority: int = 0,
        deadline: float | None = None,
        **overrides: Unpack[SamplingOverrides],
    ) -> Request:
        """Queue the answer to a conversation, the same as from `Model.chat`. Other arguments are those of `submit`.

        Raises:
            ChatTemplateError: If the template fails or refuses the messages.
            LlamacError: As for `submit`.
        """
        request = request_params(params, overrides)
        given = ToolOptions(tools, tool_choice, parallel_tool_calls, tool_format)
        ids, request = conversation_ids(self._model, messages, given, template_options, request, self.context)
        return self.submit(ids, request, priority=priority, deadline=deadline)

    def _request(self, prompt: Prompt, params: SamplingParams, priority: int, deadline: float | None) -> Request:
        self._check_open()
        if deadline is not None and not to_float(deadline, "deadline") > 0:
            raise ArgumentError(f"deadline is {deadline:g}, expected more than 0 seconds, or None")
        if not isinstance(prompt, str | Iterable):
            raise wrong_type("prompt", prompt, "a str or token ids")
        resolved = resolved_params(self._model, params)
        fitted = prompt_ids(self._model, prompt, resolved, self.context)
        return self._requested(fitted, resolved, to_int(priority, "priority"), deadline)

    def _requested(
        self, prompt: FittedPrompt, params: ResolvedParams, priority: int, deadline: float | None
    ) -> Request:
        """Return a request from checked arguments."""
        if params.beam_width > self._max_sequences:
            raise ArgumentError(
                f"beam_width is {params.beam_width}, expected at most max_sequences, which is {self._max_sequences}"
            )
        each = params_of_each(params)
        outputs = [Output(self._session, prompt, one) for one in each]
        requests = [Request(self, output, priority, deadline, next(self._order)) for output in outputs]
        if params.beam_width > 1:
            return BeamRequest(requests, params)
        return CandidatesRequest(requests, params) if len(requests) > 1 else requests[0]

    def _enqueue(self, request: Request, *, wait: bool) -> None:
        self._check_process()
        with self._changed:
            while True:
                if self._closing:
                    raise ClosedError("the engine is closed")
                if self._failure is not None:
                    raise self._failure
                n = len(self._arrived) + len(self._batch.waiting)
                if n < self._max_queue:
                    break
                if not wait:
                    raise QueueFullError(f"{n} requests are already waiting, the limit (max_queue): try again later")
                self._check_wait()
                self._changed.wait(WAIT_S)
            if self._thread is None:
                thread = threading.Thread(target=self._serve, name="llamac-engine", daemon=True)
                try:
                    thread.start()
                except RuntimeError as failure:
                    raise OutOfMemoryError(f"the engine's thread cannot be started: {failure}") from failure
                self._thread, self._process = thread, os.getpid()
            for member in request._members:
                member._enter_queue()
            self._arrived += request._members
            self._changed.notify_all()

    def _check_process(self) -> None:
        if self._thread is not None and self._process != os.getpid():
            raise ClosedError(
                "this process was forked from that of the engine, which computes only there: open another"
            )

    def _check_wait(self) -> None:
        """Check that the current thread can wait for the engine's thread."""
        self._check_process()
        if threading.current_thread() is self._thread:
            raise BusyError(
                "the engine's own thread, in which logits processors run, cannot wait for the engine's requests: wait "
                "in another thread, or generate with the model or a session"
            )

    def _interrupt(self, request: Request) -> None:
        """Interrupt the running step if it computes the prompt of a cancelled request."""
        self._batch.running_pass.interrupt(request)
        with self._changed:
            self._changed.notify_all()

    # ---- life

    def close(self) -> None:
        """Cancel all requests and free the memory. Closing twice is fine.

        In a logits processor, this returns at once; the engine frees the memory after the step.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            thread = self._thread
        self._batch.running_pass.stop()
        if thread is threading.current_thread():
            self._closed_inside = True  # `_serve` frees the memory
            return
        if thread is not None:
            thread.join()
        self._free()

    def _free(self) -> None:
        """Close the sessions and restore the model's limits, once."""
        with self._freeing:
            if self._is_free:
                return
            self._is_free = True
            if self._cache is not None:
                self._cache.close()
            if self._cache_session is not None:
                self._cache_session.close()
            self._drafters.close()
            self._session.close()
            memory = self._model._memory
            memory.engine_logits -= self._logits_bytes
            memory.unset(self._owner)
            if not self._model.closed:
                memory.apply()

    # ---- the engine's thread

    def _serve(self) -> None:
        error: LlamacError | None = None
        try:
            while self._wait_for_work():
                with self._waker.holding():
                    try:
                        self._batch.step()
                    except DeviceError as failure:
                        self._leave_device(failure)
        except BaseException as failure:
            text = f"the engine has stopped: {failure}"
            kind = ClosedError if isinstance(failure, ClosedError) else LlamacError  # of the model
            error = DeviceError(text, failure.lost) if isinstance(failure, DeviceError) else kind(text)
            error.__cause__ = failure
        with self._changed:
            self._failure = error
            self._batch.add(self._arrived)
            self._arrived = []
        self._batch.end_all(error)
        if self._closed_inside:
            self._free()

    def _leave_device(self, failure: DeviceError) -> None:
        """Continue on the CPU if the device is "auto". Running requests recompute their tokens; cached prefixes are
        lost.

        Raises:
            DeviceError: `failure`, otherwise.
        """
        if not self._session._falls_back:
            raise failure
        self._batch.requeue_all()
        for session in (self._session, self._cache_session):
            if session is not None:
                leave_device(session, failure)

    def _wait_for_work(self) -> bool:
        """Wait until there is a request. Returns False when the engine closes."""
        with self._changed:
            while not (self._closing or self._arrived or not self._batch.is_empty):
                self._changed.wait()
            if self._arrived:
                self._batch.add(self._arrived)
                self._arrived = []
            self._changed.notify_all()  # the queue has room again
            return not self._closing
