# cython: language_level=3, binding=True, embedsignature=False, auto_pickle=False, autotestdict=False
"""The C core for Python: check, convert, call, turn errors into exceptions. No loop over numbers.

Memory: a Model holds the buffer it was opened over, a Session holds its Model. Every C call that computes runs without the GIL.
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.mem cimport PyMem_Calloc, PyMem_Free, PyMem_Malloc, PyMem_Realloc
from libc.stdint cimport int32_t, uint64_t

from .libllamac cimport *

from .arguments import real_number, whole_number
from .errors import (ArgumentError, BusyError, CancelledError, ClosedError, ContextFullError, LlamacError, ModelError,
                     OutOfMemoryError, UnsupportedError)

_ERRORS = {
    LLAMAC_NO_MEMORY: OutOfMemoryError, LLAMAC_BAD_ARGUMENT: ArgumentError, LLAMAC_BAD_MODEL: ModelError,
    LLAMAC_CONTEXT_FULL: ContextFullError, LLAMAC_CANCELLED: CancelledError, LLAMAC_UNSUPPORTED: UnsupportedError,
}


cdef int check(int result, llamac_error *err) except -1:
    if result < 0:
        raise _ERRORS.get(err.code, LlamacError)(err.message.decode("utf-8", "replace"))
    return result


cdef int as_int(object number, str name) except? -1:
    """A number as a C int. ArgumentTypeError if it is none, ArgumentError if it does not fit."""
    try:
        return whole_number(number, name)
    except OverflowError:
        raise ArgumentError(f"{name} is {number}, which is out of range") from None


# ---- descriptions of the file format

def fields():
    """The members of the file's records: (record, name, type, offset, count, min, max, names or None)."""
    cdef size_t n, i
    cdef const llamac_field *f = llamac_fields(&n)
    return [(f[i].record.decode(), f[i].name.decode(), f[i].type, f[i].offset, f[i].count, f[i].min, f[i].max,
             f[i].names.decode() if f[i].names is not NULL else None) for i in range(n)]


def record_bytes(str record):
    """Size of a record; of the header without its section table."""
    return llamac_record_bytes(record.encode())


def section_names():
    """The file's sections in order."""
    cdef size_t i = 0
    names = []
    while llamac_section_at(i) is not NULL:
        names.append(llamac_section_at(i).decode())
        i += 1
    return tuple(names)


def slots(const unsigned char[::1] config not None, const unsigned char[::1] layers not None):
    """The tensors a model of this config has, in the file's order: (name, required, is_matrix, rows, columns)."""
    cdef llamac_slot slot
    if <size_t>config.shape[0] != llamac_record_bytes(b"config") or <size_t>layers.shape[0] % llamac_record_bytes(b"layer"):
        raise ArgumentError("slots needs one config record and whole layer records")
    if layers.shape[0] == 0 or <size_t>layers.shape[0] // llamac_record_bytes(b"layer") != (<const int32_t *>&config[4])[0]:
        raise ArgumentError("slots needs as many layer records as the config's n_layers")
    found = []
    cdef llamac_walk walk = llamac_walk(&config[0], &layers[0], 0, 0, 0, 0, 0)
    cdef int there = llamac_slot_next(&walk, &slot)
    while there > 0:
        found.append((slot.name.decode(), bool(slot.required), bool(slot.is_matrix), slot.rows, slot.columns))
        there = llamac_slot_next(&walk, &slot)
    if there < 0:
        raise ArgumentError("slots needs an n_rope and an n_experts that the format has room for")
    return found


def matrix_bytes(int dtype, uint64_t rows, uint64_t columns):
    """Bytes of a matrix in strips; 0 if the dtype is reserved."""
    return llamac_matrix_bytes(dtype, rows, columns)


