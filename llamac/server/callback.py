"""The ready callback: tells a manager over HTTP that a server is ready."""

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
WAITS_S = (1.0, 2.0, 4.0)  # delays between the attempts


def check_url(url: str) -> None:
    """Check that a URL is the address of a web server.

    Raises:
        ArgumentError: If it is not.
    """
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        is_usable = is_usable and "@" not in parts.netloc  # credentials are not supported
    except ValueError:
        is_usable = False
    if not is_usable:
        raise ArgumentError(f"--ready-callback is {url!r}, expected http://HOST/PATH or https://HOST/PATH")


def call_back(url: str, document: Mapping[str, object], waits: Sequence[float] = WAITS_S) -> threading.Thread:
    """Post a document in a daemon thread. Failures are retried, then logged.

    Args:
        url: The URL to post to.
        document: The document, which is sent as JSON.
        waits: Seconds between the attempts.

    Returns:
        The thread.
    """
    thread = threading.Thread(target=_call, args=(url, document, waits), name="llamac-ready", daemon=True)
    thread.start()
    return thread


def _call(url: str, document: Mapping[str, object], waits: Sequence[float]) -> None:
    from urllib.request import ProxyHandler, Request, build_opener

    # connect directly: a proxy that is configured on this machine is for other purposes
    opener = build_opener(ProxyHandler({}))
    request = Request(url, json.dumps(document).encode(), {"content-type": "application/json"}, method="POST")
    for wait in (*waits, None):
        try:
            with opener.open(request, timeout=TIMEOUT_S):
                return
        except Exception as error:  # including errors that urllib does not wrap; the server continues in any case
            reason = str(error) or type(error).__name__
        if wait is not None:
            time.sleep(wait)
    fields = {"host": urlsplit(url).hostname, "attempts": len(waits) + 1, "reason": reason}
    LOGGER.error("could not notify the manager that the server is ready", extra={"fields": fields})
