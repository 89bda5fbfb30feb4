# Sessions, and calls on them that any thread can cancel. Part of _core.pyx.

cdef enum:
    ROW = 4  # numbers of a row and of a draft

_IN_USE = "the session is in use by another thread: give each thread its own session"


@cython.final
cdef class CancelScope:
    """A function call on a session that any thread can cancel, even before it begins. One thread at a time runs it.

    Scopes are entered and left in C: Python raises KeyboardInterrupt only between its own instructions, so they are
    always left.
    """

    cdef Session _session
    cdef int32_t _cancel
    cdef bint _running
    cdef unsigned long _thread   # that runs it

    def __init__(self, Session session not None):
        self._session = session

    cdef int _enter(self) except -1:
        if self._running:
            raise BusyError("the stream is in use by another thread")
        if self._session._scope is not None:
            raise BusyError("the session is in use by another stream, in another thread")
        self._running = True
        self._thread = PyThread_get_thread_ident()
        self._session._scope = self
        return 0

    cdef void _leave(self) noexcept:
        self._session._scope = None
        self._running = False

    def run(self, function):
        """Call a function. `cancel` stops the evals of the session in it with CancelledError."""
        self._enter()
        try:
            return function()
        finally:
            self._leave()

    def cancel(self):
        """Cancel the running call and all later ones. Any thread may call this."""
        self._cancel = 1

    @property
    def cancelled(self):
        return self._cancel != 0


def scoped(method):
    """Make a method without arguments run in the scope that its object has as `_scope`."""
    def in_scope(self):
        cdef CancelScope scope = self._scope
        scope._enter()
        try:
            return method(self)
        finally:
            scope._leave()
    return update_wrapper(in_scope, method)


