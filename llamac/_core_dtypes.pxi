# Matrices for Python: dtypes, the quantizer, and GGUF's blocks (csrc/dtype.h, quantize.c, regroup.c).

def matrix_bytes(int dtype, uint64_t rows, uint64_t columns):
    """Return the bytes of a matrix in strips; 0 if there is no such dtype."""
    return llamac_matrix_bytes(dtype, rows, columns)


def dtype_name(int dtype):
    """Return the name of a dtype number, or None."""
    cdef const char *name = llamac_dtype_name(dtype)
    return name.decode() if name is not NULL else None


def dtypes():
    """Return the dtypes of the file: (name, number)."""
    return [(llamac_dtype_name(number).decode(), number) for number in range(1, LLAMAC_N_DTYPES)]


def quantize(int dtype, const float[:, ::1] rows not None, unsigned char[::1] out not None,
             const float[::1] importance=None, const float[:, ::1] feedback=None, str isa=None):
    """Quantize rows (n, columns) to strips (llamac_quantize): matrix_bytes(dtype, n, columns) bytes.

    importance: (columns); feedback: (columns, columns). isa: the kernel set or None. Threads may share a matrix.
    """
    cdef size_t n = <size_t>rows.shape[0], columns = <size_t>rows.shape[1]
    cdef size_t needed = llamac_matrix_bytes(dtype, n, columns)
    cdef const float *importance_ptr = NULL, *feedback_ptr = NULL
    cdef const char *c_isa = PyUnicode_AsUTF8(isa) if isa is not None else NULL
    cdef llamac_error err
    cdef int result
    if n == 0 or columns == 0 or <size_t>out.shape[0] != needed:
        raise ArgumentError(f"the buffer has {out.shape[0]} bytes, {n} x {columns} of dtype {dtype} need {needed}")
    if importance is not None:
        if <size_t>importance.shape[0] != columns:
            raise ArgumentError(f"importance has {importance.shape[0]} numbers, expected {columns}")
        importance_ptr = &importance[0]
    if feedback is not None:
        if <size_t>feedback.shape[0] != columns or <size_t>feedback.shape[1] != columns:
            raise ArgumentError(f"feedback is {feedback.shape[0]} x {feedback.shape[1]}, "
                                f"expected {columns} x {columns}")
        feedback_ptr = &feedback[0, 0]
    with nogil:
        result = llamac_quantize(dtype, &rows[0, 0], n, columns, importance_ptr, feedback_ptr, c_isa, &out[0], &err)
    check(result, &err)


def gguf_row_bytes(int dtype, uint64_t columns):
    """Return the bytes of a row of GGUF blocks; 0 for other dtypes and for columns that are not whole blocks."""
    return llamac_gguf_row_bytes(dtype, columns)


def regroup(int dtype, const unsigned char[:, ::1] blocks not None, uint64_t columns,
            unsigned char[::1] strips not None):
    """Regroup rows of GGUF blocks into strips (llamac_regroup). Return whether all scales are finite."""
    cdef size_t rows = <size_t>blocks.shape[0], size = rows * <size_t>blocks.shape[1]
    cdef llamac_error err
    cdef int result
    if size == 0 or strips.shape[0] == 0:
        raise ArgumentError("there are no rows to regroup")
    with nogil:
        result = llamac_regroup(dtype, &blocks[0, 0], size, rows, columns, &strips[0], <size_t>strips.shape[0], &err)
    return bool(check(result, &err))


def ungroup(int dtype, const unsigned char[::1] strips not None, uint64_t columns,
            unsigned char[:, ::1] blocks not None):
    """Restore rows of GGUF blocks from strips (llamac_ungroup)."""
    cdef size_t rows = <size_t>blocks.shape[0], size = rows * <size_t>blocks.shape[1]
    cdef llamac_error err
    cdef int result
    if size == 0 or strips.shape[0] == 0:
        raise ArgumentError("there are no rows to restore")
    with nogil:
        result = llamac_ungroup(dtype, &strips[0], <size_t>strips.shape[0], rows, columns, &blocks[0, 0], size, &err)
    check(result, &err)