def quantize(int dtype, const float[:, ::1] rows not None, unsigned char[::1] out not None, const float[::1] importance=None,
             const float[:, ::1] feedback=None):
    """Quantizes rows (n, columns) to strips of q8, q4 or q4s in `out`, without the GIL. importance (columns) and feedback (columns, columns):
    see llamac_quantize. Parts of a matrix may be quantized by several threads."""
    cdef size_t n = <size_t>rows.shape[0], columns = <size_t>rows.shape[1]
    cdef size_t needed = llamac_matrix_bytes(dtype, n, columns)
    cdef const float *weights = NULL
    cdef const float *shares = NULL
    cdef llamac_error err
    cdef int result
    if n == 0 or columns == 0 or <size_t>out.shape[0] != needed:
        raise ArgumentError(f"{n} x {columns} numbers of dtype {dtype} take {needed} bytes, the buffer has {out.shape[0]}")
    if importance is not None:
        if <size_t>importance.shape[0] != columns:
            raise ArgumentError(f"importance has {importance.shape[0]} numbers, expected {columns}")
        weights = &importance[0]
    if feedback is not None:
        if <size_t>feedback.shape[0] != columns or <size_t>feedback.shape[1] != columns:
            raise ArgumentError(f"feedback is {feedback.shape[0]} x {feedback.shape[1]}, expected {columns} x {columns}")
        shares = &feedback[0, 0]
    with nogil:
        result = llamac_quantize(dtype, &rows[0, 0], n, columns, weights, shares, &out[0], &err)
    check(result, &err)


def dtype_name(int dtype):
    """Name of a dtype number, or None."""
    cdef const char *name = llamac_dtype_name(dtype)
    return name.decode() if name is not NULL else None


def isas():
    """Kernel sets of this build, best first: (name, whether this machine runs it)."""
    cdef int supported = 0
    cdef size_t i = 0
    found = []
    while llamac_isa_at(i, &supported) is not NULL:
        found.append((llamac_isa_at(i, &supported).decode(), bool(supported)))
        i += 1
    return found


def has_threads():
    """Whether this build can use more than one thread."""
    return bool(llamac_has_threads())


def stages():
    """Names of the graph's stages, in the order of computation."""
    return tuple(llamac_stage_name(i).decode() for i in range(LLAMAC_N_STAGES))


def live_objects():
    """C models and sessions that are open; for tests."""
    return llamac_live_objects()


def fail_allocation(long n):
    """Lets the n-th allocation of this thread from now on fail; 0: none. Returns the allocations since the last call. For tests."""
    return llamac_test_fail_allocation(n)


# ---- the machine's limits

def measure_read(const float[::1] block not None, times, *, threads=1, streams=1, str isa=None):
    """Reads a block `times` times as `streams` (1, 2 or 4) runs side by side per thread; returns the bytes read. To be timed."""
    cdef llamac_error err
    cdef uint64_t read = 0
    cdef int n = as_int(times, "times"), team = as_int(threads, "threads"), runs = as_int(streams, "streams"), result
    cdef bytes name = isa.encode() if isa is not None else None
    cdef const char *which = <const char *>name if name is not None else NULL
    cdef const float *numbers = &block[0] if block.shape[0] else NULL
    with nogil:
        result = llamac_measure_read(numbers, <size_t>block.shape[0], n, team, runs, which, &read, &err)
    check(result, &err)
    return read


def measure_multiply(int dtype, passes, *, threads=1, str isa=None):
    """Does the multiply-adds of products with weights of a dtype, with operands in the first cache; returns how many. To be timed."""
    cdef llamac_error err
    cdef uint64_t count = 0
    cdef int n = as_int(passes, "passes"), team = as_int(threads, "threads"), result
    cdef bytes name = isa.encode() if isa is not None else None
    cdef const char *which = <const char *>name if name is not None else NULL
    with nogil:
        result = llamac_measure_multiply(dtype, n, team, which, &count, &err)
    check(result, &err)
    return count


# ---- model

