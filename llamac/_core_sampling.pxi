# Sampling: settings and draws. Part of _core.pyx.

@cython.final
cdef class Sampling:
    """Checked settings of a draw (llamac_sampling)."""

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
    """Draw a token id from logits (n)."""
    cdef llamac_error err
    cdef int n = <int>logits.shape[0], token
    if n == 0:
        raise ArgumentError("there are no logits to sample from")
    cdef bytearray scratch = bytearray(<size_t>n * LLAMAC_SAMPLE_SCRATCH)
    cdef char *c_scratch = scratch
    with nogil:
        token = llamac_sample(&logits[0], n, &sampling._c, position, c_scratch, &err)
    return check(token, &err)


def sample_rows(const float[:, ::1] logits not None, int n, list samplings not None, list positions not None):
    """Draw a token id from the first n logits of each row (rows, width), without the GIL.

    Args:
        samplings: A Sampling for each row.
        positions: The position of each row's draw.
    """
    cdef int rows = <int>logits.shape[0], i
    if len(samplings) != rows or len(positions) != rows:
        raise ArgumentError(f"{rows} rows of logits need as many samplings and positions")
    if not 1 <= n <= logits.shape[1]:
        raise ArgumentError(f"cannot sample from {n} of {logits.shape[1]} logits")
    cdef llamac_error err
    cdef int token = 0
    cdef llamac_sampling *settings = <llamac_sampling *>PyMem_Malloc(max(rows, 1) * sizeof(llamac_sampling))
    cdef uint64_t *places = <uint64_t *>PyMem_Malloc(max(rows, 1) * sizeof(uint64_t))   # then the tokens
    cdef char *scratch = <char *>PyMem_Malloc(<size_t>n * LLAMAC_SAMPLE_SCRATCH)
    try:
        if settings is NULL or places is NULL or scratch is NULL:
            raise OutOfMemoryError(f"no memory to sample from {n} logits")
        for i in range(rows):
            settings[i] = (<Sampling?>samplings[i])._c
            places[i] = positions[i]
        with nogil:
            for i in range(rows):
                token = llamac_sample(&logits[i, 0], n, &settings[i], places[i], scratch, &err)
                if token < 0:
                    break
                places[i] = <uint64_t>token
        check(token, &err)
        return [places[i] for i in range(rows)]
    finally:
        PyMem_Free(settings)
        PyMem_Free(places)
        PyMem_Free(scratch)
