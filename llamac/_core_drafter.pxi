# Sessions of drafters. C reads the memory of the session that they draft for, their trunk. Part of _core.pyx.

cdef llamac_session *draft_for(Session drafter, Session trunk) except NULL:
    """Record the trunk of a session that is being opened."""
    trunk._check_open()
    drafter._trunk, drafter._trunk_ptr = trunk, trunk._ptr
    return trunk._ptr


cdef llamac_model *reader_of(Model head) except NULL:
    """Return the EAGLE-3 head that reads the layer states of a session that is being opened."""
    if head._closing or head._ptr is NULL:
        raise ClosedError("the draft model is closed")
    return head._ptr


cdef void count_session(Model model, Session trunk) noexcept:
    """Note that a session uses a model and the model of its trunk, if it has one, until `end_session`."""
    model._n_sessions += 1
    if trunk is not None: trunk._model._n_sessions += 1   # a device has the pages of an EAGLE-3 head in its pool


cdef void end_session(Model model, Session trunk) noexcept:
    model._end_session()
    if trunk is not None: trunk._model._end_session()


cdef int enter_with_trunk(Session session) except -1:
    """Reserve a session, and its trunk if it has one, for this thread, until `leave_with_trunk`."""
    cdef Session trunk = session._trunk
    session._enter_to_change()
    try:
        if trunk is not None:
            trunk._enter()
            if trunk._ptr is not session._trunk_ptr:  # exchanged since then
                trunk._busy = False
                raise ClosedError("the drafter belongs to a session that has moved: open another one")
    except BaseException:
        session._busy = False
        raise
    return 0


cdef void leave_with_trunk(Session session) noexcept:
    """Release what `enter_with_trunk` has reserved."""
    session._busy = False
    if session._trunk is not None:
        session._trunk._busy = False