@cython.final
cdef class Model:
    """A checked model over a buffer that holds a whole flat file, aligned to 64 bytes (a memory map is)."""

    cdef llamac_model *_ptr
    cdef Py_buffer _buffer
    cdef bint _has_buffer, _closing
    cdef int _sessions
    cdef list _kept

    def __init__(self, data):
        if self._has_buffer:
            raise LlamacError("a Model is opened once")
        PyObject_GetBuffer(data, &self._buffer, PyBUF_SIMPLE)
        self._has_buffer = True
        self._kept = []
        cdef llamac_error err
        check(llamac_model_open(&self._ptr, self._buffer.buf, <size_t>self._buffer.len, &err), &err)

    cdef void _release(self) noexcept:
        llamac_model_close(&self._ptr)
        if self._has_buffer:
            PyBuffer_Release(&self._buffer)
            self._has_buffer = False

    def adapt(self, str matrix, int rank, const float[::1] a not None, const float[::1] b not None, const float[::1] scales=None):
        """Adds a low-rank adapter to a matrix: see llamac_model_adapt. a and b: strips of f32, whole ones, kept from now on."""
        cdef bytes name = matrix.encode()
        cdef llamac_error err
        cdef const float *factors = NULL
        cdef size_t n = 0
        self._check_new()
        if scales is not None:
            factors, n = &scales[0], scales.shape[0]
        check(llamac_model_adapt(self._ptr, name, rank, &a[0], a.nbytes, &b[0], b.nbytes, factors, n, &err), &err)
        self._kept.append((a, b, scales))

    def replace(self, str tensor, int dtype, const unsigned char[::1] data not None):
        """Lets other data stand in place of a tensor: see llamac_model_replace. They are kept from now on."""
        cdef bytes name = tensor.encode()
        cdef llamac_error err
        self._check_new()
        check(llamac_model_replace(self._ptr, name, dtype, &data[0], data.shape[0], &err), &err)
        self._kept.append(data)

    def tables(self):
        """The file's first bytes as the core has checked them: header to tensor table, at their offsets in the file."""
        cdef size_t n = 0
        if self._ptr is NULL:
            raise ClosedError("the model is closed")
        cdef const unsigned char *tables = <const unsigned char *>llamac_model_tables(self._ptr, &n)
        return tables[:n]

    cdef _check_new(self):
        if self._ptr is NULL or self._sessions:
            raise LlamacError("a model is adapted before its first session")

    def close(self):
        """Lets go of the buffer as soon as the last session is closed."""
        self._closing = True
        if self._sessions == 0:
            self._release()

    @property
    def closed(self):
        return self._closing or self._ptr is NULL

    @property
    def released(self):
        """Whether the buffer has been let go."""
        return not self._has_buffer

    def __dealloc__(self):
        self._release()


# ---- sampling

@cython.final
cdef class Sampling:
    """Settings of one draw; checked when they are made."""

    cdef llamac_sampling _c

    def __init__(self, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, uint64_t seed=0):
        cdef llamac_error err
        temperature = real_number(temperature, "temperature")
        self._c = llamac_sampling(<float>temperature, as_int(top_k, "top_k"), <float>real_number(top_p, "top_p"),
                                  <float>real_number(min_p, "min_p"), seed)
        if temperature > 0 and self._c.temperature == 0:
            raise ArgumentError(f"temperature {temperature} is too small: use 0 for the most probable token")
        check(llamac_sampling_check(&self._c, &err), &err)


def sample(const float[::1] logits not None, Sampling sampling not None, uint64_t position):
    """Draws a token id from logits (n)."""
    cdef llamac_error err
    cdef int n = <int>logits.shape[0], token
    if n == 0:
        raise ArgumentError("there are no logits to sample from")
    cdef void *scratch = PyMem_Malloc(<size_t>n * LLAMAC_SAMPLE_SCRATCH)
    if scratch is NULL:
        raise OutOfMemoryError(f"no memory to sample from {n} logits")
    try:
        with nogil:
            token = llamac_sample(&logits[0], n, &sampling._c, position, scratch, &err)
        return check(token, &err)
    finally:
        PyMem_Free(scratch)


# ---- session

@cython.final
cdef class CancelScope:
    """A function call on a session that any thread can cancel, also before it begins. One thread runs it at a time.

    `run` is C: Ctrl-C, which Python raises between its own instructions, cannot leave the scope entered.
    """

    cdef Session _session
    cdef int32_t _cancel
    cdef bint _running

    def __init__(self, Session session not None):
        self._session = session

    def run(self, function):
        """Call a function. `cancel` stops the session's evals in it with CancelledError."""
        if self._running:
            raise BusyError("the stream is in use by another thread")
        if self._session._scope is not None:
            raise BusyError("the session is in use by another stream, in another thread")
        self._running = True
        self._session._scope = self
        try:
            return function()
        finally:
            self._session._scope = None
            self._running = False

    def cancel(self):
        """Cancel the running call and all later ones. Any thread may call this."""
        self._cancel = 1

    @property
    def cancelled(self):
        return self._cancel != 0


