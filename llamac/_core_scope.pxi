# Calls on a session that can be cancelled. Part of _core.pyx.

@cython.final
cdef class CancelScope:
    """A function call on a session that any thread can cancel, even before it begins. One thread at a time runs it.

    Scopes are entered and left in C: Python raises KeyboardInterrupt only between its own instructions, so they are
    always left.
    """

    cdef Session _session
    cdef int32_t _cancel
    cdef bint _running

    def __init__(self, Session session not None):
        self._session = session

    cdef int _enter(self) except -1:
        if self._running:
            raise BusyError("the stream is in use by another thread")
        if self._session._scope is not None:
            raise BusyError("the session is in use by another stream, in another thread")
        self._running = True
        self._session._scope = self
        return 0

    cdef void _leave(self) noexcept:
        self._session._scope = None
        self._running = False

    def run(self, function):
        """Call a function. `cancel` stops the evals of the session in it with CancelledError."""
        self._enter()
        try:
            return function()
        finally:
            self._leave()

    def cancel(self):
        """Cancel the running call and all later ones. Any thread may call this."""
        self._cancel = 1

    @property
    def cancelled(self):
        return self._cancel != 0
