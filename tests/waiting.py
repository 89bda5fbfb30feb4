"""Waits for what other threads and processes do, without assuming how fast they are."""

from __future__ import annotations

import time
from collections.abc import Callable

from processes import TIMEOUT


def wait_until(condition: Callable[[], object]) -> None:
    """Poll until the condition holds."""
    limit = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.001)
