# Devices: objects of Python that hold the KV pages of sessions and compute their chunks (csrc/device.h). Part of
# _core.pyx.

from threading import local

_raised = local()   # .error: what a device's method raised in this thread, until `check` raises it again


cdef int device_failed(object error, llamac_error *err) noexcept:
    """Keep an exception for `check` and describe it to C. Returns -1."""
    _raised.error = error
    err.code = LLAMAC_CANCELLED if isinstance(error, CancelledError) else LLAMAC_DEVICE_FAILED
    text = (str(error) or type(error).__name__).encode()[:sizeof(err.message) - 1]
    memcpy(err.message, <const char *>text, <size_t>len(text) + 1)
    return -1


cdef uint64_t device_alloc(void *context, size_t n, llamac_error *err) noexcept with gil:
    try:
        return (<object>context).alloc(n)
    except BaseException as error:
        device_failed(error, err)
        return 0


cdef void device_free(void *context, uint64_t address) noexcept with gil:
    (<object>context).free(address)


cdef int device_copy(void *context, uint64_t to, uint64_t source, size_t n, llamac_error *err) noexcept with gil:
    try:
        (<object>context).copy(to, source, n)
        return 0
    except BaseException as error:
        return device_failed(error, err)


cdef int device_read(void *context, void *to, uint64_t source, size_t n, llamac_error *err) noexcept with gil:
    try:
        (<object>context).download(source, PyMemoryView_FromMemory(<char *>to, <Py_ssize_t>n, PyBUF_WRITE))
        return 0
    except BaseException as error:
        return device_failed(error, err)


cdef int device_write(void *context, uint64_t to, const void *source, size_t n, llamac_error *err) noexcept with gil:
    try:
        (<object>context).upload(to, PyMemoryView_FromMemory(<char *>source, <Py_ssize_t>n, PyBUF_READ))
        return 0
    except BaseException as error:
        return device_failed(error, err)


cdef int device_forward(void *context, const llamac_chunk *ptr, llamac_error *err) noexcept with gil:
    cdef Chunk chunk = Chunk.__new__(Chunk)
    chunk._ptr = ptr
    try:
        (<object>context).forward(chunk)
        return 0
    except BaseException as error:
        return device_failed(error, err)
    finally:
        chunk._ptr = NULL   # whoever keeps the object has no chunk


@cython.final
cdef class _StateRows:
    """Where an eval reads or writes hidden states, in memory that this object keeps: (n, width) of f32. at: NULL
    without states."""

    cdef const float[:, ::1] _read
    cdef float[:, ::1] _written
    cdef float *at
    cdef int n
    cdef bint on_device


cdef _StateRows state_rows(object states, bint is_written):
    """The place of states: a buffer, or an address on the session's device and a number of rows, or None."""
    cdef _StateRows found = _StateRows.__new__(_StateRows)
    cdef const float[:, ::1] read
    cdef float[:, ::1] written
    if isinstance(states, tuple):
        address, n = states
        found.at = <float *><uintptr_t>address
        found.n = as_int(n, "the number of rows")
        found.on_device = True
    elif states is not None and is_written:
        written = states
        found._written = written
        found.n = <int>written.shape[0]
        if found.n:
            found.at = &written[0, 0]
    elif states is not None:
        read = states
        found._read = read
        found.n = <int>read.shape[0]
        if found.n:
            found.at = <float *>&read[0, 0]
    return found


cdef int use_states(llamac_session *session, _StateRows one, _StateRows other) except -1:
    """Tell a session where the states are that its next eval reads and writes. It cannot read here and write there."""
    cdef llamac_error err
    if one.at is not NULL and other.at is not NULL and one.on_device != other.on_device:
        raise ArgumentError("inputs and hidden states must both be on the device, or neither")
    return check(llamac_states_on_device(session, one.on_device or other.on_device, &err), &err)


cdef class Session


