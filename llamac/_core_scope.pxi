# Calls on a session that can be cancelled. Part of _core.pyx.

@cython.final
cdef class CancelScope:
    """A function call on a session that any thread can cancel, even before it begins. One thread at a time runs it.

    `run` is C: Python raises KeyboardInterrupt only between its own instructions, so the scope is always left.
    """

    cdef Session _session
    cdef int32_t _cancel
    cdef bint _running

    def __init__(self, Session session not None):
        self._session = session

    def run(self, function):
        """Call a function. `cancel` stops the evals of the session in it with CancelledError."""
        if self._running:
            raise BusyError("the stream is in use by another thread")
        if self._session._scope is not None:
            raise BusyError("the session is in use by another stream, in another thread")
        self._running = True
        self._session._scope = self
        try:
            return function()
        finally:
            self._session._scope = None
            self._running = False

    def cancel(self):
        """Cancel the running call and all later ones. Any thread may call this."""
        self._cancel = 1

    @property
    def cancelled(self):
        return self._cancel != 0
