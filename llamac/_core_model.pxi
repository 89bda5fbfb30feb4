# The model. Part of _core.pyx.

@cython.final
cdef class Model:
    """A checked model over a buffer that holds a whole flat file, aligned to 64 bytes, as a memory map is."""

    cdef llamac_model *_ptr
    cdef Py_buffer _buffer
    cdef bint _has_buffer, _closing
    cdef int _n_sessions     # open sessions
    cdef llamac_device _callbacks
    cdef PyObject *_device   # of `use_device`. The garbage collector does not see the reference: it would clear the
                             # device before garbage sessions free their pages there
    cdef readonly list borrowed   # (tensor, buffers...) of adapters and replaced tensors, which C reads

    def __init__(self, data):
        if self._has_buffer:
            raise LlamacError("a Model is opened once")
        PyObject_GetBuffer(data, &self._buffer, PyBUF_SIMPLE)
        self._has_buffer = True
        self.borrowed = []
        cdef llamac_error err
        check(llamac_model_open(&self._ptr, self._buffer.buf, <size_t>self._buffer.len, &err), &err)

    cdef void _release(self) noexcept:
        llamac_model_close(&self._ptr)
        Py_CLEAR(self._device)
        if self._has_buffer:
            PyBuffer_Release(&self._buffer)
            self._has_buffer = False

    def __dealloc__(self):
        self._release()

    cdef _check_no_session(self):
        if self._ptr is NULL or self._n_sessions:
            raise LlamacError("a model can be adapted only before its first session")

    def adapt(self, str matrix, int rank, const float[::1] a not None, const float[::1] b not None,
              const float[::1] scales=None):
        """Add a low-rank adapter to a matrix (llamac_model_adapt). Its buffers are used until the model is closed."""
        cdef const float *scales_ptr = NULL
        cdef size_t n_scales = 0
        cdef llamac_error err
        self._check_no_session()
        if scales is not None:
            scales_ptr, n_scales = &scales[0], scales.shape[0]
        check(llamac_model_adapt(self._ptr, PyUnicode_AsUTF8(matrix), rank, &a[0], a.nbytes, &b[0], b.nbytes,
                                 scales_ptr, n_scales, &err), &err)
        self.borrowed.append((matrix, a, b, scales))

    def replace(self, str tensor, int dtype, const unsigned char[::1] data not None):
        """Use other data for a tensor (llamac_model_replace). The buffer is used until the model is closed."""
        cdef llamac_error err
        self._check_no_session()
        check(llamac_model_replace(self._ptr, PyUnicode_AsUTF8(tensor), dtype, &data[0], data.shape[0], &err), &err)
        self.borrowed.append((tensor, data))

    def use_device(self, device):
        """Let sessions open on a device, at most once (llamac_model_use_device). Exceptions of its methods reach the
        caller of the session."""
        cdef llamac_error err
        if self._ptr is NULL:
            raise ClosedError("the model is closed")
        if self._device is NULL:
            self._callbacks = device_of(device)
        check(llamac_model_use_device(self._ptr, &self._callbacks, &err), &err)
        Py_INCREF(device)
        self._device = <PyObject *>device

    @property
    def device(self):
        return <object>self._device if self._device is not NULL else None

    def set_kv_budget(self, size_t budget, size_t device_budget):
        """Limit the bytes of all sessions' KV pages in memory, and of those on the device; 0: no limit."""
        if self._ptr is NULL:
            raise ClosedError("the model is closed")
        llamac_set_kv_budget(self._ptr, budget)
        llamac_set_device_kv_budget(self._ptr, device_budget)

    def set_head_kv_budget(self, size_t budget):
        """Limit the bytes of KV pages that sessions of EAGLE-3 heads hold together on the device; 0: no limit."""
        if self._ptr is NULL:
            raise ClosedError("the model is closed")
        llamac_set_head_kv_budget(self._ptr, budget)

    def kv_bytes(self):
        """Return the bytes of KV pages that the sessions hold. A page that sequences share counts once."""
        if self._ptr is NULL:
            raise ClosedError("the model is closed")
        return llamac_kv_bytes(self._ptr)

    def device_kv_bytes(self):
        """Return the bytes of KV pages that the sessions hold on the device."""
        if self._ptr is NULL:
            raise ClosedError("the model is closed")
        return llamac_device_kv_bytes(self._ptr)

    def check_shift(self):
        """Check that the model's sequences can be shifted (llamac_shift_check)."""
        cdef llamac_error err
        if self._ptr is NULL:
            raise ClosedError("the model is closed")
        check(llamac_shift_check(self._ptr, &err), &err)

    def tables(self):
        """Return the core's checked copy of the file's first bytes, from the header to the tensor table."""
        cdef size_t n = 0
        if self._ptr is NULL:
            raise ClosedError("the model is closed")
        cdef const unsigned char *tables = <const unsigned char *>llamac_model_tables(self._ptr, &n)
        return tables[:n]

    def close(self):
        """Close the model. The buffer is released when the last session is closed."""
        self._closing = True
        if self._n_sessions == 0:
            self._release()

    cdef void _end_session(self) noexcept:
        """Note that a session, or a page, no longer uses the model."""
        self._n_sessions -= 1
        if self._closing and self._n_sessions == 0:
            self._release()

    @property
    def closed(self):
        return self._closing or self._ptr is NULL

    @property
    def released(self):
        """Whether the buffer has been released."""
        return not self._has_buffer
