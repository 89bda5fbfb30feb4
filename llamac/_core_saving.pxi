# Pages of sequences, to save and to restore them. Part of _core.pyx.

@cython.final
@cython.no_gc_clear   # as Session
cdef class Page:
    """A page of the KV cache. While the object exists, the page takes memory and its content does not change."""

    cdef Model _model
    cdef llamac_page *_ptr
    cdef bint _is_new   # may be written
    cdef bytearray _staged   # of a page on a device: a copy of its content in host memory after `view`; or None

    def __init__(self):
        raise TypeError("hold_page and take_page make pages")

    def __getbuffer__(self, Py_buffer *view, int flags):
        cdef size_t n = 0
        cdef void *data = llamac_page_data(self._ptr, &n)
        if data is NULL:
            raise BufferError("the page is on a device: use view()")
        PyBuffer_FillInfo(view, self, data, <Py_ssize_t>n, not self._is_new, flags)

    def __dealloc__(self):
        if self._ptr is NULL:
            return
        llamac_drop_page(self._ptr)
        self._model._end_session()

    def view(self):
        """Return the content. A new page can be written until it is restored. Of a page on a device: a copy, which
        goes to the device when the page is restored."""
        cdef llamac_error err
        cdef size_t n = 0
        if llamac_page_data(self._ptr, &n) is not NULL:
            return memoryview(self)
        if self._staged is None:
            staged = bytearray(n)
            if not self._is_new:
                check(llamac_read_page(self._ptr, <char *>staged, &err), &err)
            self._staged = staged
        return memoryview(self._staged) if self._is_new else memoryview(self._staged).toreadonly()

    cdef int _write_staged(self) except -1:
        """Write the content of a new page, if it was viewed, to the device."""
        cdef llamac_error err
        if self._is_new and self._staged is not None:
            check(llamac_write_page(self._ptr, <char *>self._staged, &err), &err)
        return 0

    @property
    def nbytes(self):
        cdef size_t n = 0
        llamac_page_data(self._ptr, &n)
        return n

    @property
    def address(self):
        """Equal for the same page."""
        return <size_t>self._ptr


cdef Page new_page(Session session, llamac_page *ptr, bint is_new):
    cdef Page page = Page.__new__(Page)
    page._model, page._ptr, page._is_new = session._model, ptr, is_new
    page._model._n_sessions += 1   # a page keeps its model open, as a session does
    return page


def kv_groups(Session session not None):
    """Return (window, n_kv_heads, head_dim, page bytes) of each group of layers."""
    cdef llamac_group info
    session._check_open()
    found = []
    while llamac_group_at(session._ptr, <int>len(found), &info):
        found.append((info.window, info.n_kv_heads, info.head_dim, info.page_bytes))
    return found


def hold_page(Session session not None, int sequence, int group, int index):
    """Return the page of a group that holds the positions of a sequence from `index` pages on, or the state with this
    index (llamac_hold_page)."""
    cdef llamac_error err
    session._enter()
    try:
        return _hold_page(session, sequence, group, index, &err)
    finally:
        session._busy = False


cdef Page _hold_page(Session session, int sequence, int group, int index, llamac_error *err):
    cdef llamac_page *ptr = llamac_hold_page(session._ptr, sequence, group, index, err)
    if ptr is NULL:
        check(-1, err)
    return new_page(session, ptr, False)


def take_page(Session session not None, int group):
    """Return a new page of a group, to fill (llamac_take_page)."""
    cdef llamac_error err
    session._check_open()
    cdef llamac_page *ptr = llamac_take_page(session._ptr, group, &err)
    if ptr is NULL:
        check(-1, &err)
    return new_page(session, ptr, True)


def copy_page(Session session not None, int group, Page page not None, int first, int last,
              unsigned char[::1] out not None):
    """Copy the positions [first, last) of a page; the rest of `out` becomes 0 (llamac_copy_page)."""
    cdef llamac_error err
    cdef size_t n = 0
    session._check_open()
    llamac_page_data(page._ptr, &n)
    if <size_t>out.shape[0] != n:
        raise ArgumentError(f"the buffer has {out.shape[0]} bytes, but the page has {n}")
    check(llamac_copy_page(session._ptr, group, page._ptr, first, last, &out[0], &err), &err)


def first_positions(Session session not None, int sequence):
    """Return the first position that each group of layers holds of a sequence."""
    session.length(sequence)  # checks the arguments
    return [llamac_first_position(session._ptr, sequence, group) for group in range(len(kv_groups(session)))]


def state_lengths(Session session not None, int sequence):
    """Return after how many positions a sequence has states of recurrent layers, the latest first."""
    session.length(sequence)  # checks the arguments
    found = []
    while (length := llamac_state_length(session._ptr, sequence, <int>len(found))) >= 0:
        found.append(length)
    return found


