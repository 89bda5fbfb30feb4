# Where the time of a session's evals goes (profile.h). Part of _core.pyx.

def steps():
    """Return the names of the steps of the graph."""
    return tuple(llamac_step_name(i).decode() for i in range(LLAMAC_N_STEPS))


def profile(Session session not None, uint64_t[:, :, ::1] costs not None):
    """Add the costs of a session's evals from now on to an array (layers, steps, 2): nanoseconds and bytes."""
    cdef llamac_error err
    if costs.shape[2] != 2 or not costs.shape[0] * costs.shape[1]:
        raise ArgumentError("costs must have shape (layers, steps, 2)")
    session._enter()
    try:
        check(llamac_profile(session._ptr, <llamac_step_cost *>&costs[0, 0, 0],
                             <size_t>(costs.shape[0] * costs.shape[1]), &err), &err)
        session._costs = costs.base  # the core writes to it
    finally:
        session._busy = False
