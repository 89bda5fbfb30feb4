"""Tells a manager over HTTP that a server is ready."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from llamac.errors import ArgumentError

LOGGER = logging.getLogger("llamac.server")
TIMEOUT_S = 5.0
WAITS_S = (1.0, 2.0, 4.0)  # between the attempts


def check_url(url: str) -> None:
    """Refuse what is not the address of a web server.

    Raises:
        ArgumentError: If it is not one.
    """
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        is_usable = is_usable and "@" not in parts.netloc  # which would need authentication
    except ValueError:
        is_usable = False
    if not is_usable:
        raise ArgumentError(f"--ready-callback is {url!r}, expected http://HOST/PATH or https://HOST/PATH")


def call_back(url: str, document: Mapping[str, object], waits: Sequence[float] = WAITS_S) -> threading.Thread:
    """Post a document in a thread that ends with the process. What fails is tried again, then logged.

    Args:
        url: Where to.
        document: What is sent, as JSON.
        waits: Seconds between the attempts.

    Returns:
        The thread.
    """
    thread = threading.Thread(target=_call, args=(url, document, waits), name="llamac-ready", daemon=True)
    thread.start()
    return thread


def _call(url: str, document: Mapping[str, object], waits: Sequence[float]) -> None:
    from urllib.request import ProxyHandler, Request, build_opener

    # a manager is reached as its address says, and not through a proxy that this machine has for other things
    opener = build_opener(ProxyHandler({}))
    request = Request(url, json.dumps(document).encode(), {"content-type": "application/json"}, method="POST")
    for wait in (*waits, None):
        try:
            with opener.open(request, timeout=TIMEOUT_S):
                return
        except Exception as error:  # also what urllib does not wrap; the server goes on in every case
            reason = str(error) or type(error).__name__
        if wait is not None:
            time.sleep(wait)
    fields = {"host": urlsplit(url).hostname, "attempts": len(waits) + 1, "reason": reason}
    LOGGER.error("the manager could not be told that the server is ready", extra={"fields": fields})
