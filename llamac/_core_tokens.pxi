# The token ids of a session's sequences, which the core does not keep. Part of _core.pyx.

@cython.final
cdef class _SequenceTokens:
    """The token at each position of each sequence, and the positions that shifts have moved. C knows the lengths."""

    cdef int _n_sequences, _context
    cdef int32_t **_ids          # per sequence
    cdef int *_capacities        # per sequence: the length of its _ids
    cdef int *_shifts            # per sequence: 1 + its first position that a shift has moved; 0: none

    cdef int _open(self, int n_sequences, int context) except -1:
        """Begin with empty sequences of up to `context` tokens. With a context of 0, no token is stored."""
        cdef size_t n = <size_t>n_sequences
        self._ids = <int32_t **>allocate(n, sizeof(int32_t *), "the sequences' lists of tokens")
        self._capacities = <int *>allocate(n, sizeof(int), "the lengths of lists of tokens")
        self._shifts = <int *>allocate(n, sizeof(int), "the shifts of sequences")
        self._n_sequences, self._context = n_sequences, context
        return 0

    cdef void _free(self) noexcept:
        cdef int i
        for i in range(self._n_sequences):
            mem_free(self._ids[i])
        self._n_sequences = 0
        mem_free(self._ids)
        mem_free(self._capacities)
        mem_free(self._shifts)
        self._ids, self._capacities, self._shifts = NULL, NULL, NULL

    def __dealloc__(self):
        self._free()

    cdef int _reserve(self, int sequence, int position) except -1:
        """Make room for the token at a position. Ignores positions that the core will refuse."""
        cdef int capacity
        if not (0 <= sequence < self._n_sequences and self._capacities[sequence] <= position < self._context):
            return 0
        capacity = min(self._context, max(position + 1, 64, 2 * self._capacities[sequence]))
        self._ids[sequence] = more_ids(self._ids[sequence], self._capacities[sequence], capacity)
        self._capacities[sequence] = capacity
        return 0

    cdef void _store(self, const llamac_row *rows, int n) noexcept:
        """Store the tokens of rows whose positions are reserved."""
        cdef int i
        if self._context == 0: return
        for i in range(n):
            self._ids[rows[i].sequence][rows[i].position] = rows[i].token

    cdef list _list(self, int sequence, int length):
        cdef int i
        return [self._ids[sequence][i] for i in range(length)]

    cdef int _n_unmoved(self, int sequence, int length) noexcept:
        """Return how many of a sequence's positions precede the first one that a shift has moved."""
        cdef int shift = self._shifts[sequence]
        return shift - 1 if shift else length

    cdef void _set_shift(self, int sequence, int shift, int length) noexcept:
        """Record the first position that a shift has moved, plus 1, if the sequence is longer than that."""
        self._shifts[sequence] = shift if shift <= length else 0

    cdef void _truncate(self, int sequence, int length) noexcept:
        self._set_shift(sequence, self._shifts[sequence], length)

    cdef void _remove(self, int sequence, int first, int last, int length) noexcept:
        """Move the tokens from position `last` on to `first`, as llamac_shift does. `length`: before it."""
        cdef int32_t *ids = self._ids[sequence]
        memmove(ids + first, ids + last, <size_t>(length - last) * sizeof(int32_t))
        self._set_shift(sequence, 1 + min(first, self._n_unmoved(sequence, length)), length - (last - first))

    cdef void _copy(self, int target, _SequenceTokens source, int sequence, int length) noexcept:
        """Make a sequence, whose positions are reserved, equal to the first `length` positions of another one."""
        if length:
            memmove(self._ids[target], source._ids[sequence], <size_t>length * sizeof(int32_t))
        self._set_shift(target, source._shifts[sequence], length)