@cython.final
cdef class Session:
    """Sequences of tokens with their KV cache. Used by one thread at a time: a second one gets BusyError."""

    cdef llamac_session *_ptr
    cdef Model _model
    cdef bint _busy
    cdef int32_t _cancel          # stops the running eval
    cdef CancelScope _scope       # the running scope, if any: its flag counts instead
    cdef int _n_sequences, _context
    cdef int32_t **_ids           # per sequence: the token at each of its positions
    cdef int *_ids_capacity       # per sequence: positions that _ids has room for
    cdef float *_logits           # of the last row of the last eval that wanted them
    cdef void *_scratch           # for sampling from them
    cdef readonly int vocab_size
    cdef bint _has_logits
    cdef readonly uint64_t changes  # how often an eval or a truncation has begun

    def __init__(self, Model model not None, *, sequences=1, context=0, int kv_dtype=0, threads=1, str isa=None):
        if self._ptr is not NULL:
            raise LlamacError("a Session is opened once")
        # no Python code between the question whether the model is open and its use: other threads could close it there
        cdef llamac_session_options options = llamac_session_options(
            as_int(sequences, "sequences"), as_int(context, "context"), kv_dtype, as_int(threads, "threads"), NULL)
        cdef bytes name
        if isa is not None:
            name = isa.encode()
            options.isa = name
        cdef llamac_error err
        if model._closing or model._ptr is NULL:
            raise ClosedError("the model is closed")
        check(llamac_session_open(&self._ptr, model._ptr, &options, &err), &err)
        self._model = model
        model._sessions += 1
        cdef int per_layer = 0
        cdef size_t n = llamac_stage_width(self._ptr, LLAMAC_STAGE_LOGITS, &per_layer)
        self.vocab_size = <int>n
        self._logits = <float *>PyMem_Malloc(n * sizeof(float))
        self._scratch = PyMem_Malloc(n * LLAMAC_SAMPLE_SCRATCH)
        if self._logits is NULL or self._scratch is NULL:
            self._release()
            raise OutOfMemoryError(f"no memory for {n} logits")
        self._ids = <int32_t **>PyMem_Calloc(<size_t>options.n_sequences, sizeof(int32_t *))
        self._ids_capacity = <int *>PyMem_Calloc(<size_t>options.n_sequences, sizeof(int))
        if self._ids is NULL or self._ids_capacity is NULL:
            self._release()
            raise OutOfMemoryError(f"no memory for the tokens of {options.n_sequences} sequences")
        self._n_sequences = options.n_sequences
        cdef llamac_session_info info
        llamac_session_describe(self._ptr, &info)
        self._context = info.context

    cdef void _release(self) noexcept:
        cdef int i
        if self._ptr is not NULL:
            llamac_session_close(&self._ptr)
            self._model._sessions -= 1
            if self._model._closing and self._model._sessions == 0:
                self._model._release()
        for i in range(self._n_sequences):
            PyMem_Free(self._ids[i])
        self._n_sequences = 0
        PyMem_Free(self._ids)
        PyMem_Free(self._ids_capacity)
        self._ids = NULL
        self._ids_capacity = NULL
        PyMem_Free(self._logits)
        PyMem_Free(self._scratch)
        self._logits = NULL
        self._scratch = NULL

    def __dealloc__(self):
        self._release()

    cdef int _enter(self) except -1:
        if self._ptr is NULL:
            raise ClosedError("the session is closed")
        if self._busy:
            raise BusyError("the session is in use by another thread: give each thread a session of its own")
        self._busy = True
        return 0

    def close(self):
        """Frees the session's memory. Closing twice is fine."""
        if self._busy:
            raise BusyError("the session cannot be closed while another thread computes with it")
        self._release()

    @property
    def closed(self):
        return self._ptr is NULL

    def describe(self):
        """(context, kv dtype, threads, isa, scratch bytes, KV bytes)."""
        cdef llamac_session_info info
        if self._ptr is NULL:
            raise ClosedError("the session is closed")
        llamac_session_describe(self._ptr, &info)
        return info.context, llamac_dtype_name(info.kv_dtype).decode(), info.threads, info.isa.decode(), info.scratch_bytes, info.kv_bytes

    def set_threads(self, threads):
        """Changes the number of threads of the evals to come."""
        cdef llamac_error err
        self._enter()
        try:
            check(llamac_set_threads(self._ptr, as_int(threads, "threads"), &err), &err)
        finally:
            self._busy = False

    def length(self, sequence=0):
        """Positions held by a sequence."""
        cdef int which = as_int(sequence, "sequence")
        if self._ptr is NULL:
            raise ClosedError("the session is closed")
        cdef int n = llamac_length(self._ptr, which)
        if n < 0:
            raise ArgumentError(f"there is no sequence {sequence}")
        return n

    def tokens(self, sequence=0):
        """The token ids at the positions of a sequence."""
        cdef int i, which = as_int(sequence, "sequence"), n = self.length(which)
        return [self._ids[which][i] for i in range(n)]

    def common_prefix(self, const int32_t[::1] ids not None):
        """How many positions of sequence 0 hold the first of these ids."""
        cdef int i = 0, n = min(<int>self.length(), <int>ids.shape[0])
        while i < n and self._ids[0][i] == ids[i]:
            i += 1
        return i

    cdef int _reserve_ids(self, int sequence, int position) except -1:
        """Make room for the id at a position. Nothing happens for a row that the core will refuse."""
        cdef int capacity
        cdef int32_t *grown
        if sequence < 0 or sequence >= self._n_sequences or position >= self._context or position < self._ids_capacity[sequence]:
            return 0
        capacity = min(self._context, max(position + 1, 64, 2 * self._ids_capacity[sequence]))
        grown = <int32_t *>PyMem_Realloc(self._ids[sequence], <size_t>capacity * sizeof(int32_t))
        if grown is NULL:
            raise OutOfMemoryError(f"no memory for the tokens of {capacity} positions")
        self._ids[sequence] = grown
        self._ids_capacity[sequence] = capacity
        return 0

    def truncate(self, length, sequence=0):
        """Keep the first `length` positions of a sequence."""
        cdef llamac_error err
        cdef int to = as_int(length, "length"), which = as_int(sequence, "sequence")
        self._enter()
        try:
            self.changes += 1
            self._has_logits = False
            check(llamac_truncate(self._ptr, which, to, &err), &err)
        finally:
            self._busy = False

    def cancel(self):
        """Stop the eval that another thread runs, or the scope that it runs in; CancelledError is raised there."""
        self._cancel = 1
        if self._scope is not None:
            self._scope._cancel = 1

    def stage_width(self, int stage):
        """(floats per row, whether the stage exists once per layer)."""
        cdef int per_layer = 0
        if self._ptr is NULL:
            raise ClosedError("the session is closed")
        cdef size_t width = llamac_stage_width(self._ptr, stage, &per_layer)
        return width, bool(per_layer)

    def eval_rows(self, const int32_t[:, ::1] rows not None, float[::1] logits=None, observations=()):
        """Computes rows of (token, sequence, position, want_logits). logits: all the wanted rows' (n * vocab_size floats), or None:
        then only the last row may want them, and they stay in the session for `sample`.
        observations: (stage, layer, float buffer) each. Returns nothing; raises CancelledError with `done` rows kept."""
        cdef int n = <int>rows.shape[0], done = 0, result, i, wanted = 0
        cdef llamac_error err
        cdef float *out = self._logits
        cdef llamac_observation *observe = NULL
        cdef float[::1] view
        if rows.shape[1] != 4:
            raise ArgumentError("a row has 4 numbers: token, sequence, position, want_logits")
        for i in range(n):
            wanted += rows[i, 3] != 0
        if logits is not None:
            if logits.shape[0] != <Py_ssize_t>wanted * self.vocab_size:
                raise ArgumentError(f"the buffer for logits has {logits.shape[0]} floats, {wanted} rows need {wanted * self.vocab_size}")
            out = &logits[0] if wanted else NULL
        elif wanted > 1 or (wanted == 1 and not rows[n - 1, 3]):
            raise ArgumentError("without a buffer only the last row's logits can be wanted")
        self._enter()
        try:
            self.changes += 1
            self._has_logits = False
            for i in range(n):
                self._reserve_ids(rows[i, 1], rows[i, 2])
            if observations:
                observe = <llamac_observation *>PyMem_Malloc(<size_t>len(observations) * sizeof(llamac_observation))
                if observe is NULL:
                    raise OutOfMemoryError("no memory for observations")
                for i, (stage, layer, buffer) in enumerate(observations):
                    view = buffer
                    floats = self._observation_floats(stage, n, wanted)
                    if view.shape[0] != floats:
                        raise ArgumentError(f"the buffer for stage {stage} has {view.shape[0]} floats, expected {floats}")
                    observe[i].stage = stage
                    observe[i].layer = layer
                    observe[i].out = &view[0] if floats else self._logits
            result = self._run(<const llamac_row *>&rows[0, 0] if n else NULL, n, out, observe, len(observations), &done, &err)
            for i in range(done):
                self._ids[rows[i, 1]][rows[i, 2]] = rows[i, 0]
            self._has_logits = result == 0 and logits is None and wanted == 1
            self._raise(result, &err, done)
        finally:
            PyMem_Free(observe)
            self._busy = False

    cdef Py_ssize_t _observation_floats(self, int stage, int rows, int wanted) except -1:
        cdef int per_layer = 0
        cdef Py_ssize_t width = <Py_ssize_t>llamac_stage_width(self._ptr, stage, &per_layer)
        return width * (wanted if stage == LLAMAC_STAGE_OUTPUT_NORM or stage == LLAMAC_STAGE_LOGITS else rows)

    cdef int _run(self, const llamac_row *rows, int n, float *logits, const llamac_observation *observe, int n_observe, int *done, llamac_error *err):
        cdef CancelScope scope = self._scope  # holds a reference while the core reads its flag
        cdef const int32_t *cancel = &self._cancel if scope is None else &scope._cancel
        cdef llamac_eval_options options = llamac_eval_options(observe, n_observe, cancel, done)
        cdef int result
        self._cancel = 0
        with nogil:
            result = llamac_eval(self._ptr, rows, n, logits, &options, err)
        return result

    cdef int _raise(self, int result, llamac_error *err, int done) except -1:
        if result < 0 and err.code == LLAMAC_CANCELLED:
            raise CancelledError(err.message.decode(), done)
        return check(result, err)

    def step(self, token, sequence=0):
        """Computes one token at the end of a sequence; its logits stay in the session."""
        cdef int done = 0, result, number = as_int(token, "token"), which = as_int(sequence, "sequence")
        cdef llamac_error err
        cdef llamac_row row
        self._enter()
        try:
            self.changes += 1
            self._has_logits = False
            row = llamac_row(number, which, llamac_length(self._ptr, which), 1)
            self._reserve_ids(which, row.position)
            result = self._run(&row, 1, self._logits, NULL, 0, &done, &err)
            if done:
                self._ids[which][row.position] = number
            self._has_logits = result == 0
            self._raise(result, &err, done)
        finally:
            self._busy = False

    def sample(self, Sampling sampling not None, int n, uint64_t position):
        """Draws from the first n of the session's logits, for the given position."""
        cdef llamac_error err
        cdef int token
        self._enter()
        try:
            if not self._has_logits:
                raise ArgumentError("there are no logits to sample from: eval something first")
            if n < 1 or n > self.vocab_size:
                raise ArgumentError(f"cannot sample from {n} of {self.vocab_size} logits")
            with nogil:
                token = llamac_sample(self._logits, n, &sampling._c, position, self._scratch, &err)
            return check(token, &err)
        finally:
            self._busy = False
