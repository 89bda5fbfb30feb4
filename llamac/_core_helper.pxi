# Evals in helper threads (interrupt.py), on behalf of the threads that wait for them. Part of _core.pyx.

cdef int run_in_helper(Session session, function) except -1:
    """Call a function that computes with a session, so that Ctrl-C can interrupt it."""
    session._check_thread()
    interruptible(partial(_as_helper, session, session._scope, function), session.cancel)
    return 0


def _as_helper(Session session not None, CancelScope scope, function):
    """Call the function in this thread. `scope` is the one that the waiting thread runs, or None."""
    if session._scope is not scope:
        raise BusyError(_IN_USE)
    session._helper = PyThread_get_thread_ident()
    try:
        function()
    finally:
        session._helper = 0
