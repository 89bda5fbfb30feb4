# The self-test. Part of _core.pyx.

def selftest_cases():
    """Return (name, SHA-256 of the logits on every machine) of each case, in the order of their indices."""
    cases = []
    cdef llamac_selftest_case test
    while llamac_selftest_at(<size_t>len(cases), &test):
        cases.append((test.name.decode(), test.sha256.decode()))
    return cases


def selftest(int index, *, str isa=None, int threads=1, int chunk=290, int sequences=1):
    """Compute a case (llamac_selftest_options). Returns the SHA-256 of its logits."""
    cdef llamac_error err
    cdef char sha256[LLAMAC_SHA256_DIGITS]
    cdef llamac_selftest_options options = llamac_selftest_options(NULL, threads, chunk, sequences)
    if isa is not None: options.isa = PyUnicode_AsUTF8(isa)
    cdef int result
    with nogil:
        result = llamac_selftest(<size_t>index, &options, sha256, &err)
    check(result, &err)
    return (<const char *>sha256).decode()
