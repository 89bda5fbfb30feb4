"""The number of threads in tests: a build without OpenMP has only one."""

from __future__ import annotations

import pytest

from llamac import _core

needs_threads = pytest.mark.skipif(not _core.has_threads(), reason="this build has no OpenMP: one thread only")


def up_to(wanted: int) -> int:
    """`wanted`, or 1 in a build without threads."""
    return wanted if _core.has_threads() else 1