@cython.final
@cython.no_gc_clear   # the garbage collector must not take _model away before __dealloc__
cdef class Session:
    """Sequences of tokens with their KV cache. Used by one thread at a time: a second one gets BusyError."""

    cdef llamac_session *_ptr
    cdef Model _model
    cdef bint _busy               # a thread is in a method
    cdef int32_t _cancel          # cancels the running eval, unless there is a scope
    cdef CancelScope _scope       # the running scope, whose flag cancels instead; or None
    cdef unsigned long _helper    # the helper thread of its thread that computes an eval; 0: none
    cdef readonly int n_sequences
    cdef int _context
    cdef _SequenceTokens _tokens
    cdef float *_logits           # (vocab_size): of the last eval, if it wanted those of its last row
    cdef bint _has_logits
    cdef list _drafts             # (token, sequence, parent, the sequence's length, row of _draft_logits or -1)
    cdef float *_draft_logits     # (_draft_capacity, vocab_size): of the last eval_drafts, if the session keeps them
    cdef int _draft_capacity
    cdef Session _leader          # its scope cancels the evals of this session, too; or None
    cdef Session _trunk           # of a drafter: the session that it drafts for; or None
    cdef llamac_session *_trunk_ptr   # of _trunk when this session was opened
    cdef object _costs            # the array to which the core adds costs; or None
    cdef void *_sample_scratch
    cdef readonly int vocab_size
    cdef readonly uint64_t changes   # number of evals and truncations that have begun
    cdef readonly object lost     # a shift that a device ended: sequence, tokens, how many no shift had moved; or None

    def __init__(self, Model model not None, *, sequences=1, context=0, int kv_dtype=0, threads=1, str isa=None,
                 int numerics=0, bint on_device=False, bint mtp=False, Session trunk=None, Model drafter=None):
        if self._ptr is not NULL:
            raise LlamacError("a Session is opened once")
        cdef llamac_session_options options = llamac_session_options(as_int(sequences, "sequences"),
            as_int(context, "context"), kv_dtype, as_int(threads, "threads"), NULL, numerics, on_device, mtp,
            NULL, NULL)
        if isa is not None: options.isa = PyUnicode_AsUTF8(isa)
        cdef llamac_error err
        # no Python code may run between this check and the opening: another thread could close the model there
        if model._closing or model._ptr is NULL:
            raise ClosedError("the model is closed")
        if trunk is not None: options.trunk = draft_for(self, trunk)
        if drafter is not None: options.drafter = reader_of(drafter)
        check(llamac_session_open(&self._ptr, model._ptr, &options, &err), &err)
        self._model = model
        count_session(model, trunk)
        cdef llamac_session_info info
        llamac_session_describe(self._ptr, &info)
        self._context = info.context
        cdef int per_layer = 0
        cdef size_t vocab_size = llamac_stage_width(self._ptr, LLAMAC_STAGE_LOGITS, &per_layer)
        self.vocab_size = <int>vocab_size
        self._tokens = _SequenceTokens()
        cdef bint has_positions = trunk is None or len(kv_groups(self)) > 0   # an assistant reads those of its trunk
        try:
            self._logits = <float *>allocate(vocab_size, sizeof(float), "the logits for sampling")
            self._sample_scratch = allocate(vocab_size, SCRATCH, "sampling")
            self._tokens._open(options.n_sequences, info.context if has_positions else 0)
        except MemoryError:
            self._release()
            raise
        self.n_sequences = options.n_sequences

    cdef void _release(self) noexcept:
        if self._ptr is not NULL:
            llamac_session_close(&self._ptr)
            end_session(self._model, self._trunk)
        self.n_sequences = 0
        if self._tokens is not None: self._tokens._free()
        mem_free(self._logits)
        mem_free(self._draft_logits)
        mem_free(self._sample_scratch)
        self._logits, self._draft_logits, self._draft_capacity, self._sample_scratch = NULL, NULL, 0, NULL

    def __dealloc__(self):
        self._release()

    cdef int _check_open(self) except -1:
        if self._ptr is NULL:
            raise ClosedError("the session is closed")
        return 0

    cdef int _enter(self) except -1:
        """Reserve the session for this thread. The caller sets _busy to False when it is done."""
        self._check_open()
        if self._busy:
            raise BusyError(_IN_USE)
        self._busy = True
        return 0

    cdef int _check_thread(self) except -1:
        """Check that no other thread runs a scope: between its evals, only that thread may change the session."""
        cdef unsigned long thread = PyThread_get_thread_ident()
        if self._scope is not None and thread != self._scope._thread and thread != self._helper:
            raise BusyError(_IN_USE)
        return 0

    cdef int _enter_to_change(self) except -1:
        """Like `_enter`, for calls that change the sequences."""
        self._check_thread()
        return self._enter()

    def close(self):
        """Free the session's memory. Closing twice is fine."""
        if self._busy:
            raise BusyError("the session cannot be closed while another thread computes with it")
        self._release()

    @property
    def closed(self):
        return self._ptr is NULL

    def describe(self):
        """Return (context, KV dtype, threads, isa, scratch bytes, KV bytes)."""
        cdef llamac_session_info info
        self._check_open()
        llamac_session_describe(self._ptr, &info)
        return (info.context, llamac_dtype_name(info.kv_dtype).decode(), info.threads, info.isa.decode(),
                info.scratch_bytes, info.kv_bytes)

    def page_size(self):
        """Return (positions, bytes) of the KV pages that hold the same positions, of all layers."""
        cdef llamac_session_info info
        self._check_open()
        llamac_session_describe(self._ptr, &info)
        return info.page_positions, info.page_bytes

    def set_threads(self, threads):
        """Set the number of threads for later evals."""
        cdef llamac_error err
        self._enter()
        try:
            check(llamac_set_threads(self._ptr, as_int(threads, "threads"), &err), &err)
        finally:
            self._busy = False

    def length(self, sequence=0):
        """Return the number of positions that a sequence holds."""
        cdef int c_sequence = as_int(sequence, "sequence")
        self._check_open()
        cdef int n = llamac_length(self._ptr, c_sequence)
        if n < 0:
            raise ArgumentError(f"there is no sequence {sequence}")
        return n

    def tokens(self, sequence=0):
        """Return the token ids at the positions of a sequence."""
        cdef int c_sequence = as_int(sequence, "sequence")
        self._enter()  # an eval stores its tokens at its end
        try:
            return self._tokens._list(c_sequence, self.length(c_sequence))
        finally:
            self._busy = False

    def common_prefix(self, const int32_t[::1] ids not None, sequence=0):
        """Return how many of these ids a sequence starts with, before the first position that a shift has moved."""
        cdef int i = 0, c_sequence = as_int(sequence, "sequence")
        cdef int n
        self._enter()
        try:
            n = min(self._tokens._n_unmoved(c_sequence, self.length(c_sequence)), <int>ids.shape[0])
            while i < n and self._tokens._ids[c_sequence][i] == ids[i]:
                i += 1
        finally:
            self._busy = False
        return i

    def cut_length(self, int sequence, int length):
        """Return the largest length, up to `length`, that a sequence can be truncated to (llamac_cut_length)."""
        if not 0 <= length <= self.length(sequence):
            raise ArgumentError(f"length is {length}, expected 0 to {self.length(sequence)}, the sequence's length")
        return llamac_cut_length(self._ptr, sequence, length)

    def truncate(self, length, sequence=0):
        """Discard the positions of a sequence from `length` on."""
        cdef llamac_error err
        cdef int c_length = as_int(length, "length"), c_sequence = as_int(sequence, "sequence")
        self._enter_to_change()
        try:
            self.changes += 1
            check(llamac_truncate(self._ptr, c_sequence, c_length, &err), &err)
            self._has_logits = False
            self._tokens._truncate(c_sequence, c_length)
        finally:
            self._busy = False

    def shift(self, begin, end, sequence=0):
        """Remove the positions [begin, end) of a sequence; later ones move down (llamac_shift)."""
        cdef llamac_error err
        cdef int first = as_int(begin, "begin"), last = as_int(end, "end"), c_sequence = as_int(sequence, "sequence")
        cdef int length, result
        self._enter_to_change()
        try:
            self.changes += 1
            length = llamac_length(self._ptr, c_sequence)
            with nogil:
                result = llamac_shift(self._ptr, c_sequence, first, last, &err)
            if result and llamac_length(self._ptr, c_sequence) != length:   # a device failed amid the move
                self.lost = (c_sequence, self._tokens._list(c_sequence, length),
                             self._tokens._n_unmoved(c_sequence, length))
                self._has_logits = False
                self._tokens._truncate(c_sequence, 0)
            check(result, &err)
            self._has_logits = False
            if first == last: return
            self._tokens._remove(c_sequence, first, last, length)
        finally:
            self._busy = False

    def longest_shift(self, begin, sequence=0):
        """Return the most positions that `shift` can remove from `begin` on."""
        cdef int c_begin = as_int(begin, "begin"), c_sequence = as_int(sequence, "sequence")
        self.length(sequence)  # checks the arguments
        return llamac_longest_shift(self._ptr, c_sequence, c_begin)

    def shortest_length(self, sequence=0):
        """Return the smallest length, but for 0, that a sequence can be truncated to."""
        cdef int c_sequence = as_int(sequence, "sequence")
        self.length(sequence)  # checks the arguments
        return llamac_shortest_length(self._ptr, c_sequence)

    def fork_from(self, Session source not None, length, sequence=0, target=0):
        """Make the sequence `target` equal to the first `length` positions of a sequence of `source` (llamac_fork)."""
        cdef llamac_error err
        cdef int c_length = as_int(length, "length"), c_sequence = as_int(sequence, "sequence")
        cdef int c_target = as_int(target, "target")
        self._check_thread()
        source._enter()
        try:
            if source is not self: self._enter()
            try:
                if 0 < c_length <= llamac_length(source._ptr, c_sequence):
                    self._tokens._reserve(c_target, c_length - 1)
                self.changes += 1
                check(llamac_fork(self._ptr, c_target, source._ptr, c_sequence, c_length, &err), &err)
                self._has_logits = False
                self._tokens._copy(c_target, source._tokens, c_sequence, c_length)
            finally:
                self._busy = False
        finally:
            source._busy = False

    def exchange(self, Session other not None):
        """Exchange the sequences, and what computes them, with another session of the model and of this size. Logits
        for `sample` stay where they are, and drafts are discarded."""
        cdef llamac_error err
        other._enter_to_change()
        try:
            self._enter_to_change()
            try:
                if (self._model is not other._model or self.n_sequences != other.n_sequences
                        or self._context != other._context):
                    raise ArgumentError("only sessions of one model with as many sequences and positions exchange them")
                self._ptr, other._ptr = other._ptr, self._ptr
                self._tokens, other._tokens = other._tokens, self._tokens
                for session in (self, other):
                    check(llamac_eval_drafts((<Session>session)._ptr, NULL, 0, NULL, NULL, &err), &err)
                self._drafts, other._drafts, self.lost = [], [], None
            finally:
                self._busy = False
        finally:
            other._busy = False

    def cancel(self):
        """Cancel the eval that another thread runs, or the scope that it runs in. CancelledError is raised there."""
        cdef CancelScope scope = self._running_scope()
        self._cancel = 1
        if scope is not None:
            scope._cancel = 1

    def follow(self, Session leader not None):
        """Let the cancel scope of another session cancel the evals of this one, too."""
        self._leader = leader

    cdef CancelScope _running_scope(self):
        if self._scope is None and self._leader is not None:
            return self._leader._scope
        return self._scope

    def stage_width(self, int stage):
        """Return (floats per row, whether the stage exists once per layer)."""
        cdef int per_layer = 0
        self._check_open()
        cdef size_t width = llamac_stage_width(self._ptr, stage, &per_layer)
        return width, bool(per_layer)

    cdef int _fill_observations(self, llamac_observation *c, observations, int n_rows, int n_wanted) except -1:
        cdef float[::1] view
        cdef int i, per_layer = 0
        cdef Py_ssize_t floats
        for i, (stage, layer, buffer) in enumerate(observations):
            view = buffer
            c[i].stage, c[i].layer = stage, layer
            floats = <Py_ssize_t>llamac_stage_width(self._ptr, stage, &per_layer)
            floats *= n_wanted if stage in (LLAMAC_STAGE_OUTPUT_NORM, LLAMAC_STAGE_LOGITS) else n_rows
            if view.shape[0] != floats:
                raise ArgumentError(f"the buffer for stage {stage} has {view.shape[0]} floats, expected {floats}")
            c[i].out = &view[0] if floats else self._logits  # C wants a pointer even if it writes nothing
        return 0

    def eval_rows(self, const int32_t[::1] rows not None, float[::1] logits=None, observations=(), prepare=None,
                  inputs=None, const int32_t[::1] types=None, hidden=None, states=None):
        """Compute rows, flat: token, sequence, position, want_logits, token, ...; append them to their sequences.

        Args:
            logits: Receives vocab_size floats per row that wants them. None: only the last row may want logits, which
                stay in the session for `sample`. Without elements: rows that want logits get only the output norm,
                which an observation receives.
            observations: (stage, layer, buffer of floats) each.
            prepare: Called first, with the number of rows and the sum of their positions. Returns whether the eval can
                take so long that it must be interruptible (interrupt.py). None: it cannot.
            inputs: (rows, dim) in place of the embeddings. The caller checks the shape, as of `types`: (rows), the
                rows of the type embedding.
            hidden: (n, dim): receives the hidden states of the last n rows; with fewer rows, its first ones do. The
                caller checks the width, as of `states`: (rows, 3 dim of the trunk), in place of inputs. Those of
                MTP layers and drafters, and hidden, can be on the session's device: (address, number of rows).

        Raises:
            CancelledError: `done` rows were computed and appended.
        """
        cdef int n = <int>(rows.shape[0] // ROW), i, done = 0, result, wanted = 0
        cdef const llamac_row *c_rows = <const llamac_row *>&rows[0] if n else NULL
        cdef _StateRows c_inputs = state_rows(inputs, False), c_states = state_rows(states, False)
        cdef _StateRows c_hidden = state_rows(hidden, True)
        cdef const int32_t *c_types = &types[0] if types is not None else NULL
        cdef int n_hidden = min(n, c_hidden.n)
        cdef long long positions = 0
        cdef float *out = self._logits
        cdef bytearray memory = bytearray(len(observations) * sizeof(llamac_observation))
        cdef llamac_observation *c_observations = <llamac_observation *><char *>memory
        cdef CancelScope scope
        cdef const int32_t *cancel
        cdef llamac_eval_options options
        cdef llamac_error err
        if rows.shape[0] % ROW:
            raise ArgumentError("a row has 4 numbers: token, sequence, position, want_logits")
        for i in range(n):
            wanted += c_rows[i].want_logits != 0
            positions += c_rows[i].position
        if prepare is not None and prepare(n, positions):
            run_in_helper(
                self, partial(self.eval_rows, rows, logits, observations, None, inputs, types, hidden, states))
            return
        if logits is not None:
            if logits.shape[0] not in (0, <Py_ssize_t>wanted * self.vocab_size):
                raise ArgumentError(f"the buffer for logits has {logits.shape[0]} floats, "
                                    f"expected {wanted} x {self.vocab_size}")
            out = &logits[0] if logits.shape[0] else NULL
        elif wanted > 1 or (wanted == 1 and not c_rows[n - 1].want_logits):
            raise ArgumentError("without a buffer only the last row can want logits")
        enter_with_trunk(self)
        try:
            self.changes += 1
            self._has_logits = False
            for i in range(n):
                self._tokens._reserve(c_rows[i].sequence, c_rows[i].position)
            self._fill_observations(c_observations, observations, n, wanted)
            scope = self._running_scope()  # holds a reference while C reads its flag
            cancel = &self._cancel if scope is None else &scope._cancel
            options = llamac_eval_options(c_observations, <int>len(observations), cancel, &done, c_inputs.at,
                                          c_states.at, c_types, c_hidden.at, n_hidden)
            use_states(self._ptr, c_states if inputs is None else c_inputs, c_hidden)
            self._cancel = 0
            with nogil:
                result = llamac_eval(self._ptr, c_rows, n, out, &options, &err)
            self._tokens._store(c_rows, done)
            if result < 0 and err.code == LLAMAC_CANCELLED:
                raise CancelledError(err.message.decode(), done)
            check(result, &err)
            self._has_logits = logits is None and wanted == 1
        finally:
            leave_with_trunk(self)

    def eval_drafts(self, const int32_t[::1] drafts not None, float[::1] logits=None, prepare=None, hidden=None):
        """Compute drafts, flat: token, sequence, parent, want_logits, token, ... (llamac_eval_drafts).

        Args:
            logits: Receives vocab_size floats per draft that wants them. None: they stay in the session, and those of
                a draft are there for `sample` once it has been accepted.
            prepare: As for `eval_rows`.
            hidden: (n, dim), or on the device (address, n): receives the hidden states of the drafts. The caller
                checks the shape.

        Raises:
            CancelledError: Nothing was kept.
        """
        cdef int n = <int>(drafts.shape[0] // ROW), i, row, wanted = 0
        cdef const llamac_draft *c_drafts = <const llamac_draft *>&drafts[0] if n else NULL
        cdef float *out = NULL
        if drafts.shape[0] % ROW:
            raise ArgumentError("a draft has 4 numbers: token, sequence, parent, want_logits")
        for i in range(n):
            wanted += c_drafts[i].want_logits != 0
        if prepare is not None and n and prepare(n, n * (self.length(c_drafts[0].sequence) + n)):
            run_in_helper(self, partial(self.eval_drafts, drafts, logits, None, hidden))
            return
        if logits is not None and logits.shape[0] != <Py_ssize_t>wanted * self.vocab_size:
            raise ArgumentError(f"the buffer for logits has {logits.shape[0]} floats, "
                                f"expected {wanted} x {self.vocab_size}")
        self._enter_to_change()
        try:
            self.changes += 1
            self._has_logits = False
            self._drafts = []
            found, row = [], 0
            for i in range(n):
                found.append((c_drafts[i].token, c_drafts[i].sequence, c_drafts[i].parent,
                              llamac_length(self._ptr, c_drafts[i].sequence),
                              row if logits is None and c_drafts[i].want_logits else -1))
                row += c_drafts[i].want_logits != 0
            if logits is None:
                self._reserve_draft_logits(wanted)
                out = self._draft_logits
            elif wanted:
                out = &logits[0]
            self._run_drafts(c_drafts, n, out, state_rows(hidden, True))
            self._drafts = found
        finally:
            self._busy = False

    cdef int _reserve_draft_logits(self, int rows) except -1:
        if rows > self._draft_capacity:
            mem_free(self._draft_logits)
            self._draft_logits, self._draft_capacity = NULL, 0
            self._draft_logits = <float *>allocate_raw(<size_t>rows * <size_t>self.vocab_size * sizeof(float),
                                                       "the logits of drafts")
            self._draft_capacity = rows
        return 0

    cdef int _run_drafts(self, const llamac_draft *drafts, int n, float *logits, _StateRows hidden) except -1:
        cdef CancelScope scope = self._running_scope()  # holds a reference while C reads its flag
        cdef const int32_t *cancel = &self._cancel if scope is None else &scope._cancel
        cdef llamac_eval_options options = llamac_eval_options(NULL, 0, cancel, NULL, NULL, NULL, NULL, hidden.at,
                                                               n if hidden.n else 0)
        cdef llamac_error err
        cdef int result
        self._cancel = 0
        use_states(self._ptr, hidden, hidden)
        with nogil:
            result = llamac_eval_drafts(self._ptr, drafts, n, logits, &options, &err)
        if result < 0 and err.code == LLAMAC_CANCELLED:
            raise CancelledError(err.message.decode(), 0)
        return check(result, &err)

    def accept(self, draft):
        """Append a draft of the last eval_drafts and its ancestors to their sequence (llamac_accept)."""
        cdef int c_draft = as_int(draft, "draft"), sequence, length, i, row
        cdef llamac_error err
        self._enter_to_change()
        try:
            path = []
            sequence = length = 0
            i = c_draft
            while 0 <= i < len(self._drafts or ()):
                token, sequence, i, length, _ = self._drafts[i]
                path.insert(0, token)
            if path:
                self._tokens._reserve(sequence, length + len(path) - 1)
            check(llamac_accept(self._ptr, c_draft, &err), &err)
            self.changes += 1
            *_, row = self._drafts[c_draft]
            self._has_logits = row >= 0
            if row >= 0:
                memcpy(self._logits, self._draft_logits + <size_t>row * self.vocab_size,
                       self.vocab_size * sizeof(float))
            for i in range(<int>len(path)):
                self._tokens._ids[sequence][length + i] = path[i]
        finally:
            self._busy = False

    def discard_drafts(self):
        """Free the drafts of the last eval_drafts. The logits for `sample` stay."""
        cdef llamac_error err
        self._enter_to_change()
        try:
            self._drafts = []
            check(llamac_eval_drafts(self._ptr, NULL, 0, NULL, NULL, &err), &err)
        finally:
            self._busy = False

    def sample(self, Sampling sampling not None, int n, uint64_t position, History history=None):
        """Draw a token id from the first n of the session's logits, as `sample_rows` does."""
        cdef llamac_draw draw
        self._enter()
        try:
            self._check_logits(n)
            draw_prepare(&draw, sampling, history, position)
            with nogil:
                draw_token(&draw, self._logits, n, self._sample_scratch)
            return draw_result(&draw)
        finally:
            self._busy = False

    def logprobs(self, int n, int token, int top):
        """As the function, from the session's logits."""
        self._enter()
        try:
            self._check_logits(n)
            return row_logprobs(self._logits, n, token, top)
        finally:
            self._busy = False

    def copy_logits(self, int n):
        """Return the first n of the session's logits as bytes of float32."""
        self._enter()
        try:
            self._check_logits(n)
            return (<char *>self._logits)[:<size_t>n * sizeof(float)]
        finally:
            self._busy = False

    cdef int _check_logits(self, int n) except -1:
        if not self._has_logits:
            raise ArgumentError("there are no logits to sample from: call prefill or step first")
        if n < 1 or n > self.vocab_size:
            raise ArgumentError(f"cannot sample from {n} of {self.vocab_size} logits")
        return 0


def memory_limits(Session session not None, int length):
    """Return the most bytes of activations, and of KV pages of one sequence that grows to `length` positions."""
    session._check_open()
    return session_scratch_limit(session._ptr), session_pages_limit(session._ptr, length)
