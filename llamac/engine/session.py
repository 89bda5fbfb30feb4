"""The session class: sequences of tokens with their KV cache, and the evals that extend, cut and shift them.

Evals that can take long are interruptible (interrupt.py). The mixins have the methods that generate text
(generating.py), copy sequences (cache/copyable.py), and save and load them (cache/savable.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from llamac import _core, arguments
from llamac.arguments import AUTO, KV_DTYPES, KV_NUMBERS, NUMERICS, KVDtype, Numerics, wrong_type
from llamac.engine.cache import recurrent
from llamac.engine.cache.copyable import Copyable
from llamac.engine.cache.moving import leave_device
from llamac.engine.cache.savable import Savable
from llamac.engine.closeable import Closeable
from llamac.engine.generating import Generating
from llamac.engine.hardware import machine
from llamac.engine.hardware.topology import announce_nodes
from llamac.engine.observing import observe
from llamac.engine.rows import ROW, STAGES, Rows, appended_rows, as_id, as_ids, draft_rows, packed_rows
from llamac.engine.sampling.params import ResolvedParams, SamplingOverrides, SamplingParams, request_params, resolve
from llamac.engine.sampling.sampler import Sampler
from llamac.engine.speculation.draft_model import draft_model_of
from llamac.engine.speculation.drafter import Drafter
from llamac.engine.speculation.head import beside, head_of, is_drafter, reader_of
from llamac.engine.speculation.states import States, place_in
from llamac.engine.work import LONG_WORK, LONG_WORK_SCALAR, work_of
from llamac.errors import ArgumentError, ContextFullError, DeviceError
from llamac.interrupt import in_main_thread
from llamac.sizes import counted

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Unpack

    from llamac.engine.model import Model

    Logits = NDArray[np.float32]

Result = TypeVar("Result")
Observations = Sequence[tuple[int, int, Any]]  # stage, layer, buffer

assert all(_core.dtype_name(KV_NUMBERS[name]) == name for name in KV_DTYPES)


class Session(Generating, Copyable, Savable, Closeable):
    """Sequences of tokens with their KV cache. `Model.session` makes one.

    Only one thread at a time can use a session; others get BusyError. `cancel` works from any thread. A session is a
    context manager that closes itself.

    `generate`, `stream`, `chat` and `chat_stream` work on sequence 0. Pass the whole prompt each time: they compute
    only the tokens after the longest prefix that the session already holds.
    """

    def __init__(
        self,
        model: Model,
        *,
        context: int | None = None,
        sequences: int = 1,
        kv_dtype: KVDtype | None = None,
        threads: int | None = None,
        isa: str | None = None,
        draft_model: Model | None = None,
        numerics: Numerics | None = None,
        device: str | None = None,
        _computes: bool = True,  # False: the session only stores sequences
    ) -> None:
        from llamac.engine.model import Model

        if not isinstance(model, Model):
            raise wrong_type("model", model, "a Model: open one with llamac.load(path)")
        context = model._context_limit(context)
        defaults = model._session_defaults
        draft_model = draft_model_of(model, draft_model, defaults.draft_model)
        settings = defaults.overridden(kv_dtype=kv_dtype, threads=threads, isa=isa, numerics=numerics, device=device)
        arguments.check_session_names(settings.kv_dtype, settings.isa, settings.numerics)
        self._model = model
        self._numerics = settings.numerics
        self._n_sequences = sequences
        self._n_prompt = 0  # positions of sequence 0 up to the end of the last prefill
        self._mu: float | None = None  # mirostat's state; None: no `sample` since the last prefill
        self._computes = _computes
        self._work = work_of(model)
        is_auto = settings.device == AUTO
        self._device = model._on_device(settings.device)
        self._falls_back = is_auto and self._device != "cpu"  # to the CPU if the device fails
        self._replacement: Session | None = None  # the session that then recomputes the tokens
        draft_model = beside(model, self._device, draft_model, is_auto=is_auto)
        self._draft_model = None if is_drafter(draft_model) or not _computes else draft_model
        self._draft_context = context  # positions of the longest text for which it drafts
        self._drafting: Drafter | None = None  # opened on first use
        self._n_drafted = 1  # number of sequences for which a model drafts at a time
        # an explicit number of threads is fixed; the default follows the machine
        self._default_threads: machine.DefaultThreads | None = None
        threads = settings.threads
        if threads is None:
            self._default_threads = machine.DefaultThreads(model.weight_bytes)
            threads = self._default_threads.now()
        self._threads = threads
        announce_nodes()
        self._core = _core.Session(
            model._core,
            sequences=sequences,
            context=context,
            kv_dtype=KV_NUMBERS[settings.kv_dtype],
            threads=threads,
            isa=machine.choose_isa(settings.isa),
            numerics=NUMERICS.index(settings.numerics),
            on_device=self._device != "cpu",
            drafter=reader_of(draft_model),
        )
        self._long_work = self._least_long_work()
        try:
            self._head = head_of(self, draft_model) if _computes else None  # drafts if there is no whole draft model
        except BaseException:
            self._core.close()  # the caller gets no session to close
            raise
        model._sessions.add(self)
        model._memory.admit(self)

    def _least_long_work(self) -> int:
        """The least work of an eval that a helper thread computes, so that Ctrl-C can interrupt it.

        On a device any eval: between two calls of CUDA, a signal handler must neither raise an error nor compute.
        """
        if self._device != "cpu":
            return 0
        return LONG_WORK_SCALAR if self.isa == "scalar" else LONG_WORK

    # ---- facts

    @property
    def model(self) -> Model:
        """The model of this session."""
        return self._model

    @property
    def context(self) -> int:
        """Maximum number of positions per sequence."""
        return self._core.describe()[0]

    @property
    def kv_dtype(self) -> KVDtype:
        """Number format of the KV cache."""
        name = self._core.describe()[1]
        return next(dtype for dtype in KV_DTYPES if dtype == name)

    @property
    def numerics(self) -> Numerics:
        """How products round their inputs."""
        return self._numerics

    @property
    def device(self) -> str:
        """The device that computes: "cpu", or for example "cuda:0". "auto" becomes "cpu" if the device fails."""
        return self._device

    @property
    def threads(self) -> int:
        """The number of threads that an eval would use now."""
        _, _, threads, *_ = self._core.describe()
        return threads if self._default_threads is None else self._default_threads.now()

    @property
    def isa(self) -> str:
        """The kernel set in use."""
        return self._core.describe()[3]

    @property
    def closed(self) -> bool:
        """Whether the session has been closed."""
        return self._core.closed

    def memory(self) -> dict[str, int]:
        """Return the bytes in use: "activations" and "kv". A shared page of the KV cache counts for each sequence."""
        *_, activations, kv = self._core.describe()
        return {"activations": activations, "kv": kv}

    def length(self, sequence: int = 0) -> int:
        """Return the number of positions in a sequence."""
        return self._core.length(sequence)

    def tokens(self, sequence: int = 0) -> list[int]:
        """Return the token ids of a sequence."""
        return self._core.tokens(sequence)

    def __repr__(self) -> str:
        if self.closed:
            return "<llamac.Session: closed>"
        most, dtype, _, isa, *_ = self._core.describe()
        where = f"{counted(self.threads, 'thread')}, {isa}" if self._device == "cpu" else self._device
        return f"<llamac.Session: {self.length()} of {most} positions, KV cache {dtype}, {where}>"

    # ---- computing

    @overload
    def eval(self, ids: Iterable[int], *, sequence: int = 0, logits: Literal["last", "all"] = "last") -> Logits: ...

    @overload
    def eval(self, ids: Iterable[int], *, sequence: int = 0, logits: None) -> None: ...

    def eval(
        self, ids: Iterable[int], *, sequence: int = 0, logits: Literal["last", "all"] | None = "last"
    ) -> Logits | None:
        """Append tokens to a sequence.

        Args:
            ids: Token ids.
            sequence: The sequence's index.
            logits: The tokens whose logits to return.

        Returns:
            For "last" the logits of the last token, shape (vocab_size,); for "all" those of every token, shape
            (n, vocab_size); float32. None if `logits` is None.

        Raises:
            ContextFullError: If the tokens do not fit. Nothing has been computed.
            CancelledError: After `cancel`. The first `done` tokens have been appended.
            OutOfMemoryError: If memory or `Model.kv_budget` is exhausted. Nothing has been computed.
            ArgumentError: If a token id or an argument is out of range.
        """
        tokens = as_ids(ids)
        if logits not in ("last", "all", None):
            raise ArgumentError(f"logits is {logits!r}, expected 'last', 'all' or None")
        rows = self._rows(tokens, sequence, logits)
        if logits is None:
            self._run(rows)
            return None
        import numpy as np

        count = len(tokens) if logits == "all" else 1
        out = np.empty((count, self._core.vocab_size), np.float32)
        self._run(rows, out.reshape(-1))
        return out if logits == "all" else out[0]

    def eval_rows(self, rows: Sequence[tuple[int, int, int, bool]]) -> Logits:
        """Extend several sequences in one pass, which reads the weights once.

        Args:
            rows: (token, sequence, position, whether to return its logits) for each token. The rows of a sequence are
                in order and start at its length.

        Returns:
            The requested logits in order, shape (n_requested, vocab_size), float32.

        Raises:
            ContextFullError: If a row does not fit. Nothing has been computed.
            CancelledError: After `cancel`. The first `done` rows have been appended.
            ArgumentError: If a row is out of range.
        """
        import numpy as np

        packed, requested = packed_rows(rows)
        out = np.empty((requested, self._core.vocab_size), np.float32)
        self._run(packed, out.reshape(-1))
        return out

    def eval_drafts(self, ids: Iterable[int], parents: Iterable[int], *, sequence: int = 0) -> Logits:
        """Compute a tree of draft tokens in one pass, without appending them: for speculative decoding.

        A draft is at the position after its parent's. It sees the sequence, its ancestors and itself. Its logits have
        the same bits as if its ancestors had been appended. `accept` appends a path of the tree.

        Args:
            ids: Token ids, at most 256.
            parents: For each draft, the index of its parent, or -1 if it follows the sequence. Drafts are in
                depth-first order: a parent is the previous draft, one of that draft's ancestors, or -1.
            sequence: The sequence's index.

        Returns:
            The logits of every draft, shape (n, vocab_size), float32.

        Raises:
            ContextFullError: If the drafts do not fit.
            CancelledError: After `cancel`.
            ArgumentError: If a token id, a parent or an argument is out of range.
        """
        import numpy as np

        self.length(sequence)  # checks the sequence
        rows = draft_rows(ids, parents, sequence)
        out = np.empty((len(rows) // ROW, self._core.vocab_size), np.float32)
        if rows:
            self._run_drafts(rows, out.reshape(-1))
        else:
            self._core.discard_drafts()
        return out

    def accept(self, draft: int) -> None:
        """Append a draft of the last `eval_drafts` and its ancestors to their sequence, without computing anything.

        The next eval, truncation, shift or copy discards the drafts.

        Raises:
            ArgumentError: If there is no such draft.
        """
        self._core.accept(draft)

    def observe(
        self,
        ids: Iterable[int],
        stages: Iterable[str | tuple[str, int]],
        *,
        sequence: int = 0,
        inputs: Logits | None = None,
        types: Sequence[int] | None = None,
    ) -> dict[tuple[str, int], Logits]:
        """Append tokens like `eval`, and return the output of stages of the graph. Results stay bit-identical.

        Args:
            ids: Token ids.
            stages: Names from `llamac.STAGES`, for all layers, or (name, layer) pairs.
            sequence: The sequence's index.
            inputs: (n, dim), float32: in place of the ids' stage "embedding". Only on the CPU.
            types: (n): the types of the tokens, for an encoder with several. Default: 0.

        Returns:
            Maps (name, layer) to an array of shape (n, width), float32. The layer is 0 for stages outside the layers.
            "scores" has shape (n, n_heads, context). An encoder has no stage "logits".

        Raises:
            ContextFullError: If the tokens do not fit. Nothing has been computed.
            CancelledError: After `cancel`. The first `done` tokens have been appended.
            ArgumentError: If there is no such stage or layer, or a token id or an argument is out of range.
        """
        return observe(self, ids, stages, sequence, inputs, types)

    def truncate(self, length: int, *, sequence: int = 0) -> None:
        """Keep the first `length` positions of a sequence. With recurrent layers, some may be recomputed.

        Raises:
            ArgumentError: If `length` exceeds the sequence's length, or if it is not 0 and a window has dropped
                positions that this length needs.
            CancelledError: After `cancel`, while recurrent layers recompute. The sequence is shorter than `length`.
            OutOfMemoryError: If there is no memory for that. The sequence is shorter than `length`.
        """
        recurrent.truncate(self, length, sequence)
        if sequence == 0:
            self._n_prompt = min(self._n_prompt, self._core.length())

    def shift(self, begin: int, end: int, *, sequence: int = 0) -> None:
        """Remove the positions [begin, end) of a sequence. Later ones move down, and their keys are rotated to match.

        The keys and values of the moved tokens still depend on the removed ones, so results differ from recomputing.

        Raises:
            ArgumentError: If there is no such range, or a window has dropped positions that the next token would see.
            UnsupportedError: If the model has learned positions, or norms after RoPE that do not commute with it.
            OutOfMemoryError: If shared pages cannot be copied. The sequence is unchanged.
            DeviceError: If the device fails. The sequence can be empty then; `to` recomputes it.
        """
        self._recovering(lambda: self._core.shift(begin, end, sequence))
        if sequence == 0:
            self._removed(begin, end)

    def shortest_length(self, sequence: int = 0) -> int:
        """Return the shortest length to which `truncate` and forks can cut a sequence without computing anything.

        Layers with a window drop positions that left it more than 256 positions ago. The result is 0 for models without
        windows and for short sequences; with recurrent layers it is the sequence's length.
        """
        return self._core.shortest_length(sequence)

    def cancel(self) -> None:
        """Stop the eval that another thread runs, within 50 ms. The eval raises CancelledError; a stream ends."""
        self._check_open()
        self._core.cancel()
        if (replacement := self._replacement) is not None:
            replacement._core.cancel()

    # ---- for custom generation loops: the logits stay in the core

    def prefill(self, ids: Iterable[int]) -> None:
        """Append tokens to sequence 0, and store the logits of the last one for `sample`. Raises as `eval`."""
        self._prefill(as_ids(ids), None)

    def step(self, token: int, *, sequence: int = 0) -> None:
        """Append one token to a sequence, and store its logits for `sample` if it is sequence 0. Raises as `eval`."""
        self._run(self._rows(as_id(token), sequence, None if sequence else "last"))

    def sample(self, params: SamplingParams | None = None, **overrides: Unpack[SamplingOverrides]) -> int:
        """Sample the token that follows sequence 0 from the logits of the last `prefill` or `step`.

        Penalties count the tokens since the last `prefill` as generated, and the others as the prompt. Mirostat
        continues from the last call since then.

        Args:
            params: Sampling parameters; `max_tokens`, `stop` and `ignore_eos` have no effect.
            overrides: Values that replace those of `params`.
        """
        resolved = resolve(request_params(params, overrides), self._model.sampling_defaults)
        sampler = self._sampler(resolved)
        token = sampler.draw(self._core, self._core.length())
        if sampler.history is not None:
            self._mu = sampler.history.mu
        return token

    def _sampler(self, params: ResolvedParams) -> Sampler:
        """Return a sampler that has accepted the tokens of sequence 0."""
        if params.guide is None and params.reasoning_budget is None:
            sampler = Sampler(self._model, params, ())
            if sampler.history is None:
                return sampler
        ids = self._core.tokens()
        sampler = Sampler(self._model, params, ids[: self._n_prompt])
        for token in ids[self._n_prompt :]:
            sampler.accept(token)
        if self._mu is not None and sampler.history is not None:
            sampler.history.mu = self._mu
        return sampler

    # ---- life

    def close(self) -> None:
        """Free the memory. Closing twice is fine.

        Raises:
            BusyError: While another thread computes with the session.
        """
        self._core.close()
        for part in (self._drafting, self._head):
            if part is not None:
                part.close()
        self._model._memory.apply()

    # ---- internals

    def _prefill(self, ids: array[int], hidden: States | None) -> None:
        self._run(self._rows(ids), None, (), None, hidden)
        self._n_prompt = self._core.length()
        self._mu = None

    def _removed(self, begin: int, end: int) -> None:
        """Note that a shift has removed positions of sequence 0."""
        self._n_prompt -= len(range(self._n_prompt)[begin:end])

    def _prefill_missing(self, ids: array[int], hidden: States | None = None) -> int:
        """Make sequence 0 equal to `ids`, and store the logits of the last one for `sample`.

        Returns the number of reused positions. The last one is always computed. `hidden` receives hidden states.
        """
        reused = self._reusable(ids)
        if reused < self._core.length():
            self._core.truncate(reused)
        if hidden is None:
            self.prefill(ids[reused:])
        else:
            self._prefill(ids[reused:], hidden)
        return reused

    def _reusable(self, ids: array[int]) -> int:
        """Return how many leading ids sequence 0 can be cut to, except the last, which is recomputed for its logits."""
        return self._core.cut_length(0, min(self._core.common_prefix(ids), len(ids) - 1))

    def _rows(self, tokens: array[int], sequence: int = 0, logits: str | None = "last") -> Rows:
        """Return rows that append tokens to a sequence.

        Raises ContextFullError before it allocates memory for the tokens.
        """
        if not tokens:
            raise ArgumentError("no tokens to eval: expected at least one")
        start = self._core.length(sequence)
        if start + len(tokens) > self.context:
            raise ContextFullError(
                f"{len(tokens)} tokens do not fit: {start} of the context's {self.context} positions are taken"
            )
        return appended_rows(tokens, sequence, start, logits)

    def _layers_of(self, stage: str) -> int:
        """Return the number of layers of a stage; 1 for stages outside the layers."""
        per_layer = self._core.stage_width(STAGES.index(stage))[1]
        return int(self._model.config["n_layers"]) if per_layer else 1

    def _run(self, rows: Rows, logits: Any = None, *more: Any) -> None:
        """Compute rows. Without a logits buffer, the logits of the last row stay in the core for `sample`."""
        self._recovering(lambda: self._compute(rows, logits, *more), rows)

    def _run_drafts(self, drafts: Rows, logits: Any, hidden: States | None = None) -> None:
        """Compute at least one draft. Without a logits buffer, the session keeps the logits."""
        self._recovering(lambda: self._compute_drafts(drafts, logits, hidden))

    def _compute(
        self,
        rows: Rows,
        logits: Any = None,
        observations: Observations = (),
        inputs: Any = None,
        hidden: States | None = None,
        types: Any = None,
    ) -> None:
        """Like `_run`, for callers that handle the loss of a device themselves."""
        self._core.eval_rows(rows, logits, observations, self._prepare, inputs, types, place_in(self, hidden))

    def _compute_drafts(self, drafts: Rows, logits: Any, hidden: States | None = None) -> None:
        """Like `_run_drafts`, for callers that handle the loss of a device themselves."""
        self._core.eval_drafts(drafts, logits, self._prepare, place_in(self, hidden))

    def _recovering(self, call: Callable[[], Result], rows: Sequence[int] = ()) -> Result:
        """Call a function that uses the device; again on the CPU if the device fails and the session is for "auto".

        `rows` are those that the function computes.
        """
        try:
            return call()
        except DeviceError as failure:
            leave_device(self, failure, rows)
        return call()

    def _use_cpu_like(self, other: Session) -> None:
        """Note that the core computes on the CPU from now on, as in another session."""
        self._device, self._falls_back = "cpu", False
        self._threads, self._long_work = other._threads, other._long_work
        if self._head is not None:
            self._head.close()  # its next use opens it on the CPU

    def _prepare(self, rows: int, positions: int) -> bool:
        """Prepare an eval as `_refresh` does. Returns whether it can take so long that it must be interruptible.

        `positions` is the number of positions before each row, summed over the rows.
        """
        self._refresh()
        return self._is_long(self._work.of(rows, positions))

    def _refresh(self) -> None:
        """Check the model's file, and update the default number of threads."""
        self._model.file.check_size()
        if self._default_threads is not None and (threads := self._default_threads.now()) != self._threads:
            self._core.set_threads(threads)
            self._threads = threads

    def _is_long(self, work: int) -> bool:
        """Whether an eval of this work must be interruptible."""
        return work >= self._long_work and in_main_thread()
