"""Threads that tests may ask for: a build without OpenMP has only one."""

from __future__ import annotations

import pytest

from llamac import _core

needs_threads = pytest.mark.skipif(not _core.has_threads(), reason="this build has no OpenMP: one thread only")


def up_to(wanted: int) -> int:
    """As many threads as are wanted, or 1 if this build has no others."""
    return wanted if _core.has_threads() else 1
