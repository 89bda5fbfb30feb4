# The core's allocator for this module (mem.h; mem_free frees). Part of _core.pyx.

cdef void *allocate(size_t count, size_t size, const char *purpose) except NULL:
    """Allocate zeroed memory."""
    cdef llamac_error err
    cdef void *memory = mem_alloc(count, size, purpose, &err)
    check(0 if memory else -1, &err)
    return memory


cdef void *allocate_raw(size_t size, const char *purpose) except NULL:
    """Allocate memory with any content."""
    cdef llamac_error err
    cdef void *memory = mem_alloc_huge(size, purpose, &err)
    check(0 if memory else -1, &err)
    return memory


cdef int32_t *more_ids(int32_t *ids, int n, int capacity) except NULL:
    """Replace a list of n ids by a longer one. After an error, the list is what it was."""
    cdef int32_t *grown = <int32_t *>allocate_raw(<size_t>capacity * sizeof(int32_t), "a list of tokens")
    if n:
        memcpy(grown, ids, <size_t>n * sizeof(int32_t))
    mem_free(ids)
    return grown
