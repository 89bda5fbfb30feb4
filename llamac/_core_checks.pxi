# Part of _core.pyx: errors of C as exceptions, and Python's numbers as C's.

_ERRORS = {
    LLAMAC_NO_MEMORY: OutOfMemoryError, LLAMAC_BAD_ARGUMENT: ArgumentError, LLAMAC_BAD_MODEL: ModelError,
    LLAMAC_CONTEXT_FULL: ContextFullError, LLAMAC_CANCELLED: CancelledError, LLAMAC_UNSUPPORTED: UnsupportedError,
}

cdef int check(int result, llamac_error *err) except -1:
    """Raise the error of a C call that returned a negative number; otherwise return the result."""
    if result < 0:
        if err.code == LLAMAC_DEVICE_FAILED:
            raise _raised.__dict__.pop("error")
        raise _ERRORS.get(err.code, LlamacError)(err.message.decode("utf-8", "replace"))
    return result


cdef int as_int(object number, str name) except? -1:
    """Convert an integer to a C int. Raises ArgumentTypeError for other types, ArgumentError if it does not fit."""
    try:
        return to_int(number, name)
    except OverflowError:
        raise ArgumentError(f"{name} is {number}, which is out of range") from None