def snapshot(Session session not None):
    """Return what the sequences hold now, and the logits of the last row as bytes or None.

    For each sequence: its ids as bytes of int32, 1 + its first position that a shift has moved or 0, the first position
    of each group, the pages of each group, and `state_lengths`. The session can go on: it copies held pages before it
    changes them.
    """
    cdef llamac_error err
    cdef int i, g, length, start, positions, n_groups
    cdef llamac_session_info info
    session._enter()
    try:
        llamac_session_describe(session._ptr, &info)
        positions = info.page_positions
        heads = [kv_heads for _, kv_heads, *_ in kv_groups(session)]
        n_groups = <int>len(heads)
        found = []
        for i in range(session.n_sequences):
            length = llamac_length(session._ptr, i)
            states = state_lengths(session, i)
            ids = (<char *>session._tokens._ids[i])[:<size_t>length * sizeof(int32_t)] if length else b""
            starts, pages = [], []
            for g in range(n_groups):
                start = llamac_first_position(session._ptr, i, g)
                starts.append(start)
                end = (length + positions - 1) // positions if heads[g] else len(states)
                pages.append([_hold_page(session, i, g, p, &err) for p in range(start // positions, end)])
            found.append((ids, session._tokens._shifts[i], starts, pages, states))
        logits = (<char *>session._logits)[:<size_t>session.vocab_size * sizeof(float)] if session._has_logits else None
        return found, logits
    finally:
        session._busy = False


cdef const int32_t *first_of(const int32_t[::1] numbers) except? NULL:
    """The address of the first number; NULL if there is none."""
    return &numbers[0] if numbers.shape[0] else NULL


@cython.final
cdef class _SequenceContent:
    """What `restore` gives a sequence."""

    cdef int _sequence, _shift
    cdef const int32_t[::1] _ids, _starts
    cdef list _pages
    cdef llamac_page **_pointers
    cdef int32_t *_lengths
    cdef size_t _n_pages, _n_states

    def __init__(self, int sequence, const int32_t[::1] ids not None, const int32_t[::1] starts not None,
                 list pages not None, int shift, list earlier not None):
        """Describe the content of a sequence.

        Args:
            sequence: The sequence's index.
            ids: The tokens.
            starts: The first position of each group.
            pages: Those of each group in order. Those of recurrent layers are the state after all ids, then the states
                of `earlier`.
            shift: 1 + the first position that a shift has moved, or 0.
            earlier: The lengths of earlier states of recurrent layers, the latest first (llamac_restore_states).
        """
        cdef size_t i, n = <size_t>len(pages)
        self._n_states = <size_t>len(earlier)
        if self._n_states > n:
            raise ArgumentError(f"there are {self._n_states} earlier states, but {n} pages")
        self._n_pages = n - self._n_states
        self._sequence, self._ids, self._starts, self._pages, self._shift = sequence, ids, starts, pages, shift
        self._pointers = <llamac_page **>allocate(n + 1, sizeof(llamac_page *), "a list of pages")
        self._lengths = <int32_t *>allocate(self._n_states + 1, sizeof(int32_t), "the lengths of states")
        for i in range(n):
            self._pointers[i] = (<Page?>pages[i])._ptr
        for i in range(self._n_states):
            self._lengths[i] = earlier[i]

    def __dealloc__(self):
        mem_free(self._pointers)
        mem_free(self._lengths)

    cdef int _prepare(self, Session session) except -1:
        """Do all that can fail: check the content, make room for its ids, and copy its pages to a device."""
        cdef llamac_error err
        cdef Page page
        cdef int length = <int>self._ids.shape[0]
        cdef const int32_t *starts = first_of(self._starts)
        if self._starts.shape[0] != len(kv_groups(session)):
            raise ArgumentError(f"there are {self._starts.shape[0]} first positions, expected one per group of layers")
        for page in self._pages:
            if page._model is not session._model:
                raise ArgumentError("a page belongs to another model")
        check(llamac_check_restore(session._ptr, self._sequence, length, starts, self._pointers, self._n_pages,
                                   self._lengths, self._n_states, &err), &err)
        if length:
            session._tokens._reserve(self._sequence, length - 1)
        for page in self._pages:
            page._write_staged()
        return 0

    cdef int _install(self, Session session) except -1:
        """Replace the content of the sequence, after `_prepare`."""
        cdef llamac_error err
        cdef Page page
        cdef int length = <int>self._ids.shape[0]
        check(llamac_restore(session._ptr, self._sequence, length, first_of(self._starts), self._pointers,
                             self._n_pages, &err), &err)
        check(llamac_restore_states(session._ptr, self._sequence, self._lengths, self._pointers + self._n_pages,
                                    self._n_states, &err), &err)
        for page in self._pages:
            page._is_new, page._staged = False, None
        if length:
            memcpy(session._tokens._ids[self._sequence], &self._ids[0], <size_t>length * sizeof(int32_t))
        session._tokens._set_shift(self._sequence, self._shift, length)
        return 0


def restore(Session session not None, list contents not None, const float[::1] logits=None):
    """Replace the content of sequences (llamac_restore) and the logits for `sample`. On failure nothing changes.

    Args:
        session: The session.
        contents: For each of some sequences the arguments of `_SequenceContent`.
        logits: Those of the last row. Default: there are none.
    """
    cdef _SequenceContent content
    session._enter_to_change()
    try:
        if logits is not None and logits.shape[0] != session.vocab_size:
            raise ArgumentError(f"there are {logits.shape[0]} logits, expected {session.vocab_size}")
        found = [_SequenceContent(*arguments) for arguments in contents]
        for content in found:
            content._prepare(session)
        session.changes += 1
        for content in found:
            content._install(session)
        session._has_logits = logits is not None
        if logits is not None:
            memcpy(session._logits, &logits[0], <size_t>session.vocab_size * sizeof(float))
    finally:
        session._busy = False


def held_bytes(Session session not None):
    """Return the bytes of the pages that the sequences hold. A page that several hold counts once."""
    session._enter()
    try:
        return llamac_held_bytes(session._ptr)
    finally:
        session._busy = False
