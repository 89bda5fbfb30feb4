# Where the time of a session's evals goes (profile.h). Part of _core.pyx.

def steps():
    """Return the names of the steps of the graph."""
    return tuple(llamac_step_name(i).decode() for i in range(LLAMAC_N_STEPS))


def profile_start(Session session not None):
    """Begin to measure the evals of a session, or begin again at 0."""
    cdef llamac_error err
    session._enter()
    try:
        check(llamac_profile_start(session._ptr, &err), &err)
    finally:
        session._busy = False


def profile_costs(Session session not None, uint64_t[:, :, ::1] costs not None):
    """Copy the costs of a session so far to an array (layers, steps, 2): nanoseconds and bytes."""
    session._enter()
    try:
        llamac_profile_costs(session._ptr, <llamac_step_cost *>&costs[0, 0, 0])
    finally:
        session._busy = False
