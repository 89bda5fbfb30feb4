# What a session can need, for plans. Included by _core.pyx.

def memory_limits(Session session not None, int length):
    """Return the most bytes of activations, and of KV pages of one sequence that grows to `length` positions."""
    session._check_open()
    return session_scratch_limit(session._ptr), session_pages_limit(session._ptr, length)