@cython.final
cdef class Chunk:
    """The rows that a device computes. It and the memory that it hands out exist during the call of `forward` only."""

    cdef const llamac_chunk *_ptr

    def __init__(self):
        raise TypeError("evals make chunks")

    cdef const llamac_chunk *_chunk(self) except NULL:
        if self._ptr is NULL:
            raise LlamacError("the chunk has been computed")
        return self._ptr

    @property
    def n_rows(self):
        return self._chunk().n_rows

    @property
    def n_wanted(self):
        """The number of rows that want logits."""
        return self._chunk().n_wanted

    def rows(self):
        """Return token, sequence, position and want_logits of each row as int32. A draft's sequence is its branch."""
        return PyMemoryView_FromMemory(<char *>self._chunk().rows, self.n_rows * <Py_ssize_t>sizeof(llamac_row),
                                       PyBUF_READ)

    def types(self):
        """Return the rows' token types as int32; None: all are 0."""
        cdef const llamac_chunk *chunk = self._chunk()
        if chunk.types is NULL:
            return None
        return PyMemoryView_FromMemory(<char *>chunk.types, self.n_rows * <Py_ssize_t>sizeof(int32_t), PyBUF_READ)

    def logits(self):
        """Return the memory for logits: (n_wanted, vocab_size) of f32. None: only the output norm is wanted."""
        cdef int per_layer = 0
        cdef const llamac_chunk *chunk = self._chunk()
        cdef size_t floats = llamac_stage_width(chunk.session, LLAMAC_STAGE_LOGITS, &per_layer) * <size_t>chunk.n_wanted
        return _floats(chunk.logits, floats) if chunk.logits is not NULL else None

    def inputs(self):
        """Return the hidden states that the rows of an MTP layer or a drafter read: (n_rows, input_width) of f32, or
        their address on the device and their number; None for other rows."""
        cdef const llamac_chunk *chunk = self._chunk()
        if chunk.inputs is NULL:
            return None
        if chunk.states_on_device:
            return <uintptr_t>chunk.inputs, self.n_rows
        return PyMemoryView_FromMemory(<char *>chunk.inputs, _row_bytes(chunk.input_width) * chunk.n_rows, PyBUF_READ)

    def hidden(self):
        """Return the memory for the hidden states of the last rows: (n, hidden_width) of f32, or its address
        on the device and their number; None: they are not wanted."""
        cdef const llamac_chunk *chunk = self._chunk()
        if chunk.hidden is NULL:
            return None
        if chunk.states_on_device:
            return <uintptr_t>chunk.hidden, chunk.n_hidden
        return PyMemoryView_FromMemory(<char *>chunk.hidden, _row_bytes(chunk.hidden_width) * chunk.n_hidden,
                                       PyBUF_WRITE)

    def after_draft(self):
        """Return whether the inputs of an EAGLE-3 head are its own states, after a draft."""
        return self._chunk().after_draft != 0

    def state_layers(self):
        """Return after how many layers the hidden states are the residual stream; None: they are normed outputs."""
        cdef const int *layers = self._chunk().state_layers
        return (layers[0], layers[1], layers[2]) if layers is not NULL else None

    @property
    def is_observed(self):
        """Whether there may be observers."""
        return self._chunk().n_observations > 0

    def observer(self, int stage, int layer):
        """Return the memory for a stage: (n_rows or n_wanted, stage width) of f32; None if nobody observes it."""
        cdef int per_layer = 0
        cdef const llamac_chunk *chunk = self._chunk()
        cdef float *out = llamac_chunk_observer(chunk, stage, layer)
        cdef int rows = chunk.n_wanted if stage in (LLAMAC_STAGE_OUTPUT_NORM, LLAMAC_STAGE_LOGITS) else chunk.n_rows
        if out is NULL:
            return None
        return _floats(out, llamac_stage_width(chunk.session, stage, &per_layer) * <size_t>rows)

    @property
    def cancelled(self):
        """Whether the chunk shall stop: `forward` then raises CancelledError."""
        cdef const int32_t *cancel = self._chunk().cancel
        return cancel is not NULL and cancel[0] != 0

    def session(self):
        """Return (context, KV dtype, numerics) of the session, and whether it belongs to the model's MTP layer."""
        cdef llamac_session_info info
        llamac_session_describe(self._chunk().session, &info)
        return info.context, info.kv_dtype, info.numerics, self._chunk().is_mtp != 0

    def is_of_drafter(self, Model drafter=None):
        """Return whether the chunk is one of this drafter's sessions; None: of any drafter."""
        cdef const llamac_model *of_chunk = self._chunk().drafter
        return of_chunk is not NULL and (drafter is None or of_chunk == drafter._ptr)

    def is_of(self, Session session not None):
        """Return whether the chunk belongs to an eval of this session."""
        return self._chunk().session == session._ptr

    def costs(self):
        """Return the memory that the costs of the pass are added to: (layers, steps, 2) of uint64, nanoseconds and
        bytes (llamac_profile). None: the session does not measure."""
        cdef const llamac_session *session = self._chunk().session
        cdef llamac_step_cost *costs = llamac_costs_of(session)
        if costs is NULL:
            return None
        return PyMemoryView_FromMemory(<char *>costs, <Py_ssize_t>(llamac_layer_count(session) * LLAMAC_N_STEPS
                                                                   * sizeof(llamac_step_cost)), PyBUF_WRITE)

    def places(self):
        """Return where pages hold each layer's keys, values and state, as the fields of llamac_kv_place."""
        cdef const llamac_chunk *chunk = self._chunk()
        cdef llamac_kv_place place
        cdef int i
        found = []
        for i in range(llamac_layer_count(chunk.session)):
            place = llamac_kv_place_of(chunk.session, i)
            found.append((place.group, place.offset, place.head_bytes, place.value_offset, place.state_offset))
        return found

    def tables(
        self, int32_t[::1] table_of not None, int32_t[::1] last_table_of not None, int32_t[::1] sequences not None
    ):
        """Number the sequences of the rows (llamac_chunk_tables). All arrays have n_rows numbers. Return how many."""
        cdef const llamac_chunk *chunk = self._chunk()
        if min(table_of.shape[0], last_table_of.shape[0], sequences.shape[0]) < chunk.n_rows:
            raise ArgumentError(f"the arrays have fewer numbers than the chunk's {chunk.n_rows} rows")
        return llamac_chunk_tables(chunk, &table_of[0], &last_table_of[0], &sequences[0])

    def ends(self, int32_t[::1] ends not None):
        """Write the end of the positions that each row sees without a window (llamac_chunk_ends): n_rows numbers."""
        cdef const llamac_chunk *chunk = self._chunk()
        if ends.shape[0] < chunk.n_rows:
            raise ArgumentError(f"the array has fewer numbers than the chunk's {chunk.n_rows} rows")
        llamac_chunk_ends(chunk, &ends[0])

    def viewpoints(self, int32_t[::1] viewpoints not None):
        """Write the position from which each row sees others (llamac_chunk_viewpoints): n_rows numbers."""
        cdef const llamac_chunk *chunk = self._chunk()
        if viewpoints.shape[0] < chunk.n_rows:
            raise ArgumentError(f"the array has fewer numbers than the chunk's {chunk.n_rows} rows")
        llamac_chunk_viewpoints(chunk, &viewpoints[0])

    def segments(self, unsigned char[::1] segments not None):
        """Write the segments of the rows (llamac_segment), with room for n_rows. Return how many."""
        cdef const llamac_chunk *chunk = self._chunk()
        if <size_t>segments.shape[0] < <size_t>chunk.n_rows * sizeof(llamac_segment):
            raise ArgumentError(f"the array has no room for {chunk.n_rows} segments")
        return llamac_chunk_segments(chunk, <llamac_segment *>&segments[0])

    def page_addresses(self, int sequence, int group, uint64_t[::1] addresses not None):
        """Write the addresses of a sequence's pages of a group, from the first page on; 0: none."""
        cdef const llamac_chunk *chunk = self._chunk()
        if addresses.shape[0]:
            llamac_page_addresses(chunk.session, sequence, group, <int>addresses.shape[0], &addresses[0])


cdef Py_ssize_t _row_bytes(int width):
    return <Py_ssize_t>(<size_t>width * sizeof(float))


cdef object _floats(float *memory, size_t n):
    return PyMemoryView_FromMemory(<char *>memory, <Py_ssize_t>(n * sizeof(float)), PyBUF_WRITE)


cdef llamac_device device_of(object device):
    """The callbacks that call the methods of an object, which whoever uses them must keep alive."""
    return llamac_device(<void *>device, device.most_rows, device.mtp_kv_room, device_alloc, device_free, device_copy,
                         device_read, device_write, device_forward)
