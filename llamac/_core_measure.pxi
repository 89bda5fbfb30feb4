# Measuring the machine. Part of _core.pyx.

def measure_read(const float[::1] block not None, int times, *, int threads=1, int streams=1, str isa=None):
    """Read a block `times` times, as 1, 2 or 4 concurrent streams per thread. Returns the bytes read."""
    cdef llamac_error err
    cdef uint64_t read = 0
    cdef const char *c_isa = PyUnicode_AsUTF8(isa) if isa is not None else NULL
    cdef const float *numbers = &block[0] if block.shape[0] else NULL
    cdef int result
    with nogil:
        result = llamac_measure_read(numbers, <size_t>block.shape[0], times, threads, streams, c_isa, &read, &err)
    check(result, &err)
    return read


def measure_multiply(int dtype, int passes, *, int numerics=0, int threads=1, str isa=None):
    """Run the multiply-adds of products of many rows with weights of a dtype. Returns their number."""
    cdef llamac_error err
    cdef uint64_t count = 0
    cdef const char *c_isa = PyUnicode_AsUTF8(isa) if isa is not None else NULL
    cdef int result
    with nogil:
        result = llamac_measure_multiply(dtype, numerics, passes, threads, c_isa, &count, &err)
    check(result, &err)
    return count
